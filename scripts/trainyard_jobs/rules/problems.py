"""Make a check of single objects of a file a rule about every such object."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

from trainyard.common.rule_engine import Finding, Rule, Severity, rule
from trainyard.spec.yaml_source import Location
from trainyard_jobs.rules.evidence import Evidence

#: The location from the top of the document, what is wrong, what to do; then, where they are others than those of most
#: problems of the rule, the severity, and what goes wrong because of it.
Problem = tuple[Location, str, str] | tuple[Location, str, str, Severity] | tuple[Location, str, str, Severity, str]

T = TypeVar("T")


def rule_for_each(
    objects: Callable[[Evidence], Iterable[tuple[int, T]]],
    source: str,
    why: str,
    severity: Severity = Severity.REFUSE,
) -> Callable[[Callable[[T], Iterator[Problem]]], Rule[Evidence]]:
    """Make a function that yields the problems of one object a rule about every such object of a file.

    Args:
        objects: yields the objects of a file, each with the number of its document.
        source, severity: see :class:`trainyard.common.rule_engine.Rule`.
        why: what goes wrong because of a problem.
    """

    def decorate(function: Callable[[T], Iterator[Problem]]) -> Rule[Evidence]:
        @functools.wraps(function)
        def check(job: Evidence) -> Iterator[Finding]:
            for document, item in objects(job):
                for problem in function(item):
                    location, what, remediation = problem[:3]
                    own = problem[3] if len(problem) > 3 else severity
                    reason = problem[4] if len(problem) > 4 else why
                    yield Finding(job.at(*location, document=document), what, reason, remediation, own)

        return rule("gke", severity=severity, source=source)(check)

    return decorate
