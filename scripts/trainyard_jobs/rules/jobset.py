"""Rules that a JobSet's webhook and its custom resource definition apply.

The webhook: https://github.com/kubernetes-sigs/jobset/blob/08dfbdf/pkg/webhooks/jobset_webhook.go.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from typing import Any

from trainyard.common.errors import nearest
from trainyard.common.rule_engine import Severity
from trainyard.spec.yaml_source import Location
from trainyard_jobs.kubernetes import kubernetes_names as names
from trainyard_jobs.rules.evidence import Evidence
from trainyard_jobs.rules.job_templates import object_name
from trainyard_jobs.rules.problems import Problem, not_a_controller, repeated, rule_for_each
from trainyard_jobs.schema import kubernetes_defaults
from trainyard_jobs.schema.kubernetes_defaults import MAX_INT32, entries, mapping, sequence

_REPOSITORY = "https://github.com/kubernetes-sigs/jobset/blob/08dfbdf"
_WEBHOOK = f"{_REPOSITORY}/pkg/webhooks/jobset_webhook.go"
_CRD = f"{_REPOSITORY}/config/components/crd/bases/jobset.x-k8s.io_jobsets.yaml"

_REFUSED = "JobSet's webhook refuses it"
_REFUSED_BY_EITHER = "JobSet's webhook or its definition refuses it"

#: Most replicas of a replicated job where a rule restarts single Jobs; most characters of the name of a rule.
_MAX_REPLICAS = 1024
_MAX_RULE_NAME = 128
_FAILURE_REASONS = (
    "BackoffLimitExceeded",
    "DeadlineExceeded",
    "FailedIndexes",
    "MaxFailedIndexesExceeded",
    "PodFailurePolicy",
)

#: Lists whose entries have a unique key in the definition of a pod (x-kubernetes-list-map-keys) -> that key, and its
#: default. Jobs have no such check of env: a later variable replaces an earlier one.
_UNIQUE: dict[str, dict[str, object]] = {
    "containers": {"name": None},
    "initContainers": {"name": None},
    "volumes": {"name": None},
    "hostAliases": {"ip": None},
    "imagePullSecrets": {"name": ""},
    "resourceClaims": {"name": None},
    "schedulingGates": {"name": None},
    "topologySpreadConstraints": {"topologyKey": None, "whenUnsatisfiable": None},
}
_UNIQUE_IN_CONTAINERS: dict[str, dict[str, object]] = {
    "env": {"name": None},
    "ports": {"containerPort": None, "protocol": "TCP"},
    "volumeMounts": {"mountPath": None},
    "volumeDevices": {"devicePath": None},
}

#: Strategy or action -> the feature gate that it needs.
_GATES = {
    "InPlaceRestart": "InPlaceRestart",
    "RestartJob": "RestartJob",
    "RestartJobAndIgnoreMaxRestarts": "RestartJob",
}

JobSet = dict[str, Any]


def _jobsets(job: Evidence) -> Iterator[tuple[int, JobSet]]:
    """Yield every JobSet of the file, after its defaults were filled in."""
    for number, document in enumerate(job.job.documents):
        if document.get("kind") == "JobSet" and isinstance(document.get("spec"), dict):
            yield number, kubernetes_defaults.jobset(document)


def _replicated(jobset: JobSet) -> Iterator[tuple[Location, dict[str, Any], dict[str, Any]]]:
    """Every replicated job: its location, itself, and the spec of its Jobs."""
    for at, entry in entries(jobset, (), "spec", "replicatedJobs"):
        yield at, entry, mapping(entry, "template", "spec")


def _names(jobset: JobSet) -> list[str]:
    return [str(entry.get("name", "")) for _, entry, _ in _replicated(jobset)]


def _number(value: object, default: int) -> int:
    return value if isinstance(value, int) else default


@rule_for_each(_jobsets, f"{_WEBHOOK} (ValidateCreate: the names of Jobs, pods, groups and networks)", _REFUSED)
def jobset_names_are_valid(jobset: JobSet) -> Iterator[Problem]:
    """The names that a JobSet gives its Jobs, pods and network are DNS labels, with the pods' random endings."""
    name, spec = object_name(jobset), jobset["spec"]
    for at, entry, template in _replicated(jobset):
        replicas = _number(entry.get("replicas"), 1)
        longest = f"{name}-{entry.get('name', '')}-{replicas - 1}"
        what = f"its Jobs are named {longest}"
        wrong = names.dns_1035_label(longest) if replicas else ""
        completions = template.get("completions")
        if not wrong and template.get("completionMode") == "Indexed" and isinstance(completions, int) and replicas:
            longest = f"{longest}-{completions - 1}-abcde"
            what = f"its pods are named {longest}, with a random ending"
            wrong = names.dns_1035_label(longest) if completions else ""
        if wrong:
            where: Location = (
                (*at, "name") if names.dns_1035_label(str(entry.get("name", ""))) else ("metadata", "name")
            )
            yield where, f"{what}: {wrong}", "shorten or correct the name of the JobSet or of the replicated job"
        if wrong := names.dns_1035_label(str(entry.get("groupName"))):
            yield (*at, "groupName"), f"groupName is '{entry.get('groupName')}'", wrong
    subdomain = mapping(spec, "network").get("subdomain")
    if subdomain and (wrong := names.dns_1035_label(str(subdomain))):
        yield ("spec", "network", "subdomain"), f"subdomain is '{subdomain}'", wrong
    yield from not_a_controller(spec, ("spec",))


