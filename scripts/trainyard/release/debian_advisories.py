"""Look up vulnerabilities of images' Debian packages in a stored snapshot of Debian's security tracker.

The tracker (https://security-tracker.debian.org) is about source packages and suites. Its JSON document is
``{source package: {id: {"description": …, "releases": {suite: {"status": "resolved", "fixed_version": "1.2-3",
"urgency": "low", "nodsa": "Minor issue", …}}}}}``. A fixed version ``0`` means that the suite was never affected. The
snapshot, images/debian-advisories.json, has the suites and source packages of the images on the host that fetched it;
``covers`` lists these packages.

A vulnerability fails if the image's suite has a fixed version and the image an older one: a newer base or a build
without cache has it. What Debian has not fixed, or calls unimportant, is a note: who builds the image cannot correct
it, and Debian fixes minor issues in point releases. See docs/supply-chain.md.
"""

from __future__ import annotations

import datetime
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import requests

from trainyard.common.installation import require_extra
from trainyard.release import advisories
from trainyard.release.advisories import Taken
from trainyard.release.image_packages import ImagePackages
from trainyard.release.vulnerabilities import Pins, Vulnerability
from trainyard.spec.model import IMAGES

FILE = IMAGES / "debian-advisories.json"

#: The whole tracker, some 70 MB.
TRACKER = "https://security-tracker.debian.org/tracker/data/json"

#: Seconds to wait for a part of the answer.
TIMEOUT = 60

#: Debian releases whose packages are audited (https://www.debian.org/releases/): VERSION_ID of os-release -> suite.
SUITES = {"11": "bullseye", "12": "bookworm", "13": "trixie"}

#: The fixed version of a suite that was never affected.
_NEVER_AFFECTED = "0"

#: The urgency of what Debian does not see as a security issue of its packages.
_UNIMPORTANT = "unimportant"


@dataclass(frozen=True)
class DebianAdvisory:
    """Hold what the tracker says about one vulnerability of one source package in one suite.

    Attributes:
        status: ``resolved``, ``open`` or ``undetermined``.
        fixed: the version that fixes it; empty if there is none.
        urgency: ``unimportant``, ``low``, ``medium``, ``high``, ``not yet assigned`` or ``end-of-life``.
        nodsa: why there will be no security update for it alone; empty if nothing is said.
    """

    id: str
    package: str
    suite: str
    status: str
    fixed: str
    urgency: str
    nodsa: str
    summary: str

    @property
    def note(self) -> str:
        """Return why it does not fail; empty if it does."""
        if self.urgency == _UNIMPORTANT:
            return f"Debian: {_UNIMPORTANT}"
        if self.fixed:
            return ""
        why = self.nodsa or ("not known whether affected" if self.status == "undetermined" else self.urgency)
        return f"not fixed in {self.suite}: {why}"


@dataclass(frozen=True)
class DebianSnapshot(Taken):
    """Hold advisories of the tracker about the source packages ``covers`` in ``suites``."""

    suites: tuple[str, ...]
    advisories: tuple[DebianAdvisory, ...]

    def about(self, package: str, suite: str) -> list[DebianAdvisory]:
        """Return the advisories about a source package in a suite."""
        return [known for known in self.advisories if (known.package, known.suite) == (package, suite)]


def load(path: Path = FILE) -> DebianSnapshot | None:
    """Return the stored snapshot; None if none was fetched. One that cannot be read is a :class:`UserError`."""
    return advisories.read(path, DebianSnapshot, "Debian's security tracker") if path.exists() else None


def save(snapshot: DebianSnapshot, path: Path = FILE) -> None:
    """Store a snapshot; see :func:`trainyard.release.advisories.save`."""
    advisories.save(snapshot, path)


def from_tracker(data: Mapping[str, Any], packages: Iterable[str], suites: Iterable[str]) -> list[DebianAdvisory]:
    """Return the advisories of the tracker about source packages in suites, without those that never applied."""
    wanted = tuple(suites)
    return [
        _advisory(package, identifier, suite, document)
        for package in sorted(set(packages))
        for identifier, document in sorted(data.get(package, {}).items())
        for suite in wanted
        if suite in document["releases"] and document["releases"][suite].get("fixed_version") != _NEVER_AFFECTED
    ]


