"""Unit tests run without Docker and without a network."""

from __future__ import annotations

import os
import shutil
import signal
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import pytest
from tests import locks
from tests.fakes.engine import FakeEngine

from trainyard import cli
from trainyard.spec import model
from trainyard.spec.framework import BaseContents

SPEC = """\
summary: A test image
base: debian-12
framework:
  name: tensorflow
  packages: [tensorflow-cpu==2.21.0]
requirements: [tf]
trainers: {package: tf, default: mnist}
budget: {size: 1.9 GB}
smoke: {trainer: mnist, accuracy: 0.97}
"""


@pytest.fixture
def spec_text() -> str:
    """A complete image.yaml."""
    return SPEC


@pytest.fixture
def write_spec(tmp_path: Path) -> Callable[[str], str]:
    """Write an image.yaml into a new folder; the folder's path, as for TARGET."""

    def write(text: str, name: str = "mine") -> str:
        folder = tmp_path / name
        folder.mkdir(exist_ok=True)
        (folder / "image.yaml").write_text(text, encoding="utf-8")
        return str(folder)

    return write


@pytest.fixture
def write_locked_spec(write_spec: Callable[[str], str]) -> Callable[[str], str]:
    """The same with a lock of a framework and a requirement: what a Dockerfile is rendered from."""

    def write(text: str) -> str:
        folder = write_spec(text)
        framework = locks.pin("tensorflow-cpu==2.21.0", "framework", 280_000_000, ["0" * 64])
        locks.write(Path(folder), locks.lock(framework, locks.pin("a==1", "", 5_000, ["0" * 64])))
        return folder

    return write


#: The record in a lock of a base that holds the framework.
BASE_CONTENTS = {
    "image": "registry.example/xla:nightly",
    "reference": "registry.example/xla:nightly@sha256:" + "1" * 64,
    "digest": "sha256:" + "1" * 64,
    "day": "20261120",
    "python": "3.12.9",
    "interpreter": "/usr/local/bin/python3",
    "site": "/usr/local/lib/python3.12/site-packages",
    "packages": {
        "fsspec": "2025.1.0",
        "libtpu": "0.0.30.dev20260101",
        "torch": "2.10.0",
        "torch-xla": "2.10.0+git0123abc",
        "torchvision": "0.25.0",
    },
    "requires": {"torch-xla": ["numpy", 'libtpu==0.0.30.dev20260101; extra == "tpu"']},
}


@pytest.fixture
def inspect_base(tmp_path: Path) -> Callable[[model.Spec], Path]:
    """Copy a target whose base holds the framework, locked with BASE_CONTENTS; the folder of the copy."""

    def copy(found: model.Spec) -> Path:
        folder = tmp_path / found.target
        shutil.copytree(found.folder, folder)
        pins = map(locks.pin, model.requirements_of(found))
        locks.write(folder, locks.lock(*pins, python="3.12", base=BaseContents.model_validate(BASE_CONTENTS)))
        return folder

    return copy


@pytest.fixture(scope="session")
def uv_environment(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, str]:
    """Return variables with which uv finds git alone on PATH, and has a cache that tests share.

    uv starts each Python of PATH to ask for its version, and asks those that fail in every call: three shells of pyenv.
    It asks the index again for all that it has in its cache, as the tests' indexes do not say how long that is valid.
    """
    programs = tmp_path_factory.mktemp("programs")
    if git := shutil.which("git"):
        (programs / "git").symlink_to(git)
    return {"PATH": str(programs), "XDG_CACHE_HOME": str(tmp_path_factory.mktemp("cache"))}


@pytest.fixture
def resolves(uv_environment: Mapping[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Let uv resolve whatever Pythons and packages this machine has."""
    for name, value in uv_environment.items():
        monkeypatch.setenv(name, value)


Result = tuple[int, str, str]


@pytest.fixture
def trainyard(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., Result]:
    """``trainyard("check-job", "job.yaml", OFFLINE="1")``: exit status, stdout and stderr of a command.

    Words in capital letters are variables, as in ``make check-job FILE=job.yaml OFFLINE=1``.
    """

    def run(*arguments: str, **variables: str) -> Result:
        with monkeypatch.context() as patch:
            for name, value in variables.items():
                patch.setenv(f"TRAINYARD_{name}", value)
            status = cli.run(list(arguments))
        out, err = capsys.readouterr()
        return status, out, err

    return run


@pytest.fixture(autouse=True)
def signal_actions_as_before() -> Iterator[None]:
    """A command that runs in the process of the tests sets actions, which a later test's children would inherit.

    A pool of processes that is terminated while they start hung: Python ignores an exception that an action raises in
    what runs after a fork.
    """
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    yield
    for number, action in before.items():
        signal.signal(number, action)


@pytest.fixture(autouse=True)
def no_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    """No engine runs, whatever this machine has, but in tests with ``fake_engine``."""
    monkeypatch.setenv("DOCKER_HOST", "unix:///nowhere/docker.sock")


@pytest.fixture
def fake_engine(no_engine: None, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeEngine]:
    """The engine that runs: commands and libraries find it as they find any other."""
    with FakeEngine() as engine:
        monkeypatch.setenv("DOCKER_HOST", engine.address)
        monkeypatch.setenv("PATH", str(engine.programs), prepend=os.pathsep)
        yield engine


@pytest.fixture(autouse=True)
def no_variables_from_outside(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in list(os.environ):
        if name.startswith("TRAINYARD_"):
            monkeypatch.delenv(name)
