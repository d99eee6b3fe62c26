"""Versions of the packages that a nightly's spec names without one: nightly.json, which `make lock` writes."""

from __future__ import annotations

import datetime
import json
from collections.abc import Iterable
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from pydantic import ValidationError

from trainyard.spec.catalog import Strict

FILE = "nightly.json"


class NightlyVersions(Strict):
    """The newest releases on a day.

    Attributes:
        day: as in 20261121 (UTC).
        packages: canonical name -> version.
    """

    day: str
    packages: dict[str, str]

    def pin(self, text: str) -> str:
        """A requirement with its version here; one that has a version is returned as it is.

        Raises:
            KeyError: there is no version of it here.
        """
        requirement = Requirement(text)
        if is_pinned(requirement):
            return text
        extras = f"[{','.join(sorted(requirement.extras))}]" if requirement.extras else ""
        return f"{requirement.name}{extras}=={self.packages[canonicalize_name(requirement.name)]}"

    def text(self) -> str:
        """The record as it is written."""
        return self.model_dump_json(indent=2) + "\n"


def is_pinned(requirement: Requirement) -> bool:
    """Whether a requirement allows one version alone, ``name==1.2.3``."""
    pins = list(requirement.specifier)
    return len(pins) == 1 and pins[0].operator == "==" and not pins[0].version.endswith(".*")


def unpinned(packages: Iterable[str]) -> list[str]:
    """Canonical names of those of the requirements that have no version."""
    return [canonicalize_name(one.name) for one in map(Requirement, packages) if not is_pinned(one)]


def read(path: Path) -> NightlyVersions | None:
    """The record in a file; None if there is none.

    Raises:
        ValueError: it is not valid.
    """
    try:
        found = NightlyVersions.model_validate(json.loads(path.read_text(encoding="utf-8")))
        datetime.datetime.strptime(found.day, "%Y%m%d")
    except FileNotFoundError:
        return None
    except (ValueError, ValidationError) as error:
        raise ValueError(str(error).splitlines()[0]) from None
    return found
