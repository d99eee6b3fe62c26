"""Rules that a JobSet's webhook and its custom resource definition apply.

The webhook: https://github.com/kubernetes-sigs/jobset/blob/08dfbdf/pkg/webhooks/jobset_webhook.go.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

from trainyard.common.errors import nearest
from trainyard.common.rule_engine import Finding, Severity, rule
from trainyard.spec.yaml_source import Location
from trainyard_jobs.kubernetes import kubernetes_names as names
from trainyard_jobs.rules.evidence import Evidence
from trainyard_jobs.rules.job_templates import Problem, object_name, repeated
from trainyard_jobs.schema import kubernetes_defaults
from trainyard_jobs.schema.kubernetes_defaults import MAX_INT32, mapping, sequence

_REPOSITORY = "https://github.com/kubernetes-sigs/jobset/blob/08dfbdf"
_WEBHOOK = f"{_REPOSITORY}/pkg/webhooks/jobset_webhook.go"
_CRD = f"{_REPOSITORY}/config/components/crd/bases/jobset.x-k8s.io_jobsets.yaml"

_LABEL = 63
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

JobSet = dict[str, Any]


def _findings(job: Evidence, check: Callable[[JobSet], Iterator[Problem]], why: str) -> Iterator[Finding]:
    """What ``check`` finds in every JobSet of the file, after its defaults were filled in."""
    for number, document in enumerate(job.job.documents):
        if document.get("kind") == "JobSet" and isinstance(document.get("spec"), dict):
            for location, what, remediation in check(kubernetes_defaults.jobset(document)):
                yield Finding(job.at(*location, document=number), what, why, remediation)


def _replicated(jobset: JobSet) -> Iterator[tuple[Location, dict[str, Any], dict[str, Any]]]:
    """Every replicated job: its location, itself, and the spec of its Jobs."""
    for number, one in enumerate(sequence(jobset["spec"].get("replicatedJobs"))):
        if isinstance(one, dict):
            at: Location = ("spec", "replicatedJobs", number)
            yield at, one, mapping(mapping(one.get("template")).get("spec"))


def _names(jobset: JobSet) -> list[str]:
    return [str(one.get("name", "")) for _, one, _ in _replicated(jobset)]


def _number(value: object, default: int) -> int:
    return value if isinstance(value, int) else default


@rule(
    "gke", severity=Severity.REFUSE, source=f"{_WEBHOOK} (ValidateCreate: the names of Jobs, pods, groups and networks)"
)
def jobset_names_are_valid(job: Evidence) -> Iterator[Finding]:
    """The names that a JobSet gives its Jobs, pods and network are DNS labels, with the pods' random endings."""
    yield from _findings(job, _name_problems, "JobSet's webhook refuses it")


def _name_problems(jobset: JobSet) -> Iterator[Problem]:
    name, spec = object_name(jobset), jobset["spec"]
    for at, one, template in _replicated(jobset):
        replicas = _number(one.get("replicas"), 1)
        longest = f"{name}-{one.get('name', '')}-{replicas - 1}"
        what = f"its Jobs are named {longest}"
        wrong = names.dns_1035_label(longest) if replicas else ""
        completions = template.get("completions")
        if not wrong and template.get("completionMode") == "Indexed" and isinstance(completions, int) and replicas:
            longest = f"{longest}-{completions - 1}-abcde"
            what = f"its pods are named {longest}, with a random ending"
            wrong = names.dns_1035_label(longest) if completions else ""
        if wrong:
            where: Location = (*at, "name") if names.dns_1035_label(str(one.get("name", ""))) else ("metadata", "name")
            yield where, f"{what}: {wrong}", "shorten or correct the name of the JobSet or of the replicated job"
        if wrong := names.dns_1035_label(str(one.get("groupName"))):
            yield (*at, "groupName"), f"groupName is '{one.get('groupName')}'", wrong
    subdomain = mapping(spec.get("network")).get("subdomain")
    if subdomain and (wrong := names.dns_1035_label(str(subdomain))):
        yield ("spec", "network", "subdomain"), f"subdomain is '{subdomain}'", wrong
    manager = spec.get("managedBy")
    if isinstance(manager, str):
        wrong = names.domain_prefixed_path(manager)
        if not wrong and len(manager) > _LABEL:
            wrong = f"at most {_LABEL} characters"
        if wrong:
            yield ("spec", "managedBy"), f"managedBy is '{manager}'", wrong


