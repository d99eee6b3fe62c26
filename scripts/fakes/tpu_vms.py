"""A fake of the Cloud TPU API v2 on 127.0.0.1 whose TPU VMs are containers that take ssh.

Nodes, queued resources, their operations and guest attributes, and the project of the Compute Engine API, as far as
`gcloud compute tpus` (528) uses them.

    with TpuVms() as cloud:
        subprocess.run(["gcloud", "compute", "tpus", "tpu-vm", "create", ...], env=os.environ | cloud.environment(home))
        cloud.preempt("my-pod")

What the real server refuses is refused with its words: a zone that does not exist, an accelerator type that is not in
the zone, quota and capacity that ran out, a name that is taken.
"""

from __future__ import annotations

import json
import re
import threading
import time
import uuid
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

from scripts.cli import UserError
from scripts.fakes import tpu_workers
from scripts.fakes.server import gcloud_environment
from scripts.jobs import machines

PROJECT = "fake-project"
NUMBER = "123456789012"
TOKEN = "fake-token"
#: What google.rpc.Code calls them.
_STATUS = {400: "INVALID_ARGUMENT", 401: "UNAUTHENTICATED", 403: "PERMISSION_DENIED", 404: "NOT_FOUND",
           409: "ALREADY_EXISTS", 412: "FAILED_PRECONDITION", 429: "RESOURCE_EXHAUSTED"}  # fmt: skip
#: The code in an operation's error for a thing that ran out.
EXHAUSTED = 8


class ApiError(Exception):
    """An answer other than 200: HTTP status and the server's sentence."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


@dataclass
class Node:
    """A TPU VM: the API's resource, and the containers that are its hosts."""

    resource: dict[str, Any]
    workers: list[tpu_workers.Worker] = field(default_factory=list)
    described: threading.Event = field(default_factory=threading.Event)


