"""The digest of a base is read from a real registry, and its working directory is replaced without a layer."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from tests.engine import CONTEXT, ENGINE
from tests.image.registry import running
from trainyard.common.context import Context
from trainyard.image import base_image, working_directory
from trainyard.oci import image_store
from trainyard.oci.layers import EMPTY
from trainyard.spec import architectures


def test_a_base_has_the_digest_that_its_registry_gives_its_tag() -> None:
    """Of a manifest, as of upstream's nightly, and of an index, as of Debian's images."""
    image = ENGINE.client.images.get(base_image.resolve(CONTEXT, "debian-12").reference)
    with running.container() as server:
        manifest, index = (f"{running.address(server)}/base:{name}" for name in ("manifest", "index"))
        image.tag(manifest)
        try:
            ENGINE.client.images.push(manifest)
        finally:
            ENGINE.untag(manifest)
        subprocess.run(
            ["docker", "buildx", "imagetools", "create", f"--tag={index}", manifest], capture_output=True, check=True
        )
        assert ENGINE.digest_at_registry(manifest) == (image.id, "")
        digest, _ = ENGINE.digest_at_registry(index)
        assert digest is not None and digest.startswith("sha256:") and digest != image.id
        assert ENGINE.digest_at_registry(f"{running.address(server)}/base:none") == (None, "not found")


@pytest.mark.parametrize("layouts", [True, False], ids=["OCI layouts", "older engine"])
def test_an_image_starts_in_the_workspace_without_a_layer_for_it(
    layouts: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRAINYARD_BUILD", str(tmp_path / "state"))
    if not layouts:
        monkeypatch.setattr(image_store, "save", refuse)
    elsewhere, made = "trainyard-base:test-elsewhere", "trainyard-base:test-made"
    client = ENGINE.client
    container = client.containers.create(base_image.resolve(CONTEXT, "debian-12").reference, ["true"])
    container.commit("trainyard-base", "test-elsewhere", changes=["WORKDIR /srv"])
    container.remove()
    contexts = []
    try:
        context, machine = Context(engine=ENGINE), architectures.of_engine(ENGINE)
        contexts = [str(working_directory.replacement(context, elsewhere, machine)) for _ in range(2)]
        assert contexts[0] == contexts[1] and contexts[0].startswith("oci-layout:" if layouts else "docker-image:")
        (tmp_path / "Dockerfile").write_text(f"FROM {elsewhere}\nRUN pwd >/pwd\n", encoding="utf-8")
        ENGINE.buildx(
            "build", "--quiet", "--load", "--provenance=false", f"--tag={made}",
            f"--build-context={elsewhere}={contexts[0]}", str(tmp_path),
        )  # fmt: skip
        base, image = (client.images.get(name).attrs for name in (elsewhere, made))
        assert image["Config"]["WorkingDir"] == "/workspace"
        layers = image["RootFS"]["Layers"]
        assert layers[:-1] == base["RootFS"]["Layers"] and layers[-1] not in EMPTY
        assert working_directory.replacement(context, made, machine) is None
    finally:
        for name in (elsewhere, made, *(one.removeprefix("docker-image://") for one in contexts if not layouts)):
            ENGINE.untag(name)


def refuse(_engine: object, reference: str, folder: Path) -> None:
    """Save an image with an engine before version 25."""
    raise image_store.NoLayout(reference)
