"""A fake of a GKE cluster: what kubectl needs for jobs (create, get, follow logs, delete), and gcloud for node pools.

    with Kubernetes(log=["Epoch 1"]) as cluster:
        subprocess.run(["kubectl", "create", "-f", "job.yaml"], env=os.environ | cluster.environment(folder))

Objects are refused as a server with the JobSet operator would refuse them: unknown fields, types, missing ones. The
pods of a Job or JobSet go one phase further each time they are asked for.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from scripts.fakes.server import ApiError, Route, Server
from scripts.jobs import gke, kubernetes, machines

PHASES = ("Pending", "Running", "Succeeded")

#: Group and version -> plural -> kind.
_RESOURCES = {
    "v1": {"pods": "Pod", "services": "Service"},
    "batch/v1": {"jobs": "Job"},
    gke.JOBSET_VERSION: {"jobsets": "JobSet"},
}


_CLUSTERS = r"/v1/projects/[^/]+/locations/[^/]+/clusters"


class Kubernetes(Server):
    """The fake.

    Attributes:
        objects: (plural, name) -> object.
        pools: name -> node pool.
    """

    def __init__(self, *, log: Sequence[str] = ()) -> None:
        super().__init__()
        self.objects: dict[tuple[str, str], dict[str, Any]] = {}
        self.pools: dict[str, dict[str, Any]] = {}
        self._log = list(log)
        self._looks = 0

    def environment(self, folder: Path) -> dict[str, str]:
        """Variables that send kubectl here, with a configuration written to ``folder``, and `gcloud container`."""
        path = folder / "kubeconfig"
        path.write_text(
            "apiVersion: v1\nkind: Config\ncurrent-context: fake\n"
            f"clusters: [{{name: fake, cluster: {{server: '{self.url.rstrip('/')}'}}}}]\n"
            "users: [{name: fake, user: {}}]\n"
            "contexts: [{name: fake, context: {cluster: fake, user: fake}}]\n",
            encoding="utf-8",
        )
        return {
            "CLOUDSDK_API_ENDPOINT_OVERRIDES_CONTAINER": self.url,
            "KUBECONFIG": str(path),
            "HOME": str(folder),
            "KUBECACHEDIR": str(folder / "cache"),
        }

    def error(self, error: ApiError) -> dict[str, Any]:
        reason = {404: "NotFound", 409: "AlreadyExists", 422: "Invalid"}.get(error.status, "BadRequest")
        return {
            "kind": "Status", "apiVersion": "v1", "status": "Failure", "code": error.status, "reason": reason,
            "message": str(error),
        }  # fmt: skip

    def routes(self) -> list[Route]:
        space = r"(?:/api/v1|/apis/[\w./-]+?)/namespaces/[\w-]+"
        return [
            (
                "GET",
                r"/openapi/v3",
                lambda **_: {
                    "paths": {_path(one): {"serverRelativeURL": f"/openapi/v3/{_path(one)}"} for one in _RESOURCES}
                },
            ),
            ("GET", r"/openapi/v3/(?:api/v1|apis/(batch/v1|jobset\.x-k8s\.io/v1alpha2))", _openapi),
            ("GET", r"/api", lambda **_: {"kind": "APIVersions", "versions": ["v1"]}),
            ("GET", r"/apis", lambda **_: _groups()),
            ("GET", r"/(?:api/v1|apis/(batch/v1|jobset\.x-k8s\.io/v1alpha2))", _resources),
            ("GET", rf"{space}/pods/([\w-]+)/log", lambda *_, **__: "".join(f"{line}\n" for line in self._log)),
            ("GET", rf"{space}/pods", self._pods),
            ("GET", rf"{space}/(\w+)", self._list),
            ("POST", rf"{space}/(\w+)", self._create),
            ("GET", rf"{space}/(\w+)/([\w-]+)", self._get),
            ("DELETE", rf"{space}/(\w+)/([\w-]+)", self._delete),
            ("POST", rf"{_CLUSTERS}/[\w-]+/nodePools", self._create_pool),
            ("GET", rf"{_CLUSTERS}/[\w-]+/nodePools/([\w-]+)", self._pool),
            ("DELETE", rf"{_CLUSTERS}/[\w-]+/nodePools/([\w-]+)", self._delete_pool),
            ("GET", r"/v1/projects/[^/]+/locations/[^/]+/operations/[\w-]+", lambda **_: _done("")),
        ]

    def _create(self, plural: str, *, body: dict[str, Any], query: Mapping[str, str]) -> dict[str, Any]:
        name = body["metadata"]["name"]
        wrong = next(kubernetes.complaints(body), None)
        if wrong:
            raise ApiError(
                422, f'{body["kind"]} "{name}" is invalid: {".".join(map(str, wrong.location))}: {wrong.what}'
            )
        if (plural, name) in self.objects:
            raise ApiError(409, f'{plural} "{name}" already exists')
        self.objects[plural, name] = body
        return body

    def _list(self, plural: str, *, body: Any, query: Mapping[str, str]) -> dict[str, Any]:
        found = [one for (kind, _), one in self.objects.items() if kind == plural]
        version, kind = next((v, kinds[plural]) for v, kinds in _RESOURCES.items() if plural in kinds)
        return {"kind": f"{kind}List", "apiVersion": version, "metadata": {}, "items": found}

    def _create_pool(self, *, body: dict[str, Any], query: Mapping[str, str]) -> dict[str, Any]:
        """A node pool; a slice of several machines is one pool with as many nodes as it has machines.

        Raises:
            ApiError: the machine type, the topology and the number of nodes do not go together.
        """
        pool = body["nodePool"]
        topology, machine = pool.get("placementPolicy", {}).get("tpuTopology"), pool["config"]["machineType"]
        if topology:
            tpu = machines.slice_on(machine, topology)
            if tpu is None or pool["initialNodeCount"] != tpu.hosts:
                raise ApiError(400, f"{pool['initialNodeCount']} nodes of {machine} for topology {topology}")
        self.pools[pool["name"]] = pool
        return _done(pool["name"])

    def _pool(self, name: str, *, body: Any, query: Mapping[str, str]) -> dict[str, Any]:
        if name not in self.pools:
            raise ApiError(404, f"Not found: node pool {name}")
        return self.pools[name] | {"status": "RUNNING"}

    def _delete_pool(self, name: str, *, body: Any, query: Mapping[str, str]) -> dict[str, Any]:
        self._pool(name, body=body, query=query)
        del self.pools[name]
        return _done(name)

    def _get(self, plural: str, name: str, *, body: Any, query: Mapping[str, str]) -> dict[str, Any]:
        if (plural, name) not in self.objects:
            raise ApiError(404, f'{plural} "{name}" not found')
        ended = self._looks >= len(PHASES)
        kind = "Completed" if plural == "jobsets" else "Complete"
        self._looks += 1
        conditions = [{"type": kind, "status": "True"}] if ended else []
        return self.objects[plural, name] | {"status": {"conditions": conditions}}

    def _delete(self, plural: str, name: str, *, body: Any, query: Mapping[str, str]) -> dict[str, Any]:
        if not self.objects.pop((plural, name), None):
            raise ApiError(404, f'{plural} "{name}" not found')
        return {"kind": "Status", "apiVersion": "v1", "status": "Success"}

    def _pods(self, *, body: Any, query: Mapping[str, str]) -> dict[str, Any]:
        """The pods of a Job or JobSet, by the label that its selector names."""
        match = re.fullmatch(r"(.+)=([\w-]+)", query.get("labelSelector", ""))
        if not match:
            return {"kind": "PodList", "apiVersion": "v1", "metadata": {}, "items": []}
        plural = "jobsets" if match[1] == gke.JOBSET_NAME else "jobs"
        owner = self.objects.get((plural, match[2]))
        phase = PHASES[min(self._looks, len(PHASES) - 1)]
        self._looks += 1
        items = [
            {
                "kind": "Pod",
                "apiVersion": "v1",
                "metadata": {"name": f"{match[2]}-{number}", "namespace": "default", "labels": {match[1]: match[2]}},
                "spec": {"containers": [{"name": "trainer", "image": "x"}]},
                "status": {"phase": phase},
            }
            for number in range(_pods_of(owner) if owner else 0)
        ]
        return {"kind": "PodList", "apiVersion": "v1", "metadata": {}, "items": items}


def _pods_of(owner: dict[str, Any]) -> int:
    """How many pods a Job or JobSet makes."""
    if owner["kind"] == "Job":
        return int(owner["spec"].get("completions", 1))
    return sum(
        one.get("replicas", 1) * int(one["template"]["spec"].get("completions", 1))
        for one in kubernetes.replicated_jobs(owner)
    )


def _done(target: str) -> dict[str, Any]:
    """An operation of the GKE API that has ended."""
    return {"name": "operation-1", "status": "DONE", "operationType": "CREATE_NODE_POOL", "targetLink": target}


def _groups() -> dict[str, Any]:
    groups = []
    for version in _RESOURCES:
        group, _, number = version.rpartition("/")
        if group:
            about = {"groupVersion": version, "version": number}
            groups.append({"name": group, "versions": [about], "preferredVersion": about})
    return {"kind": "APIGroupList", "apiVersion": "v1", "groups": groups}


def _resources(version: str | None = None, **_: object) -> dict[str, Any]:
    found = [
        {"name": plural, "singularName": kind.lower(), "namespaced": True, "kind": kind,
         "verbs": ["create", "delete", "get", "list", "watch"]}
        for plural, kind in _RESOURCES[version or "v1"].items()
    ]  # fmt: skip
    return {"kind": "APIResourceList", "apiVersion": "v1", "groupVersion": version or "v1", "resources": found}


def _path(version: str) -> str:
    return f"apis/{version}" if "/" in version else f"api/{version}"


def _openapi(version: str | None = None, **_: object) -> dict[str, Any]:
    """All that kubectl looks for before it creates: whether the server itself validates fields."""
    version = version or "v1"
    about = dict(zip(("group", "version"), version.rpartition("/")[::2], strict=True))
    paths: dict[str, Any] = {
        f"/{_path(version)}/namespaces/{{namespace}}/{plural}/{{name}}": {
            "patch": {
                "parameters": [{"name": "fieldValidation", "in": "query"}],
                "responses": {},
                "x-kubernetes-group-version-kind": about | {"kind": kind},
            }
        }
        for plural, kind in _RESOURCES[version].items()
    }
    return {"openapi": "3.0.0", "info": {"title": "Kubernetes", "version": "v1"}, "paths": paths}
