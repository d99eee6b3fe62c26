"""The sandbox of a rehearsal: a network, a folder of buckets, and the sidecars. It is removed with all containers."""

from __future__ import annotations

import contextlib
import json
import os
import re
import secrets
import stat
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import docker.errors
import docker.types
from docker.models.containers import Container

from trainyard.common import settings
from trainyard.common.docker_engine import Engine
from trainyard.common.errors import StepFailed, UserError
from trainyard.sandbox import containers
from trainyard.sandbox.containers import Sandbox
from trainyard_jobs.model.options import Mount
from trainyard_jobs.rehearsal.images import LocalImage
from trainyard_jobs.rehearsal.model import PROJECT, ZONE, Rehearsal, Replica

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


def limits(engine: Engine, replicas: int, cpus: float = 0.0, memory: int = 0) -> Limits:
    """Equal shares of the engine's machine; ``cpus`` and ``memory`` (bytes) override them if not 0.

    Raises:
        UserError: there is not enough memory for all replicas.
    """
    info = engine.client.info()
    share = int(info["MemTotal"] * _MEMORY_SHARE / replicas)
    if not memory and share < _LEAST_MEMORY:
        raise UserError(
            f"{replicas} replicas on a machine with {info['MemTotal'] / 2**30:.1f} GB of memory would have "
            f"{share / 2**20:.0f} MB each, which is not enough; '--memory ...' overrides this"
        )
    return Limits(cpus or max(1.0, info["NCPU"] / replicas), memory or share)


def of_replica(share: Limits, replica: Replica) -> Limits:
    """Return the limits of a replica: those of the job, where they are below its share."""
    memory = min(share.memory, replica.memory or share.memory)
    return Limits(min(share.cpus, replica.cpus or share.cpus), memory)


def buckets_named(documents: list[dict[str, Any]]) -> list[str]:
    """The buckets that a job file names, as gs://NAME, /gcs/NAME or a Cloud Storage FUSE volume."""
    text = json.dumps(documents)
    found = re.findall(r"(?:gs://|/gcs/|\"bucketName\": \")([a-z0-9][a-z0-9._-]*[a-z0-9])", text)
    return sorted(set(found))


