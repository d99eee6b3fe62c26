"""The values that a cluster fills into Jobs and JobSets before it runs them.

JobSets: Default() of https://github.com/kubernetes-sigs/jobset/blob/08dfbdf/pkg/webhooks/jobset_webhook.go.
Jobs: https://github.com/kubernetes/kubernetes/blob/master/pkg/apis/batch/v1/defaults.go.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

from trainyard.spec.yaml_source import Location

#: The largest int32, which is the backoffLimit of a Job with a backoffLimitPerIndex.
MAX_INT32 = 2**31 - 1


def _at(value: object, path: tuple[str, ...]) -> object:
    for key in path:
        value = value.get(key) if isinstance(value, dict) else None
    return value


def mapping(value: object, *path: str) -> dict[str, Any]:
    """Return the mapping at a path of keys below a value; an empty one if there is none."""
    inner = _at(value, path)
    return inner if isinstance(inner, dict) else {}


def sequence(value: object, *path: str) -> list[Any]:
    """Return the list at a path of keys below a value; an empty one if there is none."""
    inner = _at(value, path)
    return inner if isinstance(inner, list) else []


def entries(value: object, at: Location, *path: str) -> Iterator[tuple[Location, dict[str, Any]]]:
    """Yield every entry of the list at a path of keys below a value as a mapping, with its location.

    Args:
        at: location of ``value``.
    """
    for number, entry in enumerate(sequence(value, *path)):
        yield (*at, *path, number), mapping(entry)


def jobset(document: dict[str, Any]) -> dict[str, Any]:
    """A copy of a JobSet with the defaults of its mutating webhook and its definition that decide how it runs."""
    found = copy.deepcopy(document)
    for one in map(mapping, sequence(found, "spec", "replicatedJobs")):
        one.setdefault("replicas", 1)
        job = mapping(one, "template", "spec")
        job.setdefault("completionMode", "Indexed")
        pod = mapping(job, "template", "spec")
        if not pod.get("restartPolicy"):
            pod["restartPolicy"] = "OnFailure"
    return found


def jobs(document: dict[str, Any]) -> dict[str, Any]:
    """A copy of a Job or JobSet with all defaults, also those of the Jobs that the JobSet's controller creates.

    Other objects stay as they are.
    """
    if document.get("kind") == "Job" and isinstance(document.get("spec"), dict):
        return document | {"spec": job_spec(document["spec"])}
    if document.get("kind") != "JobSet":
        return document
    found = jobset(document)
    for one in sequence(found, "spec", "replicatedJobs"):
        template = mapping(one, "template")
        if isinstance(template.get("spec"), dict):
            template["spec"] = job_spec(template["spec"])
    return found


def job_spec(spec: dict[str, Any]) -> dict[str, Any]:
    """A copy of the spec of a Job with those of the API server's defaults that decide how it runs."""
    found = copy.deepcopy(spec)
    if "completions" not in found and "parallelism" not in found:
        found["completions"] = 1
    found.setdefault("parallelism", 1)
    found.setdefault("backoffLimit", MAX_INT32 if "backoffLimitPerIndex" in found else 6)
    found.setdefault("completionMode", "NonIndexed")
    for rule in sequence(found, "podFailurePolicy", "rules"):
        for condition in map(mapping, sequence(rule, "onPodConditions")):
            condition.setdefault("status", "True")
    pod = mapping(found, "template", "spec")
    if not pod.get("restartPolicy"):
        pod["restartPolicy"] = "Always"
    return found
