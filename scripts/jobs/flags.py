"""The flags that a trainer of ours has, by its own word: a misspelt one would end every trial of a search."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterable
from functools import cache

from scripts.cli import ROOT, UserError, nearest
from scripts.spec import Spec


@cache
def of_trainer(package: str, trainer: str) -> frozenset[str]:
    """Flags without their dashes; empty if the trainer does not say (it answers before any framework is imported)."""
    command = [sys.executable, "-m", f"trainers.{package}.{trainer}", "--help"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)
    return frozenset(re.findall(r"--([a-z][\w-]*)", done.stdout)) if done.returncode == 0 else frozenset()


def check(spec: Spec, trainer: str, words: Iterable[str], *, variable: str) -> None:
    """See that a trainer has the flags among ``words``.

    Args:
        variable: where they were given, for the message.
    Raises:
        UserError: it has no such flag; the nearest is named.
    """
    if not (ROOT / "trainers" / spec.trainers.package / f"{trainer}.py").is_file():
        return  # a trainer of the image's own, which may read its arguments as it likes
    for word in words:
        flag = word.partition("=")[0].lstrip("-").replace("_", "-")
        known = of_trainer(spec.trainers.package, trainer) if word.startswith("--") and flag else frozenset()
        if known and flag not in known:
            raise UserError(f"{variable}: {spec.target}'s {trainer} has no flag --{flag}{nearest(flag, known)}")
