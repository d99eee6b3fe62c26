"""Faults in a target's locks, while its image stays as it is."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random
from typing import Any

from tests import locks
from tests.mutations.chance import word
from trainyard.spec import lock
from trainyard.spec.lock import Lock, Pin
from trainyard.spec.model import Spec
from trainyard.spec.naming import LABELS


@dataclass(frozen=True)
class LockFault:
    """A fault in the lock of a copy of a target's folder.

    Attributes:
        places: words, of which a finding that concerns it has one.
        content: the lock with the fault.
    """

    kind: str
    what: str
    places: tuple[str, ...]
    content: Lock


Edit = Callable[[Random, Pin], tuple[Pin | None, str]]


def _other_version(rng: Random, pin: Pin) -> tuple[Pin | None, str]:
    number = rng.choice(list(re.finditer(r"\d+", pin.version.partition("+")[0])))
    start, end = number.span()
    version = pin.version[:start] + str(int(number[0]) + 1) + pin.version[end:]
    files = (replace(file, name=file.name.replace(pin.version, version)) for file in pin.files)
    return replace(pin, version=version, files=tuple(files)), f"{pin.name} {version} instead of {pin.version}"


def _other_hashes(rng: Random, pin: Pin) -> tuple[Pin | None, str]:
    files = (replace(file, sha256=word(rng, 64, "0123456789abcdef")) for file in pin.files)
    return replace(pin, files=tuple(files)), f"{pin.name}: other hashes"


def _removed(_: Random, pin: Pin) -> tuple[Pin | None, str]:
    return None, f"{pin.name} removed"


#: Kind of fault -> what it makes of a pin, and one line about it.
OPERATORS: dict[str, Edit] = {
    "version in a lock": _other_version, "hash in a lock": _other_hashes, "package removed from a lock": _removed
}  # fmt: skip


@dataclass(frozen=True)
class Part:
    """Name what an image was made from of its target's lock.

    Attributes:
        own: whether without the framework, which is that of another target.
    """

    arch: str
    index: str
    own: bool


def lock_fault(rng: Random, content: Lock, part: Part, kind: str) -> LockFault:
    """Plant a fault in a random package of an image.

    Args:
        content: the lock of the image's target, ``part``: what of it the image was made from.
    """
    locked = content.indexes[part.index][part.arch]
    pin = rng.choice([one for one in locked.pins if not (part.own and one.role == "framework")])
    new, what = OPERATORS[kind](rng, pin)
    pins = tuple(one for one in (new if one is pin else one for one in locked.pins) if one)
    of_index = {**content.indexes[part.index], part.arch: replace(locked, pins=pins)}
    changed = replace(content, indexes={**content.indexes, part.index: of_index})
    return LockFault(kind, f"{part.arch}, {part.index}: {what}", (pin.name,), changed)


def of_image(spec: Spec, config: Mapping[str, Any]) -> Part:
    """Return what an image was made from of its target's lock, by its configuration."""
    labels = config.get("config", {}).get("Labels") or {}
    return Part(spec.arch, labels.get(f"{LABELS}.index", lock.DEFAULT), bool(spec.framework_of))


def copied(target: Path, parent: Path, fault: LockFault | None = None) -> Path:
    """A copy of a target's folder in ``parent``, with a fault in it."""
    folder = parent / target.name
    shutil.copytree(target, folder)
    if fault:
        locks.write(folder, fault.content)
    return folder
