"""What all tests share. Tests say what the product promises; how an image comes to be there is said here, once."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

# Ryuk, testcontainers' reaper, is an image of a registry that closed networks do not reach; fixtures clean up instead.
os.environ.setdefault("TESTCONTAINERS_RYUK_DISABLED", "true")

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture(scope="session")
def built_image() -> Callable[[str], str]:
    """``built_image("tf-cpu")`` is the reference of that target's image, which has passed verify and smoke.

    It is built if need be: once a session, and again where another test has dropped it.
    """
    from scripts import engine, image
    from scripts.spec import load

    made: dict[str, str] = {}

    def reference(target: str) -> str:
        if target not in made or not engine.client().images.list(name=made[target]):
            made[target] = str(image.make(load(target))["image"])
            if os.environ.get("CI"):
                # A throw-away machine never installs these wheels again: 8 GB less at the peak (of 40 allowed).
                engine.buildx("prune", "--force", "--filter=type=exec.cachemount", quiet=True)
        return made[target]

    return reference
