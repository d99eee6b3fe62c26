"""R and C put together: which variables the trainer gets. Nothing that is set and not empty is overwritten.

The exceptions: `--force` replaces what the launcher derives itself; for TensorFlow a TPU_NAME that is a node's name
becomes its address; and a rehearsal moves PJRT_DEVICE to the CPU, for without that there would be no rehearsal.
"""

from __future__ import annotations

from launcher import tpu_vm, versions, xrt
from launcher.errors import LaunchError, config_error
from launcher.runtime import names_addresses
from launcher.settings import text

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Mapping

    from launcher.cluster import Cluster
    from launcher.runtime import Decision, Facts
    from launcher.tpu_node import Endpoint, Node
    from launcher.tpu_vm import Slice

# torch_xla sets these for each process it spawns, and only if they are unset: one for the whole host breaks every
# topology of more than one process (a.3; T115).
PER_PROCESS = ("CLOUD_TPU_TASK_ID", "TPU_VISIBLE_CHIPS", "TPU_PROCESS_PORT")

# Vertex AI folders that have a /gcs twin through Cloud Storage FUSE (S11).
GCS_FOLDERS = (
    "AIP_MODEL_DIR",
    "AIP_CHECKPOINT_DIR",
    "AIP_TENSORBOARD_LOG_DIR",
    "AIP_TRAINING_DATA_URI",
    "AIP_VALIDATION_DATA_URI",
    "AIP_TEST_DATA_URI",
)


# A path that nothing can be opened at.
NO_LIBTPU = "/nonexistent/libtpu.so"


class Exports:
    """The changes to the environment.

    Attributes:
        values: variable -> value that the trainer gets and did not have.
        unsets: variables that are taken away.
        warnings: what the user should know.
    """

    def __init__(self, env: Mapping[str, str], force: bool = False) -> None:
        self.values: dict[str, str] = {}
        self.unsets: list[str] = []
        self.warnings: list[str] = []
        self._env = env
        self._force = force

    def default(self, name: str, value: str) -> None:
        """Set a variable unless it has a value."""
        if self._force or not text(self._env, name):
            self.replace(name, value)

    def defaults(self, values: Mapping[str, str]) -> None:
        """Set each variable unless it has a value."""
        for name in values:
            self.default(name, values[name])

    def replace(self, name: str, value: str) -> None:
        """Set a variable whatever it was."""
        if self._env.get(name) != value:
            self.values[name] = value

    def unset(self, name: str) -> None:
        """Take a variable away."""
        if name in self._env and name not in self.unsets:
            self.unsets.append(name)

    def warn(self, message: str) -> None:
        """Tell the user something, once."""
        if message not in self.warnings:
            self.warnings.append(message)

    def apply(self) -> dict[str, str]:
        """The trainer's environment."""
        env = {name: value for name, value in self._env.items() if name not in self.unsets}
        env.update(self.values)
        return env


def plan(
    facts: Facts,
    decision: Decision,
    cluster: Cluster,
    endpoints: list[Endpoint],
    accelerator_type: str = "",
    one_process: bool = True,
) -> Exports:
    """Everything that is exported and unset, in the order of the contract.

    Args:
        facts: environment, machine, image and switches.
        decision: R; `decision.slice` may have been completed from the metadata server.
        cluster: C.
        endpoints: addresses of the TPU node; [] when there is none.
        accelerator_type: of the TPU node, "" when unknown.
        one_process: the trainer is exec'ed directly, as the only process of this node.

    Raises:
        LaunchError: (2) when runtime and cluster do not fit together.
    """
    exports = Exports(facts.env, facts.settings.force)
    for message in decision.warnings + cluster.warnings:
        exports.warn(message)
    if decision.runtime == "tpu-node" and decision.node and not decision.untouched:
        _tpu_node(exports, facts, decision.node, cluster, endpoints, accelerator_type)
    elif decision.runtime == "tpu-local":
        _tpu_local(exports, facts, decision, cluster)
    elif decision.runtime == "gpu" and not decision.untouched:
        _gpu(exports, facts)
    elif decision.runtime == "cpu" and not decision.untouched and _has_pjrt(facts):
        exports.default("PJRT_DEVICE", "CPU")
    if facts.settings.rehearse:
        _rehearsal(exports, facts, decision)
    else:
        _without_accelerator(exports, facts, decision)
    if decision.runtime != "tpu-local" or facts.settings.rehearse:
        _no_local_tpu(exports, facts)
    _coordinates(exports, facts, decision, cluster, one_process)
    _files(exports, facts)
    return exports


