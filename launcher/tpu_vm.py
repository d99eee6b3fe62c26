"""TPUs attached to this host: accelerator types, the hosts of a slice, and the variables of PJRT (R3, R4)."""

from __future__ import annotations

from launcher.address import is_address, is_host, is_ipv6, without_port
from launcher.errors import config_error
from launcher.host import regular
from launcher.settings import integer, text

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Mapping

MAX_FILE = 1 << 20
NO = ("", "0", "false", "no", "off")  # values of a switch that mean no (R10.2)

# Accelerator type -> TPU_HOST_BOUNDS: hosts of a slice along x, y, z, with four chips each. v2 and v3 from torch_xla's
# table; v4 is the topology of the chips divided by a host's 2x2x1 (R3.3).
HOST_BOUNDS = {
    "v2-8": "1,1,1",
    "v2-32": "2,2,1",
    "v2-128": "4,4,1",
    "v2-256": "4,8,1",
    "v2-512": "8,8,1",
    "v3-8": "1,1,1",
    "v3-32": "2,2,1",
    "v3-64": "2,4,1",
    "v3-128": "4,4,1",
    "v3-256": "4,8,1",
    "v3-512": "8,8,1",
    "v3-1024": "8,16,1",
    "v3-2048": "16,16,1",
    "v4-8": "1,1,1",
    "v4-16": "1,1,2",
    "v4-32": "1,1,4",
    "v4-64": "1,2,4",
    "v4-128": "2,2,4",
    "v4-256": "2,2,8",
    "v4-512": "2,4,8",
    "v4-1024": "4,4,8",
}


class Slice:
    """The hosts of a TPU slice, as far as they are known.

    Attributes:
        source: the variable, or other source, of the list of workers.
        accelerator_type: such as "v4-16"; "" if unknown.
        workers: host names or addresses in order of worker id, without ports; [] if unknown.
        worker_id: number of this host; None if unknown.
        process_bounds: hosts along x, y, z, such as "1,1,2"; "" if unknown.
        chips_bounds: chips of one host along x, y, z; "" if unknown.
        plain_names: `worker-network-endpoints` had a format that torch_xla 2.9 cannot read (R4.3).
        megascale: MEGASCALE_* variables of several slices that the metadata server has in place of the environment.
    """

    __slots__ = (
        "accelerator_type",
        "chips_bounds",
        "megascale",
        "plain_names",
        "process_bounds",
        "source",
        "worker_id",
        "workers",
    )

    def __init__(self, source: str) -> None:
        self.source = source
        self.accelerator_type = ""
        self.workers: list[str] = []
        self.worker_id: int | None = None
        self.process_bounds = ""
        self.chips_bounds = ""
        self.plain_names = False
        self.megascale: dict[str, str] = {}

    @property
    def hosts(self) -> int:
        """Number of hosts, from the list of workers, else from the bounds (R3.3)."""
        if self.workers:
            return len(self.workers)
        bounds = self.process_bounds or HOST_BOUNDS.get(self.accelerator_type, "")
        return volume(bounds) or 1


def volume(bounds: str) -> int:
    """Product of "2,2,1"; 0 if it is not a list of at most five whole numbers; R3.7 has four."""
    product = 1
    for word in bounds.split(",", 4):
        if not (word.strip().isascii() and word.strip().isdigit() and len(word.strip()) < 6):
            return 0
        product *= int(word)
    return product


def generation(accelerator_type: str) -> int:
    """The TPU generation of "v3-8", "v5litepod-16" or "tpu7x-8": 3, 5, 7.

    The form is `^(?:v|tpu)\\d[A-Za-z]{0,7}-\\d+$` (R3.2).

    Raises:
        LaunchError: (2) for anything else.
    """
    word, dash, count = accelerator_type.rpartition("-")
    for prefix in ("tpu", "v"):
        rest = word[len(prefix) :]
        if (
            word.startswith(prefix)
            and dash
            and _is_number(count)
            and _is_number(rest[:1])
            and len(rest) <= 8
            and (rest[1:] == "" or (rest[1:].isascii() and rest[1:].isalpha()))
        ):
            return int(rest[0])
    raise config_error(
        f"Failed to parse TPU version from metadata: TPU_ACCELERATOR_TYPE is {accelerator_type[:60]!r}; "
        "use a type such as v4-8, v5litepod-16 or tpu7x-8, not a GKE node label or a machine type"
    )


def _is_number(word: str) -> bool:
    return word.isascii() and word.isdigit()


