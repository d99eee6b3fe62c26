"""The Jobs and pods of Kubernetes manifests, also those within other objects, with the API server's defaults."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from trainyard.common.rule_engine import Finding, Rule, Severity, rule
from trainyard.spec.yaml_source import Location
from trainyard_jobs.kubernetes import gke_objects, kubernetes_names
from trainyard_jobs.rules.evidence import Evidence
from trainyard_jobs.rules.problems import Problem, findings
from trainyard_jobs.schema import kinds
from trainyard_jobs.schema.kubernetes_defaults import entries, job_spec, mapping, sequence


def object_name(document: dict[str, Any]) -> str:
    """The name of an object; if the API server generates it, one of the same length."""
    metadata = mapping(document, "metadata")
    name = metadata.get("name")
    if isinstance(name, str) and name:
        return name
    prefix = metadata.get("generateName")
    return kubernetes_names.generated(prefix) if isinstance(prefix, str) and prefix else ""


@dataclass(frozen=True)
class JobTemplate:
    """The spec of a Job, also of one that a JobSet or a CronJob creates, or the template of a pod, with defaults.

    Attributes:
        document: its number; ``at``: location of the spec, or of the template, in it.
        kind: of the document.
        name: of the Job; in a JobSet, of the one with the highest index.
        replicas: how many such Jobs there are.
        claims: names of the volumes that the claims of a JobSet or a LeaderWorkerSet add to the pods.
        queue: the Kueue queue that the job waits in, which may add node labels to the pods; empty without one.
    """

    document: int
    at: Location
    spec: dict[str, Any]
    name: str
    kind: str
    replicas: int = 1
    claims: frozenset[str] = frozenset()
    queue: str = ""

    @property
    def is_job(self) -> bool:
        return not kinds.KINDS[self.kind].pods

    @property
    def in_jobset(self) -> bool:
        return self.kind == "JobSet"

    @property
    def template(self) -> dict[str, Any]:
        return mapping(self.spec, "template") if self.is_job else self.spec

    @property
    def pod(self) -> dict[str, Any]:
        return mapping(self.template, "spec")

    @property
    def pod_at(self) -> Location:
        return (*self.at, "template", "spec") if self.is_job else (*self.at, "spec")

    @property
    def containers(self) -> list[dict[str, Any]]:
        return [entry for entry in sequence(self.pod, "containers") if isinstance(entry, dict)]

    def all_containers(self) -> Iterator[tuple[Location, dict[str, Any]]]:
        """Every container with its location, init containers first."""
        for key in ("initContainers", "containers"):
            for index, entry in enumerate(sequence(self.pod, key)):
                if isinstance(entry, dict):
                    yield (*self.pod_at, key, index), entry

    @property
    def selector(self) -> dict[str, Any]:
        """Labels that the pods' node must have, by nodeSelector or by a required affinity with a single value."""
        found: dict[str, Any] = {}
        required = mapping(self.pod, "affinity", "nodeAffinity", "requiredDuringSchedulingIgnoredDuringExecution")
        terms = sequence(required, "nodeSelectorTerms")
        if len(terms) == 1:
            for entry in map(mapping, sequence(terms[0], "matchExpressions")):
                values = sequence(entry, "values")
                if entry.get("operator") == "In" and len(values) == 1:
                    found[str(entry.get("key"))] = values[0]
        return found | mapping(self.pod, "nodeSelector")

    def count(self, key: str) -> int:
        """A number of the spec, such as ``completions``; 1 without it."""
        value = self.spec.get(key)
        return value if isinstance(value, int) else 1

    @property
    def pods(self) -> int:
        """The number of pods of one Job: its completions, or of a work queue, its parallelism."""
        return self.count("completions") if "completions" in self.spec else self.count("parallelism")

    def findings(self, job: Evidence, problems: Iterable[Problem]) -> Iterator[Finding]:
        """Report problems for which the API server refuses a Job or its pods.

        The API server takes custom resources without validating their Jobs and pods; they are refused when the
        resource's controller creates them.
        """
        if self.kind in ("Job", "CronJob", "Pod"):
            return findings(job, self.document, problems, f"the API server refuses the {self.kind}")
        why = f"the {self.kind} is created, but the API server refuses its {'Jobs' if self.is_job else 'pods'}"
        return findings(job, self.document, problems, why, Severity.CANNOT_START)


def job_rule(
    source: str, *, pods: bool = False
) -> Callable[[Callable[[JobTemplate], Iterator[Problem]]], Rule[Evidence]]:
    """Make a function that yields the problems of a Job a rule about every Job, with ``pods`` every pod, of a file."""

    def decorate(function: Callable[[JobTemplate], Iterator[Problem]]) -> Rule[Evidence]:
        @functools.wraps(function)
        def check(job: Evidence) -> Iterator[Finding]:
            for template in pod_templates(job) if pods else job_templates(job):
                yield from template.findings(job, function(template))

        return rule("gke", severity=Severity.REFUSE, source=source)(check)

    return decorate


def _claims(policies: list[Any], key: str) -> frozenset[str]:
    """The names of the volumes that the templates of claims below ``key`` of some policies add."""
    return frozenset(
        str(mapping(template, "metadata").get("name", "")) for policy in policies for template in sequence(policy, key)
    )


def job_templates(job: Evidence) -> Iterator[JobTemplate]:
    """Every Job of the file, also those within JobSets and CronJobs."""
    return (template for template in pod_templates(job) if template.is_job)


def pod_templates(job: Evidence) -> Iterator[JobTemplate]:
    """Every Job of the file, and every template of pods that are of no Job."""
    for number, document in enumerate(job.with_defaults):
        if not isinstance(document.get("spec"), dict) or not kinds.kind_of(document):
            continue
        name, spec = object_name(document), document["spec"]
        queue = str(mapping(document, "metadata", "labels").get(gke_objects.QUEUE) or "")
        for at, template in kinds.pod_templates(document):
            claims = _claims([mapping(spec, "leaderWorkerTemplate")], "volumeClaimTemplates")
            yield JobTemplate(number, at, template, "", document["kind"], claims=claims, queue=queue)
        if document.get("kind") == "Job":
            yield JobTemplate(number, ("spec",), spec, name, "Job", queue=queue)
        if document.get("kind") == "CronJob" and isinstance(inner := mapping(spec, "jobTemplate").get("spec"), dict):
            # The controller adds the minutes of 1970 until its time.
            at = ("spec", "jobTemplate", "spec")
            yield JobTemplate(number, at, job_spec(inner), f"{name}-00000000", "CronJob", queue=queue)
        if document.get("kind") == "JobSet":
            for at, entry in entries(spec, ("spec",), "replicatedJobs"):
                inner = mapping(entry, "template").get("spec")
                if not isinstance(inner, dict):
                    continue
                replicas = entry["replicas"] if isinstance(entry["replicas"], int) else 1
                last = f"{name}-{entry.get('name', '')}-{max(0, replicas - 1)}"
                at = (*at, "template", "spec")
                claims = _claims(sequence(spec, "volumeClaimPolicies"), "templates")
                yield JobTemplate(number, at, inner, last, "JobSet", replicas, claims, queue)
