"""`make images` follows the events of each target; the reason of a failed build comes from BuildKit's output."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.fakes.engine import FakeEngine

from trainyard.common import stages
from trainyard.common.context import Context
from trainyard.common.errors import EngineFailed, StepFailed, UserError
from trainyard.image import buildx
from trainyard.release import batch, events
from trainyard.spec.model import load, targets

FAILED = """\
#21 [wheel-torch 3/3] RUN --mount=type=secret,id=ca
#21 0.812 error: Failed to download `torch==2.9.1`
#21 0.813   Caused by: Hash mismatch for `torch==2.9.1`
#21 ERROR: process "/bin/bash -c uv pip install" did not complete successfully: exit code: 1
------
 > [wheel-torch 3/3] RUN --mount=type=secret,id=ca <<FRAMEWORK (...):
0.812 error: Failed to download `torch==2.9.1`
0.813   Caused by: Hash mismatch for `torch==2.9.1`
0.813 Computed:
0.813   sha256:54058201
------
Dockerfile:71
--------------------
  70 |     COPY images/uv.lock /locks/uv.lock
--------------------
ERROR: target small: failed to solve: process "/bin/bash -c uv pip install" did not complete successfully: exit code: 1
"""

#: uv wrote this in more than ten pieces, of which BuildKit repeats the last ten.
FAILED_AND_REPEATED_IN_PART = """\
#30 [wheels-1 2/2] RUN --mount=type=secret,id=ca
#31 [wheel-torch 2/2] RUN --mount=type=secret,id=ca
#30 0.282 error: Failed to download `einops==0.8.2`
#30 0.283   cause: Hash mismatch for `einops==0.8.2`
#31 0.284 error: unable to connect
#30 0.284
#30 0.284            sha256:54058201
#30 ERROR: process "/bin/bash -c uv pip install" did not complete successfully: exit code: 1
#31 ERROR: process "/bin/bash -c uv pip install" did not complete successfully: exit code: 2
------
 > [wheels-1 2/2] RUN --mount=type=secret,id=ca <<REQUIREMENTS (...):
:54058201
0.284            sha256:54058201
------
ERROR: failed to solve: process "/bin/bash -c uv pip install" did not complete successfully: exit code: 1
"""

FAILED_WITHOUT_THE_WORD_ERROR = """\
 > [system 2/3] RUN <<SYSTEM (export DEBIAN_FRONTEND=noninteractive...):
