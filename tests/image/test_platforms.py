"""Images for other platforms than the engine's: an index at a real registry, and an arm64 image under emulation."""

from __future__ import annotations

import io
import json
import subprocess
import sys
import tarfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import docker.errors
import pytest
from testcontainers.community.registry import DockerRegistryContainer

from tests.engine import CONTEXT, ENGINE
from tests.image.registry import running
from trainyard.common import settings
from trainyard.common.docker_engine import resource_labels
from trainyard.common.settings import ROOT
from trainyard.image import recipes
from trainyard.lint.image import verify
from trainyard.oci import image_index, layers, registry
from trainyard.oci.registry import Repository
from trainyard.release import platform_index
from trainyard.spec import architectures, naming
from trainyard.spec.architectures import AMD64, ARM64, Architecture
from trainyard.spec.model import load

Run = Callable[..., subprocess.CompletedProcess[str]]

LABELS = """
FROM scratch
COPY file /file
LABEL io.trainyard.target=tf-cpu io.trainyard.framework=tensorflow==2.21.0
LABEL org.opencontainers.image.version=tf-cpu-2.21.0-20261123-01234567-{arch}
"""


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    server: DockerRegistryContainer
    with running.container() as server:
        yield running.address(server)


@pytest.fixture
def small(tmp_path: Path) -> Iterator[Callable[[Architecture], str]]:
    """An image of a few bytes for an architecture; its reference. Nothing runs in it."""
    made: list[str] = []

    def make(architecture: Architecture) -> str:
        folder = tmp_path / architecture.name
        folder.mkdir()
        (folder / "file").write_text(architecture.name, encoding="utf-8")
        (folder / "Dockerfile").write_text(LABELS.format(arch=architecture.name), encoding="utf-8")
        made.append(f"trainyard-test:small-{architecture.name}")
        words = [f"--platform={architecture.platform}", "--provenance=false", f"--tag={made[-1]}", str(folder)]
        ENGINE.buildx("build", "--quiet", "--load", *words)
        return made[-1]

    yield make
    for reference in made:
        ENGINE.untag(reference)


def file_in(reference: str, architecture: Architecture) -> str:
    """The text of /file in a container for an architecture, which is not started."""
    container = ENGINE.client.containers.create(
        reference, ["none"], platform=architecture.platform, labels=resource_labels("test")
    )
    try:
        stream, _ = container.get_archive("/file")
        with tarfile.open(fileobj=io.BytesIO(b"".join(stream))) as archive:
            file = archive.extractfile("file")
            assert file is not None
            return file.read().decode()
    finally:
        container.remove(force=True)


def test_one_reference_gives_each_platform_its_image(address: str, small: Callable[[Architecture], str]) -> None:
    """As `make push` stores an index, and as engines pull from it."""
    repository = Repository(f"{address}/team/trainyard")
    digests = {}
    for architecture in (AMD64, ARM64):
        destination = f"{repository.name}:{architecture.name}"
        ENGINE.image(small(architecture), made_by="test").tag(repository.name, architecture.name)
        for _ in registry.push(ENGINE, destination):
            pass
        ENGINE.untag(destination)
        digests[architecture] = str(registry.digest_of(ENGINE, destination))
    index = platform_index.make(repository, digests)
    repository.put(index.manifest, index.tag)
    reference = f"{repository.name}:{index.tag}"
    assert registry.digest_of(ENGINE, reference) == index.manifest.digest, "the registry keeps its bytes"
    for architecture in (ARM64, AMD64):
        try:
            ENGINE.pull(reference, architecture.platform)
            assert file_in(reference, architecture) == architecture.name
        finally:
            ENGINE.untag(reference)
    found = json.loads(repository.existing(index.tag).body)
    assert image_index.images(found) == {one.platform: digest for one, digest in digests.items()}


