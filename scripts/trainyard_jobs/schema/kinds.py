"""The Kubernetes kinds that are checked, and where their pods are."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from trainyard.spec.yaml_source import Location


@dataclass(frozen=True)
class Kind:
    """A kind of object that runs containers.

    Attributes:
        group: of its API; empty for Kubernetes' core.
        checked: what is checked, for docs/jobs.md.
        pods: paths of its pod templates, if it has them without a Job between; ``*`` is every entry of a list.
    """

    group: str
    checked: str
    pods: tuple[str, ...] = ()


_ALL, _PODS = "all fields, rules, nodes and images", "its pods: their fields, rules, nodes and images"
_RAY = ("headGroupSpec template", "workerGroupSpecs * template")

KINDS = {
    "Job": Kind("batch", _ALL),
    "JobSet": Kind("jobset.x-k8s.io", _ALL),
    "TrainJob": Kind("trainer.kubeflow.org", f"{_ALL}, as far as its runtime is known"),
    "CronJob": Kind("batch", "all fields; rules, nodes and images of its Job"),
    "Pod": Kind("", _ALL, ("",)),
    # api/leaderworkerset/v1/leaderworkerset_types.go of https://github.com/kubernetes-sigs/lws
    "LeaderWorkerSet": Kind("leaderworkerset.x-k8s.io", _PODS, tuple(
        f"spec leaderWorkerTemplate {key}" for key in ("leaderTemplate", "workerTemplate"))),
    # ray-operator/apis/ray/v1 of https://github.com/ray-project/kuberay
    "RayJob": Kind("ray.io", _PODS, (*(f"spec rayClusterSpec {path}" for path in _RAY), "spec submitterPodTemplate")),
    "RayCluster": Kind("ray.io", _PODS, tuple(f"spec {path}" for path in _RAY)),
    # api/v1/pathwaysjob_types.go of https://github.com/google/pathways-job
    "PathwaysJob": Kind("pathways-job.pathways.domain", f"of its controller, {_PODS}", ("spec controller template",)),
}  # fmt: skip

#: Kinds that `trainyard job rehearse` runs.
REHEARSED = ("Job", "JobSet", "TrainJob")


def kind_of(document: dict[str, Any]) -> Kind | None:
    """Return the kind of an object; None if it is not one of :data:`KINDS`, such as a Job of Volcano's group.

    Without a group it is: no cluster has such a kind, and the checks say so.
    """
    kind, version = KINDS.get(str(document.get("kind"))), str(document.get("apiVersion", ""))
    return kind if kind and ("/" not in version or version.partition("/")[0] == kind.group) else None


def pod_templates(document: dict[str, Any]) -> Iterator[tuple[Location, dict[str, Any]]]:
    """Yield the location of every pod template of an object, and itself; of a Pod, the object."""
    kind = kind_of(document)
    for path in kind.pods if kind else ():
        yield from _below(document, (), path.split())


def _below(node: Any, at: Location, path: Sequence[str]) -> Iterator[tuple[Location, dict[str, Any]]]:
    if path and path[0] == "*":
        for number, entry in enumerate(node if isinstance(node, list) else ()):
            yield from _below(entry, (*at, number), path[1:])
    elif isinstance(node, dict):
        yield from _below(node.get(path[0]), (*at, path[0]), path[1:]) if path else ((at, node),)