def worker_list(env: Mapping[str, str]) -> tuple[str, list[str]]:
    """The list of workers with ports, and the variable that it comes from (R3.1).

    Returns:
        the variable and the workers; ("", []) if none of the variables is set.

    Raises:
        LaunchError: (2) if the file of TPU_PROCESS_ADDRESSES_PATH cannot be read or is empty; as in JAX, there is no
            fallback to another variable.
    """
    path = text(env, "TPU_PROCESS_ADDRESSES_PATH")
    if path:
        try:
            with open(path, "rb", opener=regular) as file:
                value = file.read(MAX_FILE).decode("utf-8", "replace").strip()
        except (OSError, ValueError) as error:
            reason = getattr(error, "strerror", None) or "not a path"
            raise config_error(
                f"Failed to read TPU process addresses file {path[:200]!r} (TPU_PROCESS_ADDRESSES_PATH): {reason}"
            ) from None
        if not value:
            raise config_error(f"TPU process addresses file is empty: {path[:200]!r} (TPU_PROCESS_ADDRESSES_PATH)")
        return "TPU_PROCESS_ADDRESSES_PATH", _words(value)
    for name in ("TPU_PROCESS_ADDRESSES", "TPU_WORKER_HOSTNAMES"):
        if text(env, name):
            return name, _words(text(env, name))
    return "", []


def _words(value: str) -> list[str]:
    return [word.strip() for word in value.split(",") if word.strip()]


def _without_ports(addresses: list[str]) -> list[str]:
    """The hosts of a list of host:port, each once: several processes of one host have the same address."""
    hosts: list[str] = []
    for address in addresses:
        host = without_port(address) or address
        if host not in hosts:
            hosts.append(host)
    return hosts


def slice_from_env(env: Mapping[str, str]) -> Slice:
    """The slice that the variables of GKE's device plugin, its webhook or a JobSet describe (R3).

    Raises:
        LaunchError: (2) for an invalid accelerator type (R3.2), a v2 or v3 type without known bounds (R3.3), or a slice
            of several hosts without the number of this host (R3.4).
    """
    source, addresses = worker_list(env)
    found = Slice(source or "TPU_ACCELERATOR_TYPE")
    found.workers = _without_ports(addresses)
    for worker in found.workers:
        if not is_address(worker):
            raise config_error(f"{source}: {worker[:80]!r} is not a host name or an address")
    found.accelerator_type = text(env, "TPU_ACCELERATOR_TYPE")
    # torch_xla's order (R3.3); GKE's device plugin also sets the names without the TPU_ prefix.
    found.process_bounds = _first(env, "TPU_PROCESS_BOUNDS", "TPU_HOST_BOUNDS", "HOST_BOUNDS")
    found.chips_bounds = _first(
        env, "TPU_CHIPS_PER_PROCESS_BOUNDS", "TPU_CHIPS_PER_HOST_BOUNDS", "CHIPS_PER_HOST_BOUNDS"
    )
    if found.accelerator_type:
        number = generation(found.accelerator_type)
        if number in (2, 3) and not found.process_bounds and found.accelerator_type not in HOST_BOUNDS:
            known = ", ".join(name for name in HOST_BOUNDS if name.startswith(f"v{number}-"))
            raise config_error(
                f"TPU_ACCELERATOR_TYPE is {found.accelerator_type!r}: torch_xla has no v{number} slice of this type "
                f"({known}); correct it, or set TPU_HOST_BOUNDS"
            )
    found.worker_id = _worker_id(env, found.hosts)
    if found.worker_id is None and found.hosts > 1:
        raise config_error(
            f"a slice of {found.hosts} hosts without TPU_WORKER_ID: set it to this host's number, 0 to "
            f"{found.hosts - 1} (on GKE a webhook sets it; JOB_COMPLETION_INDEX has the same value)"
        )
    return found


def _worker_id(env: Mapping[str, str], hosts: int) -> int | None:
    """The number of this host: CLOUD_TPU_TASK_ID, else TPU_WORKER_ID; None if neither is set (R3.4).

    torch_xla sets CLOUD_TPU_TASK_ID for each process that it starts, so a number that is not below the number of hosts
    is the number of a process and is ignored.
    """
    task = text(env, "CLOUD_TPU_TASK_ID")
    if task:
        number = integer("CLOUD_TPU_TASK_ID", task, 0, 99999)
        if number < hosts or hosts == 1:
            return number
    word = text(env, "TPU_WORKER_ID")
    if not word:
        return None
    number = integer("TPU_WORKER_ID", word, 0, 99999)
    if number >= hosts and hosts > 1:
        raise config_error(f"TPU_WORKER_ID is {word}, but the slice has {hosts} workers (0 to {hosts - 1})")
    return number


def skips_metadata(env: Mapping[str, str]) -> bool:
    """Whether TPU_SKIP_MDS_QUERY is set to a value that means yes (R3.8)."""
    return text(env, "TPU_SKIP_MDS_QUERY").lower() not in NO


def _first(env: Mapping[str, str], *names: str) -> str:
    for name in names:
        if text(env, name):
            return text(env, name)
    return ""


