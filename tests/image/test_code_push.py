"""`trainyard push --code-only` at a real registry with a login, and the image that it makes in a container.

tests/unit/test_code_push.py counts its requests at a registry with tokens.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.engine import CONTEXT, ENGINE
from tests.image.registry import running
from tests.workspaces import lock
from trainyard.common import settings
from trainyard.common.settings import state_folder
from trainyard.image import base_image, build, facts, recipes
from trainyard.oci.registry import Repository
from trainyard.recipe import DIGEST
from trainyard.release import pushed_code
from trainyard.spec import model, pylock
from trainyard.spec.model import Spec
from trainyard.workspace import code_layer

pytestmark = pytest.mark.concurrent

TAG = "mine-2.15.0-20261120-00000000"

#: What of the template of a workspace's Dockerfile makes its last layers.
DOCKERFILE = """\
ARG BASE
FROM ${BASE} AS code
COPY code.tar /tmp/code.tar
RUN mkdir /out && tar --extract --preserve-permissions --numeric-owner --file /tmp/code.tar --directory /out
FROM ${BASE}
WORKDIR /workspace
COPY --link --from=code /code/../out /
"""


@dataclass(frozen=True)
class Server:
    """A registry: its ``localhost:port``, and the DOCKER_CONFIG of clients that are logged in."""

    address: str
    docker_config: Path


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with running.container(username="someone", password="right") as started:
        made = Server(running.address(started), tmp_path_factory.mktemp("docker"))
        words = ["docker", "login", "--username=someone", "--password-stdin", made.address]
        environment = settings.environment(DOCKER_CONFIG=str(made.docker_config))
        subprocess.run(words, input="right", env=environment, text=True, capture_output=True, check=True)
        yield made


@pytest.fixture
def address(server: Server, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Where to push; the client is logged in."""
    monkeypatch.setenv("DOCKER_CONFIG", str(server.docker_config))
    return f"{server.address}/{request.node.name.replace('_', '-')[:60]}"


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TRAINYARD_BUILD", str(tmp_path / "state"))
    folder = tmp_path / "mine"
    (folder / "src" / "pack").mkdir(parents=True)
    (folder / "trainyard.yaml").write_text("extends: cpu\nname: mine\ncode: [train.sh, src]\nrun: ./train.sh\n")
    (folder / "train.sh").write_text("#!/bin/sh\necho first; ls src/pack\n")
    (folder / "train.sh").chmod(0o755)
    (folder / "src" / "pack" / "old.py").touch()
    lock(model.load(str(folder)))
    monkeypatch.chdir(folder)
    return folder


@pytest.fixture
def built(tmp_path: Path, root: Path) -> Iterator[Callable[[str], str]]:
    """Build an image with the code as it is; the diff id of its topmost layer."""
    made: list[str] = []

    def make(compression: str = "zstd") -> str:
        spec = model.load(None)
        assert spec.workspace
        context = tmp_path / "context"
        context.mkdir(exist_ok=True)
        (context / "Dockerfile").write_text(DOCKERFILE)
        code = code_layer.write(spec.workspace, context / "code.tar", spec.site)
        labels = facts.labels(spec) | {
            "io.trainyard.code": code.diff_id,
            "io.trainyard.lock": pylock.digest(spec.lock_file),
            DIGEST: "0" * 64,
            "org.opencontainers.image.version": TAG,
        }
        reference = f"trainyard-test:code-push-{compression}"
        ENGINE.buildx(
            "build",
            "--quiet",
            "--provenance=false",
            f"--build-arg=BASE={base_image.resolve(CONTEXT, 'debian-12').reference}",
            f"--output=type=image,name={reference},oci-mediatypes=true,{build.COMPRESSIONS[compression]}",
            *(f"--label={name}={value}" for name, value in labels.items()),
            str(context),
            environment={"SOURCE_DATE_EPOCH": "1"},
        )
        made.append(reference)
        layers: list[str] = ENGINE.image(reference, made_by="").attrs["RootFS"]["Layers"]
        return layers[-1]

    yield make
    for reference in set(made):
        ENGINE.untag(reference)


