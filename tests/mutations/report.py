"""The result of the mutants, for people."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

#: Least part of the mutants that must be found.
LEAST = 0.95

#: Bytes of a finding that are shown.
_SHOWN = 160

Outcome = Literal["found", "missed", "not loaded"]

#: Family -> its heading.
FAMILIES = {
    "configuration": "configuration", "layer": "layers", "squashed": "squashed to one layer",
    "instruction": "instructions of a Dockerfile", "lock": "locks",
}  # fmt: skip


@dataclass(frozen=True)
class Row:
    """One mutant.

    Attributes:
        said: what the command said instead, of a mutant that was missed; the engine's error, if it did not load it.
    """

    number: int
    family: str
    kind: str
    what: str
    outcome: Outcome
    said: tuple[str, ...] = ()


@dataclass(frozen=True)
class Foreign:
    """One image that is not ours.

    Attributes:
        said: findings; why the image was not built.
    """

    name: str
    outcome: Literal["passed", "false alarm", "not built"]
    said: tuple[str, ...] = ()


@dataclass
class Results:
    """All that was measured about an image.

    Attributes:
        image: its digest.
        rows: by number of the mutant.
    """

    target: str
    image: str
    seed: int
    day: str
    rows: dict[int, Row] = field(default_factory=dict)
    foreign: dict[str, Foreign] = field(default_factory=dict)

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        rows = [vars(row) for _, row in sorted(self.rows.items())]
        return {**vars(self), "rows": rows, "foreign": [vars(one) for one in self.foreign.values()]}

    @classmethod
    def of(cls, data: Mapping[str, Any]) -> Results:
        """What :meth:`as_dict` made, read from JSON."""
        rows = [Row(**{**row, "said": tuple(row["said"])}) for row in data["rows"]]
        foreign = [Foreign(**{**one, "said": tuple(one["said"])}) for one in data["foreign"]]
        known = {key: data[key] for key in ("target", "image", "seed", "day")}
        return cls(**known, rows={row.number: row for row in rows}, foreign={one.name: one for one in foreign})


def found(rows: Iterable[Row]) -> tuple[int, int]:
    """How many mutants were found, and how many were tried. Those that the engine did not load do not count."""
    tried = [row for row in rows if row.outcome != "not loaded"]
    return sum(row.outcome == "found" for row in tried), len(tried)


def markdown(results: Results) -> str:
    """The result in Markdown, as it is in benchmarks/results."""
    good, tried = found(results.rows.values())
    part = good / tried if tried else 0.0
    lines = [
        "<!-- Written by `python -m tests.mutations`. Do not edit. -->",
        "# Mutation test of `trainyard verify`",
        "",
        f"Measured {results.day} with `{results.target}`, `{results.image[:19]}`, seed {results.seed}. Code that",
        "does not know the rules chooses the faults at random (`tests/mutations/`). A fault is found if the",
        "command fails with a finding that names the path, label, variable or property, and that the image without the",
        "fault does not have.",
        "",
        f"Found: {good} of {tried}, {part:.1%}; target: {LEAST:.0%}: {'met' if part >= LEAST else 'missed'}. "
        f"False alarms: {_alarms(results.foreign.values())}.",
        "",
        "| kind of mutation | number | found |",
        "|---|---|---|",
    ]
    for family, heading in FAMILIES.items():
        own = [row for row in results.rows.values() if row.family == family]
        if own:
            lines.append(f"| **{heading}** | {_counts(own)} |")
            lines += [f"| {kind} | {_counts(rows)} |" for kind, rows in _by_kind(own).items()]
    for outcome, heading in (("missed", "Missed"), ("not loaded", "Refused by the engine, and not counted")):
        of_it = [row for _, row in sorted(results.rows.items()) if row.outcome == outcome]
        if of_it:
            lines += ["", f"## {heading}", "", "| number | kind | mutation | said |", "|---|---|---|---|"]
            lines += [f"| {row.number} | {row.kind} | {_cell(row.what)} | {_said(row.said)} |" for row in of_it]
    if results.foreign:
        lines += ["", "## Images that are not ours", "", "| image | result | said |", "|---|---|---|"]
        lines += [f"| {one.name} | {one.outcome} | {_said(one.said)} |" for one in results.foreign.values()]
    return "\n".join([*lines, ""])


def _alarms(foreign: Iterable[Foreign]) -> str:
    """How many images that are not ours did not pass."""
    verified = [one for one in foreign if one.outcome != "not built"]
    if not verified:
        return "not measured"
    count = sum(one.outcome == "false alarm" for one in verified)
    met = "missed" if count else "met"
    return f"{count} of {len(verified)} images that are not ours; target: 0: {met}"


def _by_kind(rows: Iterable[Row]) -> dict[str, list[Row]]:
    kinds: dict[str, list[Row]] = {}
    for row in sorted(rows, key=lambda one: one.kind):
        kinds.setdefault(row.kind, []).append(row)
    return kinds


def _counts(rows: Iterable[Row]) -> str:
    good, tried = found(rows)
    return f"{tried} | {good}"


def _said(sentences: tuple[str, ...]) -> str:
    more = f" (and {len(sentences) - 1} more)" if len(sentences) > 1 else ""
    return _cell(sentences[0]) + more if sentences else "nothing"


def _cell(text: str) -> str:
    shown = textwrap.shorten(text, _SHOWN, placeholder=" …")
    return shown.replace("|", "\\|").replace("<", "&lt;")
