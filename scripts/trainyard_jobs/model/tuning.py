"""The search of a tuning job: ``TUNE="lr=1e-4:1e-1:log batch-size=32,64,128 epochs=2:8"``."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from trainyard.common.errors import UserError, nearest

#: The name under which the trainers report their accuracy (flag --hypertune-tag), a number from 0 to 1.
METRIC = "accuracy"

_NUMBER = r"[-+]?(?:\d+(?:\.\d*)?|\.\d+)(?:[eE][-+]?\d+)?"


@dataclass(frozen=True)
class Parameter:
    """A flag of the trainer that trials vary: a range of numbers, or a list of values.

    Attributes:
        low, high: bounds of the range, as text; "" for a list.
        values: the list, as text; empty for a range.
        log: whether values are sampled on a logarithmic scale.
    """

    name: str
    low: str = ""
    high: str = ""
    values: tuple[str, ...] = ()
    log: bool = False

    @property
    def is_integer(self) -> bool:
        """Whether it is a range of integers."""
        return all(re.fullmatch(r"[-+]?\d+", side) for side in (self.low, self.high))

    @property
    def is_numeric(self) -> bool:
        """Whether it is a list of numbers."""
        return bool(self.values) and all(re.fullmatch(_NUMBER, value) for value in self.values)


@dataclass(frozen=True)
class Tuning:
    """A search. ``goal`` is MAXIMIZE or MINIMIZE; ``algorithm`` is None for the service's default (Bayesian)."""

    parameters: tuple[Parameter, ...]
    metric: str = METRIC
    goal: str = "MAXIMIZE"
    trials: int = 8
    parallel: int = 2
    algorithm: str | None = None


def parse(text: str) -> tuple[Parameter, ...]:
    """The parameters that TUNE= lists.

    Raises:
        UserError: one of them is invalid; the message quotes it.
    """
    found = tuple(_parameter(word) for word in text.split())
    names = [one.name for one in found]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice:
        raise UserError(f"TUNE: '{twice}' is given twice")
    return found


def _parameter(word: str) -> Parameter:
    match = re.fullmatch(r"(?:--)?([A-Za-z][\w-]*)=(.+)", word)
    if not match:
        raise UserError(f"TUNE: {word!r} is not flag=values, as in lr=1e-4:1e-1:log or batch-size=32,64")
    name, values = match[1], match[2]
    if ":" not in values:
        return Parameter(name, values=tuple(values.split(",")))
    low, high, *scale = values.split(":")
    if len(scale) > 1 or (scale and scale[0] not in ("log", "linear")):
        raise UserError(
            f"TUNE: {word!r}: the scale after the range is 'log' or 'linear'{nearest(scale[0], ['log', 'linear'])}"
        )
    for side in (low, high):
        if not re.fullmatch(_NUMBER, side):
            raise UserError(f"TUNE: {word!r}: {side!r} is not a number")
    if float(low) >= float(high):
        raise UserError(f"TUNE: {word!r}: {low} is not less than {high}")
    log = scale == ["log"]
    if log and float(low) <= 0:
        raise UserError(f"TUNE: {word!r}: a logarithmic scale requires a range above 0")
    return Parameter(name, low=low, high=high, log=log)


def study_spec(tuning: Tuning) -> dict[str, Any]:
    """Vertex AI's StudySpec."""
    study: dict[str, Any] = {
        "metrics": [{"metricId": tuning.metric, "goal": tuning.goal}],
        "parameters": [_vertex_parameter(one) for one in tuning.parameters],
    }
    return study | ({"algorithm": tuning.algorithm} if tuning.algorithm else {})


def _vertex_parameter(one: Parameter) -> dict[str, Any]:
    found: dict[str, Any] = {"parameterId": one.name}
    if one.values and one.is_numeric:
        return found | {"discreteValueSpec": {"values": sorted(_number(value) for value in one.values)}}
    if one.values:
        return found | {"categoricalValueSpec": {"values": list(one.values)}}
    kind = "integerValueSpec" if one.is_integer else "doubleValueSpec"
    scale = "UNIT_LOG_SCALE" if one.log else "UNIT_LINEAR_SCALE"
    # 64-bit numbers are text in proto3's JSON.
    sides = {"minValue": one.low, "maxValue": one.high} if one.is_integer else {
        "minValue": float(one.low), "maxValue": float(one.high)}  # fmt: skip
    return found | {kind: sides, "scaleType": scale}


def hyperparameters(tuning: Tuning) -> dict[str, Any]:
    """AI Platform's HyperparameterSpec."""
    return {
        "goal": tuning.goal,
        "hyperparameterMetricTag": tuning.metric,
        "maxTrials": tuning.trials,
        "maxParallelTrials": tuning.parallel,
        **({"algorithm": tuning.algorithm} if tuning.algorithm else {}),
        "params": [_legacy_parameter(one) for one in tuning.parameters],
    }


def _legacy_parameter(one: Parameter) -> dict[str, Any]:
    found: dict[str, Any] = {"parameterName": one.name}
    if one.values and one.is_numeric:
        return found | {"type": "DISCRETE", "discreteValues": sorted(_number(value) for value in one.values)}
    if one.values:
        return found | {"type": "CATEGORICAL", "categoricalValues": list(one.values)}
    return found | {
        "type": "INTEGER" if one.is_integer else "DOUBLE",
        "minValue": _number(one.low),
        "maxValue": _number(one.high),
        "scaleType": "UNIT_LOG_SCALE" if one.log else "UNIT_LINEAR_SCALE",
    }


def _number(text: str) -> int | float:
    return int(text) if re.fullmatch(r"[-+]?\d+", text) else float(text)
