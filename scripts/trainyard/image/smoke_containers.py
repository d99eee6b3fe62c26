"""Start the containers of a smoke test, in a closed world, and some with less than a workstation has.

The closed world is an internal network with a fake of Google Cloud, and volumes. The fake of its metadata server and
TPU API (scripts/trainyard/sandbox/fakes/google_cloud.py) runs in a sidecar container of the same image. No host mount
and no host port is used, so the test runs the same way on a laptop, in CI, in Cloud Build and with a remote engine.

In these containers less is available, as on some platforms:

Restricted
    A user that the image does not know, of group 0, as OpenShift assigns them; the 64 MB of /dev/shm that Docker and
    Kubernetes give a container; no IPv6, as on most networks of clouds.
Memory limit
    The engine lowers the memory limit of a container while the trainer saves, so that the kernel kills it before the
    new checkpoint has its name (:mod:`trainyard.image.memory_filler`).
Two processes
    Two processes of a run that connect to each other, and two workers of a data loader
    (:mod:`trainyard.image.worker_processes`), in restricted containers.
"""

from __future__ import annotations

import contextlib
import functools
import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any

import docker.errors
from docker.models.containers import Container

from trainyard.common import proxies
from trainyard.common.docker_engine import Engine
from trainyard.common.errors import StepFailed
from trainyard.image.memory_filler import SAVING
from trainyard.sandbox import containers
from trainyard.sandbox.containers import GOOGLE_CLOUD, Sandbox, archive

PORT = 8080
PROJECT, ZONE, NODE = "smoke-project", "us-central1-b", "smoke-node"
#: Endpoint of the fake's TPU node: an address that is reserved for documentation (RFC 5737).
ENDPOINT = "192.0.2.10:8470"

#: Frameworks that cannot use a TPU node, and the launcher's warning about it, which is in the log of each of their
#: runs: R11.4 in docs/launcher-contract-tpu-nodes.md.
WITHOUT_NODES = ("torch", "torch_tpu", "jax")
_WITHOUT_NODE = re.compile(r"^launch: warning +TPU_CONFIG names a TPU node, which ")

#: Seconds from SIGTERM to the end: what GKE leaves non-system pods on Spot VMs
#: (https://cloud.google.com/kubernetes-engine/docs/concepts/spot-vms).
GRACE = 15

#: How many times as long each step may take under emulation, which trains on about 8 images/s (tf-cpu, 2026-11).
EMULATED = 6

#: Where the files of the test are in the containers.
FOLDER = "/smoke"

#: A user that no image knows, in group 0: what clusters that assign users use
#: (https://docs.redhat.com/en/documentation/openshift_container_platform/4.17/html/images/creating-images). An engine
#: without root has 65,536 users (https://docs.docker.com/engine/security/rootless/#prerequisites).
USER = "54321:0"

#: Default size of /dev/shm (https://docs.docker.com/reference/cli/docker/container/run/#shm-size).
SHARED_MEMORY = "64m"

#: https://docs.kernel.org/networking/ip-sysctl.html
NO_IPV6 = {"net.ipv6.conf.all.disable_ipv6": "1"}

#: What a restricted container is, for results and messages.
RESTRICTED = f"uid {USER.partition(':')[0]} of group 0, 64 MB of /dev/shm, no IPv6"

#: How to start one.
RESTRICTED_FLAGS = " ".join(
    (f"--user={USER}", f"--shm-size={SHARED_MEMORY}", *(f"--sysctl={name}={value}" for name, value in NO_IPV6.items()))
)

#: Bytes that a trainer may take beyond what it has when it saves: less than what memory_filler.py takes.
HEADROOM = 64 << 20

#: Where the programs are in the containers, by the name of the file in this package.
_MEMORY, _WORKERS = "memory/sitecustomize.py", "workers/worker_processes.py"
_STEP, _KERNELS = "compiler/compiled_step.py", "compiler/gpu_kernels.py"
_SOURCES = {
    _MEMORY: "memory_filler.py",
    _WORKERS: "worker_processes.py",
    _STEP: "compiled_step.py",
    _KERNELS: "gpu_kernels.py",
}

#: Options of a container in which compiled code can be loaded from one folder alone, where /tmp is mounted noexec.
COMPILER_CACHE = {"tmpfs": {"/tmp": "mode=1777", "/home/trainer/.cache": "mode=1777,exec"}}

#: Writes a file, which exists only when it is complete.
_WRITE = """
import os, sys
path, content = sys.argv[1:]
with open(path + ".part", "w") as file:
    file.write(content)
os.chmod(path + ".part", 0o644)
os.rename(path + ".part", path)
"""

