"""The walk of a target: the files that it enters while ``trainyard image`` builds, checks and tests its image.

A file counts if one of its functions gets the spec, or an object that has it: a plan, the evidence of a check. A name,
a path or a lock in place of the spec is no target.
"""

from __future__ import annotations

import dataclasses
import json
import re
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import FrameType, SimpleNamespace
from typing import Any

import docker.errors
import pytest
from tests.unit.test_verify import good
from tests.workspaces import lock

import trainyard
from trainyard.image import base_image, buildx, facts, smoke_command, smoke_test, working_directory
from trainyard.lint.image.evidence import Evidence
from trainyard.oci import docker_engine, layer_contents, layers, probe_runner
from trainyard.spec.model import Spec, load

SCRIPTS = f"{Path(trainyard.__file__).parents[1]}/"

#: How many files a target may enter. A repository entered 25 when callers asked specs for their class, and enters one
#: more than a target: the check of its code.
MOST = 22

DIGEST = "sha256:" + "1" * 64

Run = Callable[..., tuple[int, str, str]]


class Tracer:
    """Note which functions get a target; methods of specs and plans do, too.

    Attributes:
        files: path of a file in scripts/ -> names of its functions that do.
    """

    def __init__(self) -> None:
        self.files: dict[str, set[str]] = {}

    @contextmanager
    def running(self) -> Iterator[None]:
        """Trace this thread and those that it starts."""
        threading.setprofile(self._look)
        sys.setprofile(self._look)
        try:
            yield
        finally:
            sys.setprofile(None)
            threading.setprofile(None)  # type: ignore[arg-type]

    def _look(self, frame: FrameType, event: str, _: object) -> None:
        code = frame.f_code
        if event != "call" or not code.co_filename.startswith(SCRIPTS) or code.co_name.startswith("<"):
            return
        count = code.co_argcount + code.co_kwonlyargcount + bool(code.co_flags & 4) + bool(code.co_flags & 8)
        if any(map(carries, (frame.f_locals.get(name) for name in code.co_varnames[:count]))):
            self.files.setdefault(code.co_filename.removeprefix(SCRIPTS), set()).add(code.co_name)


def carries(value: object) -> bool:
    """Tell if an argument is a spec, or an object, a dictionary, a list or a tuple that has one."""
    if isinstance(value, Spec):
        return True
    inside = value if isinstance(value, dict) else getattr(value, "__dict__", {}) if is_ours(value) else {}
    members = value if isinstance(value, tuple | list) else inside.copy().values()
    return any(isinstance(member, Spec) for member in members)


def is_ours(value: object) -> bool:
    """Tell if an object is of a class of the packages in scripts/."""
    return type(value).__module__.partition(".")[0] in ("trainyard", "trainyard_jobs")


@contextmanager
def untraced() -> Iterator[None]:
    """Stop the trace while a fake makes its answer."""
    kept = sys.getprofile()
    sys.setprofile(None)
    try:
        yield
    finally:
        sys.setprofile(kept)


class Engine:
    """An engine with one image, which is as its spec says.

    Args:
        target: of the image.
    """

    def __init__(self, target: str) -> None:
        self._target = target
        self._names: set[str] = set()
        self.images = SimpleNamespace(get=self._get, remove=self._remove)

    def info(self) -> dict[str, Any]:
        return {}

    def version(self) -> dict[str, Any]:
        return {"Arch": "amd64"}

    def _get(self, name: str) -> Any:
        if name not in self._names and name != DIGEST:
            raise docker.errors.ImageNotFound("none")
        attributes = {"Architecture": "amd64", "Config": {"WorkingDir": "/workspace"}}

        def tag(repository: str, tag: str) -> None:
            self._names.add(f"{repository}:{tag}")

        return SimpleNamespace(id=DIGEST, tags=sorted(self._names), labels=self.labels(), attrs=attributes, tag=tag)

    def _remove(self, name: str, **_: object) -> None:
        self._names.discard(name)

    def bake(self, command: list[str], **_: object) -> subprocess.CompletedProcess[str]:
        """Build the image, in place of ``docker buildx bake``."""
        *_, target = command
        self._arguments = dict(re.findall(rf"{target}\.args\.(\w+)=(.*)", "\n".join(command)))
        option = next(word for word in command if word.startswith("--metadata-file="))
        metadata = {target: {"containerimage.digest": DIGEST}}
        Path(option.partition("=")[2]).write_text(json.dumps(metadata), encoding="utf-8")
        self._names.add(f"trainyard:{target}-candidate")
        return subprocess.CompletedProcess(command, 0, stderr="")

    def labels(self) -> dict[str, str]:
        """Return the labels of the image."""
        with untraced():
            spec = load(self._target)
            arguments = facts.labels_from_arguments(spec)
            return facts.labels(spec) | {label: self._arguments[name] for label, name in arguments.items()}

    def evidence(self) -> Evidence:
        """Return what the image has."""
        with untraced():
            made = good(self._target)
        made.stored.config["config"]["Labels"] = self.labels()
        *below, top = made.stored.layers
        layers = [*below, dataclasses.replace(top, diff_id=self._arguments.get("CODE", top.diff_id))]
        return dataclasses.replace(made, stored=dataclasses.replace(made.stored, layers=layers))


