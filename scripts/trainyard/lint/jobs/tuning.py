"""Rules about the search of a Vertex AI tuning job."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from trainyard.lint.engine import Finding, Severity, rule
from trainyard.lint.jobs.evidence import Evidence
from trainyard.lint.jobs.worker_pools import parse_count, pools


@rule(
    "hyperparameter-tuning-job",
    severity=Severity.REFUSE,
    source=(
        "https://cloud.google.com/vertex-ai/docs/reference/rest/v1/projects.locations.hyperparameterTuningJobs; "
        "https://cloud.google.com/vertex-ai/docs/reference/rest/v1/StudySpec"
    ),
)
def search_is_valid(job: Evidence) -> Iterator[Finding]:
    """Trials, metrics and parameters make a valid search."""
    data = job.job.documents[0]
    study = data.get("studySpec") if isinstance(data.get("studySpec"), dict) else {}
    assert isinstance(study, dict)
    why = "the service refuses the job"

    def wrong(location: tuple[int | str, ...], what: str, fix: str, why: str = why) -> Finding:
        return Finding(job.job.where(location), what, why, fix)

    for key in ("metrics", "parameters"):
        if not study.get(key):
            yield wrong(("studySpec",), f"studySpec has no {key}", f"add {key}")
    trials, parallel = data.get("maxTrialCount"), data.get("parallelTrialCount")
    if parallel is not None and trials is not None and parse_count(parallel) > parse_count(trials):
        yield wrong(("parallelTrialCount",), f"{parallel} trials at a time of {trials} in all", "run fewer at a time")
    names: list[str] = []
    for number, one in enumerate(study.get("parameters") or []):
        if not isinstance(one, dict):
            continue
        at = ("studySpec", "parameters", number)
        name = str(one.get("parameterId") or "")
        if not name or name in names:
            yield wrong(
                at,
                f"parameter {number}: {'no parameterId' if not name else f'{name} is there twice'}",
                "give it a unique parameterId",
            )
        names.append(name)
        yield from (wrong(at, f"{name}: {what}", fix) for what, fix in _parameter_problems(one, study.get("algorithm")))


def _parameter_problems(one: dict[str, Any], algorithm: object) -> Iterator[tuple[str, str]]:
    kinds = ("doubleValueSpec", "integerValueSpec", "categoricalValueSpec", "discreteValueSpec")
    given = [kind for kind in kinds if one.get(kind) is not None]
    if len(given) != 1:
        yield f"{len(given)} kinds of values", f"give exactly one of {', '.join(kinds)}"
        return
    values = one[given[0]]
    if not isinstance(values, dict):
        return
    if given[0] in ("doubleValueSpec", "integerValueSpec"):
        try:
            low, high = float(values["minValue"]), float(values["maxValue"])
        except (KeyError, TypeError, ValueError):
            yield f"{given[0]} without minValue and maxValue", "give both"
            return
        if low > high:
            yield f"minValue {low:g} is above maxValue {high:g}", "swap them"
        if "LOG" in str(one.get("scaleType")) and low <= 0:
            yield f"a logarithmic scale from {low:g}", "start above 0"
        if algorithm == "GRID_SEARCH" and given[0] == "doubleValueSpec":
            yield "GRID_SEARCH over doubles", "use discreteValueSpec, or remove the algorithm"
    elif not values.get("values"):
        yield f"{given[0]} without values", "list them"
    elif given[0] == "discreteValueSpec" and values["values"] != sorted(values["values"]):
        yield "discrete values out of order", "list them in increasing order"


@rule(
    "hyperparameter-tuning-job",
    severity=Severity.CANNOT_START,
    source=(
        "https://cloud.google.com/vertex-ai/docs/training/using-hyperparameter-tuning "
        "(metricId equals cloudml-hypertune's hyperparameter_metric_tag)"
    ),
)
def trainer_reports_the_metric(job: Evidence) -> Iterator[Finding]:
    """The trainer reports the metric that the study reads."""
    study = job.job.documents[0].get("studySpec") or {}
    metrics = [str(one.get("metricId")) for one in study.get("metrics") or [] if isinstance(one, dict)]
    for number, pool in pools(job):
        words = [str(word) for word in (pool.get("containerSpec") or {}).get("args") or []]
        for index, word in enumerate(words):
            flag, equals, tag = word.partition("=")
            if flag.replace("_", "-") != "--hypertune-tag":
                continue
            tag = tag if equals else next(iter(words[index + 1 :]), "")
            if tag not in metrics:
                yield Finding(
                    job.at("workerPoolSpecs", number, "containerSpec", "args", index),
                    f"the trainer reports '{tag}', the study reads {', '.join(metrics) or 'nothing'}",
                    "every trial ends as INFEASIBLE",
                    "make metricId and --hypertune-tag the same",
                )
