"""What checks find: where, what, why it matters, how to mend it."""

from __future__ import annotations

from dataclasses import dataclass

from scripts.cli import log, say


@dataclass(frozen=True)
class Finding:
    """Something that is not as it must be.

    Attributes:
        rule: name of the rule it breaks.
        where: file, line, layer, label or package.
        what: what was found there, and what was expected.
        why: what goes wrong for users because of it.
        fix: what to do.
        note: whether it is said loudly but fails nothing.
    """

    rule: str
    where: str
    what: str
    why: str
    fix: str
    note: bool = False

    def __str__(self) -> str:
        return f"{self.where}: {self.what}"


def show(finding: Finding) -> None:
    """Tell a finding to people."""
    word, style = ("NOTE", "bold yellow") if finding.note else ("FOUND", "bold red")
    log.print(f"{word} {finding}", style=style, markup=False)
    say(f"  why: {finding.why}\n  fix: {finding.fix}")
