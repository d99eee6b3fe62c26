"""The closed world of a smoke test: an internal network with a fake of Google Cloud, and volumes.

A sidecar container runs next to the image, on an internal network: the same image with the fake of Google Cloud's
metadata server and TPU API (scripts/trainyard/sandbox/fakes/google_cloud.py) copied into it. No host mount and no host
port is used, so the test runs the same way on a laptop, in CI, in Cloud Build and with a remote engine.
"""

from __future__ import annotations

import contextlib
import functools
import json
import secrets
import time
from collections.abc import Mapping
from typing import IO, Any

import docker.errors
import requests
from docker.models.containers import Container

from trainyard.common.console import StepFailed
from trainyard.oci import docker_engine
from trainyard.sandbox.fakes import sidecar

PORT = 8080
PROJECT, ZONE, NODE = "smoke-project", "us-central1-b", "smoke-node"
#: Endpoint of the fake's TPU node: an address that is reserved for documentation (RFC 5737).
ENDPOINT = "192.0.2.10:8470"

#: Seconds from SIGTERM to the end: what GKE leaves non-system pods on Spot VMs
#: (https://cloud.google.com/kubernetes-engine/docs/concepts/spot-vms).
GRACE = 15

#: How many times as long each step may take under emulation, which trains on about 8 images/s (tf-cpu, 2026-11).
EMULATED = 6

#: Where the files of the test are in the containers.
FOLDER = "/smoke"