def test_programs_for_another_architecture_are_found(tmp_path: Path, small: Callable[[Architecture], str]) -> None:
    """A user's Dockerfile that copies a program of the build machine into an image for arm64."""
    (tmp_path / "Dockerfile").write_text(f"FROM {small(ARM64)}\nCOPY --chmod=755 program /usr/bin/program\n")
    (tmp_path / "program").write_bytes(Path("/proc/self/exe").resolve().read_bytes())
    name = "trainyard-test:foreign"
    words = ["--platform=linux/arm64", "--provenance=false", f"--tag={name}", str(tmp_path)]
    ENGINE.buildx("build", "--quiet", "--load", *words)
    try:
        stored = layers.read(ENGINE, name)
    finally:
        ENGINE.untag(name)
    machines = {path: machine for layer in stored.layers for path, machine in layer.contents.machines.items()}
    assert stored.config["architecture"] == "arm64"
    assert machines == {"usr/bin/program": architectures.of_engine(ENGINE).elf}


# --- for real, under emulation: make test ALL=1 on a host where `make setup EMULATION=1` ran --------------------------


#: The first of these waits for the smoke test of an image under emulation: 47 min with two other builds beside it.
under_emulation = pytest.mark.timeout(7200)


@pytest.fixture(scope="module")
def emulated(built_image: Callable[[str], str]) -> str:
    """tf-cpu for arm64, and for the platform of the engine; the reference of the first."""
    subprocess.run([ROOT / "scripts" / "setup-emulation.sh"], check=True)
    built_image("tf-cpu")
    subprocess.run(["make", "image", "TARGET=tf-cpu", "ARCH=arm64"], cwd=ROOT, check=True)
    return "trainyard:tf-cpu-arm64"


def stages(reference: str, arch: str) -> dict[str, str]:
    known = recipes.make(load("tf-cpu", arch)).layers
    return {layer.stage: layer.digest for layer in layers.read(ENGINE, reference, known).layers}


@pytest.mark.big("tf-cpu")
@under_emulation
def test_an_arm64_image_shares_all_layers_that_depend_on_no_processor(emulated: str) -> None:
    ours, other = stages("trainyard:tf-cpu", "amd64"), stages(emulated, "arm64")
    for stage in ("common", "trainers", "launcher"):
        assert ours[stage] == other[stage], stage
    assert ours["wheel-tensorflow-cpu"] != other["wheel-tensorflow"]


@pytest.mark.big("tf-cpu")
@under_emulation
def test_an_arm64_image_of_a_pushed_index_trains(emulated: str, address: str, make: Run, docker_run: Run) -> None:
    pushed = make("push", TARGET="tf-cpu", REGISTRY=f"{address}/all", JSON="1")
    assert pushed.returncode == 0, pushed.stderr
    found = json.loads(pushed.stdout)
    assert list(found["images"]) == ["linux/amd64", "linux/arm64"]
    promoted = make("promote", TARGET="tf-cpu", REGISTRY=f"{address}/all")
    assert promoted.returncode == 0, promoted.stderr
    reference = f"{address}/all/trainyard:tf-cpu"
    try:
        trained = docker_run(
            "--pull=always", "--platform=linux/arm64", reference, "mnist", "--fake-data", "--fake-images=2000",
            "--epochs=1", timeout=1500,
        )  # fmt: skip
        assert trained.returncode == 0, trained.stderr
        assert '"status": "completed"' in trained.stdout + trained.stderr
    finally:
        ENGINE.untag(reference)


TRAIN = """\
import platform

import einops
import rpds
import xxhash

print("first", xxhash.xxh32(b"a").hexdigest(), "of", platform.machine())
"""

WORKSPACE = """\
extends: tf-cpu
name: platforms-test
platforms: [linux/amd64, linux/arm64]
requirements: [rpds-py, einops]
build: {packages: [gcc, libc6-dev], sources: [xxhash]}
code: [train.py]
run: python train.py
smoke: {expect: 'first 550d7456 of (x86_64|aarch64)'}
"""


