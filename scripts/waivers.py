"""Waivers: known findings that somebody answers for, until a date. Read by `make verify` and `make audit`.

A waiver of images/waivers.yaml is about one thing: an advisory of one version of a package (``rule`` is the advisory's
id), or a finding of one of verify's rules (``rule`` is the rule's name, ``where`` the place as the finding names it).
What is waived is still told, as a note; from the day after ``expires`` on it fails again.
"""

from __future__ import annotations

import datetime
from collections.abc import Iterable
from fnmatch import fnmatchcase
from functools import cache
from pathlib import Path
from typing import Annotated

from packaging.utils import canonicalize_name
from packaging.version import InvalidVersion, Version
from pydantic import BeforeValidator, Field, model_validator

from scripts import documents
from scripts.tables import IMAGES, Strict, validated

FILE = IMAGES / "waivers.yaml"


def _date(value: object) -> object:
    try:
        return datetime.date.fromisoformat(str(value))
    except ValueError:
        raise ValueError(f"{value!r} is not a date: write it as 2026-12-31") from None


class Waiver(Strict):
    """One waiver.

    Attributes:
        rule: name of a rule of verify, or id of an advisory (``GHSA-…``, ``CVE-…``, ``PYSEC-…``).
        package: name of the package it is about, any spelling of PEP 503; with ``version``, exactly this one.
        where: the place that a finding names; ``*`` and ``?`` stand for any characters.
        target: the only image it is for; every image if None.
        expires: the last day on which it holds.
    """

    rule: Annotated[str, Field(min_length=1)]
    package: str | None = None
    version: str | None = None
    where: str | None = None
    target: str | None = None
    owner: Annotated[str, Field(min_length=1)]
    reason: Annotated[str, Field(min_length=10)]
    expires: Annotated[datetime.date, BeforeValidator(_date)]

    @model_validator(mode="after")
    def _about_one_thing(self) -> Waiver:
        if (self.package is None) == (self.where is None):
            raise ValueError("say either 'package' and 'version' (an advisory) or 'where' (a finding of verify)")
        if (self.package is None) != (self.version is None):
            raise ValueError("'package' and 'version' belong together")
        return self

    def expired(self, today: datetime.date) -> bool:
        return today > self.expires

    def covers_package(self, rule: str, package: str, version: str, target: str | None = None) -> bool:
        """Whether it is about this advisory (any of its ids) in this version of a package; expired or not."""
        return (
            self.package is not None
            and self.version is not None
            and self.rule == rule
            and canonicalize_name(self.package) == canonicalize_name(package)
            and _same(self.version, version)
            and self.target in (None, target)
        )

    def covers_finding(self, rule: str, where: str, target: str | None = None) -> bool:
        """Whether it is about this finding of verify; expired or not."""
        return (
            self.where is not None
            and self.rule == rule
            and fnmatchcase(where, self.where)
            and self.target in (None, target)
        )

    def __str__(self) -> str:
        return f"waived until {self.expires} by {self.owner}: {self.reason}"


def _same(one: str, other: str) -> bool:
    """Whether two versions are equal (PEP 440)."""
    try:
        return Version(one) == Version(other)
    except InvalidVersion:
        return one == other


class _Document(Strict):
    waivers: list[Waiver] = Field(default_factory=list)


@cache
def load(path: Path = FILE) -> tuple[Waiver, ...]:
    """Every waiver of a file, expired ones too; none where there is no file.

    Raises:
        UserError: the file is not what :class:`Waiver` describes, in one line that names the place.
    """
    if not path.is_file():
        return ()
    data = documents.read(path)
    return tuple(validated(path, _Document, data, documents.plain(data)).waivers)


def today() -> datetime.date:
    """The day that waivers are held against (UTC)."""
    return datetime.datetime.now(tz=datetime.UTC).date()


def expired(waivers: Iterable[Waiver], day: datetime.date) -> list[Waiver]:
    """Those that hold no more on ``day``: whoever answers for them must mend the cause or decide again."""
    return [waiver for waiver in waivers if waiver.expired(day)]
