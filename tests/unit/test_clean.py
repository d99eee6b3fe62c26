"""`trainyard clean` removes what Trainyard made, and nothing else."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import docker.errors
import pytest

from trainyard.oci import docker_engine
from trainyard.spec import state as records

Command = Callable[..., tuple[int, str, str]]

#: Reference of each image of the engine -> the target in its label; empty if it has none.
IMAGES = {
    "trainyard:xla": "xla",
    "trainyard:xla-2.9.0-20261126-1234abcd": "xla",
    "trainyard:xla-candidate": "xla",
    "trainyard:cpu": "cpu",
    "trainyard-base:debian-12": "",
    "trainyard-registry:2.8": "",
    "europe-docker.pkg.dev/team/trainyard:xla": "xla",
    "mine-candidate:1": "",
    "trainyardstick:1": "",
}


class Engine:
    """An engine with :data:`IMAGES` and, if ``pruning``, a build cache that can be removed."""

    def __init__(self, pruning: bool = True) -> None:
        self.left = list(IMAGES)
        self.pruned = 0
        self.pruning = pruning
        nothing = SimpleNamespace(list=lambda **_: [])
        self.networks = self.volumes = self.containers = nothing
        self.images = self.api = self

    def tagged(self, name: str | None = None, *, label: str | None = None) -> list[Any]:
        wanted = label.partition("=")[2] if label else None
        return [SimpleNamespace(tags=[tag]) for tag in self.left if wanted is None or IMAGES[tag] == wanted]

    def remove(self, reference: str, force: bool) -> None:
        self.left.remove(reference)

    def prune_builds(self) -> None:
        if not self.pruning:
            raise docker.errors.APIError("", explanation="a prune operation is already running")
        self.pruned += 1


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> Engine:
    made = Engine()
    monkeypatch.setattr(docker_engine, "client", lambda: made)
    monkeypatch.setattr(docker_engine, "images", made.tagged)
    return made


@pytest.fixture
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Write the records of two targets; return the state folder."""
    monkeypatch.setenv("TRAINYARD_BUILD", str(tmp_path / "state"))
    for target in ("xla", "cpu"):
        records.record(tmp_path / "state" / target, "verify", "sha256:a", {"passed": True})
    return tmp_path / "state"


@pytest.mark.parametrize(
    ("words", "removed", "records"),
    [
        ((), ["trainyard:xla-candidate"], {"xla", "cpu"}),
        (("xla",), ["trainyard:xla", "trainyard:xla-2.9.0-20261126-1234abcd", "trainyard:xla-candidate"], {"cpu"}),
        (("--all",), [name for name in IMAGES if name.startswith(("trainyard:", "trainyard-"))], set()),
    ],
    ids=["no option", "target", "all"],
)
def test_images_and_records_are_removed_as_asked(
    words: tuple[str, ...], removed: list[str], records: set[str], engine: Engine, state: Path, trainyard: Command
) -> None:
    status, out, _ = trainyard("clean", *words, "--json")
    assert status == 0 and sorted(json.loads(out)["removed"]) == sorted(removed)
    assert sorted(engine.left) == sorted(set(IMAGES) - set(removed))
    assert {folder.name for folder in state.glob("*")} - {"locks"} == records
    assert engine.pruned == 0


def test_the_build_cache_is_removed_only_if_asked(engine: Engine, state: Path, trainyard: Command) -> None:
    assert trainyard("clean", "--cache")[0] == 0
    assert engine.pruned == 1


def test_a_build_cache_that_is_being_removed_is_reported(engine: Engine, state: Path, trainyard: Command) -> None:
    engine.pruning = False
    status, _, err = trainyard("clean", "--cache")
    assert status == 0 and "build cache not removed: a prune operation is already running" in err.splitlines()


def test_a_target_that_does_not_exist_removes_nothing(engine: Engine, state: Path, trainyard: Command) -> None:
    status, _, err = trainyard("clean", "xlaa")
    assert status == 2 and "unknown target 'xlaa' (did you mean 'xla'?)" in err
    assert engine.left == list(IMAGES)


def test_files_of_the_user_in_the_state_folder_are_kept(engine: Engine, state: Path, trainyard: Command) -> None:
    """TRAINYARD_BUILD may name any folder, also that of a repository."""
    files = ["train.py", "tf-cpu/data.csv", "layers/mine.txt", "build/own.log", ".git/config"]
    for name in files:
        (state / name).parent.mkdir(exist_ok=True)
        (state / name).write_text("mine")
    (state / "link").symlink_to(state / "tf-cpu")
    records.record(state / "tf-cpu", "verify", "sha256:a", {"passed": True})
    status, _, err = trainyard("clean", "--all")
    kept = f"kept {state}/tf-cpu: no file .trainyard in it says that Trainyard made it"
    assert status == 0 and kept in err.splitlines()
    assert trainyard("clean", "tf-cpu")[0] == 0
    assert [name for name in files if not (state / name).is_file()] == []
    assert not (state / "xla").exists() and not (state / "cpu").exists()


def holding(state: Path, *names: str) -> subprocess.Popen[str]:
    """Another process that holds these locks until a line is written to it."""
    script = (
        "import contextlib, pathlib, sys\nfrom trainyard.spec.state import file_lock\n"
        "with contextlib.ExitStack() as held:\n"
        "    for name in sys.argv[2:]: held.enter_context(file_lock(pathlib.Path(sys.argv[1]), name))\n"
        "    print('locked', flush=True); sys.stdin.readline()"
    )
    command = [sys.executable, "-c", script, str(state), *names]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None and process.stdout.readline() == "locked\n"
    return process


def test_what_a_running_command_makes_is_kept(engine: Engine, state: Path, trainyard: Command) -> None:
    engine.left.append("trainyard:cpu-candidate")
    before, lock = list(engine.left), state / "locks" / "candidate-xla.lock"
    with holding(state, "candidate-xla") as other:
        inode = lock.stat().st_ino
        for words in (("--all",), ("xla",)):
            status, _, err = trainyard("clean", *words)
            said = f"clean: another command holds the lock candidate-xla of {state}: run this when it has ended\n"
            assert (status, err) == (2, said)
            assert engine.left == before and (state / "xla").is_dir() and lock.stat().st_ino == inode
        assert json.loads(trainyard("clean", "--json")[1])["removed"] == ["trainyard:cpu-candidate"]
        assert trainyard("clean", "cpu")[0] == 0, "it does not use that"
        other.communicate("\n")
    assert trainyard("clean", "--all")[0] == 0
    assert lock.exists(), "a command that waits for it has opened it"