@pytest.fixture
def workspace(tmp_path: Path) -> Iterator[Callable[..., dict[str, Any]]]:
    """``workspace("image", ARCH="arm64")``: a command in a repository for both platforms; what its JSON says.

    Its images are removed after the test.
    """
    folder = tmp_path / "repository"
    folder.mkdir()
    subprocess.run(["git", "init", "--quiet", str(folder)], check=True)
    (folder / "trainyard.yaml").write_text(WORKSPACE, encoding="utf-8")
    (folder / "train.py").write_text(TRAIN, encoding="utf-8")

    def run(*words: str, **variables: str) -> dict[str, Any]:
        environment = settings.environment(TRAINYARD_BUILD=str(tmp_path / "state"))
        environment |= {f"{settings.PREFIX}{name}": value for name, value in variables.items()}
        command = [sys.executable, "-m", "trainyard", *words, "--json"]
        done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr[-4000:]
        return dict(json.loads(done.stdout))

    yield run
    for image in ENGINE.images():
        if image.labels.get(f"{naming.LABELS}.target") == "platforms-test":
            ENGINE.client.images.remove(image.id, force=True)


@pytest.mark.big("tf-cpu")
@under_emulation
def test_a_users_repository_is_compiled_run_pushed_and_edited_for_both_platforms(
    emulated: str, address: str, workspace: Callable[..., dict[str, Any]], docker_run: Run, tmp_path: Path
) -> None:
    workspace("lock")
    for arch in ("amd64", "arm64"):
        made = workspace("image", ARCH=arch)
        assert ENGINE.architecture_of(made["digest"]) == arch
        assert ENGINE.image(made["digest"], made_by="").labels[f"{naming.LABELS}.tested"] == "trained"
    pushed = workspace("push", f"--registry={address}/own")
    assert list(pushed["images"]) == ["linux/amd64", "linux/arm64"]
    (tmp_path / "repository" / "train.py").write_text(TRAIN.replace("first", "second"), encoding="utf-8")
    edited = workspace("push", "--code-only")
    assert edited["base"] == pushed["digest"]
    for machine, platform in (("x86_64", "linux/amd64"), ("aarch64", "linux/arm64")):
        ran = docker_run("--pull=always", f"--platform={platform}", edited["reference"], timeout=600)
        assert ran.returncode == 0, ran.stderr
        assert f"second 550d7456 of {machine}" in ran.stdout


@pytest.mark.big("tf-cpu")
@under_emulation
def test_a_program_of_the_build_machine_in_an_arm64_image_is_refused(emulated: str, tmp_path: Path) -> None:
    (tmp_path / "Dockerfile").write_text(f"FROM {emulated}\nCOPY --chmod=755 program /usr/local/bin/program\n")
    (tmp_path / "program").write_bytes(Path("/proc/self/exe").resolve().read_bytes())
    name = "trainyard-test:planted"
    words = ["--platform=linux/arm64", "--provenance=false", f"--tag={name}", str(tmp_path)]
    ENGINE.buildx("build", "--quiet", "--load", *words)
    try:
        _, found = verify.examine(recipes.make(load("tf-cpu", "arm64")), name, CONTEXT)
    finally:
        ENGINE.untag(name)
    (finding,) = found["binaries_are_for_the_architecture"]
    assert finding.where == "/usr/local/bin/program in layer added" and finding.fails


@pytest.mark.big("tf-cpu")
@under_emulation
def test_an_arm64_image_is_reproducible(emulated: str, make: Run) -> None:
    found = make("reproduce", TARGET="tf-cpu", ARCH="arm64", timeout=3000)
    assert found.returncode == 0, found.stderr
    with pytest.raises(docker.errors.ImageNotFound):
        ENGINE.client.images.get("trainyard:tf-cpu-arm64-reproduce")
