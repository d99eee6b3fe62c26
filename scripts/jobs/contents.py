"""What is in an image, found out without pulling it: by its own record, its labels, or its Python."""

from __future__ import annotations

import io
import json
import re
import tarfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import docker.errors
from docker.models.images import Image
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from scripts import engine
from scripts.cli import StepFailed
from scripts.plan import LABELS
from scripts.published.tags import Manifest, Repository
from scripts.spec import Spec
from scripts.stored import blobs

#: Where every image of ours says what it holds.
RECORD = "/opt/trainyard/image.json"

#: What a spec calls an accelerator -> what Contents calls it.
_MADE_FOR = {"nvidia": "gpu", "tpu": "tpu", "none": "cpu"}

#: Packages that say what a framework was built for, by canonical name.
_FOR_TPU = ("torch-xla", "torch-tpu", "tensorflow-tpu")
_FOR_CPU = ("tensorflow-cpu",)

#: Frameworks that are looked for in an image that is not ours.
_FRAMEWORKS = ("torch-tpu", "torch-xla", "torch", "tensorflow-tpu", "tensorflow-cpu", "tensorflow", "jax")


@dataclass(frozen=True)
class Contents:
    """What an image holds.

    Attributes:
        versions: canonical package name -> version, of what is known.
        source: how that was found out, for messages.
        index: name of the package index that the framework came from, or "".
        made_for: ``tpu``, ``gpu`` or ``cpu`` where a spec, or the image's record, says so.
    """

    reference: str
    versions: Mapping[str, str] = field(default_factory=dict)
    source: str = ""
    index: str = ""
    local: bool = False
    made_for: str = ""

    @property
    def framework(self) -> str:
        """``tensorflow 2.21.0`` for people; empty if none is known."""
        name = next((one for one in _FRAMEWORKS if one in self.versions), "")
        return f"{name.replace('-', '_')} {self.versions[name]}" if name else ""

    @property
    def tensorflow(self) -> str:
        """Version of TensorFlow, whatever its build; empty without one."""
        return next((self.versions[one] for one in ("tensorflow-tpu", "tensorflow-cpu", "tensorflow")
                     if one in self.versions), "")  # fmt: skip

    @property
    def device(self) -> str:
        """What the framework was built for: ``tpu``, ``gpu``, ``cpu``, or "" if that is not known."""
        if self.made_for:
            return self.made_for
        if any(one in self.versions for one in _FOR_TPU) or ("jax" in self.versions and "libtpu" in self.versions):
            return "tpu"
        torch = self.versions.get("torch", "")
        if any(one in self.versions for one in _FOR_CPU) or torch.endswith("+cpu"):
            return "cpu"
        if torch:
            # By label or record alone, the index decides: PyTorch's CPU wheels have one of their own.
            return "cpu" if self.index == "pytorch-cpu" else "gpu" if "+cu" in torch or self.index == "default" else ""
        return "gpu" if "nvidia-cudnn-cu12" in self.versions else ""


def of_spec(reference: str, spec: Spec) -> Contents:
    """What an image of a target is to hold, by its spec: it need not have been built."""
    pins = [Requirement(text) for text in spec.framework.packages]
    versions = {str(canonicalize_name(pin.name)): next(iter(pin.specifier)).version for pin in pins}
    return Contents(reference, versions, spec.where, spec.framework.index, made_for=_MADE_FOR[spec.accelerator])


class NotThereError(Exception):
    """There is no such image; why, in words."""


class UnknownError(Exception):
    """It could not be found out; why, in words."""


def parts(reference: str) -> tuple[str, str, str]:
    """Registry, path, and tag or digest of a reference; the registry is empty where none is named (Docker Hub).

    The first part is a registry if it has a dot, a colon or is localhost (distribution/reference, domain).
    """
    name, at, digest = reference.partition("@")
    first, slash, rest = name.partition("/")
    host = first if slash and (re.search(r"[.:]", first) or first == "localhost") else ""
    path = rest if host else name
    bare, colon, tag = path.rpartition(":")
    if not colon:
        bare, tag = path, "latest"
    return host, bare, digest if at else tag


def look(reference: str) -> Contents:
    """What is in an image of this host, or at its registry.

    Raises:
        NotThereError: its registry has no such image.
        UnknownError: it is not here, and its registry does not answer, or does not let us in.
    """
    try:
        image = engine.existing_client().images.get(reference)
    except (docker.errors.DockerException, OSError):
        return _at_registry(reference)
    return _of_local(reference, image)


def _from_labels(reference: str, labels: dict[str, str], source: str, *, local: bool = False) -> Contents:
    name, _, version = labels.get(f"{LABELS}.framework", "").partition("==")
    versions = {str(canonicalize_name(name)): version} if version else {}
    made_for = _MADE_FOR.get(labels.get(f"{LABELS}.accelerator", ""), "")
    return Contents(reference, versions, source, labels.get(f"{LABELS}.index", ""), local, made_for)


def _of_local(reference: str, image: Image) -> Contents:
    found = _from_labels(reference, image.labels or {}, "its labels", local=True)
    record = _record(image)
    if record:
        versions = {str(canonicalize_name(name)): version for name, version in record.get("versions", {}).items()}
        made_for = _MADE_FOR.get(str(record.get("accelerator")), "")
        return Contents(reference, versions, RECORD, found.index, local=True, made_for=made_for)
    if found.versions:
        return found
    from scripts import verify  # which loads all that images are verified with; images of ours need none of it

    try:
        inside = verify.probe(str(image.id))
    except StepFailed as error:
        raise UnknownError(str(error)) from None
    versions = {str(canonicalize_name(package.name)): package.version for package in inside.packages}
    return Contents(reference, versions, "its Python", "", local=True)


def _record(image: Image) -> dict[str, Any] | None:
    """image.json of a local image, taken out of a container that never runs; None if it has none."""
    container = engine.existing_client().containers.create(image, labels=engine.owned("check-job"))
    try:
        stream, _ = container.get_archive(RECORD)
        with tarfile.open(fileobj=io.BytesIO(b"".join(stream))) as archive:
            file = archive.extractfile(archive.getmembers()[0])
            found = json.loads(file.read()) if file else None
            return found if isinstance(found, dict) else None
    except (docker.errors.NotFound, tarfile.TarError, ValueError):
        return None
    finally:
        container.remove(force=True)


def _at_registry(reference: str) -> Contents:
    host, path, tag = parts(reference)
    if not host:
        raise UnknownError("it is not on this host, and names no registry")
    repository = Repository(f"{host}/{path}")
    try:
        manifest = repository.manifest(tag)
        if manifest is None:
            raise NotThereError(
                f"{host} has no {path}:{tag}" if "sha256:" not in tag else f"{host} has no {path}@{tag}"
            )
        config = repository.config(_for_linux(repository, manifest))
    except StepFailed as error:
        raise UnknownError(str(error)) from None
    return _from_labels(reference, (config.get("config") or {}).get("Labels") or {}, "its labels at the registry")


def _for_linux(repository: Repository, manifest: Manifest) -> Manifest:
    """The manifest itself, or the one for linux/amd64 of an index."""
    digest = blobs.manifest_of(json.loads(manifest.body))
    return manifest if digest is None else repository.manifest(digest) or manifest
