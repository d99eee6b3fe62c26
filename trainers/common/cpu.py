"""Features of the CPU."""

from __future__ import annotations

import pathlib


def has_bf16() -> bool:
    """Whether the CPU multiplies bfloat16 in hardware; without that, bf16 is slower than fp32."""
    try:
        features = pathlib.Path("/proc/cpuinfo").read_text(encoding="ascii", errors="replace").split()
    except OSError:
        return False
    return "avx512_bf16" in features or "amx_bf16" in features
