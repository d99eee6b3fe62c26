"""The study of a tuning job: its search, by Optuna instead of Vizier, and the measurements of its trials.

Vizier's default algorithm is Bayesian optimization. Optuna's tree-structured Parzen estimator is Bayesian too, but a
different algorithm: a rehearsal shows that a tuning job works, not which values Vizier would try.
"""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from trainyard.common.errors import StepFailed, nearest
from trainyard.spec.yaml_source import Location
from trainyard_jobs.rehearsal.model import Trial, count
from trainyard_jobs.schema.job_file import JobFile

#: Trials if the file has no maxTrialCount, which `gcloud ai hp-tuning-jobs create` requires as a flag.
DEFAULT_TRIALS = 4

#: Grid points of a continuous parameter with GRID_SEARCH; Vizier's number is not documented.
_GRID = 3


@dataclass(frozen=True)
class Parameter:
    """One dimension of the search.

    A conditional parameter exists while its ``parent`` has one of ``values``; ``parent`` is "" for others.
    """

    name: str
    kind: str  # double, integer, categorical, discrete
    low: float = 0.0
    high: float = 0.0
    choices: tuple[str, ...] = ()
    scale: str = ""
    parent: str = ""
    values: tuple[str, ...] = ()

    def suggest(self, trial: Any) -> str:
        """The next value, as an argument of the trainer."""
        if self.kind in ("categorical", "discrete"):
            return str(trial.suggest_categorical(self.name, list(self.choices)))
        if self.scale == "UNIT_REVERSE_LOG_SCALE":  # dense at the upper bound
            mirrored = trial.suggest_float(self.name, self.low, self.high, log=True)
            value = self.low + self.high - float(mirrored)
            return str(round(value)) if self.kind == "integer" else repr(value)
        logarithmic = self.scale == "UNIT_LOG_SCALE"
        if self.kind == "integer":
            return str(trial.suggest_int(self.name, int(self.low), int(self.high), log=logarithmic))
        return repr(float(trial.suggest_float(self.name, self.low, self.high, log=logarithmic)))

    def grid(self) -> list[Any]:
        """The values that a grid search tries."""
        if self.choices:
            return list(self.choices)
        if self.kind == "integer" and self.high - self.low < 2 * _GRID:
            return list(range(int(self.low), int(self.high) + 1))
        steps = [part / (_GRID - 1) for part in range(_GRID)]
        if self.scale in ("UNIT_LOG_SCALE", "UNIT_REVERSE_LOG_SCALE"):
            points = [self.low * (self.high / self.low) ** step for step in steps]
        else:
            points = [self.low + (self.high - self.low) * step for step in steps]
        return [round(point) for point in points] if self.kind == "integer" else points


@dataclass(frozen=True)
class Study:
    """The parameters, goal and algorithm of a search.

    ``best_of_trial`` selects a trial's best measurement instead of its last (measurementSelectionType).
    """

    parameters: tuple[Parameter, ...]
    metric: str
    maximize: bool
    algorithm: str
    trials: int
    failed_trials: int
    best_of_trial: bool = False


def study_of(job: JobFile) -> Study | None:
    """Return the study of a HyperparameterTuningJob; None for other jobs.

    Raises:
        UserError: it is invalid; the message gives the line.
    """
    if job.kind != "hyperparameter-tuning-job":
        return None
    where: Location = ("studySpec",)
    document = job.documents[0]
    spec = document.get("studySpec") or {}
    metrics = spec.get("metrics") or []
    if not metrics:
        raise job.error((*where, "metrics"), "the study has no metric")
    parameters: list[Parameter] = []
    for number, one in enumerate(spec.get("parameters") or []):
        parameters += _parameters(job, (*where, "parameters", number), one)
    for one in parameters:
        if one.kind in ("double", "integer") and not one.low <= one.high:
            raise job.error(where, f"parameter {one.name!r}: minValue {one.low} is above maxValue {one.high}")
        if "LOG" in one.scale and one.low <= 0:
            raise job.error(where, f"parameter {one.name!r}: {one.scale} requires a minValue above 0")
        if one.kind in ("categorical", "discrete") and not one.choices:
            raise job.error(where, f"parameter {one.name!r} has no values")
    if not parameters:
        raise job.error(where, "the study has no parameters")
    return Study(
        parameters=tuple(parameters),
        metric=str(metrics[0].get("metricId")),
        maximize=metrics[0].get("goal") != "MINIMIZE",
        algorithm=str(spec.get("algorithm") or ""),
        trials=count(document.get("maxTrialCount"), DEFAULT_TRIALS),
        failed_trials=count(document.get("maxFailedTrialCount")),
        best_of_trial=spec.get("measurementSelectionType") == "BEST_MEASUREMENT",
    )


