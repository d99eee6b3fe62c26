"""Compare verdicts of image x GPU x driver with those that follow from NVIDIA's and PyTorch's tables.

    python -m benchmarks.chips            how many are right, and each that is not
    python -m benchmarks.chips --table    all verdicts

The expected verdicts are written here from published tables, in the terms of these tables (`sm_90`, the CUDA that a
driver supports), and by rules that do not use images/gpus.yaml, images/matrix.yaml or trainyard.spec.gpus. Read on
2026-11-25:

- compute capabilities: https://developer.nvidia.com/cuda-gpus and https://developer.nvidia.com/cuda-legacy-gpus
- the CUDA of each driver: table 3 of
  https://docs.nvidia.com/cuda/archive/13.2.2/cuda-toolkit-release-notes/index.html; 620: the newest branch
- the first CUDA and the last driver of an architecture:
  https://docs.nvidia.com/datacenter/tesla/drivers/cuda-toolkit-driver-and-architecture-matrix.html
- minor version compatibility, and that it leaves PTX out:
  https://docs.nvidia.com/deploy/cuda-compatibility/minor-version-compatibility.html
- architectures of wheels: issues 157517 (CUDA 12.6), 190355 and 190385 (2.14, 2.15) and pull request 164471 (2.9) of
  pytorch/pytorch; build_info.py of TensorFlow's wheel, and cuDNN's
  https://docs.nvidia.com/deeplearning/cudnn/backend/v9.11.0/reference/support-matrix.html
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

from trainyard.spec import gpus, model
from trainyard.spec.gpus import DeviceCode

#: Architecture of GPUs -> their models.
MODELS = {
    "sm_37": ["K80"],
    "sm_52": ["M40", "M60"],
    "sm_60": ["P100"],
    "sm_61": ["P4", "P40", "GeForce GTX 10"],
    "sm_70": ["V100"],
    "sm_75": ["T4", "GeForce RTX 20"],
    "sm_80": ["A100", "A30"],
    "sm_86": ["A2", "A10", "A16", "A40", "RTX A6000", "GeForce RTX 30"],
    "sm_89": ["L4", "L40", "L40S", "RTX 6000 Ada", "GeForce RTX 40"],
    "sm_90": ["H100", "H200", "GH200"],
    "sm_100": ["B200", "GB200"],
    "sm_103": ["B300", "GB300"],
    "sm_120": ["RTX PRO 4500", "RTX PRO 6000", "GeForce RTX 50"],
    "sm_121": ["GB10"],
}
#: Superchips: NVIDIA's CPU for arm64 and its GPU in one module.
SUPERCHIPS = {"GH200", "GB200", "GB300", "GB10"}

#: Driver -> the CUDA that it came with.
DRIVERS = {
    "470.82.01": 11.4, "520.61.05": 11.8, "525.60.13": 12.0, "535.104.05": 12.2, "545.23.08": 12.3, "550.54.15": 12.4,
    "560.35.05": 12.6, "570.124.06": 12.8, "575.57.08": 12.9, "580.95.05": 13.0, "590.48.01": 13.1, "595.71.05": 13.2,
    "620.10": 13.5,
}  # fmt: skip

#: Architecture -> the CUDA that supports it first, and the branch of the last driver.
FIRST_CUDA = {"sm_89": 11.8, "sm_90": 11.8, "sm_100": 12.8, "sm_103": 12.9, "sm_120": 12.8, "sm_121": 12.9}
LAST_DRIVER = {"sm_37": 470, "sm_52": 580, "sm_60": 580, "sm_61": 580, "sm_70": 580}


@dataclass(frozen=True)
class Image:
    """Hold what is published of an image: ``code`` in the words of compilers; ``least``: of its cuDNN, if more."""

    name: str
    arch: str
    cuda: float
    code: str
    least: str = "sm_50"
    release: tuple[str, str] | None = None

    @property
    def verdicts(self) -> DeviceCode:
        """Return the product's facts: of a target of the catalogue, or of a release that a repository may ask for."""
        code = (
            gpus.device_code(*self.release, self.arch) if self.release else model.load(self.name, self.arch).device_code
        )
        assert code is not None, self.name
        return code


