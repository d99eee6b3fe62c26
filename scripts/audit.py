"""Hold the packages that the locks pin against known vulnerabilities; what nobody waived fails.

    make audit                      every target
    make audit TARGET=tf-cpu        one
    make audit UPDATE=1             fetch a new snapshot of advisories first, and commit it
    make audit OFFLINE=1            the snapshot alone, as `make check` and `make push` do

Live through pip-audit where a vulnerability service answers, else against images/advisories.json. Who has to live with
one writes a waiver into images/waivers.yaml, with an owner, a reason and an end; past its end it fails again.
"""

from __future__ import annotations

import datetime
import json
import os
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

from scripts import advisories, cli, locks, waivers
from scripts.advisories import Snapshot
from scripts.cli import StepFailed, UserError, log, say, warn
from scripts.spec import Spec, load, targets
from scripts.waivers import Waiver

#: Services that pip-audit can ask, in the order in which they are tried.
SERVICES = ("pypi", "osv")

#: A release with known vulnerabilities (PYSEC-2021-437 among them): a service that knows of none is none.
CANARY = ("pip", "20.0")

#: Days after which a snapshot counts as old: advisories about the locked packages appear every few weeks.
OLD = 30

#: Canonical name -> versions, of everything that is locked.
Pins = dict[str, set[str]]


