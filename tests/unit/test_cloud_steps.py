"""The steps of cloudbuild.yaml, without an engine: what is built, skipped and published."""

from __future__ import annotations

import json
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.fakes.engine import FakeEngine, Ran, Resource
from tests.fakes.registry import Registry, sha256

from trainyard.common.context import Context
from trainyard.common.docker_engine import Engine
from trainyard.common.errors import StepFailed, UserError
from trainyard.common.settings import state_folder
from trainyard.lint.image import verify
from trainyard.oci import image_index
from trainyard.recipe import Recipe
from trainyard.release import cloud_build_steps as steps
from trainyard.release import publish as publication
from trainyard.release.cloud_build_steps import Substitutions
from trainyard.spec import state

BOTH = "linux/amd64 linux/arm64"


@pytest.fixture(autouse=True)
def own_state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRAINYARD_BUILD", str(tmp_path / "state"))
    Substitutions().prepared.parent.mkdir()
    Substitutions().prepared.write_text('{"epoch": 1}')
    monkeypatch.setenv("SOURCE_DATE_EPOCH", "1")
    monkeypatch.delenv("BUILDER_OUTPUT", raising=False)


# --- what is built ----------------------------------------------------------------------------------------------------


def names(given: Substitutions) -> list[str]:
    return [one.local_name for specs in given.images().values() for one in specs]


@pytest.mark.parametrize(
    ("targets", "platforms", "built"),
    [
        ("tf-cpu xla", BOTH, ["tf-cpu", "tf-cpu-arm64", "xla"]),
        ("tf-cpu,xla", "linux/amd64", ["tf-cpu", "xla"]),
        ("tf-cpu xla", "arm64", ["tf-cpu-arm64"]),
        ("tf-cpu", "linux/arm64,linux/amd64", ["tf-cpu", "tf-cpu-arm64"]),
    ],
)
def test_a_target_is_built_for_those_of_its_platforms_that_are_given(
    targets: str, platforms: str, built: list[str]
) -> None:
    assert names(Substitutions(targets=targets, platforms=platforms)) == built


def test_what_is_built_does_not_depend_on_the_platform_of_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRAINYARD_ARCH", "arm64")
    assert names(Substitutions(targets="tf-cpu xla", platforms=BOTH)) == ["tf-cpu", "tf-cpu-arm64", "xla"]


@pytest.mark.parametrize(
    ("targets", "platforms", "says"),
    [
        (
            "tf-cpu",
            "linux/arm",
            "_PLATFORMS: unknown platform 'linux/arm' (did you mean 'linux/arm64'?); valid: linux/",
        ),
        ("tf-cpu", "", "_PLATFORMS is empty; valid: linux/amd64, linux/arm64"),
        ("xla", "linux/arm64", "nothing to build: no target of 'xla' is made for 'linux/arm64'"),
    ],
)
def test_a_mistake_in_the_platforms_is_one_line(targets: str, platforms: str, says: str) -> None:
    with pytest.raises(UserError) as error:
        Substitutions(targets=targets, platforms=platforms).images()
    assert says in str(error.value) and "\n" not in str(error.value)


# --- steps of one target and platform ---------------------------------------------------------------------------------

Trainyard = Callable[..., tuple[int, str, str]]