def _advisory(package: str, identifier: str, suite: str, document: Mapping[str, Any]) -> DebianAdvisory:
    release = document["releases"][suite]
    return DebianAdvisory(
        id=identifier,
        package=package,
        suite=suite,
        status=str(release["status"]),
        fixed=str(release.get("fixed_version") or ""),
        urgency=str(release.get("urgency") or "not yet assigned").rstrip("*"),
        nodsa=str(release.get("nodsa") or ""),
        summary=advisories.summary_in(document.get("description")),
    )


def fetch(packages: Iterable[str], suites: Iterable[str], today: datetime.date, address: str = "") -> DebianSnapshot:
    """Return a new snapshot about source packages in suites, taken ``today``.

    Args:
        address: of a mirror of :data:`TRACKER`.
    Raises:
        StepFailed: the tracker does not answer, or not in its format.
    """
    address = address or TRACKER
    covers, known = tuple(sorted(set(packages))), tuple(sorted(set(suites)))
    try:
        answer = requests.get(address, timeout=TIMEOUT)
        answer.raise_for_status()
        advice = from_tracker(answer.json(), covers, known)
    except (requests.exceptions.RequestException, ValueError, KeyError, TypeError, AttributeError) as error:
        raise advisories.not_answered(address, error) from None
    return DebianSnapshot(address, today.isoformat(), covers, known, tuple(advice))


def suite_of(image: ImagePackages) -> str | None:
    """Return the Debian suite of an image; None if its packages are not Debian's."""
    return SUITES.get(image.release.get("VERSION_ID", "")) if image.release.get("ID") == "debian" else None


def sources(image: ImagePackages) -> Pins:
    """Return source package -> versions, of the image's Debian packages."""
    versions: Pins = {}
    for package in image.debian.values():
        name, version = package.source_package
        versions.setdefault(name, set()).add(version)
    return versions


def is_older(version: str, other: str) -> bool:
    """Return whether a Debian version is less than another, in the order of ``dpkg --compare-versions``.

    A version that dpkg would refuse counts as less: a vulnerability is rather reported than passed over.

    Raises:
        UserError: what compares them is not installed.
    """
    require_extra("debian_inspector", "audit")
    try:
        return bool(_version(version) < _version(other))
    except (TypeError, ValueError):
        return True


def _version(text: str) -> Any:
    """Return ``[epoch:]upstream[-revision]`` as an object that can be compared.

    The library's own parser refuses versions that dpkg accepts, such as 1.0~ (debian-inspector 31.1.1).
    """
    from debian_inspector.version import Version  # type: ignore[import-untyped]

    epoch, _, rest = text.partition(":") if ":" in text else ("0", "", text)
    upstream, dash, revision = rest.rpartition("-")
    return Version(epoch=int(epoch), upstream=upstream if dash else rest, revision=revision if dash else "0")


def vulnerabilities(image: ImagePackages, snapshot: DebianSnapshot) -> list[Vulnerability]:
    """Return the vulnerabilities of an image's Debian packages in a snapshot; what Debian has not fixed are notes."""
    suite = suite_of(image)
    return [
        Vulnerability(
            package=advisory.package,
            version=version,
            names=(advisory.id,),
            summary=advisory.summary,
            fixed=(advisory.fixed,) if advisory.fixed else (),
            kind="debian",
            note=advisory.note,
        )
        for name, versions in (sorted(sources(image).items()) if suite else ())
        for advisory in snapshot.about(name, suite or "")
        for version in sorted(versions)
        if not advisory.fixed or is_older(version, advisory.fixed)
    ]


def uncovered(images: Iterable[ImagePackages], snapshot: DebianSnapshot | None) -> list[str]:
    """Return what of the images' Debian packages is not audited, a line each."""
    lines = []
    names: set[str] = set()
    for image in images:
        suite = suite_of(image)
        if not image.debian:
            lines.append(f"{image.reference}: no list of Debian packages, so none is audited")
        elif suite is None or (snapshot and suite not in snapshot.suites):
            name = f"{image.release.get('ID', 'unknown')} {image.release.get('VERSION_ID', '')}".strip()
            lines.append(f"{image.reference}: the snapshot does not cover {name}, so no Debian package is audited")
        else:
            names |= sources(image).keys()
    missing = sorted(names - set(snapshot.covers if snapshot else ()))
    if missing:
        few = ", ".join(missing[:5])
        lines.append(
            f"the snapshot covers {len(names) - len(missing)} of {len(names)} source packages of Debian; not {few}"
            + (" and others" if len(missing) > 5 else "")
        )
    return lines
