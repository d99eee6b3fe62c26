"""Tell which NVIDIA GPUs, and which drivers, an image runs on.

Machine code ("cubin") for a compute capability X.Y runs on GPUs X.Z with Z >= Y; PTX for X.Y is compiled by the driver
for any later GPU: https://docs.nvidia.com/cuda/cuda-c-programming-guide/index.html#application-compatibility
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cache
from typing import Annotated, Literal

from pydantic import Field

from trainyard.common.errors import UserError
from trainyard.spec import matrix, yaml_source
from trainyard.spec.catalog import IMAGES, Strict, validated

FILE = IMAGES / "gpus.yaml"

Capability = Annotated[str, Field(pattern=r"^\d+\.\d$")]

#: How an image runs on a GPU: from machine code, from PTX, or not at all.
Verdict = Literal["runs", "ptx", "no"]


class Gpu(Strict):
    """Describe a model of a GPU.

    Attributes:
        capability: compute capability.
        driver: branch of the first driver for Linux that knows it.
        last: branch of the last driver that knows it; None: there is a newer branch that does.
    """

    capability: Capability
    driver: str
    last: str | None = None


class _Document(Strict):
    """Hold the content of images/gpus.yaml."""

    gpus: dict[str, Gpu]


@cache
def gpus() -> dict[str, Gpu]:
    """Return the models of GPUs of images/gpus.yaml, by name.

    Raises:
        UserError: it has a mistake.
    """
    data = yaml_source.read(FILE)
    return validated(FILE, _Document, data, yaml_source.plain(data)).gpus


def capability(text: str) -> tuple[int, int]:
    """Return a compute capability as numbers: ``(9, 0)`` of ``9.0``."""
    major, minor = text.split(".")
    return int(major), int(minor)


@dataclass(frozen=True)
class DeviceCode:
    """Say what an image needs of a GPU and its driver.

    Attributes:
        cuda: version of CUDA, without the patch level.
        driver: least version of the driver on Linux.
        capabilities: compute capabilities with machine code, lowest first.
        ptx: those with PTX.
    """

    cuda: str
    driver: str
    capabilities: tuple[str, ...]
    ptx: tuple[str, ...] = ()

    @property
    def text(self) -> str:
        """Return the capabilities as TORCH_CUDA_ARCH_LIST has them, with spaces: ``8.0 9.0+PTX``."""
        return " ".join(f"{name}+PTX" if name in self.ptx else name for name in self.capabilities)

    @classmethod
    def parse(cls, cuda: str, driver: str, text: str) -> DeviceCode:
        """Read the capabilities from the form that :attr:`text` has.

        Raises:
            UserError: a word is not a capability.
        """
        words = text.split()
        if wrong := [word for word in words if not re.fullmatch(r"\d+\.\d(\+PTX)?", word)]:
            raise UserError(f"{wrong[0]!r} is not a compute capability such as 9.0 or 9.0+PTX")
        names = tuple(word.removesuffix("+PTX") for word in words)
        return cls(cuda, driver, names, tuple(word.removesuffix("+PTX") for word in words if word.endswith("+PTX")))

    def verdict(self, name: str) -> Verdict:
        """Return how it runs on a GPU of a compute capability."""
        wanted = capability(name)
        code = [capability(one) for one in self.capabilities]
        if any(major == wanted[0] and minor <= wanted[1] for major, minor in code):
            return "runs"
        return "ptx" if any(capability(one) <= wanted for one in self.ptx) else "no"


def device_code(framework: str, version: str, arch: str, cuda: str = "") -> DeviceCode | None:
    """Return what wheels of a framework's release need of a GPU; None if images/matrix.yaml does not say it.

    Args:
        arch: name of the architecture.
        cuda: version of CUDA that is installed, if it is known: of a release with wheels for several, it selects one.
    """
    released = matrix.release(framework, version)
    rows = released[1].cuda if released else {}
    row = next((name for name in rows if not cuda or name.partition(".")[0] == cuda.partition(".")[0]), None)
    if row is None:
        return None
    known = matrix.matrix()
    capabilities = known.gpus[rows[row]].get(arch)
    driver = known.cuda.versions[row.partition(".")[0]].driver
    return DeviceCode.parse(row, driver, capabilities) if capabilities else None
