"""The book that verify's rules are written into, and how an image is held against them.

A rule takes the :class:`Evidence` and yields a :class:`Finding` for everything that breaks it; the first line of its
docstring is what it promises. To add one, write a function in one of this folder's modules and decorate it.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator

from scripts.findings import Finding
from scripts.rules.evidence import Evidence
from scripts.spec import Spec

#: Findings of one rule that are told one by one; the rest is counted.
SHOWN = 20

Rule = Callable[[Evidence], Iterator[Finding]]

#: Every rule, in the order in which they are told.
RULES: list[Rule] = []

#: Those of them that are about what a spec says.
SPEC_RULES: list[Rule] = []


def rule(function: Rule) -> Rule:
    """Add a rule that holds for every image."""
    RULES.append(function)
    return function


def spec_rule(function: Callable[[Evidence, Spec], Iterator[Finding]]) -> Rule:
    """Add a rule about what a spec says; an image without one cannot break it."""

    @functools.wraps(function)
    def for_images_with_a_spec(image: Evidence) -> Iterator[Finding]:
        if image.spec is not None:
            yield from function(image, image.spec)

    SPEC_RULES.append(for_images_with_a_spec)
    return rule(for_images_with_a_spec)


def applicable(image: Evidence) -> list[Rule]:
    """The rules that this image could break."""
    return [function for function in RULES if image.spec is not None or function not in SPEC_RULES]


def title(function: Rule) -> str:
    """What a rule promises."""
    return (function.__doc__ or function.__name__).strip().splitlines()[0].rstrip(".")


def check(evidence: Evidence) -> dict[str, list[Finding]]:
    """Rule name -> findings, for every rule; more than :data:`SHOWN` of a rule end in one that counts the rest.

    What a waiver covers is a note that names who answers for it, until the waiver expires.
    """
    found: dict[str, list[Finding]] = {}
    for function in RULES:
        findings = [_waived(finding, evidence) for finding in function(evidence)]
        if len(findings) > SHOWN:
            last = findings[SHOWN]
            rest = Finding(last.rule, "and", f"{len(findings) - SHOWN} more", last.why, last.fix, last.note)
            findings = [*findings[:SHOWN], rest]
        found[function.__name__] = findings
    return found


def _waived(finding: Finding, image: Evidence) -> Finding:
    for waiver in image.waivers:
        if waiver.covers_finding(finding.rule, finding.where, image.target) and not waiver.expired(image.day):
            return dataclasses.replace(finding, what=f"{finding.what} ({waiver})", note=True)
    return finding