class TpuVms:
    """The fake, in threads of this process.

    Attributes:
        requests: (method, path, JSON body or None) of every request so far.
        nodes: full name -> TPU VM.
        queue: full name -> resource of every queued resource.
        boot_seconds: what creating a TPU VM takes beyond the start of its containers.
        boots_unseen: a TPU VM may be READY before anybody has seen it CREATING; the real one takes minutes.
        queue_seconds: how long a queued resource waits for its turn.
        no_capacity: the next so many creations end with the zone's having no capacity left.
        no_quota: the next so many creations are refused for want of quota.
    """

    def __init__(self, *, images: Mapping[str, str] | None = None) -> None:
        """
        Args:
            images: image names -> local images that stand for them on the workers.
        """
        self._images = dict(images or {})
        self.requests: list[tuple[str, str, Any]] = []
        self.nodes: dict[str, Node] = {}
        self.queue: dict[str, dict[str, Any]] = {}
        self._operations: dict[str, dict[str, Any]] = {}
        self.boot_seconds = 0.0
        self.boots_unseen = True
        self.queue_seconds = 0.0
        self.no_capacity = 0
        self.no_quota = 0
        self._lock = threading.RLock()
        self._threads: list[threading.Thread] = []
        self._stack = ExitStack()

    def __enter__(self) -> TpuVms:
        fake = self
        tpu_workers.image()
        name = f"trainyard-vpc-{uuid.uuid4().hex[:8]}"
        self.network = self._stack.enter_context(tpu_workers.private_network(name))

        class Handler(_Handler):
            cloud = fake

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        threading.Thread(target=self._server.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()
        for thread in self._threads:
            thread.join(timeout=60)
        for node in self.nodes.values():
            tpu_workers.remove(node.workers)
        self._stack.close()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._server.server_address[1]}/"

    def environment(self, folder: Path) -> dict[str, str]:
        """Variables that send gcloud here; ``folder`` is its home."""
        endpoints = {"TPU": self.url, "COMPUTE": f"{self.url}compute/v1/"}
        return gcloud_environment(folder, endpoints, token=TOKEN, project=PROJECT)

    # --- what happens to TPUs, on request ----------------------------------------------------------------------------

    def node(self, name: str) -> Node:
        """A TPU VM by its short name."""
        return next(node for full, node in self.nodes.items() if full.endswith(f"/nodes/{name}"))

    def preempt(self, name: str) -> None:
        """Take a TPU VM away: its hosts are gone at once, and so is the request that was queued for it."""
        node = self.node(name)
        with self._lock:
            node.resource["state"] = "PREEMPTED"
            workers, node.workers = node.workers, []
            queued = self.queue.get(self._queued_name(node))
            if queued:
                queued["state"] = {"state": "SUSPENDED", "stateInitiator": "SERVICE"}
        tpu_workers.remove(workers)

    def maintain(self, name: str, seconds: float) -> None:
        """Begin a maintenance event that ends by itself."""
        resource = self.node(name).resource
        resource["health"] = "UNHEALTHY_MAINTENANCE"
        timer = threading.Timer(seconds, resource.update, [{"health": "HEALTHY"}])
        timer.daemon = True
        timer.start()

    def cut_off(self, name: str, worker: int) -> None:
        """Put a firewall between a worker and its fellows; it is still to be had by ssh."""
        self.network.disconnect(self.node(name).workers[worker].container)

    # --- Cloud TPU ---------------------------------------------------------------------------------------------------

    def _queued_name(self, node: Node) -> str:
        return str(node.resource.get("queuedResource", ""))

    def _check(self, parent: str, wanted: dict[str, Any]) -> machines.TpuSlice:
        """The slice that a request is for.

        Raises:
            ApiError: there is none such in the zone.
        """
        zone = parent.rpartition("/")[2]
        try:
            slice_ = machines.slice_of(wanted.get("acceleratorType", "v2-8"))
        except UserError:
            raise ApiError(400, f'Invalid accelerator type "{wanted["acceleratorType"]}"') from None
        if zone not in slice_.zones:
            raise ApiError(400, f'Accelerator type "{slice_.accelerator_type}" is not available in zone "{zone}".')
        if not wanted.get("runtimeVersion"):
            raise ApiError(400, "runtime_version must be set")
        if self.no_quota:
            self.no_quota -= 1
            limit = "TPUV5sLitepodPerProjectPerZoneForTPUAPI"
            raise ApiError(429, f"Quota limit '{limit}' has been exceeded. Limit: 0 in zone {zone}.")
        return slice_

    def create(self, parent: str, name: str, body: dict[str, Any]) -> dict[str, Any]:
        """Begin to create a TPU VM; the operation."""
        slice_ = self._check(parent, body)
        full = f"{parent}/nodes/{name}"
        if full in self.nodes:
            raise ApiError(409, f"Resource '{full}' already exists.")
        with self._lock:
            node = self._new_node(full, body, slice_)
        operation = self._operation(parent)
        self._start(self._boot, node, slice_, operation)
        return operation

    def _new_node(self, full: str, body: dict[str, Any], slice_: machines.TpuSlice) -> Node:
        resource = body | {
            "name": full,
            "id": str(uuid.uuid4().int % 2**62),
            "state": "CREATING",
            "apiVersion": "V2",
            "acceleratorType": slice_.accelerator_type,
            "metadata": dict(body.get("metadata") or {}),
        }
        self.nodes[full] = Node(resource)
        return self.nodes[full]

    def _boot(self, node: Node, slice_: machines.TpuSlice, operation: dict[str, Any]) -> None:
        """Have the hosts of a TPU VM running, and say so in its resource and in the operation."""
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
        time.sleep(self.boot_seconds)
        node.workers = tpu_workers.boot(host, zone, slice_, self.network, self._images, external=external)
        endpoints: list[dict[str, Any]] = [{"ipAddress": worker.internal, "port": 8470} for worker in node.workers]
        for endpoint, worker in zip(endpoints, node.workers, strict=True):
            endpoint["accessConfig"] = {"externalIp": worker.external} if external else {}
        self._authorize(node)
        if not self.boots_unseen:
            node.described.wait(timeout=60)
        node.resource.update(networkEndpoints=endpoints, state="READY", health="HEALTHY")
        kind = {"@type": "type.googleapis.com/google.cloud.tpu.v2.Node"}
        operation.update(done=True, response=kind | node.resource)

    def find(self, name: str) -> Node:
        if name not in self.nodes:
            raise ApiError(404, f"Resource '{name}' was not found")
        return self.nodes[name]

    def describe(self, name: str) -> dict[str, Any]:
        """The resource of a TPU VM as it is at this moment."""
        node = self.find(name)
        seen = dict(node.resource)
        node.described.set()
        return seen

    def delete(self, name: str) -> dict[str, Any]:
        node = self.find(name)
        if node.resource["state"] == "CREATING":
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

    def patch(self, name: str, mask: str, body: dict[str, Any]) -> dict[str, Any]:
        """Change members of a TPU VM; keys for ssh in its metadata reach the hosts."""
        node = self.find(name)
        for member in mask.split(","):
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

    def guest_attributes(self, name: str, worker_ids: list[str]) -> dict[str, Any]:
        """The ssh host keys and names of workers: of those asked for, or of all."""
        workers = self.find(name).workers
        wanted = [workers[int(index)] for index in worker_ids if index] or workers
        items = [
            [
                {"namespace": "hostkeys", "key": "ssh-ed25519", "value": worker.host_key},
                {"namespace": "guestInventory", "key": "hostname", "value": str(worker.container.name)},
            ]
            for worker in wanted
        ]
        return {"guestAttributes": [{"queryPath": "", "queryValue": {"items": each}} for each in items]}

    # --- queued resources --------------------------------------------------------------------------------------------

    def create_queued(self, parent: str, name: str, body: dict[str, Any]) -> dict[str, Any]:
        """Put a request for a TPU VM into the queue; the operation is done as soon as it is there."""
        full = f"{parent}/queuedResources/{name}"
        if full in self.queue:
            raise ApiError(409, f"Resource '{full}' already exists.")
        specs = body.get("tpu", {}).get("nodeSpec") or [{}]
        if len(specs) != 1 or not specs[0].get("nodeId"):
            raise ApiError(400, "this fake takes one node, by its name")
        slice_ = self._check(parent, specs[0]["node"])
        resource = body | {"name": full, "state": {"state": "WAITING_FOR_RESOURCES"}}
        self.queue[full] = resource
        self._start(self._serve, resource, slice_)
        kind = {"@type": "type.googleapis.com/google.cloud.tpu.v2.QueuedResource"}
        return self._operation(parent, done=True, response=kind | resource)

    def _serve(self, resource: dict[str, Any], slice_: machines.TpuSlice) -> None:
        """The request's turn comes: its TPU VM is made."""
        time.sleep(self.queue_seconds)
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

    def find_queued(self, name: str) -> dict[str, Any]:
        if name not in self.queue:
            raise ApiError(404, f"Resource '{name}' was not found")
        return self.queue[name]

    def delete_queued(self, name: str, *, force: bool) -> dict[str, Any]:
        state = self.find_queued(name)["state"]["state"]
        parent = name.partition("/queuedResources/")[0]
        if state == "PROVISIONING":
            raise ApiError(412, f"Queued resource {name} is in state PROVISIONING and cannot be deleted.")
        made = [full for full, node in self.nodes.items() if self._queued_name(node) == name]
        if made and not force:
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

    def operation(self, name: str) -> dict[str, Any]:
        if name not in self._operations:
            raise ApiError(404, f"operation {name} not found")
        return self._operations[name]

    def _start(self, action: Callable[..., None], *arguments: Any) -> None:
        thread = threading.Thread(target=action, args=arguments, daemon=True)
        self._threads.append(thread)
        thread.start()


