"""`trainyard push --code-only` replaces the code of an image at a registry: one layer, no engine, nine requests."""

from __future__ import annotations

import base64
import datetime
import gzip
import io
import json
import re
import signal
import subprocess
import sys
import tarfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import zstandard
from tests.fakes.engine import FakeEngine
from tests.fakes.registry import Registry, sha256
from tests.workspaces import added, lock

from trainyard.common import settings
from trainyard.common.errors import StepFailed, UserError
from trainyard.common.settings import state_folder
from trainyard.image import facts, recipes
from trainyard.oci import image_index
from trainyard.oci.registry import Repository
from trainyard.recipe import DIGEST
from trainyard.release import (
    code_push,
    platform_index,
    promotion,
    publish,
    pushed_code,
    pushes,
    repository_code,
    sources,
)
from trainyard.spec import model, state
from trainyard.spec.architectures import AMD64, ARM64
from trainyard.spec.model import Spec
from trainyard.workspace import code_layer

OCI = "application/vnd.oci.image"
DOCKER = "application/vnd.docker"
ZSTD, GZIP = f"{OCI}.layer.v1.tar+zstd", f"{OCI}.layer.v1.tar+gzip"
TAG = "mine-2.15.0-20261120-00000000"
Command = Callable[..., tuple[int, str, str]]

#: What a push sends in turn when challenge and image are known. The config is sent while the code is.
KNOWN = ["GET manifests", "GET token", "POST uploads", "POST uploads", "PUT manifests", "PUT uploads", "PUT uploads"]


@pytest.fixture(autouse=True)
def own_state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRAINYARD_BUILD", str(tmp_path / "state"))


@pytest.fixture(autouse=True)
def no_need_of_an_engine(fake_engine: FakeEngine) -> Iterator[None]:
    """No test needs an engine, or may look for one."""
    yield
    assert fake_engine.requests == [], "the engine was called"


@pytest.fixture
def registry(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Registry]:
    """A registry with tokens; Docker's configuration has the credentials."""
    with Registry(user="me", password="secret") as fake:
        folder = tmp_path / "docker"
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps(fake.docker_config()), encoding="utf-8")
        monkeypatch.setenv("DOCKER_CONFIG", str(folder))
        yield fake


@pytest.fixture
def address(registry: Registry) -> str:
    return f"{registry.host}/ml"


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A workspace, the current folder; its code is a file of 200 KB that compresses badly, and a script."""
    folder = tmp_path / "mine"
    folder.mkdir()
    (folder / "trainyard.yaml").write_text("extends: cpu\nname: mine\ncode: [train.py]\nrun: python train.py\n")
    (folder / "train.py").write_text("print('loss 1.0')\n")
    lock(model.load(str(folder)))
    monkeypatch.chdir(folder)
    return folder


@pytest.fixture
def spec(root: Path) -> Spec:
    return model.load(None)


def compressed(data: bytes, media_type: str) -> bytes:
    if media_type.endswith("zstd"):
        return zstandard.compress(data)
    return gzip.compress(data) if media_type.endswith("gzip") else data


@pytest.fixture
def pushed(registry: Registry, root: Path, tmp_path: Path) -> Callable[..., str]:
    """An image of the workspace at the registry, as a build and a push make it; its digest."""

    def push(
        *,
        layer: str = ZSTD,
        manifest: str = f"{OCI}.manifest.v1+json",
        tag: str = TAG,
        labels: dict[str, str] | None = None,
        arch: str = "amd64",
    ) -> str:
        spec = model.load(str(root), arch)
        assert spec.workspace
        tar = tmp_path / "built.tar"
        code = code_layer.write(spec.workspace, tar, spec.site)
        below = f"the layers below for {arch}".encode()
        blobs = [compressed(below, layer), compressed(tar.read_bytes(), layer)]
        own = facts.labels(spec) | {
            "io.trainyard.code": code.diff_id,
            "io.trainyard.lock": facts.sha256_of(spec.lock_file),
            DIGEST: "0" * 64,
            "org.opencontainers.image.version": tag,
        }
        config = json.dumps(
            {
                "architecture": arch,
                "os": "linux",
                "created": "2026-11-20T00:00:00Z",
                "config": {"Entrypoint": ["launch"], "WorkingDir": "/workspace", "Labels": own | (labels or {})},
                "rootfs": {"type": "layers", "diff_ids": [sha256(below), code.diff_id]},
                "history": [{"created_by": "COPY /wheel-x/../out /"}, {"created_by": "COPY code"}],
                "moby.buildkit.cache.v0": "old",
            }
        ).encode()
        for blob in (*blobs, config):
            registry.blobs[sha256(blob)] = blob
        document = {
            "schemaVersion": 2,
            "mediaType": manifest,
            "config": {"mediaType": "application/any+json", "digest": sha256(config), "size": len(config)},
            "layers": [{"mediaType": layer, "digest": sha256(blob), "size": len(blob)} for blob in blobs],
        }
        return registry.put_manifest(tag, manifest, json.dumps(document, indent=2).encode())

    return push


@pytest.fixture
def remembered(pushed: Callable[..., str], spec: Spec, registry: Registry, address: str) -> str:
    """The digest of an image that was pushed from this host; its requests are not counted."""
    digest = pushed()
    remember(spec, Repository(f"{address}/trainyard"), TAG, digest)
    registry.requests.clear()
    registry.received = 0
    return digest


def remember(spec: Spec, repository: Repository, tag: str, digest: str) -> None:
    """Record an image as a push does."""
    pushed_code.remember(recipes.named(spec), spec.architecture, spec.folder, repository, tag, digest)


def push_code(spec: Spec, address: str, *, image: str | None = None) -> dict[str, Any]:
    """Push the code of a workspace as it is now."""
    return code_push.push(repository_code.of(spec), address, state_folder(), image=image)


def promote(spec: Spec, address: str, version: str) -> dict[str, Any]:
    return promotion.promote(recipes.named(spec), Repository(f"{address}/trainyard"), version)


def edit(root: Path, text: str = "print('loss 0.5')\n") -> None:
    (root / "train.py").write_text(text)


def short(requests: list[str]) -> list[str]:
    """Method and kind of requests, sorted."""
    return sorted(
        f"{one.split()[0]} {next(w for w in ('token', 'manifests', 'uploads', 'blobs') if w in one)}"
        for one in requests
    )


def stored(registry: Registry, version: str) -> tuple[str, dict[str, Any], dict[str, Any]]:
    """Media type, manifest and configuration of an image at the registry."""
    media_type, body = registry.manifests[registry.tags.get(version, version)]
    document = json.loads(body)
    return media_type, document, json.loads(registry.blobs[document["config"]["digest"]])


def files(registry: Registry, document: dict[str, Any]) -> dict[str, bytes]:
    """Path -> content of the files of an image's topmost layer."""
    layer = document["layers"][-1]
    data = registry.blobs[layer["digest"]]
    assert len(data) == layer["size"]
    if layer["mediaType"].endswith("zstd"):
        data = zstandard.ZstdDecompressor().decompressobj().decompress(data)
    elif layer["mediaType"].endswith("gzip"):
        data = gzip.decompress(data)
    with tarfile.open(fileobj=io.BytesIO(data)) as tar:
        return {one.name: tar.extractfile(one).read() for one in tar if one.isfile()}  # type: ignore[union-attr]


