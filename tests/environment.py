"""The environment of a command that a test runs within its own process."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping


@contextlib.contextmanager
def only(variables: Mapping[str, str]) -> Iterator[None]:
    """Make these the only variables of the environment, while the context lasts."""
    before = dict(os.environ)
    os.environ.clear()
    os.environ.update(variables)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)
