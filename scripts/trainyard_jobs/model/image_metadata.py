"""The contents of an image, without pulling it: from its record, its labels, or its installed Python packages."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from docker.models.images import Image
from packaging.utils import canonicalize_name
from packaging.version import InvalidVersion, Version

from trainyard import recipe as recipes
from trainyard.common.docker_engine import Engine
from trainyard.common.errors import StepFailed, UserError
from trainyard.oci import attached_sbom, image_index, probe_runner
from trainyard.oci.reference import Reference
from trainyard.oci.registry import Repository
from trainyard.recipe import Recipe
from trainyard.sandbox.containers import files_of
from trainyard.spec import gpus
from trainyard.spec.architectures import AMD64, PLATFORMS
from trainyard.spec.gpus import DeviceCode
from trainyard.spec.naming import LABELS

#: Returns the recipes of the targets that messages recommend, for each platform.
Targets = Callable[[], Sequence[Recipe]]

#: A recipe's accelerator -> the device in Contents.
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
        built_for: ``tpu``, ``gpu`` or ``cpu``, from a recipe or the image's label; "" if unknown.
        platforms: those that a registry has it for, or that its recipe lists, as in ``linux/amd64``; empty if unknown.
        supported_until: the last day on which it is supported, as in 2027-10-28; empty if unknown.
        device_codes: architecture -> what its image needs of an NVIDIA GPU; without those for which it is not known.
    """

    reference: str
    versions: Mapping[str, str] = field(default_factory=dict)
    source: str = ""
    index: str = ""
    local: bool = False
    built_for: str = ""
    platforms: tuple[str, ...] = ()
    supported_until: str = ""
    device_codes: Mapping[str, DeviceCode] = field(default_factory=dict)

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
        if "jax" in self.versions:
            plugins = [name for name in self.versions if name.startswith("jax-")]
            if any(name.startswith("jax-cuda") for name in plugins):
                return "gpu"
            # jaxlib itself computes on CPUs; other plugins, as of ROCm, are for what is not judged here.
            return "cpu" if "jaxlib" in self.versions and not plugins else ""
        return "gpu" if "nvidia-cudnn-cu12" in self.versions else ""


def of_recipes(reference: str, made: Sequence[Recipe]) -> Contents:
    """Return the contents of an image by its recipes, one for each platform that is known; it need not exist."""
    first = made[0]
    codes = (_recorded_code(dict(each.accelerator), each.architecture.name) for each in made)
    return Contents(
        reference,
        first.framework.packages,
        first.source,
        first.framework.index,
        built_for=_DEVICES[first.accelerator.kind],
        platforms=first.platforms,
        supported_until=f"{first.ends[0].day}" if first.ends else "",
        device_codes={arch: code for of_one in codes for arch, code in of_one.items()},
    )


class ImageNotFoundError(Exception):
    """The image does not exist; the message gives the reason."""


class ImageUnavailableError(Exception):
    """The image's contents could not be read; the message gives the reason."""


def read_contents(engine: Engine | None, reference: str) -> Contents:
    """The contents of an image on this host, or at its registry; there, of another's image, by an attached SBOM.

    Args:
        engine: that may have the image; None: it is looked up at its registry alone.

    Raises:
        ImageNotFoundError: its registry has no such image.
        ImageUnavailableError: it is not on this host, and its registry does not answer or denies access.
    """
    if engine and (image := engine.existing_image(reference)):
        return _of_local(engine, reference, image)
    return at_registry(reference, sbom=True)


def _from_labels(
    reference: str, labels: dict[str, str], source: str, arch: str = AMD64.name, *, local: bool = False
) -> Contents:
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
        device_codes=_recorded_code({key: labels.get(f"{LABELS}.{key}") for key in _DEVICE_CODE}, arch),
    )


#: Names of what an image needs of a GPU, in its recipe and in its labels.
_DEVICE_CODE = ("cuda", "driver", "gpus")


def _recorded_code(record: Mapping[str, object], arch: str) -> dict[str, DeviceCode]:
    """Return what a recipe or labels say about GPUs, by architecture; nothing if they do not, or not in our form."""
    cuda, driver, text = (str(record.get(key) or "") for key in _DEVICE_CODE)
    if not re.fullmatch(r"\d+\.\d+", cuda) or not re.fullmatch(r"\d+(\.\d+)*", driver) or not text:
        return {}
    with contextlib.suppress(UserError):
        return {arch: DeviceCode.parse(cuda, driver, text)}
    return {}


