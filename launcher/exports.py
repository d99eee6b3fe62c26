"""The variables that the trainer gets, from runtime and cluster.

A variable that has a value is not overwritten, with the exceptions of R10.2.
"""

from __future__ import annotations

from launcher import tpu_vm, versions
from launcher.address import without_port
from launcher.settings import text

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Callable, Mapping

    from launcher.coordinates import Cluster, Task
    from launcher.runtime import Decision, Facts
    from launcher.tpu_vm import Slice

# torch_xla sets these for each process it starts, and only if they are unset: a value for the whole host breaks every
# topology of more than one process (R3.6).
PER_PROCESS = ("CLOUD_TPU_TASK_ID", "TPU_VISIBLE_CHIPS", "TPU_PROCESS_PORT")

# Vertex AI folders that are also mounted under /gcs by Cloud Storage FUSE (R10.5).
GCS_FOLDERS = (
    "AIP_MODEL_DIR",
    "AIP_CHECKPOINT_DIR",
    "AIP_TENSORBOARD_LOG_DIR",
    "AIP_TRAINING_DATA_URI",
    "AIP_VALIDATION_DATA_URI",
    "AIP_TEST_DATA_URI",
)

# A path that does not exist (R9.2).
NO_LIBTPU = "/nonexistent/libtpu.so"


class Exports:
    """The changes to the environment.

    Attributes:
        values: variable -> new value.
        unsets: variables to unset.
        warnings: one line each.
    """

    def __init__(self, env: Mapping[str, str], force: bool = False) -> None:
        self.values: dict[str, str] = {}
        self.unsets: list[str] = []
        self.warnings: list[str] = []
        self._env = env
        self._force = force

    def default(self, name: str, value: str) -> None:
        """Set a variable unless it has a value."""
        if self._force or not text(self._env, name) or name in self.unsets:
            self.replace(name, value)

    def defaults(self, values: Mapping[str, str]) -> None:
        """Set each variable unless it has a value."""
        for name in values:
            self.default(name, values[name])

    def replace(self, name: str, value: str) -> None:
        """Set a variable, whatever its value is."""
        if name in self.unsets:
            self.unsets.remove(name)
        if self._env.get(name) != value:
            self.values[name] = value

    def unset(self, name: str) -> None:
        """Unset a variable."""
        if name in self._env and name not in self.unsets:
            self.unsets.append(name)

    def warn(self, message: str) -> None:
        """Add a warning, once."""
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
    of_node: Callable[[Exports], None] | None = None,
    one_process: bool = True,
    nproc: int = 1,
) -> Exports:
    """Plan everything that is exported and unset.

    Args:
        facts: environment, machine, image and settings.
        decision: the runtime; its slice may come from the metadata server (R4.2).
        cluster: the coordinates.
        of_node: exports what a TPU node needs (R11); None without one.
        one_process: the trainer is exec'ed as the only process of this node.
        nproc: number of processes that the launcher starts on this node.

    Raises:
        LaunchError: (2) if runtime and cluster contradict each other (R11.6).
    """
    exports = Exports(facts.env, facts.settings.force)
    for message in decision.warnings + cluster.warnings:
        exports.warn(message)
    if of_node:
        of_node(exports)
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
    if facts.image.framework == "jax":
        _jax_backend(exports, facts, decision)
    _coordinates(exports, facts, decision, cluster, one_process, nproc)
    _files(exports, facts)
    _compiled_code(exports, facts)
    return exports


def _has_pjrt(facts: Facts) -> bool:
    return facts.image.may_be("torch_xla") and versions.has_pjrt(facts.image.version)


def _tpu_local(exports: Exports, facts: Facts, decision: Decision, cluster: Cluster) -> None:
    """Exports for an attached TPU (R3, R4)."""
    image, found = facts.image, decision.slice
    if not tpu_vm.skips_metadata(facts.env) and "TPU_SKIP_MDS_QUERY" in facts.env:
        # libtpu, torch_xla and JAX take any value for yes (R3.8).
        exports.unset("TPU_SKIP_MDS_QUERY")
    on_xrt = image.framework == "torch_xla" and not versions.has_pjrt(image.version)
    if not decision.untouched:
        if on_xrt:
            from launcher.tpu_node import xrt

            exports.defaults(xrt.of_vm(found))
        elif image.framework != "jax" and not (facts.settings.rehearse and _has_pjrt(facts)):
            exports.default("PJRT_DEVICE", "TPU")
        if found and decision.rule == "R3":
            exports.defaults(tpu_vm.missing_variables(facts.env, found))
    if on_xrt or not image.may_be("torch_xla"):
        return
    if found and found.plain_names and found.hosts > 1:
        _slice_variables(exports, decision, found)
    for name in PER_PROCESS:
        if facts.has(name):
            exports.warn(
                f"{name}={facts.has(name)[:20]} is set for the whole host and reaches every process that torch_xla "
                "starts: unset it unless this host runs one process"
            )
    bounds = facts.has("TPU_PROCESS_BOUNDS")
    generation7 = found is not None and found.accelerator_type.startswith("tpu7")
    if (generation7 or bounds.count(",") == 3) and not versions.parses_4d_bounds(image.version):
        exports.warn("torch_xla 2.9 cannot count processes on tpu7x: it rejects four-dimensional TPU_PROCESS_BOUNDS")
    if text(facts.env, "MASTER_ADDR") and _multi_host(decision, cluster) and not cluster.given:
        exports.warn("MASTER_ADDR is set on several TPU hosts: torch_xla selects its own; unset it if training hangs")


