"""What a Docker engine does, stated once for the fake of the unit tests and for a real one.

tests/unit/test_engine_contract.py runs these statements with tests/fakes/engine.py, tests/image/test_engine_contract.py
with the engine of this machine. Both have a fixture ``small``: an image with the programs ``sh`` and ``sleep``.
"""

from __future__ import annotations

import secrets

import docker.errors
import pytest
import requests

from trainyard.common.docker_engine import OWNED, Engine, in_use
from trainyard.common.engine_client import ImageMissing
from trainyard.common.errors import StepFailed, UserError
from trainyard.sandbox import containers
from trainyard.sandbox.containers import NoFile, Sandbox

NAME = f"trainyard-test:{secrets.token_hex(4)}"


@pytest.fixture
def engine() -> Engine:
    return Engine()


def test_it_says_what_it_is(engine: Engine) -> None:
    assert engine.existing_client() is engine.client
    assert engine.architecture in ("amd64", "arm64") and engine.docker_context
    assert engine.client.info()["MemTotal"] > 1 << 20
    assert engine.can_run(f"linux/{engine.architecture}") and not engine.can_run("linux/nowhere")
    assert f"Name: {engine.docker_context}" in " ".join(engine.inspect_builder(engine.docker_context).split())
    assert engine.emulated_environment(engine.architecture) == {}


def test_an_image_has_its_tags_until_they_are_removed(engine: Engine, small: str) -> None:
    image = engine.image(small, made_by="a test")
    assert engine.find(NAME) is engine.existing_image(NAME) is engine.digest_of(NAME) is None
    try:
        assert image.tag(NAME) and image.tag(*NAME.split(":"))
        again = engine.image(NAME, made_by="a test")
        assert again.id == image.id == engine.digest(NAME) == engine.digest_of(str(image.id))
        assert NAME in again.tags and again.attrs["RootFS"]["Layers"] == image.attrs["RootFS"]["Layers"]
        assert engine.architecture_of(NAME) == image.attrs["Architecture"]
        assert [one.id for one in engine.images(NAME)] == [image.id]
        assert image.id in [one.id for one in engine.images()]
        assert engine.pull(NAME).id == image.id, "it is here"
    finally:
        engine.untag(NAME)
    engine.untag(NAME)  # does nothing
    assert engine.find(NAME) is None and engine.images(NAME) == [] and engine.find(small)
    with pytest.raises(UserError, match=rf"^no local image {NAME}: run 'make it' first$"):
        engine.image(NAME, made_by="make it")
    with pytest.raises(ImageMissing, match=rf"with 404: No such image: {NAME}") as raised:
        engine.client.images.get(NAME)
    assert isinstance(raised.value, StepFailed) and isinstance(raised.value, docker.errors.ImageNotFound)


def test_what_no_registry_has_cannot_be_pulled(engine: Engine) -> None:
    with pytest.raises(UserError, match=r"^no local image localhost:9/none:1, and it cannot be pulled: "):
        engine.pull("localhost:9/none:1")


def test_a_program_is_run_whatever_it_does(engine: Engine, small: str) -> None:
    status, out, err = engine.run(
        small, "sh", ["-c", "echo $MINE; echo no >&2; exit 3"], "test", environment={"MINE": "x"}
    )
    assert (status, out, err) == (3, b"x\n", b"no\n")
    with pytest.raises(docker.errors.APIError, match="executable file not found") as raised:
        engine.run(small, "no-such-program", [], "test")
    assert isinstance(raised.value, StepFailed)
    with pytest.raises(StepFailed, match=rf"^{small}: its sleep does not end: given up after 1 s$"):
        Engine(look_seconds=1).run(small, "sleep", ["60"], "test")


def test_a_sandbox_owns_what_it_creates(engine: Engine, small: str) -> None:
    with Sandbox(engine, "contract") as sandbox:
        ours = {"label": f"{OWNED}={sandbox.name}"}
        volume = sandbox.volume("data")
        box = sandbox.create(
            small,
            ["sh", "-c", "echo first; echo second >&2"],
            "box",
            aliases=["here"],
            files=containers.archive({"made/file": b"content"}),
            volumes={volume: {"bind": "/data"}},
        )
        assert box.name == f"{sandbox.name}-box" and box.status == "created"
        assert containers.read_file(box, "/made/file") == b"content"
        with pytest.raises(NoFile):
            containers.read_file(box, "/made/none")
        box.start()
        assert sorted(containers.lines(box)) == ["first", "second"]
        assert containers.wait(box, 20) == 0 and box.logs(stderr=False) == b"first\n"
        client = engine.client
        listed = [
            *client.containers.list(all=True, filters=ours),  # type: ignore[arg-type]
            *client.volumes.list(filters=ours),  # type: ignore[arg-type]
            *client.networks.list(filters=ours),  # type: ignore[arg-type]
        ]
        assert [one.name for one in listed] == [box.name, volume, sandbox.name]
        assert not in_use(box.labels) and box.labels[OWNED] == sandbox.name
    with pytest.raises(docker.errors.NotFound):
        box.reload()
    assert client.volumes.list(filters=ours) == client.networks.list(filters=ours) == []  # type: ignore[arg-type]


def test_a_container_runs_until_it_is_stopped(engine: Engine, small: str) -> None:
    with Sandbox(engine, "contract", network="none") as sandbox:
        box = sandbox.create(small, ["sleep", "600"])
        box.start()
        box.reload()
        assert box.status == "running" and containers.wait(box, 0) is None
        with pytest.raises(docker.errors.APIError):
            box.remove()
        with pytest.raises(requests.exceptions.RequestException):
            box.wait(timeout=0.1)
        containers.signal(box)
        assert containers.wait(box, 20) == 137
        containers.signal(box)  # does nothing
        containers.remove(box)


def test_the_cache_of_builds_is_listed_and_emptied_by_record(engine: Engine) -> None:
    before = engine.cached()
    assert all(len(name) == 25 and size.endswith("B") for name, size in before.items())
    engine.drop_cached(["0" * 25])
    assert engine.cached().keys() >= before.keys() - {"0" * 25}
    with pytest.raises(StepFailed, match=r'^\'docker buildx inspect\' failed: ERROR: no builder "none-such" found$'):
        engine.buildx("inspect", "--builder=none-such")
