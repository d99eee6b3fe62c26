"""Rules that the API server applies to Jobs: names, numbers, policies."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from trainyard.common.rule_engine import Finding, Severity, rule
from trainyard.spec.yaml_source import Location
from trainyard_jobs.kubernetes import kubernetes_names as names
from trainyard_jobs.kubernetes import train_jobs
from trainyard_jobs.rules.evidence import Evidence
from trainyard_jobs.rules.job_templates import JobTemplate, job_rule, object_name
from trainyard_jobs.rules.problems import Problem, not_a_controller, out_of_range
from trainyard_jobs.schema.kubernetes_defaults import entries, mapping, sequence

_BATCH = "https://github.com/kubernetes/kubernetes/blob/master/pkg/apis/batch/validation/validation.go"
_NAMES = "https://kubernetes.io/docs/concepts/overview/working-with-objects/names"
_TRAIN_JOB = "https://github.com/kubeflow/trainer/blob/8c0f505/pkg/apis/trainer/v1alpha1/trainjob_types.go"

#: Constants of validation.go: limits of Indexed Jobs, of Indexed Jobs with many completions, and of policies.
_MAX_INDEXED = 100_000
_MAX_OF_MANY = 10_000
_MAX_RULES = 20
_MAX_EXIT_CODES = 255

_NUMBERS = (
    "parallelism",
    "completions",
    "activeDeadlineSeconds",
    "backoffLimit",
    "backoffLimitPerIndex",
    "maxFailedIndexes",
    "ttlSecondsAfterFinished",
)


@rule("gke", severity=Severity.REFUSE, source=f"{_NAMES}; {_TRAIN_JOB} (TrainJob: XValidation)")
def object_names_are_valid(job: Evidence) -> Iterator[Finding]:
    """Every object has a name that its kind allows."""
    for number, document in enumerate(job.job.documents):
        kind, api = str(document.get("kind", "")), str(document.get("apiVersion", ""))
        if api.startswith("rbac."):
            continue  # names of roles are not restricted to DNS names
        name, severity = object_name(document), Severity.REFUSE
        wrong = names.dns_1123_subdomain(name)
        if not name:
            wrong = "add metadata.name"
        elif kind == "Namespace":
            wrong = names.dns_1123_label(name)
        elif train_jobs.is_train_job(document):
            wrong = names.dns_1035_label(name)
        elif kind == "Service":
            wrong = names.dns_1035_label(name)
            if wrong and not names.dns_1123_label(name):
                severity = Severity.NOTE  # allowed where RelaxedServiceNameValidation is on
        if wrong:
            yield Finding(
                job.at("metadata", "name", document=number),
                f"the {kind} is named '{name}'" if name else f"the {kind} has no name",
                "the API server refuses it",
                wrong,
                severity=severity,
            )


@job_rule(f"{_BATCH} (ValidateJob, and the label batch.kubernetes.io/job-name)")
def names_are_short_enough(template: JobTemplate) -> Iterator[Problem]:
    """The names of Jobs are valid labels, as are the host names of their pods."""
    name = template.name
    if template.in_jobset or names.dns_1123_subdomain(name):
        return
    if template.spec.get("completionMode") == "Indexed" and template.count("completions") > 0:
        name = f"{name}-{template.count('completions') - 1}"
        what, wrong = f"the host names of its pods have {len(name)} characters ({name})", names.dns_1123_label(name)
    else:
        what, wrong = f"the name has {len(name)} characters, and becomes a label", names.label_value(name)
    if wrong:
        yield ("metadata", "name"), f"{what}: {wrong}", "use a shorter name, without dots"


@job_rule(f"{_BATCH} (validateJobSpec)")
def job_numbers_are_valid(template: JobTemplate) -> Iterator[Problem]:
    """Counts, limits and the completion mode of a Job fit each other."""
    spec, at = template.spec, template.at
    numbers = {key: spec[key] for key in _NUMBERS if isinstance(spec.get(key), int)}
    for key in numbers:
        yield from out_of_range(spec, key, at, 0)
    if "maxFailedIndexes" in numbers and "backoffLimitPerIndex" not in numbers:
        yield (*at, "maxFailedIndexes"), "maxFailedIndexes without backoffLimitPerIndex", "add backoffLimitPerIndex"
    mode = spec.get("completionMode")
    if mode == "Indexed":
        yield from _indexed(numbers, at)
    else:
        if mode != "NonIndexed":
            yield (*at, "completionMode"), f"completionMode is {mode}", "write Indexed or NonIndexed"
        for key in ("backoffLimitPerIndex", "maxFailedIndexes"):
            if key in numbers:
                yield (*at, key), f"{key} in a Job that is not Indexed", "add completionMode: Indexed"
    yield from not_a_controller(spec, at)


def _indexed(numbers: dict[str, int], at: Location) -> Iterator[Problem]:
    """Problems of an Indexed Job."""
    completions, parallelism = numbers.get("completions"), numbers.get("parallelism", 0)
    failed = numbers.get("maxFailedIndexes")
    if completions is None:
        yield (*at, "parallelism"), "an Indexed Job without completions", f"add completions: {parallelism}"
    if parallelism > _MAX_INDEXED:
        yield (*at, "parallelism"), f"parallelism of an Indexed Job is {parallelism}", f"at most {_MAX_INDEXED}"
    most = _MAX_INDEXED if completions is None else min(_MAX_INDEXED, completions)
    if failed is not None and failed > most:
        yield (*at, "maxFailedIndexes"), f"maxFailedIndexes is {failed}", f"at most {most}"
    if completions is not None and completions > _MAX_INDEXED and "backoffLimitPerIndex" in numbers:
        many = f"with backoffLimitPerIndex and {completions} completions"
        if failed is None:
            yield (*at, "completions"), f"no maxFailedIndexes {many}", f"add one of at most {_MAX_OF_MANY}"
        for key in ("parallelism", "maxFailedIndexes"):
            if numbers.get(key, 0) > _MAX_OF_MANY:
                yield (*at, key), f"{key} is {numbers[key]} {many}", f"at most {_MAX_OF_MANY}"


@job_rule(f"{_BATCH} (validateGeneratedSelector, ValidateJobTemplateSpec)")
def selectors_are_generated(template: JobTemplate) -> Iterator[Problem]:
    """A Job leaves its selector to the API server, or sets manualSelector and the same labels."""
    selector, manual = mapping(template.spec, "selector"), template.spec.get("manualSelector")
    labels = mapping(template.template, "metadata", "labels")
    at = (*template.at, "selector")
    if selector and not manual:
        yield at, "a selector without manualSelector: true", "remove it: one is generated"
    elif any(labels.get(key) != value for key, value in mapping(selector, "matchLabels").items()):
        yield at, "the selector does not match the labels of the pod template", "give the pods its labels"
    elif manual and not selector:
        yield template.at, "manualSelector without a selector", "remove manualSelector"


@job_rule(f"{_BATCH} (validateJobSpec, validatePodReplacementPolicy)")
def restart_policy_is_allowed(template: JobTemplate) -> Iterator[Problem]:
    """The restart and replacement policies are those that Jobs and their pod failure policy allow."""
    if not template.pod:
        return
    policy = template.pod.get("restartPolicy")
    with_policy = "podFailurePolicy" in template.spec
    allowed = ["Never"] if with_policy else ["Never", "OnFailure"]
    if policy not in allowed:
        reason = " with a podFailurePolicy" if with_policy else ""
        yield (*template.pod_at, "restartPolicy"), f"restartPolicy is {policy}{reason}", f"write {' or '.join(allowed)}"
    replacement = template.spec.get("podReplacementPolicy")
    allowed = ["Failed"] if with_policy else ["Failed", "TerminatingOrFailed"]
    if replacement not in allowed:
        at = (*template.at, "podReplacementPolicy")
        yield at, f"podReplacementPolicy is {replacement}", f"write {' or '.join(allowed)}"


@job_rule(f"{_BATCH} (validatePodFailurePolicy)")
def pod_failure_policy_is_valid(template: JobTemplate) -> Iterator[Problem]:
    """A rule of a pod failure policy has an action, and exit codes or conditions."""
    policy, at = mapping(template.spec, "podFailurePolicy"), (*template.at, "podFailurePolicy")
    number = len(sequence(policy, "rules"))
    if number > _MAX_RULES:
        yield (*at, "rules"), f"{number} rules", f"write at most {_MAX_RULES}"
    containers = [str(entry.get("name")) for _, entry in template.all_containers()]
    for here, entry in entries(policy, at, "rules"):
        action = entry.get("action")
        actions = ["Count", "FailIndex", "FailJob", "Ignore"]
        if action not in actions:
            yield (*here, "action"), f"action is {action}", f"write one of {', '.join(actions)}"
        elif action == "FailIndex" and "backoffLimitPerIndex" not in template.spec:
            yield (*here, "action"), "FailIndex without backoffLimitPerIndex", "add spec.backoffLimitPerIndex"
        codes, conditions = entry.get("onExitCodes"), sequence(entry, "onPodConditions")
        if (codes is not None) == bool(conditions):
            both = "both onExitCodes and onPodConditions" if conditions else "neither onExitCodes nor onPodConditions"
            yield here, both, "write one of them; a second rule can have the other"
        if len(conditions) > _MAX_RULES:
            yield (*here, "onPodConditions"), f"{len(conditions)} conditions", f"write at most {_MAX_RULES}"
        for where, condition in entries(entry, here, "onPodConditions"):
            if wrong := names.qualified_name(str(condition.get("type", ""))):
                yield (*where, "type"), f"condition '{condition.get('type')}'", wrong
            if condition.get("status") not in ("True", "False", "Unknown"):
                yield (*where, "status"), f"status is {condition.get('status')}", 'write "True", "False" or "Unknown"'
        if isinstance(codes, dict):
            yield from _exit_codes(codes, (*here, "onExitCodes"), containers)


def _exit_codes(codes: dict[str, Any], at: Location, containers: list[str]) -> Iterator[Problem]:
    operator, values = codes.get("operator"), sequence(codes, "values")
    if operator not in ("In", "NotIn"):
        yield (*at, "operator"), f"operator is {operator}", "write In or NotIn"
    name = codes.get("containerName")
    if name is not None and name not in containers:
        yield (*at, "containerName"), f"no container '{name}'", f"use one of {', '.join(containers)}"
    if not 0 < len(values) <= _MAX_EXIT_CODES:
        yield (*at, "values"), f"{len(values)} exit codes", f"write 1 to {_MAX_EXIT_CODES}"
    numbers = [entry for entry in values if isinstance(entry, int)]
    if operator == "In" and 0 in numbers:
        yield (*at, "values"), "exit code 0, which is success", "remove it"
    if numbers != sorted(set(numbers)):
        yield (*at, "values"), "the exit codes are not in increasing order, each once", "sort them"


@job_rule(f"{_BATCH} (validateSuccessPolicy)")
def success_policy_is_valid(template: JobTemplate) -> Iterator[Problem]:
    """A success policy belongs to an Indexed Job, and names indexes or a number of them."""
    policy, at = template.spec.get("successPolicy"), (*template.at, "successPolicy")
    if not isinstance(policy, dict):
        return
    if template.spec.get("completionMode") != "Indexed":
        yield at, "a successPolicy in a Job that is not Indexed", "add completionMode: Indexed"
        return
    number, completions = len(sequence(policy, "rules")), template.count("completions")
    if not 0 < number <= _MAX_RULES:
        yield at, f"{number} rules", f"write 1 to {_MAX_RULES}"
    for here, entry in entries(policy, at, "rules"):
        indexes, count = entry.get("succeededIndexes"), entry.get("succeededCount")
        if indexes is None and count is None:
            yield here, "neither succeededIndexes nor succeededCount", "write one of them"
        most = completions
        if isinstance(indexes, str):
            listed = parse_indexes(indexes, completions)
            if listed is None:
                where = (*here, "succeededIndexes")
                yield where, f"indexes '{indexes}'", f"write increasing numbers below {completions}, such as 0,2-3"
            else:
                most = listed
        yield from out_of_range(entry, "succeededCount", here, 0, most)


def parse_indexes(text: str, completions: int) -> int | None:
    """How many indexes ``0,2-3`` has; None if they are not increasing numbers below ``completions``."""
    total, last = 0, -1
    for part in text.split(",") if text else ():
        match = re.fullmatch(r"(\d+)(?:-(\d+))?", part)
        if not match:
            return None
        first, end = int(match[1]), int(match[2] or match[1])
        if first <= last or end >= completions or (match[2] and end <= first):
            return None
        total, last = total + end - first + 1, end
    return total