def _slice_variables(exports: Exports, decision: Decision, found: Slice) -> None:
    """Export the slice as variables if torch_xla cannot read the metadata server's format (R4.3)."""
    variables = tpu_vm.metadata_as_variables(found)
    if variables and not decision.untouched:
        exports.defaults(variables)
        return
    reason = "PJRT_DEVICE is set, so nothing is exported" if variables else "the metadata of the slice is incomplete"
    exports.warn(
        f"torch_xla 2.9 cannot read this TPU VM's worker-network-endpoints, and {reason}: "
        "set TPU_SKIP_MDS_QUERY=1 and the TPU_* variables of docs/launcher.md"
    )


def _without_accelerator(exports: Exports, facts: Facts, decision: Decision) -> None:
    """Warn if the image is made for an accelerator and there is none: the trainer would only be slow (R9.1)."""
    if decision.rule != "R9":
        return
    if facts.image.accelerator == "nvidia":
        hidden = facts.has("NVIDIA_VISIBLE_DEVICES")
        if hidden in ("void", "none"):
            reason = f"NVIDIA_VISIBLE_DEVICES={hidden} hides it"
        elif facts.host.has_wsl_device():
            reason = "/dev/dxg of WSL 2 exists, but libcuda.so.1 is not in /usr/lib/wsl"
        else:
            reason = "neither /dev/nvidiactl nor /proc/driver/nvidia/gpus exists"
        exports.warn(
            f"this image is for NVIDIA GPUs, and there is no driver ({reason}): training runs on the CPU; "
            "start it with 'docker run --gpus all', or request a GPU from the platform"
        )
    elif facts.image.accelerator == "tpu":
        exports.warn("this image is for Cloud TPU, and there is no TPU: training runs on the CPU")


def _no_local_tpu(exports: Exports, facts: Facts) -> None:
    """Prevent frameworks from loading libtpu if no TPU is attached (R9.2).

    Without a TPU, libtpu requests each of its variables from the metadata server 30 times, which takes minutes:
    in TensorFlow during the import, in torch_tpu when a trainer first counts devices. Measured with tensorflow-tpu
    2.20.0 and libtpu 0.0.21: a library path that does not exist ends this at once; TPU_SKIP_MDS_QUERY=1 does too, but
    prints errors. torch_tpu 0.2.0 fails on such a path, so PyTorch's own variable disables it. Remove this when libtpu
    gives up by itself.
    """
    if facts.image.accelerator != "tpu":
        return
    if facts.image.framework == "tensorflow":
        exports.default("TPU_LIBRARY_PATH", NO_LIBTPU)
    elif facts.image.framework == "torch_tpu":
        exports.default("TORCH_DEVICE_BACKEND_AUTOLOAD", "0")


def _gpu(exports: Exports, facts: Facts) -> None:
    """Exports for a GPU: none, except for torch_xla 2.0 to 2.8 (R8)."""
    if facts.image.accelerator == "nvidia" and not facts.host.has_cuda_library(facts.env):
        exports.warn(
            "an NVIDIA device is present, but the driver's libcuda.so.1 is neither under /usr/local/nvidia/lib64 nor "
            "in a system library folder: CUDA will not start; mount the driver, or use the NVIDIA container runtime"
        )
    if facts.image.framework != "torch_xla":
        return
    device = versions.pjrt_gpu(facts.image.version)
    if device:
        exports.default("PJRT_DEVICE", device)
    elif versions.release(facts.image.version) >= (2, 9):
        exports.warn("torch_xla 2.9 has no GPU support: training runs on the CPU; use an image with torch for CUDA")


def _rehearsal(exports: Exports, facts: Facts, decision: Decision) -> None:
    """Use the framework's CPU backend (R10.4)."""
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


