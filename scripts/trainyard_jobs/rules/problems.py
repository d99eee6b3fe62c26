"""Report problems of Kubernetes objects, and make the checks that several rules share."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeVar

from trainyard.common.rule_engine import Finding, Rule, Severity, rule
from trainyard.spec.yaml_source import Location
from trainyard_jobs.kubernetes import kubernetes_names as names
from trainyard_jobs.rules.evidence import Evidence
from trainyard_jobs.schema.kubernetes_defaults import mapping, sequence

#: The location from the top of the document, what is wrong, what to do; then, where they are others than those of most
#: problems of the rule, the severity, and what goes wrong because of it.
Problem = tuple[Location, str, str] | tuple[Location, str, str, Severity] | tuple[Location, str, str, Severity, str]

T = TypeVar("T")


def findings(
    job: Evidence, document: int, problems: Iterable[Problem], why: str, severity: Severity = Severity.REFUSE
) -> Iterator[Finding]:
    """Report problems of a document."""
    for problem in problems:
        location, what, remediation = problem[:3]
        own = problem[3] if len(problem) > 3 else severity
        reason = problem[4] if len(problem) > 4 else why
        yield Finding(job.at(*location, document=document), what, reason, remediation, own)


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
                yield from findings(job, document, function(item), why, severity)

        return rule("gke", severity=severity, source=source)(check)

    return decorate


def repeated(value: object, at: Location, keys: dict[str, object]) -> Iterator[Problem]:
    """Yield the entries of a list that have the same key as an earlier one.

    Args:
        keys: the fields that are the key (x-kubernetes-list-map-keys) -> their defaults.
    """
    seen: set[str] = set()
    for number, entry in enumerate(map(mapping, sequence(value))):
        found = " ".join(str(entry.get(key, default)) for key, default in keys.items())
        if found in seen:
            yield (*at, number), f"{'.'.join(keys)} {found} is there twice in {at[-1]}", "remove or rename one"
        seen.add(found)


def out_of_range(part: dict[str, Any], key: str, at: Location, low: int, high: int | None = None) -> Iterator[Problem]:
    """Yield the problem of a number that is below ``low``, or above ``high``."""
    value = part.get(key)
    if isinstance(value, int) and (value < low or (high is not None and value > high)):
        yield (*at, key), f"{key} is {value}", f"write {low} or more" if high is None else f"write {low} to {high}"


def not_a_controller(spec: dict[str, Any], at: Location) -> Iterator[Problem]:
    """Yield the problem of a managedBy that is no name of a controller."""
    manager = spec.get("managedBy")
    if isinstance(manager, str):
        wrong = names.domain_prefixed_path(manager)
        if not wrong and len(manager) > names.LABEL:
            wrong = f"at most {names.LABEL} characters"
        if wrong:
            yield (*at, "managedBy"), f"managedBy is '{manager}'", wrong
