"""Print when a container's Python starts and how long it imports some packages.

benchmarks/cold_start.py mounts a copy as /cold-start/sitecustomize.py, which Python imports when it starts:
https://docs.python.org/3/library/site.html#module-sitecustomize
Lines on stderr, with times in seconds since 1970:

    cold-start python 1795404629.207
    cold-start import tensorflow 1795404629.301 1795404631.402

The packages are those of the variable COLD_START_PACKAGES, separated by commas.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Sequence
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType


class _Timed:
    """A finder for ``sys.meta_path`` that measures the first import of each of ``packages``."""

    def __init__(self, packages: set[str]) -> None:
        self._left = packages

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name not in self._left:
            return None
        self._left.discard(name)
        spec = PathFinder.find_spec(name, path, target)
        if spec is None or spec.loader is None:
            return spec
        execute = spec.loader.exec_module

        def exec_module(module: ModuleType) -> None:
            begun = time.time()
            execute(module)
            _print(f"import {name} {begun:.6f} {time.time():.6f}")

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


def _print(words: str) -> None:
    os.write(2, f"cold-start {words}\n".encode())


if packages := os.environ.get("COLD_START_PACKAGES"):
    sys.meta_path.insert(0, _Timed(set(packages.split(","))))
    _print(f"python {time.time():.6f}")