#: Runs its arguments as two TensorFlow workers on one machine, until one fails or both have ended.
#: `wait -n` gives 127 if both ended before it looked: what a process id gives is certain.
_TWO_WORKERS = """
unset TPU_CONFIG
TF_CONFIG=$FIRST_TF_CONFIG "$@" & first=$!
TF_CONFIG=$SECOND_TF_CONFIG "$@" & second=$!
wait -n
ended=$?
case $ended in 0 | 127) ;; *) exit "$ended" ;; esac
wait "$first" && wait "$second"
"""
_ADDRESSES = ["localhost:2222", "localhost:2223"]


class SmokeSandbox(Sandbox):
    """Run containers without a way out, with the volumes and the sidecar of a smoke test.

    Args:
        image: under test; the sidecar is a container of it too.
        files: name -> content, copied to /smoke.
        folders: created in /smoke; every user may write to them.
        volumes: path -> mode of further volumes. ``rw`` ones begin with what the image has there.
        environment: variables of the image's containers.
        network: whether they reach more than each other: what this machine reaches.
    """

    def __init__(
        self,
        engine: Engine,
        image: str,
        files: Mapping[str, bytes],
        folders: tuple[str, ...] = (),
        volumes: Mapping[str, str] | None = None,
        environment: Mapping[str, str] | None = None,
        *,
        network: bool = False,
    ) -> None:
        super().__init__(engine, "smoke", internal=not network)
        self.image = image
        self._files = archive(files, folders)
        self._modes = {FOLDER: "rw", **(volumes or {})}
        self._environment = dict(environment or {})

    def set_up(self) -> None:
        """Create the network and the volumes, and start the sidecar."""
        super().set_up()
        self._volumes = {
            self.volume(str(number)): {"bind": path, "mode": mode}
            for number, (path, mode) in enumerate(self._modes.items())
        }
        command = [f"--port={PORT}", "--host=0.0.0.0", f"--project={PROJECT}", f"--zone={ZONE}", f"--node={NODE}"]
        command += ["--states=CREATING,CREATING,READY", f"--endpoint={ENDPOINT}"]
        writable = {name: volume | {"mode": "rw"} for name, volume in self._volumes.items()}
        self._sidecar = self.sidecar(self.image, GOOGLE_CLOUD, command, "fake", volumes=writable)
        self._sidecar.put_archive(FOLDER, self._files)
        self._sidecar.start()

    def put(self, path: str, tar: IO[bytes]) -> None:
        """Unpack ``tar`` in the folder ``path`` of a volume."""
        self._sidecar.put_archive(path, tar)

    def run(self, script: str, *arguments: str) -> str:
        """Return what a Python script prints in the sidecar, as root with the volumes, or raise :class:`StepFailed`."""
        done = self._sidecar.exec_run(["python3", "-I", "-S", "-c", script, *arguments], user="0")
        assert isinstance(done.output, bytes)  # not streamed
        if done.exit_code:
            raise StepFailed(f"the smoke test's sidecar does not answer: {done.output!r:.300}")
        return done.output.decode(errors="replace")

    def start(self, *command: str, environment: Mapping[str, str] | None = None, **options: Any) -> Container:
        """Start the image under test with ``command``, as the platform would start it.

        Args:
            environment: in addition to the variables of a job with a TPU node.
            options: of ``docker.containers.create``: user, tmpfs, read_only...
        """
        fake = f"{self.name}-fake"
        where = f"{fake}:{PORT}"
        container = self.create(
            self.image,
            command,
            environment={
                **({} if self._internal else proxies.of_containers(self._engine, fake)),
                "TPU_CONFIG": json.dumps({"project": PROJECT, "zone": ZONE, "tpu_node_name": NODE}),
                "GCE_METADATA_HOST": where,
                "TPU_API_ENDPOINT": f"http://{where}",
                "LAUNCHER_TPU_INTERVAL": "0.2",
                "LAUNCHER_REHEARSE": "1",
                **self._environment,
                **(environment or {}),
            },
            volumes=self._volumes,
            cap_drop=["ALL"],
            security_opt=["no-new-privileges"],
            **options,
        )
        container.start()
        return container

    def module_path(self, folder: str) -> str:
        """Return ``PYTHONPATH`` of a container that imports modules of a folder in /smoke before the image's."""
        variables = self._engine.client.images.get(self.image).attrs["Config"].get("Env") or []
        own = next((line.partition("=")[2] for line in variables if line.startswith("PYTHONPATH=")), "")
        return ":".join(filter(None, (f"{FOLDER}/{folder}", own)))

    @functools.cached_property
    def has_ipv6(self) -> bool:
        """Return whether the kernel of the engine's machine supports IPv6, so that a container can go without it."""
        return self.run("import os; print(os.path.isdir('/proc/sys/net/ipv6'))").strip() == "True"

    def polled_states(self) -> list[str]:
        """Return the states of the node that the fake TPU API has reported, in order."""
        url = f"http://127.0.0.1:{PORT}/_fake/requests"
        printed = self.run(f"import urllib.request as u; print(u.urlopen({url!r}).read().decode())")
        return [entry["state"] for entry in json.loads(printed)["requests"] if entry.get("state")]


