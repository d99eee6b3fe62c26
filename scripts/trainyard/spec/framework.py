"""The framework of an image: the packages of its spec, and the contents of a base that holds it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Annotated

from packaging.requirements import InvalidRequirement, Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name
from packaging.version import InvalidVersion, Version
from pydantic import AfterValidator, Field

from trainyard.common.errors import nearest
from trainyard.spec.yaml_source import Strict

#: Packages that install the module tensorflow, so that an image has one of them:
#: https://www.tensorflow.org/install/pip#package_location
TENSORFLOW = frozenset(
    {"tensorflow", "tensorflow-cpu", "tensorflow-cpu-aws", "tensorflow-gpu", "tensorflow-tpu", "tf-nightly",
     "tf-nightly-cpu", "tf-nightly-tpu"}
)  # fmt: skip


@dataclass(frozen=True)
class Kind:
    """Describe a framework.

    Attributes:
        packages: those whose versions docs/images.md shows.
        compiles: whether it compiles code with a C++ compiler where it runs, as torch.compile does.
        nightly: what the names of its nightly packages begin with; empty if that is its own name.
    """

    packages: tuple[str, ...]
    compiles: bool = False
    nightly: str = ""


#: Name of a framework in image.yaml -> its description. CONTRIBUTING.md lists what else a framework needs.
KINDS = {
    "torch": Kind(("torch", "torchvision"), compiles=True),
    "torch_xla": Kind(("torch", "torchvision", "torch-xla", "libtpu"), compiles=True),
    "torch_tpu": Kind(("torch", "torchvision", "torch-tpu", "libtpu"), compiles=True),
    "tensorflow": Kind(
        ("tensorflow", "tensorflow-cpu", "tensorflow-tpu", "tf-nightly", "keras", "keras-nightly", "libtpu"),
        nightly="tf-nightly",
    ),
    "jax": Kind(("jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "libtpu")),
}

#: Version of a framework that ``trainyard lock`` chooses, before it has.
UNLOCKED = "unlocked"


def is_pinned(requirement: Requirement) -> bool:
    """Return whether a requirement allows one version alone, ``name==1.2.3``."""
    pins = list(requirement.specifier)
    return len(pins) == 1 and pins[0].operator == "==" and not pins[0].version.endswith(".*")


def unpinned(packages: Iterable[str]) -> list[str]:
    """Return the canonical names of the requirements that have no version."""
    return [canonicalize_name(package.name) for package in map(Requirement, packages) if not is_pinned(package)]


def versions_of(pins: Iterable[str]) -> dict[str, str]:
    """Return name of a package -> version, of requirements that have one."""
    return {pin.name: next(iter(pin.specifier)).version for pin in map(Requirement, pins) if is_pinned(pin)}


def pinned(text: str, versions: Mapping[str, str]) -> str:
    """Return a requirement with its version; as it is if it has one, or if ``versions`` has none.

    Args:
        versions: canonical name -> version.
    """
    package = Requirement(text)
    version = versions.get(canonicalize_name(package.name))
    if version is None or is_pinned(package):
        return text
    extras = f"[{','.join(sorted(package.extras))}]" if package.extras else ""
    return f"{package.name}{extras}=={version}"


def without_version(text: str) -> str:
    """Return a requirement without its version, with its extras and marker."""
    package = Requirement(text)
    package.specifier = SpecifierSet()
    return str(package)


def installs_as(name: str, packages: Iterable[str]) -> str | None:
    """Return the one of ``packages`` that is installed where a package is asked for: itself, or another TensorFlow."""
    canonical = canonicalize_name(name)
    same = TENSORFLOW if canonical in TENSORFLOW else {canonical}
    return next((other for other in packages if canonicalize_name(other) in same), None)


def requirement(text: str) -> str:
    """A requirement of any version, with or without a marker.

    Raises:
        ValueError: it is none of a package index.
    """
    try:
        found = Requirement(text)
    except InvalidRequirement as error:
        raise ValueError(f"{text!r} is not a requirement ({str(error).splitlines()[0]})") from None
    if found.url:
        raise ValueError(f"{text!r} is no package of an index: remove '@ {found.url}'")
    return text


def pin(text: str) -> str:
    """A requirement pinned to one version, ``name[extra]==1.2.3``, with or without a marker.

    Raises:
        ValueError: it is not.
    """
    found = Requirement(requirement(text))
    if not is_pinned(found):
        raise ValueError(f"{text!r} is not pinned: write '{found.name}==<version>'")
    try:
        Version(next(iter(found.specifier)).version)
    except InvalidVersion:
        raise ValueError(f"{text!r} has no valid version (PEP 440)") from None
    return text


def _known(name: str) -> str:
    """Return the name of a framework; raise ValueError if :data:`KINDS` does not have it."""
    if name not in KINDS:
        raise ValueError(f"no framework {name!r}: {', '.join(KINDS)}{nearest(name, KINDS)}")
    return name


Package = Annotated[str, AfterValidator(requirement)]


class Framework(Strict):
    """The big wheels: their own layer, their own lock.

    Attributes:
        packages: as the spec lists them, for all its platforms.
        index: name of the package index that they come from.
    """

    name: Annotated[str, AfterValidator(_known)]
    packages: list[Package] = Field(default_factory=list)
    index: str = "default"

    @property
    def compiles(self) -> bool:
        """Return whether it compiles code where it runs, as torch.compile does, for which it needs a compiler."""
        return KINDS[self.name].compiles

    def named_after(self, packages: Iterable[str]) -> str | None:
        """Which of the packages (canonical names) is the framework: ``name`` itself, or a variant: tensorflow-cpu."""
        name = canonicalize_name(self.name)
        variants = (f"{name}-", KINDS[self.name].nightly or f"{name}-")
        return next((one for one in sorted(packages) if one == name or one.startswith(variants)), None)

    def version(self, packages: Iterable[str]) -> str:
        """Return the version of the package that the image is named after.

        Args:
            packages: requirements; those of a nightly, and of a base that holds the framework, have versions once
                ``trainyard lock`` has chosen them.
        Returns:
            The version; :data:`UNLOCKED` if there are no packages, or if that one has no version.
        Raises:
            ValueError: none of the packages is the framework.
        """
        pins: dict[str, Requirement] = {canonicalize_name(one.name): one for one in map(Requirement, packages)}
        if not pins:
            return UNLOCKED
        variant = self.named_after(pins)
        if variant is None:
            raise ValueError(f"none of the packages is {self.name} or a variant of it ({', '.join(pins)})")
        return next(iter(pins[variant].specifier)).version if is_pinned(pins[variant]) else UNLOCKED


class BaseContents(Strict):
    """Contents of a base that holds the framework, as a lock records them.

    Attributes:
        image: the configured reference, ``reference``: what it was resolved to, with a digest if a registry gave one.
        day: when it was inspected, as in 20261121 (UTC).
        python: version of its Python, ``interpreter``: path of that, ``site``: its folder of packages.
        packages: canonical name -> version of all packages.
        requires: canonical name -> requirements, of the framework's packages and of those that they need.
    """

    image: str
    reference: str
    digest: str
    day: str
    python: str
    interpreter: str
    site: str
    packages: dict[str, str]
    requires: dict[str, list[str]]

    @property
    def python_version(self) -> str:
        """Version of its Python without the patch level: ``3.12``."""
        return ".".join(self.python.split(".")[:2])

    @property
    def framework(self) -> dict[str, str]:
        """Canonical name -> version of the framework's packages and of those that they need."""
        return {name: self.packages[name] for name in sorted(self.requires) if name in self.packages}
