"""Judge vulnerabilities of packages by the waivers that accept them until a date."""

from __future__ import annotations

import datetime
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from packaging.version import InvalidVersion, Version

from trainyard.common.errors import StepFailed
from trainyard.lint.waivers import Waiver

#: Canonical name -> versions, of everything that is locked.
Pins = dict[str, set[str]]


@dataclass(frozen=True)
class Vulnerability:
    """Describe a known vulnerability of a package of an image.

    Attributes:
        package: its canonical name.
        names: all ids of the advisory, the first being the source's own.
        fixed: versions that do not have it.
        targets: the images that have this version.
        waiver: its waiver in words; empty if there is none.
        fails: whether it has no waiver, or one that has expired.
    """

    package: str
    version: str
    names: tuple[str, ...]
    summary: str
    fixed: tuple[str, ...]
    targets: tuple[str, ...] = ()
    waiver: str = ""
    fails: bool = True

    def __str__(self) -> str:
        fix = f"fixed in {', '.join(self.fixed)}" if self.fixed else "no fix is known"
        return f"{self.package} {self.version}: {self.names[0]} ({fix}), in {', '.join(self.targets)}"


def public_version(version: str) -> str:
    """Return a version without its local part: advisories are about releases, not about their +cpu builds."""
    try:
        return Version(version).public
    except InvalidVersion:
        return version


def union(pins: Iterable[Pins]) -> Pins:
    """Return the union of pins."""
    united: Pins = {}
    for each in pins:
        for name, versions in each.items():
            united.setdefault(name, set()).update(versions)
    return united


def refuse(failing: Sequence[object], remedy: str) -> None:
    """Raise :class:`StepFailed` with the first of what fails, the number of the others, and what to do."""
    if failing:
        more = f" (and {len(failing) - 1} more)" if len(failing) > 1 else ""
        raise StepFailed(f"{failing[0]}{more}: update the package, or add a waiver {remedy}")


def evaluate(
    found: list[Vulnerability], pins: dict[str, Pins], known: Iterable[Waiver], today: datetime.date
) -> list[Vulnerability]:
    """Return the same vulnerabilities with their targets and waivers.

    Args:
        pins: target -> the versions that its images have.
        known: all waivers, expired ones too; one with a target applies to that target only.
    """
    merged: dict[tuple[Any, ...], Vulnerability] = {}
    for vulnerability in found:
        for target, pin in pins.items():
            if vulnerability.version not in pin.get(vulnerability.package, set()):
                continue
            waiver = waiver_of(vulnerability, target, known)
            unwaived = waiver is None or waiver.expired(today)
            words = "" if waiver is None else f"expired: {waiver}" if unwaived else str(waiver)
            key = (vulnerability.package, vulnerability.version, vulnerability.names, words)
            targets = (*(merged[key].targets if key in merged else ()), target)
            merged[key] = replace(vulnerability, targets=targets, waiver=words, fails=unwaived)
    return list(merged.values())


def waiver_of(found: Vulnerability, target: str, known: Iterable[Waiver]) -> Waiver | None:
    """Return the waiver of a vulnerability that expires last."""
    matching = [
        waiver
        for waiver in known
        for name in found.names
        if waiver.covers_package(name, found.package, found.version, target)
    ]
    return max(matching, key=lambda waiver: waiver.expires, default=None)