def push(spec: Spec, address: str, server: Server, compression: str = "zstd") -> str:
    """Push the built image as `trainyard push` does; its digest."""
    destination = f"{address}/trainyard:{TAG}"
    image = ENGINE.image(f"trainyard-test:code-push-{compression}", made_by="")
    image.tag(destination)
    environment = {"DOCKER_CONFIG": str(server.docker_config)}
    subprocess.run(["docker", "push", "--quiet", destination], env=settings.environment(**environment), check=True)
    ENGINE.client.api.remove_image(destination, noprune=True)
    repository = Repository(f"{address}/trainyard")
    stored = repository.manifest(TAG)
    assert stored
    pushed_code.remember(recipes.named(spec), spec.architecture, spec.folder, repository, TAG, stored.digest)
    return stored.digest


def without_an_engine(tmp_path: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """A command where no engine answers, and no `docker` is installed."""
    found = settings.environment(
        DOCKER_HOST=f"unix://{tmp_path}/none.sock", PATH="/usr/bin-without-docker", TRAINYARD_BUILD=str(state_folder())
    )
    return subprocess.run(
        [sys.executable, "-m", "trainyard", *words], env=found, capture_output=True, text=True, check=False
    )


def run(reference: str, server: Server, *command: str) -> str:
    """What a command prints in the image, pulled anew from the registry."""
    words = ["docker", "run", "--rm", "--pull=always", "--quiet", reference, *command]
    environment = settings.environment(DOCKER_CONFIG=str(server.docker_config))
    done = subprocess.run(words, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    ENGINE.untag(reference)
    return done.stdout


@pytest.mark.parametrize("compression", ["zstd", "gzip"])
def test_the_new_code_runs_and_is_the_layer_that_a_build_would_make(
    compression: str,
    root: Path,
    built: Callable[[str], str],
    address: str,
    server: Server,
    tmp_path: Path,
) -> None:
    spec = model.load(None)
    assert spec.workspace
    first = built(compression)
    base = push(spec, address, server, compression)
    assert run(f"{address}/trainyard@{base}", server, "./train.sh") == "first\nold.py\n"
    # An edited file, a new one, and one that is removed: nothing of a replaced layer is left.
    (root / "train.sh").write_text("#!/bin/sh\necho second; ls src/pack\n")
    (root / "src" / "pack" / "new.py").touch()
    (root / "src" / "pack" / "old.py").unlink()
    done = without_an_engine(tmp_path, "push", "--code-only", "--json")
    assert done.returncode == 0, done.stderr
    made = json.loads(done.stdout)
    assert made["bytes_uploaded"] < 100_000
    assert run(made["reference"], server, "./train.sh") == "second\nnew.py\n"
    assert run(made["tag"], server, "stat", "-c", "%u:%g", "/workspace/train.sh") == "1000:0\n"
    assert made["code"] == built(compression) != first
    stored = Repository(f"{address}/trainyard")
    documents = [json.loads(one.body) for one in map(stored.manifest, (base, made["digest"])) if one]
    assert documents[0]["layers"][:-1] == documents[1]["layers"][:-1]
    assert documents[0]["layers"][-1]["mediaType"] == documents[1]["layers"][-1]["mediaType"]


def test_another_host_finds_the_image_to_replace_the_code_of(
    root: Path, built: Callable[[str], str], address: str, server: Server, tmp_path: Path
) -> None:
    """A host that has never talked to the registry: without records, and without a challenge."""
    spec = model.load(None)
    built("zstd")
    base = push(spec, address, server)
    (root / "src" / "pack" / "new.py").touch()
    state_folder().rename(tmp_path / "other")
    done = without_an_engine(tmp_path, "push", "--code-only", "--json", "--registry", address)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["base"] == base
