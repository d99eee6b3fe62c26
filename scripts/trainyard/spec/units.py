"""Bytes in the decimal units that specs, disks and registries use."""

from __future__ import annotations

import re

#: Bytes in one unit; Docker spells the second with a small k.
UNITS = {"B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9}


def in_units(count: float) -> str:
    """``1.85 GB``, ``340.9 MB``, ``67.6 KB`` or ``302 B``."""
    for unit, size, digits in (("GB", 10**9, 2), ("MB", 10**6, 1), ("KB", 10**3, 1)):
        if count >= size:
            return f"{count / size:.{digits}f} {unit}"
    return f"{count:.0f} B"


def in_bytes(text: str) -> int:
    """Bytes of ``1.9 GB`` or ``1.9kB``.

    Raises:
        ValueError: it is not a number with a unit.
    """
    match = re.fullmatch(r"(\d{1,15}(?:\.\d+)?) ?(B|[Kk]B|MB|GB)", text)
    if not match:
        raise ValueError(
            f"{text[:40]!r} is not a size: write a number and a unit of {', '.join(UNITS)}, as in '1.9 GB'"
        )
    return int(float(match[1]) * UNITS[match[2].upper()])
