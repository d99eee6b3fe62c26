"""A base image gets the working directory of our images in its configuration, and keeps its layers."""

from __future__ import annotations

import hashlib
import io
import json
import os
import signal
import tarfile
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.fakes.engine import FakeEngine

from trainyard.common.context import Context
from trainyard.common.docker_engine import Engine
from trainyard.common.errors import StepFailed
from trainyard.image import working_directory
from trainyard.spec.architectures import AMD64, ARM64

OCI = "application/vnd.oci.image"
LAYERS = [b"the first layer", b"the second layer"]


class Layout:
    """An OCI layout (https://github.com/opencontainers/image-spec/blob/main/image-layout.md)."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        (folder / "blobs" / "sha256").mkdir(parents=True, exist_ok=True)
        (folder / "oci-layout").write_text('{"imageLayoutVersion": "1.0.0"}', encoding="utf-8")

    def blob(self, data: bytes | dict[str, Any], media_type: str) -> dict[str, Any]:
        """Store a blob; its descriptor."""
        body = data if isinstance(data, bytes) else json.dumps(data).encode()
        digest = hashlib.sha256(body).hexdigest()
        (self.folder / "blobs" / "sha256" / digest).write_bytes(body)
        return {"mediaType": media_type, "digest": f"sha256:{digest}", "size": len(body)}

    def image(self, architecture: str, os: str = "linux", **config: Any) -> dict[str, Any]:
        """Store an image; its descriptor, with a platform."""
        document: dict[str, Any] = {"architecture": architecture, "os": os, "rootfs": {"type": "layers"}} | config
        manifest = {
            "schemaVersion": 2,
            "mediaType": f"{OCI}.manifest.v1+json",
            "config": self.blob(document, f"{OCI}.config.v1+json"),
            "layers": [self.blob(layer + architecture.encode(), f"{OCI}.layer.v1.tar+gzip") for layer in LAYERS],
        }
        platform = {"os": os, "architecture": architecture}
        return self.blob(manifest, f"{OCI}.manifest.v1+json") | {"platform": platform}

    def index(self, *entries: dict[str, Any]) -> dict[str, Any]:
        """Store an index; its descriptor."""
        media_type = f"{OCI}.index.v1+json"
        return self.blob({"schemaVersion": 2, "mediaType": media_type, "manifests": list(entries)}, media_type)

    def top(self, *entries: dict[str, Any]) -> None:
        """Write index.json."""
        document = {"schemaVersion": 2, "manifests": list(entries)}
        (self.folder / "index.json").write_text(json.dumps(document), encoding="utf-8")

    def load(self, digest: str) -> dict[str, Any]:
        """A stored document, whose digest is checked."""
        data = (self.folder / "blobs" / "sha256" / digest.removeprefix("sha256:")).read_bytes()
        assert hashlib.sha256(data).hexdigest() == digest.removeprefix("sha256:")
        found: dict[str, Any] = json.loads(data)
        return found


CONFIG = {"config": {"Cmd": ["bash"], "Env": ["A=1"]}, "history": [{"created_by": "debian"}]}


def in_an_index(layout: Layout) -> None:
    """As Docker with the containerd store saves an image with attestations: an index in an index."""
    attestation = layout.image("unknown", "unknown")
    amd64 = layout.image("amd64", **CONFIG)
    layout.top(layout.index(layout.image("arm64", **CONFIG), attestation, amd64))


def alone(layout: Layout) -> None:
    """As Docker saves an image that was loaded: a manifest without a platform."""
    entry = layout.image("amd64", **CONFIG)
    del entry["platform"]
    layout.top(entry)


def without_settings(layout: Layout) -> None:
    """An image without a ``config``, which is optional."""
    layout.top(layout.index(layout.image("amd64")))


Save = Callable[..., None]


@pytest.fixture
def engine_has(fake_engine: FakeEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Save:
    """The engine has an image, saves it as a function writes it, and says that it has a configuration."""
    monkeypatch.setenv("TRAINYARD_BUILD", str(tmp_path / "state"))

    def has(image: Callable[[Layout], None], config: dict[str, Any] | None = None) -> None:
        packed = io.BytesIO()
        with tempfile.TemporaryDirectory() as folder, tarfile.open(fileobj=packed, mode="w") as tar:
            image(Layout(Path(folder)))
            for path in sorted(Path(folder).iterdir()):
                tar.add(path, path.name)
        fake_engine.images.clear()
        names = ("debian", "registry.example/debian:12")
        fake_engine.add(*names, digest="sha256:0123", config=config or {}, saved=packed.getvalue())

    return has


@pytest.mark.parametrize("image", [in_an_index, alone, without_settings])
def test_containers_of_the_image_start_in_the_workspace_and_its_layers_are_the_same(
    engine_has: Save, tmp_path: Path, image: Callable[[Layout], None]
) -> None:
    engine_has(image)
    working_directory.write(Engine(), "debian", tmp_path / "layout", AMD64)
    layout = Layout(tmp_path / "layout")
    (entry,) = json.loads((tmp_path / "layout" / "index.json").read_text(encoding="utf-8"))["manifests"]
    manifest = layout.load(entry["digest"])
    assert entry["mediaType"] == manifest["mediaType"] == f"{OCI}.manifest.v1+json"
    assert entry["size"] == len((tmp_path / "layout" / "blobs" / "sha256" / entry["digest"][7:]).read_bytes())
    expected = [f"sha256:{hashlib.sha256(layer + b'amd64').hexdigest()}" for layer in LAYERS]
    assert [layer["digest"] for layer in manifest["layers"]] == expected
    config = layout.load(manifest["config"]["digest"])
    assert manifest["config"]["mediaType"] == f"{OCI}.config.v1+json"
    settings = {} if image is without_settings else CONFIG["config"]
    assert config["config"] == settings | {"WorkingDir": "/workspace"}
    assert config["architecture"] == "amd64"
    assert config.get("history") == (None if image is without_settings else CONFIG["history"])


def test_of_an_index_the_image_for_the_architecture_is_taken(engine_has: Save, tmp_path: Path) -> None:
    engine_has(lambda layout: layout.top(layout.index(layout.image("amd64"), layout.image("arm64"))))
    for architecture in (AMD64, ARM64):
        folder = tmp_path / architecture.name
        working_directory.write(Engine(), "debian", folder, architecture)
        layout = Layout(folder)
        (entry,) = json.loads((folder / "index.json").read_text(encoding="utf-8"))["manifests"]
        config = layout.load(layout.load(entry["digest"])["config"]["digest"])
        assert config["architecture"] == architecture.name


def test_the_same_image_gives_the_same_digest_each_time(engine_has: Save, tmp_path: Path) -> None:
    """BuildKit's cache and the provenance of images have it."""
    engine_has(in_an_index)
    found = []
    for name in ("one", "two"):
        working_directory.write(Engine(), "debian", tmp_path / name, AMD64)
        found.append(working_directory.address(tmp_path / name).partition("@")[2])
    assert found[0] == found[1] != ""
    engine_has(lambda layout: layout.top(layout.image("amd64", config={"Cmd": ["sh"]})))
    working_directory.write(Engine(), "debian", tmp_path / "other", AMD64)
    assert working_directory.address(tmp_path / "other").partition("@")[2] not in found