@pytest.fixture
def candidates(fake_engine: FakeEngine, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The candidates that were verified, of those of cpu that the engine has."""
    verified: list[str] = []
    for name in ("cpu", "cpu-arm64"):
        fake_engine.add(f"trainyard:{name}-candidate")

    def check(recipe: Recipe, reference: str, _context: Context, **_: object) -> None:
        verified.append(f"{recipe.platform} {reference}")

    monkeypatch.setattr(verify, "verify", check)
    return verified


def test_a_step_is_about_the_candidate_of_its_platform(trainyard: Trainyard, candidates: list[str]) -> None:
    for arch in ("amd64", "arm64"):
        status, _, err = trainyard("cloudbuild-step", "verify", "cpu", TARGETS="cpu xla", PLATFORMS=BOTH, ARCH=arch)
        assert status == 0, err
    assert candidates == ["linux/amd64 trainyard:cpu-candidate", "linux/arm64 trainyard:cpu-arm64-candidate"]


@pytest.mark.parametrize(
    ("targets", "platforms", "says"),
    [
        ("xla", BOTH, "cpu is not among _TARGETS: nothing to do"),
        ("cpu", "linux/amd64", "linux/arm64 is not among _PLATFORMS: nothing to do"),
    ],
)
def test_a_step_of_what_is_not_given_does_nothing(
    trainyard: Trainyard, candidates: list[str], targets: str, platforms: str, says: str
) -> None:
    status, _, err = trainyard("cloudbuild-step", "verify", "cpu", TARGETS=targets, PLATFORMS=platforms, ARCH="arm64")
    assert (status, err.strip(), candidates) == (0, says, [])


# --- emulation --------------------------------------------------------------------------------------------------------


@pytest.fixture
def started(fake_engine: FakeEngine, monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """The containers that were started; the engine then runs programs for arm64, which it did not before."""
    found: list[dict[str, Any]] = []

    def run(_engine: Engine, command: list[str], what: str, **options: Any) -> bool:
        found.append({"command": command, **options})
        fake_engine.platforms.append("linux/arm64")
        return True

    monkeypatch.setattr(steps, "_in_container_like_this", run)
    return found


def test_emulation_is_set_up_in_a_privileged_container(started: list[dict[str, Any]]) -> None:
    steps.emulate(Substitutions(targets="tf-cpu", platforms=BOTH))
    (container,) = started
    assert container["privileged"] is True
    assert Path(container["command"][-1]).is_file()


@pytest.mark.parametrize(("targets", "platforms"), [("tf-cpu", "linux/amd64"), ("xla", BOTH)])
def test_nothing_is_emulated_if_nothing_is_built_for_arm64(
    started: list[dict[str, Any]], targets: str, platforms: str
) -> None:
    steps.emulate(Substitutions(targets=targets, platforms=platforms))
    assert not started


def test_nothing_is_set_up_where_programs_for_arm64_run(started: list[dict[str, Any]], fake_engine: FakeEngine) -> None:
    fake_engine.platforms.append("linux/arm64")
    steps.emulate(Substitutions(targets="tf-cpu", platforms=BOTH))
    assert not started


def test_an_engine_that_still_cannot_run_them_is_one_line(
    fake_engine: FakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(steps, "_in_container_like_this", lambda *_, **__: True)
    with pytest.raises(UserError, match="the engine runs no programs for linux/arm64"):
        steps.emulate(Substitutions(targets="tf-cpu", platforms=BOTH))


# --- publish ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def stored() -> Iterator[Registry]:
    with Registry() as fake:
        yield fake


@pytest.fixture
def built(stored: Registry, fake_engine: FakeEngine, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Record that images passed; what the engine would push arrives at the registry as an image of a few bytes."""

    def push(
        source: publication.Source, address: str, key: object, *, reference: str, allow_untested: bool = False
    ) -> dict[str, Any]:
        assert reference == f"trainyard:{source.local_name}-candidate"
        name, arch = source.named.name, source.architecture.name
        tag = f"{name}-1.0-20261122-01234567" + (f"-{arch}" if len(source.named.platforms) > 1 else "")
        labels = {
            "io.trainyard.target": name,
            "io.trainyard.framework": "x==1.0",
            "org.opencontainers.image.version": tag,
        }
        config = json.dumps({"os": "linux", "architecture": arch, "config": {"Labels": labels}}).encode()
        stored.blobs[sha256(config)] = config
        kind = "application/vnd.oci.image.config.v1+json"
        about = {"mediaType": kind, "digest": sha256(config), "size": len(config)}
        document = {"schemaVersion": 2, "config": about, "layers": []}
        media_type = "application/vnd.oci.image.manifest.v1+json"
        digest = stored.put_manifest(tag, media_type, json.dumps(document).encode())
        return {"tag": f"{address}/trainyard:{tag}", "digest": digest, "tested": "trained", "bytes_uploaded": 1}

    for name in ("tf-cpu", "tf-cpu-arm64", "xla"):
        fake_engine.add(f"trainyard:{name}-candidate", digest=f"sha256:{name}")

    def record(*candidates: str) -> None:
        for name in candidates:
            for step in ("build", "verify", "smoke"):
                state.record(state_folder() / name, step, f"sha256:{name}", {"passed": True})

    monkeypatch.setattr(publication, "push_attached", push)
    monkeypatch.setattr(steps, "_in_container_like_this", lambda *words, **options: False)
    return record


def given(stored: Registry, **more: str) -> Substitutions:
    return Substitutions(**{"targets": "tf-cpu xla", "platforms": BOTH, "registry": f"{stored.host}/ml"} | more)


def members(stored: Registry, tag: str) -> list[str]:
    return list(image_index.images(json.loads(stored.manifests[stored.tags[tag]][1])))


def test_publish_pushes_every_image_and_an_index_of_several(
    stored: Registry, built: Callable[..., None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("BUILDER_OUTPUT", str(tmp_path))
    built("tf-cpu", "tf-cpu-arm64", "xla")
    steps.publish(given(stored, tag="nightly"))
    published = json.loads((tmp_path / "output").read_text())
    assert published == json.loads(Substitutions().published.read_text())
    tag = published["tf-cpu"]["tag"].rpartition(":")[2]
    assert members(stored, tag) == ["linux/amd64", "linux/arm64"]
    assert published["tf-cpu"]["digest"] == stored.tags[tag] == stored.tags["tf-cpu-nightly"]
    assert {"tf-cpu-1.0-20261122-01234567-amd64", "tf-cpu-1.0-20261122-01234567-arm64"} <= set(stored.tags)
    assert stored.tags["xla-nightly"] == stored.tags["xla-1.0-20261122-01234567"] == published["xla"]["digest"]


def test_publish_of_one_platform_makes_an_index_of_it(
    stored: Registry, built: Callable[..., None], capsys: pytest.CaptureFixture[str]
) -> None:
    built("tf-cpu")
    steps.publish(given(stored, targets="tf-cpu", platforms="linux/amd64"))
    tag = json.loads(Substitutions().published.read_text())["tf-cpu"]["tag"].rpartition(":")[2]
    assert members(stored, tag) == ["linux/amd64"]
    assert "the image index has no linux/arm64" in capsys.readouterr().err


def test_publish_pushes_nothing_if_one_platform_did_not_pass(stored: Registry, built: Callable[..., None]) -> None:
    built("tf-cpu", "xla")
    with pytest.raises(
        UserError, match=r"tf-cpu-arm64 .* never passed 'build': run 'TRAINYARD_ARCH=arm64 trainyard image tf-cpu'"
    ):
        steps.publish(given(stored))
    assert not stored.manifests


@pytest.mark.parametrize("step", ["publish", "promote"])
def test_steps_reach_a_registry_on_localhost_from_the_hosts_network(
    step: str, stored: Registry, built: Callable[..., None], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """localhost is another machine in a step's container than for the engine."""
    seen: dict[str, Any] = {}

    def run(_engine: Engine, command: list[str], what: str, **options: Any) -> bool:
        seen.update(options, command=command)
        Substitutions().published.write_text("{}")
        return True

    monkeypatch.setenv("BUILDER_OUTPUT", str(tmp_path))
    monkeypatch.setattr(steps, "_in_container_like_this", run)
    getattr(steps, step)(given(stored, promote="yes"))
    assert seen["network_mode"] == "host"
    assert seen["command"][-2:] == ["cloudbuild-step", step]
    assert seen["environment"]["BUILDER_OUTPUT"] == "", "that folder is only in the step's own container"
    assert not stored.requests


# --- a container like that of the step --------------------------------------------------------------------------------


def test_a_container_that_fails_fails_its_step(fake_engine: FakeEngine, capsys: pytest.CaptureFixture[str]) -> None:
    image = fake_engine.add("builder", program=lambda *_: Ran(3, b"E: no such package\n"))
    labels = {"io.trainyard.cloudbuild": "1"}
    this = Engine().client.containers.create("builder", name=socket.gethostname(), labels=labels)
    seen: list[Resource] = []
    fake_engine.afterwards("POST /containers/.*/start", lambda: seen.extend(fake_engine.of_kind("container")[1:]))
    with pytest.raises(StepFailed, match="emulation exited with status 3; see above"):
        steps._in_container_like_this(Engine(), ["bash", "x.sh"], "emulation", privileged=True)
    (container,) = seen
    assert (container.given["Image"], container.given["Entrypoint"], container.given["Cmd"]) == (
        image.id, ["bash"], ["x.sh"],
    )  # fmt: skip
    assert container.given["HostConfig"]["VolumesFrom"] == [this.id] and container.labels == labels
    assert container.given["HostConfig"]["Privileged"]
    assert [one.name for one in fake_engine.resources] == [socket.gethostname()]
    assert "E: no such package" in capsys.readouterr().err
