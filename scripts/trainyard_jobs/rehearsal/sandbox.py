"""The sandbox of a rehearsal: a network, a folder of buckets, and the sidecars. It is removed with all containers."""

from __future__ import annotations

import contextlib
import json
import os
import re
import secrets
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import docker.errors
import docker.types
from docker.models.containers import Container

from trainyard.common import settings
from trainyard.common.console import StepFailed, UserError
from trainyard.oci import docker_engine
from trainyard.sandbox.fakes import sidecar
from trainyard_jobs.rehearsal.images import LocalImage
from trainyard_jobs.rehearsal.model import PROJECT, ZONE, Mount, Rehearsal, Replica

#: The metadata server's public name: clients without a variable for it can only be redirected by name.
METADATA = "metadata.google.internal"
#: Cloud Storage's public names, which TensorFlow always uses, and a name for clients that can be configured.
STORAGE_NAMES = ["www.googleapis.com", "storage.googleapis.com"]
STORAGE = "buckets.internal"
_CA = "rehearsal/ca.pem"
_SYSROOT = "rehearsal/sysroot"

#: The share of the engine's memory that all replicas together may use.
_MEMORY_SHARE = 0.85
#: Bytes of memory without which a framework cannot be imported.
_LEAST_MEMORY = 256 * 2**20


@dataclass(frozen=True)
class Limits:
    """Limits of each replica: CPUs, and bytes of memory."""

    cpus: float
    memory: int


def limits(replicas: int, cpus: float = 0.0, memory: int = 0) -> Limits:
    """Equal shares of the engine's machine; ``cpus`` and ``memory`` (bytes) override them if not 0.

    Raises:
        UserError: there is not enough memory for all replicas.
    """
    info = docker_engine.client().info()
    share = int(info["MemTotal"] * _MEMORY_SHARE / replicas)
    if not memory and share < _LEAST_MEMORY:
        raise UserError(
            f"{replicas} replicas on a machine with {info['MemTotal'] / 2**30:.1f} GB of memory would have "
            f"{share / 2**20:.0f} MB each, which is not enough; '--memory ...' overrides this"
        )
    return Limits(cpus or max(1.0, info["NCPU"] / replicas), memory or share)


def buckets_named(documents: list[dict[str, Any]]) -> list[str]:
    """The buckets that a job file names, as gs://NAME, /gcs/NAME or a Cloud Storage FUSE volume."""
    text = json.dumps(documents)
    found = re.findall(r"(?:gs://|/gcs/|\"bucketName\": \")([a-z0-9][a-z0-9._-]*[a-z0-9])", text)
    return sorted(set(found))


