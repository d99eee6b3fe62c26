"""How the runs of the smoke test are judged: every failure is named, and a good run passes."""

from __future__ import annotations

import json
import os
from typing import Any

import pytest

from trainyard.common.docker_engine import OWNED, OWNER, in_use, owner_name, resource_labels
from trainyard.common.errors import StepFailed
from trainyard.image import base_image, smoke_test
from trainyard.image.smoke_test import Finished

GOOD: dict[str, Any] = {
    "event": "summary",
    "loss_first": 2.3,
    "loss_last": 0.1,
    "accuracy": 98.9,
    "weights_sha256": "a",
    "resumed_from": None,
}


def finished(status: int = 0, lines: tuple[str, ...] = (), **changes: Any) -> Finished:
    return Finished(status, list(lines), GOOD | changes)


def test_good_runs_pass() -> None:
    assert smoke_test.check_straight(finished(lines=("launch: warning  known", "| Training")), 0.97) == []
    assert smoke_test.check_stopped(finished(143), 0.5) == []
    assert smoke_test.check_resumed(finished(resumed_from=30), finished()) == []


def test_the_error_of_tensorflow_without_a_driver_is_expected() -> None:
    """tf-gpu trains on machines without a GPU; every other error line of its log counts."""
    preamble = "WARNING: All log messages before absl::InitializeLog() is called are written to STDERR"
    known = "E0000 00:00:1795233389.389141       7 cuda_platform.cc:52] failed call to cuInit: INTERNAL: CUDA error"
    other = "E0000 00:00:1795233389.389141       7 cuda_dnn.cc:1] Unable to register cuDNN factory"
    assert smoke_test.unexpected_lines([preamble, known, other]) == [other]


@pytest.mark.parametrize(
    ("run", "words"),
    [
        (finished(1), "exit status 1 where 0"),
        (Finished(0, [], {}), "no summary line"),
        (finished(loss_last=2.3), "the loss did not fall"),
        (finished(loss_last="nan", loss_first="nan"), "the loss did not fall"),
        (finished(accuracy=96.9), "accuracy 96.90 % is below the floor of 97 %"),
        (finished(lines=("WARNING:root:something",)), "unexpected line in the log: WARNING:root"),
        (finished(lines=("Traceback (most recent call last):",)), "unexpected line in the log: Traceback"),
    ],
)
def test_a_straight_run_that_failed_is_refused(run: Finished, words: str) -> None:
    assert words in " ".join(smoke_test.check_straight(run, 0.97))


@pytest.mark.parametrize("status", [0, 1, 137])
def test_any_other_end_than_143_after_sigterm_is_refused(status: int) -> None:
    assert f"exit status {status} after SIGTERM" in smoke_test.check_stopped(finished(status), 0.5)[0]


def test_a_stop_that_takes_longer_than_platforms_give_is_refused() -> None:
    assert "platforms give 15 s" in smoke_test.check_stopped(finished(143), 15.1)[0]


@pytest.mark.parametrize(
    ("run", "words"),
    [
        (finished(1, resumed_from=30), "exit status 1"),
        (finished(resumed_from=None), "started over"),
        (finished(resumed_from=30, weights_sha256="b"), "different weights"),
        (finished(resumed_from=30, accuracy=98.8), "different weights"),
    ],
)
def test_a_resumed_run_must_end_like_the_straight_one(run: Finished, words: str) -> None:
    assert words in smoke_test.check_resumed(run, finished())[0]


def test_the_summary_is_the_last_one_and_other_json_is_ignored() -> None:
    lines = [json.dumps(GOOD), json.dumps(GOOD | {"accuracy": 99.0}), "{broken", '{"event": "train"}', "[1]"]
    assert smoke_test.summary_of(lines)["accuracy"] == 99.0
    assert smoke_test.summary_of(["nothing"]) == {}


def test_resources_of_a_running_process_are_in_use() -> None:
    assert in_use(resource_labels("test") | {OWNER: owner_name(os.getppid())})
    assert not in_use(resource_labels("test")), "what this process made, it may remove"
    assert not in_use({OWNED: "test", OWNER: owner_name(2**22 + 1)})
    assert in_use({OWNED: "test", OWNER: "1.another-machine"}), "nobody here knows that it has ended"
    assert not in_use({OWNED: "test", OWNER: "rubbish"})
    assert not in_use(None)


def test_a_base_is_bootstrapped_from_the_hosts_own_sources() -> None:
    targets = "http://mirror.example/debian/ Debian\n" * 2
    targets += "http://mirror.example/security/ Debian-Security\nhttp://other.example/ Other\n"
    assert base_image.host_sources(targets, "bookworm") == [
        "deb http://mirror.example/debian/ bookworm main",
        "deb http://mirror.example/debian/ bookworm-updates main",
        "deb http://mirror.example/security/ bookworm-security main",
    ]
    assert base_image.host_sources("", "bookworm") == []


def test_a_result_is_found_before_warnings_and_missed_in_one_line() -> None:
    lines = ['{"compile_seconds": 2}', "warning: at the end", "{not JSON"]
    assert smoke_test.printed(Finished(0, lines, {}), "step") == {"compile_seconds": 2}
    with pytest.raises(StepFailed, match=r"^step: no result in its output$"):
        smoke_test.printed(Finished(0, ["warning"], {}), "step")