class RehearsalSandbox(Sandbox):
    """A sandbox with folders for buckets, the sidecars of Google Cloud and Cloud Storage, and the replicas.

    Args:
        image: that the sidecars run in.
        buckets: folder with a folder for each bucket.
        names: buckets to create.
    """

    def __init__(
        self, engine: Engine, rehearsal: Rehearsal, image: LocalImage, buckets: Path, names: list[str]
    ) -> None:
        super().__init__(engine, "rehearse")
        self._rehearsal, self._image, self._buckets, self._names = rehearsal, image, buckets, names
        self._authority = b""
        self._storage: Container | None = None
        self._begun = time.time() - 1
        self._modes: dict[Path, int] = {}

    def set_up(self) -> None:
        """Create the network and the buckets, and start the sidecars."""
        self._buckets.mkdir(parents=True, exist_ok=True)
        self._engine.require_folder(self._image.id, str(self._buckets.resolve()))
        self._modes = {one: stat.S_IMODE(one.stat().st_mode) for one in self._buckets.iterdir()}
        for bucket in self._names:
            self._open(self._buckets / bucket)
        super().set_up()
        self._storage = self._start_storage()
        self._start_google_cloud()

    def _open(self, folder: Path) -> None:
        """Make a folder that the images, which run as another user, may write to until the rehearsal ends."""
        self._modes.setdefault(folder, stat.S_IMODE(folder.stat().st_mode) if folder.exists() else 0o700)
        folder.mkdir(exist_ok=True)
        if folder.stat().st_uid == os.getuid():
            folder.chmod(0o777)

    def close(self) -> None:
        """Give the files in the buckets to their owner, who alone may enter new buckets, and remove everything else."""
        try:
            if self._storage:
                self._restore_ownership(self._storage)
        finally:
            super().close()
            new = dict.fromkeys(self._buckets.iterdir() if self._buckets.is_dir() else (), 0o700)
            for folder, mode in (new | self._modes).items():
                with contextlib.suppress(OSError):  # it is another user's
                    if folder.is_dir() and not folder.is_symlink():
                        folder.chmod(mode)

    def _start_storage(self) -> Container:
        from trainyard_jobs.rehearsal import certificates  # imports cryptography, an optional dependency

        self._authority, server = certificates.make(STORAGE_NAMES)
        return self._started(
            "Cloud Storage",
            containers.STORAGE,
            ["/gcs", "--host=0.0.0.0", "--port=80", "--certificate=/fakes/server.pem"],
            "storage",
            aliases=[STORAGE, *STORAGE_NAMES],
            files={"server.pem": server},
            volumes=self._bucket_volume(),
        )

    def _start_google_cloud(self) -> None:
        arguments = ["--host=0.0.0.0", "--port=80", f"--project={PROJECT}", f"--zone={ZONE}", "--node="]
        attributes = json.dumps({host: dict(values) for host, values in self._rehearsal.attributes.items()})
        self._started(
            "Google Cloud",
            containers.GOOGLE_CLOUD,
            [*arguments, "--host-attributes=/fakes/attributes.json"],
            "google-cloud",
            aliases=[METADATA],
            files={"attributes.json": attributes.encode()},
        )

    def _started(self, what: str, fake: Path, arguments: list[str], name: str, **options: Any) -> Container:
        """Start a sidecar as root, and wait until it serves."""
        container = self.sidecar(
            self._image.id,
            fake,
            arguments,
            name,
            user="0",
            platform=self._image.platform,
            environment=self._image.environment(self._engine),
            **options,
        )
        try:
            container.start()
        except docker.errors.APIError as error:
            raise StepFailed(
                f"the fake {what} cannot run in {self._image.id[:19]} ({error.explanation}): it requires python3; "
                f"give another image with '--sidecar ...'"
            ) from None
        for line in containers.lines(container):
            if '"url"' in line:
                return container
            raise StepFailed(f"the fake {what} did not start: {line.strip()[:300]}")
        place = f"the fake {what} did not start in {self._image.id[:19]}"
        raise StepFailed(f"{place}; give another image with '--sidecar ...'")

    def _bucket_volume(self) -> dict[str, dict[str, str]]:
        return {str(self._buckets.resolve()): {"bind": "/gcs", "mode": "rw"}}

    def _restore_ownership(self, storage: Container) -> None:
        """Give files that containers created to the owner of the buckets, who could not remove them otherwise."""
        found = self._buckets.stat()
        with contextlib.suppress(docker.errors.APIError):
            owner = f"--hand-over={found.st_uid}:{found.st_gid}"
            command = ["python3", "-I", "-S", "/fakes/storage.py", "/gcs", owner, f"--since={self._begun:.3f}"]
            storage.exec_run(command, user="0")

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
            "TENSORSTORE_GCS_HTTP_URL": f"http://{STORAGE}",
            # gcsfs would query the kind of every bucket from Cloud Storage's gRPC API, which the sidecar lacks.
            "GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT": "false",
            "CURL_CA_BUNDLE": f"/{_CA}",
        }

    def create_replica(self, replica: Replica, image: LocalImage, share: Limits, extra: Mapping[str, str]) -> Container:
        """Create a container for a replica, without starting it.

        Args:
            extra: variables that override all others.
        """
        share = of_replica(share, replica)
        environment = image.environment(self._engine) | dict(replica.environment) | self.environment()
        if replica.devices:
            environment["LAUNCHER_SYSROOT"] = f"/{_SYSROOT}"
        if not image.has_launcher:
            # The launcher would select the CPU for torch_xla.
            environment["PJRT_DEVICE"] = "CPU"
        return self.create(
            image.id,
            replica.arguments,
            f"{replica.name}-{secrets.token_hex(2)}",
            aliases=[replica.hostname, *replica.aliases],
            files=self._files_of(replica),
            entrypoint=list(replica.command) if replica.command is not None else None,
            environment=environment | dict(extra),
            hostname=replica.hostname[:63],
            volumes=self._bucket_volume(),
            mounts=[self._bucket_mount(one) for one in replica.mounts if one.bucket],
            tmpfs={one.path: f"mode=1777{',ro' * one.read_only}" for one in replica.mounts if not one.bucket},
            mem_limit=share.memory,
            memswap_limit=share.memory,
            nano_cpus=int(share.cpus * 1e9),
            platform=image.platform,
        )

    def _bucket_mount(self, mount: Mount) -> docker.types.Mount:
        """Return the mount of a bucket's folder, and create it: at Cloud Storage, a missing folder is empty.

        Raises:
            UserError: it is not a folder of the bucket.
        """
        bucket = (self._buckets / mount.bucket).resolve()
        found = (bucket / mount.folder).resolve()
        if "/" in mount.bucket or mount.bucket == ".." or not found.is_relative_to(bucket):
            raise UserError(f"the volume at {mount.path}: {mount.bucket}/{mount.folder} is not a folder of a bucket")
        for one in reversed([found, *found.parents]):
            if one.is_relative_to(bucket) and not (mount.read_only and one.exists()):
                self._open(one)
        return docker.types.Mount(mount.path, str(found), type="bind", read_only=mount.read_only)

    def _files_of(self, replica: Replica) -> bytes:
        """The authority's certificate with the host's CA bundle, and device nodes that only the launcher finds.

        The launcher looks for TPUs below LAUNCHER_SYSROOT. In /dev, frameworks would find them too, and try to use
        them.
        """
        host = settings.ca_bundle()
        files = {_CA: self._authority + (b"\n" + host.read_bytes() if host else b"")}
        files |= {f"{_SYSROOT}{path}": b"" for path in replica.devices}
        return containers.archive(files, links={f"{_SYSROOT}/opt": "/opt"} if replica.devices else {})