IMAGES = [
    Image("gpu", "amd64", 13.2, "sm_75 sm_80 sm_86 sm_90 sm_100 sm_120"),
    Image("gpu", "arm64", 13.2, "sm_80 sm_90 sm_100 sm_110 sm_120"),
    Image("gpu-2.7", "amd64", 12.6, "sm_50 sm_60 sm_70 sm_75 sm_80 sm_86 sm_90"),
    Image("tf-gpu", "amd64", 12.5, "sm_60 sm_70 sm_80 sm_89 sm_90 compute_90", least="sm_75"),
    Image("torch 2.9", "amd64", 12.8, "sm_70 sm_75 sm_80 sm_86 sm_90 sm_100 sm_120", release=("torch", "2.9.1")),
    Image("torch 2.14", "amd64", 13.0, "sm_75 sm_80 sm_86 sm_90 sm_100 sm_120", release=("torch", "2.14.0")),
]


def number(architecture: str) -> int:
    """Return 90 of sm_90 and of compute_90."""
    return int(architecture.rpartition("_")[2])


def expected(image: Image, architecture: str, gpu: str, driver: str) -> str:
    """Return ``runs``, ``ptx`` or ``no``, by the tables above."""
    supports = DRIVERS[driver]
    known = supports >= FIRST_CUDA.get(architecture, 0)
    dropped = int(driver.split(".")[0]) > LAST_DRIVER.get(architecture, 9999)
    if not known or dropped or int(supports) < int(image.cuda) or number(architecture) < number(image.least):
        return "no"
    if gpu in SUPERCHIPS and image.arch != "arm64":
        return "no"
    for code in image.code.split():
        same_major = number(code) // 10 == number(architecture) // 10
        if code.startswith("sm_") and same_major and number(code) <= number(architecture):
            return "runs"
    jit = any(
        code.startswith("compute_") and number(code) <= number(architecture) and supports >= image.cuda
        for code in image.code.split()
    )
    return "ptx" if jit else "no"


def verdict(code: DeviceCode, arch: str, name: str, driver: str) -> str:
    """Return what the product says."""
    gpu = gpus.gpus()[name]
    return "no" if not gpu.fits(arch) or code.problem(gpu.capability, driver) else code.verdict(gpu.capability)


@dataclass(frozen=True)
class Combination:
    """Hold the expected and the product's verdict on an image, a GPU and a driver: ``runs``, ``ptx`` or ``no``."""

    image: str
    gpu: str
    driver: str
    expected: str
    verdict: str


def combinations() -> Iterator[Combination]:
    """Yield every combination of the tables."""
    for image in IMAGES:
        code = image.verdicts
        for architecture, models in MODELS.items():
            for name in models:
                for driver in DRIVERS:
                    said = verdict(code, image.arch, name, driver)
                    wanted = expected(image, architecture, name, driver)
                    yield Combination(f"{image.name} ({image.arch})", name, driver, wanted, said)


def main(arguments: list[str] | None = None) -> int:
    """Print how many verdicts are right, and return the exit status: 1 if one is not."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--table", action="store_true", help="print all verdicts")
    options = parser.parse_args(arguments)
    rows = list(combinations())
    wrong = [row for row in rows if row.verdict != row.expected]
    for row in rows if options.table else wrong:
        print(f"{row.image}, {row.gpu}, driver {row.driver}: {row.verdict}, expected {row.expected}")
    counts = Counter(row.expected for row in rows)
    print(
        f"{len(rows) - len(wrong)} of {len(rows)} verdicts are right: "
        + ", ".join(f"{counts[k]} {k}" for k in sorted(counts))
    )
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
