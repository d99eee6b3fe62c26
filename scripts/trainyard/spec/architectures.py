"""The processor architectures that images are made for, and what Docker, Python, ELF and Debian call each.

An image is for one of them. A spec lists its ``platforms``; commands work on one at a time: that of ``TRAINYARD_ARCH``
(``make image TARGET=tf-cpu ARCH=arm64``), else the host's if the spec has it, else the first that it lists.
"""

from __future__ import annotations

import platform
from collections.abc import Sequence
from dataclasses import dataclass

from packaging.version import Version

from trainyard.common import settings
from trainyard.common.docker_engine import Engine
from trainyard.common.errors import UserError, nearest

#: The newest glibc that uv has platforms for: https://docs.astral.sh/uv/reference/cli/#uv-pip-compile--python-platform
UV_GLIBC = "2.40"


@dataclass(frozen=True)
class Architecture:
    """An architecture of 64-bit Linux.

    Attributes:
        name: that of Docker and Debian (``GOARCH``): ``amd64``.
        machine: what ``uname -m``, PEP 508's ``platform_machine`` and the platform tags of wheels say: ``x86_64``.
        elf: ``e_machine`` of its binaries: https://refspecs.linuxfoundation.org/elf/gabi4+/ch4.eheader.html
    """

    name: str
    machine: str
    elf: int

    @property
    def platform(self) -> str:
        """``linux/amd64``."""
        return f"linux/{self.name}"

    def wheel_platform(self, glibc: str) -> str:
        """uv's name of the platform whose wheels run with this version of glibc, or with the newest that uv knows."""
        return f"{self.machine}-manylinux_{min(glibc, UV_GLIBC, key=Version).replace('.', '_')}"


AMD64 = Architecture("amd64", "x86_64", 62)
ARM64 = Architecture("arm64", "aarch64", 183)

#: By name.
ARCHITECTURES = {one.name: one for one in (AMD64, ARM64)}

#: By platform, as in ``linux/amd64``.
PLATFORMS = {one.platform: one for one in ARCHITECTURES.values()}


def of_host() -> Architecture:
    """The architecture of this host; AMD64 if it is another one. Apple's machines say ``arm64``."""
    names = (platform.machine().lower(),)
    return next((one for one in ARCHITECTURES.values() if {one.name, one.machine} & set(names)), AMD64)


def of_engine(engine: Engine) -> Architecture:
    """Return the architecture of the engine's machine; AMD64 if it is another one."""
    return ARCHITECTURES.get(engine.architecture, AMD64)


def of_image(engine: Engine, reference: str) -> Architecture:
    """Return the architecture of an image of the engine; the engine's if it is another one."""
    return ARCHITECTURES.get(engine.architecture_of(reference), of_engine(engine))


def named(text: str) -> Architecture | None:
    """The architecture that Docker or ``uname -m`` calls ``text``, or whose platform it is; None if there is none."""
    name = text.lower().removeprefix("linux/")
    return next((one for one in ARCHITECTURES.values() if name in (one.name, one.machine)), None)


def given() -> Architecture | None:
    """The architecture of ``TRAINYARD_ARCH``, see :func:`named`; None if it is not set.

    Raises:
        UserError: there is no such architecture.
    """
    text = settings.variable("ARCH").lower().removeprefix("linux/")
    if not text:
        return None
    found = named(text)
    if found is None:
        names = ", ".join(ARCHITECTURES)
        raise UserError(f"'TRAINYARD_ARCH={text}': use one of {names}{nearest(text, ARCHITECTURES)}")
    return found


def use_all() -> None:
    """Ignore ``TRAINYARD_ARCH`` from now on, in a command that is about all platforms.

    Raises:
        UserError: see :func:`given`.
    """
    given()
    settings.set_variable("ARCH", "")


def usual(platforms: Sequence[str]) -> Architecture:
    """The host's architecture if an image with these platforms has it, else that of the first."""
    host = of_host()
    return host if host.platform in platforms else PLATFORMS[platforms[0]]


def choose(platforms: Sequence[str]) -> Architecture:
    """The architecture that a command works on, for an image with these platforms.

    Raises:
        UserError: ``TRAINYARD_ARCH`` is none of them.
    """
    wanted = given() or usual(platforms)
    if wanted.platform not in platforms:
        raise UserError(
            f"'TRAINYARD_ARCH={wanted.name}': this image is made for {', '.join(platforms)} alone "
            "('platforms' of its spec)"
        )
    return wanted
