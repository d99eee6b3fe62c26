"""The hosts of a fake TPU slice: containers with an sshd, in which `docker run` works.

Like a TPU VM, each has two addresses: an external one, on the engine's default bridge, and an internal one, on a
private network. Disconnecting a worker from the private network has the effect of a firewall between workers.
"""

from __future__ import annotations

import io
import json
import tarfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import docker.errors
from docker.models.containers import Container
from docker.models.networks import Network

from tests.engine import ENGINE
from tests.fakes import cloud_build_runner
from tests.fakes.tpu_types import TpuType
from trainyard.common.docker_engine import resource_labels
from trainyard.common.settings import ROOT
from trainyard.spec.naming import NAME

FAKES = Path(__file__).resolve().parent
IMAGE = f"{NAME}-tpu-worker:latest"
SOCKET = "/var/run/docker.sock"
#: The access token of the workers' service account, as their metadata server gives it out.
TOKEN = "ya29.fake-access-token"


def image() -> str:
    """The reference of the workers' image, which is built here (14 s, or 1 s from the build cache)."""
    base = cloud_build_runner.docker_image()
    ENGINE.buildx(
        "build", "--quiet", "--load", "--provenance=false", f"--build-arg=DOCKER={base}", f"--tag={IMAGE}",
        f"--build-context=product={ROOT / 'scripts' / 'trainyard' / 'sandbox' / 'fakes'}",
        f"--file={FAKES / 'worker' / 'Dockerfile'}", str(FAKES),
    )  # fmt: skip
    return IMAGE


@contextmanager
def private_network(name: str) -> Iterator[Network]:
    """A network that is used as a VPC network."""
    network = ENGINE.client.networks.create(name, labels=resource_labels("tpu-vpc"))
    try:
        yield network
    finally:
        network.reload()
        for container in network.containers:
            network.disconnect(container, force=True)
        network.remove()


@dataclass
class Worker:
    """One host.

    Attributes:
        internal: its internal IP address.
        external: its external IP address.
        host_key: the public ed25519 key of its sshd, without the name of the algorithm.
    """

    container: Container
    internal: str = ""
    external: str = ""
    host_key: str = ""

    @property
    def host(self) -> str:
        """Its host name."""
        return str(self.container.attrs["Config"]["Hostname"])

    def put(self, path: str, text: str) -> None:
        """Write a file into an existing folder of the container."""
        packed = io.BytesIO()
        with tarfile.open(fileobj=packed, mode="w") as tar:
            about = tarfile.TarInfo(Path(path).name)
            about.size = len(text.encode())
            about.mode = 0o644
            tar.addfile(about, io.BytesIO(text.encode()))
        self.container.put_archive(str(Path(path).parent), packed.getvalue())

    def shell(self, script: str) -> str:
        """Run a script as root; its output.

        Raises:
            RuntimeError: it failed.
        """
        code, output = self.container.exec_run(["bash", "-euc", script])
        assert isinstance(output, bytes)
        if code:
            raise RuntimeError(f"{self.container.name}: {output.decode()}")
        return output.decode()

    def authorize(self, user: str, key: str) -> None:
        """Create ``user`` with a public key and sudo, as the guest agent does with the ssh keys in the metadata."""
        home = "/root" if user == "root" else f"/home/{user}"
        self.shell(f"id {user} >/dev/null 2>&1 || useradd --create-home --shell /bin/bash {user}; mkdir -p {home}/.ssh")
        self.shell(f"echo '{user} ALL=(ALL) NOPASSWD: ALL' >/etc/sudoers.d/{user}")
        self.put(f"{home}/.ssh/authorized_keys", key + "\n")
        self.shell(f"chown -R {user}: {home}/.ssh; chmod 700 {home}/.ssh; chmod 600 {home}/.ssh/authorized_keys")


