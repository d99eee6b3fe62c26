"""Give a base image the working directory of our images, in its configuration alone.

WORKDIR of a Dockerfile makes an empty layer where the folder exists (https://github.com/docker/buildx/issues/1910), and
GKE does not stream images that have one
(https://cloud.google.com/kubernetes-engine/docs/how-to/image-streaming#limitations). What an image inherits from its
base makes none.
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

from docker.models.images import Image

from trainyard.common.context import Context
from trainyard.common.docker_engine import Engine, resource_labels
from trainyard.common.errors import StepFailed
from trainyard.oci import image_index, image_store
from trainyard.oci.documents import IMAGE_TYPES, descriptor
from trainyard.spec.architectures import Architecture
from trainyard.spec.naming import NAME
from trainyard.spec.state import own
from trainyard.spec.workspace import FOLDER


def replacement(context: Context, reference: str, architecture: Architecture, *, in_engine: bool = True) -> str | None:
    """Return the build context that replaces base ``reference``; None if its working directory is ours already.

    Args:
        context: whose state folder keeps layouts.
        in_engine: whether the engine builds, which has the engine's images.
    Raises:
        UserError: the base cannot be pulled.
        StepFailed: the engine cannot save it.
    """
    image = context.engine.pull(reference, architecture.platform)
    if (image.attrs.get("Config") or {}).get("WorkingDir") == FOLDER:
        return None
    try:
        return layout(context, reference, architecture)
    except image_store.NoLayout:
        if not in_engine:
            raise
        return f"docker-image://{commit(context.engine, image, reference, architecture)}"


def layout(context: Context, reference: str, architecture: Architecture) -> str:
    """Return the build context with image ``reference`` and our working directory, an OCI layout that is written once.

    It raises what :func:`write` raises, and :class:`UserError` if the image cannot be pulled.
    """
    image = context.engine.pull(reference, architecture.platform)
    # An index has one digest for all architectures.
    name = f"{str(image.id).removeprefix('sha256:')}-{architecture.name}-in-workspace"
    folder = context.state / "bases" / name
    if not folder.is_dir():
        own(folder.parent)
        # Removed on return, also after an interrupt or with a full disk.
        with tempfile.TemporaryDirectory(prefix=".base-", dir=folder.parent) as temporary:
            write(context.engine, reference, Path(temporary) / name, architecture)
            try:
                (Path(temporary) / name).rename(folder)
            except OSError:
                if not folder.is_dir():  # else another build has made the same one meanwhile
                    raise
    return address(folder)


def commit(engine: Engine, image: Image, reference: str, architecture: Architecture) -> str:
    """Make an image of the base with our working directory in the engine, unless it is there, and return its reference.

    For engines that save no OCI layouts. Its configuration has the time at which it was made, so that images on it have
    another digest on each host.
    """
    tag = f"{str(image.id).removeprefix('sha256:')[:12]}-{architecture.name}-in-workspace"
    if engine.digest_of(f"{NAME}-base:{tag}") is None:
        container = engine.client.containers.create(
            reference, ["true"], platform=architecture.platform, labels=resource_labels("base")
        )
        try:
            container.commit(f"{NAME}-base", tag, changes=[f"WORKDIR {FOLDER}", 'CMD ["bash"]'])
        finally:
            container.remove()
    return f"{NAME}-base:{tag}"


def address(layout: Path) -> str:
    """Return the build context of an OCI layout with one image (https://docs.docker.com/build/bake/contexts/).

    Raises:
        FileNotFoundError: there is no such layout.
    """
    index = json.loads((layout / "index.json").read_text(encoding="utf-8"))
    return f"oci-layout://{layout}@{index['manifests'][0]['digest']}"


def write(engine: Engine, reference: str, folder: Path, architecture: Architecture) -> None:
    """Write a local image for an architecture into ``folder``, which is made, as an OCI layout.

    Its working directory is ours. The same image gives the same digest.

    Raises:
        UserError: there is no such image.
        NoLayout: the engine saves no OCI layouts.
        StepFailed: there is no image for the architecture.
    """

    def load(digest: str) -> dict[str, Any]:
        document: dict[str, Any] = json.loads((folder / image_store.blob_path(digest)).read_bytes())
        return document

    def store(document: dict[str, Any], media_type: str) -> dict[str, Any]:
        data = json.dumps(document, separators=(",", ":")).encode()
        stored = descriptor(media_type, data)
        (folder / image_store.blob_path(stored["digest"])).write_bytes(data)
        return stored

    folder.mkdir(parents=True)
    image_store.save(engine, reference, folder)
    manifest = json.loads((folder / "index.json").read_text(encoding="utf-8"))
    while image_index.is_index(manifest):  # which may name an index
        digest = image_index.digest_for(manifest, architecture)
        if digest is None:
            raise StepFailed(f"{reference} has no image for {architecture.platform}")
        manifest = load(digest)
    config = load(manifest["config"]["digest"])
    config.setdefault("config", {})["WorkingDir"] = FOLDER
    manifest["config"] |= store(config, manifest["config"]["mediaType"])
    index = {"schemaVersion": 2, "manifests": [store(manifest, manifest.get("mediaType", IMAGE_TYPES[0]))]}
    (folder / "index.json").write_text(json.dumps(index), encoding="utf-8")
