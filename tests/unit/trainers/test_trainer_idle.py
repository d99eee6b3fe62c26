"""Test that replicas that do not train say so, and that all others train."""

from __future__ import annotations

import json

import pytest
from trainers.common.files import UserError
from trainers.common.job import end_idle_replica


def task(kind: object) -> str:
    return json.dumps({"cluster": {"chief": ["a:1"], "ps": ["b:1"]}, "task": {"type": kind, "index": 0}})


@pytest.mark.parametrize(
    ("env", "said"),
    [
        ({"LAUNCHER_ROLE": "server"}, "a parameter server"),
        ({"LAUNCHER_ROLE": "evaluator"}, "an evaluator"),
        ({"TF_CONFIG": task("ps")}, "a parameter server"),
        ({"TF_CONFIG": task("evaluator")}, "an evaluator"),
    ],
)
def test_a_replica_that_does_not_train_says_so_in_one_line(
    env: dict[str, str], said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("LAUNCHER_ROLE", "TF_CONFIG"):
        monkeypatch.delenv(name, raising=False)
    for name, value in env.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(UserError, match=f"^this replica is {said}.*") as raised:
        end_idle_replica()
    assert raised.value.code == 0
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    "config", ["", "{", "[]", "{}", '{"task": []}', task("chief"), task("worker"), task(3), task(None)]
)
def test_other_replicas_train(config: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LAUNCHER_ROLE", raising=False)
    monkeypatch.setenv("TF_CONFIG", config)
    end_idle_replica()
