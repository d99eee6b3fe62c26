"""What each torch_xla release can do (contract a.6). A table of gates; unknown versions count as current."""

from __future__ import annotations

CURRENT = (2, 9)


def release(version: str) -> tuple[int, int]:
    """The (major, minor) of "2.9.0", "2.9.0+cpu" or "2.10.0.dev20251101"; CURRENT when there is no such number."""
    parts = []
    for word in version.split("+")[0].split(".")[:2]:
        digits = ""
        for character in word:
            if not ("0" <= character <= "9"):
                break
            digits += character
        if not digits or len(digits) > 6:
            return CURRENT
        parts.append(int(digits))
    return (parts[0], parts[1]) if len(parts) == 2 else CURRENT


def has_xrt(version: str) -> bool:
    """XRT, the runtime that drives TPU nodes, was removed in 2.1 (pytorch/xla#5240)."""
    return release(version) <= (2, 0)


def has_pjrt(version: str) -> bool:
    """PJRT came with 1.13 (opt-in through PJRT_DEVICE) and is the default since 2.0."""
    return release(version) >= (1, 13)


def pjrt_gpu(version: str) -> str:
    """What PJRT_DEVICE is called for a GPU: GPU (2.0, 2.1), CUDA (2.2 to 2.8), "" where there is none.

    2.9 removed the GPU; before 2.0 a GPU was XRT's.
    """
    number = release(version)
    if (2, 0) <= number <= (2, 1):
        return "GPU"
    if (2, 2) <= number <= (2, 8):
        return "CUDA"
    return ""


def parses_4d_bounds(version: str) -> bool:
    """2.9 exports four-dimensional TPU_PROCESS_BOUNDS for tpu7x that its own `process_bounds_size` refuses (T112)."""
    return release(version) > (2, 9)
