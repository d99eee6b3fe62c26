"""The flags of Trainyard's trainers, by their ``--help``: a misspelt one would end every trial of a search."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterable
from functools import cache

from trainyard.common.errors import UserError, nearest
from trainyard.common.settings import ROOT
from trainyard.recipe import Recipe


@cache
def of_trainer(package: str, trainer: str) -> frozenset[str]:
    """Flags without their dashes; empty if ``--help`` fails (trainers answer it before they import a framework)."""
    command = [sys.executable, "-m", f"trainers.{package}.{trainer}", "--help"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)
    return frozenset(re.findall(r"--([a-z][\w-]*)", done.stdout)) if done.returncode == 0 else frozenset()


def check(recipe: Recipe, trainer: str, words: Iterable[str], *, option: str) -> None:
    """Check that a trainer of an image has the flags among ``words``, unless only the image has the trainer.

    Args:
        option: the option that gives them, for the message.
    Raises:
        UserError: it has no such flag; the message suggests the nearest.
    """
    module = re.fullmatch(rf"trainers\.(\w+)\.{re.escape(trainer)}", (recipe.commands[trainer] or ("",))[-1])
    for word in words:
        flag = word.partition("=")[0].lstrip("-").replace("_", "-")
        known = of_trainer(module[1], trainer) if module and word.startswith("--") and flag else frozenset()
        if known and flag not in known:
            raise UserError(f"'{option}': {recipe.name}'s {trainer} has no flag --{flag}{nearest(flag, known)}")
