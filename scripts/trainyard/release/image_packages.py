"""List the packages of an image without reading its layers: from a container of it, or by its SBOM at a registry."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

from packaging.utils import canonicalize_name

from trainyard.common.errors import UserError
from trainyard.oci import docker_engine, inventory, probe_runner
from trainyard.oci.attached_sbom import InstalledPackage
from trainyard.sandbox.containers import files_of
from trainyard.spec.naming import LABELS

#: Where dpkg keeps its list, and where the distribution is named; /etc/os-release is a link in Debian's images.
_STATUS = "/var/lib/dpkg/status"
_RELEASES = ("/usr/lib/os-release", "/etc/os-release")


@dataclass(frozen=True)
class ImagePackages:
    """Hold the packages of an image.

    Attributes:
        digest: of the image, not of an index.
        target: by its label; empty if it has none.
        debian: name -> package.
        release: the fields of os-release that are known.
        listed: canonical name -> version of the Python packages, if an SBOM lists them.
    """

    reference: str
    digest: str
    target: str
    debian: Mapping[str, InstalledPackage]
    release: Mapping[str, str]
    listed: Mapping[str, str] | None = None

    @property
    def name(self) -> str:
        """Return the target, else the reference: what waivers and messages name."""
        return self.target or self.reference

    @cached_property
    def python(self) -> Mapping[str, str]:
        """Return canonical name -> version, with its local part, of the Python packages; read once of a local image.

        Raises:
            StepFailed: the Python of a local image failed.
        """
        if self.listed is not None:
            return self.listed
        try:
            packages = probe_runner.probe(self.digest).packages
        except probe_runner.NoPython:
            packages = ()
        return {str(canonicalize_name(one.name)): one.version for one in packages}


def of_host(reference: str) -> ImagePackages | None:
    """Return the packages of a local image; None if there is no such image, or no engine is running."""
    image = docker_engine.existing_image(reference)
    if image is None:
        return None
    files = files_of(image, _STATUS, *_RELEASES)
    texts = {path: content.decode("utf-8", "replace") for path, content in files.items()}
    return ImagePackages(
        reference,
        str(image.id),
        str(image.labels.get(f"{LABELS}.target") or ""),
        {one.name: one for one in inventory.debian_packages(texts.get(_STATUS, ""))},
        inventory.os_release(next((texts[path] for path in _RELEASES if path in texts), "")),
    )


def find(reference: str) -> ImagePackages:
    """Return the packages of a local image, or else of one at a registry by its SBOM.

    Raises:
        UserError: there is neither, or the image at the registry has no SBOM.
    """
    if local := of_host(reference):
        return local
    image = inventory.remote(reference)
    if image.listed is None:
        raise UserError(f"{reference} has no SBOM, which lists its packages: 'docker pull' it first")
    python, debian = image.listed
    distribution = next((package.distribution for package in debian.values() if package.distribution), "")
    identifier, _, version = distribution.partition("-")
    return ImagePackages(
        reference,
        image.digest,
        image.labels.get(f"{LABELS}.target", ""),
        debian,
        {"ID": identifier, "VERSION_ID": version},
        {name: package.version for name, package in python.items()},
    )
