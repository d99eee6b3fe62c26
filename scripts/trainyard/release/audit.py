"""Known vulnerabilities of the packages that locks pin: those without a waiver fail.

They are looked up with pip-audit if a vulnerability service answers, else in the stored snapshot
images/advisories.json. A waiver in images/waivers.yaml has an owner, a reason and an expiry date, after which the
vulnerability fails again.
"""

from __future__ import annotations

import datetime
import itertools
import json
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from packaging.utils import canonicalize_name
from packaging.version import InvalidVersion, Version
from rich.table import Column, Table

from trainyard import installation
from trainyard.console import StepFailed, UserError, say, warn
from trainyard.installation import require_extra
from trainyard.lint import waivers
from trainyard.lint.waivers import Waiver
from trainyard.release import advisories
from trainyard.release.advisories import Snapshot
from trainyard.spec import lockfile
from trainyard.spec.model import Spec, catalogue, each_platform, load

#: Services that pip-audit can ask, in the order in which they are tried.
SERVICES = ("pypi", "osv")

#: A release with known vulnerabilities (PYSEC-2021-437 among others): a service that reports none is not used.
CANARY = ("pip", "20.0")

#: Days after which a snapshot counts as old: advisories about the locked packages appear every few weeks.
OLD = 30

#: Canonical name -> versions, of everything that is locked.
Pins = dict[str, set[str]]


@dataclass(frozen=True)
class Vulnerability:
    """A known vulnerability of a locked package.

    Attributes:
        names: all ids of the advisory, the first being the source's own.
        fixed: versions that do not have it.
        targets: the images whose locks pin this version.
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


@dataclass(frozen=True)
class StaleWaiver:
    """A waiver of an advisory that has expired, or else matches no locked package."""

    waiver: Waiver
    expired: bool

    def __str__(self) -> str:
        about = f"waiver of {self.waiver.rule} for {self.waiver.package} {self.waiver.version}"
        if self.expired:
            return f"{about} expired on {self.waiver.expires}: {self.waiver.owner} must fix the cause or renew it"
        return f"{about} matches no locked package: remove it"


@dataclass(frozen=True)
class Report:
    """Result of an audit.

    Attributes:
        source: where the advisories come from.
        packages: number of locked packages.
        findings: the vulnerabilities, with their waivers.
        stale: see :func:`stale`.
    """

    source: str
    packages: int
    findings: list[Vulnerability]
    stale: list[StaleWaiver]

    def require(self) -> None:
        """Refuse vulnerabilities without a waiver and expired waivers.

        Raises:
            StepFailed: there is one.
        """
        failing = [str(found) for found in self.findings if found.fails]
        failing += [str(found) for found in self.stale if found.expired]
        if failing:
            more = f" (and {len(failing) - 1} more)" if len(failing) > 1 else ""
            raise StepFailed(f"{failing[0]}{more}: update the package, or add a waiver to images/waivers.yaml")

    def as_dict(self) -> dict[str, Any]:
        """The report as JSON has it: findings with their fields, a line for each stale waiver."""
        return asdict(replace(self, stale=[])) | {"stale": [str(found) for found in self.stale]}


def pinned(spec: Spec) -> Pins:
    """The packages that the locks of a target pin for every platform and index, and those of its base image.

    Nothing if the target was never locked: a target whose base image contains the framework can be locked only where
    that image can be pulled.
    """
    in_base = spec.base_contents.packages if spec.base_contents else {}
    found: Pins = {name: {public_version(version)} for name, version in in_base.items()}
    for one, index in itertools.product(each_platform(spec), dict.fromkeys(("default", spec.framework.index))):
        paths = (lockfile.framework_lock(one, index), lockfile.requirements_lock(one, index))
        required = index == "default" and one.arch == spec.arch and not spec.framework_in_base
        if required or all(path.is_file() for path in paths):
            for name, version in lockfile.installed(one, index).items():
                found.setdefault(name, set()).add(public_version(version))
    return found


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


def by_snapshot(pins: Pins, snapshot: Snapshot) -> list[Vulnerability]:
    """The vulnerabilities of ``pins`` in a snapshot."""
    return [
        Vulnerability(name, version, advisory.names, advisory.summary, advisory.fixed)
        for name, versions in sorted(pins.items())
        for version in sorted(versions)
        for advisory in snapshot.about(name, version)
    ]


def query(service: str, pins: Pins) -> tuple[list[Vulnerability], set[str]] | None:
    """The vulnerabilities that a live service reports, and the packages that it does not know.

    None if it does not answer.
    """
    found: list[Vulnerability] = []
    unknown: set[str] = set()
    # pip-audit refuses two versions of a package in one run.
    for number in range(max(map(len, pins.values()), default=0)):
        batch = [
            f"{name}=={sorted(versions)[number]}" for name, versions in sorted(pins.items()) if len(versions) > number
        ]
        answer = _pip_audit(service, batch)
        if answer is None:
            return None
        for entry in answer:
            if "skip_reason" in entry:
                unknown.add(canonicalize_name(entry["name"]))
            found += [
                Vulnerability(
                    canonicalize_name(entry["name"]),
                    entry["version"],
                    (one["id"], *one.get("aliases", [])),
                    " ".join(str(one.get("description", "")).split())[:160],
                    tuple(one.get("fix_versions", [])),
                )
                for one in entry.get("vulns", [])
            ]
    return found, unknown


def _pip_audit(service: str, lines: list[str]) -> list[dict[str, Any]] | None:
    """The entries of pip-audit's report about pinned requirements; None if the service does not answer."""
    with tempfile.TemporaryDirectory() as folder:
        requirements = Path(folder) / "requirements.txt"
        requirements.write_text("\n".join(lines) + "\n", encoding="utf-8")
        command = [sys.executable, "-m", "pip_audit", "--format=json", f"--vulnerability-service={service}"]
        command += ["--progress-spinner=off", "--disable-pip", "--no-deps", "--timeout=15", "--aliases=on", "--desc=on"]
        command += [f"--cache-dir={folder}/cache", f"--requirement={requirements}"]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    try:  # status 1 means vulnerabilities or a failure; only the former print a report
        entries: list[dict[str, Any]] = json.loads(done.stdout)["dependencies"]
    except (ValueError, KeyError):
        return None
    return entries


