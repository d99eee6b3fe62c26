"""Rules about the search of a Vertex AI tuning job."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from trainyard.common.rule_engine import Finding, Severity, rule
from trainyard_jobs.rules.evidence import Evidence
from trainyard_jobs.rules.worker_pools import parse_count, pools, refused
from trainyard_jobs.schema.kubernetes_defaults import mapping


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
    data, where = job.job.documents[0], job.job.where
    study = mapping(data, "studySpec")
    for key in ("metrics", "parameters"):
        if not study.get(key):
            yield refused(where(("studySpec",)), f"studySpec has no {key}", f"add {key}")
    metrics = [one for one in study.get("metrics") or [] if isinstance(one, dict)]
    identifiers = [str(one.get("metricId") or "") for one in metrics]
    for number, name in enumerate(identifiers):
        if not name or re.search(r"\s", name) or name in identifiers[:number]:
            what = f"'{name}' is no metricId" if name not in identifiers[:number] else f"two metrics are named '{name}'"
            yield refused(where(("studySpec", "metrics", number)), what, "write a name without spaces, once")
    trials, parallel = data.get("maxTrialCount"), data.get("parallelTrialCount")
    if parallel is not None and trials is not None and parse_count(parallel) > parse_count(trials):
        what = f"{parallel} trials at a time of {trials} in all"
        why = "the API does not refuse it, and gcloud's --max-trial-count and --parallel-trial-count replace both"
        yield Finding(where(("parallelTrialCount",)), what, why, "run fewer at a time", Severity.NOTE)
    names: list[str] = []
    for number, one in enumerate(study.get("parameters") or []):
        if not isinstance(one, dict):
            continue
        at = where(("studySpec", "parameters", number))
        name = str(one.get("parameterId") or "")
        if not name or name in names:
            what = f"parameter {number}: {f'{name} is there twice' if name else 'no parameterId'}"
            yield refused(at, what, "give it a unique parameterId")
        names.append(name)
        for what, fix, severity in _parameter_problems(one, study.get("algorithm")):
            yield refused(at, f"{name}: {what}", fix, severity)


def _parameter_problems(one: dict[str, Any], algorithm: object) -> Iterator[tuple[str, str, Severity]]:
    """What is wrong with a parameter, how to correct it, and what that means."""
    refuse = Severity.REFUSE
    kinds = ("doubleValueSpec", "integerValueSpec", "categoricalValueSpec", "discreteValueSpec")
    given = [kind for kind in kinds if one.get(kind) is not None]
    if len(given) != 1:
        yield f"{len(given)} kinds of values", f"give exactly one of {', '.join(kinds)}", refuse
        return
    values = one[given[0]]
    if not isinstance(values, dict):
        return
    if given[0] in ("doubleValueSpec", "integerValueSpec"):
        # In the JSON of protocol buffers, a missing number is 0: https://protobuf.dev/programming-guides/json/.
        missing = [key for key in ("minValue", "maxValue") if key not in values]
        try:
            low, high = (float(values.get(key, 0)) for key in ("minValue", "maxValue"))
        except (TypeError, ValueError):
            return  # the schema's rule reports it
        if missing:
            yield f"{given[0]} without {' and '.join(missing)}, which counts as 0", "give both", Severity.NOTE
        if low > high:
            yield f"minValue {low:g} is above maxValue {high:g}", "swap them", refuse
        if "LOG" in str(one.get("scaleType")) and low <= 0:
            yield f"a logarithmic scale from {low:g}", "start above 0", refuse
        if algorithm == "GRID_SEARCH" and given[0] == "doubleValueSpec":
            yield "GRID_SEARCH over doubles", "use discreteValueSpec, or remove the algorithm", refuse
    elif not values.get("values"):
        yield f"{given[0]} without values", "list them", refuse
    elif given[0] == "discreteValueSpec" and values["values"] != sorted(values["values"]):
        yield "discrete values out of order", "list them in increasing order", Severity.NOTE


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
    for pool in pools(job):
        words = [str(word) for word in (pool.spec.get("containerSpec") or {}).get("args") or []]
        for index, word in enumerate(words):
            flag, equals, tag = word.partition("=")
            if flag.replace("_", "-") != "--hypertune-tag":
                continue
            tag = tag if equals else next(iter(words[index + 1 :]), "")
            if tag not in metrics:
                yield Finding(
                    pool.at("containerSpec", "args", index),
                    f"the trainer reports '{tag}', the study reads {', '.join(metrics) or 'nothing'}",
                    "every trial ends as INFEASIBLE",
                    "make metricId and --hypertune-tag the same",
                )
