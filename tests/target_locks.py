"""Locks of targets, from entries of sections."""

from __future__ import annotations

from pathlib import Path

from trainyard.spec import pylock
from trainyard.spec.architectures import ARCHITECTURES
from trainyard.spec.framework import BaseContents
from trainyard.spec.lock import Lock, Pin
from trainyard.spec.pylock import Content, Entry, File


def _entry(pin: Pin, arch: str, *, framework: bool) -> Entry:
    stem = f"{pin.name.replace('-', '_')}-{pin.version}"
    tag = f"py3-none-manylinux_2_17_{ARCHITECTURES[arch].machine}.whl"
    files = (File(f"{stem}-{number}-{tag}", sha, pin.size) for number, sha in enumerate(pin.hashes, 1))
    return Entry(pin.name, pin.version, tuple(files), framework, pin.added)


def contents(lock: Lock, python: str) -> dict[str, Content]:
    """Return name of an index -> the content of its lock, with names of files that fit the hashes."""
    found = {}
    for index in {section.index for section in lock.sections}:
        entries: dict[str, list[Entry]] = {}
        base: dict[str, BaseContents] = {}
        for arch in ARCHITECTURES:
            if locked := lock.of(arch, index):
                of_framework = [_entry(pin, arch, framework=True) for pin in locked.framework]
                others = [_entry(pin, arch, framework=False) for pin in locked.requirements]
                entries[arch] = sorted([*of_framework, *others], key=lambda entry: entry.name)
                base |= {arch: locked.base} if locked.base else {}
        found[index] = Content(python, entries, lock.day, base)
    return found


def write(folder: Path, lock: Lock, python: str = "3.11") -> None:
    """Write the locks of a target into its folder.

    Args:
        python: minor version of its base.
    """
    for index, content in contents(lock, python).items():
        (folder / pylock.file_name(index)).write_text(content.text(), encoding="utf-8")
