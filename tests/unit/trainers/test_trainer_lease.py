"""Test that a run holds the folders that it writes, and that what ends or hinders it mixes and loses nothing there."""

from __future__ import annotations

import gzip
import os
import signal
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from far_storage import FarStorage
from trainers.common import files, mnist
from trainers.common.files import Lease, UserError

ROOT = Path(__file__).resolve().parents[3]
HOLD = """
import sys, time
from trainers.common.files import Lease
Lease(sys.argv[1])
print("held", flush=True)
time.sleep(600)
"""


@pytest.fixture
def other(tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    """Start another process, which holds ``tmp_path / "run"``."""
    process = subprocess.Popen([sys.executable, "-c", HOLD, str(tmp_path / "run")], cwd=ROOT, text=True,
                               stdout=subprocess.PIPE)  # fmt: skip
    assert process.stdout and process.stdout.readline() == "held\n"
    yield process
    process.kill()
    process.communicate()


def test_a_second_run_says_who_has_the_folder(
    other: subprocess.Popen[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    who = rf"process {other.pid} on {socket.gethostname()}, since \d{{4}}-\d\d-\d\d .* UTC, run [0-9a-f]+"
    with pytest.raises(UserError, match=rf"^{tmp_path}/run: another run has it \({who}\): end that run, or use"):
        Lease(str(tmp_path / "run"), wait=0.3)
    assert capsys.readouterr().err.count("waiting up to 0.3 s") == 1


def test_the_folder_of_a_run_that_was_killed_is_free_at_once(other: subprocess.Popen[str], tmp_path: Path) -> None:
    other.send_signal(signal.SIGKILL)
    other.wait()
    held = Lease(str(tmp_path / "run"))  # which would wait for 35 s for a run that lives
    held.check()
    held.release()
    assert os.listdir(tmp_path / "run") == []


def test_the_successor_of_a_run_that_is_about_to_end_waits_for_it(tmp_path: Path) -> None:
    first = Lease(str(tmp_path))
    successor = subprocess.Popen([sys.executable, "-c", HOLD, str(tmp_path)], cwd=ROOT, text=True,
                                 stdout=subprocess.PIPE, stderr=subprocess.PIPE)  # fmt: skip
    assert successor.stdout and successor.stderr
    assert "waiting up to" in successor.stderr.readline()
    first.release()
    assert successor.stdout.readline() == "held\n"
    with pytest.raises(BlockingIOError):
        _lock(tmp_path / ".lease")  # and not a file that the first one removed
    successor.kill()
    successor.communicate()


def _lock(path: Path) -> None:
    import fcntl

    with path.open() as file:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)


@pytest.fixture
def far(tmp_path: Path, mount: Callable[[Path], FarStorage]) -> Callable[[], Lease]:
    """Take a folder of remote storage, which has no locks."""
    (tmp_path / "run").mkdir()
    mount(tmp_path)
    return lambda: Lease("far://run", wait=2.0, beat=0.05)


def test_a_run_at_far_storage_is_known_by_its_signs_of_life(far: Callable[[], Lease]) -> None:
    first = far()
    with pytest.raises(UserError, match="far://run: another run has it"):
        far()
    first.release()
    began = time.monotonic()
    far().release()
    assert time.monotonic() - began < 2.0


def test_a_run_at_far_storage_without_a_sign_of_life_loses_its_folder_and_saves_nothing_more(
    far: Callable[[], Lease],
) -> None:
    first = far()
    first._ended.set()  # as after SIGKILL, or on a machine that is stopped
    first._thread.join()
    second = far()
    with pytest.raises(UserError, match=r"has taken it over: this run saves nothing more"):
        first.check()
    first.release()
    second.check()  # the first one does not remove what is not its own
    assert second._read()[0] == second._me
    second.release()


def test_a_folder_without_locks_is_no_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def flock(*_: object) -> None:
        raise OSError(95, "Operation not supported")

    monkeypatch.setattr(files.fcntl, "flock", flock)
    Lease(str(tmp_path)).release()


# --- writers and readers -------------------------------------------------------------------------------------------


def test_two_writers_of_one_process_id_mix_no_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Write in two processes of the same id, as two containers have."""
    monkeypatch.setattr(os, "getpid", lambda: 7)
    path = tmp_path / "step-000000001.ckpt"
    with files.atomic_file(str(path)) as one:
        one.write(b"A" * 100_000)
        with files.atomic_file(str(path)) as two:
            two.write(b"B" * 500)
        assert path.read_bytes() == b"B" * 500
    assert path.read_bytes() == b"A" * 100_000 and os.listdir(tmp_path) == [path.name]


def test_an_atomic_file_does_not_appear_after_an_exception(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt), files.atomic_file(str(tmp_path / "x")) as file:
        file.write(b"half")
        raise KeyboardInterrupt
    assert os.listdir(tmp_path) == []


def test_a_folder_that_cannot_be_moved_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "step").mkdir()
    (tmp_path / "old" / "step").mkdir(parents=True)
    (tmp_path / "old" / "step" / "there").touch()
    with pytest.raises(UserError, match=r"step: cannot be moved to .*old/step: Directory not empty$"):
        files.move(str(tmp_path / "step"), str(tmp_path / "old" / "step"))


def test_growing_files_are_copied_to_a_bucket_every_minute_and_at_the_end(
    tmp_path: Path, mount: Callable[[Path], FarStorage], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Copy whole files, because objects cannot be appended to; the next copy makes good one that fails."""
    now = [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    (tmp_path / "far").mkdir()
    (tmp_path / "far" / "m").write_text("first\n")
    mount(tmp_path)
    with files.growing_folder("gs://far", "m") as (local, upload):
        with open(Path(local, "m"), "a") as file:
            file.write("second\n")
        upload()
        assert (tmp_path / "far" / "m").read_text() == "first\n", "not every time"
        now[0] = 61.0
        (tmp_path / "far").rename(tmp_path / "gone")
        (tmp_path / "far").touch()
        with pytest.raises(UserError, match="gs://far: cannot be reached"):
            upload()
        (tmp_path / "far").unlink()
        (tmp_path / "gone").rename(tmp_path / "far")
        now[0] = 122.0
        upload()
        assert (tmp_path / "far" / "m").read_text() == "first\nsecond\n"
        Path(local, "late").write_text("x")
    assert (tmp_path / "far" / "late").exists() and not Path(local).exists()


def test_what_a_link_in_a_checkpoint_refers_to_is_not_removed(tmp_path: Path) -> None:
    kept = tmp_path / "kept"
    (tmp_path / "step-000000001/state").mkdir(parents=True)
    kept.mkdir()
    (kept / "data").touch()
    (tmp_path / "step-000000001/linked").symlink_to(kept)
    (tmp_path / "step-000000002").symlink_to(kept)
    for name in ("step-000000001", "step-000000002"):
        files.remove(str(tmp_path / name))
    assert os.listdir(tmp_path) == ["kept"] and os.listdir(kept) == ["data"]


def test_a_folder_that_is_being_moved_at_far_storage_is_whole_at_one_place(
    tmp_path: Path, mount: Callable[[Path], FarStorage]
) -> None:
    far = mount(tmp_path)
    (tmp_path / "run" / "step" / "state").mkdir(parents=True)
    for name in ("run.json", "state/a", "state/b"):
        (tmp_path / "run" / "step" / name).write_text(name)
    calls: list[str] = []

    def counted(name: str, limit: int) -> None:
        original = getattr(FarStorage, name)

        def call(*words: str) -> None:
            if len(calls) == limit:
                raise KeyboardInterrupt
            calls.append(name)
            original(far, *words)

        setattr(far, name, call)

    for limit in range(6):  # three copies, then three removals
        calls.clear()
        (tmp_path / "old").mkdir(exist_ok=True)
        for name in ("cp_file", "rm"):
            counted(name, limit)
        with pytest.raises(KeyboardInterrupt):
            files.move("far://run/step", "far://old/step")
        whole = [
            place
            for place in ("run", "old")
            if all((tmp_path / place / "step" / name).is_file() for name in ("run.json", "state/a", "state/b"))
        ]
        assert whole, limit
        if "run" not in whole:  # it says first that it is no longer complete
            assert not (tmp_path / "run" / "step" / "run.json").exists()
            for name in ("run.json", "state/a", "state/b"):
                (tmp_path / "run" / "step" / name).write_text(name)


def test_an_idx_file_becomes_no_larger_than_its_header_says(tmp_path: Path) -> None:
    header = b"\0\0\x08\x03" + struct.pack(">3I", 2, 28, 28)
    with gzip.open(tmp_path / "bomb.gz", "wb", compresslevel=1) as file:
        file.write(header)
        for _ in range(64):
            file.write(bytes(1 << 20))
    with pytest.raises(UserError, match=r"damaged .cannot reshape array of size 1569"):
        mnist.read_idx(str(tmp_path / "bomb.gz"))
    for packed in (False, True):
        content = b"\0\0\x08\x04" + struct.pack(">4I", *[2**32 - 1] * 4)
        (tmp_path / "huge").write_bytes(gzip.compress(content) if packed else content)
        with pytest.raises(UserError, match="huge: damaged "):
            mnist.read_idx(str(tmp_path / "huge"))