@pytest.mark.parametrize(
    "image",
    [
        lambda layout: layout.top(layout.index(layout.image("arm64"), layout.image("unknown", "unknown"))),
        lambda layout: layout.top(layout.index(layout.image("amd64", "windows"))),
        lambda layout: layout.top(layout.image("arm64")),
        lambda layout: layout.top(),
    ],
)
def test_a_base_without_an_image_of_our_platform_is_one_line(
    engine_has: Save, tmp_path: Path, image: Callable[[Layout], None]
) -> None:
    engine_has(image)
    with pytest.raises(StepFailed) as error:
        working_directory.write(Engine(), "registry.example/debian:12", tmp_path / "layout", AMD64)
    assert str(error.value) == "registry.example/debian:12 has no image for linux/amd64"


def saves(engine: FakeEngine) -> int:
    """How often an image was saved."""
    return sum(request.endswith("/get") for request in engine.requests)


@pytest.mark.parametrize("config", [{}, {"WorkingDir": ""}, {"WorkingDir": "/"}])
def test_a_base_is_replaced_by_a_build_context_that_is_written_once(
    engine_has: Save, fake_engine: FakeEngine, tmp_path: Path, config: dict[str, Any]
) -> None:
    engine_has(in_an_index, config)
    address = working_directory.replacement(Context(), "debian", AMD64)
    assert address is not None and address.startswith(
        f"oci-layout://{tmp_path}/state/bases/0123-amd64-in-workspace@sha256:"
    )
    assert working_directory.replacement(Context(), "debian", AMD64) == address
    assert saves(fake_engine) == 1
    assert [path.name for path in (tmp_path / "state" / "bases").glob("[!.]*")] == ["0123-amd64-in-workspace"]


def test_a_base_that_starts_in_the_workspace_is_used_as_it_is(engine_has: Save, fake_engine: FakeEngine) -> None:
    """As the one that `trainyard base` bootstraps."""
    engine_has(in_an_index, {"WorkingDir": "/workspace"})
    assert working_directory.replacement(Context(), "debian", AMD64) is None
    assert saves(fake_engine) == 0


def test_a_layout_that_was_not_finished_is_written_again(
    engine_has: Save, fake_engine: FakeEngine, tmp_path: Path
) -> None:
    engine_has(in_an_index)
    interrupted = [True]

    def interrupt() -> None:
        if interrupted.pop():
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(0.5)

    fake_engine.afterwards("GET /images/.*/get", lambda: interrupt() if interrupted else None)
    with pytest.raises(KeyboardInterrupt):
        working_directory.replacement(Context(), "debian", AMD64)
    assert [path.name for path in (tmp_path / "state" / "bases").iterdir()] == [".trainyard"], (
        "an interrupt leaves nothing behind"
    )
    address = working_directory.replacement(Context(), "debian", AMD64)
    assert address is not None and Path(address.removeprefix("oci-layout://").partition("@")[0]).is_dir()