@rule_for_each(
    _jobsets, f"{_CRD} (x-kubernetes-list-map-keys, x-kubernetes-list-type: set)", "the API server refuses the JobSet"
)
def jobset_lists_have_unique_keys(jobset: JobSet) -> Iterator[Problem]:
    """Replicated jobs, containers, variables, ports, mounts and volumes of a JobSet are not given twice."""
    at: Location = ("spec", "replicatedJobs")
    yield from repeated(jobset["spec"].get("replicatedJobs"), at, {"name": None})
    for at, entry, template in _replicated(jobset):
        yield from repeated(entry.get("dependsOn"), (*at, "dependsOn"), {"name": None})
        pod = mapping(template, "template", "spec")
        pod_at: Location = (*at, "template", "spec", "template", "spec")
        for key, unique in _UNIQUE.items():
            yield from repeated(pod.get(key), (*pod_at, key), unique)
        for group in ("initContainers", "containers"):
            for here, container in entries(pod, pod_at, group):
                for key, unique in _UNIQUE_IN_CONTAINERS.items():
                    yield from repeated(container.get(key), (*here, key), unique)


@rule_for_each(
    _jobsets,
    f"{_WEBHOOK} (ValidateCreate: replicas times parallelism, dependsOn); {_CRD} (XValidation)",
    _REFUSED_BY_EITHER,
)
def jobset_order_is_possible(jobset: JobSet) -> Iterator[Problem]:
    """Replicated jobs depend on earlier ones, in one of the two ways to order them."""
    in_order = mapping(jobset, "spec", "startupPolicy").get("startupPolicyOrder") == "InOrder"
    earlier: list[str] = []
    for index, (at, entry, template) in enumerate(_replicated(jobset)):
        name = str(entry.get("name", ""))
        earlier.append(name)  # a replicated job that depends on itself is not refused
        if "dependsOn" in entry and in_order:
            yield (*at, "dependsOn"), "dependsOn with startupPolicyOrder: InOrder", "remove one of them"
        if "dependsOn" in entry and index == 0:
            yield (*at, "dependsOn"), "the first replicated job depends on another", "remove dependsOn, or order them"
            continue
        for where, needed in entries(entry, at, "dependsOn"):
            if needed.get("name") not in earlier:
                known = ", ".join(earlier[:-1])
                what = f"{name} depends on '{needed.get('name')}', which is not an earlier replicated job"
                yield where, what, f"use one of {known}, or change the order"
        pods = _number(entry.get("replicas"), 1) * _number(template.get("parallelism"), 1)
        if pods > MAX_INT32:
            yield (*at, "replicas"), f"replicas times parallelism is {pods}", f"at most {MAX_INT32}"


