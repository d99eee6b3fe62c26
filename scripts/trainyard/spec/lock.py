"""Hold what is locked for an image: its packages, with the files that are installed, for all platforms and indexes.

:mod:`trainyard.spec.pylock` reads and writes it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Literal

from trainyard.spec.framework import BaseContents

#: Name of the package index of everything that no other index has.
DEFAULT = "default"

#: Why an image has a package: it is of the framework, or needed by that alone; it is required by a user's repository
#: and not by its target (``added``); it is compiled from its source distribution; it is there while something is
#: compiled, and no image has it (``build``); or none of these.
Role = Literal["", "framework", "added", "compiled", "build"]


@dataclass(frozen=True, order=True)
class File:
    """Describe a wheel or a source distribution.

    Attributes:
        size: in bytes; 0 if no index says.
        url: its address at an index, which a lock does not have.
    """

    name: str
    sha256: str
    size: int = 0
    url: str = field(default="", compare=False)

    @property
    def is_wheel(self) -> bool:
        return self.name.endswith(".whl")


@dataclass(frozen=True)
class Made:
    """Name the requirement that a wheel was made of: a git repository, a folder or a file.

    Attributes:
        key: of the requirement (:func:`trainyard.workspace.wheels.key`).
        commit: of the git repository; empty of anything else.
    """

    key: str
    commit: str = ""


@dataclass(frozen=True)
class Pin:
    """Describe a package of one platform.

    Attributes:
        name: canonical.
        files: the wheels that the platform can use, or else the source distribution.
        made: what its wheel was made of; None if it is from a package index.
    """

    name: str
    version: str
    files: tuple[File, ...]
    role: Role = ""
    made: Made | None = None

    @property
    def added(self) -> bool:
        return self.role == "added"

    @cached_property
    def hashes(self) -> tuple[str, ...]:
        """SHA-256 of the files, hexadecimal."""
        return tuple(sorted(file.sha256 for file in self.files))

    @cached_property
    def size(self) -> int:
        """Bytes of the largest file."""
        return max((file.size for file in self.files), default=0)

    @property
    def identity(self) -> tuple[str, str, tuple[str, ...]]:
        """Return what decides which files are installed."""
        return self.name, self.version, self.hashes

    def requirement(self) -> str:
        """Return the pin as an installer reads it from a requirements file."""
        return " \\\n    ".join([f"{self.name}=={self.version}", *(f"--hash=sha256:{sha}" for sha in self.hashes)])


def versions(pins: Iterable[Pin]) -> dict[str, str]:
    """Return canonical name -> version."""
    return {pin.name: pin.version for pin in pins}


def ordered(pins: Iterable[Pin]) -> tuple[Pin, ...]:
    """Return pins by their names, and last those of what something is compiled with."""
    return tuple(sorted(pins, key=lambda pin: (pin.role == "build", pin.name)))


def mark_added(pins: Iterable[Pin], of_target: Iterable[Pin]) -> list[Pin]:
    """Return the pins, each marked as added unless ``of_target`` has it with the same version and hashes."""
    shared = {pin.identity for pin in of_target}
    return [replace(pin, role="" if pin.identity in shared else "added") for pin in pins]


@dataclass(frozen=True)
class Locked:
    """Hold what is locked for one platform and one package index.

    Attributes:
        pins: :func:`ordered`.
        base: contents of the base image, if that holds the framework.
    """

    pins: tuple[Pin, ...] = ()
    base: BaseContents | None = None

    def _of(self, *roles: Role) -> list[Pin]:
        return [pin for pin in self.pins if pin.role in roles]

    @cached_property
    def framework(self) -> list[Pin]:
        """Return the framework's wheels; none if the base image holds it."""
        return self._of("framework")

    @cached_property
    def requirements(self) -> list[Pin]:
        """Return everything that the framework does not need by itself."""
        return self._of("", "added")

    @cached_property
    def compiled(self) -> list[Pin]:
        """Return what is compiled from source distributions."""
        return self._of("compiled")

    @cached_property
    def build_requires(self) -> list[Pin]:
        """Return what the source distributions are compiled with, besides what the image has."""
        return self._of("build")

    @cached_property
    def versions(self) -> dict[str, str]:
        """Canonical name -> version of every package that the image has."""
        installed = versions(pin for pin in self.pins if pin.role != "build")
        return (dict(self.base.packages) if self.base else {}) | installed


@dataclass(frozen=True)
class Origin:
    """Record the inputs of the lock of a user's repository.

    Attributes:
        version: of the Trainyard that wrote it, ``contents``: hash of what that one contributes to an image.
        target: name of the target that the image extends.
        base: reference of the base image, with a digest where a registry gave one.
        inputs: SHA-256 of what was resolved.
        framework: requirements for which the framework is not that of the target; empty if it is.
    """

    version: str
    contents: str
    target: str
    base: str
    inputs: str
    framework: str = ""


@dataclass(frozen=True)
class Lock:
    """Hold what is locked for an image.

    Attributes:
        python: minor version.
        indexes: name of a package index -> name of an architecture -> what is locked for them.
        day: when the versions of a nightly were chosen, as in 20261121 (UTC); empty for other images.
        origin: None for a target of the catalogue.
    """

    python: str = ""
    indexes: Mapping[str, Mapping[str, Locked]] = field(default_factory=dict)
    day: str = ""
    origin: Origin | None = None

    def of(self, arch: str, index: str = DEFAULT) -> Locked | None:
        """Return what is locked for an architecture and an index; None if nothing is."""
        return self.indexes.get(index, {}).get(arch)

    def known(self, arch: str, index: str) -> Locked:
        """Return what is locked for an architecture and an index, or else for the default index; else nothing."""
        return self.of(arch, index) or self.of(arch) or Locked()

    def names(self, arch: str) -> list[str]:
        """Return the names of the package indexes that an architecture is locked for, the default one first."""
        return sorted(
            (name for name, locked in self.indexes.items() if arch in locked), key=lambda name: (name != DEFAULT, name)
        )

    def only(self, arch: str) -> Lock:
        """Return what is locked for an architecture alone."""
        indexes = {name: {arch: locked[arch]} for name, locked in self.indexes.items() if arch in locked}
        return replace(self, indexes=indexes)


@dataclass(frozen=True)
class Unreadable:
    """A lock that cannot be used.

    Attributes:
        reason: a line for the user, with the command that mends it.
        missing: whether there is no file.
        rest: what its files have, whose versions are kept; None if they cannot be read.
    """

    reason: str
    missing: bool = False
    rest: Lock | None = None
