"""Give a base image the working directory of our images, in its configuration alone.

WORKDIR of a Dockerfile makes an empty layer where the folder exists (https://github.com/docker/buildx/issues/1910), and
GKE does not stream images that have one
(https://cloud.google.com/kubernetes-engine/docs/how-to/image-streaming#limitations). What an image inherits from its
base makes none.
"""

from __future__ import annotations

import hashlib
import json
import tempfile
from pathlib import Path
from typing import Any

from docker.models.images import Image

from trainyard.common.errors import StepFailed
from trainyard.oci import docker_engine, image_store
from trainyard.oci.docker_engine import digest_of
from trainyard.spec.architectures import Architecture
from trainyard.spec.naming import NAME
from trainyard.spec.workspace import FOLDER


def context(state: Path, reference: str, architecture: Architecture, *, in_engine: bool = True) -> str | None:
    """The build context that replaces base ``reference``; None if its working directory is ours already.

    Args:
        state: the state folder, which keeps layouts.
        in_engine: whether the engine builds, which has the engine's images.
    Raises:
        UserError: the base cannot be pulled.
        StepFailed: the engine cannot save it.
    """
    image = docker_engine.pull(reference, architecture)
    if (image.attrs.get("Config") or {}).get("WorkingDir") == FOLDER:
        return None
    try:
        return layout(state, reference, architecture)
    except image_store.NoLayout:
        if not in_engine:
            raise
        return f"docker-image://{commit(reference, _name(image, architecture), architecture)}"


def _name(image: Image, architecture: Architecture) -> str:
    # An index has one digest for all architectures.
    return f"{str(image.id).removeprefix('sha256:')}-{architecture.name}-in-workspace"


def layout(state: Path, reference: str, architecture: Architecture) -> str:
    """The build context with image ``reference`` and our working directory, an OCI layout that is written once.

    Raises:
        UserError: the image cannot be pulled.
        NoLayout: the engine saves no OCI layouts.
        StepFailed: the engine cannot save it.
    """
    name = _name(docker_engine.pull(reference, architecture), architecture)
    folder = state / "bases" / name
    if not folder.is_dir():
        folder.parent.mkdir(parents=True, exist_ok=True)
        # Removed on return, also after an interrupt or with a full disk.
        with tempfile.TemporaryDirectory(prefix=".base-", dir=folder.parent) as temporary:
            write(reference, Path(temporary) / name, architecture)
            try:
                (Path(temporary) / name).rename(folder)
            except OSError:
                if not folder.is_dir():  # else another build has made the same one meanwhile
                    raise
    return address(folder)


def commit(reference: str, name: str, architecture: Architecture) -> str:
    """Make an image of the base with our working directory in the engine, unless it is there; its reference.

    For engines that save no OCI layouts. Its configuration has the time at which it was made, so that images on it have
    another digest on each host.

    Args:
        name: begins with the base's digest.
    """
    tag = f"{name[:12]}-{architecture.name}-in-workspace"
    if digest_of(f"{NAME}-base:{tag}") is None:
        client = docker_engine.client()
        container = client.containers.create(
            reference, ["true"], platform=architecture.platform, labels=docker_engine.resource_labels("base")
        )
        try:
            container.commit(f"{NAME}-base", tag, changes=[f"WORKDIR {FOLDER}", 'CMD ["bash"]'])
        finally:
            container.remove()
    return f"{NAME}-base:{tag}"


def address(layout: Path) -> str:
    """The build context of an OCI layout with one image (https://docs.docker.com/build/bake/contexts/).

    Raises:
        FileNotFoundError: there is no such layout.
    """
    index = json.loads((layout / "index.json").read_text(encoding="utf-8"))
    return f"oci-layout://{layout}@{index['manifests'][0]['digest']}"


def write(reference: str, folder: Path, architecture: Architecture) -> None:
    """Write a local image for an architecture into ``folder``, which is made, as an OCI layout.

    Its working directory is ours.

    The same image gives the same digest.

    Raises:
        UserError: there is no such image.
        NoLayout: the engine saves no OCI layouts.
        StepFailed: there is no image for the architecture.
    """
    folder.mkdir(parents=True)
    image_store.save(reference, folder)
    manifest = _manifest(folder, json.loads((folder / "index.json").read_text(encoding="utf-8")), architecture)
    if manifest is None:
        raise StepFailed(f"{reference} has no image for {architecture.platform}")
    config = _load(folder, manifest["config"]["digest"])
    config.setdefault("config", {})["WorkingDir"] = FOLDER
    manifest["config"] |= _store(folder, config)
    media_type = manifest.get("mediaType", "application/vnd.oci.image.manifest.v1+json")
    entry = {"mediaType": media_type, **_store(folder, manifest)}
    index = {"schemaVersion": 2, "manifests": [entry]}
    (folder / "index.json").write_text(json.dumps(index), encoding="utf-8")


def _manifest(folder: Path, index: dict[str, Any], architecture: Architecture) -> dict[str, Any] | None:
    """The manifest for an architecture in an index, or in the index that it names."""
    for entry in index["manifests"]:
        platform = entry.get("platform") or {}
        if platform and f"{platform.get('os')}/{platform.get('architecture')}" != architecture.platform:
            continue
        document = _load(folder, entry["digest"])
        return _manifest(folder, document, architecture) if "manifests" in document else document
    return None


def _blob(folder: Path, digest: str) -> Path:
    return folder / "blobs" / "sha256" / digest.removeprefix("sha256:")


def _load(folder: Path, digest: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(_blob(folder, digest).read_bytes())
    return found


def _store(folder: Path, document: dict[str, Any]) -> dict[str, Any]:
    """Store a document; its ``digest`` and ``size``."""
    data = json.dumps(document, separators=(",", ":")).encode()
    digest = f"sha256:{hashlib.sha256(data).hexdigest()}"
    _blob(folder, digest).write_bytes(data)
    return {"digest": digest, "size": len(data)}