def files() -> dict[str, bytes]:
    """Return the programs that these containers run, for the sandbox."""
    return {name: Path(__file__).with_name(source).read_bytes() for name, source in _SOURCES.items()}


def restricted(sandbox: SmokeSandbox) -> dict[str, Any]:
    """Return options of a restricted container, as ``docker.containers.create`` takes them."""
    return {"user": USER, "shm_size": SHARED_MEMORY} | ({"sysctls": NO_IPV6} if sandbox.has_ipv6 else {})


def fill_memory(sandbox: SmokeSandbox, checkpoints: str) -> dict[str, str]:
    """Return variables of a container in which :func:`limit_memory` ends a trainer that saves to ``checkpoints``."""
    sandbox.run(_WRITE, f"{FOLDER}/memory/folder", checkpoints)
    return {"PYTHONPATH": sandbox.module_path("memory")}


def limit_memory(sandbox: SmokeSandbox, container: Container) -> bool:
    """Let a trainer reach its memory limit while it saves; False if it ended without renaming a checkpoint.

    The limit is what it uses and ``HEADROOM``, so that this needs no more memory than the training itself. An engine
    that cannot limit memory changes nothing: then the process kills itself at the same place.
    """
    if not containers.prints(container, SAVING):
        return False
    statistics = sandbox.statistics(container)
    used = int(statistics.get("memory_stats", {}).get("usage", 0))
    with contextlib.suppress(docker.errors.APIError):
        container.update(mem_limit=used + HEADROOM, memswap_limit=used + HEADROOM)
    sandbox.run(_WRITE, f"{FOLDER}/memory/fill", str(used + 2 * HEADROOM))
    return True


def out_of_memory(container: Container) -> bool:
    """Return whether the kernel has killed a process of a container that ended, for its memory limit."""
    container.reload()
    return bool(container.attrs["State"].get("OOMKilled"))


def two_processes(package: str, command: Sequence[str]) -> tuple[list[str], dict[str, str]]:
    """Return words and variables of a container that runs a trainer of a ``package`` in two processes on CPUs."""
    if package == "torch":
        return [*command, "--device=cpu", "--num-cores=2"], {}
    if package == "jax":
        return [*command, "--device=cpu"], {"LAUNCHER_NPROC": "2"}
    first, second = (
        json.dumps({"cluster": {"worker": _ADDRESSES}, "task": {"type": "worker", "index": index}}) for index in (0, 1)
    )
    words = ["bash", "-c", _TWO_WORKERS, "bash", "launch", *command]
    return words, {"FIRST_TF_CONFIG": first, "SECOND_TF_CONFIG": second}


def worker_processes() -> list[str]:
    """Return the words of a container that runs two workers of a data loader."""
    return ["python", f"{FOLDER}/{_WORKERS}"]


def compiled_step() -> list[str]:
    """Return the words of a container that compares a compiled training step with one that is not compiled."""
    return ["python", f"{FOLDER}/{_STEP}"]


def gpu_kernels(capabilities: Sequence[str]) -> list[str]:
    """Return the words of a container that compiles kernels for GPUs of these compute capabilities."""
    return ["python", f"{FOLDER}/{_KERNELS}", *capabilities]


def last_lines(lines: Sequence[str]) -> list[str]:
    """Return the end of the log of a run that failed, without the launcher's warning about the fake of a TPU node."""
    return [line for line in lines if not _WITHOUT_NODE.match(line)][-20:]


def check_warning(lines: Sequence[str], framework: str) -> list[str]:
    """Return what is wrong with the log of a run whose framework cannot use the fake of a TPU node."""
    if framework not in WITHOUT_NODES or any(map(_WITHOUT_NODE.match, lines)):
        return []
    return [f"straight run: the launcher did not warn that {framework} cannot use the TPU node of TPU_CONFIG"]


def check_status(what: str, status: int, wanted: int = 0, when: str = "") -> list[str]:
    """Return what is wrong with the exit status of a run."""
    return [] if status == wanted else [f"{what}: exit status {status}{when} where {wanted} was expected"]


def check_survived(summary: Mapping[str, Any], saved: int | None) -> list[str]:
    """Return what is wrong with a run that resumed after :func:`limit_memory`.

    Args:
        saved: the step of the last complete checkpoint; None if it is unknown.
    """
    step = summary.get("resumed_from")
    if saved is None or step == saved:
        return []
    return [
        f"resumed run: resumed from step {step} where {saved} was expected: the last complete checkpoint did not "
        "survive a memory limit that was reached while the next one was saved"
    ]


def check_two_processes(status: int, summary: Mapping[str, Any]) -> list[str]:
    """Return what is wrong with a run in two processes."""
    if not status and summary.get("processes") != 2:
        return [f"run in two processes: trained in {summary.get('processes', 'an unknown number of')} where 2 were set"]
    return check_status("run in two processes", status)
