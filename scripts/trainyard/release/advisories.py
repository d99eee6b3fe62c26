"""Known vulnerabilities of Python packages: the stored snapshot, which versions it affects, and fetching a new one.

The snapshot, images/advisories.json, holds advisories in the terms of the OSV schema (https://ossf.github.io/osv-schema):
ids, aliases, and ranges of PEP 440 versions. ``covers`` lists the packages that its source was queried about: the
snapshot does not tell whether other packages have vulnerabilities.
"""

from __future__ import annotations

import datetime
import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import requests
from packaging.utils import canonicalize_name
from packaging.version import InvalidVersion, Version

from trainyard.common.errors import StepFailed, UserError
from trainyard.common.installation import check_writable
from trainyard.spec.model import IMAGES, relative

FILE = IMAGES / "advisories.json"

#: Where a new snapshot comes from (https://google.github.io/osv.dev/api).
OSV = "https://api.osv.dev"

#: Seconds to wait for its answer.
TIMEOUT = 30


@dataclass(frozen=True)
class Advisory:
    """One advisory about one package.

    Attributes:
        ranges: lists of events, each a pair such as ("introduced", "0"), ("fixed", "1.13.1"), ("last_affected", "2.0").
        versions: affected versions, of advisories without a range.
    """

    id: str
    aliases: tuple[str, ...]
    package: str
    summary: str
    modified: str
    ranges: tuple[tuple[tuple[str, str], ...], ...] = ()
    versions: tuple[str, ...] = ()

    @property
    def names(self) -> tuple[str, ...]:
        """Its id and aliases."""
        return (self.id, *self.aliases)

    @property
    def fixed(self) -> tuple[str, ...]:
        """Versions that fix it."""
        return tuple(version for events in self.ranges for kind, version in events if kind == "fixed")

    def affects(self, version: str) -> bool:
        """Whether it affects a version (OSV schema, "Evaluation"); local parts such as +cpu are ignored.

        A version that does not conform to PEP 440 is compared as text.
        """
        try:
            wanted = Version(Version(version).public)
        except InvalidVersion:
            return version in self.versions
        return any(_within(wanted, events) for events in self.ranges) or any(
            _equal(wanted, affected) for affected in self.versions
        )


def _equal(version: Version, other: str) -> bool:
    try:
        return version == Version(other)
    except InvalidVersion:
        return False


def _within(version: Version, events: Iterable[tuple[str, str]]) -> bool:
    affected = False
    for kind, text in sorted(events, key=lambda event: Version(event[1])):
        if kind == "introduced" and version >= Version(text):
            affected = True
        elif (kind == "fixed" and version >= Version(text)) or (kind == "last_affected" and version > Version(text)):
            affected = False
    return affected


@dataclass(frozen=True)
class Snapshot:
    """Advisories of a source on the day ``taken``; ``covers`` are canonical names."""

    source: str
    taken: str
    covers: tuple[str, ...]
    advisories: tuple[Advisory, ...]

    def about(self, package: str, version: str) -> list[Advisory]:
        """The advisories that affect a version of a package."""
        name = canonicalize_name(package)
        return [one for one in self.advisories if one.package == name and one.affects(version)]

    def age(self, today: datetime.date) -> int:
        """Days since it was taken."""
        return (today - datetime.date.fromisoformat(self.taken)).days


def load(path: Path = FILE) -> Snapshot:
    """The stored snapshot.

    Raises:
        UserError: there is none, or it cannot be read.
    """
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
        return Snapshot(
            source=str(data["source"]),
            taken=datetime.date.fromisoformat(data["taken"]).isoformat(),
            covers=tuple(canonicalize_name(name) for name in data["covers"]),
            advisories=tuple(_stored(entry) for entry in data["advisories"]),
        )
    except FileNotFoundError:
        raise UserError(
            f"{relative(path)} is missing: run 'trainyard dev audit --update' where {OSV} answers"
        ) from None
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(
            f"{relative(path)}: not a snapshot of advisories ({error!r}): run 'trainyard dev audit --update'"
        ) from None


def _stored(entry: dict[str, Any]) -> Advisory:
    ranges = tuple(tuple((str(kind), str(version)) for kind, version in events) for events in entry["ranges"])
    for events in ranges:
        for _, version in events:
            Version(version)  # raises for a broken range
    return Advisory(
        id=entry["id"],
        aliases=tuple(entry["aliases"]),
        package=canonicalize_name(entry["package"]),
        summary=entry["summary"],
        modified=entry["modified"],
        ranges=ranges,
        versions=tuple(entry["versions"]),
    )


def save(snapshot: Snapshot, path: Path = FILE) -> None:
    """Store a snapshot, atomically.

    Raises:
        UserError: ``path`` is a file of an installed package.
    """
    check_writable(path)
    data = asdict(snapshot)
    temporary = path.with_suffix(".json.new")
    temporary.write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")
    temporary.replace(path)


def from_osv(document: dict[str, Any], package: str) -> Advisory | None:
    """The advisory of an OSV document about ``package``; None if it was withdrawn or is about other packages."""
    affected = [
        entry
        for entry in document.get("affected", [])
        if canonicalize_name(entry.get("package", {}).get("name", "")) == package
        and entry["package"].get("ecosystem") == "PyPI"
    ]
    if not affected or document.get("withdrawn"):
        return None
    ranges = tuple(
        tuple((str(kind), str(version)) for event in given["events"] for kind, version in event.items())
        for entry in affected
        for given in entry.get("ranges", [])
        if given.get("type") == "ECOSYSTEM"
    )
    versions = () if ranges else tuple(str(one) for entry in affected for one in entry.get("versions", []))
    summary = str(document.get("summary") or document.get("details") or "").strip().splitlines()
    return Advisory(
        id=str(document["id"]),
        aliases=tuple(str(alias) for alias in document.get("aliases", [])),
        package=package,
        summary=summary[0][:160] if summary else "",
        modified=str(document.get("modified", ""))[:10],
        ranges=ranges,
        versions=versions,
    )


def fetch(packages: Iterable[str], today: datetime.date, address: str = "") -> Snapshot:
    """A new snapshot of all advisories about any version of ``packages``.

    Args:
        packages: canonical names.
        today: the snapshot's date.
        address: of a mirror of :data:`OSV`.
    Raises:
        StepFailed: the service does not answer, or not as the API says.
    """
    address = (address or OSV).rstrip("/")
    names = tuple(sorted(set(packages)))
    found: dict[tuple[str, str], Advisory] = {}
    try:
        with requests.Session() as session:
            for name in names:
                query: dict[str, Any] = {"package": {"name": name, "ecosystem": "PyPI"}}
                while query:
                    answer = session.post(f"{address}/v1/query", json=query, timeout=TIMEOUT)
                    answer.raise_for_status()
                    data = answer.json()
                    for document in data.get("vulns", []):
                        advisory = from_osv(document, name)
                        if advisory:
                            found[name, advisory.id] = advisory
                    token = data.get("next_page_token")
                    query = query | {"page_token": token} if token else {}
    except (requests.exceptions.RequestException, ValueError) as error:
        raise StepFailed(f"{address} does not answer ({str(error)[:200]}): the stored snapshot is unchanged") from None
    return Snapshot(address, today.isoformat(), names, tuple(found[key] for key in sorted(found)))
