"""Check that any report of an image's Python becomes one line, and that its container has limits and an end."""

from __future__ import annotations

import json
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import docker.errors
import pytest
import requests

from trainyard.common.errors import StepFailed
from trainyard.oci import docker_engine, probe_runner
from trainyard.oci.probe_runner import Distribution, Library, NoPython, ProbeFailed
from trainyard.spec.architectures import AMD64

PACKAGE = {"name": "a", "version": "1", "folder": "/site", "requires": ["b"], "tags": ["py3-none-any"], "bytes": 3}
REPORT: dict[str, Any] = {
    "python": "3.13.5",
    "executable": "/usr/bin/python3",
    "site": "/site",
    "packages": [PACKAGE],
    "sources": 1,
    "missing": [],
    "stale": ["/site/a.py"],
    "texts": {"image.json": "{}"},
    "libraries": {"/site/a.so": {"code": ["9.0"], "ptx": []}},
    "ptxas": {"/site/ptxas": "12.9"},
}


class Container:
    """A container whose program prints ``out``, then ``err``, and ends with ``status`` or an exception."""

    def __init__(self, out: bytes, err: bytes = b"", status: int | Exception = 0) -> None:
        self.out, self.err, self.status = out, err, status
        self.given: dict[str, Any] = {}
        self.removed = 0

    def create(self, *_: object, **options: Any) -> Container:
        self.given = options
        return self

    def start(self) -> None:
        if isinstance(self.status, docker.errors.APIError) and not isinstance(self.status, docker.errors.NotFound):
            raise self.status

    def wait(self, timeout: float) -> dict[str, int]:
        assert timeout <= 300
        if isinstance(self.status, Exception):
            raise self.status
        return {"StatusCode": self.status}

    def logs(self, *, stdout: bool = True, stderr: bool = True) -> bytes:
        return self.err if stderr and not stdout else self.out

    def remove(self, **_: bool) -> None:
        self.removed += 1


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Container]:
    """``engine(b"{}", status=1)``: the container that an engine creates."""
    monkeypatch.setattr(docker_engine, "architecture_of", lambda _: AMD64)
    monkeypatch.setattr(docker_engine, "architecture", lambda: AMD64)

    def make(*given: Any, **more: Any) -> Container:
        made = Container(*given, **more)
        monkeypatch.setattr(docker_engine, "client", lambda: SimpleNamespace(containers=made))
        return made

    return make


def test_a_report_is_read(engine: Callable[..., Container]) -> None:
    container = engine(json.dumps(REPORT | {"of a newer version": 1}).encode())
    found = probe_runner.probe("image", *probe_runner.PARTS)
    assert found.packages == (Distribution("a", "1", "/site", ("b",), 3, ("py3-none-any",)),)
    assert (found.python, found.sources, found.stale) == ("3.13.5", 1, ("/site/a.py",))
    assert found.libraries == {"/site/a.so": Library(("9.0",), ())} and found.ptxas == {"/site/ptxas": "12.9"}
    assert container.given["network_mode"] == "none" and container.given["read_only"]
    assert {"pids_limit", "mem_limit"} <= container.given.keys()
    assert container.given["log_config"].config == {"max-size": "64m"}, "what is read has no other limit"
    assert container.removed == 1


def changed(*path: str | int, to: object) -> bytes:
    """The report with another value at a path."""
    report = json.loads(json.dumps(REPORT))
    inside = report
    for key in path[:-1]:
        inside = inside[key]
    inside[path[-1]] = to
    return json.dumps(report).encode()


@pytest.mark.parametrize(
    ("printed", "said"),
    [
        (b"", "its Python printed no list of what is installed"),
        (b"x", "its Python printed no list"),
        (b"\xff", "its Python printed no list"),
        (b"[" * 100_000, "its Python printed no list"),
        (b"{}", "no list of what is installed: python Field required"),
        (json.dumps({"python": "3.13.5"}).encode(), "packages Field required"),
        (changed("python", to=3), "python Input should be a valid string"),
        (changed("packages", to="a"), "packages "),
        (changed("packages", 0, "name", to=None), r"packages\.0\.name Input should be a valid string"),
        (changed("packages", 0, "requires", to=1), r"packages\.0\.requires "),
        (changed("stale", to={}), "stale "),
        (changed("texts", to={"a": 1}), r"texts\.a "),
        (changed("texts", to={"\x1b[2J": 1}), r"texts\.\\x1b\[2J "),
        (changed("libraries", to={"/a": "code"}), "libraries"),
        (changed("ptxas", to=None), "ptxas "),
    ],
)
def test_what_is_no_report_is_one_line(engine: Callable[..., Container], printed: bytes, said: str) -> None:
    container = engine(printed)
    with pytest.raises(ProbeFailed, match=rf"^image: .*{said}") as raised:
        probe_runner.probe("image")
    assert str(raised.value).isprintable()
    assert container.removed == 1


def test_a_python_that_fails_is_its_last_line(engine: Callable[..., Container]) -> None:
    engine(b"", b"Traceback\n\x1b[2JImportError: no json\n", status=1)
    with pytest.raises(ProbeFailed, match=r"cannot list what is installed: \\x1b\[2JImportError: no json$"):
        probe_runner.probe("image")


@pytest.mark.parametrize(
    "error", [requests.exceptions.ReadTimeout(), requests.exceptions.ConnectionError(), docker.errors.NotFound("x")]
)
def test_a_python_that_does_not_end_is_given_up(engine: Callable[..., Container], error: Exception) -> None:
    container = engine(b"", status=error)
    with pytest.raises(StepFailed, match=r"^image: its python3 does not end: given up after 300 s$"):
        probe_runner.probe("image")
    assert container.removed == 1, "and no other name of Python is tried"


def test_an_image_without_python_is_named(engine: Callable[..., Container]) -> None:
    container = engine(b"", status=docker.errors.APIError("x", explanation="exec: python3: not found"))
    with pytest.raises(NoPython, match=r"^image: cannot run its Python: exec: python3: not found$"):
        probe_runner.probe("image")
    assert container.removed == 2