def _metadata(slice_: TpuType, zone: str, workers: list[Worker], index: int) -> dict[str, str]:
    """Instance attributes of a TPU VM, as torch_xla and JAX read them (docs/launcher-contract.md, R4.2)."""
    bounds = {1: "1,1,1", 2: "1,2,1"}.get(len(workers), f"2,{len(workers) // 2},1")
    return {
        "accelerator-type": slice_.accelerator_type,
        "agent-worker-number": str(index),
        "worker-network-endpoints": ",".join(f"unknown:unknown:{worker.internal}" for worker in workers),
        "tpu-env": "\n".join(
            [
                f"ACCELERATOR_TYPE: '{slice_.accelerator_type}'",
                "CHIPS_PER_HOST_BOUNDS: '2,2,1'",
                f"HOST_BOUNDS: '{bounds}'",
                f"TPU_CHIPS_PER_PROCESS_BOUNDS: '2,2,1'\nTPU_PROCESS_BOUNDS: '{bounds}'",
                f"WORKER_ID: '{index}'",
                f"ZONE: '{zone}'",
            ]
        ),
    }


def boot(
    name: str, zone: str, slice_: TpuType, network: Network, images: Mapping[str, str], *, external: bool = True
) -> list[Worker]:
    """Start the hosts of a slice; they accept ssh, and their metadata server answers, when this returns.

    Args:
        name: prefix of the host names, which end in ``-w-0``, ``-w-1``, ... as those of TPU VMs do.
        images: image name -> local image to use for it.
        external: whether they have external IP addresses.
    """
    client = ENGINE.client
    workers = []
    for index in range(slice_.hosts):
        host = f"{name}-w-{index}"
        container = client.containers.create(
            IMAGE,
            name=f"{network.name}-{host}",  # other fakes may have a VM of this name at the same time
            hostname=host,
            labels=resource_labels("tpu-worker"),
            volumes={SOCKET: {"bind": SOCKET, "mode": "rw"}},
            extra_hosts={"metadata.google.internal": "127.0.0.1"},
        )
        worker = Worker(container)
        workers.append(worker)
        about = {
            "worker": container.name,
            "labels": resource_labels("tpu-run"),
            "images": dict(images),
            "token": TOKEN,
        }
        worker.put("/etc/trainyard-worker.json", json.dumps(about))
        network.connect(container, aliases=[host])
        container.start()
    for worker in workers:
        worker.container.reload()
        networks: dict[str, Any] = worker.container.attrs["NetworkSettings"]["Networks"]
        worker.internal = networks[str(network.name)]["IPAddress"]
        worker.external = networks["bridge"]["IPAddress"] if external else ""
    for index, worker in enumerate(workers):
        worker.host_key = _listening(worker, 22, "cut -d' ' -f2 /etc/ssh/ssh_host_ed25519_key.pub").split()[0]
        attributes = _metadata(slice_, zone, workers, index)
        command = ["python3", "-I", "/usr/local/lib/google_cloud.py", "--host=0.0.0.0", "--port=80", f"--zone={zone}"]
        command += [f"--attribute={key}={value}" for key, value in attributes.items()]
        worker.container.exec_run(command, detach=True)
    for worker in workers:
        _listening(worker, 80)
    return workers


def _listening(worker: Worker, port: int, script: str = "true", seconds: float = 120) -> str:
    """Wait until a port of a worker accepts connections and a script succeeds; the script's output."""
    deadline = time.monotonic() + seconds
    while True:
        try:
            return worker.shell(f"{script}; exec 3<>/dev/tcp/127.0.0.1/{port}")
        except RuntimeError:
            if time.monotonic() > deadline:
                raise
        time.sleep(0.1)


def remove(workers: list[Worker]) -> None:
    """Remove the hosts and every container that was started on them."""
    client = ENGINE.client
    for worker in workers:
        for run in client.containers.list(all=True, filters={"name": f"^{worker.container.name}\\."}):
            _gone(run)
        _gone(worker.container)


def _gone(container: Container) -> None:
    try:
        container.remove(force=True, v=True)
    except docker.errors.NotFound:
        return
    except docker.errors.APIError as error:
        if "already in progress" not in str(error):
            raise
