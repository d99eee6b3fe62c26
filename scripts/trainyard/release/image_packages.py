"""List the Python packages of an image without reading its layers: from a container, or by its SBOM at a registry."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from packaging.utils import canonicalize_name

from trainyard.common.docker_engine import Engine
from trainyard.common.errors import UserError
from trainyard.oci import inventory, probe_runner
from trainyard.spec.naming import LABELS


@dataclass(frozen=True)
class ImagePackages:
    """Hold the Python packages of an image.

    Attributes:
        target: by its label; empty if it has none.
        python: canonical name -> version, with its local part.
    """

    reference: str
    target: str
    python: Mapping[str, str]

    @property
    def name(self) -> str:
        """Return the target, else the reference: what waivers and messages name."""
        return self.target or self.reference


def find(engine: Engine, reference: str) -> ImagePackages:
    """Return the packages of a local image, or else of one at a registry by its SBOM.

    Raises:
        UserError: there is neither, or the image at the registry has no SBOM.
        StepFailed: the Python of a local image failed.
    """
    if local := engine.existing_image(reference):
        try:
            packages = probe_runner.probe(engine, str(local.id)).packages
        except probe_runner.NoPython:
            packages = ()
        versions = {str(canonicalize_name(one.name)): one.version for one in packages}
        return ImagePackages(reference, str(local.labels.get(f"{LABELS}.target") or ""), versions)
    image = inventory.remote(reference)
    if image.listed is None:
        raise UserError(f"{reference} has no SBOM, which lists its packages: 'docker pull' it first")
    versions = {name: package.version for name, package in image.listed[0].items()}
    return ImagePackages(reference, image.labels.get(f"{LABELS}.target", ""), versions)
