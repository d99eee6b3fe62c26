"""Random choices that several kinds of faults make."""

from __future__ import annotations

import string
from collections.abc import Callable
from random import Random

from tests.mutations.layout import Entry, SavedImage
from trainyard.common.errors import StepFailed

#: Folders that the engine mounts something on, so that a container does not see what an image has there.
_MOUNTED = ("proc", "sys", "dev")

#: How many random entries are tried before all are looked at.
_ATTEMPTS = 200

LETTERS = string.ascii_lowercase
WORD = string.ascii_letters + string.digits


def word(rng: Random, length: int = 8, letters: str = LETTERS) -> str:
    """Random letters."""
    return "".join(rng.choices(letters, k=length))


def entry(image: SavedImage, rng: Random, wanted: Callable[[Entry], bool], what: str) -> Entry:
    """A random entry of a random layer.

    Args:
        what: what ``wanted`` looks for, for the message.
    Raises:
        StepFailed: no layer has one.
    """

    def usable(one: Entry) -> bool:
        return one.path != "." and one.path.split("/")[0] not in _MOUNTED and wanted(one)

    layers = [entries for entries in image.visible_by_layer if entries]
    for _ in range(_ATTEMPTS):
        found = rng.choice(rng.choice(layers))
        if usable(found):
            return found
    matching = [one for entries in layers for one in entries if usable(one)]
    if not matching:
        raise StepFailed(f"the image has no {what}: use an image that has one")
    return rng.choice(matching)


def folder(image: SavedImage, rng: Random) -> Entry:
    """A random folder."""
    return entry(image, rng, lambda one: one.info.isdir(), "folder")
