"""The sandbox of smoke tests, rehearsals and local builds, with an engine in memory; what reads containers.

tests/image/test_containers.py has the same with the Docker engine.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Iterator
from http import HTTPStatus
from types import SimpleNamespace
from typing import Any

import docker.errors
import pytest
import requests
from tests.fakes.engine import FakeEngine, Refusal

from trainyard.common.docker_engine import OWNED, Engine, in_use, resource_labels
from trainyard.common.errors import StepFailed
from trainyard.sandbox import containers
from trainyard.sandbox.containers import NoFile, Sandbox


def refusal(status: HTTPStatus, text: str) -> docker.errors.APIError:
    response = requests.Response()
    response.status_code = status
    return docker.errors.APIError(text, response, text)


@pytest.fixture
def engine(fake_engine: FakeEngine) -> FakeEngine:
    fake_engine.add("image")
    return fake_engine


def created(engine: FakeEngine) -> dict[str, Any]:
    """The request that created the last container."""
    return engine.of_kind("container")[-1].given


def interrupt() -> None:
    """Ctrl-C while the engine has not answered yet."""
    os.kill(os.getpid(), signal.SIGINT)
    time.sleep(0.5)


def kinds(engine: FakeEngine) -> list[str]:
    """The kinds of what was removed, in order, each once."""
    return list(dict.fromkeys(one.partition(" ")[0] for one in engine.removed))


@pytest.mark.parametrize("end", [None, StepFailed("it failed"), KeyboardInterrupt()])
def test_everything_is_removed_in_order_however_the_sandbox_ends(engine: FakeEngine, end: BaseException | None) -> None:
    Engine().client.containers.create("image", name="other", labels=resource_labels("smoke"))
    with pytest.raises(type(end)) if end else contextlib.nullcontext(), Sandbox(Engine(), "test") as sandbox:
        sandbox.volume("data")
        sandbox.create("image", None, "first")
        sandbox.create("image", ["true"])
        if end:
            raise end
    assert [one.name for one in engine.resources] == ["other"]
    assert kinds(engine)[:3] == ["container", "volume", "network"]


def test_what_a_container_starts_with_its_labels_is_removed_too(engine: FakeEngine) -> None:
    with Sandbox(Engine(), "test") as sandbox:
        labels = sandbox.create("image", None).labels
        Engine().client.containers.create("image", name="inner", labels=labels)
    assert "container inner" in engine.removed and engine.resources == []


def test_a_container_has_limits_which_its_caller_may_set(engine: FakeEngine) -> None:
    """It runs programs that others wrote: what they start, write and use is bounded on the engine's machine."""
    with Sandbox(Engine(), "test") as sandbox:
        sandbox.create("image", None)
        given = created(engine)["HostConfig"]
        limits = (given["PidsLimit"], given["LogConfig"]["Config"], given["Memory"])
        assert limits == (16_384, {"max-size": "64m"}, 9 << 30)
        sandbox.create("image", None, mem_limit=1 << 30)
        assert created(engine)["HostConfig"]["Memory"] == 1 << 30


def test_ctrl_c_while_something_is_created_leaves_nothing(engine: FakeEngine) -> None:
    """The engine has created it, but its answer has not arrived."""
    engine.afterwards("POST /containers/create.*-late", interrupt)
    with pytest.raises(KeyboardInterrupt), Sandbox(Engine(), "test") as sandbox:
        sandbox.create("image", None, "late")
    assert engine.resources == []


def test_a_set_up_that_fails_leaves_nothing(engine: FakeEngine) -> None:
    class Failing(Sandbox):
        def set_up(self) -> None:
            super().set_up()
            self.volume("data")
            raise StepFailed("no sidecar")

    with pytest.raises(StepFailed, match="no sidecar"), Failing(Engine(), "test"):
        pass
    assert kinds(engine) == ["volume", "network"] and engine.resources == []


def test_ctrl_c_during_the_clean_up_does_not_end_it_early(engine: FakeEngine) -> None:
    with pytest.raises(KeyboardInterrupt), Sandbox(Engine(), "test") as sandbox:
        sandbox.volume("data")
        for name in ("a", "b", "c"):
            sandbox.create("image", None, name)
        engine.afterwards(f"DELETE /containers/{engine.resources[3].id}", interrupt)
    assert engine.resources == []
    assert kinds(engine) == ["container", "volume", "network"]


def test_what_cannot_be_removed_is_a_warning(engine: FakeEngine, capsys: pytest.CaptureFixture[str]) -> None:
    with Sandbox(Engine(), "test") as sandbox:
        sandbox.volume("data")
        engine.instead("DELETE /volumes/", Refusal(409, "volume is in use"))
        engine.instead("DELETE /networks/", Refusal(404, "gone"))
    printed = " ".join(capsys.readouterr().err.split())
    assert "data was not removed: volume is in use; 'trainyard clean' removes what is not in use" in printed
    assert "gone" not in printed


