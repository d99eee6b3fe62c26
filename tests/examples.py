"""The number of random examples that a test tries: a quarter, and all of them with --big."""

from __future__ import annotations

#: Set by conftest.py before tests are imported.
ALL = False


def examples(number: int) -> int:
    """Return ``number``, or a quarter of it without --big."""
    return number if ALL else number // 4
