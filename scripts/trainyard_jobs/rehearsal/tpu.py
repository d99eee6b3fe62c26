"""What the hosts of a TPU slice get from their platform: GKE's variables, a TPU VM's metadata and device nodes.

The device plugin is https://github.com/ai-on-gke/tpu-device-plugin (pkg/tpu/util/util.go, with examples in
util_test.go, TestInitEnvs); the webhook is https://github.com/ai-on-gke/kuberay-tpu-webhook.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

from trainyard_jobs.model import machines
from trainyard_jobs.model.machines import TpuSlice

#: Generations whose chips are /dev/accel0...; later ones are /dev/vfio/0... (device plugin, GetDeviceDirectory).
_ACCEL = ("v2", "v3", "v4")

#: Number of chips of a machine -> chips along x, y, z (device plugin, TestInitEnvs).
_CHIP_BOUNDS = {1: (1, 1, 1), 4: (2, 2, 1), 8: (2, 4, 1)}

#: The first port of libtpu's metrics; each chip has one (device plugin, TestInitEnvs).
_METRICS_PORT = 8431


def devices(found: TpuSlice) -> tuple[str, ...]:
    """Paths of the device nodes of a host's chips."""
    folder = "/dev/accel" if found.generation in _ACCEL else "/dev/vfio/"
    return tuple(f"{folder}{chip}" for chip in range(found.chips_per_host))


def bounds(found: TpuSlice) -> tuple[str, str]:
    """Hosts along x, y, z, and chips of one host along x, y, z: ``("1,1,2", "2,2,1")`` for a v4-16."""
    sides = machines.sides(found.topology)
    chips = _CHIP_BOUNDS[found.chips_per_host]
    sides += [1] * (3 - len(sides))
    hosts = [max(1, side // own) for side, own in zip(sides, chips, strict=True)]
    if prod(hosts) != found.hosts:  # such as 2x4 on two machines of four chips
        hosts = [1, found.hosts, 1]
    return ",".join(map(str, hosts)), ",".join(map(str, chips))


def _wraps(found: TpuSlice) -> str:
    """Which axes are rings: all if each is a multiple of 4 (three axes), those of 16 chips (two axes).

    Device plugin, TestInitEnvs.
    """
    sides = machines.sides(found.topology)
    flat = [*(side == 16 for side in sides), False]
    closed = [all(side % 4 == 0 for side in sides)] * 3 if len(sides) == 3 else flat
    return ",".join(str(one).lower() for one in closed)


def gke_variables(found: TpuSlice, worker: int, hostnames: Sequence[str]) -> dict[str, str]:
    """The variables that GKE's device plugin and webhook set in a pod that requests google.com/tpu.

    The plugin sets most under two or three names; older libraries read the older ones.
    """
    host_bounds, chip_bounds = bounds(found)
    ports = ",".join(str(_METRICS_PORT + chip) for chip in range(found.chips_per_host))
    shape = {
        "TPU_ACCELERATOR_TYPE": found.accelerator_type,
        "TPU_HOST_BOUNDS": host_bounds,
        "HOST_BOUNDS": host_bounds,
        "TPU_CHIPS_PER_HOST_BOUNDS": chip_bounds,
        "CHIPS_PER_HOST_BOUNDS": chip_bounds,
        "TPU_TOPOLOGY": found.topology,
        "TPU_TOPOLOGY_WRAP": _wraps(found),
        "WRAP": _wraps(found),
        "TPU_TOPOLOGY_ALT": "false",
        "ALT": "false",
    }
    return shape | {
        "TPU_SKIP_MDS_QUERY": "true",
        "TPU_RUNTIME_METRICS_PORTS": ports,
        "TPU_WORKER_ID": str(worker),
        "TPU_WORKER_HOSTNAMES": ",".join(hostnames) if found.hosts > 1 else "localhost",
        "VBAR_CONTROL_SERVICE_URL": "unix:///var/run/tpu-plugin/vbar.sock",
    }


def attributes(found: TpuSlice, worker: int, hostnames: Sequence[str], zone: str) -> dict[str, str]:
    """The metadata attributes of a TPU VM that torch_xla, JAX and the launcher read.

    https://github.com/pytorch/xla/blob/v2.9.0/torch_xla/_internal/tpu.py. ``worker-network-endpoints`` is in its older
    form, name:uid:address, which every client reads; host names on Docker's network replace the addresses.
    """
    host_bounds, chip_bounds = bounds(found)
    tpu_env = {
        "ACCELERATOR_TYPE": found.accelerator_type,
        "CHIPS_PER_HOST_BOUNDS": chip_bounds,
        "HOST_BOUNDS": host_bounds,
        "TPU_CHIPS_PER_PROCESS_BOUNDS": chip_bounds,
        "TPU_PROCESS_BOUNDS": host_bounds,
        "WORKER_ID": str(worker),
        "ZONE": zone,
    }
    return {
        "accelerator-type": found.accelerator_type,
        "agent-worker-number": str(worker),
        "tpu-env": "".join(f"{key}: '{value}'\n" for key, value in tpu_env.items()),
        "worker-network-endpoints": ",".join(f"host-{index}:{index}:{name}" for index, name in enumerate(hostnames)),
    }
