"""The contents of an image, without pulling it: from its record, its labels, or its installed Python packages."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import docker.errors
from docker.models.images import Image
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from trainyard.common.errors import StepFailed, UserError
from trainyard.oci import docker_engine, image_index, probe_runner
from trainyard.oci.reference import Reference
from trainyard.oci.registry import Manifest, Repository
from trainyard.sandbox.containers import files_of
from trainyard.spec.model import Spec
from trainyard.spec.naming import LABELS

#: Path of the record of its contents in every image that Trainyard builds.
RECORD = "/opt/trainyard/image.json"

#: A spec's accelerator -> the device in Contents.
_DEVICES = {"nvidia": "gpu", "tpu": "tpu", "none": "cpu"}

#: Packages that determine the device that a framework was built for, by canonical name.
_FOR_TPU = ("torch-xla", "torch-tpu", "tensorflow-tpu")
_FOR_CPU = ("tensorflow-cpu",)

#: Frameworks, in the order in which they are looked for.
_FRAMEWORKS = ("torch-tpu", "torch-xla", "torch", "tensorflow-tpu", "tensorflow-cpu", "tensorflow", "jax")


@dataclass(frozen=True)
class Contents:
    """The contents of an image.

    Attributes:
        versions: canonical package name -> version, of the packages that are known.
        source: where the versions are from, for messages.
        index: name of the package index that the framework is from; "" if unknown.
        local: whether the image is on this host.
        built_for: ``tpu``, ``gpu`` or ``cpu``, from a spec or the image's record; "" if unknown.
        platforms: those that a registry has it for, or that its spec lists, as in ``linux/amd64``; empty if unknown.
        supported_until: the last day on which it is looked after, as in 2027-10-28; empty if unknown.
    """

    reference: str
    versions: Mapping[str, str] = field(default_factory=dict)
    source: str = ""
    index: str = ""
    local: bool = False
    built_for: str = ""
    platforms: tuple[str, ...] = ()
    supported_until: str = ""

    @property
    def framework(self) -> str:
        """``tensorflow 2.21.0``, for messages; empty if unknown."""
        name = next((one for one in _FRAMEWORKS if one in self.versions), "")
        return f"{name.replace('-', '_')} {self.versions[name]}" if name else ""

    @property
    def tensorflow(self) -> str:
        """Version of TensorFlow, of any build; empty without TensorFlow."""
        return next((self.versions[one] for one in ("tensorflow-tpu", "tensorflow-cpu", "tensorflow")
                     if one in self.versions), "")  # fmt: skip

    @property
    def device(self) -> str:
        """The device that the framework was built for: ``tpu``, ``gpu`` or ``cpu``; "" if unknown."""
        if self.built_for:
            return self.built_for
        if any(one in self.versions for one in _FOR_TPU) or ("jax" in self.versions and "libtpu" in self.versions):
            return "tpu"
        torch = self.versions.get("torch", "")
        if any(one in self.versions for one in _FOR_CPU) or torch.endswith("+cpu"):
            return "cpu"
        if torch:
            # Without a local version, the index decides: PyTorch's CPU wheels have a separate one.
            return "cpu" if self.index == "pytorch-cpu" else "gpu" if "+cu" in torch or self.index == "default" else ""
        return "gpu" if "nvidia-cudnn-cu12" in self.versions else ""


def of_spec(reference: str, spec: Spec) -> Contents:
    """The contents of a target's image by its spec; the image need not exist."""
    pins = [Requirement(text) for text in spec.packages]
    versions = {str(canonicalize_name(pin.name)): next(iter(pin.specifier)).version for pin in pins}
    built_for = _DEVICES[spec.accelerator]
    return Contents(
        reference,
        versions,
        spec.where,
        spec.framework.index,
        built_for=built_for,
        platforms=tuple(spec.platforms),
        supported_until=f"{spec.ends[0].day}" if spec.ends else "",
    )


class ImageNotFoundError(Exception):
    """The image does not exist; the message gives the reason."""


class ImageUnavailableError(Exception):
    """The image's contents could not be read; the message gives the reason."""


def read_contents(reference: str) -> Contents:
    """The contents of an image on this host, or at its registry.

    Raises:
        ImageNotFoundError: its registry has no such image.
        ImageUnavailableError: it is not on this host, and its registry does not answer or denies access.
    """
    try:
        image = docker_engine.existing_client().images.get(reference)
    except (docker.errors.DockerException, OSError):
        return at_registry(reference)
    return _of_local(reference, image)


def _from_labels(reference: str, labels: dict[str, str], source: str, *, local: bool = False) -> Contents:
    name, _, version = labels.get(f"{LABELS}.framework", "").partition("==")
    versions = {str(canonicalize_name(name)): version} if version else {}
    built_for = _DEVICES.get(labels.get(f"{LABELS}.accelerator", ""), "")
    return Contents(
        reference,
        versions,
        source,
        labels.get(f"{LABELS}.index", ""),
        local,
        built_for,
        supported_until=labels.get(f"{LABELS}.supported-until", ""),
    )


def _of_local(reference: str, image: Image) -> Contents:
    found = _from_labels(reference, image.labels or {}, "its labels", local=True)
    record = _record(image)
    if record:
        versions = {str(canonicalize_name(name)): version for name, version in record.get("versions", {}).items()}
        built_for = _DEVICES.get(str(record.get("accelerator")), "")
        return replace(found, versions=versions, source=RECORD, built_for=built_for)
    if found.versions:
        return found
    try:
        inside = probe_runner.probe(str(image.id))
    except StepFailed as error:
        raise ImageUnavailableError(str(error)) from None
    versions = {str(canonicalize_name(package.name)): package.version for package in inside.packages}
    return Contents(reference, versions, "its installed packages", "", local=True)


def _record(image: Image) -> dict[str, Any] | None:
    """Return image.json of a local image; None if it has none."""
    with contextlib.suppress(KeyError, ValueError):
        found = json.loads(files_of(image, RECORD)[RECORD])
        return found if isinstance(found, dict) else None
    return None


def at_registry(reference: str) -> Contents:
    """The contents of an image at its registry, whatever is on this host.

    Raises:
        ImageNotFoundError, ImageUnavailableError: see :func:`read_contents`.
    """
    try:
        named = Reference.parse(reference)
    except UserError as error:
        raise ImageNotFoundError(str(error)) from None
    if named.names_docker_hub:
        raise ImageUnavailableError("it is not on this host, and names no registry")
    repository = Repository(named.name)
    try:
        manifest = repository.manifest(named.version)
        if manifest is None:
            separator = "@" if named.digest else ":"
            raise ImageNotFoundError(f"{named.registry} has no {named.repository}{separator}{named.version}")
        config = repository.config(_for_linux(repository, manifest))
    except StepFailed as error:
        raise ImageUnavailableError(str(error)) from None
    found = _from_labels(reference, (config.get("config") or {}).get("Labels") or {}, "its labels at the registry")
    own = f"{config.get('os')}/{config.get('architecture')}"
    platforms = tuple(image_index.images(manifest.document)) or ((own,) if "architecture" in config else ())
    return replace(found, platforms=platforms)


def _for_linux(repository: Repository, manifest: Manifest) -> Manifest:
    """``manifest``, or that of an image of an index: its images have the same labels."""
    digest = image_index.chosen(manifest.document)
    return manifest if digest is None else repository.existing(digest)