def test_an_edit_is_a_blob_a_configuration_and_a_manifest(
    registry: Registry, address: str, spec: Spec, root: Path, remembered: str
) -> None:
    edit(root)
    made = push_code(spec, address)
    assert short(registry.requests) == KNOWN
    assert registry.received == made["bytes_uploaded"] < 20_000
    media_type, document, config = stored(registry, made["digest"])
    _, before, old = stored(registry, remembered)
    assert media_type == f"{OCI}.manifest.v1+json"
    assert document["layers"][:-1] == before["layers"][:-1] and len(document["layers"]) == len(before["layers"])
    assert files(registry, document)["workspace/train.py"] == b"print('loss 0.5')\n"
    assert config["rootfs"]["diff_ids"] == [old["rootfs"]["diff_ids"][0], made["code"]]
    assert config["history"] == old["history"] and config["config"]["Entrypoint"] == ["launch"]
    assert "moby.buildkit.cache.v0" not in config
    labels = config["config"]["Labels"]
    assert labels["io.trainyard.code"] == made["code"] and labels["io.trainyard.tested"] == "none"
    tag = labels["org.opencontainers.image.version"]
    assert tag.startswith("dev-") and registry.tags[tag] == made["digest"]
    assert made["reference"] == f"{address}/trainyard@{made['digest']}" and made["tag"] == f"{address}/trainyard:{tag}"
    assert made["base"] == remembered and made["changed"] and made["tested"] == "none"


def test_code_is_replaced_and_not_stacked(
    registry: Registry, address: str, spec: Spec, root: Path, remembered: str
) -> None:
    for number in range(3):
        edit(root, f"print({number})\n")
        made = push_code(spec, address)
        assert made["base"] == remembered and len(stored(registry, made["digest"])[1]["layers"]) == 2


def test_on_a_host_that_never_pushed_it_is_found_within_nine_requests(
    registry: Registry, address: str, spec: Spec, root: Path, remembered: str
) -> None:
    """As in a new clone: neither the challenge of the registry nor the image are known."""
    pushes.forget(state_folder() / "mine", f"{address}/trainyard")
    for path in (state_folder() / "registries").glob("[!.]*"):
        path.unlink()
    edit(root)
    made = push_code(spec, address)
    assert short(registry.requests) == sorted([*KNOWN, "GET manifests", "GET manifests"]), "the first one was refused"
    assert made["base"] == remembered
    assert stored(registry, made["digest"])[1].keys() == {"schemaVersion", "mediaType", "config", "layers"}
    registry.requests.clear()
    edit(root, "print('again')\n")
    assert push_code(spec, address)["base"] == remembered
    assert short(registry.requests) == KNOWN


