"""Audit the Python packages that locks pin: a known vulnerability without a waiver fails.

They are looked up with pip-audit if a vulnerability service answers, else in the stored snapshot
images/advisories.json. A waiver in images/waivers.yaml has an owner, a reason and an expiry date, after which the
vulnerability fails again. Debian packages are for scanners of images (docs/supply-chain.md).
"""

from __future__ import annotations

import datetime
import json
import logging
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from packaging.utils import canonicalize_name
from rich.table import Column, Table

from trainyard.common.installation import require_extra
from trainyard.lint import waivers
from trainyard.lint.waivers import Waiver
from trainyard.release import advisories
from trainyard.release.advisories import Snapshot
from trainyard.release.image_packages import ImagePackages
from trainyard.release.vulnerabilities import Pins, Vulnerability, evaluate, public_version, refuse, union
from trainyard.spec.model import Spec, catalogue, each_platform, load

logger = logging.getLogger(__name__)

#: Services that pip-audit can ask, in the order in which they are tried.
SERVICES = ("pypi", "osv")

#: A release with known vulnerabilities (PYSEC-2021-437 among others): a service that reports none is not used.
CANARY = ("pip", "20.0")

#: Days after which a snapshot counts as old: advisories about the locked packages appear every few weeks.
OLD = 30


@dataclass(frozen=True)
class StaleWaiver:
    """Name a waiver of an advisory that has expired, or else matches no package."""

    waiver: Waiver
    expired: bool

    def __str__(self) -> str:
        about = f"waiver of {self.waiver.rule} for {self.waiver.package} {self.waiver.version}"
        if self.expired:
            return f"{about} expired on {self.waiver.expires}: {self.waiver.owner} must fix the cause or renew it"
        return f"{about} matches no package: remove it"


@dataclass(frozen=True)
class Coverage:
    """Measure how much the stored snapshot can say about packages.

    Attributes:
        taken: the day of the snapshot, ISO 8601, ``age``: days since then.
        covered: how many of the ``packages`` its source was asked about.
    """

    taken: str
    age: int
    covered: int
    packages: int

    @classmethod
    def of(cls, snapshot: Snapshot, pins: Pins) -> Coverage:
        """Return the coverage of the packages ``pins``."""
        age = snapshot.age(waivers.today())
        return cls(snapshot.taken, age, len(pins.keys() & set(snapshot.covers)), len(pins))

    def __str__(self) -> str:
        return f"{self.age} days old and covers {self.covered} of {self.packages} Python packages"

    @property
    def is_poor(self) -> bool:
        """Return whether it is older than :data:`OLD` days, or lacks packages."""
        return self.age > OLD or self.covered < self.packages

    def caution(self) -> str:
        """Return how little it can say of vulnerabilities, in a line; empty if it is not poor."""
        return f"no known vulnerability, by a snapshot that is {self}: {_how_to_update()}" if self.is_poor else ""


@dataclass(frozen=True)
class Report:
    """Hold the result of an audit.

    Attributes:
        source: where the advisories about Python packages come from.
        snapshot: of the stored snapshot, if it was used for all packages.
        packages: number of Python packages.
        findings: the vulnerabilities, with their waivers.
        stale: see :func:`stale`.
    """

    source: str
    snapshot: Coverage | None
    packages: int
    findings: list[Vulnerability]
    stale: list[StaleWaiver]

    def require(self) -> None:
        """Raise :class:`StepFailed` if there is a vulnerability without a waiver, or an expired waiver."""
        failing = [*(known for known in self.findings if known.fails), *(old for old in self.stale if old.expired)]
        refuse(failing, "to images/waivers.yaml")

    def as_dict(self) -> dict[str, Any]:
        """Return the report for JSON: findings with their fields, and a line per stale waiver."""
        return asdict(replace(self, stale=[])) | {"stale": [str(waiver) for waiver in self.stale]}


def pinned(spec: Spec) -> Pins:
    """Return the packages that the locks of a target pin for every platform and index, and those of its base image.

    Nothing if the target was never locked: a target whose base image contains the framework can be locked only where
    that image can be pulled.
    """
    in_base = spec.base_contents.packages if spec.base_contents else {}
    pins: Pins = {name: {public_version(version)} for name, version in in_base.items()}
    if not spec.framework_in_base:
        spec.locked()
    if content := spec.usable_lock:
        for platform in each_platform(spec):
            for index in content.indexes(platform.arch):
                for name, version in platform.locked(index).versions.items():
                    pins.setdefault(name, set()).add(public_version(version))
    return pins


def by_snapshot(pins: Pins, snapshot: Snapshot) -> list[Vulnerability]:
    """Return the vulnerabilities of ``pins`` in a snapshot."""
    return [
        Vulnerability(name, version, advisory.names, advisory.summary, advisory.fixed)
        for name, versions in sorted(pins.items())
        for version in sorted(versions)
        for advisory in snapshot.about(name, version)
    ]