@rule_for_each(_jobsets, f"{_WEBHOOK} (validateFailurePolicy, and the target jobs of successPolicy)", _REFUSED)
def jobset_policies_are_valid(jobset: JobSet) -> Iterator[Problem]:
    """Success and failure policies name replicated jobs of the JobSet, and reasons for which a Job can fail."""
    spec, known = jobset["spec"], _names(jobset)
    yield from _targets(mapping(spec, "successPolicy"), ("spec", "successPolicy"), known)
    rules = list(entries(spec, ("spec",), "failurePolicy", "rules"))
    count = Counter(entry.get("name") for _, entry in rules)
    for here, entry in rules:
        name = str(entry.get("name", ""))
        if len(name) > _MAX_RULE_NAME or not re.fullmatch(r"[A-Za-z]([A-Za-z0-9_,:]*[A-Za-z0-9_])?", name):
            what = f"a rule is named '{name}'"
            yield here, what, f"use at most {_MAX_RULE_NAME} letters, digits, '_', ',' and ':', with a letter first"
        if count[entry.get("name")] > 1:
            yield here, f"{count[entry.get('name')]} rules are named '{name}'", "give each another name"
        yield from _targets(entry, here, known)
        for index, reason in enumerate(sequence(entry, "onJobFailureReasons")):
            if reason not in _FAILURE_REASONS:
                where = (*here, "onJobFailureReasons", index)
                what = f"no reason '{reason}'{nearest(str(reason), _FAILURE_REASONS)}"
                yield where, what, f"use one of {', '.join(_FAILURE_REASONS)}"
    actions = [str(entry.get("action", "")) for _, entry in rules]
    if any(entry.startswith("RestartJob") and not entry.startswith("RestartJobSet") for entry in actions):
        for at, entry, _ in _replicated(jobset):
            if _number(entry.get("replicas"), 1) > _MAX_REPLICAS:
                what = f"{entry['replicas']} replicas, of which a rule restarts single ones"
                yield (*at, "replicas"), what, f"use at most {_MAX_REPLICAS}, or RestartJobSet"


def _targets(policy: dict[str, Any], at: Location, known: list[str]) -> Iterator[Problem]:
    for number, name in enumerate(sequence(policy, "targetReplicatedJobs")):
        if name not in known:
            where = (*at, "targetReplicatedJobs", number)
            yield where, f"no replicated job '{name}'{nearest(str(name), known)}", f"use one of {', '.join(known)}"


@rule_for_each(_jobsets, f"{_WEBHOOK} (validateCoordinator, validateCoordinatorLabelValue)", _REFUSED)
def jobset_coordinator_exists(jobset: JobSet) -> Iterator[Problem]:
    """The coordinator is a pod of the JobSet, whose address is a valid label."""
    coordinator = jobset["spec"].get("coordinator")
    if not isinstance(coordinator, dict):
        return
    at: Location = ("spec", "coordinator")
    name, known = str(coordinator.get("replicatedJob", "")), _names(jobset)
    job, pod = _number(coordinator.get("jobIndex"), 0), _number(coordinator.get("podIndex"), 0)
    found = next(((entry, spec) for _, entry, spec in _replicated(jobset) if entry.get("name") == name), None)
    if found is None:
        what = f"no replicated job '{name}'{nearest(name, known)}"
        yield (*at, "replicatedJob"), what, f"use one of {', '.join(known)}"
    else:
        entry, spec = found
        replicas, completions = _number(entry.get("replicas"), 1), spec.get("completions")
        if not 0 <= job < replicas:
            yield (*at, "jobIndex"), f"jobIndex is {job}, of {replicas} replicas", f"write 0 to {replicas - 1}"
        elif spec.get("completionMode") != "Indexed" or not isinstance(completions, int):
            yield at, f"{name} is not Indexed, or has no completions", "add completions, and completionMode: Indexed"
        elif not 0 <= pod < completions:
            yield (*at, "podIndex"), f"podIndex is {pod}, of {completions} pods", f"write 0 to {completions - 1}"
    jobset_name = object_name(jobset)
    subdomain = mapping(jobset, "spec", "network").get("subdomain") or jobset_name
    address = f"{jobset_name}-{name}-{job}-{pod}.{subdomain}"
    if wrong := names.label_value(address):
        yield at, f"the coordinator's address {address}: {wrong}", "shorten the names of JobSet, job or subdomain"