def _jax_backend(exports: Exports, facts: Facts, decision: Decision) -> None:
    """Select the CPU where the image cannot use an accelerator of this machine, and in a rehearsal (R9.3)."""
    from launcher import jax

    given = facts.has("JAX_PLATFORMS")
    if facts.settings.rehearse:
        if given not in ("", "cpu"):
            exports.warn(f"rehearsal: JAX_PLATFORMS={given[:40]} replaced by cpu")
        exports.replace("JAX_PLATFORMS", "cpu")
    elif not decision.untouched and not jax.uses_accelerator(facts, decision):
        exports.default("JAX_PLATFORMS", "cpu")


def _multi_host(decision: Decision, cluster: Cluster) -> bool:
    return cluster.nnodes > 1 or (decision.slice is not None and decision.slice.hosts > 1)


def _coordinates(
    exports: Exports, facts: Facts, decision: Decision, cluster: Cluster, one_process: bool, nproc: int
) -> None:
    """Exports of the cluster coordinates (R13.8)."""
    if cluster.given:
        return
    if cluster.node_rank is None:
        exports.replace("LAUNCHER_ROLE", cluster.role)
        return
    task = cluster.task
    if cluster.nnodes == 1 and not task and nproc <= 1 and not facts.settings.nproc:
        return  # a plain script stays plain: LOCAL_RANK, for example, makes Accelerate start a process group
    on_pjrt_tpu = decision.runtime == "tpu-local" and not text(facts.env, "XRT_TPU_CONFIG")
    on_pjrt_tpu = on_pjrt_tpu and "XRT_TPU_CONFIG" not in exports.values
    port = cluster.master_port or free_port()
    if not (on_pjrt_tpu and _multi_host(decision, cluster)):
        # PyTorch takes MASTER_ADDR for a host name: brackets and a port in it are removed.
        given = facts.has("MASTER_ADDR")
        with_port = given != cluster.master_addr == without_port(given)
        _override(exports, "MASTER_ADDR", cluster.master_addr, with_port or bool(facts.settings.master_addr))
        _override(exports, "MASTER_PORT", str(port), bool(facts.settings.master_port))
    if not task or task.nodes_known:
        exports.default("NODE_RANK", str(cluster.node_rank))
        exports.default("NNODES", str(cluster.nnodes))
    local_rank = _local_rank(exports, facts, decision, task) if task else ""
    if facts.image.may_be("jax"):
        from launcher import jax

        variables = jax.coordinates(facts, decision, cluster, nproc, port, local_rank)
        _override(exports, jax.ADDRESS, variables.pop(jax.ADDRESS), jax.is_replaced(facts))
        exports.defaults(variables)
        if facts.image.framework == "jax" and jax.lacks_port(facts):
            given = facts.has(jax.ADDRESS)
            exports.warn(f"{jax.ADDRESS}={given[:60]} has no port, which jax.distributed.initialize needs")
    if task:
        exports.default("RANK", str(task.rank))
        exports.default("WORLD_SIZE", str(task.world_size))
        exports.default("LOCAL_RANK", local_rank)
        if task.local_world_size:
            exports.default("LOCAL_WORLD_SIZE", str(task.local_world_size))
    # On a TPU the trainer starts one process per chip itself; LOCAL_RANK means that a launcher has started this one.
    elif one_process and not decision.runtime.startswith("tpu") and not facts.has("LOCAL_RANK"):
        _override(exports, "RANK", str(cluster.node_rank), cluster.recounted)
        _override(exports, "WORLD_SIZE", str(cluster.nnodes), cluster.recounted)
        exports.default("LOCAL_RANK", "0")
        exports.default("LOCAL_WORLD_SIZE", "1")


def _local_rank(exports: Exports, facts: Facts, decision: Decision, task: Task) -> str:
    """LOCAL_RANK of a process that a scheduler has started; 0 if it sees fewer GPUs than its node has processes.

    The scheduler then shows each process only its own GPUs, the first of which is device 0 (R13.21). Programs take
    LOCAL_RANK for the number of a device.
    """
    processes = max(task.local_world_size, task.local_rank + 1)
    gpus = facts.host.gpu_count(facts.env) if decision.runtime == "gpu" else 0
    given = facts.has("LOCAL_RANK")
    if not gpus or gpus >= processes:
        return str(task.local_rank)
    if given.isascii() and given.isdigit() and int(given[:9]) >= gpus and not facts.settings.force:
        exports.warn(
            f"LOCAL_RANK={given[:9]} is set, but this process sees {gpus} GPU{'s' * (gpus > 1)}: unset it to get the "
            "number of a device that this process sees"
        )
    elif not given and gpus > 1:
        exports.warn(
            f"this node has {processes} processes, and this one sees {gpus} GPUs: it gets LOCAL_RANK=0, the first of "
            "them; if all processes see the same GPUs, start one process per GPU"
        )
    return "0"