def query(service: str, pins: Pins) -> tuple[list[Vulnerability], set[str]] | None:
    """Return the vulnerabilities that a live service reports, and what it does not know; None if it does not answer."""
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
    """Return the entries of pip-audit's report about pinned requirements; None if the service does not answer."""
    with tempfile.TemporaryDirectory() as folder:
        requirements = Path(folder) / "requirements.txt"
        requirements.write_text("\n".join(lines) + "\n", encoding="utf-8")
        command = [sys.executable, "-P", "-m", "pip_audit", "--format=json", f"--vulnerability-service={service}"]
        command += ["--progress-spinner=off", "--disable-pip", "--no-deps", "--timeout=15", "--aliases=on", "--desc=on"]
        command += [f"--cache-dir={folder}/cache", f"--requirement={requirements}"]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    try:  # status 1 means vulnerabilities or a failure; only the former print a report
        entries: list[dict[str, Any]] = json.loads(done.stdout)["dependencies"]
    except (ValueError, KeyError):
        return None
    return entries


def live(pins: Pins) -> tuple[str, list[Vulnerability], set[str]] | None:
    """Return the first service that answers, with the result of :func:`query`; None if none answers.

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


def stale(known: Iterable[Waiver], pins: Pins, today: datetime.date) -> list[StaleWaiver]:
    """Return waivers of advisories that have expired on the day ``today``, or match no package that is locked."""
    found = []
    for waiver in known:
        if waiver.package is None or waiver.version is None:
            continue
        versions = pins.get(canonicalize_name(waiver.package), set())
        if waiver.expired(today) or not {waiver.version, public_version(waiver.version)} & versions:
            found.append(StaleWaiver(waiver, waiver.expired(today)))
    return found


def offline(specs: list[Spec]) -> list[Vulnerability]:
    """Return the vulnerabilities of the locks of ``specs`` in the stored snapshot, with their waivers."""
    pins = {spec.target: pinned(spec) for spec in specs}
    return evaluate(by_snapshot(union(pins.values()), advisories.load()), pins, waivers.load(), waivers.today())


def require(spec: Spec) -> Coverage:
    """Refuse locked packages with a vulnerability without a waiver, by the stored snapshot, and return its coverage."""
    refuse([known for known in offline([spec]) if known.fails], f"('{spec.command('dev audit')}' lists all)")
    return Coverage.of(advisories.load(), pinned(spec))


def table(found: list[Vulnerability]) -> Table:
    """Return the vulnerabilities for people."""
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


def _how_to_update() -> str:
    return f"run 'trainyard dev audit --update' where {advisories.OSV} answers"


def _look_up(pins: Pins, *, only_snapshot: bool) -> tuple[str, Coverage | None, list[Vulnerability]]:
    """Return the source of the advisories in words, the snapshot's coverage, and the vulnerabilities of ``pins``."""
    snapshot = advisories.load()
    if not only_snapshot and (answer := live(pins)) is not None:
        service, found, unknown = answer
        if unknown:
            logger.warning(
                f"{service} does not know {', '.join(sorted(unknown))}: the stored snapshot is used for these"
            )
        rest = {name: versions for name, versions in pins.items() if name in unknown}
        return f"{service}, live", None, found + by_snapshot(rest, snapshot)
    if not only_snapshot:
        logger.info("no vulnerability service answers: the stored snapshot is used")
    coverage = Coverage.of(snapshot, pins)
    if coverage.is_poor:
        uncovered = sorted(pins.keys() - set(snapshot.covers))
        few = f", not {', '.join(uncovered[:5])}{' and others' * (len(uncovered) > 5)}" if uncovered else ""
        logger.warning(f"the snapshot of advisories is {coverage}{few}: {_how_to_update()}")
    return f"snapshot of {snapshot.taken} ({snapshot.source})", coverage, by_snapshot(pins, snapshot)


def update(address: str = "") -> Snapshot:
    """Fetch a new snapshot about everything that any target locks, and store it.

    It raises what :func:`trainyard.release.advisories.fetch` and ``save`` raise.

    Args:
        address: of a mirror of :data:`advisories.OSV`.
    """
    names = union(pinned(spec) for spec in catalogue())
    snapshot = advisories.fetch(names, waivers.today(), address)
    advisories.save(snapshot)
    return snapshot


def audit(target: str | None, *, only_snapshot: bool = False, image: ImagePackages | None = None) -> Report:
    """Look for known vulnerabilities of the Python packages that locks pin.

    Args:
        target: name or folder; all targets if None.
        only_snapshot: do not ask a vulnerability service.
        image: audit the packages of this image instead of a target's.
    Raises:
        UserError: there is no such target, or no snapshot.
    """
    if image:
        pins = {image.name: {name: {public_version(version)} for name, version in image.python.items()}}
    else:
        pins = {spec.target: pinned(spec) for spec in ([load(target)] if target else catalogue())}
    everything = union(pins.values())
    source, coverage, raw = _look_up(everything, only_snapshot=only_snapshot)
    found = evaluate(raw, pins, waivers.load(), waivers.today())
    old = [] if target or image else stale(waivers.load(), everything, waivers.today())
    return Report(source, coverage, len(everything), found, old)
