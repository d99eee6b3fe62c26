"""Rules about TrainJobs that no server refuses: their runtime, its patches and their accelerators.

https://github.com/kubeflow/trainer/tree/8c0f5059bd51ec3ba6d6a6a7b2e1471de7bc13b3 (2026-08-21). A runtime in the file of
the TrainJob is what it is; of one that the cluster has, Kubeflow Trainer's own manifest is known, which the cluster's
administrator can have changed: what depends on that is a note.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from trainyard.common.errors import nearest
from trainyard.common.rule_engine import Severity
from trainyard.spec.yaml_source import Location
from trainyard_jobs.kubernetes import train_jobs
from trainyard_jobs.kubernetes.train_jobs import Runtime
from trainyard_jobs.platforms.gke.rules import DEVICES, unlimited
from trainyard_jobs.rules.evidence import Evidence
from trainyard_jobs.rules.problems import Problem, rule_for_each
from trainyard_jobs.schema.kubernetes_defaults import entries, mapping

_REPOSITORY = "https://github.com/kubeflow/trainer/blob/8c0f5059bd51ec3ba6d6a6a7b2e1471de7bc13b3"
_NO_IMAGE = "the patch adds a container without an image"


@dataclass(frozen=True)
class _TrainJob:
    """Join a TrainJob of the file to its runtime, if that is known."""

    document: dict[str, Any]
    runtime: Runtime | None

    @property
    def spec(self) -> dict[str, Any]:
        return mapping(self.document, "spec")

    def of_runtime(self, at: Location, what: str, remediation: str) -> Problem:
        """Return a problem that depends on the template of the runtime, a note if the cluster's can be another."""
        if self.runtime and self.runtime.in_file:
            return at, what, remediation
        why = f"{_NO_IMAGE}, unless the cluster's runtime is another one than Kubeflow Trainer installs"
        return at, what, remediation, Severity.NOTE, why


def _train_jobs(job: Evidence) -> Iterator[tuple[int, _TrainJob]]:
    for number, document in enumerate(job.job.documents):
        if train_jobs.is_train_job(document):
            yield number, _TrainJob(document, train_jobs.runtime_of(document, job.job.documents))


@rule_for_each(
    _train_jobs,
    f"{_REPOSITORY}/pkg/runtime/core/trainingruntime.go (a TrainJob is merged into the template of its runtime)",
    "what it decides, such as nodes and images, is not checked",
    Severity.NOTE,
)
def train_job_runtimes_are_known(job: _TrainJob) -> Iterator[Problem]:
    """The runtime of a TrainJob is in its file, or one that Kubeflow Trainer installs."""
    _, kind, name = train_jobs.reference(job.document)
    if job.runtime is None and name:
        fix = "nothing, if the cluster has it: 'kubectl get' shows it"
        yield ("spec", "runtimeRef"), f"{kind} {name} is not in this file", fix


@rule_for_each(
    _train_jobs,
    f"{_REPOSITORY}/pkg/runtime/framework/plugins/jobset/jobset.go (Validate looks for them in the merged template)",
    _NO_IMAGE,
    Severity.CANNOT_START,
)
def train_job_patches_match_runtime(job: _TrainJob) -> Iterator[Problem]:
    """Runtime patches are for replicated jobs and containers that the runtime has."""
    if job.runtime is None:
        return
    known = [str(each.get("name")) for each in job.runtime.replicated_jobs]
    for place, patch in entries(job.spec, ("spec",), "runtimePatches"):
        for at, replicated in entries(patch, place, "trainingRuntimeSpec", "template", "spec", "replicatedJobs"):
            owner = str(replicated.get("name", ""))
            if owner and owner not in known:
                what = f"the runtime {job.runtime.name} has no replicated job '{owner}'{nearest(owner, known)}"
                yield job.of_runtime((*at, "name"), what, f"use one of {', '.join(known)}")
            containers = [str(each.get("name")) for each in job.runtime.containers(owner) or []]
            for key in ("initContainers", "containers"):
                for here, container in entries(replicated, at, "template", "spec", "template", "spec", key):
                    name = str(container.get("name", ""))
                    if owner in known and name and name not in containers:
                        what = f"the job {owner} of the runtime {job.runtime.name} has no container '{name}'"
                        yield job.of_runtime((*here, "name"), what, f"use one of {', '.join(containers)}")


@rule_for_each(_train_jobs, DEVICES, "the TrainJob is created, but its pods are refused", Severity.CANNOT_START)
def train_job_accelerators_are_limited(job: _TrainJob) -> Iterator[Problem]:
    """A node of a TrainJob has a limit for the GPUs and chips that it requests, of the same number."""
    own = mapping(job.spec, "trainer", "resourcesPerNode")
    if job.runtime and own:  # another runtime may have the limits
        merged = mapping(train_jobs.merged(job.runtime.trainer_container.get("resources"), own))
        yield from unlimited(merged, ("spec", "trainer", "resourcesPerNode"))
