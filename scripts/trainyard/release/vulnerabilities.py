"""Vulnerabilities of packages, and the waivers that accept them until a date."""

from __future__ import annotations

import datetime
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

from packaging.version import InvalidVersion, Version

from trainyard.lint.waivers import Waiver

#: Canonical name -> versions, of everything that is locked.
Pins = dict[str, set[str]]


@dataclass(frozen=True)
class Vulnerability:
    """A known vulnerability of a package of an image.

    Attributes:
        package: canonical name of a Python package; source package of Debian packages.
        names: all ids of the advisory, the first being the source's own.
        fixed: versions that do not have it.
        targets: the images that have this version.
        waiver: its waiver in words; empty if there is none.
        fails: whether it has no waiver, or one that has expired; a note never fails.
        kind: ``python`` or ``debian``.
        note: why it does not fail without a waiver; empty if it does.
    """

    package: str
    version: str
    names: tuple[str, ...]
    summary: str
    fixed: tuple[str, ...]
    targets: tuple[str, ...] = ()
    waiver: str = ""
    fails: bool = True
    kind: str = "python"
    note: str = ""

    def __str__(self) -> str:
        fix = f"fixed in {', '.join(self.fixed)}" if self.fixed else "no fix is known"
        return f"{self.package} {self.version}: {self.names[0]} ({fix}), in {', '.join(self.targets)}"


def public_version(version: str) -> str:
    """A version without its local part: advisories are about releases, not about their +cpu builds."""
    try:
        return Version(version).public
    except InvalidVersion:
        return version


def union(pins: Iterable[Pins]) -> Pins:
    """The union of pins."""
    found: Pins = {}
    for each in pins:
        for name, versions in each.items():
            found.setdefault(name, set()).update(versions)
    return found


def evaluate(
    found: list[Vulnerability], pins: dict[str, Pins], known: Iterable[Waiver], today: datetime.date
) -> list[Vulnerability]:
    """The same vulnerabilities with their targets and waivers.

    Args:
        pins: target -> the versions that its images have.
        known: all waivers, expired ones too; one with a target applies to that target only.
    """
    evaluated = []
    for one in found:
        where = [target for target, pin in pins.items() if one.version in pin.get(one.package, set())]
        for target, waiver in ((target, waiver_of(one, target, known)) for target in where):
            words = "" if waiver is None else str(waiver)
            unwaived = waiver is None or waiver.expired(today)
            if waiver is not None and unwaived:
                words = f"expired: {waiver}"
            evaluated.append(replace(one, targets=(target,), waiver=words, fails=unwaived and not one.note))
    merged: dict[tuple[Any, ...], Vulnerability] = {}
    for one in evaluated:
        key = (one.kind, one.package, one.version, one.names, one.waiver)
        before = merged.get(key)
        merged[key] = one if before is None else replace(before, targets=before.targets + one.targets)
    return list(merged.values())


def waiver_of(found: Vulnerability, target: str, known: Iterable[Waiver]) -> Waiver | None:
    """The waiver of a vulnerability that expires last."""
    matching = [
        waiver
        for waiver in known
        for name in found.names
        if waiver.covers_package(name, found.package, found.version, target)
    ]
    return max(matching, key=lambda waiver: waiver.expires, default=None)
