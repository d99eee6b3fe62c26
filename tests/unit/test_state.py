"""Results of steps are kept per image digest; what only one process of a host may do at a time, others wait for."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from pydantic import ValidationError

from trainyard.common.errors import UserError
from trainyard.spec import state

VERIFIED = {"passed": True, "size": 1, "manifest": {"size": 2}, "more": ["x"]}


#: What a process of the tests starts with: its messages are shown as those of a command.
PRELUDE = """\
import pathlib, sys
from trainyard.common.console import Messages
from trainyard.spec import state
folder = pathlib.Path(sys.argv[1])
Messages().__enter__()
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The state folder."""
    return tmp_path


def child(script: str, folder: Path) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", PRELUDE + script, str(folder)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


@pytest.fixture
def lock_holder(folder: Path) -> Iterator[subprocess.Popen[str]]:
    """Another process that holds the lock of xla's candidate until a line is written to it, or it is killed."""
    script = "with state.candidate_lock(folder / 'xla'): print('locked', flush=True); sys.stdin.readline()"
    process = child(script, folder)
    assert process.stdout is not None and process.stdout.readline() == "locked\n"
    yield process
    process.kill()
    process.communicate()


def test_a_result_is_read_back_as_it_was_recorded(folder: Path) -> None:
    state.record(folder / "tf-cpu", "verify", "sha256:a", VERIFIED)
    assert state.recall(folder / "tf-cpu", "verify", "sha256:a") == {"digest": "sha256:a", **VERIFIED}
    assert state.recall(folder / "tf-cpu", "verify", "sha256:b") is None
    assert state.recall(folder / "tf-cpu", "smoke", "sha256:a") is None
    assert state.recall(folder / "tf-gpu", "verify", "sha256:a") is None, "it was held against another spec"


def test_another_image_of_the_target_does_not_replace_the_result_of_its_own(folder: Path) -> None:
    """`make verify IMAGE=other TARGET=tf-cpu` between `make image` and `make push TARGET=tf-cpu`."""
    for step in ("verify", "smoke"):
        state.record(folder / "tf-cpu", step, "sha256:own", {"passed": True})
    state.record(folder / "tf-cpu", "verify", "sha256:other", {"passed": False})
    assert set(state.require(folder / "tf-cpu", "sha256:own", "verify", "smoke")) == {"verify", "smoke"}
    with pytest.raises(UserError, match=r"\(sha256:other\) never passed 'verify': run 'trainyard image tf-cpu'"):
        state.require(folder / "tf-cpu", "sha256:other", "verify")


def test_a_step_that_was_not_run_is_required_in_vain(folder: Path) -> None:
    state.record(folder / "tf-cpu", "verify", "sha256:a", VERIFIED)
    with pytest.raises(UserError, match="never passed 'smoke'"):
        state.require(folder / "tf-cpu", "sha256:a", "verify", "smoke")


def test_the_last_result_is_the_one_that_was_recorded_last(folder: Path) -> None:
    assert state.last(folder / "tf-cpu", "verify") is None
    for digest in ("sha256:b", "sha256:a"):
        state.record(folder / "tf-cpu", "verify", digest, VERIFIED)
    state.record(folder / "tf-cpu", "smoke", "sha256:c", {"passed": True})
    found = state.last(folder / "tf-cpu", "verify")
    assert found is not None and found["digest"] == "sha256:a"


def test_results_of_the_oldest_images_are_dropped(folder: Path) -> None:
    state.record(folder / "tf-gpu", "build", "sha256:0", {"passed": True})
    for number in range(53):
        state.record(folder / "tf-cpu", "build", f"sha256:{number}", {"passed": True})
        state.record(folder / "tf-cpu", "verify", f"sha256:{number}", {"passed": True})
    kept = {path.name for path in (folder / "tf-cpu" / "results").iterdir()}
    assert kept == {f"sha256-{number}" for number in range(3, 53)}
    assert state.recall(folder / "tf-gpu", "build", "sha256:0"), "targets are counted apart"