@rule("gke", severity=Severity.REFUSE, source=f"{_CRD} (x-kubernetes-list-map-keys, x-kubernetes-list-type: set)")
def jobset_lists_have_unique_keys(job: Evidence) -> Iterator[Finding]:
    """Replicated jobs, containers, variables, ports, mounts and volumes of a JobSet are not given twice."""
    yield from _findings(job, _duplicates, "the API server refuses the JobSet")


def _duplicates(jobset: JobSet) -> Iterator[Problem]:
    at: Location = ("spec", "replicatedJobs")
    yield from repeated(jobset["spec"].get("replicatedJobs"), at, {"name": None})
    for at, one, template in _replicated(jobset):
        yield from repeated(one.get("dependsOn"), (*at, "dependsOn"), {"name": None})
        pod = mapping(mapping(template.get("template")).get("spec"))
        pod_at: Location = (*at, "template", "spec", "template", "spec")
        for key, unique in _UNIQUE.items():
            yield from repeated(pod.get(key), (*pod_at, key), unique)
        for group in ("initContainers", "containers"):
            for index, container in enumerate(map(mapping, sequence(pod.get(group)))):
                for key, unique in _UNIQUE_IN_CONTAINERS.items():
                    yield from repeated(container.get(key), (*pod_at, group, index, key), unique)


@rule(
    "gke",
    severity=Severity.REFUSE,
    source=f"{_WEBHOOK} (ValidateCreate: replicas times parallelism, dependsOn); {_CRD} (XValidation)",
)
def jobset_order_is_possible(job: Evidence) -> Iterator[Finding]:
    """Replicated jobs depend on earlier ones, in one of the two ways to order them."""
    yield from _findings(job, _order, "JobSet's webhook or its definition refuses it")


def _order(jobset: JobSet) -> Iterator[Problem]:
    in_order = mapping(jobset["spec"].get("startupPolicy")).get("startupPolicyOrder") == "InOrder"
    earlier: list[str] = []
    for index, (at, one, template) in enumerate(_replicated(jobset)):
        name = str(one.get("name", ""))
        earlier.append(name)  # a replicated job that depends on itself is not refused
        if "dependsOn" in one and in_order:
            yield (*at, "dependsOn"), "dependsOn with startupPolicyOrder: InOrder", "remove one of them"
        if "dependsOn" in one and index == 0:
            yield (*at, "dependsOn"), "the first replicated job depends on another", "remove dependsOn, or order them"
            continue
        for number, needed in enumerate(map(mapping, sequence(one.get("dependsOn")))):
            if needed.get("name") not in earlier:
                known = ", ".join(earlier[:-1])
                what = f"{name} depends on '{needed.get('name')}', which is not an earlier replicated job"
                yield (*at, "dependsOn", number), what, f"use one of {known}, or change the order"
        pods = _number(one.get("replicas"), 1) * _number(template.get("parallelism"), 1)
        if pods > MAX_INT32:
            yield (*at, "replicas"), f"replicas times parallelism is {pods}", f"at most {MAX_INT32}"


@rule(
    "gke", severity=Severity.REFUSE, source=f"{_WEBHOOK} (validateFailurePolicy, and the target jobs of successPolicy)"
)
def jobset_policies_are_valid(job: Evidence) -> Iterator[Finding]:
    """Success and failure policies name replicated jobs of the JobSet, and reasons for which a Job can fail."""
    yield from _findings(job, _policies, "JobSet's webhook refuses it")


def _targets(policy: dict[str, Any], at: Location, known: list[str]) -> Iterator[Problem]:
    for number, name in enumerate(sequence(policy.get("targetReplicatedJobs"))):
        if name not in known:
            where = (*at, "targetReplicatedJobs", number)
            yield where, f"no replicated job '{name}'{nearest(str(name), known)}", f"use one of {', '.join(known)}"