def test_an_existing_network_is_used_and_kept(engine: FakeEngine) -> None:
    Engine().client.networks.create("cloudbuild", labels={OWNED: "cloudbuild"})
    with Sandbox(Engine(), "test", network="cloudbuild") as sandbox:
        sandbox.create("image", None, aliases=["here"])
        endpoints = created(engine)["NetworkingConfig"]["EndpointsConfig"]
        assert {name: endpoint["Aliases"] for name, endpoint in endpoints.items()} == {"cloudbuild": ["here"]}
    assert [one.name for one in engine.resources] == ["cloudbuild"]


def test_clean_finds_a_sandbox_by_its_label(engine: FakeEngine) -> None:
    with Sandbox(Engine(), "test") as sandbox:
        sandbox.volume("data")
        sandbox.create("image", None)
        assert all(OWNED in one.labels for one in engine.resources)
        assert not any(in_use(one.labels) for one in engine.resources), "once this process has ended"


def test_a_sidecar_runs_a_fake_beside_its_files(engine: FakeEngine) -> None:
    with Sandbox(Engine(), "test") as sandbox:
        sandbox.sidecar("image", containers.STORAGE, ["/gcs"], "storage", files={"server.pem": b"x"}, user="0")
        (sidecar,) = engine.of_kind("container")
    assert list(sidecar.files) == ["/fakes/storage.py", "/fakes/server.pem"]
    assert (sidecar.given["Entrypoint"][-1], sidecar.given["User"]) == ("/fakes/storage.py", "0")


# --- what reads containers ------------------------------------------------------------------------------------------


def logged(*pieces: bytes) -> Any:
    """A container that has written these pieces, and has ended."""
    return SimpleNamespace(logs=lambda **_: iter(pieces))


def test_lines_are_whole_whatever_the_pieces_are() -> None:
    assert list(containers.lines(logged(b"a\nb", b"c\r\n", b"\xff\n\nd"))) == ["a", "bc\r", "\ufffd", "", "d"]
    assert containers.prints(logged(b"Epo", b"ch=2 \n"), "Epoch=2 ")
    assert not containers.prints(logged(b"Epoch=1\n"), "Epoch=2")


def test_a_line_without_an_end_takes_no_memory() -> None:
    piece = b"1234" * 100_000
    found = list(containers.lines(logged(*[piece] * 6, b"\nend")))
    assert [len(line) for line in found] == [3 * len(piece), 3 * len(piece), 0, 3] and found[-1] == "end"


class Silent:
    """The stream of a container that prints one line and nothing more, until it is closed."""

    def __init__(self) -> None:
        self.closed = 0

    def __iter__(self) -> Iterator[bytes]:
        yield b"started\n"
        while not self.closed:
            time.sleep(0.01)

    def close(self) -> None:
        self.closed += 1


def test_following_a_log_ends_at_its_deadline() -> None:
    stream = Silent()
    container: Any = SimpleNamespace(logs=lambda **_: stream)
    started = time.monotonic()
    assert list(containers.lines(container, 0.2)) == ["started"]
    assert 0.2 <= time.monotonic() - started < 10


def test_a_follower_that_has_seen_enough_closes_the_log() -> None:
    stream = Silent()
    assert containers.prints(SimpleNamespace(logs=lambda **_: stream), "started")  # type: ignore[arg-type]
    assert stream.closed == 1


def holding(answer: Any) -> Any:
    """A container ``box`` of which the engine returns this archive, or raises this error."""

    def get_archive(path: str) -> tuple[list[bytes], dict[str, str]]:
        if isinstance(answer, Exception):
            raise answer
        return [answer[:100], answer[100:]], {}

    return SimpleNamespace(name="box", get_archive=get_archive)


def test_a_file_is_read_out_of_a_container() -> None:
    assert containers.read_file(holding(containers.archive({"metric": b"accuracy"})), "/tmp/metric") == b"accuracy"


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (docker.errors.NotFound("x"), "container box has no file /a"),
        (containers.archive({}, ["a"]), "/a of container box is not a file"),
        (containers.archive({}, links={"a": "/etc/hostname"}), "/a of container box is not a file"),
        (containers.archive({}), "/a of container box is not a file"),
    ],
)
def test_a_file_that_is_missing_is_one_clear_error(answer: Any, message: str) -> None:
    with pytest.raises(NoFile, match=f"^{message}$"):
        containers.read_file(holding(answer), "/a")


def test_an_engine_that_fails_is_no_missing_file() -> None:
    with pytest.raises(StepFailed, match=r"^/a of container box cannot be read: no space left$") as raised:
        containers.read_file(holding(refusal(HTTPStatus.INTERNAL_SERVER_ERROR, "no space left")), "/a")
    assert not isinstance(raised.value, NoFile)