def test_the_same_code_has_the_same_digest_on_every_host(
    registry: Registry, address: str, spec: Spec, root: Path, remembered: str
) -> None:
    edit(root)
    made = push_code(spec, address)
    pushes.forget(state_folder() / "mine", f"{address}/trainyard")
    registry.immutable = True
    assert push_code(spec, address)["digest"] == made["digest"]


def test_unchanged_code_makes_no_new_image(
    registry: Registry, address: str, spec: Spec, root: Path, remembered: str
) -> None:
    made = push_code(spec, address)
    assert (made["digest"], made["changed"], made["tested"]) == (remembered, False, "started")
    assert made["tag"] == f"{address}/trainyard:{TAG}"
    edit(root)
    first = push_code(spec, address)
    registry.requests.clear()
    second = push_code(spec, address)
    assert second["digest"] == first["digest"] and not second["changed"]
    assert short(registry.requests) == ["GET token", "HEAD manifests"]


def test_code_that_was_removed_from_the_registry_is_pushed_again(
    registry: Registry, address: str, spec: Spec, root: Path, remembered: str
) -> None:
    """Registries are cleaned up of ``dev-`` tags."""
    edit(root)
    first = push_code(spec, address)
    del registry.manifests[first["digest"]]
    second = push_code(spec, address)
    assert second["changed"] and second["digest"] == first["digest"] in registry.manifests


@pytest.mark.parametrize(
    ("layer", "manifest"),
    [
        (GZIP, f"{OCI}.manifest.v1+json"),
        (f"{DOCKER}.image.rootfs.diff.tar.gzip", f"{DOCKER}.distribution.manifest.v2+json"),
        (f"{OCI}.layer.v1.tar", f"{OCI}.manifest.v1+json"),
    ],
)
def test_media_types_are_kept(
    registry: Registry, address: str, spec: Spec, root: Path, pushed: Callable[..., str], layer: str, manifest: str
) -> None:
    remember(spec, Repository(f"{address}/trainyard"), TAG, pushed(layer=layer, manifest=manifest))
    edit(root)
    for _ in range(2):
        made = push_code(spec, address)
        media_type, document, _ = stored(registry, made["digest"])
        assert (media_type, document["mediaType"], document["layers"][-1]["mediaType"]) == (manifest, manifest, layer)
        assert files(registry, document)["workspace/train.py"] == b"print('loss 0.5')\n"
        pushes.forget(state_folder() / "mine", f"{address}/trainyard")  # the second time it is found by its tag


def index(registry: Registry, digest: str, architecture: str) -> str:
    platform = {"os": "linux", "architecture": architecture}
    attestation = {
        "mediaType": f"{OCI}.manifest.v1+json",
        "digest": digest,
        "size": 1,
        "platform": {"os": "unknown", "architecture": "unknown"},
    }
    manifests = [
        attestation,
        {"mediaType": f"{OCI}.manifest.v1+json", "digest": digest, "size": 1, "platform": platform},
    ]
    media_type = f"{OCI}.index.v1+json"
    return registry.put_manifest("index", media_type, json.dumps({"manifests": manifests}).encode())


def test_the_image_for_linux_of_an_index_is_taken(
    registry: Registry, address: str, spec: Spec, root: Path, pushed: Callable[..., str]
) -> None:
    index(registry, pushed(), "amd64")
    edit(root)
    made = push_code(spec, address, image="index")
    assert stored(registry, made["digest"])[0] == f"{OCI}.manifest.v1+json"
    index(registry, registry.tags[TAG], "arm64")
    with pytest.raises(UserError, match="an index without an image for linux/amd64"):
        push_code(spec, address, image="index")


@pytest.mark.parametrize(
    ("original", "says"),
    [
        ("{", "its annotation io.trainyard.original is malformed"),
        ('[["a", 5]]', "its annotation io.trainyard.original is malformed"),
        ('[["text/html", "e30="]]', "is neither an image manifest nor an index"),
    ],
)
def test_what_was_stored_with_a_configuration_is_checked(
    registry: Registry, address: str, spec: Spec, root: Path, remembered: str, original: str, says: str
) -> None:
    """Whoever may write to the repository may write the annotation, too."""
    media_type, body = registry.manifests[registry.tags["mine.pushed"]]
    document = json.loads(body)
    document["annotations"]["io.trainyard.original"] = original
    registry.put_manifest("mine.pushed", media_type, json.dumps(document).encode())
    pushes.forget(state_folder() / "mine", f"{address}/trainyard")
    with pytest.raises(StepFailed, match=says):
        push_code(spec, address)


def test_an_original_that_is_not_in_its_index_is_refused(
    registry: Registry, address: str, spec: Spec, root: Path, remembered: str
) -> None:
    media_type, body = registry.manifests[registry.tags["mine.pushed"]]
    document = json.loads(body)
    ((kind, manifest),) = json.loads(document["annotations"]["io.trainyard.original"])
    empty = base64.b64encode(b'{"manifests": []}').decode()
    original = [(kind, manifest), (f"{OCI}.index.v1+json", empty)]
    document["annotations"]["io.trainyard.original"] = json.dumps(original)
    registry.put_manifest("mine.pushed", media_type, json.dumps(document).encode())
    pushes.forget(state_folder() / "mine", f"{address}/trainyard")
    with pytest.raises(StepFailed, match="is not in sha256:"):
        push_code(spec, address)


