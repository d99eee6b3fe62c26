"""The Jobs of Kubernetes manifests, also those within JobSets, as the API server fills in their defaults."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from trainyard.common.rule_engine import Finding, Severity
from trainyard.spec.yaml_source import Location
from trainyard_jobs.kubernetes import gke_objects, kubernetes_names
from trainyard_jobs.rules.evidence import Evidence
from trainyard_jobs.schema.job_file import is_kubernetes_job
from trainyard_jobs.schema.kubernetes_defaults import mapping, sequence

#: What a rule found: the location from the top of the document, what is wrong, what to do.
Problem = tuple[Location, str, str]


def object_name(document: dict[str, Any]) -> str:
    """The name of an object; if the API server generates it, one of the same length."""
    metadata = mapping(document.get("metadata"))
    name = metadata.get("name")
    if isinstance(name, str) and name:
        return name
    prefix = metadata.get("generateName")
    return kubernetes_names.generated(prefix) if isinstance(prefix, str) and prefix else ""


def repeated(value: object, at: Location, keys: dict[str, object]) -> Iterator[Problem]:
    """The entries of a list that have the same key as an earlier one.

    Args:
        keys: the fields that are the key (x-kubernetes-list-map-keys) -> their defaults.
    """
    seen: set[str] = set()
    for number, one in enumerate(map(mapping, sequence(value))):
        found = " ".join(str(one.get(key, default)) for key, default in keys.items())
        if found in seen:
            yield (*at, number), f"{'.'.join(keys)} {found} is there twice in {at[-1]}", "remove or rename one"
        seen.add(found)


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
        return mapping(self.spec.get("template"))

    @property
    def pod(self) -> dict[str, Any]:
        return mapping(self.template.get("spec"))

    @property
    def pod_at(self) -> Location:
        return (*self.at, "template", "spec")

    @property
    def containers(self) -> list[dict[str, Any]]:
        return [one for one in sequence(self.pod.get("containers")) if isinstance(one, dict)]

    def all_containers(self) -> Iterator[tuple[Location, dict[str, Any]]]:
        """Every container with its location, init containers first."""
        for key in ("initContainers", "containers"):
            for index, one in enumerate(sequence(self.pod.get(key))):
                if isinstance(one, dict):
                    yield (*self.pod_at, key, index), one

    @property
    def selector(self) -> dict[str, Any]:
        """Labels that the pods' node must have, by nodeSelector or by a required affinity with a single value."""
        found: dict[str, Any] = {}
        required = mapping(mapping(self.pod.get("affinity")).get("nodeAffinity")).get(
            "requiredDuringSchedulingIgnoredDuringExecution"
        )
        terms = sequence(mapping(required).get("nodeSelectorTerms"))
        if len(terms) == 1:
            for one in sequence(mapping(terms[0]).get("matchExpressions")):
                values = sequence(mapping(one).get("values"))
                if mapping(one).get("operator") == "In" and len(values) == 1:
                    found[str(one.get("key"))] = values[0]
        return found | mapping(self.pod.get("nodeSelector"))

    def count(self, key: str) -> int:
        """A number of the spec, such as ``completions``; 1 without it."""
        value = self.spec.get(key)
        return value if isinstance(value, int) else 1

    @property
    def pods(self) -> int:
        """The number of pods of one Job: its completions, or of a work queue, its parallelism."""
        return self.count("completions") if "completions" in self.spec else self.count("parallelism")

    def findings(
        self, job: Evidence, problems: Iterator[Problem], severity: Severity | None = None
    ) -> Iterator[Finding]:
        """Findings about what the API server refuses in a Job or in its pods.

        The API server takes a JobSet without validating its Jobs; they are refused when its controller creates them.
        """
        why = "the API server refuses the Job"
        if self.in_jobset:
            why = "the JobSet is created, but the API server refuses its Jobs"
        for location, what, remediation in problems:
            yield Finding(
                job.at(*location, document=self.document),
                what,
                why,
                remediation,
                severity=severity or (Severity.CANNOT_START if self.in_jobset else Severity.REFUSE),
            )


def _claims(spec: dict[str, Any]) -> frozenset[str]:
    """The names of the volumes that volumeClaimPolicies add."""
    return frozenset(
        str(mapping(mapping(template).get("metadata")).get("name", ""))
        for policy in sequence(spec.get("volumeClaimPolicies"))
        for template in sequence(mapping(policy).get("templates"))
    )


def job_templates(job: Evidence) -> Iterator[JobTemplate]:
    """Every Job of the file, also those within JobSets."""
    for number, document in enumerate(job.with_defaults):
        if not isinstance(document.get("spec"), dict) or not is_kubernetes_job(document):
            continue
        name, spec = object_name(document), document["spec"]
        labels = mapping(mapping(document.get("metadata")).get("labels"))
        queue = str(labels.get(gke_objects.QUEUE) or "")
        if document.get("kind") == "Job":
            yield JobTemplate(number, ("spec",), spec, name, 1, False, queue=queue)
        if document.get("kind") == "JobSet":
            for index, one in enumerate(sequence(spec.get("replicatedJobs"))):
                inner = mapping(mapping(one).get("template")).get("spec")
                if not isinstance(inner, dict):
                    continue
                replicas = one["replicas"] if isinstance(one["replicas"], int) else 1
                yield JobTemplate(
                    number,
                    ("spec", "replicatedJobs", index, "template", "spec"),
                    inner,
                    f"{name}-{one.get('name', '')}-{max(0, replicas - 1)}",
                    replicas,
                    True,
                    _claims(spec),
                    queue,
                )
