"""From a spec to an image: plan, Dockerfile, locks, base, build, smoke test."""
