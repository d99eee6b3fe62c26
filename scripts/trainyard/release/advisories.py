"""Keep a snapshot of known vulnerabilities of Python packages, say which versions they affect, and fetch a new one.

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
from typing import Any, TypeVar

import requests
from packaging.utils import canonicalize_name
from packaging.version import InvalidVersion, Version
from pydantic import TypeAdapter, ValidationError

from trainyard.common.errors import StepFailed, UserError
from trainyard.common.installation import check_writable
from trainyard.spec.catalog import IMAGES
from trainyard.spec.yaml_source import relative

S = TypeVar("S")

FILE = IMAGES / "advisories.json"

#: Where a new snapshot comes from (https://google.github.io/osv.dev/api).
OSV = "https://api.osv.dev"

#: Seconds to wait for its answer.
TIMEOUT = 30


@dataclass(frozen=True)
class Advisory:
    """Describe one advisory about one package.

    Attributes:
        package: its canonical name.
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

    def __post_init__(self) -> None:
        for events in self.ranges:
            for _, version in events:
                Version(version)  # raises for a broken range

    @property
    def names(self) -> tuple[str, ...]:
        """Return its id and aliases."""
        return (self.id, *self.aliases)

    @property
    def fixed(self) -> tuple[str, ...]:
        """Return versions that fix it."""
        return tuple(version for events in self.ranges for kind, version in events if kind == "fixed")

    def affects(self, version: str) -> bool:
        """Return whether it affects a version (OSV schema, "Evaluation"); local parts such as +cpu are ignored.

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
class Taken:
    """Say where and on which day, ISO 8601, the advisories of a snapshot were taken, and about which packages."""

    source: str
    taken: str
    covers: tuple[str, ...]

    def __post_init__(self) -> None:
        datetime.date.fromisoformat(self.taken)

    def age(self, today: datetime.date) -> int:
        """Return days since it was taken."""
        return (today - datetime.date.fromisoformat(self.taken)).days


@dataclass(frozen=True)
class Snapshot(Taken):
    """Hold advisories about Python packages; ``covers`` are canonical names."""

    advisories: tuple[Advisory, ...]

    def about(self, package: str, version: str) -> list[Advisory]:
        """Return the advisories that affect a version of a package."""
        name = canonicalize_name(package)
        return [advisory for advisory in self.advisories if advisory.package == name and advisory.affects(version)]


def read(path: Path, kind: type[S], what: str) -> S:
    """Return the snapshot in a file, or raise a :class:`UserError` if it holds none of ``what``."""
    try:
        return TypeAdapter(kind).validate_json(path.read_bytes())
    except ValidationError as error:
        problem = error.errors(include_url=False, include_input=False)[0]
        why = f"{'.'.join(map(str, problem['loc'])) or 'the file'}: {problem['msg']}"
        raise UserError(
            f"{relative(path)}: not a snapshot of {what} ({why}): run 'trainyard dev audit --update'"
        ) from None


def load(path: Path = FILE) -> Snapshot:
    """Return the stored snapshot, or raise a :class:`UserError` if there is none or it cannot be read."""
    if not path.exists():
        raise UserError(f"{relative(path)} is missing: run 'trainyard dev audit --update' where {OSV} answers")
    return read(path, Snapshot, "advisories")


def save(snapshot: Taken, path: Path = FILE) -> None:
    """Store a snapshot, atomically; a file of an installed package is refused with a :class:`UserError`."""
    check_writable(path)
    temporary = path.with_suffix(".json.new")
    temporary.write_text(json.dumps(asdict(snapshot), indent=1) + "\n", encoding="utf-8")
    temporary.replace(path)


def summary_in(text: object) -> str:
    """Return the first line of what an advisory says, at most 160 characters."""
    lines = str(text or "").strip().splitlines()
    return lines[0][:160] if lines else ""


def from_osv(document: dict[str, Any], package: str) -> Advisory | None:
    """Return the advisory of an OSV document about ``package``; None if it was withdrawn or is about others."""
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
    return Advisory(
        id=str(document["id"]),
        aliases=tuple(str(alias) for alias in document.get("aliases", [])),
        package=package,
        summary=summary_in(document.get("summary") or document.get("details")),
        modified=str(document.get("modified", ""))[:10],
        ranges=ranges,
        versions=() if ranges else tuple(str(name) for entry in affected for name in entry.get("versions", [])),
    )


def fetch(packages: Iterable[str], today: datetime.date, address: str = "") -> Snapshot:
    """Return a new snapshot, taken ``today``, of all advisories about any version of ``packages``, canonical names.

    Args:
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
                        if advisory := from_osv(document, name):
                            found[name, advisory.id] = advisory
                    token = data.get("next_page_token")
                    query = query | {"page_token": token} if token else {}
    except (requests.exceptions.RequestException, ValueError) as error:
        raise not_answered(address, error) from None
    return Snapshot(address, today.isoformat(), names, tuple(found[key] for key in sorted(found)))


def not_answered(address: str, error: Exception) -> StepFailed:
    """Return what is wrong with a service that does not answer, or not in its format."""
    words = " ".join(str(error).split())[:200]
    return StepFailed(f"{address} does not answer ({words}): the stored snapshot is unchanged")