class Sandbox:
    """The network, the volumes and the sidecar of a smoke test; they are removed at the end.

    Args:
        image: under test; the sidecar is a container of it too.
        files: name -> content, copied to /smoke.
        folders: created in /smoke; every user may write to them.
        volumes: path -> mode of further volumes. ``rw`` ones begin with what the image has there.
        environment: variables of the image's containers.
    """

    def __init__(
        self,
        image: str,
        files: Mapping[str, bytes],
        folders: tuple[str, ...] = (),
        volumes: Mapping[str, str] | None = None,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self.image = image
        self.name = f"trainyard-smoke-{secrets.token_hex(4)}"
        self._files, self._folders = files, folders
        self._modes = dict(volumes or {})
        self._environment = dict(environment or {})
        self._labels = docker_engine.resource_labels("smoke")
        self._containers: list[Container] = []

    def __enter__(self) -> Sandbox:
        with contextlib.ExitStack() as undo:
            docker_client = docker_engine.client()
            self._network = docker_client.networks.create(self.name, internal=True, labels=self._labels)
            undo.callback(self._network.remove)
            for name in self._volumes():
                volume = docker_client.volumes.create(name, labels=self._labels)
                undo.callback(volume.remove, force=True)
            undo.callback(self._remove_containers)
            self._start_sidecar()
            self._undo = undo.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._undo.close()

    def _volumes(self, *, writable: bool = False) -> dict[str, dict[str, str]]:
        """The volumes of a container, as docker takes them; all of them writable for the sidecar."""
        found = {self.name: {"bind": FOLDER, "mode": "rw"}}
        for number, (path, mode) in enumerate(self._modes.items()):
            found[f"{self.name}-{number}"] = {"bind": path, "mode": "rw" if writable else mode}
        return found

    def _remove_containers(self) -> None:
        for container in self._containers:
            with contextlib.suppress(docker.errors.NotFound):
                container.remove(force=True)

    def _start_sidecar(self) -> None:
        command = [f"--port={PORT}", "--host=0.0.0.0", f"--project={PROJECT}", f"--zone={ZONE}", f"--node={NODE}"]
        command += ["--states=CREATING,CREATING,READY", f"--endpoint={ENDPOINT}"]
        self._sidecar = sidecar.create(
            self.image,
            sidecar.GOOGLE_CLOUD,
            command,
            name=f"{self.name}-fake",
            network=self.name,
            labels=self._labels,
            volumes=self._volumes(writable=True),
        )
        self._containers.append(self._sidecar)
        self._sidecar.put_archive(FOLDER, sidecar.archive(self._files, self._folders))
        self._sidecar.start()

    def put(self, path: str, tar: IO[bytes]) -> None:
        """Unpack ``tar`` in the folder ``path`` of a volume."""
        self._sidecar.put_archive(path, tar)

    def run(self, script: str, *arguments: str) -> str:
        """What a Python script prints that runs in the sidecar as root, with the volumes.

        Raises:
            StepFailed: it failed.
        """
        found = self._sidecar.exec_run(["python3", "-I", "-S", "-c", script, *arguments], user="0")
        assert isinstance(found.output, bytes)  # not streamed
        if found.exit_code:
            raise StepFailed(f"the smoke test's sidecar does not answer: {found.output!r:.300}")
        return found.output.decode(errors="replace")

    def start(self, *command: str, environment: Mapping[str, str] | None = None, **options: Any) -> Container:
        """Start the image under test with ``command``, as the platform would start it.

        Args:
            environment: in addition to the variables of a job with a TPU node.
            options: of ``docker.containers.create``: user, tmpfs, read_only...
        """
        where = f"{self.name}-fake:{PORT}"
        container = docker_engine.client().containers.create(
            self.image,
            list(command),
            environment={
                "TPU_CONFIG": json.dumps({"project": PROJECT, "zone": ZONE, "tpu_node_name": NODE}),
                "GCE_METADATA_HOST": where,
                "TPU_API_ENDPOINT": f"http://{where}",
                "LAUNCHER_TPU_INTERVAL": "0.2",
                "LAUNCHER_REHEARSE": "1",
                **self._environment,
                **(environment or {}),
            },
            network=self.name,
            volumes=self._volumes(),
            cap_drop=["ALL"],
            security_opt=["no-new-privileges"],
            labels=self._labels,
            **options,
        )
        self._containers.append(container)
        container.start()
        return container

    def module_path(self, folder: str) -> str:
        """``PYTHONPATH`` of a container that imports modules of a folder in /smoke first, then those of the image's."""
        variables = docker_engine.client().images.get(self.image).attrs["Config"].get("Env") or []
        own = next((line.partition("=")[2] for line in variables if line.startswith("PYTHONPATH=")), "")
        return ":".join(filter(None, (f"{FOLDER}/{folder}", own)))

    @functools.cached_property
    def has_ipv6(self) -> bool:
        """Whether the kernel of the engine's machine supports IPv6, so that a container can go without it."""
        return self.run("import os; print(os.path.isdir('/proc/sys/net/ipv6'))").strip() == "True"

    def polled_states(self) -> list[str]:
        """The states of the node that the fake TPU API has reported, in order."""
        url = f"http://127.0.0.1:{PORT}/_fake/requests"
        found = self.run(f"import urllib.request as u; print(u.urlopen({url!r}).read().decode())")
        return [entry["state"] for entry in json.loads(found)["requests"] if entry.get("state")]


def wait(container: Container, timeout: float) -> int | None:
    """The exit status of a container; None if it runs for more than ``timeout`` seconds."""
    try:
        return int(container.wait(timeout=timeout)["StatusCode"])
    except requests.exceptions.RequestException:
        container.reload()
        return None if container.status == "running" else int(container.attrs["State"]["ExitCode"])


def stop(container: Container, grace: float = GRACE) -> tuple[int, float]:
    """End a container with SIGTERM, and with SIGKILL after ``grace`` seconds; its exit status and the seconds to it."""
    started = time.monotonic()
    with contextlib.suppress(docker.errors.APIError):  # it has ended meanwhile
        container.kill("SIGTERM")
    status = wait(container, grace)
    if status is None:
        with contextlib.suppress(docker.errors.APIError):
            container.kill()
        status = int(container.wait()["StatusCode"])
    return status, time.monotonic() - started


def prints(container: Container, text: str) -> bool:
    """Wait until a container prints a line with ``text``; False if it ends before."""
    return any(text in line.decode(errors="replace") for line in container.logs(stream=True, follow=True))


def lines_of(container: Container) -> list[str]:
    """The lines of a container's log; a carriage return ends one too, as in progress bars."""
    return container.logs().decode(errors="replace").splitlines()