def _parameters(
    job: JobFile, where: Location, one: Mapping[str, Any], parent: str = "", values: Sequence[str] = ()
) -> Iterator[Parameter]:
    """Yield a ParameterSpec and its conditional parameters."""
    name, scale = str(one.get("parameterId")), str(one.get("scaleType") or "")
    kinds = {f"{kind}ValueSpec": kind for kind in ("double", "integer", "categorical", "discrete")}
    given = next((key for key in kinds if key in one), None)
    if given is None:
        raise job.error(where, f"parameter {name!r} has none of {', '.join(kinds)}")
    about = one[given]
    yield Parameter(
        name=name,
        kind=kinds[given],
        low=float(about.get("minValue", 0)),
        high=float(about.get("maxValue", 0)),
        choices=tuple(_number(value) for value in about.get("values") or []),
        scale=scale,
        parent=parent,
        values=tuple(values),
    )
    for number, conditional in enumerate(one.get("conditionalParameterSpecs") or []):
        condition: Mapping[str, Any] = next(
            (value for key, value in conditional.items() if key.startswith("parent")), {}
        )
        yield from _parameters(
            job,
            (*where, "conditionalParameterSpecs", number),
            conditional.get("parameterSpec") or {},
            name,
            [_number(value) for value in condition.get("values") or []],
        )


def _number(value: object) -> str:
    """A value as an argument: 64, not 64.0."""
    return str(int(value)) if isinstance(value, float) and value.is_integer() else str(value)


class Search:
    """Suggests trials one by one and learns from their measurements; the same ``seed`` gives the same values."""

    def __init__(self, study: Study, seed: int = 0) -> None:
        import optuna

        optuna.logging.set_verbosity(optuna.logging.ERROR)
        self.study = study
        # TPE begins with random trials; few here, because a rehearsal has few trials.
        startup = min(10, max(1, study.trials // 2))
        sampler = (
            optuna.samplers.RandomSampler(seed=seed)
            if study.algorithm in ("RANDOM_SEARCH", "GRID_SEARCH")
            else optuna.samplers.TPESampler(seed=seed, n_startup_trials=startup)
        )
        self._optuna = optuna
        self._study = optuna.create_study(direction="maximize" if study.maximize else "minimize", sampler=sampler)
        if study.algorithm == "GRID_SEARCH":  # Optuna's GridSampler does not work trial by trial
            names = [one.name for one in study.parameters]
            for point in itertools.product(*(one.grid() for one in study.parameters)):
                self._study.enqueue_trial(dict(zip(names, point, strict=True)))
        self._trials: dict[int, Any] = {}

    def ask(self) -> Trial:
        """The next trial."""
        suggested = self._study.ask()
        number = suggested.number + 1  # the services number trials from 1
        self._trials[number] = suggested
        values: dict[str, str] = {}
        for one in self.study.parameters:
            if not one.parent or values.get(one.parent) in one.values:
                values[one.name] = one.suggest(suggested)
        return Trial(number, values, self.study.metric)

    def tell(self, trial: Trial, value: float | None) -> None:
        """Record the measurement of a trial; None if it failed."""
        state = self._optuna.trial.TrialState
        if value is None:
            self._study.tell(self._trials[trial.number], state=state.FAIL)
        else:
            self._study.tell(self._trials[trial.number], value)


def measurements(text: str, metric: str) -> list[tuple[int, float]]:
    """(step, value) of every measurement of ``metric`` in cloudml-hypertune's file: one JSON object a line.

    https://github.com/GoogleCloudPlatform/cloudml-hypertune/blob/master/hypertune/hypertune.py

    Raises:
        StepFailed: there is none; the message lists the metrics that were reported.
    """
    found, others = [], set()
    for line in text.splitlines():
        try:
            entry = json.loads(line)
        except json.JSONDecodeError:
            continue
        others |= {key for key in entry if key not in ("timestamp", "trial", "global_step", "checkpoint_path")}
        if metric in entry:
            value = float(entry[metric])
            if math.isfinite(value):
                found.append((int(float(entry.get("global_step") or 0)), value))
    if not found:
        reported = f"; it reported {', '.join(sorted(others))}{nearest(metric, others)}" if others else ""
        raise StepFailed(f"the trainer did not report the study's metric {metric!r}{reported}")
    return found


def final(study: Study, reports: Sequence[tuple[int, float]]) -> float:
    """The measurement of a trial: its last, or its best."""
    values = [value for _, value in reports]
    if not study.best_of_trial:
        return values[-1]
    return max(values) if study.maximize else min(values)
