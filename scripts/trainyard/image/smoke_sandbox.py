"""Make the closed world of a smoke test: an internal network with a fake of Google Cloud, and volumes.

A sidecar container runs next to the image, on an internal network: the same image with the fake of Google Cloud's
metadata server and TPU API (scripts/trainyard/sandbox/fakes/google_cloud.py) copied into it. No host mount and no host
port is used, so the test runs the same way on a laptop, in CI, in Cloud Build and with a remote engine.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping
from typing import IO, Any

from docker.models.containers import Container

from trainyard.common.errors import StepFailed
from trainyard.oci import docker_engine
from trainyard.sandbox.containers import GOOGLE_CLOUD, Sandbox, archive

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


class SmokeSandbox(Sandbox):
    """Run containers without a way out, with the volumes and the sidecar of a smoke test.

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
        super().__init__("smoke", internal=True)
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
        where = f"{self.name}-fake:{PORT}"
        container = self.create(
            self.image,
            command,
            environment={
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
        variables = docker_engine.client().images.get(self.image).attrs["Config"].get("Env") or []
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
