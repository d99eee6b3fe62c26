"""Say what is pushed and audited of a target or a repository, by its spec."""

from __future__ import annotations

from trainyard.image import fallback, local_run, recipes
from trainyard.release.publish import Source
from trainyard.release.vulnerabilities import Pins, public_version
from trainyard.spec.model import Spec, each_platform
from trainyard.spec.naming import NAME, candidate_tag


def of(spec: Spec) -> Source:
    """Return the source of the images of a spec."""
    in_place = fallback.of(spec)
    name = in_place.local_name if in_place else ""
    return Source(recipes.named(spec), spec.context, spec.architecture, spec.folder, name)


def check_own(spec: Spec, *, all_platforms: bool) -> None:
    """Raise a UserError if a local image that would be pushed is another repository's of the same name."""
    for platform in each_platform(spec) if all_platforms else [spec]:
        names = f"{NAME}:{platform.local_name}", candidate_tag(platform.local_name)
        if image := next(filter(None, map(spec.context.engine.find, names)), None):
            local_run.check_own(platform, image)


def pins(spec: Spec) -> Pins:
    """Return the packages that a spec is locked for, as advisories name their versions."""
    locked = recipes.locked_versions(spec)
    return {name: {public_version(version) for version in versions} for name, versions in locked.items()}