def test_the_floating_tag_is_used_where_nothing_else_is_known(
    registry: Registry, address: str, spec: Spec, root: Path, pushed: Callable[..., str]
) -> None:
    digest = pushed()
    registry.tags["mine"] = digest
    edit(root)
    assert push_code(spec, address)["base"] == digest


# --- Several platforms -----------------------------------------------------------------------------------------------


@pytest.fixture
def both(root: Path) -> Spec:
    """The workspace for amd64 and arm64."""
    config = root / "trainyard.yaml"
    config.write_text(config.read_text() + "platforms: [linux/amd64, linux/arm64]\n")
    lock(model.load(None, "amd64"))
    return model.load(None, "amd64")


@pytest.fixture
def pushed_index(both: Spec, registry: Registry, address: str, pushed: Callable[..., str]) -> Callable[..., str]:
    """An index of the images of both platforms, as `trainyard push` makes it; its digest."""

    def push(**options: Any) -> str:
        repository = Repository(f"{address}/trainyard")
        digests = {one: pushed(arch=one.name, tag=f"{TAG}-{one.name}", **options) for one in (AMD64, ARM64)}
        made = platform_index.make(repository, digests)
        repository.put(made.manifest, made.tag)
        remember(both, repository, made.tag, made.manifest.digest)
        registry.requests.clear()
        registry.received = 0
        return made.manifest.digest

    return push


