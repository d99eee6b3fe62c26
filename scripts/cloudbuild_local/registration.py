"""Bring rules and more to the builder's commands; see :mod:`trainyard.common.registration`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from trainyard.common.registration import Neighbour
from trainyard.common.rule_engine import Rule


def _rules() -> Sequence[Rule[Any]]:
    from cloudbuild_local import rules

    return rules.RULES


NEIGHBOUR = Neighbour(rules=_rules)