def refuse_tpu_node(facts: Facts, decision: Decision) -> None:
    """Stop before the wait when this image can never drive a TPU node.

    A TPU node speaks XRT, which torch_xla lost in 2.1 (a.6) and torch_tpu never had; plain torch has no TPU at all.
    In a rehearsal, and for plain torch, this is a warning.

    Raises:
        LaunchError: (2) naming the way out.
    """
    image = facts.image
    if decision.runtime != "tpu-node" or decision.untouched:
        return
    if image.framework == "torch":
        decision.warnings.append(
            f"{decision.why} names a TPU node, which plain torch cannot use: training runs without it; "
            "use an image with torch_xla <= 2.0 or TensorFlow"
        )
    elif image.framework == "torch_tpu" or (image.framework == "torch_xla" and not versions.has_xrt(image.version)):
        message = (
            f"{decision.why} names a TPU node, which needs XRT, and {image.framework} {image.version} has none "
            "(removed in torch_xla 2.1): use a TPU VM, or an image with torch_xla <= 2.0"
        )
        if not facts.settings.rehearse:
            raise config_error(message)
        decision.warnings.append(message)


def _has_pjrt(facts: Facts) -> bool:
    return facts.image.may_be("torch_xla") and versions.has_pjrt(facts.image.version)


def _tpu_node(
    exports: Exports,
    facts: Facts,
    node: Node,
    cluster: Cluster,
    endpoints: list[Endpoint],
    accelerator_type: str,
) -> None:
    """a.2, "Exports for a TPU node"."""
    image = facts.image
    first = endpoints[0]
    if image.may_be("torch", "torch_xla", "torch_tpu"):
        if len(endpoints) == 1:
            exports.default("XRT_TPU_CONFIG", xrt.single(first.host, first.port))
        else:
            _xrt_pod(exports, facts, cluster, endpoints, accelerator_type)
    exports.default("TPU_IP_ADDRESS", first.host)
    if node.name:
        exports.default("TPU_NODE_NAME", node.name)
    address = f"grpc://{first}"
    if not image.may_be("tensorflow"):
        exports.default("TPU_NAME", node.name or address)
        return
    every = ",".join(f"grpc://{endpoint}" for endpoint in endpoints)
    kube = "KUBE_GOOGLE_CLOUD_TPU_ENDPOINTS"
    if node.source == kube and not node.had_scheme:
        # TensorFlow reads it first and would look the value up as a node's name (T63, T64).
        exports.unset(kube)
        exports.replace("TPU_NAME", every)
        return
    if not names_addresses(text(facts.env, "TPU_NAME")) and (node.source != kube or not text(facts.env, "TPU_NAME")):
        exports.replace("TPU_NAME", address)
    if len(endpoints) > 1:
        exports.default(kube, every)
    else:
        _unset_if_blank(exports, facts, kube)


def _xrt_pod(
    exports: Exports, facts: Facts, cluster: Cluster, endpoints: list[Endpoint], accelerator_type: str
) -> None:
    if cluster.node_rank is None:
        return
    try:
        variables = xrt.pod(
            [(endpoint.host, endpoint.port) for endpoint in endpoints],
            cluster.nnodes,
            cluster.master_addr,
            cluster.node_rank,
            xrt.cores_per_host(accelerator_type),
            on_vm=False,
        )
    except LaunchError as error:
        if facts.image.framework == "torch_xla" and not facts.settings.rehearse:
            raise
        exports.warn(error.message)
        return
    exports.defaults(variables)


def _tpu_local(exports: Exports, facts: Facts, decision: Decision, cluster: Cluster) -> None:
    """a.1 R3 and R4, a.3."""
    image, found = facts.image, decision.slice
    on_xrt = image.framework == "torch_xla" and not versions.has_pjrt(image.version)
    if not decision.untouched:
        if on_xrt:
            _xrt_vm(exports, found)
        elif not facts.settings.rehearse or not _has_pjrt(facts):
            exports.default("PJRT_DEVICE", "TPU")
        if found and decision.rule == "R3":
            exports.defaults(tpu_vm.completions(facts.env, found))
    if on_xrt or not image.may_be("torch_xla"):
        return
    if found and found.plain_names and found.hosts > 1:
        _bridge(exports, decision, found)
    for name in PER_PROCESS:
        if facts.has(name):
            exports.warn(
                f"{name}={facts.has(name)[:20]} is set for the whole host and reaches every process torch_xla "
                "spawns: unset it unless this host runs one process"
            )
    bounds = facts.has("TPU_PROCESS_BOUNDS")
    generation7 = found is not None and found.accelerator_type.startswith("tpu7")
    if (generation7 or bounds.count(",") == 3) and not versions.parses_4d_bounds(image.version):
        exports.warn("torch_xla 2.9 cannot count processes on tpu7x (it gives TPU_PROCESS_BOUNDS a fourth dimension)")
    if text(facts.env, "MASTER_ADDR") and _multi_host(decision, cluster) and not cluster.given:
        exports.warn("MASTER_ADDR is set on several TPU hosts: torch_xla finds its own; unset it if training hangs")


