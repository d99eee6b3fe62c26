"""A fake of a GKE cluster: what kubectl needs for jobs (create, get, follow logs, delete), and gcloud for node pools.

    with Kubernetes(log=["Epoch 1"]) as cluster:
        subprocess.run(["kubectl", "create", "-f", "job.yaml"], env=os.environ | cluster.environment(folder))

Objects are refused as by an API server with the JobSet operator: unknown, missing and mistyped fields, by the schemas
of kubernetes-validate and the structure of the JobSet CRD. None of Trainyard's own rules are used: tests compare them
with this fake. The pods of a Job or JobSet advance by one phase with each query.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from math import prod
from pathlib import Path
from typing import Any

import jsonschema
from referencing import Registry, Resource

from tests.fakes.jobset_schema import SCHEMA as JOBSET_SCHEMA
from tests.fakes.server import ApiError, Route, Server
from trainyard.common.third_party import archive

#: API of JobSets, and the label of their pods (https://jobset.sigs.k8s.io/docs/concepts/).
JOBSET_VERSION = "jobset.x-k8s.io/v1alpha2"
JOBSET_NAME = "jobset.sigs.k8s.io/jobset-name"

#: API of TrainJobs, of which the fake knows only what it needs: the runtime, and the number of nodes.
TRAIN_JOB_VERSION = "trainer.kubeflow.org/v1alpha1"
TRAIN_JOB_SCHEMA: dict[str, Any] = {
    "required": ["spec"],
    "properties": {"spec": {"required": ["runtimeRef"], "properties": {"runtimeRef": {"required": ["name"]}}}},
}

PHASES = ("Pending", "Running", "Succeeded")

#: Group and version -> plural -> kind.
_RESOURCES = {
    "v1": {"pods": "Pod", "services": "Service"},
    "batch/v1": {"jobs": "Job"},
    JOBSET_VERSION: {"jobsets": "JobSet"},
    TRAIN_JOB_VERSION: {"trainjobs": "TrainJob"},
}

#: The versions of groups, for addresses.
_GROUPS = "|".join(re.escape(one) for one in _RESOURCES if "/" in one)

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
        self._queries = 0

    def environment(self, folder: Path) -> dict[str, str]:
        """Variables that direct kubectl, with a configuration in ``folder``, and `gcloud container` to the fake."""
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
        found = {
            "kind": "Status", "apiVersion": "v1", "status": "Failure", "code": error.status, "reason": reason,
            "message": str(error),
        }  # fmt: skip
        if match := re.match(r'(\w+) "([^"]*)" is invalid', str(error)):
            causes = [{"field": field, "message": words} for field, words in error.violations]
            found["details"] = {"kind": match[1], "name": match[2], "causes": causes}
        return found

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
            ("GET", r"/openapi/v2", lambda **_: ""),  # which knows no kind
            ("GET", rf"/openapi/v3/(?:api/v1|apis/({_GROUPS}))", _openapi),
            ("GET", r"/api", lambda **_: {"kind": "APIVersions", "versions": ["v1"]}),
            ("GET", r"/apis", lambda **_: _groups()),
            ("GET", rf"/(?:api/v1|apis/({_GROUPS}))", _resources),
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
        metadata = body["metadata"]
        name = metadata.setdefault("name", f"{metadata.get('generateName')}abcde")
        refuse_invalid(body)
        if (plural, name) in self.objects:
            raise ApiError(409, f'{plural} "{name}" already exists')
        if query.get("dryRun") != "All":
            self.objects[plural, name] = body
        return body

    def _list(self, plural: str, *, body: Any, query: Mapping[str, str]) -> dict[str, Any]:
        found = [one for (kind, _), one in self.objects.items() if kind == plural]
        version, kind = next((v, kinds[plural]) for v, kinds in _RESOURCES.items() if plural in kinds)
        return {"kind": f"{kind}List", "apiVersion": version, "metadata": {}, "items": found}

    def _create_pool(self, *, body: dict[str, Any], query: Mapping[str, str]) -> dict[str, Any]:
        """A node pool; that of a multi-host TPU slice has a node for each of its machines.

        The number of chips of a machine ends its type: ct5lp-hightpu-4t has four
        (https://cloud.google.com/kubernetes-engine/docs/concepts/plan-tpus).

        Raises:
            ApiError: the machine type, the topology and the number of nodes do not match.
        """
        pool = body["nodePool"]
        topology, machine = pool.get("placementPolicy", {}).get("tpuTopology"), pool["config"]["machineType"]
        if topology:
            chips = prod(int(side) for side in topology.split("x"))
            match = re.fullmatch(r"(?:ct\w+|tpu7x)-\w+-(\d+)t", machine)
            if not match or chips != int(match[1]) * pool["initialNodeCount"]:
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
        ended = self._queries >= len(PHASES)
        kind = "Completed" if plural == "jobsets" else "Complete"
        self._queries += 1
        conditions = [{"type": kind, "status": "True"}] if ended else []
        return self.objects[plural, name] | {"status": {"conditions": conditions}}

    def _delete(self, plural: str, name: str, *, body: Any, query: Mapping[str, str]) -> dict[str, Any]:
        if not self.objects.pop((plural, name), None):
            raise ApiError(404, f'{plural} "{name}" not found')
        return {"kind": "Status", "apiVersion": "v1", "status": "Success"}

    def _pods(self, *, body: Any, query: Mapping[str, str]) -> dict[str, Any]:
        """The pods of a Job, JobSet or TrainJob, by the label that its selector names.

        A TrainJob has those of the JobSet of its name, which the fake does not create.
        """
        match = re.fullmatch(r"(.+)=([\w-]+)", query.get("labelSelector", ""))
        if not match:
            return {"kind": "PodList", "apiVersion": "v1", "metadata": {}, "items": []}
        owners = ("jobsets", "trainjobs") if match[1] == JOBSET_NAME else ("jobs",)
        owner = next((self.objects[key] for key in ((one, match[2]) for one in owners) if key in self.objects), None)
        space = owner["metadata"].get("namespace", "default") if owner else "default"
        phase = PHASES[min(self._queries, len(PHASES) - 1)]
        self._queries += 1
        items = [
            {
                "kind": "Pod",
                "apiVersion": "v1",
                "metadata": {"name": f"{match[2]}-{number}", "namespace": space, "labels": {match[1]: match[2]}},
                "spec": {"containers": [{"name": "trainer", "image": "x"}]},
                "status": {"phase": phase},
            }
            for number in range(_pods_of(owner) if owner else 0)
        ]
        return {"kind": "PodList", "apiVersion": "v1", "metadata": {}, "items": items}


@cache
def _validator(kind: str, version: str) -> Any:
    """A validator that refuses unknown fields, of a kind of Kubernetes' or of JobSets."""
    if (kind, version) == ("JobSet", JOBSET_VERSION):
        return jsonschema.Draft202012Validator(JOBSET_SCHEMA)
    if kind == "TrainJob":
        return jsonschema.Draft202012Validator(TRAIN_JOB_SCHEMA)
    group, _, number = version.rpartition("/")
    name = f"{kind.lower()}-{f'{group}-' if group else ''}{number}"
    schema, definitions = (
        json.loads(archive("kubernetes-validate").read(f"{file}.json")) for file in (name, "_definitions")
    )
    registry: Any = Resource.from_contents(definitions) @ (Resource.from_contents(schema) @ Registry())
    return jsonschema.Draft202012Validator(schema, registry=registry)


def _errors(body: Mapping[str, Any], kind: str, version: str, at: str = "") -> Iterator[tuple[int, str]]:
    """(HTTP status, message) of each error of an object, as an API server words it."""
    for error in _validator(kind, version).iter_errors(body):
        where = at + "".join(f"[{one}]" if isinstance(one, int) else f".{one}" for one in error.absolute_path)
        where = where.lstrip(".")
        if error.validator == "additionalProperties":
            for key in sorted(error.instance.keys() - error.schema.get("properties", {}).keys()):
                yield 400, f'strict decoding error: unknown field "{where}{"." if where else ""}{key}"'
        elif error.validator == "required":
            for key in sorted(set(error.validator_value) - set(error.instance)):
                yield 422, f"{where}{'.' if where else ''}{key}: Required value"
        else:
            yield 422, f"{where}: Invalid value: {error.message}"
    if kind == "JobSet" and isinstance(body.get("spec"), dict):
        for number, one in enumerate(body["spec"].get("replicatedJobs") or []):
            job = {"apiVersion": "batch/v1", "kind": "Job", **(one.get("template") or {})}
            yield from _errors(job, "Job", "batch/v1", f"spec.replicatedJobs[{number}].template")
    if kind == "Job" and not at:
        yield from ((422, message) for message in _job_errors(body.get("spec") or {}))


def _job_errors(spec: Mapping[str, Any]) -> Iterator[str]:
    """What https://kubernetes.io/docs/concepts/workloads/controllers/job/ requires beyond the schema."""
    policy = spec.get("template", {}).get("spec", {}).get("restartPolicy")
    if policy not in ("Never", "OnFailure"):
        yield 'spec.template.spec.restartPolicy: Required value: valid values: "OnFailure", "Never"'
    if "podFailurePolicy" in spec and policy != "Never":
        yield 'spec.template.spec.restartPolicy: Invalid value: only "Never" is supported with podFailurePolicy'
    if spec.get("completionMode") == "Indexed" and spec.get("completions") is None:
        yield "spec.completions: Required value: when completion mode is Indexed"


def refuse_invalid(body: Mapping[str, Any]) -> None:
    """Refuse an object that is not valid.

    Raises:
        ApiError: 400 for an unknown field or kind, 422 for other errors.
    """
    kind, version = str(body.get("kind")), str(body.get("apiVersion"))
    if kind not in _RESOURCES.get(version, {}).values():
        raise ApiError(400, f'no matches for kind "{kind}" in version "{version}"')
    name = body["metadata"]["name"]
    errors = sorted(_errors(body, kind, version))
    for message in (message for status, message in errors if status == 400):
        group = version.rpartition("/")[2]
        raise ApiError(400, f'{kind} in version "{group}" cannot be handled as a {kind}: {message}')
    if errors:
        causes = [message.partition(": ")[::2] for _, message in errors]
        raise ApiError(422, f'{kind} "{name}" is invalid: {errors[0][1]}', causes)


def _pods_of(owner: dict[str, Any]) -> int:
    """How many pods a Job, JobSet or TrainJob makes."""
    if owner["kind"] == "TrainJob":
        return int(owner["spec"].get("trainer", {}).get("numNodes", 1))
    if owner["kind"] == "Job":
        return int(owner["spec"].get("completions", 1))
    return sum(
        one.get("replicas", 1) * int(one["template"]["spec"].get("completions", 1))
        for one in owner["spec"]["replicatedJobs"]
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
