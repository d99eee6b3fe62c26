"""Read ``images/matrix.yaml``: the versions that an image may combine, and until when each is supported."""

from __future__ import annotations

import datetime
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Annotated

from packaging.version import Version
from pydantic import Field

from trainyard.common.settings import ROOT
from trainyard.spec import yaml_source
from trainyard.spec.yaml_source import Date, Strict, validated

FILE = ROOT / "images/matrix.yaml"

Minor = Annotated[str, Field(pattern=r"^\d+(\.\d+)?$")]


class Release(Strict):
    """Describe a minor release of a framework.

    Attributes:
        first: day of its first release.
        ends: last day, if the framework's makers give one.
        python: minor versions of Python for which the default index has wheels; ``arm64``: those for arm64, if others.
        cuda: version of CUDA -> name of the set of GPUs (:attr:`Matrix.gpus`) that wheels of the default index are for.
    """

    first: Date
    ends: Date | None = None
    python: list[Minor]
    arm64: list[Minor] | None = None
    cuda: dict[Minor, str] = Field(default_factory=dict)

    def pythons(self, arch: str) -> list[str]:
        """Return the minor versions of Python that it has wheels for, on an architecture."""
        return self.python if arch != "arm64" or self.arm64 is None else self.arm64

    @property
    def last(self) -> datetime.date:
        """Return the last day: that of its makers, or a year after the first; see the head of images/matrix.yaml."""
        return self.ends or self.first.replace(year=self.first.year + 1)


class FrameworkReleases(Strict):
    """List the minor releases of a framework.

    Attributes:
        source: address of what its makers say about support.
        trainers: the oldest version that the trainers of the catalogue support; None: any.
    """

    source: str
    trainers: Minor | None = None
    versions: dict[Minor, Release]


class Ends(Strict):
    """Give the first and last day of a base or a Python.

    Attributes:
        security: last day of the distribution's security team, after which others look after it until ``ends``.
    """

    first: Date
    security: Date | None = None
    ends: Date
    source: str | None = None


class Pythons(Strict):
    """List the minor versions of Python; ``source``: of their days."""

    source: str
    versions: dict[Minor, Ends]


class CudaMajor(Strict):
    """Describe a major release of CUDA; ``driver``: the least version of a Linux driver that runs it."""

    driver: str


class Cuda(Strict):
    """List the major releases of CUDA, and branch of the driver -> its last day; ``source``: of both.

    Attributes:
        ptx: minor release of CUDA -> the least version of a Linux driver that compiles its PTX.
        cudnn: minor release of cuDNN -> the least compute capability that it and later ones have code for.
    """

    source: str
    versions: dict[str, CudaMajor]
    drivers: dict[str, Date]
    ptx: dict[Minor, str]
    cudnn: dict[Minor, str]


class Matrix(Strict):
    """Hold the content of images/matrix.yaml.

    Attributes:
        gpus: name of a set -> architecture -> compute capabilities, separated by spaces, with code in a wheel.
    """

    frameworks: dict[str, FrameworkReleases]
    gpus: dict[str, dict[str, str]]
    bases: dict[str, Ends]
    python: Pythons
    cuda: Cuda


def read(file: Path) -> Matrix:
    """Read a table in the form of images/matrix.yaml.

    Raises:
        UserError: it has a mistake.
    """
    data = yaml_source.read(file)
    return validated(file, Matrix, data, yaml_source.plain(data))


@cache
def matrix() -> Matrix:
    """Return images/matrix.yaml.

    Raises:
        UserError: it has a mistake.
    """
    return read(FILE)


@dataclass(frozen=True, order=True)
class End:
    """Name the last day of something that an image consists of.

    Attributes:
        what: such as ``torch 2.15``.
    """

    day: datetime.date
    what: str


def release(framework: str, version: str) -> tuple[str, Release] | None:
    """Return the minor release that a version belongs to, and its name; None if images/matrix.yaml has none."""
    known = matrix().frameworks.get(framework)
    try:
        major, second, *_ = Version(version).release
    except ValueError:  # 'unlocked' is no version
        return None
    minor = f"{major}.{second}"
    return (minor, known.versions[minor]) if known and minor in known.versions else None


def ends(framework: str, version: str, *, base: str, python: str, nvidia: bool) -> list[End]:
    """Return the last days of what an image consists of, the first that ends first.

    Args:
        framework: its name in a spec; ``version``: of its release. A nightly has no last day.
        base: name of the base; ``python``: minor version.
        nvidia: whether the image is for NVIDIA GPUs, so that CUDA counts.
    """
    known, found = matrix(), []
    released = release(framework, version)
    if released:
        minor, row = released
        found.append(End(row.last, f"{framework} {minor}"))
        majors = {cuda.partition(".")[0] for cuda in row.cuda} if nvidia else set()
        found += [End(max(known.cuda.drivers.values()), f"CUDA {major}") for major in majors]
    if base in known.bases:
        found.append(End(known.bases[base].ends, f"base {base}"))
    if python in known.python.versions:
        found.append(End(known.python.versions[python].ends, f"Python {python}"))
    return sorted(found)


def has_trainers(framework: str, version: str) -> bool:
    """Return whether the trainers of the catalogue support a version of a framework."""
    known = matrix().frameworks.get(framework)
    oldest = known.trainers if known else None
    try:
        return oldest is None or Version(version) >= Version(oldest)
    except ValueError:  # 'unlocked': `trainyard lock` has not chosen it
        return True