def _bridge(exports: Exports, decision: Decision, found: Slice) -> None:
    """Give torch_xla the slice in variables where it cannot read the metadata server's newer format (finding 9)."""
    variables = tpu_vm.in_place_of_metadata(found)
    if variables and not decision.untouched:
        exports.defaults(variables)
        return
    reason = "PJRT_DEVICE is set, so nothing is added" if variables else "the metadata leaves out a part of the slice"
    exports.warn(
        f"torch_xla 2.9 cannot read this TPU VM's worker-network-endpoints, and {reason}: "
        "set TPU_SKIP_MDS_QUERY=1 and the TPU_* variables of docs/launcher.md"
    )


def _xrt_vm(exports: Exports, found: Slice | None) -> None:
    """torch_xla <= 1.12 on a TPU VM."""
    if not found or found.hosts == 1 or found.worker_id is None or not found.workers:
        exports.default("XRT_TPU_CONFIG", f"localservice;0;localhost:{xrt.VM_PORT}")
        return
    exports.defaults(xrt.vm_pod(found.workers, found.worker_id, found.accelerator_type, found.process_bounds))


def _without_accelerator(exports: Exports, facts: Facts, decision: Decision) -> None:
    """Say it when an image that is made for an accelerator finds none: the trainer would only be slow."""
    if decision.rule != "R9":
        return
    if facts.image.accelerator == "nvidia":
        hidden = facts.has("NVIDIA_VISIBLE_DEVICES")
        reason = (
            f"NVIDIA_VISIBLE_DEVICES={hidden} hides it"
            if hidden in ("void", "none")
            else "neither /dev/nvidiactl nor /proc/driver/nvidia/gpus is here"
        )
        exports.warn(
            f"this image is for NVIDIA GPUs, and there is no driver ({reason}): training runs on the CPU; "
            "start it with 'docker run --gpus all', or ask the platform for an accelerator"
        )
    elif facts.image.accelerator == "tpu":
        exports.warn("this image is for Cloud TPU, and there is none here: training runs on the CPU")


def _no_local_tpu(exports: Exports, facts: Facts) -> None:
    """Keep frameworks from loading libtpu where no TPU is attached.

    Off TPUs libtpu asks the metadata server 30 times for each of its variables, minutes in all: TensorFlow's while it
    is imported, torch_tpu's when a trainer first counts devices. Measured with tensorflow-tpu 2.20.0 and libtpu 0.0.21:
    a path that cannot be opened ends that at once, and TPU_SKIP_MDS_QUERY=1 does with errors on stderr. torch_tpu 0.2.0
    dies of such a path; torch's own switch leaves it unloaded. Goes when libtpu gives up by itself.
    """
    if facts.image.accelerator != "tpu":
        return
    if facts.image.framework == "tensorflow":
        exports.default("TPU_LIBRARY_PATH", NO_LIBTPU)
    elif facts.image.framework == "torch_tpu":
        exports.default("TORCH_DEVICE_BACKEND_AUTOLOAD", "0")


def _gpu(exports: Exports, facts: Facts) -> None:
    """a.1 R8: a GPU needs nothing, except for torch_xla between 2.0 and 2.8."""
    if facts.image.accelerator == "nvidia" and not facts.host.has_cuda_library(facts.env):
        exports.warn(
            "an NVIDIA device is here, but the driver's libcuda.so.1 is neither under /usr/local/nvidia/lib64 nor with "
            "the system's libraries: CUDA will not start; mount the driver, or use the NVIDIA container runtime"
        )
    if facts.image.framework != "torch_xla":
        return
    device = versions.pjrt_gpu(facts.image.version)
    if device:
        exports.default("PJRT_DEVICE", device)
    elif versions.release(facts.image.version) >= (2, 9):
        exports.warn("torch_xla 2.9 has no GPU support: training runs on the CPU; use an image with CUDA torch")


