"""`make images` reads from each target's log how far it is; and why a build failed, from BuildKit's words."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from scripts import bake, images, state
from scripts.cli import StepFailed, UserError
from scripts.spec import load, targets

FAILED = """\
#21 [framework 3/3] RUN --mount=type=secret,id=ca
#21 0.812 error: Failed to download `torch==2.9.1`
#21 0.813   Caused by: Hash mismatch for `torch==2.9.1`
#21 ERROR: process "/bin/bash -c uv pip install" did not complete successfully: exit code: 1
------
 > [framework 3/3] RUN --mount=type=secret,id=ca <<FRAMEWORK (...):
0.812 error: Failed to download `torch==2.9.1`
0.813   Caused by: Hash mismatch for `torch==2.9.1`
0.813 Computed:
0.813   sha256:54058201
------
Dockerfile:71
--------------------
  70 |     ARG LOCK
--------------------
ERROR: target small: failed to solve: process "/bin/bash -c uv pip install" did not complete successfully: exit code: 1
"""


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (FAILED, "framework: Hash mismatch for `torch==2.9.1`"),
        ("ERROR: target x: failed to solve: base:1: not found", "target x: failed to solve: base:1: not found"),
        ("#9 copying\nERROR: failed to copy: write /var/lib/x: no space left on device", "the engine's disk is full"),
        ("#9 sh: echo: I/O error: No space left on device\nERROR: exit code: 1", "the engine's disk is full"),
        ("nothing that says why", ""),
    ],
)
def test_the_reason_of_a_failed_build_is_one_line(text: str, words: str) -> None:
    said = bake.reason(text.splitlines())
    assert said.startswith(words) and "\n" not in said and bool(said) is bool(words)


def test_a_reason_is_never_longer_than_a_few_lines() -> None:
    assert len(bake.reason([f"ERROR: {'x' * 5000}"])) < 320


def test_how_far_a_target_is_can_be_told_from_its_log() -> None:
    job = images.Job(load("tf-cpu"), "tf-cpu")
    seen = []
    for line in (
        "#5 [internal] load build definition",
        "#12 [framework 2/3] COPY x",
        "#12 0.5 error: verifying x",
        "verifying trainyard:tf-cpu-candidate",
        "training in trainyard:tf-cpu-candidate",
        "image: trainyard:tf-cpu-candidate: the loss did not fall",
    ):
        job.hear(line)
        seen.append(job.stage)
    assert seen == ["waiting", "build: framework 2/3", "build: framework 2/3", "verify", "smoke", "smoke"]
    assert job.reason == "trainyard:tf-cpu-candidate: the loss did not fall"


def test_targets_are_chosen_by_name_all_of_them_without_one() -> None:
    assert [job.target for job in images.wanted(None)] == targets()
    assert [job.target for job in images.wanted("cpu, tf-cpu cpu")] == ["cpu", "tf-cpu"]
    with pytest.raises(UserError, match=r"unknown target 'tf-cp' \(did you mean 'tf-cpu'\?\)"):
        images.wanted("cpu tf-cp")


def test_two_folders_of_one_name_are_refused(write_spec: Callable[..., str], spec_text: str) -> None:
    """They would take each other's tags."""
    mine = write_spec(spec_text, "tf-cpu")
    with pytest.raises(UserError, match="tf-cpu would be two images of one name"):
        images.wanted(f"tf-cpu {mine}")


@pytest.mark.parametrize("jobs", ["0", "two", "-1"])
def test_a_number_of_builds_is_a_number(jobs: str, verb: Callable[..., tuple[int, str, str]]) -> None:
    status, _, err = verb(images, f"--jobs={jobs}", "cpu")
    assert status == 2 and "is not a number of builds" in err


def test_a_log_gets_a_line_for_each_part_of_the_way(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    monkeypatch.setattr(images, "say", said.append)
    job, lines = images.Job(load("tf-cpu"), "tf-cpu"), images.Lines()
    for stage in ("waiting", "build", "build: framework 1/3", "build: framework 2/3", "verify", "failed"):
        job.stage, job.reason = stage, "because" if stage == "failed" else ""
        lines([job])
    assert said == ["tf-cpu: build", "tf-cpu: verify", "tf-cpu: failed: because"]


def test_the_summary_says_what_failed_and_why() -> None:
    good, bad = images.Job(load("cpu"), "cpu"), images.Job(load("tf-cpu"), "tf-cpu")
    good.stage, good.result = "ready", {"verify": {"size": 1_400_000_000}}
    bad.stage, bad.reason = "failed", "the disk is full"
    columns = [list(column.cells) for column in images.summary([good, bad]).columns]
    assert columns[0] == ["cpu", "tf-cpu"] and columns[2] == ["1.40 GB", ""]
    assert [str(cell) for cell in columns[1]] == ["ready", "failed"]
    assert [str(cell) for cell in columns[4]] == ["", "the disk is full"]


def test_only_the_newest_records_of_a_kind_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(state, "STATE", tmp_path)
    for number in range(5):
        state.record("tf-cpu", f"provenance-{number}", f"sha256:{number}", {})
        os.utime(tmp_path / "tf-cpu" / f"provenance-{number}.json", (number, number))
    state.record("tf-cpu", "verify", "sha256:0", {})
    state.forget_old("tf-cpu", "provenance-*", 2)
    assert sorted(path.name for path in (tmp_path / "tf-cpu").iterdir()) == [
        "provenance-3.json",
        "provenance-4.json",
        "verify.json",
    ]


@pytest.mark.parametrize("words", [
    "failed to solve: no active sessions",
    'failed to solve: failed to prepare extraction snapshot "extract-1 sha256:0": parent does not exist: not found',
])  # fmt: skip
def test_a_build_that_stumbled_is_begun_again_and_no_other(monkeypatch: pytest.MonkeyPatch, words: str) -> None:
    """Two builds share a step, and the one that asked for it ends; the engine collects what it had just found."""
    said = [f"ERROR: {words}"]
    begun: list[list[str]] = []

    def run(command: list[str], **_: object) -> tuple[int, list[str]]:
        begun.append(command)
        return 1, said

    monkeypatch.setattr(bake, "_run", run)
    monkeypatch.setattr(bake.engine, "client", lambda: None)
    with pytest.raises(StepFailed, match="the build of tf-cpu failed: failed to solve: "):
        bake.bake("tf-cpu", [], quiet=True)
    assert len(begun) == 3
    said[:] = ["ERROR: failed to solve: hash mismatch"]
    with pytest.raises(StepFailed, match="hash mismatch"):
        bake.bake("tf-cpu", [], quiet=True)
    assert len(begun) == 4