def _code_of_packages(versions: Mapping[str, str], arch: str) -> dict[str, DeviceCode]:
    """Return what packages of an image need of a GPU, by architecture; nothing without CUDA from a wheel.

    Only releases on the default index are known; without NVIDIA's wheels, a framework may be another's build.
    """
    framework = next((name for name in _FRAMEWORKS if name in versions), "")
    version, _, local = versions.get(framework, "").partition("+")
    runtime = next((name for name in versions if re.fullmatch(r"nvidia-cuda-runtime(-cu\d+)?", name)), "")
    wheel = re.fullmatch(r"cu(\d+)(\d)", local)
    cuda = f"{wheel[1]}.{wheel[2]}" if wheel else ".".join(versions.get(runtime, "").split(".")[:2])
    if not cuda or (local and not wheel) or _is_prerelease(version):
        return {}
    cudnn = next((has for name, has in versions.items() if name.startswith("nvidia-cudnn-")), "")
    code = gpus.device_code(framework, version, arch, cuda, cudnn)
    # PyTorch has wheels for several minor versions of CUDA, each with code for other GPUs.
    return {arch: code} if code and (framework != "torch" or code.cuda == cuda) else {}


def _is_prerelease(version: str) -> bool:
    try:
        return Version(version).is_prerelease
    except InvalidVersion:
        return True


def _of_local(engine: Engine, reference: str, image: Image) -> Contents:
    arch = str(image.attrs.get("Architecture") or AMD64.name)
    found = _from_labels(reference, image.labels or {}, "its labels", arch, local=True)
    with contextlib.suppress(KeyError, ValueError):
        recipe = recipes.parse(files_of(engine, image, recipes.PATH)[recipes.PATH].decode())
        known = of_recipes(reference, [recipe])
        versions = {recipe.framework.name.replace("_", "-"): recipe.version} | recipe.versions
        return replace(known, versions=versions, source=recipes.PATH, index=recipe.index, local=True, platforms=())
    if found.versions:
        return found
    try:
        inside = probe_runner.probe(engine, str(image.id))
    except StepFailed as error:
        raise ImageUnavailableError(str(error)) from None
    versions = {str(canonicalize_name(package.name)): package.version for package in inside.packages}
    codes = _code_of_packages(versions, arch)
    return Contents(reference, versions, "its installed packages", "", local=True, device_codes=codes)


def at_registry(reference: str, *, sbom: bool = False) -> Contents:
    """The contents of an image at its registry, whatever is on this host.

    Args:
        sbom: read the packages of an image without our labels from the SBOM that is attached to it.
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
        digest = image_index.chosen(manifest.document)  # None if it is no index
        image = manifest if digest is None else repository.existing(digest)
        config = repository.config(image)
        contents = _by_config(reference, config)
        members, codes = image_index.images(manifest.document), dict(contents.device_codes)
        if codes:  # of its labels, the images of an index share all but these
            others = [digest for name, digest in members.items() if name in PLATFORMS and digest != image.digest]
            for digest in others:
                codes |= _by_config(reference, repository.config(repository.existing(digest))).device_codes
    except StepFailed as error:
        raise ImageUnavailableError(str(error)) from None
    own = (f"{config.get('os')}/{config.get('architecture')}",) if "architecture" in config else ()
    contents = replace(contents, platforms=tuple(members) or own, device_codes=codes)
    if contents.versions or not sbom:
        return contents
    with contextlib.suppress(StepFailed):
        if listed := attached_sbom.listed(repository, image.digest):
            versions = {name: package.version for name, package in listed[0].items()}
            codes = _code_of_packages(versions, _architecture(config))
            return replace(contents, versions=versions, source="its SBOM at the registry", device_codes=codes)
    return contents


def _by_config(reference: str, config: Mapping[str, Any]) -> Contents:
    """Return the contents of an image by the labels in its configuration."""
    labels = (config.get("config") or {}).get("Labels") or {}
    return _from_labels(reference, labels, "its labels at the registry", _architecture(config))


def _architecture(config: Mapping[str, Any]) -> str:
    """Return the architecture of an image, by its configuration."""
    return str(config.get("architecture") or AMD64.name)
