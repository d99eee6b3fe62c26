"""Known vulnerabilities of Debian packages: the stored snapshot of Debian's security tracker, and fetching a new one.

The tracker (https://security-tracker.debian.org) is about source packages and suites. Its JSON document is
``{source package: {id: {"description": …, "releases": {suite: {"status": "resolved", "fixed_version": "1.2-3",
"urgency": "low", "nodsa": "Minor issue", …}}}}}``. A fixed version ``0`` means that the suite was never affected. The
snapshot, images/debian-advisories.json, has the suites and source packages of the images on the host that fetched it;
``covers`` lists these packages.
"""

from __future__ import annotations

import datetime
import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import requests

from trainyard.common import installation
from trainyard.common.errors import StepFailed, UserError
from trainyard.spec.model import IMAGES, relative

FILE = IMAGES / "debian-advisories.json"

#: The whole tracker, some 70 MB.
TRACKER = "https://security-tracker.debian.org/tracker/data/json"

#: Seconds to wait for a part of the answer.
TIMEOUT = 60

#: Debian releases whose packages are audited (https://www.debian.org/releases/): VERSION_ID of os-release -> suite.
SUITES = {"11": "bullseye", "12": "bookworm", "13": "trixie"}

#: The fixed version of a suite that was never affected.
_NEVER_AFFECTED = "0"


@dataclass(frozen=True)
class DebianAdvisory:
    """What the tracker says about one vulnerability of one source package in one suite.

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


@dataclass(frozen=True)
class DebianSnapshot:
    """Advisories of the tracker on the day ``taken``, about the source packages ``covers`` in ``suites``."""

    source: str
    taken: str
    suites: tuple[str, ...]
    covers: tuple[str, ...]
    advisories: tuple[DebianAdvisory, ...]

    def about(self, package: str, suite: str) -> list[DebianAdvisory]:
        """The advisories about a source package in a suite."""
        return [one for one in self.advisories if (one.package, one.suite) == (package, suite)]

    def age(self, today: datetime.date) -> int:
        """Days since it was taken."""
        return (today - datetime.date.fromisoformat(self.taken)).days


def load(path: Path = FILE) -> DebianSnapshot | None:
    """The stored snapshot; None if none was fetched.

    Raises:
        UserError: it cannot be read.
    """
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
        return DebianSnapshot(
            source=str(data["source"]),
            taken=datetime.date.fromisoformat(data["taken"]).isoformat(),
            suites=tuple(data["suites"]),
            covers=tuple(data["covers"]),
            advisories=tuple(DebianAdvisory(**entry) for entry in data["advisories"]),
        )
    except FileNotFoundError:
        return None
    except (ValueError, KeyError, TypeError) as error:
        raise UserError(
            f"{relative(path)}: not a snapshot of Debian's security tracker ({error!r}): "
            f"run 'trainyard dev audit --update'"
        ) from None


def save(snapshot: DebianSnapshot, path: Path = FILE) -> None:
    """Store a snapshot, atomically.

    Raises:
        UserError: ``path`` is a file of an installed package.
    """
    installation.check_writable(path)
    temporary = path.with_suffix(".json.new")
    temporary.write_text(json.dumps(asdict(snapshot), indent=1) + "\n", encoding="utf-8")
    temporary.replace(path)


def from_tracker(data: Mapping[str, Any], packages: Iterable[str], suites: Iterable[str]) -> list[DebianAdvisory]:
    """The advisories of the tracker's document about source packages in suites, without those that never applied."""
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
    description = str(document.get("description") or "").strip()
    return DebianAdvisory(
        id=identifier,
        package=package,
        suite=suite,
        status=str(release["status"]),
        fixed=str(release.get("fixed_version") or ""),
        urgency=str(release.get("urgency") or "not yet assigned").rstrip("*"),
        nodsa=str(release.get("nodsa") or ""),
        summary=description.splitlines()[0][:160] if description else "",
    )


def fetch(packages: Iterable[str], suites: Iterable[str], today: datetime.date, address: str = "") -> DebianSnapshot:
    """A new snapshot about source packages in suites.

    Args:
        today: the snapshot's date.
        address: of a mirror of :data:`TRACKER`.
    Raises:
        StepFailed: the tracker does not answer, or not in its format.
    """
    address = address or TRACKER
    covers, known = tuple(sorted(set(packages))), tuple(sorted(set(suites)))
    try:
        answer = requests.get(address, timeout=TIMEOUT)
        answer.raise_for_status()
        found = from_tracker(answer.json(), covers, known)
    except (requests.exceptions.RequestException, ValueError, KeyError, TypeError, AttributeError) as error:
        words = " ".join(str(error).split())[:200]
        raise StepFailed(f"{address} does not answer ({words}): the stored snapshot is unchanged") from None
    return DebianSnapshot(address, today.isoformat(), known, covers, tuple(found))
