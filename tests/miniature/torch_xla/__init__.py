"""As much of PyTorch/XLA as a trainer of the tests uses, with or without XRT."""

from __future__ import annotations

import os

from torch_xla.version import __version__ as __version__


def device() -> str:
    """Return where a trainer runs: the first worker of XRT's configuration, or PJRT's device.

    Raises:
        RuntimeError: this release has no XRT (from 2.1), and no PJRT device is set.
    """
    if _release(__version__) <= (2, 0) and (config := os.environ.get("XRT_TPU_CONFIG")):
        name, number, address = config.split("|")[0].split(";")
        return f"{name}:{number} at {address}"
    if kind := os.environ.get("PJRT_DEVICE"):
        return f"xla:0 ({kind})"
    raise RuntimeError("PJRT_DEVICE is not set")


def _release(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split(".")[:2])
