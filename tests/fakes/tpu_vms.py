"""A fake of the Cloud TPU API v2 on 127.0.0.1 whose TPU VMs are containers with ssh.

It has nodes, queued resources, their operations and guest attributes, and the project of the Compute Engine API, as far
as `gcloud compute tpus` (528) uses them.

    with TpuVms() as cloud:
        subprocess.run(["gcloud", "compute", "tpus", "tpu-vm", "create", ...], env=os.environ | cloud.environment(home))
        cloud.preempt("my-pod")

It rejects what the service rejects, with the service's messages: an unknown zone, an accelerator type or runtime
version that the zone does not have, exhausted quota and capacity, and a name in use. :mod:`tests.fakes.tpu_types` has
the types.
"""

from __future__ import annotations

import re
import threading
import uuid
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

from tests.fakes import tpu_types, tpu_workers
from tests.fakes.server import ApiError, Route, Server, gcloud_environment
from tests.fakes.tpu_types import TpuType

PROJECT = "fake-project"
NUMBER = "123456789012"
TOKEN = "fake-token"
#: google.rpc.Code.RESOURCE_EXHAUSTED, in the error of an operation.
EXHAUSTED = 8
#: Seconds after which a TPU VM no longer waits for an event that a test set up: no event takes that long.
LONGEST_WAIT = 300


@dataclass
class Node:
    """A TPU VM: the API's resource and the containers that are its hosts.

    Attributes:
        described, refused: set when it was described, and when a request to delete it was refused; it becomes READY
            after both.
    """

    resource: dict[str, Any]
    workers: list[tpu_workers.Worker] = field(default_factory=list)
    described: threading.Event = field(default_factory=threading.Event)
    refused: threading.Event = field(default_factory=threading.Event)