def test_a_push_of_all_platforms_remembers_the_index(
    registry: Registry,
    address: str,
    both: Spec,
    root: Path,
    pushed: Callable[..., str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Not its images, one of which was pushed last."""
    digests = {one: pushed(arch=one.name, tag=f"{TAG}-{one.name}") for one in (AMD64, ARM64)}

    def push(source: publish.Source, *_: object, **__: object) -> dict[str, Any]:
        tag = f"{address}/trainyard:{TAG}-{source.architecture.name}"
        return {"tag": tag, "digest": digests[source.architecture], "tested": "ran", "bytes_uploaded": 0}

    monkeypatch.setattr(platform_index, "images_of_host", lambda _named, _context: digests)
    monkeypatch.setattr(publish, "push", push)
    monkeypatch.setattr(publish, "attach_claims", lambda *_, **__: [])
    made = publish.push_all(sources.of(both), address, None)
    known = pushes.last(state_folder() / "mine")
    assert known is not None and known.reference == made["reference"] and len(known.images) == 2
    assert registry.tags["mine.pushed"] == made["digest"]
    alone = publish.push_attached(sources.of(both), address, None)
    known = pushes.last(state_folder() / "mine")
    assert known is not None and known.digest == alone["digest"] == digests[AMD64]


def members(registry: Registry, digest: str) -> dict[str, str]:
    """Platform -> digest of the images of an index at the registry."""
    media_type, body = registry.manifests[digest]
    assert media_type == image_index.INDEX
    return image_index.images(json.loads(body))


def test_the_code_of_all_images_of_an_index_is_replaced(
    registry: Registry, address: str, both: Spec, root: Path, pushed_index: Callable[..., str]
) -> None:
    """The code is sent once: its layer is the same on all platforms."""
    before = pushed_index()
    edit(root)
    made = push_code(both, address)
    assert short(registry.requests) == sorted(
        ["GET token", *["POST uploads", "PUT uploads"] * 3, *["PUT manifests"] * 3, "GET manifests"]
    )
    assert registry.received == made["bytes_uploaded"]
    now, old = members(registry, made["digest"]), members(registry, before)
    assert list(now) == ["linux/amd64", "linux/arm64"] and made["base"] == before
    tag = made["tag"].rpartition(":")[2]
    assert tag.startswith("dev-") and registry.tags[tag] == made["digest"]
    for platform, digest in now.items():
        _, document, config = stored(registry, digest)
        _, document_before, config_before = stored(registry, old[platform])
        assert files(registry, document)["workspace/train.py"] == b"print('loss 0.5')\n"
        assert document["layers"][:-1] == document_before["layers"][:-1]
        assert f"linux/{config['architecture']}" == platform
        assert config["rootfs"]["diff_ids"] == [config_before["rootfs"]["diff_ids"][0], made["code"]]
        labels = config["config"]["Labels"]
        assert (labels["io.trainyard.tested"], labels["org.opencontainers.image.version"]) == ("none", tag)
    assert json.loads(registry.manifests[made["digest"]][1])["annotations"]["org.opencontainers.image.version"] == tag


def test_an_index_is_found_on_another_host_and_gives_the_same_digest(
    registry: Registry, address: str, both: Spec, root: Path, pushed_index: Callable[..., str]
) -> None:
    before = pushed_index()
    edit(root)
    first = push_code(both, address)
    pushes.forget(state_folder() / "mine", f"{address}/trainyard")
    again = push_code(both, address)
    assert (again["base"], again["digest"]) == (before, first["digest"])
    registry.requests.clear()
    second = push_code(both, address)
    assert not second["changed"] and second["digest"] == first["digest"]
    assert short(registry.requests) == ["GET token", "HEAD manifests"]


def test_unchanged_code_makes_no_new_index(
    registry: Registry, address: str, both: Spec, root: Path, pushed_index: Callable[..., str]
) -> None:
    before = pushed_index()
    made = push_code(both, address)
    assert (made["digest"], made["changed"], made["tested"]) == (before, False, "started")
    assert registry.tags[made["tag"].rpartition(":")[2]] == before


def test_an_image_of_an_index_with_another_lock_is_refused(
    registry: Registry, address: str, both: Spec, root: Path, pushed_index: Callable[..., str]
) -> None:
    pushed_index(labels={"io.trainyard.lock": "other"})
    edit(root)
    assert refused(both, address, registry).startswith("pylock.trainyard.toml changed since mine-")


def test_an_index_of_one_platform_has_that_alone(
    registry: Registry, address: str, both: Spec, root: Path, pushed: Callable[..., str]
) -> None:
    """Another platform had not passed when it was pushed."""
    repository = Repository(f"{address}/trainyard")
    made = platform_index.make(repository, {ARM64: pushed(arch="arm64", tag=f"{TAG}-arm64")})
    repository.put(made.manifest, made.tag)
    edit(root)
    assert list(members(registry, push_code(both, address, image=made.tag)["digest"])) == ["linux/arm64"]


def test_an_image_that_was_pushed_without_an_index_gets_none(
    registry: Registry, address: str, both: Spec, root: Path, pushed: Callable[..., str]
) -> None:
    """As `TRAINYARD_ARCH=arm64 trainyard push` does."""
    digest = pushed(arch="arm64", tag=f"{TAG}-arm64")
    remember(both, Repository(f"{address}/trainyard"), f"{TAG}-arm64", digest)
    edit(root)
    made = push_code(both, address)
    assert stored(registry, made["digest"])[2]["architecture"] == "arm64" and made["base"] == digest


def test_a_record_of_an_earlier_trainyard_is_read(remembered: str, address: str) -> None:
    (file,) = (state_folder() / "mine" / "pushes").iterdir()
    record = json.loads(file.read_text())
    del record["images"]
    file.write_text(json.dumps(record))
    found = pushes.last(state_folder() / "mine", f"{address}/trainyard")
    assert found is not None and found.digest == remembered


@pytest.mark.parametrize(
    "damage",
    [
        lambda text: text[:40],
        lambda text: "[]",
        lambda text: '"text"',
        lambda text: "5",
        lambda text: "[" * 100_000,
        lambda text: json.dumps(json.loads(text) | {"images": 5}),
        lambda text: json.dumps(json.loads(text) | {"images": ["x"]}),
        lambda text: json.dumps(json.loads(text) | {"repository": None}),
    ],
)
def test_a_damaged_record_counts_as_none(
    spec: Spec, address: str, remembered: str, damage: Callable[[str], str]
) -> None:
    (file,) = (state_folder() / "mine" / "pushes").iterdir()
    file.write_text(damage(file.read_text()))
    assert pushes.last(state_folder() / "mine") is None
    assert push_code(spec, address)["base"] == remembered, "it is read from the registry again"


def test_an_index_of_untested_code_is_not_promoted(
    registry: Registry, address: str, both: Spec, root: Path, pushed_index: Callable[..., str]
) -> None:
    pushed_index()
    edit(root)
    made = push_code(both, address)
    for version in (made["digest"], made["tag"].rpartition(":")[2]):
        with pytest.raises(UserError, match="its code was never tested"):
            promote(both, address, version)


def test_an_index_whose_layers_are_gone_must_be_pushed_again(
    registry: Registry, address: str, both: Spec, root: Path, pushed_index: Callable[..., str]
) -> None:
    pushed_index()
    registry.blobs = {}
    edit(root)
    tags = dict(registry.tags)
    with pytest.raises(UserError, match=r"no longer has mine-.*: run 'trainyard push' again"):
        push_code(both, address)
    assert registry.tags == tags and pushes.last(state_folder() / "mine", f"{address}/trainyard") is None


def test_a_job_runs_the_index_that_was_pushed_last(
    registry: Registry, address: str, root: Path, pushed_index: Callable[..., str], trainyard: Command
) -> None:
    digest = pushed_index()
    status, out, err = trainyard("job", "--platform", "gke", "--json")
    assert status == 0, err
    assert f"image: {address}/trainyard@{digest}" in json.loads(out)["config"]


def refused(spec: Spec, address: str, registry: Registry, **options: Any) -> str:
    """The line that a push is refused with; nothing was written."""
    before = dict(registry.tags), dict(registry.blobs)
    with pytest.raises(UserError) as error:
        push_code(spec, address, **options)
    assert (registry.tags, registry.blobs) == before
    return str(error.value)


def test_without_an_image_it_says_what_to_run(registry: Registry, address: str, spec: Spec) -> None:
    line = refused(spec, address, registry)
    assert line == f"{address}/trainyard has no image of mine: run 'trainyard push --registry {address}' first"
    assert refused(spec, address, registry, image="other") == f"{address}/trainyard has no other"


def test_changed_requirements_need_a_build(
    registry: Registry, address: str, spec: Spec, root: Path, remembered: str
) -> None:
    lock(spec, added("einops"))
    line = refused(model.load(None), address, registry)
    assert line.startswith(f"pylock.trainyard.toml changed since {TAG} was pushed") and "'trainyard image' and" in line
    config = root / "trainyard.yaml"
    config.write_text(config.read_text() + "\n# a comment\n")
    assert "trainyard.yaml" not in refused(model.load(None), address, registry, image=TAG)
    config.write_text(config.read_text() + "system: [ffmpeg]\n")
    assert refused(model.load(None), address, registry).startswith("pylock.trainyard.toml and trainyard.yaml changed")
    (root / "pylock.trainyard.toml").unlink()
    assert "no pylock.trainyard.toml beside" in refused(model.load(None), address, registry, image=TAG)


def test_requirements_that_are_not_locked_yet_leave_no_tag(
    registry: Registry, address: str, root: Path, pushed: Callable[..., str]
) -> None:
    (root / "requirements.txt").write_text("einops\n")
    config = root / "trainyard.yaml"
    config.write_text(config.read_text() + "requirements: requirements.txt\n")
    lock(model.load(None))
    spec = model.load(None)
    pushed()
    (root / "requirements.txt").write_text("einops\ntqdm\n")
    edit(root)
    before = dict(registry.tags)
    with pytest.raises(
        UserError, match=r"changed since pylock\.trainyard\.toml was written: run 'trainyard image' and"
    ):
        push_code(spec, address, image=TAG)
    assert registry.tags == before
    (root / "requirements.txt").write_text("einops\n")
    assert push_code(spec, address, image=TAG)["changed"]


@pytest.mark.parametrize(
    ("labels", "words"),
    [
        ({"io.trainyard.target": "other"}, "is an image of 'other', not of 'mine'"),
        ({"io.trainyard.code": ""}, "its topmost layer is not the code"),
        ({"io.trainyard.code": "sha256:" + "0" * 64}, "its topmost layer is not the code"),
        ({DIGEST: ""}, "was built before images had recipes: run 'trainyard image' and 'trainyard push'"),
    ],
)
def test_other_images_are_refused(
    registry: Registry, address: str, spec: Spec, pushed: Callable[..., str], labels: dict[str, str], words: str
) -> None:
    pushed(labels=labels)
    assert words in refused(spec, address, registry, image=TAG)


def test_a_command_whose_file_is_not_in_the_code_is_refused(
    registry: Registry, address: str, root: Path, pushed: Callable[..., str]
) -> None:
    file = root / "trainyard.yaml"
    file.write_text(file.read_text().replace("run: python train.py", "run: python trian.py"))
    lock(model.load(None))
    pushed()
    assert "no file 'trian.py' in the code" in refused(model.load(None), address, registry, image=TAG)


def test_a_target_of_the_catalogue_is_refused(registry: Registry, address: str) -> None:
    assert "cpu is a target of the catalogue" in refused(model.load("cpu"), address, registry)


def test_an_image_whose_layers_are_gone_must_be_pushed_again(
    registry: Registry, address: str, spec: Spec, root: Path, remembered: str
) -> None:
    registry.blobs = {}
    edit(root)
    with pytest.raises(UserError, match=f"no longer has {TAG}: run 'trainyard push' again"):
        push_code(spec, address)
    assert pushes.last(state_folder() / "mine", f"{address}/trainyard") is None


@pytest.mark.parametrize("request_number", range(1, 7))
def test_an_interrupted_upload_leaves_no_tag(
    registry: Registry, address: str, root: Path, remembered: str, request_number: int
) -> None:
    """The process is killed while the registry handles one of its requests."""
    edit(root)
    before = dict(registry.tags)
    words = [sys.executable, "-m", "trainyard", "push", "--code-only", "--registry", address]
    process: list[subprocess.Popen[bytes]] = []

    def kill(method: str, path: str) -> None:
        if len(registry.requests) >= request_number:
            process[0].kill()
            process[0].wait()
            raise ConnectionError

    registry.before = kill
    environment = settings.environment(TRAINYARD_BUILD=str(state_folder()))
    process.append(subprocess.Popen(words, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL))
    process[0].wait(60)
    assert len(registry.requests) >= request_number, "the push ended before"
    assert registry.tags == before
    registry.before = lambda method, path: None
    made = push_code(model.load(None), address)
    assert registry.tags.keys() - before.keys() == {made["tag"].rpartition(":")[2]}


def test_a_registry_that_moved_its_tokens_is_asked_again(
    registry: Registry, address: str, spec: Spec, root: Path, remembered: str
) -> None:
    file = next((state_folder() / "registries").glob("[!.]*"))
    assert "scope" not in file.read_text()
    file.write_text('Bearer realm="http://127.0.0.1:9/token",service="old"')
    edit(root)
    made = push_code(spec, address)
    assert made["changed"] and registry.host in file.read_text()
    assert "secret" not in file.read_text()


def test_wrong_credentials_are_one_line(
    registry: Registry, address: str, root: Path, remembered: str, trainyard: Command
) -> None:
    registry.password = "changed"
    status, out, err = trainyard("push", "--code-only", "--registry", address)
    assert (status, out) == (1, "") and err.count("\n") == 1
    assert f"{registry.host} refuses the credentials: run 'docker login {registry.host}'" in err


def helper(folder: Path, script: str) -> None:
    """A credential helper, as gcloud installs docker-credential-gcloud."""
    path = folder / "docker-credential-gcloud"
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)


def test_credentials_of_gclouds_helper_are_used(
    registry: Registry, address: str, spec: Spec, root: Path, remembered: str, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    (tmp_path / "docker" / "config.json").write_text(json.dumps({"credHelpers": {registry.host: "gcloud"}}))
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    helper(tmp_path, """echo '{"ServerURL": "x", "Username": "me", "Secret": "secret"}'""")
    edit(root)
    assert push_code(spec, address)["changed"]
    helper(tmp_path, "echo 'gcloud has no account' >&2; exit 1")
    edit(root, "print(2)\n")
    with pytest.raises(UserError, match=f"no credentials for {registry.host}"):
        push_code(spec, address)
    (tmp_path / "docker-credential-gcloud").unlink()
    with pytest.raises(UserError, match="docker-credential-gcloud"):
        push_code(spec, address)


# --- Commands --------------------------------------------------------------------------------------------------------


def test_quiet_prints_the_reference_alone(
    registry: Registry, address: str, root: Path, remembered: str, trainyard: Command
) -> None:
    """The registry is the one that the image was pushed to last."""
    edit(root)
    status, out, err = trainyard("push", "--code-only", "--quiet")
    tag = next(tag for tag in registry.tags if tag.startswith("dev-"))
    assert (status, out, err) == (0, f"{address}/trainyard@{registry.tags[tag]}\n", "")
    status, out, err = trainyard("push", "--code-only", "--json")
    assert status == 0 and json.loads(out)["tag"] == f"{address}/trainyard:{tag}"
    assert "the code has not changed" in err


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--code-only",), "no registry to push to"),
        (("--image", "x"), "--image requires --code-only"),
    ],
)
def test_a_mistake_is_one_line(root: Path, trainyard: Command, arguments: tuple[str, ...], words: str) -> None:
    status, out, err = trainyard("push", *arguments)
    assert (status, out) == (2, "") and words in err and err.count("\n") == 1


def test_a_registry_that_cannot_be_reached_is_one_line(root: Path, trainyard: Command) -> None:
    status, _, err = trainyard("push", "--code-only", "--registry", "localhost:1/team")
    assert status == 1
    words = "localhost:1 cannot be reached: check the address and the network (Failed to establish a new connection: "
    assert words in err and "HTTPConnection" not in err and err.count("\n") == 1


def test_images_that_were_only_started_are_not_pushed(spec: Spec) -> None:
    with pytest.raises(UserError, match=r"its code has not run: give 'smoke' in .*trainyard.yaml .*--allow-untested"):
        publish.check_level(sources.of(spec), "started")
    for level in ("environment", "ran", "trained"):  # an environment has no code
        publish.check_level(sources.of(spec), level)


def test_promote_refuses_untested_code(
    registry: Registry, address: str, spec: Spec, root: Path, remembered: str
) -> None:
    edit(root)
    made = push_code(spec, address)
    for digest in (remembered, made["digest"]):
        for step in ("verify", "smoke"):
            state.record(spec.kept, step, digest, {"passed": True})
    for version in (made["digest"], made["tag"].rpartition(":")[2]):
        with pytest.raises(UserError, match="its code was never tested: run 'trainyard image' and 'trainyard push'"):
            promote(spec, address, version)
    promoted = promote(spec, address, TAG)
    assert promoted["tested"] == "started" and registry.tags["mine"] == remembered


# --- Jobs ------------------------------------------------------------------------------------------------------------


def test_a_job_runs_the_image_that_was_pushed_last(
    registry: Registry, address: str, root: Path, remembered: str, trainyard: Command
) -> None:
    status, out, err = trainyard("job", "--platform", "gke", "--args", "--epochs 3 --my-flag", "--json")
    assert status == 0, err
    text = json.loads(out)["config"]
    assert f"image: {address}/trainyard@{remembered}" in text and "my-flag" in text and "- run" in text
    assert "`trainyard job check job.yaml`" in text and "`make " not in text
    assert "no REGISTRY" not in err


@pytest.mark.parametrize(
    ("labels", "how"), [({}, "tested: started"), ({"io.trainyard.tested": "trained"}, "tested: trained")]
)
def test_a_job_says_which_image_it_runs_when_it_was_pushed_and_how_far_it_was_tested(
    address: str,
    spec: Spec,
    pushed: Callable[..., str],
    trainyard: Command,
    monkeypatch: pytest.MonkeyPatch,
    labels: dict[str, str],
    how: str,
) -> None:
    digest = pushed(labels=labels)
    before = datetime.datetime.now()
    remember(spec, Repository(f"{address}/trainyard"), TAG, digest)
    minutes = {f"{one:%Y-%m-%d %H:%M}" for one in (before, datetime.datetime.now())}
    for registry in ([], ["--registry", address]):
        _, _, err = trainyard("job", "--platform", "gke", *registry)
        lines = [line for line in err.splitlines() if line.startswith("image ")]
        assert lines in [[f"image {address}/trainyard:{TAG}: pushed {when}, {how}"] for when in minutes]


def test_a_job_says_that_an_image_was_not_pushed_from_this_host(root: Path, trainyard: Command) -> None:
    _, _, err = trainyard("job", "--platform", "gke", "--registry", "registry.example/ml")
    said = "not pushed from this host, so how far it was tested is not known here"
    assert err.startswith(f"image registry.example/ml/trainyard:mine-{model.load(None).version}: {said}\n")


def test_a_job_runs_the_code_that_was_pushed_last(
    spec: Spec, address: str, root: Path, remembered: str, trainyard: Command
) -> None:
    def job() -> tuple[str, str]:
        status, out, err = trainyard("job", "--platform", "gke", "--json")
        assert status == 0, err
        (image,) = re.findall(r"image: (.*)", json.loads(out)["config"])
        return image, err

    before = (root / "train.py").read_text()
    edit(root)
    made = push_code(spec, address)
    image, err = job()
    assert image == made["reference"] != f"{address}/trainyard@{remembered}"
    assert re.search(rf"(?m)^image {re.escape(made['tag'])}: pushed [0-9: -]+ with --code-only, not tested$", err)
    edit(root, before)
    assert not push_code(spec, address)["changed"], "the image has its own code again"
    image, err = job()
    assert image == f"{address}/trainyard@{remembered}"
    assert "--code-only" not in err
    edit(root)
    assert push_code(spec, address)["digest"] == made["digest"]
    assert job()[0] == made["reference"]


def test_a_job_with_code_runs_that_code(
    registry: Registry, address: str, root: Path, remembered: str, trainyard: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    edit(root)
    (root / "src").mkdir()
    for folder, code in ((root, "."), (root / "src", "."), (root.parent, "mine")):
        monkeypatch.chdir(folder)
        status, out, err = trainyard("job", "--code", code, "--platform", "gke", "--json")
        assert status == 0, err
        tag = next(tag for tag in registry.tags if tag.startswith("dev-"))
        assert f"image: {address}/trainyard@{registry.tags[tag]}" in json.loads(out)["config"]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=["SIGINT", "SIGTERM"])
def test_a_signal_ends_a_push_while_the_registry_does_not_answer(
    registry: Registry, address: str, root: Path, remembered: str, trainyard: Command, number: signal.Signals
) -> None:
    """A thread waits for the token, since the registry's challenge is known."""
    assert trainyard("push", "--code-only", "--registry", address)[0] == 0
    edit(root)
    registry.delay, sent = 60, registry.received
    words = ["trainyard", "push", "--code-only", f"--registry={address}"]
    command = ["env", "--default-signal=INT", sys.executable, "-m", *words]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        while not registry.open and registry.received == sent:
            assert process.poll() is None
            time.sleep(0.05)
        time.sleep(0.5)
        process.send_signal(number)
        out, _ = process.communicate(timeout=20)
    assert (process.returncode, out) == (130, "push: interrupted\n")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--code", "/"), "no trainyard.yaml in / or above it"),
        (("cpu", "--code", "."), "--code names the image: remove TARGET"),
        (("--image", "x", "--code", "."), "--code names the image: remove IMAGE"),
    ],
)
def test_a_mistake_with_code_is_one_line(
    root: Path, trainyard: Command, arguments: tuple[str, ...], words: str
) -> None:
    status, out, err = trainyard("job", "--platform", "gke", *arguments)
    assert (status, out) == (2, "") and words in err and err.count("\n") == 1


def test_a_job_gives_the_users_command_no_flags_of_its_own(
    address: str, root: Path, remembered: str, trainyard: Command
) -> None:
    """Only Trainyard's trainers know --job-dir: a user's command finds the folder in variables."""
    status, out, err = trainyard("job", "--platform", "gke", "--output", "gs://bucket/run", "--json")
    assert status == 0, err
    text = json.loads(out)["config"]
    assert "--job-dir" not in text and "value: gs://bucket/run/checkpoints/" in text
    status, out, err = trainyard("job", "cpu", "--platform", "gke", "--output", "gs://bucket/run", "--json")
    assert "--job-dir=gs://bucket/run" in json.loads(out)["config"]


def test_tuning_adds_no_flag_to_the_users_command(
    address: str, root: Path, remembered: str, trainyard: Command
) -> None:
    status, out, err = trainyard("job", "--platform", "vertex", "--tune", "lr=1e-3:1e-1:log", "--json")
    assert status == 0, err
    assert "hypertune-tag" not in json.loads(out)["config"]
