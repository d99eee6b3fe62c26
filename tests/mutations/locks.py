"""Faults in a target's locks, while its image stays as it is."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random
from typing import Any

from tests import target_locks
from tests.mutations.chance import word
from trainyard.spec import lock
from trainyard.spec.lock import Lock, Section
from trainyard.spec.model import Spec
from trainyard.spec.naming import LABELS

#: An entry of a lock: name, version, and the lines with its hashes.
_ENTRY = re.compile(r"(?m)^(?P<name>[A-Za-z0-9._-]+)==(?P<version>\S+)(?P<rest>[^\n]*\n(?:[ \t]+[^\n]*\n?)*)")

_HASH = re.compile(r"(?<=sha256:)[0-9a-f]{64}")


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


Edit = Callable[[Random, re.Match[str]], tuple[str, str]]


def _other_version(rng: Random, entry: re.Match[str]) -> tuple[str, str]:
    numbers = list(re.finditer(r"\d+", entry["version"].partition("+")[0]))
    number = rng.choice(numbers)
    start, end = number.span()
    version = entry["version"][:start] + str(int(number[0]) + 1) + entry["version"][end:]
    return f"{entry['name']}=={version}{entry['rest']}", f"{entry['name']} {version} instead of {entry['version']}"


def _other_hashes(rng: Random, entry: re.Match[str]) -> tuple[str, str]:
    rest = _HASH.sub(lambda _: word(rng, 64, "0123456789abcdef"), entry["rest"])
    return f"{entry['name']}=={entry['version']}{rest}", f"{entry['name']}: other hashes"


def _removed(_: Random, entry: re.Match[str]) -> tuple[str, str]:
    return "", f"{entry['name']} removed"


#: Kind of fault -> what it makes of an entry, and one line about it.
OPERATORS: dict[str, Edit] = {
    "version in a lock": _other_version, "hash in a lock": _other_hashes, "package removed from a lock": _removed
}  # fmt: skip


def lock_fault(rng: Random, content: Lock, own: Iterable[Section], kind: str) -> LockFault:
    """Plant a fault in a random package of an image.

    Args:
        content: the lock of the image's target.
        own: the sections that the image was made from.
    """
    places = [(section, entry) for section in own for entry in _ENTRY.finditer(content.sections[section])]
    section, entry = rng.choice(places)
    new, what = OPERATORS[kind](rng, entry)
    text = content.sections[section]
    changed = {**content.sections, section: text[: entry.start()] + new + text[entry.end() :]}
    return LockFault(kind, f"{section}: {what}", (entry["name"],), replace(content, sections=changed))


def of_image(spec: Spec, config: Mapping[str, Any]) -> tuple[Section, ...]:
    """Return the sections of a target's lock that an image was made from, by its configuration."""
    labels = config.get("config", {}).get("Labels") or {}
    index = labels.get(f"{LABELS}.index", lock.DEFAULT)
    kinds = ["requirements"] if spec.framework_of else ["framework", "requirements"]
    return tuple(Section(spec.arch, kind, index) for kind in kinds)


def copied(target: Path, parent: Path, fault: LockFault | None = None) -> Path:
    """A copy of a target's folder in ``parent``, with a fault in it."""
    folder = parent / target.name
    shutil.copytree(target, folder)
    if fault:
        target_locks.write(folder, fault.content)
    return folder