def live(pins: Pins) -> tuple[str, list[Vulnerability], set[str]] | None:
    """The first service that answers, with the result of :func:`query`; None if none answers.

    Raises:
        UserError: pip-audit is not installed.
    """
    require_extra("pip_audit", "audit")
    for service in SERVICES:
        canary = query(service, {CANARY[0]: {CANARY[1]}})
        if canary is None or not canary[0]:
            continue
        answer = query(service, pins)
        if answer is not None:
            return service, *answer
    return None


def evaluate(
    found: list[Vulnerability], pins: dict[str, Pins], known: Iterable[Waiver], today: datetime.date
) -> list[Vulnerability]:
    """The same vulnerabilities with their targets and waivers.

    Args:
        pins: target -> what its locks pin.
        known: all waivers, expired ones too; one with a target applies to that target only.
    """
    evaluated = []
    for one in found:
        where = [target for target, pin in pins.items() if one.version in pin.get(one.package, set())]
        for target, waiver in ((target, _waiver(one, target, known)) for target in where):
            words = "" if waiver is None else str(waiver)
            fails = waiver is None or waiver.expired(today)
            if waiver is not None and fails:
                words = f"expired: {waiver}"
            evaluated.append(replace(one, targets=(target,), waiver=words, fails=fails))
    merged: dict[tuple[Any, ...], Vulnerability] = {}
    for one in evaluated:
        key = (one.package, one.version, one.names, one.waiver)
        before = merged.get(key)
        merged[key] = one if before is None else replace(before, targets=before.targets + one.targets)
    return list(merged.values())


def _waiver(found: Vulnerability, target: str, known: Iterable[Waiver]) -> Waiver | None:
    """The waiver of a vulnerability that expires last."""
    matching = [
        waiver
        for waiver in known
        for name in found.names
        if waiver.covers_package(name, found.package, found.version, target)
    ]
    return max(matching, key=lambda waiver: waiver.expires, default=None)