def missing_variables(env: Mapping[str, str], found: Slice) -> dict[str, str]:
    """The variables that torch_xla 2.9 needs and GKE did not set (R3.5).

    A worker id on a single host (the device plugin sets none for tpu7x), host names if only addresses are set, and
    TPU_SKIP_MDS_QUERY, because the metadata server of a pod has no TPU attributes.
    """
    exports = {}
    if found.workers and found.accelerator_type:
        exports["TPU_SKIP_MDS_QUERY"] = "1"
    if found.worker_id is None:
        exports["TPU_WORKER_ID"] = "0"
    if found.workers and not text(env, "TPU_WORKER_HOSTNAMES"):
        exports["TPU_WORKER_HOSTNAMES"] = ",".join(found.workers)
    if not text(env, "TPU_WORKER_HOSTNAMES") and not found.workers and found.hosts == 1:
        exports["TPU_WORKER_HOSTNAMES"] = "localhost"
    return exports


def parse_worker_endpoints(value: str) -> tuple[list[str], bool]:
    """Parse the metadata attribute `worker-network-endpoints`, in either format (R4.3).

    Returns:
        the workers in order, and whether torch_xla 2.9 cannot read them: plain host names, or IPv6 addresses. Invalid
        entries are left out.
    """
    workers = []
    plain = False
    for word in _words(value):
        fields = word.split(":", 2)
        if is_ipv6(word):
            host, plain = word, True
        elif len(fields) == 3:  # name:uid:ip
            host = without_port(fields[2])
            plain = plain or is_ipv6(host)  # torch_xla splits at every colon
        else:
            host, plain = fields[0], True
        if is_address(host):
            workers.append(host)
    return workers, plain


def parse_tpu_env(value: str) -> dict[str, str]:
    """Parse the metadata attribute `tpu-env`: one `KEY: 'value'` per line, a subset of YAML."""
    found = {}
    for line in value.splitlines():
        key, colon, rest = line.partition(":")
        if colon and is_host(key.strip()):
            found[key.strip()] = rest.strip().strip("'\"").strip()
    return found


def slice_from_metadata(attributes: Mapping[str, str]) -> Slice:
    """The slice that a TPU VM's metadata attributes describe (R4.2).

    Args:
        attributes: `tpu-env`, `worker-network-endpoints`, `agent-worker-number` and `accelerator-type`, as far as they
            exist. Invalid values count as missing, because torch_xla reads the attributes itself.
    """
    found = Slice("the metadata server")
    tpu_env = parse_tpu_env(attributes.get("tpu-env", ""))
    found.accelerator_type = tpu_env.get("ACCELERATOR_TYPE", "") or attributes.get("accelerator-type", "").strip()
    if not is_host(found.accelerator_type):
        found.accelerator_type = ""
    found.workers, found.plain_names = parse_worker_endpoints(attributes.get("worker-network-endpoints", ""))
    bounds = (
        tpu_env.get("TPU_PROCESS_BOUNDS") or tpu_env.get("HOST_BOUNDS") or HOST_BOUNDS.get(found.accelerator_type, "")
    )
    found.process_bounds = bounds if volume(bounds) else ""
    chips = tpu_env.get("TPU_CHIPS_PER_PROCESS_BOUNDS") or tpu_env.get("CHIPS_PER_HOST_BOUNDS") or ""
    found.chips_bounds = chips if volume(chips) else ""
    word = tpu_env.get("WORKER_ID") or attributes.get("agent-worker-number", "").strip()
    if word and _is_number(word) and len(word) < 6:
        found.worker_id = int(word)
    found.megascale = _megascale(tpu_env)
    return found


def _megascale(tpu_env: Mapping[str, str]) -> dict[str, str]:
    """Return the variables of several slices in the attribute `tpu-env`; {} if a number is missing or invalid."""
    count, number = (tpu_env.get(f"MEGASCALE_{word}", "") for word in ("NUM_SLICES", "SLICE_ID"))
    if not (_is_number(count) and _is_number(number) and len(count) < 5 and int(number[:9]) < int(count)):
        return {}
    variables = {"MEGASCALE_NUM_SLICES": count, "MEGASCALE_SLICE_ID": number}
    head = tpu_env.get("MEGASCALE_COORDINATOR_ADDRESS", "")
    return {**variables, "MEGASCALE_COORDINATOR_ADDRESS": head} if without_port(head) else variables


def metadata_as_variables(found: Slice) -> dict[str, str]:
    """Variables that make torch_xla read the slice from the environment (R4.3); {} if a part is unknown."""
    if found.worker_id is None or not (found.accelerator_type and found.process_bounds and found.chips_bounds):
        return {}
    return {
        "TPU_SKIP_MDS_QUERY": "1",
        "TPU_ACCELERATOR_TYPE": found.accelerator_type,
        "TPU_PROCESS_BOUNDS": found.process_bounds,
        "TPU_CHIPS_PER_PROCESS_BOUNDS": found.chips_bounds,
        "TPU_WORKER_ID": str(found.worker_id),
        "TPU_WORKER_HOSTNAMES": ",".join(found.workers) or "localhost",
    }