class TpuVms(Server):
    """The fake, in threads of this process.

    Attributes:
        nodes: full name -> TPU VM.
        queue: full name -> resource of every queued resource.
        boots_unseen: False keeps a new TPU VM in the state CREATING until it is described once.
        boots_undeleted: False keeps a new TPU VM in the state CREATING until a request to delete it is refused once.
        provisions: while it is cleared, queued resources stay in the state WAITING_FOR_RESOURCES.
        no_capacity: how many of the next creations fail because the zone has no capacity.
        no_quota: how many of the next creations fail because the quota is exhausted.
    """

    token = TOKEN

    def __init__(self, *, images: Mapping[str, str] | None = None) -> None:
        """
        Args:
            images: image name -> local image to use for it on the workers.
        """
        super().__init__()
        self._images = dict(images or {})
        self.nodes: dict[str, Node] = {}
        self.queue: dict[str, dict[str, Any]] = {}
        self._operations: dict[str, dict[str, Any]] = {}
        self.boots_unseen = True
        self.boots_undeleted = True
        self.provisions = threading.Event()
        self.provisions.set()
        self.no_capacity = 0
        self.no_quota = 0
        self._lock = threading.RLock()
        self._threads: list[threading.Thread] = []
        self._stack = ExitStack()

    def __enter__(self) -> Self:
        tpu_workers.image()
        name = f"trainyard-vpc-{uuid.uuid4().hex[:8]}"
        self.network = self._stack.enter_context(tpu_workers.private_network(name))
        return super().__enter__()

    def __exit__(self, *error: object) -> None:
        super().__exit__(*error)
        for thread in self._threads:
            thread.join(timeout=60)
        for node in self.nodes.values():
            tpu_workers.remove(node.workers)
        self._stack.close()

    def environment(self, folder: Path) -> dict[str, str]:
        """Variables that make gcloud call this fake; ``folder`` is its home."""
        endpoints = {"TPU": self.url, "COMPUTE": f"{self.url}compute/v1/"}
        return gcloud_environment(folder, endpoints, token=TOKEN, project=PROJECT)

    def admit(self, path: str) -> None:
        """The API answers for an unknown zone as for one without permission.

        Raises:
            ApiError: (403) the zone is unknown.
        """
        zone = re.match(r"/v2/projects/[^/]+/locations/([^/:]+)", path)
        if zone and zone[1] not in tpu_types.ZONES:
            raise ApiError(403, f"Permission denied on 'locations/{zone[1]}' (or it may not exist).")

    def routes(self) -> list[Route]:
        place, part = r"/v2/(projects/[^/]+/locations/[^/]+)", r"[^/:]+"
        node, queued = rf"/v2/(projects/.+/nodes/{part})", rf"/v2/(projects/.+/queuedResources/{part})"
        agent = f"service-{NUMBER}@cloud-tpu.iam.gserviceaccount.com"
        return [
            ("GET", rf"/compute/v1/projects/({part})", lambda project, **_: {"name": project, "id": NUMBER}),
            ("POST", rf"{place}/nodes", self._create),
            ("GET", rf"{place}/nodes", self._list),
            ("GET", node, self._describe),
            ("DELETE", node, self._delete),
            ("PATCH", node, self._patch),
            ("POST", rf"{node}:getGuestAttributes", self._guest_attributes),
            ("POST", rf"{place}:generateServiceIdentity", lambda *_, **__: {"identity": {"email": agent}}),
            ("POST", rf"{place}/queuedResources", self._create_queued),
            ("GET", queued, self._find_queued),
            ("DELETE", queued, self._delete_queued),
            ("GET", rf"/v2/(projects/.+/operations/{part})", self._find_operation),
        ]

    # --- events that tests cause --------------------------------------------------------------------------------------

    def node(self, name: str) -> Node:
        """A TPU VM by its short name."""
        return next(node for full, node in self.nodes.items() if full.endswith(f"/nodes/{name}"))

    def preempt(self, name: str) -> None:
        """Preempt a TPU VM: its hosts stop and its queued resource is suspended."""
        node = self.node(name)
        with self._lock:
            node.resource["state"] = "PREEMPTED"
            workers, node.workers = node.workers, []
            queued = self.queue.get(self._queued_name(node))
            if queued:
                queued["state"] = {"state": "SUSPENDED", "stateInitiator": "SERVICE"}
        tpu_workers.remove(workers)

    def start_maintenance(self, name: str) -> None:
        """Start a maintenance event, which lasts until :meth:`end_maintenance`."""
        self.node(name).resource["health"] = "UNHEALTHY_MAINTENANCE"

    def end_maintenance(self, name: str) -> None:
        """End a maintenance event: the TPU VM is healthy again."""
        self.node(name).resource["health"] = "HEALTHY"

    def cut_off(self, name: str, worker: int) -> None:
        """Block a worker's internal address; ssh to its external address still works."""
        self.network.disconnect(self.node(name).workers[worker].container)

    # --- Cloud TPU ---------------------------------------------------------------------------------------------------

    def _queued_name(self, node: Node) -> str:
        return str(node.resource.get("queuedResource", ""))

    def _check(self, parent: str, wanted: dict[str, Any]) -> TpuType:
        """The accelerator type of a request.

        Raises:
            ApiError: the zone does not have it, the runtime version is invalid, or the quota is exhausted.
        """
        zone = parent.rpartition("/")[2]
        slice_ = tpu_types.TYPES.get(wanted.get("acceleratorType", ""))
        if slice_ is None:
            raise ApiError(400, f'Invalid accelerator type "{wanted.get("acceleratorType", "")}"')
        if zone not in slice_.zones:
            raise ApiError(400, f'Accelerator type "{slice_.accelerator_type}" is not available in zone "{zone}".')
        if not wanted.get("runtimeVersion"):
            raise ApiError(400, "runtime_version must be set")
        if wanted["runtimeVersion"] not in slice_.runtime_versions:
            raise ApiError(400, f'Invalid runtime version "{wanted["runtimeVersion"]}"')
        if self.no_quota:
            self.no_quota -= 1
            limit = "TPUV5sLitepodPerProjectPerZoneForTPUAPI"
            raise ApiError(429, f"Quota limit '{limit}' has been exceeded. Limit: 0 in zone {zone}.")
        return slice_

    def _create(self, parent: str, *, body: dict[str, Any], query: Mapping[str, str]) -> dict[str, Any]:
        """Start to create a TPU VM; the operation."""
        slice_ = self._check(parent, body)
        full = f"{parent}/nodes/{query['nodeId']}"
        if full in self.nodes:
            raise ApiError(409, f"Resource '{full}' already exists.")
        with self._lock:
            node = self._new_node(full, body, slice_)
        operation = self._operation(parent)
        self._start(self._boot, node, slice_, operation)
        return operation

    def _new_node(self, full: str, body: dict[str, Any], slice_: TpuType) -> Node:
        resource = body | {
            "name": full,
            "id": str(uuid.uuid4().int % 2**62),
            "state": "CREATING",
            "apiVersion": "V2",
            "acceleratorType": slice_.accelerator_type,
            "metadata": dict(body.get("metadata") or {}),
        }
        node = self.nodes[full] = Node(resource)
        if self.boots_unseen:
            node.described.set()
        if self.boots_undeleted:
            node.refused.set()
        return node

    def _boot(self, node: Node, slice_: TpuType, operation: dict[str, Any]) -> None:
        """Start the hosts of a TPU VM and update its resource and the operation."""
        name, zone = node.resource["name"], node.resource["name"].split("/")[3]
        if self.no_capacity:
            self.no_capacity -= 1
            del self.nodes[name]
            words = (
                f'There is no more capacity in the zone "{zone}"; you can try in another zone where Cloud TPU Nodes '
                "are offered (see https://cloud.google.com/tpu/docs/regions) [EID: 0x1234]"
            )
            operation.update(done=True, error={"code": EXHAUSTED, "message": words})
            return
        external = bool((node.resource.get("networkConfig") or {}).get("enableExternalIps", True))
        host = f"t1v-n-{uuid.uuid4().hex[:8]}"
        node.workers = tpu_workers.boot(host, zone, slice_, self.network, self._images, external=external)
        endpoints: list[dict[str, Any]] = [{"ipAddress": worker.internal, "port": 8470} for worker in node.workers]
        for endpoint, worker in zip(endpoints, node.workers, strict=True):
            endpoint["accessConfig"] = {"externalIp": worker.external} if external else {}
        self._authorize(node)
        node.described.wait(timeout=LONGEST_WAIT)
        node.refused.wait(timeout=LONGEST_WAIT)
        node.resource.update(networkEndpoints=endpoints, state="READY", health="HEALTHY")
        kind = {"@type": "type.googleapis.com/google.cloud.tpu.v2.Node"}
        operation.update(done=True, response=kind | node.resource)

    def _list(self, parent: str, **_: Any) -> dict[str, Any]:
        return {"nodes": [node.resource for name, node in self.nodes.items() if name.startswith(f"{parent}/nodes/")]}

    def _find(self, name: str) -> Node:
        if name not in self.nodes:
            raise ApiError(404, f"Resource '{name}' was not found")
        return self.nodes[name]

    def _describe(self, name: str, **_: Any) -> dict[str, Any]:
        """The current resource of a TPU VM."""
        node = self._find(name)
        seen = dict(node.resource)
        node.described.set()
        return seen

    def _delete(self, name: str, **_: Any) -> dict[str, Any]:
        node = self._find(name)
        if node.resource["state"] == "CREATING":
            node.refused.set()
            raise ApiError(412, f"Node {name} is in state CREATING and cannot be deleted.")
        queued = self._queued_name(node)
        if queued in self.queue:
            raise ApiError(412, f"Node {name} belongs to {queued}: delete that.")
        operation = self._operation(name.partition("/nodes/")[0])
        self._start(self._remove, name, operation)
        return operation

    def _remove(self, name: str, operation: dict[str, Any]) -> None:
        node = self.nodes[name]
        node.resource["state"] = "DELETING"
        tpu_workers.remove(node.workers)
        self.nodes.pop(name, None)
        operation.update(done=True, response={"@type": "type.googleapis.com/google.protobuf.Empty"})

    def _patch(self, name: str, *, body: dict[str, Any], query: Mapping[str, str]) -> dict[str, Any]:
        """Change fields of a TPU VM; ssh keys in its metadata are added to the hosts."""
        node = self._find(name)
        for member in query["updateMask"].split(","):
            node.resource[member] = body.get(member)
        self._authorize(node)
        kind = {"@type": "type.googleapis.com/google.cloud.tpu.v2.Node"}
        return self._operation(name.partition("/nodes/")[0], done=True, response=kind | node.resource)

    def _authorize(self, node: Node) -> None:
        keys = (node.resource.get("metadata") or {}).get("ssh-keys", "")
        for line in keys.splitlines():
            user, _, key = line.partition(":")
            for worker in node.workers if key else []:
                worker.authorize(user, key)

    def _guest_attributes(self, name: str, *, body: dict[str, Any], query: Mapping[str, str]) -> dict[str, Any]:
        """The ssh host keys and names of the workers in ``workerIds``, or of all."""
        workers = self._find(name).workers
        wanted = [workers[int(index)] for index in body.get("workerIds") or [] if index] or workers
        items = [
            [
                {"namespace": "hostkeys", "key": "ssh-ed25519", "value": worker.host_key},
                {"namespace": "guestInventory", "key": "hostname", "value": worker.host},
            ]
            for worker in wanted
        ]
        return {"guestAttributes": [{"queryPath": "", "queryValue": {"items": each}} for each in items]}

    # --- queued resources --------------------------------------------------------------------------------------------

    def _create_queued(self, parent: str, *, body: dict[str, Any], query: Mapping[str, str]) -> dict[str, Any]:
        """Queue a request for a TPU VM; the operation is done at once."""
        full = f"{parent}/queuedResources/{query['queuedResourceId']}"
        if full in self.queue:
            raise ApiError(409, f"Resource '{full}' already exists.")
        specs = body.get("tpu", {}).get("nodeSpec") or [{}]
        if len(specs) != 1 or not specs[0].get("nodeId"):
            raise ApiError(400, "this fake supports one node with a nodeId")
        slice_ = self._check(parent, specs[0]["node"])
        resource = body | {"name": full, "state": {"state": "WAITING_FOR_RESOURCES"}}
        self.queue[full] = resource
        self._start(self._serve, resource, slice_)
        kind = {"@type": "type.googleapis.com/google.cloud.tpu.v2.QueuedResource"}
        return self._operation(parent, done=True, response=kind | resource)

    def _serve(self, resource: dict[str, Any], slice_: TpuType) -> None:
        """Provision the TPU VM of a request."""
        self.provisions.wait(timeout=LONGEST_WAIT)
        if resource["name"] not in self.queue:
            return
        spec = resource["tpu"]["nodeSpec"][0]
        resource["state"] = {"state": "PROVISIONING"}
        parent = resource["name"].partition("/queuedResources/")[0]
        full = f"{parent}/nodes/{spec['nodeId']}"
        with self._lock:
            node = self._new_node(full, spec["node"] | {"queuedResource": resource["name"]}, slice_)
        operation: dict[str, Any] = {}
        self._boot(node, slice_, operation)
        if "error" in operation:
            resource["state"] = {"state": "FAILED", "failedData": {"error": operation["error"]}}
        else:
            resource["state"] = {"state": "ACTIVE"}

    def _find_queued(self, name: str, **_: Any) -> dict[str, Any]:
        if name not in self.queue:
            raise ApiError(404, f"Resource '{name}' was not found")
        return self.queue[name]

    def _delete_queued(self, name: str, *, body: Any, query: Mapping[str, str]) -> dict[str, Any]:
        state = self._find_queued(name)["state"]["state"]
        parent = name.partition("/queuedResources/")[0]
        if state == "PROVISIONING":
            raise ApiError(412, f"Queued resource {name} is in state PROVISIONING and cannot be deleted.")
        made = [full for full, node in self.nodes.items() if self._queued_name(node) == name]
        if made and query.get("force", "").lower() != "true":
            raise ApiError(412, f"Queued resource {name} has nodes: delete them first, or use force.")
        operation = self._operation(parent)

        def remove() -> None:
            self.queue.pop(name, None)
            for full in made:
                self._remove(full, {})
            operation.update(done=True, response={"@type": "type.googleapis.com/google.protobuf.Empty"})

        self._start(remove)
        return operation

    # --- operations --------------------------------------------------------------------------------------------------

    def _operation(self, parent: str, **more: Any) -> dict[str, Any]:
        name = f"{parent}/operations/operation-{uuid.uuid4().hex[:12]}"
        kind = {"@type": "type.googleapis.com/google.cloud.tpu.v2.OperationMetadata"}
        self._operations[name] = {"name": name, "metadata": kind} | more
        return self._operations[name]

    def _find_operation(self, name: str, **_: Any) -> dict[str, Any]:
        if name not in self._operations:
            raise ApiError(404, f"operation {name} not found")
        return self._operations[name]

    def _start(self, action: Callable[..., None], *arguments: Any) -> None:
        thread = threading.Thread(target=action, args=arguments, daemon=True)
        self._threads.append(thread)
        thread.start()
