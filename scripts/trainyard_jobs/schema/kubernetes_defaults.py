"""The values that a cluster fills into Jobs and JobSets before it validates and runs them.

JobSets: Default() of https://github.com/kubernetes-sigs/jobset/blob/08dfbdf/pkg/webhooks/jobset_webhook.go.
Jobs: https://github.com/kubernetes/kubernetes/blob/master/pkg/apis/batch/v1/defaults.go.
"""

from __future__ import annotations

import copy
from typing import Any

#: The largest int32, which is the backoffLimit of a Job with a backoffLimitPerIndex.
MAX_INT32 = 2**31 - 1


def mapping(value: object) -> dict[str, Any]:
    """The value if it is a mapping; an empty one if not."""
    return value if isinstance(value, dict) else {}


def sequence(value: object) -> list[Any]:
    """The value if it is a list; an empty one if not."""
    return value if isinstance(value, list) else []


def jobset(document: dict[str, Any]) -> dict[str, Any]:
    """A copy of a JobSet as its mutating webhook leaves it; the CRD's own defaults are included."""
    found = copy.deepcopy(document)
    spec = mapping(found.get("spec"))
    for one in sequence(spec.get("replicatedJobs")):
        if not isinstance(one, dict):
            continue
        one.setdefault("replicas", 1)
        one.setdefault("groupName", "default")
        job = mapping(mapping(one.get("template")).get("spec"))
        job.setdefault("completionMode", "Indexed")
        pod = mapping(mapping(job.get("template")).get("spec"))
        if not pod.get("restartPolicy"):
            pod["restartPolicy"] = "OnFailure"
    for number, rule in enumerate(sequence(mapping(spec.get("failurePolicy")).get("rules"))):
        if isinstance(rule, dict) and not rule.get("name"):
            rule["name"] = f"failurePolicyRule{number}"
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
    for one in sequence(mapping(found.get("spec")).get("replicatedJobs")):
        template = mapping(mapping(one).get("template"))
        if isinstance(template.get("spec"), dict):
            template["spec"] = job_spec(template["spec"])
    return found


def job_spec(spec: dict[str, Any]) -> dict[str, Any]:
    """A copy of the spec of a Job with the API server's defaults."""
    found = copy.deepcopy(spec)
    if "completions" not in found and "parallelism" not in found:
        found["completions"] = 1
    found.setdefault("parallelism", 1)
    found.setdefault("backoffLimit", MAX_INT32 if "backoffLimitPerIndex" in found else 6)
    found.setdefault("completionMode", "NonIndexed")
    found.setdefault("podReplacementPolicy", "Failed" if "podFailurePolicy" in found else "TerminatingOrFailed")
    for rule in sequence(mapping(found.get("podFailurePolicy")).get("rules")):
        for condition in sequence(mapping(rule).get("onPodConditions")):
            if isinstance(condition, dict):
                condition.setdefault("status", "True")
    pod = mapping(mapping(found.get("template")).get("spec"))
    if not pod.get("restartPolicy"):
        pod["restartPolicy"] = "Always"
    for container in (*sequence(pod.get("containers")), *sequence(pod.get("initContainers"))):
        for port in sequence(mapping(container).get("ports")):
            if isinstance(port, dict):
                port.setdefault("protocol", "TCP")
    return found