class Container:
    """A container that ends with the log of a run that went well.

    Args:
        words: of its command.
    """

    id = "1"
    attrs: Mapping[str, Any] = {"State": {"OOMKilled": True}}

    def __init__(self, words: tuple[str, ...], environment: Mapping[str, str]) -> None:
        reaches_memory_limit = "PYTHONPATH" in environment and any("stopped" in word for word in words)
        self._status = 137 if reaches_memory_limit else 0
        summary = {"event": "summary", "loss_first": 2, "loss_last": 1, "accuracy": 99.0, "images_per_second": 1.0}
        summary |= {"weights_sha256": "1", "resumed_from": 3, "processes": 2, "global_step": 3}
        self._lines = ["Epoch=2 ", json.dumps(summary)]

    def logs(self, **options: object) -> Any:
        text = "\n".join(self._lines).encode()
        return iter([text]) if options else text

    def wait(self, **_: object) -> dict[str, int]:
        return {"StatusCode": self._status}

    def kill(self, _: str) -> None:
        self._status = 143

    def reload(self) -> None:
        return

    def diff(self) -> list[dict[str, Any]]:
        return []


class Sandbox:
    """The closed world of a smoke test, whose containers go well."""

    has_ipv6 = False

    def __init__(self, *_: object, **__: object) -> None:
        return

    def __enter__(self) -> Sandbox:
        return self

    def __exit__(self, *_: object) -> None:
        return

    def start(self, *words: str, environment: Mapping[str, str] | None = None, **_: object) -> Container:
        return Container(words, environment or {})

    def run(self, *_: str) -> str:
        return ""

    def module_path(self, folder: str) -> str:
        return folder

    def polled_states(self) -> list[str]:
        return ["CREATING", "READY"]


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, engine_builds: None) -> Callable[[str], Engine]:
    """``engine("tf-cpu")``: an engine that builds and runs images of that target."""

    def start(target: str) -> Engine:
        made = Engine(target)
        for name in ("client", "existing_client"):
            monkeypatch.setattr(docker_engine, name, lambda: made)
        for name in ("architecture", "stores_in_containerd"):
            getattr(docker_engine, name).cache_clear()
        monkeypatch.setattr(buildx, "_run", made.bake)
        monkeypatch.setattr(base_image, "_registry_digest", lambda *_: (DIGEST, ""))
        monkeypatch.setattr(working_directory, "context", lambda *_, **__: None)
        monkeypatch.setattr(layer_contents, "take", lambda *_: [])
        monkeypatch.setattr(layers, "read", lambda *_, **__: made.evidence().stored)
        monkeypatch.setattr(probe_runner, "probe", lambda *_: made.evidence().inside)
        monkeypatch.setattr(smoke_test, "SmokeSandbox", Sandbox)
        monkeypatch.setattr(smoke_command, "SmokeSandbox", Sandbox)
        return made

    monkeypatch.setenv("TRAINYARD_BUILD", str(tmp_path / "state"))
    return start


def walk(trainyard: Run, *words: str) -> dict[str, set[str]]:
    """Return path of a file -> the functions that the target enters while ``trainyard image`` runs."""
    tracer = Tracer()
    with tracer.running():
        status, _, errors = trainyard("image", *words)
    assert status == 0, errors
    return tracer.files


def shown(files: Mapping[str, set[str]]) -> str:
    return "\n".join(f"{path}: {', '.join(sorted(names))}" for path, names in sorted(files.items()))


def test_a_target_enters_few_files(engine: Callable[[str], Engine], trainyard: Run) -> None:
    engine("tf-cpu")
    files = walk(trainyard, "tf-cpu")
    assert {"trainyard/spec/model.py", "trainyard/image/build.py", "trainyard/lint/image/verify.py"} <= files.keys()
    assert len(files) <= MOST, shown(files)


def test_a_repository_enters_few_files(
    engine: Callable[[str], Engine], trainyard: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "repository"
    folder.mkdir()
    subprocess.run(["git", "init", "--quiet"], cwd=folder, check=True)
    (folder / "train.py").touch()
    (folder / "trainyard.yaml").write_text("extends: tf-cpu\nrun: python train.py\n", encoding="utf-8")
    lock(load(str(folder)))
    monkeypatch.setattr("trainyard.image.repository_lock.check_tool", lambda _: None)
    engine(str(folder))
    files = walk(trainyard, str(folder))
    assert len(files) <= MOST + 1, shown(files)
