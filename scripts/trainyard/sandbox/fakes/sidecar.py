"""Run a fake of a Google service in a sidecar container, on the network of the container under test.

The fakes (scripts/trainyard/sandbox/fakes/) are single files that need only the standard library. They are copied into
a container of an image that has python3, such as the image under test: no host mount and no host port is needed, so
this works on a laptop, in Cloud Build and with a remote engine.
"""

from __future__ import annotations

import io
import tarfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from docker.models.containers import Container

from trainyard.oci import docker_engine

FAKES = Path(__file__).parent
GOOGLE_CLOUD = FAKES / "google_cloud.py"
STORAGE = FAKES / "storage.py"

#: Folder of the fake's file in its container.
_FOLDER = "fakes"


def archive(files: Mapping[str, bytes], folders: Sequence[str] = (), links: Mapping[str, str] | None = None) -> bytes:
    """A tar of readable files, of folders that everyone may write to, and of symbolic links (name -> target)."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as tar:
        for name in folders:
            entry = tarfile.TarInfo(name)
            entry.type, entry.mode = tarfile.DIRTYPE, 0o1777
            tar.addfile(entry)
        for name, target in (links or {}).items():
            entry = tarfile.TarInfo(name)
            entry.type, entry.linkname = tarfile.SYMTYPE, target
            tar.addfile(entry)
        for name, content in files.items():
            entry = tarfile.TarInfo(name)
            entry.size, entry.mode = len(content), 0o644
            tar.addfile(entry, io.BytesIO(content))
    return buffer.getvalue()


def create(
    image: str,
    script: Path,
    arguments: Sequence[str],
    *,
    name: str,
    network: str,
    labels: Mapping[str, str],
    aliases: Sequence[str] = (),
    files: Mapping[str, bytes] | None = None,
    **options: Any,
) -> Container:
    """A container of ``image`` that will run the fake in ``script``; the caller starts and removes it.

    Args:
        aliases: further names on the network.
        files: copied into /fakes, the script's folder.
        options: of ``docker.containers.create``: volumes, user...
    """
    client = docker_engine.client()
    endpoint = client.api.create_endpoint_config(aliases=list(aliases))
    container = client.containers.create(
        image,
        list(arguments),
        entrypoint=["python3", "-I", "-S", f"/{_FOLDER}/{script.name}"],
        name=name,
        network=network,
        networking_config={network: endpoint},
        labels=dict(labels),
        **options,
    )
    copies = {f"{_FOLDER}/{script.name}": script.read_bytes()}
    copies |= {f"{_FOLDER}/{file}": content for file, content in (files or {}).items()}
    container.put_archive("/", archive(copies))
    return container