def _policies(jobset: JobSet) -> Iterator[Problem]:
    spec, known = jobset["spec"], _names(jobset)
    yield from _targets(mapping(spec.get("successPolicy")), ("spec", "successPolicy"), known)
    at: Location = ("spec", "failurePolicy", "rules")
    rules = [mapping(one) for one in sequence(mapping(spec.get("failurePolicy")).get("rules"))]
    count = Counter(one.get("name") for one in rules)
    for number, one in enumerate(rules):
        here, name = (*at, number), str(one.get("name", ""))
        if len(name) > _MAX_RULE_NAME or not re.fullmatch(r"[A-Za-z]([A-Za-z0-9_,:]*[A-Za-z0-9_])?", name):
            what = f"a rule is named '{name}'"
            yield here, what, f"use at most {_MAX_RULE_NAME} letters, digits, '_', ',' and ':', with a letter first"
        if count[one.get("name")] > 1:
            yield here, f"{count[one.get('name')]} rules are named '{name}'", "give each another name"
        yield from _targets(one, here, known)
        for index, reason in enumerate(sequence(one.get("onJobFailureReasons"))):
            if reason not in _FAILURE_REASONS:
                where = (*here, "onJobFailureReasons", index)
                what = f"no reason '{reason}'{nearest(str(reason), _FAILURE_REASONS)}"
                yield where, what, f"use one of {', '.join(_FAILURE_REASONS)}"
    if any(str(one.get("action", "")).startswith(("RestartJob", "RestartJobAnd")) and not
           str(one.get("action")).startswith("RestartJobSet") for one in rules):  # fmt: skip
        for at, one, _ in _replicated(jobset):
            if _number(one.get("replicas"), 1) > _MAX_REPLICAS:
                what = f"{one['replicas']} replicas, of which a rule restarts single ones"
                yield (*at, "replicas"), what, f"use at most {_MAX_REPLICAS}, or RestartJobSet"


@rule("gke", severity=Severity.REFUSE, source=f"{_WEBHOOK} (validateCoordinator, validateCoordinatorLabelValue)")
def jobset_coordinator_exists(job: Evidence) -> Iterator[Finding]:
    """The coordinator is a pod of the JobSet, whose address is a valid label."""
    yield from _findings(job, _coordinator, "JobSet's webhook refuses it")


def _coordinator(jobset: JobSet) -> Iterator[Problem]:
    coordinator = jobset["spec"].get("coordinator")
    if not isinstance(coordinator, dict):
        return
    at: Location = ("spec", "coordinator")
    name, known = str(coordinator.get("replicatedJob", "")), _names(jobset)
    job, pod = _number(coordinator.get("jobIndex"), 0), _number(coordinator.get("podIndex"), 0)
    found = next(((one, spec) for _, one, spec in _replicated(jobset) if one.get("name") == name), None)
    if found is None:
        what = f"no replicated job '{name}'{nearest(name, known)}"
        yield (*at, "replicatedJob"), what, f"use one of {', '.join(known)}"
    else:
        one, spec = found
        replicas, completions = _number(one.get("replicas"), 1), spec.get("completions")
        if not 0 <= job < replicas:
            yield (*at, "jobIndex"), f"jobIndex is {job}, of {replicas} replicas", f"write 0 to {replicas - 1}"
        elif spec.get("completionMode") != "Indexed" or not isinstance(completions, int):
            yield at, f"{name} is not Indexed, or has no completions", "add completions, and completionMode: Indexed"
        elif not 0 <= pod < completions:
            yield (*at, "podIndex"), f"podIndex is {pod}, of {completions} pods", f"write 0 to {completions - 1}"
    jobset_name = object_name(jobset)
    subdomain = mapping(jobset["spec"].get("network")).get("subdomain") or jobset_name
    address = f"{jobset_name}-{name}-{job}-{pod}.{subdomain}"
    if wrong := names.label_value(address):
        yield at, f"the coordinator's address {address}: {wrong}", "shorten the names of JobSet, job or subdomain"


@rule("gke", severity=Severity.REFUSE, source=f"{_WEBHOOK} (validateVolumeClaimPolicies); {_CRD} (XValidation)")
def jobset_volume_claims_are_valid(job: Evidence) -> Iterator[Finding]:
    """Volume claims of a JobSet have unique names, and a container mounts each."""
    yield from _findings(job, _claims, "JobSet's webhook or its definition refuses it")


