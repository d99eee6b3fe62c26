"""TPU nodes: the node that the environment names (R11), and the meaning of a response of the Cloud TPU API (R12.1).

Pure functions; `cloud` sends the requests, `wait` waits.
"""

from __future__ import annotations

from launcher.address import is_host, port_number
from launcher.errors import config_error
from launcher.settings import text
from launcher.tpu_node.xrt import NODE_PORT, parse_config

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Mapping

    from launcher.settings import Settings

GRPC = "grpc://"

# Frameworks that have no runtime for TPU nodes, and train without one (R11.4), with what the message says.
WITHOUT_NODES = {
    "torch": (
        "names a TPU node, which plain torch cannot use; use an image with torch_xla <= 2.0 or TensorFlow for the TPU"
    ),
    "jax": (
        "names a TPU node, which JAX cannot use; use a TPU VM, or an image with torch_xla <= 2.0 or TensorFlow, for "
        "the TPU"
    ),
}

# What to do with a response (R12.1).
READY = "ready"
WAIT = "wait"  # transient: retry
FORBIDDEN = "forbidden"  # 403 and similar: permanent at the third attempt (IAM changes take a while to propagate)
UNAUTHORIZED = "unauthorized"  # 401: a new token once, then like FORBIDDEN
NOT_FOUND = "not found"  # 404: the node may not be visible yet
LOST = "lost"  # this node will not become ready, but a new job may get another
UNUSABLE = "unusable"  # permanent

# state -> action. No state (= STATE_UNSPECIFIED) and unknown states are transient.
STATES = {
    "READY": READY,
    "PREEMPTED": LOST,  # `recoverable()` of TensorFlow's client is false for these two
    "TERMINATED": LOST,
    "STOPPED": UNUSABLE,
    "STOPPING": UNUSABLE,
    "DELETING": UNUSABLE,
    "HIDING": UNUSABLE,
    "HIDDEN": UNUSABLE,
}
STATUSES = {400: UNUSABLE, 401: UNAUTHORIZED, 404: NOT_FOUND, 408: WAIT, 409: WAIT, 425: WAIT, 429: WAIT}


class Endpoint:
    """The gRPC address of one TPU worker."""

    __slots__ = ("host", "port")

    def __init__(self, host: str, port: int) -> None:
        self.host = host
        self.port = port

    def __str__(self) -> str:
        return f"{self.host}:{self.port}"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Endpoint) and str(self) == str(other)

    def __hash__(self) -> int:
        return hash((self.host, self.port))


class Node:
    """The TPU node of a job.

    Attributes:
        source: the variable that names it.
        name: name of the node; "" if its addresses were given instead.
        endpoints: the addresses; [] if they must be requested.
        project, zone: from the environment; "" if they must be requested from the metadata server (R11.2).
        fallback_project, fallback_zone: used if the metadata server cannot be reached.
        had_scheme: every entry started with grpc://, so TensorFlow can use the variable unchanged.
        warnings: one line each.
    """

    __slots__ = (
        "endpoints",
        "fallback_project",
        "fallback_zone",
        "had_scheme",
        "name",
        "project",
        "source",
        "warnings",
        "zone",
    )

    def __init__(self, source: str) -> None:
        self.source = source
        self.name = ""
        self.endpoints: list[Endpoint] = []
        self.project = ""
        self.zone = ""
        self.fallback_project = ""
        self.fallback_zone = ""
        self.had_scheme = False
        self.warnings: list[str] = []

    def path(self, project: str, zone: str) -> str:
        """The node's full resource name."""
        return f"projects/{project}/locations/{zone}/nodes/{self.name}"


def parse_endpoints(value: str) -> list[Endpoint]:
    """The addresses in "grpc://1.2.3.4:8470,5.6.7.8"; the default port is 8470 (R11.1).

    Returns:
        [] if the value is not a list of addresses: then it is the name of a node.

    Raises:
        LaunchError: (2) for an entry that starts with grpc://, or follows an address, and is not an address.
    """
    entries = [entry.strip() for entry in value.split(",")]
    endpoints = []
    for entry in entries:
        has_scheme = entry.startswith(GRPC)
        address = entry[len(GRPC) :] if has_scheme else entry
        host, colon, port = address.partition(":")
        if not colon:
            port = str(NODE_PORT)
        usable = is_host(host) and port_number(port) and (has_scheme or colon or _is_ipv4(host))
        if usable:
            endpoints.append(Endpoint(host, int(port)))
        elif has_scheme or endpoints:
            hint = " (IPv6 addresses are not supported by XRT)" if "[" in entry else ""
            raise config_error(f"bad TPU address {entry[:80]!r}: write grpc://IP:PORT{hint}")
        else:
            return []
    return endpoints