def stale(known: Iterable[Waiver], pins: Pins, today: datetime.date) -> list[StaleWaiver]:
    """Waivers of advisories that have expired on the day ``today``, or match no locked package."""
    found = []
    for waiver in known:
        if waiver.package is None or waiver.version is None:
            continue
        locked = public_version(waiver.version) in pins.get(canonicalize_name(waiver.package), set())
        if waiver.expired(today) or not locked:
            found.append(StaleWaiver(waiver, waiver.expired(today)))
    return found


def offline(specs: list[Spec]) -> list[Vulnerability]:
    """The vulnerabilities of the locks of ``specs`` in the stored snapshot, with their waivers."""
    pins = {spec.target: pinned(spec) for spec in specs}
    return evaluate(by_snapshot(union(pins.values()), advisories.load()), pins, waivers.load(), waivers.today())


def require(spec: Spec) -> None:
    """Refuse locked packages with a known vulnerability without a waiver, by the stored snapshot.

    Raises:
        StepFailed: there is one.
    """
    failing = [found for found in offline([spec]) if found.fails]
    if failing:
        more = f" (and {len(failing) - 1} more)" if len(failing) > 1 else ""
        raise StepFailed(
            f"{failing[0]}{more}: update the package, or add a waiver ('{spec.command('audit')}' lists all)"
        )


def table(found: list[Vulnerability]) -> Table:
    """The vulnerabilities, for people."""
    shown = Table("package", "advisory", "fixed in", "targets", Column("", overflow="fold"))
    for one in found:
        shown.add_row(
            f"{one.package} {one.version}",
            one.names[0],
            ", ".join(one.fixed) or "-",
            " ".join(one.targets),
            one.waiver or one.summary,
            style="bold red" if one.fails else None,
        )
    return shown


def _look_up(pins: Pins, *, only_snapshot: bool) -> tuple[str, list[Vulnerability]]:
    """The source of the advisories, in words, and the vulnerabilities of ``pins``."""
    snapshot = advisories.load()
    if not only_snapshot and (answer := live(pins)) is not None:
        service, found, unknown = answer
        if unknown:
            warn(f"{service} does not know {', '.join(sorted(unknown))}: the stored snapshot is used for these")
        rest = {name: versions for name, versions in pins.items() if name in unknown}
        return f"{service}, live", found + by_snapshot(rest, snapshot)
    age = snapshot.age(waivers.today())
    if not only_snapshot:
        say("no vulnerability service answers: the stored snapshot is used")
    if age > OLD:
        update = installation.command("audit", UPDATE=True)
        warn(f"the snapshot of advisories is {age} days old: run '{update}' where {advisories.OSV} answers")
    uncovered = sorted(pins.keys() - set(snapshot.covers))
    if uncovered:
        few = ", ".join(uncovered[:5])
        warn(f"the snapshot covers {len(pins) - len(uncovered)} of {len(pins)} locked packages; not {few} and others")
    return f"snapshot of {snapshot.taken} ({snapshot.source})", by_snapshot(pins, snapshot)


def update(address: str = "") -> Snapshot:
    """Fetch a new snapshot about everything that any target locks, and store it.

    Args:
        address: of a mirror of :data:`advisories.OSV`.
    Raises:
        UserError: the snapshot cannot be stored.
        StepFailed: the service does not answer.
    """
    names = union(pinned(spec) for spec in catalogue())
    snapshot = advisories.fetch(names, waivers.today(), address)
    advisories.save(snapshot)
    return snapshot


def audit(target: str | None, *, only_snapshot: bool = False) -> Report:
    """The known vulnerabilities of the packages that a target's locks pin; of all targets if it is None.

    Args:
        target: name or folder.
        only_snapshot: do not ask a vulnerability service.
    Raises:
        UserError: there is no such target, or no snapshot.
    """
    specs = [load(target)] if target else catalogue()
    if not specs:
        raise UserError("there is no target")
    pins = {spec.target: pinned(spec) for spec in specs}
    everything = union(pins.values())
    source, raw = _look_up(everything, only_snapshot=only_snapshot)
    found = evaluate(raw, pins, waivers.load(), waivers.today())
    return Report(source, len(everything), found, [] if target else stale(waivers.load(), everything, waivers.today()))