def _rehearsal(exports: Exports, facts: Facts, decision: Decision) -> None:
    """Everything as on the platform, and then the framework's CPU backend."""
    image = facts.image
    if _has_pjrt(facts):
        was = facts.has("PJRT_DEVICE")
        if was and was != "CPU":
            exports.warn(f"rehearsal: PJRT_DEVICE={was} replaced by CPU")
        exports.replace("PJRT_DEVICE", "CPU")
    elif image.framework == "torch_xla":
        exports.warn("rehearsal: torch_xla before 1.13 has no CPU backend behind PJRT_DEVICE; set XRT_DEVICE_MAP")
    if image.may_be("tensorflow"):
        exports.default("TPU_SKIP_MDS_QUERY", "1")
    if decision.runtime == "gpu":
        exports.replace("CUDA_VISIBLE_DEVICES", "-1")


def _multi_host(decision: Decision, cluster: Cluster) -> bool:
    return cluster.nnodes > 1 or (decision.slice is not None and decision.slice.hosts > 1)


def _coordinates(exports: Exports, facts: Facts, decision: Decision, cluster: Cluster, one_process: bool) -> None:
    """a.4, "Exports"."""
    if cluster.given or cluster.node_rank is None:
        return
    on_pjrt_tpu = decision.runtime == "tpu-local" and not text(facts.env, "XRT_TPU_CONFIG")
    on_pjrt_tpu = on_pjrt_tpu and "XRT_TPU_CONFIG" not in exports.values
    if not (on_pjrt_tpu and _multi_host(decision, cluster)):
        exports.default("MASTER_ADDR", cluster.master_addr)
        exports.default("MASTER_PORT", str(cluster.master_port))
    exports.default("NODE_RANK", str(cluster.node_rank))
    exports.default("NNODES", str(cluster.nnodes))
    # On a TPU the trainer spawns a process a chip itself; LOCAL_RANK tells that a launcher above has spawned already.
    if one_process and not decision.runtime.startswith("tpu") and not facts.has("LOCAL_RANK"):
        exports.default("RANK", str(cluster.node_rank))
        exports.default("WORLD_SIZE", str(cluster.nnodes))
        exports.default("LOCAL_RANK", "0")
        exports.default("LOCAL_WORLD_SIZE", "1")


def _files(exports: Exports, facts: Facts) -> None:
    """Variables that name files and folders: a.4 (AIP_*), a.8 (cloudml-hypertune)."""
    for name in ("KUBE_GOOGLE_CLOUD_TPU_ENDPOINTS", "TPU_NAME"):
        if facts.image.may_be("tensorflow") and name not in exports.values:
            _unset_if_blank(exports, facts, name)  # TensorFlow tests presence and would look up a node named ""
    metric_file = "CLOUD_ML_HP_METRIC_FILE"
    _unset_if_blank(exports, facts, metric_file)  # cloudml-hypertune would raise FileNotFoundError '' (T190)
    if facts.has(metric_file) and "/" not in facts.has(metric_file):
        exports.warn(f"{metric_file}={facts.has(metric_file)[:60]} has no folder: cloudml-hypertune cannot create it")
    if facts.settings.mirror_gcs:
        for name in GCS_FOLDERS:
            if facts.has(name).startswith("gs://"):
                exports.default(f"LAUNCHER_GCS_{name}", "/gcs/" + facts.has(name)[len("gs://") :])


def _unset_if_blank(exports: Exports, facts: Facts, name: str) -> None:
    if not facts.has(name):
        exports.unset(name)


def tf_config(exports: Exports, facts: Facts, decision: Decision, cluster: Cluster) -> None:
    """Build TF_CONFIG for TensorFlow where the platform gave only a CLUSTER_SPEC (a.4); leave one that is there.

    On a TPU it would only confuse: TPUClusterResolver builds the cluster itself.
    """
    members = sum(len(addresses) for addresses in cluster.hosts.values())
    if (
        not facts.image.may_be("tensorflow")
        or decision.runtime.startswith("tpu")
        or cluster.source != "CLUSTER_SPEC"
        or members < 2
    ):
        return
    import json

    task_type = {"master": "chief", "server": "ps"}.get(cluster.role, cluster.role)
    # An evaluator is no member of TensorFlow's cluster.
    hosts = {kind: addresses for kind, addresses in cluster.hosts.items() if kind != "evaluator" and addresses}
    config = {"cluster": hosts, "task": {"index": cluster.task_index, "type": task_type}}
    exports.default("TF_CONFIG", json.dumps(config, sort_keys=True))