def _is_ipv4(word: str) -> bool:
    parts = word.split(".")
    return len(parts) == 4 and all(part.isdigit() and len(part) < 4 and int(part) < 256 for part in parts)


def parse_tpu_config(value: str) -> dict[str, str]:
    """The members project, zone and tpu_node_name of a TPU_CONFIG; "" for a missing one (R7).

    Raises:
        LaunchError: (2) if it is not a JSON object, has no tpu_node_name, or a member is not a string. The message
            does not contain the value, which may include secrets.
    """
    import json

    try:
        data = json.loads(value)
    except (ValueError, RecursionError) as error:
        where = getattr(error, "pos", 0)
        raise config_error(
            f"TPU_CONFIG is not JSON (at character {where}): it must be "
            '{"project": ..., "zone": ..., "tpu_node_name": ...}'
        ) from None
    if not isinstance(data, dict):
        raise config_error("TPU_CONFIG is not a JSON object with project, zone and tpu_node_name")
    found = {}
    for key in ("project", "zone", "tpu_node_name"):
        member = data.get(key)
        if member is None:
            member = ""
        if not isinstance(member, str):
            raise config_error(f"TPU_CONFIG: {key} must be a string")
        found[key] = member.strip()
    if not found["tpu_node_name"]:
        raise config_error('TPU_CONFIG has no tpu_node_name: add "tpu_node_name": the name of the TPU node')
    return found


def node_from_env(env: Mapping[str, str], settings: Settings, source: str) -> Node:
    """The node that the variable `source` names, with its project and zone if the environment sets them (R11.2).

    Args:
        env: the environment.
        settings: LAUNCHER_TPU_PROJECT and LAUNCHER_TPU_ZONE take precedence.
        source: KUBE_GOOGLE_CLOUD_TPU_ENDPOINTS, TPU_NAME or TPU_CONFIG.

    Raises:
        LaunchError: (2) if the name, the project or the zone is invalid.
    """
    node = Node(source)
    tpu_config: dict[str, str] = {}
    if text(env, "TPU_CONFIG"):
        try:
            tpu_config = parse_tpu_config(text(env, "TPU_CONFIG"))
        except Exception as error:
            if source == "TPU_CONFIG":
                raise
            node.warnings.append(f"TPU_CONFIG ignored, since {source} names the node: {error}")
    if source == "TPU_CONFIG":
        node.name = tpu_config["tpu_node_name"]
    else:
        value = text(env, source)
        node.endpoints = parse_endpoints(value)
        node.had_scheme = all(entry.strip().startswith(GRPC) for entry in value.split(","))
        if node.endpoints:
            if not node.had_scheme:
                node.warnings.append(f"{source}={value} has no grpc:// prefix; assuming an address")
            return node
        node.name = value
    _split_resource_name(node)
    if not _is_word(node.name):
        if "," in node.name:
            raise config_error(
                f"{source} names several TPUs ({node.name[:80]!r}): Using multiple TPUs in a single session is not "
                "yet implemented; name one"
            )
        raise config_error(
            f"{source}: {node.name[:80]!r} is not the name of a TPU node; use letters, digits and dashes, or grpc://IP:PORT"
        )
    node.project = settings.project or node.project
    node.zone = settings.zone or node.zone
    if tpu_config.get("tpu_node_name") == node.name:
        node.project = node.project or tpu_config["project"]
        node.zone = node.zone or tpu_config["zone"]
    else:
        node.fallback_project = tpu_config.get("project", "")
        node.fallback_zone = tpu_config.get("zone", "")
    for what, word in (("project", node.project), ("zone", node.zone)):
        if word and not _is_word(word):
            raise config_error(f"the TPU node's {what} is {word[:80]!r}, which is not the name of a {what}")
    return node


def from_xrt(env: Mapping[str, str]) -> tuple[str, str, Node | None]:
    """Runtime, signal and node of XRT's variables (R2); "" without a runtime if they are incomplete.

    Raises:
        LaunchError: (2) if XRT_TPU_CONFIG is invalid.
    """
    devices = text(env, "XRT_DEVICE_MAP")
    if text(env, "XRT_TPU_CONFIG"):
        workers = parse_config(text(env, "XRT_TPU_CONFIG"))
        if "localservice" in workers[0][0]:
            return "tpu-local", "XRT_TPU_CONFIG", None
        node = Node("XRT_TPU_CONFIG")
        node.endpoints = [Endpoint(host, port) for _, _, host, port in workers]
        return "tpu-node", "XRT_TPU_CONFIG", node
    if devices and text(env, "XRT_WORKERS"):
        kind = "tpu-node" if "TPU:" in devices else "gpu" if "GPU:" in devices else "cpu"
        return kind, "XRT_DEVICE_MAP and XRT_WORKERS", None
    for kind in ("gpu", "cpu"):
        if text(env, f"{kind.upper()}_NUM_DEVICES"):
            return kind, f"{kind.upper()}_NUM_DEVICES", None
    return "", "", None


