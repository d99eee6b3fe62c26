"""After `trainyard fetch`, an image is built without a network: neither the command nor the build uses one."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.engine import CONTEXT, ENGINE
from tests.image.registry import running
from tests.image.small_images import from_cache
from trainyard.common import settings
from trainyard.image import base_image, package_index

pytestmark = pytest.mark.concurrent


@pytest.fixture
def base_at_a_registry() -> Iterator[tuple[str, Callable[[], object]]]:
    """The base of Debian images at a registry, by digest, and a function that stops the registry."""
    with running.container() as registry:
        reference = f"{running.address(registry)}/debian:12"
        image = ENGINE.client.images.get(base_image.resolve(CONTEXT, "debian-12").reference)
        image.tag(reference)
        try:
            ENGINE.client.images.push(reference)
        finally:
            ENGINE.untag(reference)
        stopped = registry.get_wrapped_container().stop
        yield f"{reference.rpartition(':')[0]}@{image.id}", lambda: stopped(timeout=1)


def trainyard(*words: str, network: bool, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run a command, in a network namespace without interfaces unless ``network``."""
    command = [sys.executable, "-m", "trainyard", *words]
    command = command if network else ["unshare", "--net", *command]
    environment = settings.environment(**variables)
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600, check=False)


def layers_and_labels() -> tuple[list[str], dict[str, str]]:
    """Not the digest: BuildKit gives a base without a history, as an imported one, another time in the two cases."""
    image = ENGINE.client.images.get("trainyard:small-candidate")
    return list(image.attrs["RootFS"]["Layers"]), dict(image.labels)


def test_a_fetched_image_is_built_without_index_registry_and_network(
    own_index: str,
    write_small: Callable[[], str],
    base_at_a_registry: tuple[str, Callable[[], object]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The framework's wheels are those of an index on this host, which serves them once."""
    base, stop_registry = base_at_a_registry
    variables = {
        "TRAINYARD_INDEX_PYTORCH_CPU": own_index,
        "TRAINYARD_BASE": base,
        "TRAINYARD_BUILD": str(tmp_path / "state"),
    }
    package_index.reachable.cache_clear()
    target = write_small()
    before = trainyard("build", target, "--offline", network=False, **variables)
    assert before.returncode == 2
    assert "nothing was downloaded for small: run 'trainyard dev fetch small'" in before.stderr

    assert trainyard("build", target, network=True, **variables).returncode == 0
    expected = layers_and_labels()
    fetched = trainyard("fetch", target, network=True, **variables)
    assert fetched.returncode == 0, fetched.stderr[-2000:]
    stop_registry()
    ENGINE.untag(base)

    wheels = tmp_path / "index" / "torch"
    for wheel in wheels.iterdir():
        wheel.unlink()
    offline = trainyard("build", target, "--offline", "--json", network=False, **variables)
    assert offline.returncode == 0, offline.stderr[-2000:]
    assert json.loads(offline.stdout)["index"] == "pytorch-cpu"
    assert layers_and_labels() == expected
    for step in ("[wheels-4 1/1] RUN", "[wheels-1 1/1] RUN"):
        assert from_cache((tmp_path / "state" / "small" / "build.log").read_text(encoding="utf-8"), step)


@pytest.mark.slow("the test above")
def test_a_build_that_must_download_fails_without_a_network(
    own_index: str, write_small: Callable[[], str], tmp_path: Path
) -> None:
    """Installers are kept from the network, although the engine has one."""
    variables = {"TRAINYARD_INDEX_PYTORCH_CPU": own_index, "TRAINYARD_BUILD": str(tmp_path / "state")}
    target = write_small()
    assert trainyard("fetch", target, network=True, **variables).returncode == 0
    found = trainyard("build", target, "--offline", "--no-cache", network=False, **variables)
    assert found.returncode == 1
    assert "run 'trainyard dev fetch small'" in found.stderr.splitlines()[-1]