@rule_for_each(_jobsets, f"{_WEBHOOK} (validateVolumeClaimPolicies); {_CRD} (XValidation)", _REFUSED_BY_EITHER)
def jobset_volume_claims_are_valid(jobset: JobSet) -> Iterator[Problem]:
    """Volume claims of a JobSet have unique names, and a container mounts each."""
    pods = [((*at, "template", "spec", "template", "spec"), mapping(spec, "template", "spec"))
            for at, _, spec in _replicated(jobset)]  # fmt: skip
    mounted = {
        mapping(mount).get("name")
        for _, pod in pods
        for key in ("initContainers", "containers")
        for container in sequence(pod, key)
        for mount in sequence(container, "volumeMounts")
    }
    seen: set[str] = set()
    for place, policy in entries(jobset, (), "spec", "volumeClaimPolicies"):
        for at, template in entries(policy, place, "templates"):
            metadata = mapping(template, "metadata")
            name = str(metadata.get("name", ""))
            if metadata.get("namespace"):
                yield (*at, "metadata", "namespace"), "a claim with a namespace", "remove the namespace"
            if name in seen:
                yield at, f"claim '{name}' is there twice", "give it another name"
            seen.add(name)
            if wrong := names.dns_1123_subdomain(name):
                yield at, f"claim '{name}'", wrong
            full = f"{name}-{object_name(jobset)}"
            if len(full) > names.LABEL:
                what = f"the claim is named {full}: {len(full)} characters"
                yield at, what, f"use at most {names.LABEL} with the JobSet's name"
            if name not in mounted:
                yield at, f"no container mounts the claim '{name}'", "add a volumeMount of that name"
            for pod_at, pod in pods:
                for where, volume in entries(pod, pod_at, "volumes"):
                    if volume.get("name") == name:
                        yield where, f"a volume and a claim are named '{name}'", "rename one of them"


@rule_for_each(_jobsets, f"{_WEBHOOK} (ValidateCreate: in-place restart)", _REFUSED)
def in_place_restart_is_complete(jobset: JobSet) -> Iterator[Problem]:
    """A JobSet that restarts its pods in place never replaces them, and runs all of them at once."""
    if mapping(jobset, "spec", "failurePolicy").get("restartStrategy") != "InPlaceRestart":
        return
    for at, _, spec in _replicated(jobset):
        here: Location = (*at, "template", "spec")
        if spec.get("backoffLimit") != MAX_INT32:
            what = f"backoffLimit is {spec.get('backoffLimit', 'not set')} with InPlaceRestart"
            yield (*here, "backoffLimit"), what, f"write {MAX_INT32}"
        if spec.get("podReplacementPolicy") != "Failed":
            what = "podReplacementPolicy is not Failed with InPlaceRestart"
            yield (*here, "podReplacementPolicy"), what, "write Failed"
        if "completions" not in spec or spec.get("completions") != spec.get("parallelism"):
            yield (*here, "completions"), "completions and parallelism differ with InPlaceRestart", "give both the same"


@rule_for_each(
    _jobsets,
    f"{_REPOSITORY}/pkg/features/features.go (alpha, off by default)",
    "a webhook without the feature refuses the JobSet",
    Severity.NOTE,
)
def jobset_features_are_enabled(jobset: JobSet) -> Iterator[Problem]:
    """A JobSet uses no feature that its controller has switched off by default."""
    policy = mapping(jobset, "spec", "failurePolicy")
    used = [policy.get("restartStrategy"), *(mapping(entry).get("action") for entry in sequence(policy, "rules"))]
    for name in dict.fromkeys(entry for entry in used if entry in _GATES):
        what = f"{name} needs the feature gate {_GATES[name]}"
        fix = f"start the controller with --feature-gates={_GATES[name]}=true"
        yield ("spec", "failurePolicy"), what, fix
