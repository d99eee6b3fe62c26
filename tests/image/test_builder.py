"""BUILDER: images are built on a builder outside of the engine, with a node for each architecture.

buildx uses its driver `remote`, and the BuildKit that it reaches is the engine's, at two sockets: the sessions, the
base images that are sent and the images that are loaded are real. But the engine's BuildKit has the engine's images,
too: tests/unit/test_builder.py states which ones are sent.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests import plans
from tests.engine import ENGINE
from tests.fakes.engine_socket import SOCKET, EngineSocket
from trainyard.common import settings
from trainyard.common.context import Context
from trainyard.image import package_index, provenance
from trainyard.oci import builder, image_store
from trainyard.spec import architectures, model
from trainyard.spec.architectures import AMD64, ARM64

NAME = "trainyard-test-team"


@pytest.fixture
def team(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, EngineSocket]]:
    """A builder with a node for each architecture: name of the node -> its socket. It is the builder of the test."""
    with (
        tempfile.TemporaryDirectory() as folder,  # the path of a socket has at most 107 bytes, and tmp_path's has more
        EngineSocket(Path(folder) / "amd64") as amd64,
        EngineSocket(Path(folder) / "arm64") as arm64,
    ):
        monkeypatch.setenv("BUILDX_CONFIG", f"{folder}/buildx")
        nodes = {"amd64": amd64, "arm64": arm64}
        for name, node in nodes.items():
            append = ["--append"] if name == "arm64" else ["--driver=remote"]
            words = [f"--name={NAME}", *append, f"--node={name}", f"--platform=linux/{name}", node.address]
            subprocess.run(["docker", "buildx", "create", *words], check=True, capture_output=True)
        monkeypatch.setenv("TRAINYARD_BUILDER", NAME)
        yield nodes


def test_an_image_is_built_on_the_builder_and_loaded_with_its_digest_and_provenance(
    team: dict[str, EngineSocket], own_index: str, write_small: Callable[[], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRAINYARD_INDEX_PYTORCH_CPU", own_index)
    package_index.reachable.cache_clear()
    spec = model.load(write_small())
    before = {name: node.connections for name, node in team.items()}
    plan, built = plans.built(spec)
    used = {name for name, node in team.items() if node.connections > before[name] + 2}
    assert spec.arch in used, "buildx has connected to the node of the architecture for the build"
    image = ENGINE.image(plan.recipe.candidate, made_by="test")
    assert image.id == built["digest"] and image.labels["io.trainyard.target"] == "small"
    manifest = json.loads(image_store.documents(ENGINE, plan.recipe.candidate)[built["digest"]])
    assert all(layer["mediaType"].endswith("tar+zstd") for layer in manifest["layers"])
    statement = provenance.statement(plan.kept, built["digest"])
    assert statement and statement["subject"][0]["digest"] == {"sha256": built["digest"][7:]}
    assert ENGINE.digest(plan.recipe.candidate) == plans.built(spec)[1]["digest"], "a second build changes nothing"


def test_each_architecture_has_its_node(team: dict[str, EngineSocket]) -> None:
    found = builder.current(Context(builder=NAME))
    assert (found.name, found.driver, found.in_engine) == (NAME, "remote", False)
    assert [node.name for one in (AMD64, ARM64) if (node := found.node(one))] == list(team)
    assert [found.machine(one) for one in (AMD64, ARM64)] == [AMD64, ARM64]


def test_the_cache_of_the_builder_can_be_listed_and_dropped(team: dict[str, EngineSocket], tmp_path: Path) -> None:
    """As `make reproduce` does, which leaves no cache behind."""
    (tmp_path / "Dockerfile").write_text(f"FROM scratch\nCOPY file /{tmp_path.name}\n", encoding="utf-8")
    (tmp_path / "file").write_text(str(tmp_path), encoding="utf-8")
    before = ENGINE.cached(builder=NAME).keys()
    words = ["build", f"--builder={NAME}", "--quiet", "--output=type=cacheonly", str(tmp_path)]
    ENGINE.buildx(*words)
    made = ENGINE.cached(builder=NAME).keys() - before
    assert made
    ENGINE.drop_cached(made, builder=NAME)
    assert not made & ENGINE.cached(builder=NAME).keys()


def test_the_variable_of_buildx_selects_a_builder_and_ours_overrides_it(
    team: dict[str, EngineSocket], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("BUILDX_BUILDER", NAME)
    monkeypatch.setenv("TRAINYARD_BUILDER", "default")
    assert builder.current(Context()).in_engine
    monkeypatch.delenv("TRAINYARD_BUILDER")
    assert builder.current(Context()).name == NAME
    assert ENGINE.can_run(architectures.of_engine(ENGINE).platform)


def test_a_builder_that_does_not_exist_is_one_line_with_those_that_do(
    team: dict[str, EngineSocket],
) -> None:
    command = ["make", "build", "TARGET=tf-cpu", "BUILDER=trainyard-test-taem"]
    ended = subprocess.run(command, cwd=settings.ROOT, capture_output=True, text=True, check=False)
    assert ended.returncode == 2
    assert ended.stderr.splitlines()[0] == (
        f"build: '--builder trainyard-test-taem': there is no such builder; 'docker buildx ls' lists {NAME}, default "
        f"(did you mean '{NAME}'?)"
    )


def test_an_active_docker_context_is_the_engine_from_build_to_run(
    write_small: Callable[[], str], own_index: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that names this machine's engine by another path, as Docker Desktop, colima and rootless Docker do."""
    monkeypatch.setenv("TRAINYARD_INDEX_PYTORCH_CPU", own_index)
    for name in ("DOCKER_HOST", "DOCKER_CONTEXT", "BUILDX_BUILDER"):
        monkeypatch.delenv(name, raising=False)
    with tempfile.TemporaryDirectory() as folder:  # the path of a socket has at most 107 bytes
        address = Path(folder) / "engine.sock"
        address.symlink_to(SOCKET)
        monkeypatch.setenv("DOCKER_CONFIG", f"{folder}/config")
        for words in (["create", "elsewhere", f"--docker=host=unix://{address}"], ["use", "elsewhere"]):
            subprocess.run(["docker", "context", *words], check=True, capture_output=True)
        trainyard, small = [sys.executable, "-m", "trainyard"], write_small()
        subprocess.run([*trainyard, "dev", "build", small], check=True)
        subprocess.run(["docker", "tag", "trainyard:small-candidate", "trainyard:small"], check=True)
        run = [*trainyard, "run", small, "--command", "python3 -c 'print(6 * 7)'"]
        assert subprocess.run(run, check=True, capture_output=True, text=True).stdout == "42\n"
        subprocess.run(["docker", "rmi", "trainyard:small"], check=True, capture_output=True)
        address.unlink()
        done = subprocess.run(run, check=False, capture_output=True, text=True)
        said = f"run: no engine answers in the Docker context (elsewhere: unix://{address}): start it, or run"
        assert done.returncode == 2 and done.stderr.startswith(said), "and no other engine is asked"
