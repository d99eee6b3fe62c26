"""Faults in a target's locks, while its image stays as it is."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

from benchmarks.mutations.chance import word

from trainyard.spec import lockfile
from trainyard.spec.model import Spec
from trainyard.spec.naming import LABELS

#: An entry of a lock: name, version, and the lines with its hashes.
_ENTRY = re.compile(r"(?m)^(?P<name>[A-Za-z0-9._-]+)==(?P<version>\S+)(?P<rest>[^\n]*\n(?:[ \t]+[^\n]*\n?)*)")

_HASH = re.compile(r"(?<=sha256:)[0-9a-f]{64}")


@dataclass(frozen=True)
class LockFault:
    """A fault in one lock of a copy of a target's folder.

    Attributes:
        places: words, of which a finding that concerns it has one.
    """

    kind: str
    what: str
    places: tuple[str, ...]
    file: str
    text: str


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


def lock_fault(rng: Random, own: Iterable[Path], kind: str) -> LockFault:
    """A fault in a random package of an image's locks."""
    texts = {path.name: path.read_text(encoding="utf-8") for path in own}
    file, entry = rng.choice([(file, entry) for file, text in texts.items() for entry in _ENTRY.finditer(text)])
    new, what = OPERATORS[kind](rng, entry)
    text = texts[file][: entry.start()] + new + texts[file][entry.end() :]
    return LockFault(kind, f"{file}: {what}", (entry["name"],), file, text)


def of_image(spec: Spec, config: Mapping[str, Any]) -> tuple[Path, ...]:
    """The locks in a target's folder that an image was made from, by its configuration."""
    labels = config.get("config", {}).get("Labels") or {}
    index = labels.get(f"{LABELS}.index", "default")
    found = (lockfile.framework_lock(spec, index), lockfile.requirements_lock(spec, index))
    return tuple(path for path in found if path.parent == spec.folder)


def copied(target: Path, parent: Path, fault: LockFault | None = None) -> Path:
    """A copy of a target's folder in ``parent``, with a fault in it."""
    folder = parent / target.name
    shutil.copytree(target, folder)
    if fault:
        (folder / fault.file).write_text(fault.text, encoding="utf-8")
    return folder
