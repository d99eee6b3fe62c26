"""The Jobs and pods of Kubernetes manifests, also those within other objects, with the API server's defaults."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from trainyard.spec.yaml_source import Location
from trainyard_jobs.kubernetes import gke_objects
from trainyard_jobs.rules.evidence import Evidence
from trainyard_jobs.schema import kinds
from trainyard_jobs.schema.kubernetes_defaults import entries, job_spec, mapping, sequence


@dataclass(frozen=True)
class JobTemplate:
    """The spec of a Job, also of one that a JobSet or a CronJob creates, or the template of a pod, with defaults.

    Attributes:
        document: its number; ``at``: location of the spec, or of the template, in it.
        kind: of the document.
        replicas: how many such Jobs there are.
        queue: the Kueue queue that the job waits in, which may add node labels to the pods; empty without one.
    """

    document: int
    at: Location
    spec: dict[str, Any]
    kind: str
    replicas: int = 1
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


def job_templates(job: Evidence) -> Iterator[JobTemplate]:
    """Every Job of the file, also those within JobSets and CronJobs."""
    return (template for template in pod_templates(job) if template.is_job)


def pod_templates(job: Evidence) -> Iterator[JobTemplate]:
    """Every Job of the file, and every template of pods that are of no Job."""
    for number, document in enumerate(job.with_defaults):
        if not isinstance(document.get("spec"), dict) or not kinds.kind_of(document):
            continue
        spec = document["spec"]
        queue = str(mapping(document, "metadata", "labels").get(gke_objects.QUEUE) or "")
        for at, template in kinds.pod_templates(document):
            yield JobTemplate(number, at, template, document["kind"], queue=queue)
        if document.get("kind") == "Job":
            yield JobTemplate(number, ("spec",), spec, "Job", queue=queue)
        if document.get("kind") == "CronJob" and isinstance(inner := mapping(spec, "jobTemplate").get("spec"), dict):
            yield JobTemplate(number, ("spec", "jobTemplate", "spec"), job_spec(inner), "CronJob", queue=queue)
        if document.get("kind") == "JobSet":
            for at, entry in entries(spec, ("spec",), "replicatedJobs"):
                inner = mapping(entry, "template").get("spec")
                if not isinstance(inner, dict):
                    continue
                replicas = entry["replicas"] if isinstance(entry["replicas"], int) else 1
                yield JobTemplate(number, (*at, "template", "spec"), inner, "JobSet", replicas, queue)
