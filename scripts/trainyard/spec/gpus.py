"""Tell which NVIDIA GPUs, and which drivers, an image runs on.

Machine code ("cubin") for a compute capability X.Y runs on GPUs X.Z with Z >= Y; PTX for X.Y is compiled by the driver
for any later GPU: https://docs.nvidia.com/cuda/cuda-c-programming-guide/index.html#application-compatibility
A driver of the least version for a major release of CUDA runs machine code of each of its minor releases, and compiles
PTX of the minor releases that are not newer than the driver:
https://docs.nvidia.com/deploy/cuda-compatibility/minor-version-compatibility.html
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field

from trainyard.common.errors import UserError
from trainyard.common.settings import ROOT
from trainyard.spec import matrix, yaml_source
from trainyard.spec.yaml_source import Strict, validated

FILE = ROOT / "images/gpus.yaml"

Capability = Annotated[str, Field(pattern=r"^\d+\.\d$")]

#: How an image runs on a GPU: from machine code, from PTX, or not at all.
Verdict = Literal["runs", "ptx", "no"]

#: Number format, or what needs it -> the least compute capability that has it in hardware.
#: - FP16 in Tensor Cores: https://docs.nvidia.com/cuda/archive/9.0/pdf/CUDA_C_Programming_Guide.pdf (table 13)
#: - BF16, FP8: https://nvidia.github.io/TransformerEngine/support_matrix.html
#: - Triton, by PyTorch: ``has_triton`` of https://github.com/pytorch/pytorch/blob/main/torch/utils/_triton.py
LEAST: dict[str, tuple[int, int]] = {"fp16": (7, 0), "bf16": (8, 0), "fp8": (8, 9), "triton": (7, 0)}


class _Drivers(Strict):
    """Give the first and the last branch of the drivers that know GPUs of a compute capability."""

    driver: str
    last: str | None = None


class _Document(Strict):
    """Hold images/gpus.yaml: what drivers know, model -> compute capability, and models beside arm64 CPUs alone."""

    capabilities: dict[Capability, _Drivers]
    gpus: dict[str, Capability]
    arm64: list[str]


@dataclass(frozen=True)
class Gpu:
    """Describe a model of a GPU, or a family of models.

    Attributes:
        capability: compute capability.
        driver: branch of the first driver for Linux that knows it.
        last: branch of the last driver that knows it; None: the newest does.
        arm64: whether it is in machines with arm64 CPUs alone.
    """

    capability: str
    driver: str
    last: str | None = None
    arm64: bool = False

    def fits(self, arch: str) -> bool:
        """Return whether there are machines of an architecture with it: ``arm64`` has any GPU that fits a slot."""
        return arch == "arm64" or not self.arm64

    def has(self, what: str) -> bool:
        """Return whether it has a number format in hardware, or can run what needs it: a name in :data:`LEAST`."""
        return capability(self.capability) >= LEAST[what]


def read(file: Path) -> _Document:
    """Read a table in the form of images/gpus.yaml.

    Raises:
        UserError: it has a mistake.
    """
    data = yaml_source.read(file)
    document = validated(file, _Document, data, yaml_source.plain(data))
    if unknown := [name for name in document.arm64 if name not in document.gpus]:
        raise UserError(f"{file.name}: 'arm64' names {unknown[0]}, which 'gpus' does not have")
    if missing := sorted(set(document.gpus.values()) - set(document.capabilities)):
        raise UserError(f"{file.name}: no row of 'capabilities' for {missing[0]}, which a GPU of 'gpus' has")
    return document


@cache
def _document() -> _Document:
    return read(FILE)


@cache
def gpus() -> dict[str, Gpu]:
    """Return the models of GPUs of images/gpus.yaml, by name.

    Raises:
        UserError: it has a mistake.
    """
    document = _document()
    return {
        name: Gpu(has, document.capabilities[has].driver, document.capabilities[has].last, name in document.arm64)
        for name, has in document.gpus.items()
    }


def older(version: str, than: str) -> bool:
    """Return whether a version of a driver is certainly older than another: ``580`` is not older than ``580.65.06``."""
    pairs = zip(_numbers(version), _numbers(than), strict=False)
    return next((left < right for left, right in pairs if left != right), False)


def _numbers(version: str) -> list[int]:
    return [int(part) for part in re.findall(r"\d+", version)]


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
        code = [capability(has) for has in self.capabilities]
        if any(major == wanted[0] and minor <= wanted[1] for major, minor in code):
            return "runs"
        return "ptx" if any(capability(has) <= wanted for has in self.ptx) else "no"

    def problem(self, name: str, driver: str = "") -> str:
        """Return why it does not run on a GPU with a driver, in one clause; empty if it runs, or nothing is known.

        CUDA's forward compatibility packages, which let an older driver run it, are the caller's to consider.

        Args:
            name: compute capability of the GPU.
            driver: version of the driver on Linux, or its branch, as in ``580``; empty if it is unknown.
        """
        verdict = self.verdict(name)
        if verdict == "no":
            return f"it has no code for compute capability {name}, only for {self.text}"
        if not driver:
            return ""
        if older(driver, self.driver):
            return f"driver {driver} is older than {self.driver}, which CUDA {self.cuda.partition('.')[0]} needs"
        known = _document().capabilities.get(name)
        if known and older(driver, known.driver):
            return f"driver {driver} does not know GPUs of compute capability {name}: {known.driver} is the first"
        if known and known.last and older(known.last, driver):
            return f"driver {driver} no longer knows GPUs of compute capability {name}: {known.last} is the last"
        compiler = matrix.matrix().cuda.ptx.get(self.cuda, "")
        if verdict == "ptx" and compiler and older(driver, compiler):
            return f"driver {driver} is older than {compiler}, which compiles PTX of CUDA {self.cuda}"
        return ""

    def drivers(self, gpu: Gpu) -> tuple[str, str | None] | None:
        """Return the least driver that runs it on a GPU, and the branch of the last one, if any; None if none does."""
        verdict = self.verdict(gpu.capability)
        compiler = matrix.matrix().cuda.ptx.get(self.cuda, "") if verdict == "ptx" else ""
        least = max(self.driver, gpu.driver, compiler, key=_numbers)
        return None if verdict == "no" or (gpu.last and older(gpu.last, least)) else (least, gpu.last)

    def as_dict(self, arch: str) -> dict[str, Any]:
        """Return it as JSON has it: ``cuda``, ``driver``, ``capabilities``, ``ptx``, and ``models``.

        ``models``: name of each GPU that it runs on, in machines of an architecture -> ``verdict``, ``driver`` (the
        least) and ``last`` (the branch of the last driver, or None).
        """
        models = {}
        for name, gpu in gpus().items():
            if gpu.fits(arch) and (drivers := self.drivers(gpu)):
                models[name] = {"verdict": self.verdict(gpu.capability), "driver": drivers[0], "last": drivers[1]}
        facts = {"cuda": self.cuda, "driver": self.driver}
        return {**facts, "capabilities": list(self.capabilities), "ptx": list(self.ptx), "models": models}

    def within(self, other: DeviceCode) -> DeviceCode:
        """Return what is left of it for GPUs that other code runs on, too."""
        both = {name for name in self.capabilities if other.verdict(name) != "no"}
        both |= {name for name in other.capabilities if self.verdict(name) == "runs"}
        ptx = tuple(name for name in self.ptx if name in both and name in other.ptx)
        return replace(self, capabilities=tuple(sorted(both, key=capability)), ptx=ptx)

    def missing(self, code: Iterable[str], ptx: Iterable[str] = ()) -> list[str]:
        """Return the compute capabilities that code of a library does not run on, lowest first.

        Args:
            code: capabilities with machine code: ``9.0a`` runs on 9.0 alone, ``10.0f`` on later ones of the family.
            ptx: those with PTX; of variants it is not for later GPUs.
        """
        exact = {name.removesuffix("a") for name in code if name.endswith("a")}
        names = tuple(name.removesuffix("f") for name in code if not name.endswith("a"))
        has = DeviceCode(self.cuda, self.driver, names, tuple(name for name in ptx if name[-1].isdigit()))
        return [name for name in self.capabilities if name not in exact and has.verdict(name) == "no"]


def for_arch_list(text: str) -> DeviceCode | None:
    """Return what a value of TORCH_CUDA_ARCH_LIST compiles for; None if it is empty or names architectures by words."""
    words = [word.replace("a+", "+").removesuffix("a").removesuffix("f") for word in re.split(r"[;,\s]+", text) if word]
    try:
        return DeviceCode.parse("", "", " ".join(words)) if words else None
    except UserError:
        return None


def device_code(framework: str, version: str, arch: str, cuda: str = "", cudnn: str = "") -> DeviceCode | None:
    """Return what wheels of a framework's release need of a GPU; None if images/matrix.yaml does not say it.

    Args:
        arch: name of the architecture.
        cuda: version of CUDA that is installed, if it is known: of a release with wheels for several, it selects one.
        cudnn: version of cuDNN that is installed, if it is known: it may have no code for older GPUs.
    """
    released = matrix.release(framework, version)
    rows = released[1].cuda if released else {}
    row = next((name for name in rows if not cuda or name.partition(".")[0] == cuda.partition(".")[0]), None)
    if row is None:
        return None
    known = matrix.matrix()
    capabilities = known.gpus[rows[row]].get(arch)
    driver = known.cuda.versions[row.partition(".")[0]].driver
    code = DeviceCode.parse(row, driver, capabilities) if capabilities else None
    least = [least for minor, least in known.cuda.cudnn.items() if cudnn and _numbers(cudnn) >= _numbers(minor)]
    if code is None or not least:
        return code
    lowest = max(least, key=capability)
    kept = {name for name in code.capabilities if capability(name) >= capability(lowest)}
    kept |= {lowest} if code.verdict(lowest) == "runs" else set()
    ptx = tuple(name for name in code.ptx if name in kept)
    return replace(code, capabilities=tuple(sorted(kept, key=capability)), ptx=ptx)


def respelled(name: str, known: Iterable[str]) -> str:
    """Return the known name of an accelerator or a machine that ``name`` misspells; empty if it may be another name.

    Only what distinguishes no two of Google's names may differ: case, separators, and the words NVIDIA, TESLA, tpu, v
    and slice; a GPU's memory may be missing. Examples: ``NVIDIA_T4``, ``nvidia-L4``, ``tpu-v7x-slice``.
    """

    def essence(one: str) -> str:
        return re.sub(r"^(nvidia-)?(tesla-)?((tpu-?)?v?(?=\d))?|-(pod)?slice$", "", one.lower().replace("_", "-"))

    found = {essence(one): one for one in known}
    short = {re.sub(r"-\d+gb$", "", one): right for one, right in reversed(found.items())}
    return (short | found).get(essence(name), "")