def _override(exports: Exports, name: str, value: str, also_set: bool) -> None:
    """Set a variable; one that has a value only if `also_set`."""
    if also_set:
        exports.replace(name, value)
    else:
        exports.default(name, value)


def free_port() -> int:
    """A TCP port that is free on every interface of this host at this moment (R13.19)."""
    import socket

    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as listener:
        listener.bind(("", 0))
        return int(listener.getsockname()[1])


def _files(exports: Exports, facts: Facts) -> None:
    """Variables that name files and folders (R10.1, R10.5)."""
    for name in ("KUBE_GOOGLE_CLOUD_TPU_ENDPOINTS", "TPU_NAME"):
        if facts.image.may_be("tensorflow") and name not in exports.values:
            _unset_if_blank(exports, facts, name)  # TensorFlow would look up a node with an empty name
    metric_file = "CLOUD_ML_HP_METRIC_FILE"
    _unset_if_blank(exports, facts, metric_file)  # cloudml-hypertune would raise FileNotFoundError
    if facts.has(metric_file) and "/" not in facts.has(metric_file):
        exports.warn(f"{metric_file}={facts.has(metric_file)[:60]} has no folder: cloudml-hypertune cannot create it")
    if facts.settings.mirror_gcs:
        for name in GCS_FOLDERS:
            if facts.has(name).startswith("gs://"):
                exports.default(f"LAUNCHER_GCS_{name}", "/gcs/" + facts.has(name)[len("gs://") :])


def _compiled_code(exports: Exports, facts: Facts) -> None:
    """Give torch.compile a folder from which compiled code can be loaded, if its default is none (R10.6)."""
    if facts.image.framework not in ("torch", "torch_xla", "torch_tpu"):
        return
    temporary, home = facts.has("TMPDIR") or "/tmp", facts.has("HOME")
    folders = facts.host.folders(temporary, home and f"{home}/.cache", home, "/var/tmp", "/dev/shm", "/workspace")
    folder = next((path for path in folders if facts.host.loads_code(path)), "")
    if folders and not folder and not facts.has("TORCHINDUCTOR_CACHE_DIR"):
        exports.warn(
            f"torch.compile will fail: {', '.join(folders)} are read-only or mounted noexec, and compiled code cannot "
            "be loaded from there; mount an executable folder, as with docker run --tmpfs /tmp:exec"
        )
    elif folder and folder != temporary:
        exports.default("TORCHINDUCTOR_CACHE_DIR", f"{folder}/torchinductor")
    if folder and not (home in folders and facts.host.loads_code(home)):
        exports.default("TRITON_CACHE_DIR", f"{folder}/triton")


def _unset_if_blank(exports: Exports, facts: Facts, name: str) -> None:
    if not facts.has(name):
        exports.unset(name)


def tf_config(exports: Exports, facts: Facts, decision: Decision, cluster: Cluster) -> None:
    """Export TF_CONFIG for TensorFlow if the platform set only CLUSTER_SPEC (R13.9).

    Not on a TPU, where TPUClusterResolver builds the cluster.
    """
    members = sum(len(addresses) for addresses in cluster.hosts.values())
    if (
        not facts.image.may_be("tensorflow")
        or decision.runtime.startswith("tpu")
        or not facts.has("CLUSTER_SPEC")
        or members < 2
    ):
        return
    import json

    alone = _has_no_cluster(facts.has("TF_CONFIG"))  # with such a TF_CONFIG TensorFlow would train alone on each node
    if alone:
        exports.warn("TF_CONFIG has no cluster: replaced by the one of CLUSTER_SPEC")
    task_type = {"master": "chief", "server": "ps"}.get(cluster.role, cluster.role)
    # An evaluator is not part of TensorFlow's cluster.
    hosts = {kind: addresses for kind, addresses in cluster.hosts.items() if kind != "evaluator" and addresses}
    config = {"cluster": hosts, "task": {"index": cluster.task_index, "type": task_type}}
    _override(exports, "TF_CONFIG", json.dumps(config, sort_keys=True), alone)


def _has_no_cluster(value: str) -> bool:
    """Whether a TF_CONFIG is set and is an object without a cluster, such as {}."""
    import json

    try:
        config = json.loads(value or "0")
    except (ValueError, RecursionError):
        return False  # left for TensorFlow to report
    return isinstance(config, dict) and not config.get("cluster")