class _Handler(BaseHTTPRequestHandler):
    """Paths of the APIs -> methods of the fake."""

    cloud: TpuVms
    protocol_version = "HTTP/1.1"

    def log_message(self, *_: object) -> None:
        pass

    def _answer(self, status: int, data: Any) -> None:
        body = json.dumps(data).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def _handle(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        path = unquote(urlsplit(self.path).path)
        query = {key: values[0] for key, values in parse_qs(urlsplit(self.path).query).items()}
        data = json.loads(body) if body else None
        self.cloud.requests.append((self.command, path, data))
        try:
            if self.headers.get("Authorization") != f"Bearer {TOKEN}":
                raise ApiError(401, "Request had invalid authentication credentials.")
            self._answer(200, self._route(path, query, data or {}))
        except ApiError as error:
            detail = {"code": error.status, "message": str(error), "status": _STATUS[error.status]}
            self._answer(error.status, {"error": detail})

    def _route(self, path: str, query: dict[str, str], body: dict[str, Any]) -> Any:
        cloud = self.cloud
        place, part = r"/v2/(projects/[^/]+/locations/[^/]+)", r"[^/:]+"
        force = query.get("force", "").lower() == "true"
        routes: list[tuple[str, str, Callable[..., Any]]] = [
            ("GET", rf"/compute/v1/projects/({part})", lambda project: {"name": project, "id": NUMBER}),
            ("POST", rf"{place}/nodes", lambda parent: cloud.create(parent, query["nodeId"], body)),
            ("GET", rf"{place}/nodes", lambda parent: {
                "nodes": [one.resource for name, one in cloud.nodes.items() if name.startswith(f"{parent}/nodes/")]}),
            ("GET", rf"/v2/(projects/.+/nodes/{part})", cloud.describe),
            ("DELETE", rf"/v2/(projects/.+/nodes/{part})", cloud.delete),
            ("PATCH", rf"/v2/(projects/.+/nodes/{part})", lambda name: cloud.patch(name, query["updateMask"], body)),
            ("POST", rf"/v2/(projects/.+/nodes/{part}):getGuestAttributes",
             lambda name: cloud.guest_attributes(name, body.get("workerIds") or [])),
            ("POST", rf"{place}:generateServiceIdentity",
             lambda parent: {"identity": {"email": f"service-{NUMBER}@cloud-tpu.iam.gserviceaccount.com"}}),
            ("POST", rf"{place}/queuedResources",
             lambda parent: cloud.create_queued(parent, query["queuedResourceId"], body)),
            ("GET", rf"/v2/(projects/.+/queuedResources/{part})", cloud.find_queued),
            ("DELETE", rf"/v2/(projects/.+/queuedResources/{part})",
             lambda name: cloud.delete_queued(name, force=force)),
            ("GET", rf"/v2/(projects/.+/operations/{part})", cloud.operation),
        ]  # fmt: skip
        asked = re.match(r"/v2/projects/[^/]+/locations/([^/:]+)", path)
        if asked and asked[1] not in {zone for each in machines.slices().values() for zone in each.zones}:
            raise ApiError(403, f"Permission denied on 'locations/{asked[1]}' (or it may not exist).")
        for wanted, pattern, action in routes:
            match = re.fullmatch(pattern, path)
            if match and wanted == self.command:
                return action(*match.groups())
        raise ApiError(404, f"{self.command} {path} is not part of this fake")

    do_GET = do_POST = do_PATCH = do_DELETE = _handle
