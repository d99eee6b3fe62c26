"""`trainyard clean` removes what Trainyard made, and nothing else."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.fakes.engine import FakeEngine, Refusal

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


@pytest.fixture
def engine(fake_engine: FakeEngine) -> FakeEngine:
    """An engine with :data:`IMAGES`."""
    for tag, target in IMAGES.items():
        fake_engine.add(tag, labels={"io.trainyard.target": target} if target else {})
    return fake_engine


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
    words: tuple[str, ...], removed: list[str], records: set[str], engine: FakeEngine, state: Path, trainyard: Command
) -> None:
    status, out, _ = trainyard("clean", *words, "--json")
    assert status == 0 and sorted(json.loads(out)["removed"]) == sorted(removed)
    assert sorted(engine.tags) == sorted(set(IMAGES) - set(removed))
    assert {folder.name for folder in state.glob("*")} - {"locks"} == records
    assert engine.prunes == 0


def test_the_build_cache_is_removed_only_if_asked(engine: FakeEngine, state: Path, trainyard: Command) -> None:
    assert trainyard("clean", "--cache")[0] == 0
    assert engine.prunes == 1


def test_a_build_cache_that_is_being_removed_is_reported(engine: FakeEngine, state: Path, trainyard: Command) -> None:
    engine.instead("POST /build/prune", Refusal(409, "a prune operation is already running"))
    status, _, err = trainyard("clean", "--cache")
    assert status == 0 and "build cache not removed: a prune operation is already running" in err.splitlines()


def test_a_target_that_does_not_exist_removes_nothing(engine: FakeEngine, state: Path, trainyard: Command) -> None:
    status, _, err = trainyard("clean", "xlaa")
    assert status == 2 and "unknown target 'xlaa' (did you mean 'xla'?)" in err
    assert list(engine.tags) == list(IMAGES)


def test_files_of_the_user_in_the_state_folder_are_kept(engine: FakeEngine, state: Path, trainyard: Command) -> None:
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


def test_what_a_running_command_makes_is_kept(engine: FakeEngine, state: Path, trainyard: Command) -> None:
    engine.add("trainyard:cpu-candidate", labels={"io.trainyard.target": "cpu"})
    before, lock = engine.tags, state / "locks" / "candidate-xla.lock"
    with holding(state, "candidate-xla") as other:
        inode = lock.stat().st_ino
        for words in (("--all",), ("xla",)):
            status, _, err = trainyard("clean", *words)
            said = f"clean: another command holds the lock candidate-xla of {state}: run this when it has ended\n"
            assert (status, err) == (2, said)
            assert engine.tags == before and (state / "xla").is_dir() and lock.stat().st_ino == inode
        assert json.loads(trainyard("clean", "--json")[1])["removed"] == ["trainyard:cpu-candidate"]
        assert trainyard("clean", "cpu")[0] == 0, "it does not use that"
        other.communicate("\n")
    assert trainyard("clean", "--all")[0] == 0
    assert lock.exists(), "a command that waits for it has opened it"