def test_results_from_the_future_displace_none_that_was_just_recorded(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The clock is put back by a day: the order in which results are recorded counts."""
    monkeypatch.setattr(state, "KEPT", 2)
    day = 86_400 * 10**9
    clock = time.time_ns() + day
    monkeypatch.setattr(time, "time_ns", lambda: clock)
    for number in range(4):
        if number == 2:
            clock -= day
        for step in ("build", "smoke"):
            state.record(folder / "tf-cpu", step, f"sha256:{number}", {"passed": True})
        newest = [found["digest"] for found in state.builds(folder / "tf-cpu")]
        assert newest == [f"sha256:{one}" for one in range(number, max(number - 2, -1), -1)]
    assert state.require(folder / "tf-cpu", "sha256:3", "build", "smoke")
    passed = state.passed(folder / "tf-cpu")
    assert passed and passed["digest"] == "sha256:3"
    assert state.when(folder / "tf-cpu", "smoke", "sha256:3")[:13] == time.strftime("%Y-%m-%d %H"), "not tomorrow"


@pytest.mark.parametrize(
    "text",
    [
        "",
        '{"digest": "sha256:a", "pas',
        "[]",
        '{"digest": "sha256:a", "passed": "perhaps"}',
        pytest.param('{"digest": "sha256:b", "passed": true}', id="of another image"),
        pytest.param('{"digest": "sha512:a", "passed": true}', id="of another algorithm"),
    ],
)
def test_a_damaged_result_counts_as_none(folder: Path, text: str) -> None:
    state.record(folder / "tf-cpu", "verify", "sha256:a", VERIFIED)
    (path,) = folder.rglob("verify.json")
    path.write_text(text, encoding="utf-8")
    assert state.recall(folder / "tf-cpu", "verify", "sha256:a") is None
    assert state.last(folder / "tf-cpu", "verify") is None
    with pytest.raises(UserError, match="never passed 'verify'"):
        state.require(folder / "tf-cpu", "sha256:a", "verify")


def test_a_process_that_is_killed_while_writing_leaves_the_earlier_result(folder: Path) -> None:
    state.record(folder / "tf-cpu", "verify", "sha256:a", VERIFIED)
    script = (
        "import os, signal\n"
        "def write_text(path, text, **_):\n"
        "    with path.open('w') as file:\n"
        "        file.write('{'); file.flush(); os.kill(os.getpid(), signal.SIGKILL)\n"
        "pathlib.Path.write_text = write_text\n"
        "state.record(folder / 'tf-cpu', 'verify', 'sha256:a', {'passed': False})"
    )
    process = child(script, folder)
    process.communicate(timeout=30)
    assert process.returncode == -9
    assert state.recall(folder / "tf-cpu", "verify", "sha256:a") == {"digest": "sha256:a", **VERIFIED}
    state.record(folder / "tf-cpu", "verify", "sha256:a", {"passed": False})
    assert {path.name for path in (folder / "tf-cpu").rglob("*") if path.is_file()} == {state.MARKER, "verify.json"}


def test_a_result_that_cannot_be_written_leaves_the_earlier_one_and_no_file(folder: Path) -> None:
    state.record(folder / "tf-cpu", "verify", "sha256:a", VERIFIED)
    with pytest.raises(TypeError):
        state.record(folder / "tf-cpu", "verify", "sha256:a", {"passed": False, "more": object()})
    with pytest.raises(ValidationError, match="passed"):  # recall would take it for damaged
        state.record(folder / "tf-cpu", "verify", "sha256:a", {"size": 1})
    assert state.recall(folder / "tf-cpu", "verify", "sha256:a") == {"digest": "sha256:a", **VERIFIED}
    assert {path.name for path in (folder / "tf-cpu").rglob("*") if path.is_file()} == {state.MARKER, "verify.json"}


def test_processes_that_record_at_the_same_time_keep_whole_results(folder: Path) -> None:
    script = (
        "facts = {'passed': True, 'notes': [{'x': 'y' * 5000}]}\n"
        "for number in range(60):\n"
        "    state.record(folder / 'tf-cpu', 'verify', f'sha256:{number % 7}', facts)"
    )
    processes = [child(f"state.KEPT = 5\n{script}", folder) for _ in range(2)]
    for process in processes:
        _, err = process.communicate(timeout=60)
        assert process.returncode == 0, err
    files = list(folder.rglob("verify.json"))
    assert len(files) == 5
    assert all(json.loads(path.read_text(encoding="utf-8"))["passed"] for path in files)


def test_a_second_process_says_that_it_waits_and_then_gets_the_lock(folder: Path) -> None:
    with state.candidate_lock(folder / "xla"), state.candidate_lock(folder / "xla"):  # its holder may take it again
        second = child("with state.candidate_lock(folder / 'xla'): print('locked', flush=True)", folder)
        assert second.stderr is not None
        assert second.stderr.readline().strip().endswith("another process makes xla: waiting for it")
        assert second.poll() is None
    out, _ = second.communicate(timeout=30)
    assert out == "locked\n" and second.returncode == 0


def test_a_lock_is_released_when_its_holder_is_killed(lock_holder: subprocess.Popen[str], folder: Path) -> None:
    lock_holder.kill()
    with state.candidate_lock(folder / "xla"):
        assert lock_holder.wait(timeout=10) == -9


def test_different_targets_do_not_wait_for_each_other(lock_holder: subprocess.Popen[str], folder: Path) -> None:
    with state.candidate_lock(folder / "tf-cpu"):
        assert lock_holder.poll() is None