class Sandbox:
    """Network, buckets and sidecars; creates the replicas' containers, and removes them with everything else.

    Args:
        image: that the sidecars run in.
        buckets: folder with a folder for each bucket.
        names: buckets to create.
        tpu_delay: seconds from the first request for the TPU node until it is ready.
    """

    def __init__(
        self, rehearsal: Rehearsal, image: LocalImage, buckets: Path, names: list[str], tpu_delay: float = 0.0
    ) -> None:
        self._rehearsal, self._image, self._buckets, self._names = rehearsal, image, buckets, names
        self._tpu_delay = tpu_delay
        self.name = f"trainyard-rehearse-{secrets.token_hex(4)}"
        self._labels = docker_engine.resource_labels("rehearse")
        self._containers: list[Container] = []
        self._authority = b""
        self._begun = time.time() - 1

    def __enter__(self) -> Sandbox:
        self._buckets.mkdir(parents=True, exist_ok=True)
        for bucket in self._names:
            folder = self._buckets / bucket
            folder.mkdir(exist_ok=True)
            if folder.stat().st_uid == os.getuid():
                folder.chmod(0o777)  # the images run as another user
        with contextlib.ExitStack() as undo:
            network = docker_engine.client().networks.create(self.name, driver="bridge", labels=self._labels)
            undo.callback(network.remove)
            undo.callback(self._remove_containers)
            self._storage = self._start_storage()
            undo.callback(self._restore_ownership)
            self._start_google_cloud()
            self._undo = undo.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._undo.close()

    def _remove_containers(self) -> None:
        for container in self._containers:
            with contextlib.suppress(docker.errors.NotFound):
                container.remove(force=True)

    def _start_storage(self) -> Container:
        from trainyard_jobs.rehearsal import certificates  # imports cryptography, an optional dependency

        self._authority, server = certificates.make(STORAGE_NAMES)
        container = sidecar.create(
            self._image.id,
            sidecar.STORAGE,
            ["/gcs", "--host=0.0.0.0", "--port=80", "--certificate=/fakes/server.pem"],
            name=f"{self.name}-storage",
            network=self.name,
            labels=self._labels,
            aliases=[STORAGE, *STORAGE_NAMES],
            files={"server.pem": server},
            volumes={str(self._buckets.resolve()): {"bind": "/gcs", "mode": "rw"}},
            user="0",
            platform=self._image.platform,
            environment=self._image.environment(),
        )
        return self._started(container, "Cloud Storage")

    def _start_google_cloud(self) -> None:
        node = self._rehearsal.node
        arguments = ["--host=0.0.0.0", "--port=80"]
        if node:
            arguments += [f"--project={node.project}", f"--zone={node.zone}", f"--node={node.name}"]
            arguments += [f"--accelerator-type={node.accelerator_type}", f"--ready-after={self._tpu_delay:g}"]
            arguments += [f"--endpoint={endpoint}" for endpoint in node.endpoints]
        else:
            arguments += [f"--project={PROJECT}", f"--zone={ZONE}", "--node="]
        attributes = json.dumps({host: dict(found) for host, found in self._rehearsal.attributes.items()})
        container = sidecar.create(
            self._image.id,
            sidecar.GOOGLE_CLOUD,
            [*arguments, "--host-attributes=/fakes/attributes.json"],
            name=f"{self.name}-google-cloud",
            network=self.name,
            labels=self._labels,
            aliases=[METADATA],
            files={"attributes.json": attributes.encode()},
            user="0",
            platform=self._image.platform,
            environment=self._image.environment(),
        )
        self._started(container, "Google Cloud")

    def _started(self, container: Container, what: str) -> Container:
        self._containers.append(container)
        try:
            container.start()
        except docker.errors.APIError as error:
            raise StepFailed(
                f"the fake {what} cannot run in {self._image.id[:19]} ({error.explanation}): it requires python3; "
                f"give another image with '--sidecar ...'"
            ) from None
        for chunk in container.logs(stream=True, follow=True):
            if b'"url"' in chunk:
                return container
            raise StepFailed(f"the fake {what} did not start: {chunk.decode(errors='replace').strip()[:300]}")
        other = "'--sidecar ...'"
        raise StepFailed(f"the fake {what} did not start in {self._image.id[:19]}; give another image with {other}")

    def _restore_ownership(self) -> None:
        """Give files that containers created to the owner of the buckets, who could not remove them otherwise."""
        found = self._buckets.stat()
        with contextlib.suppress(docker.errors.APIError):
            owner = f"--hand-over={found.st_uid}:{found.st_gid}"
            command = ["python3", "-I", "-S", "/fakes/storage.py", "/gcs", owner, f"--since={self._begun:.3f}"]
            self._storage.exec_run(command, user="0")

    def environment(self) -> dict[str, str]:
        """Variables that direct the clients of Google's APIs to the sidecars, and the launcher to the CPU."""
        here = f"http://{METADATA}"
        return {
            "LAUNCHER_REHEARSE": "1",
            "GCE_METADATA_HOST": METADATA,
            "GCE_METADATA_IP": METADATA,
            "GCE_METADATA_ROOT": METADATA,
            "TPU_API_ENDPOINT": here,
            "TPU_API_DISCOVERY_URL": here + "/discovery/v1/apis/{api}/{apiVersion}/rest",
            "STORAGE_EMULATOR_HOST": f"http://{STORAGE}",
            # gcsfs would query the kind of every bucket from Cloud Storage's gRPC API, which the sidecar lacks.
            "GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT": "false",
            "CURL_CA_BUNDLE": f"/{_CA}",
        }

    def create(self, replica: Replica, image: LocalImage, share: Limits, extra: Mapping[str, str]) -> Container:
        """A container for a replica, not started.

        Args:
            extra: variables that override all others.
        """
        client = docker_engine.client()
        environment = image.environment() | dict(replica.environment) | self.environment()
        if replica.devices:
            environment["LAUNCHER_SYSROOT"] = f"/{_SYSROOT}"
        if not image.has_launcher:
            # The launcher would select the CPU for torch_xla.
            environment["PJRT_DEVICE"] = "CPU"
        endpoint = client.api.create_endpoint_config(aliases=[replica.hostname, *replica.aliases])
        container = client.containers.create(
            image.id,
            list(replica.arguments) if replica.arguments is not None else None,
            entrypoint=list(replica.command) if replica.command is not None else None,
            environment=environment | dict(extra),
            name=f"{self.name}-{replica.name}-{secrets.token_hex(2)}",
            hostname=replica.hostname[:63],
            network=self.name,
            networking_config={self.name: endpoint},
            volumes={str(self._buckets.resolve()): {"bind": "/gcs", "mode": "rw"}},
            mounts=[self._bucket_mount(one) for one in replica.mounts if one.bucket],
            tmpfs={one.path: f"mode=1777{',ro' * one.read_only}" for one in replica.mounts if not one.bucket},
            mem_limit=share.memory,
            memswap_limit=share.memory,
            nano_cpus=int(share.cpus * 1e9),
            platform=image.platform,
            labels=self._labels,
        )
        self._containers.append(container)
        container.put_archive("/", self._files_of(replica))
        return container

    def _bucket_mount(self, mount: Mount) -> docker.types.Mount:
        """Return the mount of a bucket's folder, and create it: at Cloud Storage, a missing folder is empty.

        Raises:
            UserError: it is not a folder of the bucket.
        """
        bucket = (self._buckets / mount.bucket).resolve()
        found = (bucket / mount.folder).resolve()
        if "/" in mount.bucket or mount.bucket == ".." or not found.is_relative_to(bucket):
            raise UserError(f"the volume at {mount.path}: {mount.bucket}/{mount.folder} is not a folder of a bucket")
        for one in reversed([one for one in (found, *found.parents) if not one.exists()]):
            one.mkdir(exist_ok=True)
            one.chmod(0o777)  # the images run as another user
        return docker.types.Mount(mount.path, str(found), type="bind", read_only=mount.read_only)

    def _files_of(self, replica: Replica) -> bytes:
        """The authority's certificate with the host's CA bundle, and device nodes that only the launcher finds.

        The launcher looks for TPUs below LAUNCHER_SYSROOT. In /dev, frameworks would find them too, and try to use
        them.
        """
        host = settings.ca_bundle()
        files = {_CA: self._authority + (b"\n" + host.read_bytes() if host else b"")}
        files |= {f"{_SYSROOT}{path}": b"" for path in replica.devices}
        return sidecar.archive(files, links={f"{_SYSROOT}/opt": "/opt"} if replica.devices else {})

    def remove(self, container: Container) -> None:
        """Remove a replica's container."""
        with contextlib.suppress(docker.errors.NotFound):
            container.remove(force=True)
        self._containers.remove(container)
