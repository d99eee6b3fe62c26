"""A tuning job's study: its search, with Optuna in Vizier's place, and what its trials reported.

Vizier's default is Bayesian optimisation; Optuna's tree-structured Parzen estimator is too, but it is not the same one:
a rehearsal shows that the wiring works, not which values Vizier would try.
"""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from scripts.cli import StepFailed, UserError, nearest
from scripts.jobs.files import JobFile
from scripts.rehearsal.model import Trial, count

#: What the tuning services take when a file does not say, and `gcloud ai hp-tuning-jobs create` wants as a flag.
DEFAULT_TRIALS = 4

#: Grid points of a continuous parameter under GRID_SEARCH, which Vizier chooses itself.
_GRID = 3


@dataclass(frozen=True)
class Parameter:
    """One dimension of the search.

    ``parent`` is the parameter, and ``values`` its values, under which this one exists; "" always.
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
        """The next value, as the trainer gets it on its command line."""
        if self.kind in ("categorical", "discrete"):
            return str(trial.suggest_categorical(self.name, list(self.choices)))
        if self.scale == "UNIT_REVERSE_LOG_SCALE":  # dense at the upper end
            mirrored = trial.suggest_float(self.name, self.low, self.high, log=True)
            value = self.low + self.high - float(mirrored)
            return str(round(value)) if self.kind == "integer" else repr(value)
        logarithmic = self.scale == "UNIT_LOG_SCALE"
        if self.kind == "integer":
            return str(trial.suggest_int(self.name, int(self.low), int(self.high), log=logarithmic))
        return repr(float(trial.suggest_float(self.name, self.low, self.high, log=logarithmic)))

    def grid(self) -> list[Any]:
        """The values a grid search tries."""
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
    """What is searched, how, and for what.

    ``best_of_trial`` takes a trial's best measurement instead of its last (measurementSelectionType).
    """

    parameters: tuple[Parameter, ...]
    metric: str
    maximize: bool
    algorithm: str
    trials: int
    failed_trials: int
    best_of_trial: bool = False


def study_of(job: JobFile) -> Study | None:
    """The study of a tuning job; None for jobs without one.

    Raises:
        UserError: it cannot be searched; the line is named.
    """
    if job.kind == "hyperparameter-tuning-job":
        return _vertex_study(job, job.documents[0])
    if job.kind == "ai-platform" and job.spec.get("hyperparameters"):
        return _ai_platform_study(job, job.spec["hyperparameters"])
    return None


def _vertex_study(job: JobFile, document: Mapping[str, Any]) -> Study:
    spec = document.get("studySpec") or {}
    metrics = spec.get("metrics") or []
    if not metrics:
        raise UserError(f"{job.where(('studySpec', 'metrics'))}: a study needs a metric")
    parameters: list[Parameter] = []
    for number, one in enumerate(spec.get("parameters") or []):
        parameters += _vertex_parameter(job, ("studySpec", "parameters", number), one)
    return _checked(
        job,
        Study(
            parameters=tuple(parameters),
            metric=str(metrics[0].get("metricId")),
            maximize=metrics[0].get("goal") != "MINIMIZE",
            algorithm=str(spec.get("algorithm") or ""),
            trials=count(document.get("maxTrialCount"), DEFAULT_TRIALS),
            failed_trials=count(document.get("maxFailedTrialCount")),
            best_of_trial=spec.get("measurementSelectionType") == "BEST_MEASUREMENT",
        ),
        ("studySpec",),
    )


def _vertex_parameter(
    job: JobFile, where: tuple[int | str, ...], one: Mapping[str, Any], parent: str = "", values: Sequence[str] = ()
) -> list[Parameter]:
    """A ParameterSpec and those that depend on its value."""
    name, scale = str(one.get("parameterId")), str(one.get("scaleType") or "")
    kinds = {f"{kind}ValueSpec": kind for kind in ("double", "integer", "categorical", "discrete")}
    given = next((key for key in kinds if key in one), None)
    if given is None:
        raise UserError(f"{job.where(where)}: parameter {name!r} has none of {', '.join(kinds)}")
    about = one[given]
    found = Parameter(
        name=name,
        kind=kinds[given],
        low=float(about.get("minValue", 0)),
        high=float(about.get("maxValue", 0)),
        choices=tuple(_number(value) for value in about.get("values") or []),
        scale=scale,
        parent=parent,
        values=tuple(values),
    )
    parameters = [found]
    for number, conditional in enumerate(one.get("conditionalParameterSpecs") or []):
        condition: Mapping[str, Any] = next(
            (value for key, value in conditional.items() if key.startswith("parent")), {}
        )
        parameters += _vertex_parameter(
            job,
            (*where, "conditionalParameterSpecs", number),
            conditional.get("parameterSpec") or {},
            name,
            [_number(value) for value in condition.get("values") or []],
        )
    return parameters


def _number(value: object) -> str:
    """A value as the command line shows it: 64, not 64.0."""
    return str(int(value)) if isinstance(value, float) and value.is_integer() else str(value)


def _ai_platform_study(job: JobFile, spec: Mapping[str, Any]) -> Study:
    parameters = tuple(
        Parameter(
            name=str(one.get("parameterName")),
            kind=str(one.get("type") or "DOUBLE").lower(),
            low=float(one.get("minValue", 0)),
            high=float(one.get("maxValue", 0)),
            choices=tuple(_number(value) for value in one.get("categoricalValues") or one.get("discreteValues") or []),
            scale=str(one.get("scaleType") or ""),
        )
        for one in spec.get("params") or []
    )
    study = Study(
        parameters=parameters,
        metric=str(spec.get("hyperparameterMetricTag") or "training/hptuning/metric"),
        maximize=spec.get("goal") != "MINIMIZE",
        algorithm=str(spec.get("algorithm") or ""),
        trials=count(spec.get("maxTrials"), 1),
        failed_trials=count(spec.get("maxFailedTrials")),
    )
    return _checked(job, study, (*job.root, "hyperparameters"))


def _checked(job: JobFile, study: Study, where: tuple[int | str, ...]) -> Study:
    if not study.parameters:
        raise UserError(f"{job.where(where)}: the study has no parameters")
    for one in study.parameters:
        if one.kind in ("double", "integer") and not one.low <= one.high:
            raise UserError(f"{job.where(where)}: parameter {one.name!r}: minValue {one.low} above maxValue {one.high}")
        if "LOG" in one.scale and one.low <= 0:
            raise UserError(f"{job.where(where)}: parameter {one.name!r}: {one.scale} needs a minValue above 0")
        if one.kind in ("categorical", "discrete") and not one.choices:
            raise UserError(f"{job.where(where)}: parameter {one.name!r} has no values")
    return study


class Search:
    """Asks for trials one by one and is told what came of them; the same values for the same ``seed``."""

    def __init__(self, study: Study, seed: int = 0) -> None:
        import optuna

        optuna.logging.set_verbosity(optuna.logging.ERROR)
        self.study = study
        # TPE starts with random trials; few, because a rehearsal has few trials in all.
        startup = min(10, max(1, study.trials // 2))
        sampler = (
            optuna.samplers.RandomSampler(seed=seed)
            if study.algorithm in ("RANDOM_SEARCH", "GRID_SEARCH")
            else optuna.samplers.TPESampler(seed=seed, n_startup_trials=startup)
        )
        self._optuna = optuna
        self._study = optuna.create_study(direction="maximize" if study.maximize else "minimize", sampler=sampler)
        if study.algorithm == "GRID_SEARCH":  # Optuna's own sampler for it cannot be asked trial by trial
            names = [one.name for one in study.parameters]
            for point in itertools.product(*(one.grid() for one in study.parameters)):
                self._study.enqueue_trial(dict(zip(names, point, strict=True)))
        self._asked: dict[int, Any] = {}

    def ask(self) -> Trial:
        """The next trial."""
        asked = self._study.ask()
        number = asked.number + 1  # the services count from 1
        self._asked[number] = asked
        values: dict[str, str] = {}
        for one in self.study.parameters:
            if not one.parent or values.get(one.parent) in one.values:
                values[one.name] = one.suggest(asked)
        return Trial(number, values, self.study.metric)

    def tell(self, trial: Trial, value: float | None) -> None:
        """A trial's measurement; None if it failed."""
        state = self._optuna.trial.TrialState
        if value is None:
            self._study.tell(self._asked[trial.number], state=state.FAIL)
        else:
            self._study.tell(self._asked[trial.number], value)


def measurements(text: str, metric: str) -> list[tuple[int, float]]:
    """(step, value) of every report of ``metric`` in cloudml-hypertune's file (S27): one JSON object a line.

    Raises:
        StepFailed: there is none; other metrics that were reported are named.
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
    """The measurement that counts: the last, or the best."""
    values = [value for _, value in reports]
    if not study.best_of_trial:
        return values[-1]
    return max(values) if study.maximize else min(values)
