"""Check that any report of an image's Python becomes one line, and that its container has limits and an end."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
from tests.fakes.engine import FakeEngine, Ran

from trainyard.common.docker_engine import Engine
from trainyard.common.errors import StepFailed
from trainyard.oci import probe_runner
from trainyard.oci.probe_runner import Distribution, Library, NoPython, ProbeFailed

PACKAGE = {"name": "a", "version": "1", "folder": "/site", "requires": ["b"], "tags": ["py3-none-any"], "bytes": 3}
REPORT: dict[str, Any] = {
    "python": "3.13.5",
    "executable": "/usr/bin/python3",
    "site": "/site",
    "packages": [PACKAGE],
    "sources": 1,
    "missing": [],
    "stale": ["/site/a.py"],
    "texts": {"recipe.json": "{}"},
    "libraries": {"/site/a.so": {"code": ["9.0"], "ptx": []}},
    "ptxas": {"/site/ptxas": "12.9"},
}


@pytest.fixture
def python(fake_engine: FakeEngine) -> Callable[..., FakeEngine]:
    """``python(b"{}", status=1)``: an engine with an image whose Python does that."""

    def make(out: bytes = b"", err: bytes = b"", *, status: int = 0, ends: bool = True) -> FakeEngine:
        fake_engine.add("image", program=lambda *_: Ran(status, out, err, ends))
        return fake_engine

    return make


def test_a_report_is_read(python: Callable[..., FakeEngine]) -> None:
    engine = python(json.dumps(REPORT | {"of a newer version": 1}).encode())
    given: dict[str, Any] = {}
    engine.afterwards("POST /containers/create", lambda: given.update(engine.resources[0].given["HostConfig"]))
    found = probe_runner.probe(Engine(), "image", *probe_runner.PARTS)
    assert found.packages == (Distribution("a", "1", "/site", ("b",), 3, ("py3-none-any",)),)
    assert (found.python, found.sources, found.stale) == ("3.13.5", 1, ("/site/a.py",))
    assert found.libraries == {"/site/a.so": Library(("9.0",), ())} and found.ptxas == {"/site/ptxas": "12.9"}
    assert given["NetworkMode"] == "none" and given["ReadonlyRootfs"]
    assert given["PidsLimit"] and given["Memory"]
    assert given["LogConfig"]["Config"] == {"max-size": "64m"}, "what is read has no other limit"
    assert engine.resources == [] and len(engine.removed) == 1


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
def test_what_is_no_report_is_one_line(python: Callable[..., FakeEngine], printed: bytes, said: str) -> None:
    engine = python(printed)
    with pytest.raises(ProbeFailed, match=rf"^image: .*{said}") as raised:
        probe_runner.probe(Engine(), "image")
    assert str(raised.value).isprintable()
    assert engine.resources == [] and len(engine.removed) == 1


def test_a_python_that_fails_is_its_last_line(python: Callable[..., FakeEngine]) -> None:
    python(b"", b"Traceback\n\x1b[2JImportError: no json\n", status=1)
    with pytest.raises(ProbeFailed, match=r"cannot list what is installed: \\x1b\[2JImportError: no json$"):
        probe_runner.probe(Engine(), "image")


def test_a_python_that_does_not_end_is_given_up(python: Callable[..., FakeEngine]) -> None:
    engine = python(ends=False)
    with pytest.raises(StepFailed, match=r"^image: its python3 does not end: given up after 1 s$"):
        probe_runner.probe(Engine(look_seconds=1), "image")
    assert len(engine.removed) == 1, "and no other name of Python is tried"


def test_a_python_whose_container_is_removed_meanwhile_is_given_up(python: Callable[..., FakeEngine]) -> None:
    engine = python(ends=False)
    engine.afterwards("POST /containers/.*/start", lambda: engine.resources.clear())
    with pytest.raises(StepFailed, match=r"^image: its python3 does not end: given up after 300 s$"):
        probe_runner.probe(Engine(), "image")


def test_an_image_without_python_is_named(fake_engine: FakeEngine) -> None:
    fake_engine.add("image")
    with pytest.raises(NoPython, match=r'^image: cannot run its Python: exec: "python": executable file not found'):
        probe_runner.probe(Engine(), "image")
    assert len(fake_engine.removed) == 2 and fake_engine.resources == []
