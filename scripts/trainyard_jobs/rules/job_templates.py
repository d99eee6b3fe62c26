"""The Jobs of Kubernetes manifests, also those within JobSets, as the API server fills in their defaults."""

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
from trainyard_jobs.schema.job_file import is_kubernetes_job
from trainyard_jobs.schema.kubernetes_defaults import entries, mapping, sequence


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
    """The spec of a Job, or of a replicated job of a JobSet, with defaults.

    Attributes:
        document: its number; ``at``: location of the spec in it.
        name: of the Job; in a JobSet, of the one with the highest index.
        replicas: how many such Jobs there are.
        claims: names of the volumes that a JobSet's volumeClaimPolicies add to the pods.
        queue: the Kueue queue that the job waits in, which may add node labels to the pods; empty without one.
    """

    document: int
    at: Location
    spec: dict[str, Any]
    name: str
    replicas: int
    in_jobset: bool
    claims: frozenset[str] = frozenset()
    queue: str = ""

    @property
    def template(self) -> dict[str, Any]:
        return mapping(self.spec, "template")

    @property
    def pod(self) -> dict[str, Any]:
        return mapping(self.template, "spec")

    @property
    def pod_at(self) -> Location:
        return (*self.at, "template", "spec")

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

        The API server takes a JobSet without validating its Jobs; they are refused when its controller creates them.
        """
        if self.in_jobset:
            why = "the JobSet is created, but the API server refuses its Jobs"
            return findings(job, self.document, problems, why, Severity.CANNOT_START)
        return findings(job, self.document, problems, "the API server refuses the Job")


def job_rule(source: str) -> Callable[[Callable[[JobTemplate], Iterator[Problem]]], Rule[Evidence]]:
    """Make a function that yields the problems of a Job a rule about every Job of a file, also those within JobSets."""

    def decorate(function: Callable[[JobTemplate], Iterator[Problem]]) -> Rule[Evidence]:
        @functools.wraps(function)
        def check(job: Evidence) -> Iterator[Finding]:
            for template in job_templates(job):
                yield from template.findings(job, function(template))

        return rule("gke", severity=Severity.REFUSE, source=source)(check)

    return decorate


def _claims(spec: dict[str, Any]) -> frozenset[str]:
    """The names of the volumes that volumeClaimPolicies add."""
    return frozenset(
        str(mapping(template, "metadata").get("name", ""))
        for policy in sequence(spec, "volumeClaimPolicies")
        for template in sequence(policy, "templates")
    )


def job_templates(job: Evidence) -> Iterator[JobTemplate]:
    """Every Job of the file, also those within JobSets."""
    for number, document in enumerate(job.with_defaults):
        if not isinstance(document.get("spec"), dict) or not is_kubernetes_job(document):
            continue
        name, spec = object_name(document), document["spec"]
        queue = str(mapping(document, "metadata", "labels").get(gke_objects.QUEUE) or "")
        if document.get("kind") == "Job":
            yield JobTemplate(number, ("spec",), spec, name, 1, False, queue=queue)
        if document.get("kind") == "JobSet":
            for at, entry in entries(spec, ("spec",), "replicatedJobs"):
                inner = mapping(entry, "template").get("spec")
                if not isinstance(inner, dict):
                    continue
                replicas = entry["replicas"] if isinstance(entry["replicas"], int) else 1
                last = f"{name}-{entry.get('name', '')}-{max(0, replicas - 1)}"
                yield JobTemplate(number, (*at, "template", "spec"), inner, last, replicas, True, _claims(spec), queue)
