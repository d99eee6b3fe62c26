"""Bytes as people read them, in the decimal units that specs, disks and registries use."""

from __future__ import annotations


def in_units(count: float) -> str:
    """``1.85 GB``, ``340.9 MB``, ``67.6 KB`` or ``302 B``."""
    for unit, size, digits in (("GB", 10**9, 2), ("MB", 10**6, 1), ("KB", 10**3, 1)):
        if count >= size:
            return f"{count / size:.{digits}f} {unit}"
    return f"{count:.0f} B"