12.90 touch: setting times of '/etc/resolv.conf': Read-only file system
13.35 done.
------
ERROR: failed to solve: process "/bin/bash -c apt-get" did not complete successfully: exit code: 1
"""


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (FAILED_WITHOUT_THE_WORD_ERROR, "system: touch: setting times of '/etc/resolv.conf': Read-only file system"),
        (FAILED, "wheel-torch: Hash mismatch for `torch==2.9.1`"),
        (FAILED_AND_REPEATED_IN_PART, "wheels-1: Hash mismatch for `einops==0.8.2`"),
        ("ERROR: target x: failed to solve: base:1: not found", "target x: failed to solve: base:1: not found"),
        ("#9 copying\nERROR: failed to copy: write /var/lib/x: no space left on device", "the engine's disk is full"),
        (
            "ERROR: failed to solve: unsupported diff media type: application/vnd.oci.image.layer.v1.tar+zstd: not "
            "implemented",
            "a layer could not be written; probably the engine's disk is full",
        ),
        ("#9 sh: echo: I/O error: No space left on device\nERROR: exit code: 1", "the engine's disk is full"),
        (
            "#37 [system 2/2] RUN <<SYSTEM\n#37 0.2 exec /bin/bash: exec format error\nERROR: exit code: 255",
            "exec format error: the engine runs no programs of the image's architecture: "
            "run 'trainyard setup --emulation'",
        ),
        ("nothing that says why", ""),
    ],
)
def test_the_reason_of_a_failed_build_is_one_line(text: str, words: str) -> None:
    said = buildx.reason(text)
    assert said.startswith(words) and "\n" not in said and bool(said) is bool(words)


def test_a_reason_is_never_longer_than_a_few_lines() -> None:
    assert len(buildx.reason(f"ERROR: {'x' * 5000}")) < 320


def test_the_steps_of_a_build_are_reported_from_its_output(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """From a real child process that prints what BuildKit does with ``--progress=plain``."""
    lines = [
        "#5 [internal] load build definition",
        "#12 [wheel-torch 2/3] COPY x",
        "#13 [tools 1/2] FROM docker.io/library/debian@sha256:1",
        "#13 sha256:0123abcd 12.58MB / 28.23MB 0.6s",
        "#13 sha256:0123abcd 28.23MB / 28.23MB 0.9s done",
        "#12 0.5 verifying [x 1/2]",
        "#13 DONE 1.2s",
        "#14 [image  3/15] COPY --link --from=wheel-torch /out /",
        "#12 DONE 3.0s",
        "#14 CACHED",
        "#40 exporting to image",
        "#40 exporting layers",
        "#40 exporting layers 38.2s done",
        "#40 exporting manifest sha256:0123",
        "#40 DONE 39.0s",
    ]
    script = f"import sys; print(*{lines}, sep=chr(10), file=sys.stderr)"
    seen: list[tuple[str, str]] = []
    steps = buildx.Steps({"wheel-torch": "installing torch 180.0 MB"}, lambda *step: seen.append(step))
    log = tmp_path / "build.log"
    with caplog.at_level(stages.NOW):
        ended = buildx._run([sys.executable, "-c", script], log=log, steps=steps)
    assert (ended.returncode, ended.stderr.splitlines()) == (0, lines)
    assert log.read_text(encoding="utf-8").splitlines() == lines
    assert seen == [("wheel-torch", "2/3"), ("tools", "1/2"), ("image", "3/15")]
    assert caplog.messages == [
        "installing torch 180.0 MB",
        "installing torch 180.0 MB, tools 1/2",
        "installing torch 180.0 MB, pulling 12.58MB / 28.23MB",
        "installing torch 180.0 MB",
        "installing torch 180.0 MB, image 3/15",
        "image 3/15",
        "exporting to image",
        "exporting layers",
        "exporting manifest",
    ]


def test_the_moving_line_of_a_build_says_how_much_of_all_is_installed(caplog: pytest.LogCaptureFixture) -> None:
    steps = buildx.Steps({"wheel-a": "installing a 2 B"}, sizes={"wheel-a": 2, "wheel-b": 4})
    with caplog.at_level(stages.NOW):
        for line in (
            "#1 [wheel-a 1/1] RUN a",
            "#2 [wheel-b 1/1] RUN b",
            "#1 DONE 1s",
            "#2 CACHED",
            "#3 [image 1/2] COPY",
        ):
            steps.add(line)
    assert caplog.messages == [
        "0 B of 6 B: installing a 2 B",
        "0 B of 6 B: installing a 2 B, wheel-b 1/1",
        "2 B of 6 B: wheel-b 1/1",
        "image 1/2",
    ]


def test_a_failed_build_shows_the_end_of_the_step_and_names_the_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, fake_engine: FakeEngine
) -> None:
    text = "".join(f"#21 0.1 line {number}\n" for number in range(60)) + FAILED
    failed = subprocess.CompletedProcess([], 1, stderr=text)
    monkeypatch.setattr(buildx, "_run", lambda *_, **__: failed)
    monkeypatch.chdir(tmp_path)
    with caplog.at_level("INFO"), pytest.raises(StepFailed) as refused:
        buildx.bake(Context(), "tf-cpu", [], log=tmp_path / "build.log")
    assert str(refused.value) == (
        f"the build of tf-cpu failed: wheel-torch: Hash mismatch for `torch==2.9.1` (log: {tmp_path / 'build.log'})"
    )
    assert len(caplog.messages) == 20
    assert caplog.messages[-1] == "  |   Caused by: Hash mismatch for `torch==2.9.1`"


def test_events_are_read_as_they_were_written() -> None:
    reader, writer = os.pipe()
    emit = events.writer(writer)
    emit("stage", stage="verify")
    emit("failed", reason='a "line" with ümlauts')
    os.write(writer, b'{"event": "rea')  # of a process that was killed
    os.close(writer)
    with os.fdopen(reader, encoding="utf-8") as lines:
        assert list(events.read(lines)) == [
            {"event": "stage", "stage": "verify"},
            {"event": "failed", "reason": 'a "line" with ümlauts'},
        ]


def test_a_build_goes_on_when_the_reader_of_its_events_is_gone() -> None:
    reader, writer = os.pipe()
    os.close(reader)
    events.writer(writer)("stage", stage="verify")
    os.close(writer)


def test_the_progress_of_a_target_follows_its_events() -> None:
    job = batch.Job(load("tf-cpu"), "tf-cpu")
    seen = []
    for event in (
        {"event": "stage", "stage": "build"},
        {"event": "step", "stage": "wheel-torch", "step": "2/3"},
        {"event": "stage", "stage": "verify"},
        {"event": "stage", "stage": "smoke"},
        {"event": "failed", "reason": "the loss did not fall"},
        {"event": "of a later version"},
    ):
        job.update_from_event(event)
        seen.append(job.stage)
    assert seen == ["build", "build: wheel-torch 2/3", "verify", "smoke", "smoke", "smoke"]
    assert job.reason == "the loss did not fall"


@pytest.fixture
def child(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[[str], batch.Job]:
    """Run a script in place of `trainyard image`, with ``emit`` as it has there; the job of tf-cpu afterwards."""
    real = subprocess.Popen

    def run(script: str) -> batch.Job:
        def start(command: list[str], **options: Any) -> subprocess.Popen[bytes]:
            (descriptor,) = (word.removeprefix("--events=") for word in command if word.startswith("--events="))
            text = f"import sys\nfrom trainyard.release.events import writer\nemit = writer({descriptor})\n{script}"
            return real([sys.executable, "-c", text], **options)

        monkeypatch.setenv("TRAINYARD_BUILD", str(tmp_path))
        monkeypatch.setattr(subprocess, "Popen", start)
        job = batch.Job(load("tf-cpu"), "tf-cpu")
        batch.make(job, [])
        return job

    return run


def test_a_target_that_ends_well_is_ready_with_its_result(child: Callable[[str], batch.Job]) -> None:
    job = child("print('to the log'); emit('stage', stage='smoke'); emit('ready', result={'image': 'trainyard:x'})")
    assert (job.stage, job.reason, job.result) == ("ready", "", {"image": "trainyard:x"})
    assert job.log.read_text(encoding="utf-8") == "to the log\n"


@pytest.mark.parametrize(
    ("script", "reason"),
    [
        ("emit('failed', reason='the disk is full'); sys.exit(1)", "the disk is full"),
        ("import os; os.kill(os.getpid(), 9)", "exited with status -9; see the end of "),
    ],
)
def test_a_target_that_fails_has_a_reason(child: Callable[[str], batch.Job], script: str, reason: str) -> None:
    job = child(script)
    assert job.stage == "failed" and job.reason.startswith(reason) and job.result == {}


def test_targets_are_chosen_by_name_all_of_them_without_one() -> None:
    assert [job.target for job in batch.wanted([], Context())] == [
        one for one in targets() if one != "xla-nightly-fallback"
    ]
    assert [job.target for job in batch.wanted(["cpu", "tf-cpu", "cpu"], Context())] == ["cpu", "tf-cpu"]
    with pytest.raises(UserError, match=r"unknown target 'tf-cp' \(did you mean 'tf-cpu'\?\)"):
        batch.wanted(["cpu", "tf-cp"], Context())


def test_two_folders_with_the_same_name_are_refused(write_spec: Callable[..., str], spec_text: str) -> None:
    """They would have the same tags."""
    mine = write_spec(spec_text, "tf-cpu")
    with pytest.raises(UserError, match="tf-cpu would be two images with the same name"):
        batch.wanted(["tf-cpu", mine], Context())


@pytest.mark.parametrize("jobs", ["0", "two", "-1"])
def test_the_number_of_builds_must_be_positive(jobs: str, trainyard: Callable[..., tuple[int, str, str]]) -> None:
    status, _, err = trainyard("images", "cpu", JOBS=jobs)
    assert status == 2 and "--jobs" in err and len(err.strip().splitlines()) == 1


def test_each_target_that_ends_is_a_line_and_the_moving_line_has_the_others(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    good, bad = batch.Job(load("cpu"), "cpu"), batch.Job(load("tf-cpu"), "tf-cpu")
    until = threading.Event()

    def make(job: batch.Job, _arguments: list[str]) -> None:
        job.stage, job.started = "build: wheel-torch 1/3", 1.0
        if job is good:
            until.wait(30)
            job.stage, job.ended, job.result = "ready", 121.0, {"verify": {"size": 1_400_000_000}}
        else:
            job.stage, job.ended, job.reason = "failed", 13.0, "the disk is full"

    def now(what: str) -> None:
        logging.getLogger("trainyard").log(stages.NOW, what)
        if what == "cpu build: wheel-torch 1/3":
            until.set()

    monkeypatch.setattr(batch, "make", make)
    monkeypatch.setattr(batch.base_image, "resolve", lambda *_, **__: None)
    monkeypatch.setattr(batch.stages, "now", now)
    with caplog.at_level(stages.NOW, "trainyard"):
        batch.run([good, bad], 2, [])
    assert [one.getMessage() for one in caplog.records if one.levelno == logging.INFO] == [
        "tf-cpu               failed    12 s  the disk is full",
        "cpu                  ready    120 s  1.40 GB",
    ]


@pytest.mark.parametrize("words", [
    "failed to solve: no active sessions",
    'failed to solve: failed to prepare extraction snapshot "extract-1 sha256:0": parent does not exist: not found',
    "failed to solve: not found",
    "failed to solve: failed to get edge: inconsistent graph state",
])  # fmt: skip
def test_transient_errors_of_a_build_are_retried_and_no_others(
    monkeypatch: pytest.MonkeyPatch, words: str, fake_engine: FakeEngine
) -> None:
    """Two builds shared a step, and one of them ended; or the engine garbage-collected what a build had just found."""
    waited: list[float] = []
    said = [f"ERROR: {words}"]
    started: list[list[str]] = []

    def run(command: list[str], **_: object) -> subprocess.CompletedProcess[str]:
        started.append(command)
        return subprocess.CompletedProcess(command, 1, stderr=said[0])

    monkeypatch.setattr(buildx, "_run", run)
    monkeypatch.setattr(time, "sleep", waited.append)
    with pytest.raises(EngineFailed, match="the build of tf-cpu failed: failed to solve: "):
        buildx.bake(Context(), "tf-cpu", [])
    assert (len(started), waited) == (3, [1, 5])
    said[:] = ["ERROR: failed to solve: hash mismatch"]
    with pytest.raises(StepFailed, match="hash mismatch") as failed:
        buildx.bake(Context(), "tf-cpu", [])
    assert not isinstance(failed.value, EngineFailed), "it says something of the image"
    said[:] = ["ERROR: failed to copy: write /var/lib/x: no space left on device"]
    with pytest.raises(EngineFailed, match="the engine's disk is full"):
        buildx.bake(Context(), "tf-cpu", [])
    said[:] = ["ERROR: failed to solve: base:1: not found"]
    with pytest.raises(StepFailed, match="base:1: not found"):
        buildx.bake(Context(), "tf-cpu", [])
    assert (len(started), len(waited)) == (6, 2)
