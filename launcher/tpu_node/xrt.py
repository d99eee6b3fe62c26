"""XRT, torch_xla's runtime up to 2.0: the grammar of XRT_TPU_CONFIG, and the variables of TPU nodes and TPU VMs."""

from __future__ import annotations

from launcher.address import is_host, port_number
from launcher.errors import config_error
from launcher.tpu_vm import HOST_BOUNDS

TYPE_CHECKING = False
if TYPE_CHECKING:
    from launcher.tpu_vm import Slice

NODE_PORT = 8470  # gRPC port of a TPU node (R11.1)
VM_PORT = 51011  # XRT server of a TPU VM (R4.4)
MESH_PORT = 8477  # XRT mesh service (R11.6)
CONTROLLER_PORT = 8476  # TPU mesh controller of a slice of TPU VMs (R4.4)


def parse_config(value: str) -> list[tuple[str, int, str, int]]:
    """The workers of an XRT_TPU_CONFIG as (name, ordinal, host, port).

    The grammar is `name;ordinal;host:port`, separated by `|` (R2.1). A `grpc://` before the host is rejected:
    torch_xla's C++ parser accepts it, but its Python parser does not.

    Raises:
        LaunchError: (2) with the invalid entry.
    """
    workers = []
    for entry in value.split("|"):
        fields = entry.strip().split(";")
        name, ordinal, address = fields if len(fields) == 3 else ("", "", "")
        host, _, port = address.rpartition(":")
        word = name.replace("_", "a")
        if not (
            word.isascii()
            and word.isalnum()
            and ordinal.isascii()
            and ordinal.isdigit()
            and len(ordinal) < 7
            and is_host(host)
            and port_number(port)
        ):
            hint = "; remove grpc://" if "grpc://" in address else ""
            raise config_error(
                f"XRT_TPU_CONFIG: bad worker syntax in {entry.strip()[:80]!r}: "
                f"each worker is name;ordinal;host:port, separated by |{hint}"
            )
        workers.append((name, int(ordinal), host, int(port)))
    return workers


def single(host: str, port: int) -> str:
    """XRT_TPU_CONFIG of a TPU node with one worker (R11.5)."""
    return f"tpu_worker;0;{host}:{port}"


def pod(
    servers: list[tuple[str, int]],
    clients: int,
    first_client: str,
    ordinal: int,
    cores_per_host: int,
    on_vm: bool,
) -> dict[str, str]:
    """The variables of one trainer host for several TPU workers, as `xla_dist` 1.13 sets them (R11.6).

    Args:
        servers: (address, port) of every TPU worker, in order.
        clients: number of trainer hosts.
        first_client: address of the first trainer host, which runs the mesh service.
        ordinal: number of this trainer host.
        cores_per_host: devices of one host, see `cores_per_host`.
        on_vm: the trainer hosts are the TPU VMs themselves.

    Raises:
        LaunchError: (2) if the number of trainer hosts is not the number of TPU workers, or for an IPv6 address.
    """
    for host in [first_client, *(host for host, _ in servers)]:
        if not is_host(host):
            raise config_error(f"XRT has no form for the IPv6 address {host[:80]}: use host names or IPv4 addresses")
    if clients != len(servers):
        raise config_error(
            "The client_workers and service_workers must have a 1:1 mapping: "
            f"{clients} trainer hosts for {len(servers)} TPU workers; start one replica for each TPU worker"
        )
    name = "c_localservice" if on_vm else "c_tpu_worker"
    exports = {
        "XRT_LOCAL_WORKER": f"{name}:{ordinal}",
        "XRT_MESH_SERVICE_ADDRESS": f"{first_client}:{MESH_PORT}",
        "XRT_SHARD_WORLD_SIZE": str(len(servers)),
        "XRT_SHARD_ORDINAL": str(ordinal),
        "TPU_NUM_DEVICES": str(cores_per_host),
        "XLA_EMIT_STEPLOG": "1",
    }
    if ordinal == 0:
        exports["XRT_TPU_CONFIG"] = "|".join(
            f"{name};{index};{host}:{port}" for index, (host, port) in enumerate(servers)
        )
    return exports


def vm_pod(clients: list[str], ordinal: int, accelerator_type: str, host_bounds: str) -> dict[str, str]:
    """The variables of one host of a slice of TPU VMs under XRT (R4.4).

    Args:
        clients: address of every host, in order of worker id.
        ordinal: this host's worker id.
        accelerator_type: such as "v3-32".
        host_bounds: hosts along x, y, z; "" for those of the type.

    Raises:
        LaunchError: (2) if the bounds of the type are unknown.
    """
    bounds = host_bounds or HOST_BOUNDS.get(accelerator_type, "")
    if not bounds:
        raise config_error(f"accelerator type {accelerator_type!r} has no known host bounds; set TPU_HOST_BOUNDS=x,y,z")
    servers = [(client, VM_PORT) for client in clients]
    exports = pod(servers, len(clients), clients[0], ordinal, cores_per_host(accelerator_type), on_vm=True)
    exports.update(
        {
            "TPUVM_MODE": "1",
            "CLOUD_TPU_TASK_ID": str(ordinal),
            "TPU_CHIPS_PER_HOST_BOUNDS": "2,2,1",
            "TPU_HOST_BOUNDS": bounds,
            "TPU_MESH_CONTROLLER_ADDRESS": f"{clients[0]}:{CONTROLLER_PORT}",
            "TPU_MESH_CONTROLLER_PORT": str(CONTROLLER_PORT),
        }
    )
    return exports


def cores_per_host(accelerator_type: str) -> int:
    """Devices of one host in torch_xla: 4 for v4 (two cores are one device), 8 for v2, v3 and unknown types (R11.6)."""
    return 4 if accelerator_type.startswith("v4-") else 8


def of_vm(found: Slice | None) -> dict[str, str]:
    """Return the variables of torch_xla up to 1.12 on a host with TPU chips (R4.4)."""
    if not found or found.hosts == 1 or found.worker_id is None or not found.workers:
        return {"XRT_TPU_CONFIG": f"localservice;0;localhost:{VM_PORT}"}
    return vm_pod(found.workers, found.worker_id, found.accelerator_type, found.process_bounds)
