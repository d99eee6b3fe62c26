"""The target that is built in place of one whose base is out of reach.

An upstream nightly image cannot be bootstrapped. Its fallback is an image of released versions under another name, and
is never promoted.
"""

from __future__ import annotations

from trainyard.common import settings
from trainyard.image import base_image
from trainyard.spec.model import IMAGES, Spec, catalogue


def of(spec: Spec) -> Spec | None:
    """The fallback of a target of the catalogue; None if it has none."""
    if spec.folder.parent != IMAGES:
        return None
    return next((one for one in catalogue(spec.context) if one.fallback_for == spec.target), None)


def choose(spec: Spec) -> tuple[Spec, str]:
    """The target to build: ``spec``, or its fallback if neither the engine nor a registry has its base.

    Returns:
        That, and why it is not ``spec``; empty if it is. A base that was set with ``TRAINYARD_BASE`` has no fallback.
    """
    if spec.base_spec().bootstrap or settings.variable("BASE"):
        return spec, ""
    found = of(spec)
    reference = spec.base_contents.reference if spec.base_contents else spec.base_spec().image
    reason = base_image.unreachable(reference, spec.context) if found else ""
    if found is None or not reason:
        return spec, ""
    return found, f"base {reference} of {spec.target} is unreachable ({reason}): building {found.target} in its place"


def note(spec: Spec) -> str:
    """What an image of ``spec`` is instead of what it is a fallback for; empty if it is none."""
    if not spec.fallback_for:
        return ""
    day = f" on {spec.day[:4]}-{spec.day[4:6]}-{spec.day[6:]}" if spec.day else ""
    return (
        f"this is not {spec.fallback_for}: it has {spec.framework.name} {spec.version}, the newest release"
        f"{day}; its name is {spec.target}, and it is never promoted"
    )
