"""The rule engine: rules for images and for jobs, and what they report.

A rule is a generator function: it takes the evidence about one image or one job file and yields a :class:`Finding` for
every place that breaks the rule. The decorator :func:`rule` makes it a :class:`Rule`. A module of rules belongs in the
list of :mod:`trainyard.lint.image.core` or of :mod:`trainyard_jobs.platforms.all_rules`, which also fixes the order in
which rules report: by module in that list, then by position in the module.
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import ModuleType
from typing import Any, Generic, TypeVar

E = TypeVar("E")


class Severity(enum.StrEnum):
    """What a finding means for the user; see docs/decisions/0004-rule-severities.md."""

    #: The platform, or the promise that an image is what its tag says, refuses it.
    REFUSE = "refuse"
    #: The platform accepts it, but it will not run, or not on the accelerator that it asks for.
    CANNOT_START = "cannot start"
    #: Worth reading; fails nothing.
    NOTE = "note"

    def at_most(self, other: Severity) -> Severity:
        """The lower one of the two."""
        order = list(Severity)  # highest first
        return max(self, other, key=order.index)


@dataclass(frozen=True)
class Finding:
    """A place that breaks a rule.

    Rules leave out ``rule``, and ``severity`` unless it is lower than the rule's: :class:`Rule` sets both.

    Attributes:
        where: file and line, layer, label or package.
        what: what was found there, and what was expected.
        why: what goes wrong for users because of it.
        remediation: what to do.
        severity: at most that of the rule.
        rule: id of the rule.
    """

    where: str
    what: str
    why: str
    remediation: str
    severity: Severity = Severity.REFUSE
    rule: str = ""

    @property
    def fails(self) -> bool:
        """Whether it makes the check fail."""
        return self.severity is not Severity.NOTE

    def __str__(self) -> str:
        return f"{self.where}: {self.what}"


@dataclass(frozen=True)
class Rule(Generic[E]):
    """A rule for images or for jobs.

    Attributes:
        id: name of its function; what waivers name.
        title: what it requires, in one line.
        severity: the highest that its findings have.
        subjects: what it is about, such as ``image`` or ``custom-job``.
        source: where the requirement is written down: an API, a URL, the version of a client, a page of docs/.
    """

    id: str
    title: str
    severity: Severity
    subjects: tuple[str, ...]
    source: str
    function: Callable[[E], Iterator[Finding]]

    def __call__(self, evidence: E) -> list[Finding]:
        """Everything in ``evidence`` that breaks the rule, complete with the rule's id and severity."""
        return [
            dataclasses.replace(one, rule=self.id, severity=one.severity.at_most(self.severity))
            for one in self.function(evidence)
        ]


def rule(*subjects: str, severity: Severity, source: str) -> Callable[[Callable[[E], Iterator[Finding]]], Rule[E]]:
    """Make a function a rule: its name is the id, the first line of its docstring the title.

    Args:
        subjects: see :class:`Rule`, like the other arguments.
    """

    def decorate(function: Callable[[E], Iterator[Finding]]) -> Rule[E]:
        title = (function.__doc__ or "").strip().partition("\n")[0].rstrip(".")
        return Rule(function.__name__, title, severity, subjects, source, function)

    return decorate


def rules_in(*modules: ModuleType) -> tuple[Rule[Any], ...]:
    """The rules that modules define, in the order of the modules and of their definition."""
    return tuple(
        one
        for module in modules
        for one in vars(module).values()
        if isinstance(one, Rule) and one.function.__module__ == module.__name__
    )


def as_dict(finding: Finding) -> dict[str, str]:
    """A finding as JSON has it."""
    return {name: str(value) for name, value in dataclasses.asdict(finding).items()}
