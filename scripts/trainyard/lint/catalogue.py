"""All rules, as ``trainyard dev rules`` lists them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from trainyard.common.errors import UserError, nearest
from trainyard.common.registration import neighbours
from trainyard.common.rule_engine import Rule
from trainyard.lint.image import core as image


def rules() -> list[Rule[Any]]:
    """Return all rules: those for images, then those that neighbours bring."""
    return [*image.RULES, *(rule for neighbour in neighbours() for rule in neighbour.rules())]


def select(words: Sequence[str] = ()) -> list[Rule[Any]]:
    """Return the rules with one of the subjects or ids; all rules if there are none.

    Raises:
        UserError: a word is neither a subject nor the id of a rule.
    """
    known = rules()
    valid = list(dict.fromkeys(one for rule in known for one in (*rule.subjects, rule.id)))
    for word in words:
        if word not in valid:
            subjects = list(dict.fromkeys(one for rule in known for one in rule.subjects))
            raise UserError(f"no rule or subject '{word}'{nearest(word, valid)}; subjects are: {', '.join(subjects)}")
    return [one for one in known if not words or {one.id, *one.subjects} & set(words)]


def as_dict(rule: Rule[Any]) -> dict[str, Any]:
    """A rule as JSON has it."""
    return {
        "id": rule.id,
        "title": rule.title,
        "severity": rule.severity,
        "subjects": list(rule.subjects),
        "source": rule.source,
    }


def describe(rule: Rule[Any]) -> str:
    """A rule for people, in three lines."""
    return f"{rule.id} [{rule.severity}; {', '.join(rule.subjects)}]\n  {rule.title}\n  source: {rule.source}"
