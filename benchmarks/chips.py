"""Compare verdicts of image x GPU x driver with those that follow from NVIDIA's and PyTorch's tables.

    python -m benchmarks.chips    how many are right, and each that is not

The expected verdicts are written here from published tables, in the terms of these tables (`sm_90`, the CUDA that a
driver supports), and by rules that do not use images/gpus.yaml or images/matrix.yaml; the product's are those of
`trainyard list --json`. Read on 2026-11-25:

- compute capabilities: https://developer.nvidia.com/cuda-gpus and https://developer.nvidia.com/cuda-legacy-gpus
- the CUDA of each driver: table 3 of
  https://docs.nvidia.com/cuda/archive/13.2.2/cuda-toolkit-release-notes/index.html; 620: the newest branch
- the first CUDA and the last driver of an architecture:
  https://docs.nvidia.com/datacenter/tesla/drivers/cuda-toolkit-driver-and-architecture-matrix.html
- minor version compatibility, and that it leaves PTX out:
  https://docs.nvidia.com/deploy/cuda-compatibility/minor-version-compatibility.html
- architectures of wheels: issues 157517 (CUDA 12.6), 190355 and 190385 (2.15) of pytorch/pytorch; build_info.py of
  TensorFlow's wheel, and cuDNN's
  https://docs.nvidia.com/deeplearning/cudnn/backend/v9.11.0/reference/support-matrix.html
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

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


IMAGES = [
    Image("gpu", "amd64", 13.2, "sm_75 sm_80 sm_86 sm_90 sm_100 sm_120"),
    Image("gpu", "arm64", 13.2, "sm_80 sm_90 sm_100 sm_110 sm_120"),
    Image("gpu-2.7", "amd64", 12.6, "sm_50 sm_60 sm_70 sm_75 sm_80 sm_86 sm_90"),
    Image("tf-gpu", "amd64", 12.5, "sm_60 sm_70 sm_80 sm_89 sm_90 compute_90", least="sm_75"),
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


def facts() -> dict[str, Any]:
    """Return the product's facts: target -> platform -> name of each GPU that it runs on, its verdict and drivers."""
    command = [sys.executable, "-m", "trainyard", "list", "--json"]
    listed = json.loads(subprocess.check_output(command, stderr=subprocess.DEVNULL))
    return {name: {platform: code["models"] for platform, code in one["gpus"].items()} for name, one in listed.items()}


def verdict(model: dict[str, Any] | None, driver: str) -> str:
    """Return what the product says; a version that is only a branch stands for all of it."""

    def before(left: str, right: str) -> bool:
        pairs = zip(map(int, left.split(".")), map(int, right.split(".")), strict=False)
        return next((one < other for one, other in pairs if one != other), False)

    if model is None or before(driver, model["driver"]) or (model["last"] and before(model["last"], driver)):
        return "no"
    return str(model["verdict"])


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
    known = facts()
    for image in IMAGES:
        models_of = known[image.name][f"linux/{image.arch}"]
        for architecture, models in MODELS.items():
            for name in models:
                for driver in DRIVERS:
                    said = verdict(models_of.get(name), driver)
                    wanted = expected(image, architecture, name, driver)
                    yield Combination(f"{image.name} ({image.arch})", name, driver, wanted, said)


def main() -> int:
    """Print how many verdicts are right, and return the exit status: 1 if one is not."""
    rows = list(combinations())
    wrong = [row for row in rows if row.verdict != row.expected]
    for row in wrong:
        print(f"{row.image}, {row.gpu}, driver {row.driver}: {row.verdict}, expected {row.expected}")
    counts = Counter(row.expected for row in rows)
    print(
        f"{len(rows) - len(wrong)} of {len(rows)} verdicts are right: "
        + ", ".join(f"{counts[k]} {k}" for k in sorted(counts))
    )
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