@dataclass(frozen=True)
class Finding:
    """A known vulnerability of a locked package.

    Attributes:
        names: all ids of the advisory, the first being the source's own.
        fixed: versions that do not have it.
        targets: the images whose locks pin this version.
        waiver: who answers for it, until when; empty if nobody does.
        fails: whether it is not waived, or no longer.
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


def pinned(spec: Spec) -> Pins:
    """What the locks of a target pin, for every index that it has locks for; nothing if it was never locked.

    A target whose base brings the framework is locked when that base can be looked into, which may be elsewhere; what
    was found in the base then counts too.
    """
    held = spec.held.packages if spec.held else {}
    found: Pins = {name: {_public(version)} for name, version in held.items()}
    for index in dict.fromkeys(("default", spec.framework.index)):
        paths = (locks.framework_lock(spec, index), locks.requirements_lock(spec, index))
        if all(path.is_file() for path in paths) or (index == "default" and not spec.on_framework):
            for name, version in locks.installed(spec, index).items():
                found.setdefault(name, set()).add(_public(version))
    return found


def _public(version: str) -> str:
    """A version without its local part: advisories are about releases, not about +cpu builds of them."""
    try:
        return Version(version).public
    except InvalidVersion:
        return version


def union(pins: Iterable[Pins]) -> Pins:
    """All of these pins."""
    found: Pins = {}
    for some in pins:
        for name, versions in some.items():
            found.setdefault(name, set()).update(versions)
    return found


def by_snapshot(pins: Pins, snapshot: Snapshot) -> list[Finding]:
    """What a snapshot knows about ``pins``."""
    return [
        Finding(name, version, advisory.names, advisory.summary, advisory.fixed)
        for name, versions in sorted(pins.items())
        for version in sorted(versions)
        for advisory in snapshot.about(name, version)
    ]


def ask(service: str, pins: Pins) -> tuple[list[Finding], set[str]] | None:
    """What a live service knows, and the packages it does not know; None if it does not answer."""
    found: list[Finding] = []
    unknown: set[str] = set()
    # One version of a package at a time: pip-audit refuses two.
    for turn in range(max(map(len, pins.values()), default=0)):
        batch = [f"{name}=={sorted(versions)[turn]}" for name, versions in sorted(pins.items()) if len(versions) > turn]
        answer = _pip_audit(service, batch)
        if answer is None:
            return None
        for entry in answer:
            if "skip_reason" in entry:
                unknown.add(canonicalize_name(entry["name"]))
            found += [
                Finding(
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
    try:  # status 1 stands for vulnerabilities and for failures alike; only the former come with a report
        entries: list[dict[str, Any]] = json.loads(done.stdout)["dependencies"]
    except (ValueError, KeyError):
        return None
    return entries


def live(pins: Pins) -> tuple[str, list[Finding], set[str]] | None:
    """The first service that answers, what it knows about ``pins``, and the packages it does not know; None if none."""
    for service in SERVICES:
        canary = ask(service, {CANARY[0]: {CANARY[1]}})
        if canary is None or not canary[0]:
            continue
        answer = ask(service, pins)
        if answer is not None:
            return service, *answer
    return None


def judge(found: list[Finding], pins: dict[str, Pins], known: Iterable[Waiver], today: datetime.date) -> list[Finding]:
    """The same findings with the targets they are in and with what the waivers say of them.

    Args:
        pins: target -> what its locks pin.
        known: every waiver, expired ones too; one for a single target is about that target only.
    """
    judged = []
    for finding in found:
        where = [target for target, pin in pins.items() if finding.version in pin.get(finding.package, set())]
        for target, waiver in ((target, _waiver(finding, target, known)) for target in where):
            words = "" if waiver is None else str(waiver)
            fails = waiver is None or waiver.expired(today)
            if waiver is not None and fails:
                words = f"expired: {waiver}"
            judged.append(replace(finding, targets=(target,), waiver=words, fails=fails))
    merged: dict[tuple[Any, ...], Finding] = {}
    for finding in judged:
        key = (finding.package, finding.version, finding.names, finding.waiver)
        before = merged.get(key)
        merged[key] = finding if before is None else replace(before, targets=before.targets + finding.targets)
    return list(merged.values())


def _waiver(finding: Finding, target: str, known: Iterable[Waiver]) -> Waiver | None:
    """The waiver of a finding that holds longest."""
    fitting = [
        waiver
        for waiver in known
        for name in finding.names
        if waiver.covers_package(name, finding.package, finding.version, target)
    ]
    return max(fitting, key=lambda waiver: waiver.expires, default=None)


def stale(known: Iterable[Waiver], pins: Pins, today: datetime.date) -> list[str]:
    """Why waivers of advisories are out of date: past their end, or about what no lock pins; one line each."""
    found = []
    for waiver in known:
        if waiver.package is None or waiver.version is None:
            continue
        about = f"waiver of {waiver.rule} for {waiver.package} {waiver.version}"
        if waiver.expired(today):
            found.append(f"{about} ended on {waiver.expires}: {waiver.owner} has to mend the cause or decide again")
        elif _public(waiver.version) not in pins.get(canonicalize_name(waiver.package), set()):
            found.append(f"{about} is about what no lock pins: remove it")
    return found


def offline(specs: list[Spec]) -> list[Finding]:
    """What the stored snapshot knows about the locks of ``specs``, judged by the waivers: what `make check` asks."""
    pins = {spec.target: pinned(spec) for spec in specs}
    return judge(by_snapshot(union(pins.values()), advisories.load()), pins, waivers.load(), waivers.today())


def require(spec: Spec) -> None:
    """Refuse what has a known vulnerability that nobody answers for, by the stored snapshot.

    Raises:
        StepFailed: it has one.
    """
    failing = [finding for finding in offline([spec]) if finding.fails]
    if failing:
        more = f" (and {len(failing) - 1} more)" if len(failing) > 1 else ""
        raise StepFailed(f"{failing[0]}{more}: 'make audit TARGET={spec.target}' tells all; update or waive it")


def table(found: list[Finding]) -> Table:
    """The findings, for people."""
    shown = Table("package", "advisory", "fixed in", "targets", Column("", overflow="fold"))
    for finding in found:
        shown.add_row(
            f"{finding.package} {finding.version}",
            finding.names[0],
            ", ".join(finding.fixed) or "-",
            " ".join(finding.targets),
            finding.waiver or finding.summary,
            style="bold red" if finding.fails else None,
        )
    return shown


def _source(pins: Pins, *, only_snapshot: bool) -> tuple[str, list[Finding]]:
    """Where the answer came from, and what is known about ``pins``."""
    snapshot = advisories.load()
    answer = None if only_snapshot else live(pins)
    if answer is not None:
        service, found, unknown = answer
        if unknown:
            warn(f"{service} does not know {', '.join(sorted(unknown))}: for these the snapshot counts")
        rest = {name: versions for name, versions in pins.items() if name in unknown}
        return f"{service}, live", found + by_snapshot(rest, snapshot)
    age = snapshot.age(waivers.today())
    if not only_snapshot:
        say("no vulnerability service answers: the stored snapshot counts")
    if age > OLD:
        warn(f"the snapshot of advisories is {age} days old: run 'make audit UPDATE=1' where {advisories.OSV} answers")
    uncovered = sorted(pins.keys() - set(snapshot.covers))
    if uncovered:
        few = ", ".join(uncovered[:5])
        warn(f"the snapshot covers {len(pins) - len(uncovered)} of {len(pins)} locked packages; not {few} and others")
    return f"snapshot of {snapshot.taken} ({snapshot.source})", by_snapshot(pins, snapshot)


def main(arguments: list[str]) -> int:
    options = cli.parser(__doc__).parse_args(arguments)
    specs = [load(name) for name in ([options.target] if options.target else targets())]
    if not specs:
        raise UserError("there is no target")
    pins = {spec.target: pinned(spec) for spec in specs}
    everything = union(pins.values())
    if os.environ.get("UPDATE"):
        named = set(everything) | {name for target in targets() for name in pinned(load(target))}
        snapshot = advisories.fetch(named, waivers.today())
        advisories.save(snapshot)
        say(f"images/advisories.json: {len(snapshot.advisories)} advisories on {len(snapshot.covers)} packages: commit")
    source, raw = _source(everything, only_snapshot=bool(os.environ.get("OFFLINE")))
    found = judge(raw, pins, waivers.load(), waivers.today())
    outdated = [] if options.target else stale(waivers.load(), everything, waivers.today())
    cli.result(
        {"source": source, "packages": len(everything), "findings": [asdict(one) for one in found], "stale": outdated},
        as_json=options.json,
    )
    if found:
        log.print(table(found))
    for line in outdated:
        warn(line)
    failing = [str(finding) for finding in found if finding.fails] + [line for line in outdated if "ended on" in line]
    if failing:
        more = f" (and {len(failing) - 1} more)" if len(failing) > 1 else ""
        raise StepFailed(f"{failing[0]}{more}: update the package, or waive it in images/waivers.yaml")
    say(f"{len(everything)} locked packages, {source}: nothing known that is not waived")
    return 0


if __name__ == "__main__":
    cli.run(main)