def _split_resource_name(node: Node) -> None:
    """Split a full resource name projects/P/locations/Z/nodes/N into project, zone and name."""
    parts = node.name.split("/")
    if len(parts) == 6 and parts[0::2] == ["projects", "locations", "nodes"]:
        node.project, node.zone, node.name = parts[1], parts[3], parts[5]


def _is_word(word: str) -> bool:
    """Whether a word is valid in the path of a URL. Project ids may be "domain.com:project"."""
    return is_host(word.replace(":", "")) and word.strip(".:") != ""


class Answer:
    """The meaning of one response of the API.

    Attributes:
        action: READY, WAIT, FORBIDDEN, UNAUTHORIZED, NOT_FOUND, LOST or UNUSABLE.
        reason: one line for the log; the same text as TensorFlow's client, for log alerts.
        endpoints: addresses of the TPU workers, in order; only with READY.
        health: health of the node; "" if the response has none.
        accelerator_type: such as "v3-8"; "" if the response has none.
    """

    __slots__ = ("accelerator_type", "action", "endpoints", "health", "reason")

    def __init__(
        self,
        action: str,
        reason: str,
        endpoints: list[Endpoint] | None = None,
        health: str = "",
        accelerator_type: str = "",
    ) -> None:
        self.action = action
        self.reason = reason
        self.endpoints = endpoints or []
        self.health = health
        self.accelerator_type = accelerator_type


def classify(name: str, status: int, body: bytes) -> Answer:
    """Classify one HTTP response to GET .../nodes/NAME (R12.1).

    Args:
        name: name of the node, for the message.
        status: HTTP status.
        body: any bytes.
    """
    data = _json_object(body)
    if status != 200:
        action = STATUSES.get(status, WAIT if status >= 500 else FORBIDDEN)
        message = _error_message(data)
        return Answer(action, f"HTTP {status} for TPU {name!r}" + (f": {message}" if message else ""))
    if data is None:
        return Answer(WAIT, f"the response for TPU {name!r} is not a JSON object")
    state = data.get("state")
    if not isinstance(state, str) or not state:
        state = "None"  # proto3 JSON omits STATE_UNSPECIFIED; TensorFlow's client prints None
    action = STATES.get(state, WAIT)
    if action in (LOST, UNUSABLE):
        return Answer(action, f'TPU "{name}" will not become ready; state: "{_plain(state)}"')
    if action == WAIT:
        return Answer(WAIT, f'TPU "{name}" is not yet ready; state: "{_plain(state)}"')
    endpoints = _endpoints(data)
    if not endpoints:
        return Answer(WAIT, f'TPU "{name}" is not yet ready; state: "READY" without a usable address')
    health = data.get("health")
    accelerator_type = data.get("acceleratorType")
    return Answer(
        READY,
        f'TPU "{name}" is ready',
        endpoints,
        _plain(health) if isinstance(health, str) else "",
        accelerator_type if isinstance(accelerator_type, str) and is_host(accelerator_type) else "",
    )


def _json_object(body: bytes) -> dict[str, object] | None:
    import json

    try:
        data = json.loads(body)
    except (ValueError, RecursionError):
        return None
    return data if isinstance(data, dict) else None


def _endpoints(data: dict[str, object]) -> list[Endpoint]:
    """All of networkEndpoints, else ipAddress and port; [] if an entry is unusable: not ready yet (R12.1)."""
    entries = data.get("networkEndpoints")
    if not isinstance(entries, list) or not entries:
        entries = [data]
    found = []
    for entry in entries:
        host = entry.get("ipAddress") if isinstance(entry, dict) else None
        port = port_number(str(entry.get("port", NODE_PORT))) if isinstance(entry, dict) else 0
        if not (isinstance(host, str) and is_host(host) and port):
            return []
        found.append(Endpoint(host, port))
    return found


def _error_message(data: dict[str, object] | None) -> str:
    error = data.get("error") if data else None
    message = error.get("message") if isinstance(error, dict) else None
    return _plain(message) if isinstance(message, str) else ""


def _plain(word: str) -> str:
    """Text from a server as part of one log line: no control characters, at most 300 characters."""
    return "".join(character if character.isprintable() else " " for character in word)[:300]
