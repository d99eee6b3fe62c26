"""The network `cloudbuild`, which the builds of a host share."""

from __future__ import annotations

import contextlib
import fcntl
import tempfile
from collections.abc import Iterator
from pathlib import Path

import docker.errors

from trainyard.oci import docker_engine

#: Its name is part of Cloud Build's interface: steps start containers in it
#: (https://cloud.google.com/build/docs/build-config-file-schema#network).
NETWORK = "cloudbuild"


@contextlib.contextmanager
def shared_network() -> Iterator[None]:
    """Create the network unless another run has, and remove it when the last run that uses it ends.

    Every run holds a shared lock while it uses the network; the run that can make its lock exclusive is the last.
    `filelock`, which Trainyard uses for other locks, refuses to change a lock from exclusive to shared or back (4.2.11,
    ReadWriteLock); between a release and the next lock, another run could remove the network.
    """
    client = docker_engine.client()
    # The lock belongs to the host, not to a checkout: the network has the same name for all of them.
    with open(Path(tempfile.gettempdir()) / "trainyard-cloudbuild.lock", "a", encoding="utf-8") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        if not client.networks.list(names=[f"^{NETWORK}$"]):
            client.networks.create(NETWORK, labels={docker_engine.OWNED: "cloudbuild"})
        fcntl.flock(file, fcntl.LOCK_SH)
        try:
            yield
        finally:
            with contextlib.suppress(BlockingIOError, docker.errors.APIError):  # another run uses it
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                for network in client.networks.list(names=[f"^{NETWORK}$"], filters={"label": docker_engine.OWNED}):
                    network.remove()