def _claims(jobset: JobSet) -> Iterator[Problem]:
    pods = [(at, mapping(mapping(spec.get("template")).get("spec"))) for at, _, spec in _replicated(jobset)]
    mounted = {
        mapping(mount).get("name")
        for _, pod in pods
        for key in ("initContainers", "containers")
        for container in sequence(pod.get(key))
        for mount in sequence(mapping(container).get("volumeMounts"))
    }
    seen: set[str] = set()
    for number, policy in enumerate(map(mapping, sequence(jobset["spec"].get("volumeClaimPolicies")))):
        for index, template in enumerate(map(mapping, sequence(policy.get("templates")))):
            at: Location = ("spec", "volumeClaimPolicies", number, "templates", index)
            metadata = mapping(template.get("metadata"))
            name = str(metadata.get("name", ""))
            if metadata.get("namespace"):
                yield (*at, "metadata", "namespace"), "a claim with a namespace", "remove the namespace"
            if name in seen:
                yield at, f"claim '{name}' is there twice", "give it another name"
            seen.add(name)
            if wrong := names.dns_1123_subdomain(name):
                yield at, f"claim '{name}'", wrong
            full = f"{name}-{object_name(jobset)}"
            if len(full) > _LABEL:
                yield (
                    at,
                    f"the claim is named {full}: {len(full)} characters",
                    f"use at most {_LABEL} with the JobSet's name",
                )
            if name not in mounted:
                yield at, f"no container mounts the claim '{name}'", "add a volumeMount of that name"
            for pod_at, pod in pods:
                for position, volume in enumerate(map(mapping, sequence(pod.get("volumes")))):
                    if volume.get("name") == name:
                        where = (*pod_at, "template", "spec", "template", "spec", "volumes", position)
                        yield where, f"a volume and a claim are named '{name}'", "rename one of them"


@rule("gke", severity=Severity.REFUSE, source=f"{_WEBHOOK} (ValidateCreate: in-place restart)")
def in_place_restart_is_complete(job: Evidence) -> Iterator[Finding]:
    """A JobSet that restarts its pods in place never replaces them, and runs all of them at once."""
    yield from _findings(job, _in_place, "JobSet's webhook refuses it")


def _in_place(jobset: JobSet) -> Iterator[Problem]:
    if mapping(jobset["spec"].get("failurePolicy")).get("restartStrategy") != "InPlaceRestart":
        return
    for at, _, spec in _replicated(jobset):
        here: Location = (*at, "template", "spec")
        if spec.get("backoffLimit") != MAX_INT32:
            what = f"backoffLimit is {spec.get('backoffLimit', 'not set')} with InPlaceRestart"
            yield (*here, "backoffLimit"), what, f"write {MAX_INT32}"
        if spec.get("podReplacementPolicy") != "Failed":
            yield (
                (*here, "podReplacementPolicy"),
                "podReplacementPolicy is not Failed with InPlaceRestart",
                "write Failed",
            )
        if "completions" not in spec or spec.get("completions") != spec.get("parallelism"):
            yield (*here, "completions"), "completions and parallelism differ with InPlaceRestart", "give both the same"


@rule("gke", severity=Severity.NOTE, source=f"{_REPOSITORY}/pkg/features/features.go (alpha, off by default)")
def jobset_features_are_enabled(job: Evidence) -> Iterator[Finding]:
    """A JobSet uses no feature that its controller has switched off by default."""
    gates = {
        "InPlaceRestart": "InPlaceRestart",
        "RestartJob": "RestartJob",
        "RestartJobAndIgnoreMaxRestarts": "RestartJob",
    }

    def look(jobset: JobSet) -> Iterator[Problem]:
        policy = mapping(jobset["spec"].get("failurePolicy"))
        used = [policy.get("restartStrategy"), *(mapping(one).get("action") for one in sequence(policy.get("rules")))]
        for name in dict.fromkeys(one for one in used if one in gates):
            at: Location = ("spec", "failurePolicy")
            yield (
                at,
                f"{name} needs the feature gate {gates[name]}",
                f"start the controller with --feature-gates={gates[name]}=true",
            )

    yield from _findings(job, look, "a webhook without the feature refuses the JobSet")
