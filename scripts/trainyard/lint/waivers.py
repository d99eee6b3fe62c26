"""Waivers: findings that an owner accepts until a date. Read by ``trainyard verify`` and ``trainyard dev audit``.

A waiver of images/waivers.yaml is about one thing: an advisory for one version of a package (``rule`` is the advisory's
id), or a finding of a rule for images (``rule`` is the rule's id, ``where`` the place that the finding names).
A waived finding is reported as a note; from the day after ``expires`` it fails again.
"""

from __future__ import annotations

import datetime
from fnmatch import fnmatchcase
from functools import cache
from pathlib import Path
from typing import Annotated

from packaging.utils import canonicalize_name
from packaging.version import InvalidVersion, Version
from pydantic import Field, model_validator

from trainyard.spec import yaml_source
from trainyard.spec.catalog import IMAGES
from trainyard.spec.yaml_source import Date, Strict, validated

FILE = IMAGES / "waivers.yaml"

#: The ``rule`` of waivers for targets past their last day.
ENDS = "supported_until"


class Waiver(Strict):
    """Describe one waiver.

    Attributes:
        rule: id of a rule for images, or of an advisory (``GHSA-…``, ``CVE-…``, ``PYSEC-…``).
        package: name of the package, in any spelling of PEP 503; with ``version``, exactly this one.
        where: the place that a finding names; ``*`` and ``?`` match any characters.
        target: the only target that it is for; all targets if None.
        expires: the last day on which it is valid.
    """

    rule: Annotated[str, Field(min_length=1)]
    package: str | None = None
    version: str | None = None
    where: str | None = None
    target: str | None = None
    owner: Annotated[str, Field(min_length=1)]
    reason: Annotated[str, Field(min_length=10)]
    expires: Date

    @model_validator(mode="after")
    def _about_one_thing(self) -> Waiver:
        if (self.package is None) == (self.where is None):
            raise ValueError("say either 'package' and 'version' (an advisory) or 'where' (a finding of a rule)")
        if (self.package is None) != (self.version is None):
            raise ValueError("'package' and 'version' belong together")
        return self

    def expired(self, today: datetime.date) -> bool:
        """Return whether its last day is before ``today``."""
        return today > self.expires

    def covers_package(self, rule: str, package: str, version: str, target: str | None = None) -> bool:
        """Return whether it is about this advisory (any of its ids) in this version of a package; expired or not."""
        return (
            self.package is not None
            and self.version is not None
            and self.rule == rule
            and canonicalize_name(self.package) == canonicalize_name(package)
            and same_version(self.version, version)
            and self.target in (None, target)
        )

    def covers_finding(self, rule: str, where: str, target: str | None = None) -> bool:
        """Return whether it is about this finding of a rule for images; expired or not."""
        return (
            self.where is not None
            and self.rule == rule
            and fnmatchcase(where, self.where)
            and self.target in (None, target)
        )

    def __str__(self) -> str:
        return f"waived until {self.expires} by {self.owner}: {self.reason}"


def same_version(version: str, other: str) -> bool:
    """Return whether two versions are equal (PEP 440), local part included."""
    try:
        return Version(version) == Version(other)
    except InvalidVersion:
        return version == other


class _Document(Strict):
    waivers: list[Waiver] = Field(default_factory=list)


@cache
def load(path: Path = FILE) -> tuple[Waiver, ...]:
    """Return every waiver of a file, expired ones too; none if there is no file.

    Raises:
        UserError: the file is not what :class:`Waiver` describes, in one line that names the place.
    """
    if not path.is_file():
        return ()
    data = yaml_source.read(path)
    return tuple(validated(path, _Document, data, yaml_source.plain(data)).waivers)


def today() -> datetime.date:
    """Return the day that waivers are compared with (UTC)."""
    return datetime.datetime.now(tz=datetime.UTC).date()


def of_end(target: str) -> list[Waiver]:
    """Return the waivers for the last day of a target; expired or not."""
    return [waiver for waiver in load() if waiver.covers_finding(ENDS, target, target)]
