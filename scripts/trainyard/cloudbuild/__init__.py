"""Cloud Build: pipelines rendered from the specs, what their steps do, and an executor that runs a build locally."""
