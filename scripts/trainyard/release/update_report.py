"""Write what ``trainyard update`` did, in Markdown, as the body of a pull request, and as JSON."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import asdict
from typing import Any

from trainyard.release.trials import Comparison
from trainyard.release.update import Result, Step


def as_dict(result: Result) -> dict[str, Any]:
    """Return the result for JSON: fields of :class:`Result`, and of each step whether a row is worse, and why."""
    return asdict(result) | {
        "taken": [step.group for step in result.taken],
        "closed": sorted({one for step in result.taken if step.comparison for one in step.comparison.closed}),
    }


def markdown(result: Result) -> str:
    """Return the report."""
    return "\n".join([*_lines(result), ""])


def _lines(result: Result) -> Iterator[str]:
    yield f"## {result.name}: {_summary(result)}"
    if result.whole:
        yield from ("", "All that was taken, compared with the packages before:", "", *_table(result.whole))
    for step in result.steps:
        yield from _step(step)
    if result.behind:
        yield from ("", "### Not possible with the requirements", "", *_items(result.behind))
    if result.notes:
        yield from ("", *_items(result.notes))


def _summary(result: Result) -> str:
    if [step.group for step in result.steps] == ["proof"]:
        return "worse" if result.steps[0].reason else "not worse"
    if not result.taken:
        return "nothing to take"
    changes = sum(len(step.changes) for step in result.taken)
    closed = {one for step in result.taken if step.comparison for one in step.comparison.closed}
    groups = ", ".join(step.group for step in result.taken)
    return f"{groups} taken, with {changes} change{'s' * (changes != 1)}; advisories closed: {len(closed)}"


def _step(step: Step) -> Iterator[str]:
    outcome = f"Not taken: {step.reason}" if step.reason else "Taken" if step.taken else "Nothing but what is left out"
    if step.group == "proof":
        outcome = (
            f"Worse: {step.reason}" if step.reason else "Nothing is worse" if step.comparison else "Nothing differs"
        )
    yield from ("", f"### {step.group}", "", f"{outcome}.", "")
    if step.comparison:
        yield from _table(step.comparison)
        yield from ("", *_items(step.changes))
        if step.along:
            yield f"- along, as others need them: {', '.join(step.along)}"
        if step.comparison.closed:
            yield f"- closes {', '.join(step.comparison.closed)}"
    what = "culprit" if step.group == "proof" else "left out"
    yield from _items(f"{what}: {words} ({reason})" for words, reason in step.left_out.items())


def _table(comparison: Comparison) -> Iterator[str]:
    yield from ("| | before | after | bound | |", "|---|---|---|---|---|")
    for row in comparison.rows:
        cells = [row.name, row.before, row.after, row.bound, "**worse**" if row.worse else ""]
        yield " ".join(["|", *(cell.replace("|", "/") + " |" for cell in cells)])


def _items(lines: Iterable[str]) -> Iterator[str]:
    for line in lines:
        yield f"- {line}"
