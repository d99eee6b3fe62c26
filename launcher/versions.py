"""Give the launcher's version, and what the releases of torch_xla (R2.2) and JAX (R13.26) support.

Unknown versions count as the current one.
"""

from __future__ import annotations

VERSION = "0.1.0"  # that of Trainyard; an image has no package metadata of the launcher
CURRENT = (2, 9)


def release(version: str) -> tuple[int, int]:
    """The (major, minor) of "2.9.0", "2.9.0+cpu" or "2.10.0.dev20251101"; CURRENT for anything else."""
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
    """Whether XRT, the runtime for TPU nodes, is included: it was removed in 2.1 (R2.2)."""
    return release(version) <= (2, 0)


def has_pjrt(version: str) -> bool:
    """Whether PJRT is included: since 1.13, where PJRT_DEVICE enables it; the default since 2.0 (R2.2)."""
    return release(version) >= (1, 13)


def pjrt_gpu(version: str) -> str:
    """The value of PJRT_DEVICE for a GPU: "GPU" (2.0, 2.1), "CUDA" (2.2 to 2.8), else "" (R2.2).

    2.9 removed GPU support; before 2.0 GPUs were used through XRT.
    """
    number = release(version)
    if (2, 0) <= number <= (2, 1):
        return "GPU"
    if (2, 2) <= number <= (2, 8):
        return "CUDA"
    return ""


def parses_4d_bounds(version: str) -> bool:
    """Whether `process_bounds_size` accepts the four-dimensional bounds that 2.9 sets on tpu7x; 2.9 does not (R3.7)."""
    return release(version) > (2, 9)


def jax_has_gloo(version: str) -> bool:
    """Return whether JAX's collectives on CPUs are gloo's by default, as since 0.5.1; before, there were none."""
    words = [*version.split("."), "0"][:3]
    if not all(word.isascii() and word.isdigit() and len(word) < 6 for word in words):
        return True
    return tuple(int(word) for word in words) >= (0, 5, 1)
