"""Output: the form of --print-env --json, --explain, the log, redaction (R16)."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
from launcher import redact
from launching import Launch, Machine, cluster_spec

CONFIG = json.dumps({"project": "test-project", "zone": "us-central1-c", "tpu_node_name": "tpu-a"})

# The stable form of `--print-env --json`, as in docs/launcher.md. Record a change in CHANGELOG.md.
SCHEMA: dict[str, Any] = {
    "runtime": str,
    "why": str,
    "endpoints": list,
    "cluster": {
        "source": str,
        "role": str,
        "node_rank": (int, type(None)),
        "nnodes": int,
        "master_addr": str,
        "master_port": int,
    },
    "exports": dict,
    "unsets": list,
    "warnings": list,
}


def _matches(data: object, schema: object) -> bool:
    if isinstance(schema, dict):
        return (
            isinstance(data, dict) and list(data) == list(schema) and all(_matches(data[k], schema[k]) for k in schema)
        )
    assert isinstance(schema, (type, tuple))
    return isinstance(data, schema) and not isinstance(data, bool)


@pytest.mark.parametrize(
    "env",
    [
        pytest.param({}, id="cpu"),
        pytest.param({"TPU_NAME": "grpc://1.2.3.4,grpc://1.2.3.5"}, id="tpu-node"),
        pytest.param({"TPU_WORKER_HOSTNAMES": "a,b", "TPU_WORKER_ID": "1"}, id="tpu-local"),
        pytest.param(
            {"LAUNCHER_RUNTIME": "gpu", "CLUSTER_SPEC": cluster_spec([1, 1, 1], "workerpool2", 0)}, id="server"
        ),
    ],
)
def test_form_of_print_env_json(launch: Launch, env: dict[str, str]) -> None:
    data = launch(env).data
    assert _matches(data, SCHEMA)
    assert data["runtime"] in ("tpu-node", "tpu-local", "gpu", "cpu")
    assert all(isinstance(word, str) for word in [*data["endpoints"], *data["unsets"], *data["warnings"]])
    assert all(isinstance(word, str) for pair in data["exports"].items() for word in pair)


def test_json_contains_long_values_in_full(launch: Launch) -> None:
    many = ",".join(f"grpc://10.0.{n // 250}.{n % 250}:8470" for n in range(256))
    data = launch({"TPU_NAME": many, "LAUNCHER_FRAMEWORK": "tensorflow==2.20"}).data
    assert data["exports"]["KUBE_GOOGLE_CLOUD_TPU_ENDPOINTS"] == many


def test_explain_shows_every_rule_and_the_one_that_decided(launch: Launch, machine: Machine) -> None:
    machine.add_image("torch_xla", "2.9.0")
    machine.add_devices("/dev/nvidiactl", "/dev/nvidia0")
    env = {"PJRT_DEVICE": "TPU", "TPU_CONFIG": CONFIG, "CLUSTER_SPEC": cluster_spec([1], "workerpool0", 0, "4")}
    lines = launch({**env, "GCE_METADATA_HOST": "127.0.0.1:1"}, "--explain").out.splitlines()
    assert [line.split()[0] for line in lines[:10]] == [f"R{number}" for number in range(10)]
    assert lines[1] == "R1        PJRT_DEVICE=TPU <- decided"
    assert lines[7].startswith("R7        TPU_CONFIG=") and lines[7].endswith("(outranked)")
    assert lines[8] == "R8        1 GPU (outranked)"
    assert lines[10].startswith("cluster   CLUSTER_SPEC=")
    text = "\n".join(lines)
    assert "runtime   tpu-local: PJRT_DEVICE=TPU (rule R1); image contains torch_xla 2.9.0" in text
    assert "trial 4" in text
    assert "start     /opt/venv/bin/python -m trainers.mnist" in text


def test_explain_shows_the_signals_if_there_is_an_error(launch: Launch) -> None:
    launched = launch({"TPU_CONFIG": "not json", "RANK": "3"}, "--explain")
    assert launched.status == 2
    lines = launched.err.splitlines()
    assert "launch: R7        TPU_CONFIG=[redacted]" in lines
    assert "launch: cluster   RANK=3" in lines
    assert lines[-1].startswith("launch: error: TPU_CONFIG is not JSON")
    assert len(lines) <= 20 and not any("decided" in line for line in lines)


PRIVATE = "--password=hunter2"


@pytest.mark.parametrize(
    ("name", "value", "shown"),
    [
        pytest.param(
            "TPU_CONFIG",
            {"project": "p", "zone": "z", "job": PRIVATE, "tpu_node_name": "t\u00e9"},
            'TPU_CONFIG={"project": "p", "zone": "z", "tpu_node_name": "t\u00e9"}',
            id="TPU_CONFIG",
        ),
        pytest.param("TPU_CONFIG", PRIVATE, "TPU_CONFIG=[redacted]", id="text"),
        pytest.param("TPU_CONFIG", [PRIVATE], "TPU_CONFIG=[redacted]", id="list"),
        pytest.param(
            "CLUSTER_SPEC",
            {"job": {"args": [PRIVATE]}, "cluster": {"workerpool0": ["a:1"]}, "task": {"type": "workerpool0"}},
            'CLUSTER_SPEC={"cluster": {"workerpool0": ["a:1"]}, "task": {"type": "workerpool0"}}',
            id="CLUSTER_SPEC",
        ),
        pytest.param(
            "TF_CONFIG",
            {"job": PRIVATE, "task": {"type": "worker"}},
            'TF_CONFIG={"task": {"type": "worker"}}',
            id="TF_CONFIG",
        ),
    ],
)
@pytest.mark.parametrize("argv", [["--explain"], ["--", "/no/such/program"]], ids=["explain", "log"])
def test_only_the_members_that_the_launcher_reads_are_shown(
    launch: Launch, argv: list[str], name: str, value: object, shown: str
) -> None:
    launched = launch({"LAUNCHER_RUNTIME": "cpu", "LAUNCHER_LOG": "explain", name: json.dumps(value)}, *argv)
    assert "hunter2" not in launched.out + launched.err
    assert shown in launched.out + launched.err


@pytest.mark.parametrize("value", ["[" * 100_000, '{"project": ' * 100_000, "hunter2"], ids=["list", "object", "text"])
def test_a_value_that_is_not_json_is_not_shown(launch: Launch, value: str) -> None:
    launched = launch({"TPU_CONFIG": value, "LAUNCHER_RUNTIME": "cpu"}, "--explain")
    assert launched.status == 0
    assert "R7        TPU_CONFIG=[redacted]" in launched.out


def test_explain_has_at_most_twenty_lines(launch: Launch, machine: Machine) -> None:
    machine.add_image("tensorflow", "2.20.0")
    assert len(launch({"TPU_NAME": "grpc://1.2.3.4"}, "--explain").out.splitlines()) <= 20


def test_the_first_lines_of_a_log_show_the_result(
    launch: Launch, machine: Machine, google_cloud: Callable[..., Any]
) -> None:
    machine.add_image("torch_xla", "2.0", {"mnist": ["/no/such/program"]})
    google_cloud()
    launched = launch({"TPU_CONFIG": CONFIG}, "mnist")
    assert launched.status == 127
    assert launched.out == ""
    assert all(line.startswith("launch: ") for line in launched.err.splitlines())
    for part in (
        "runtime   tpu-node: TPU_CONFIG (rule R7)",
        "endpoints 10.1.2.3:8470",
        "XRT_TPU_CONFIG=",
        "start     ",
    ):
        assert part in launched.err
    assert len(launched.err.splitlines()) <= 20


@pytest.mark.parametrize(
    ("level", "heads"),
    [
        ("quiet", ["error:"]),
        ("normal", ["runtime", "cluster", "start", "error:"]),
        (
            "explain",
            [*(f"R{n}" for n in range(10)), "cluster", "runtime", "cluster", "start", "error:"],
        ),
    ],
)
def test_log_levels(launch: Launch, level: str, heads: list[str]) -> None:
    err = launch({"LAUNCHER_LOG": level, "LAUNCHER_FRAMEWORK": "torch==2.9"}, "--", "/no/such/program").err
    assert [line.split()[1] for line in err.splitlines()] == heads


SECRETS = {
    "MY_API_TOKEN": "hunter2-token",
    "DB_PASSWORD": "correct horse",
    "AWS_SECRET_ACCESS_KEY": "wJalrXUtnFEMI",
    "GOOGLE_CREDENTIALS": '{"private_key": "-----BEGIN X-----\\nabc"}',
    "TLS_CERT": "line-one-of-it\nline-two-of-it",
}


@pytest.mark.parametrize(
    "argv", [["--explain"], ["--print-env"], ["--print-env", "--json"], ["--", "/no/such/program"]]
)
def test_secrets_of_the_environment_are_not_printed(launch: Launch, argv: list[str]) -> None:
    env = {
        **SECRETS,
        "CLUSTER_SPEC": cluster_spec([1], "workerpool0", 0, "hunter2-token"),
    }
    if "--print-env" not in argv:  # a value that a program reads is not changed because it equals a secret
        env["MASTER_ADDR"] = "hunter2-token"
    launched = launch(
        {**env, "TPU_CONFIG": json.dumps({"tpu_node_name": "hunter2-token"}), "PJRT_DEVICE": "CPU"}, *argv
    )
    for value in (*SECRETS.values(), "line-two-of-it"):
        assert value not in launched.out + launched.err


def test_secrets_are_not_printed_in_errors(launch: Launch, machine: Machine) -> None:
    machine.env["TERMINATION_LOG"] = str(machine.root / "reason")
    launched = launch({**SECRETS, "TPU_NAME": "hunter2-token/x"})
    assert launched.status == 2
    assert "hunter2" not in launched.err + (machine.root / "reason").read_text()


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("X", "ya29.a0Af"),
        ("X", "Bearer abc"),
        ("X", "eyJhbGciOi.x.y"),
        ("WANDB_API_KEY", "1"),
        ("x", "-----BEGIN PRIVATE KEY-----"),
    ],
)
def test_values_that_look_like_secrets_are_redacted(name: str, value: str) -> None:
    assert redact.shown(name, value) == "[redacted]"


@pytest.mark.parametrize("prefix", ["glpat-", "AKIA", "xoxb-", "ghp_", "ghs_", "github_pat_", "hf_", "sk-", "npm_"])
def test_tokens_are_redacted_in_lines_and_arguments(launch: Launch, prefix: str) -> None:
    token = prefix + "ABCDEFGHIJ0123456789"
    launched = launch(
        {"MASTER_ADDR": token, "NNODES": "1"}, "--explain", "--", "train", f"--url=https://git:{token}@host/x", token
    )
    assert token not in launched.out and token not in launched.err
    assert "train --url=https://[redacted]@host/x [redacted]" in launched.out
    assert redact.without_tokens(f"401 for '{token}', again") == "401 for '[redacted]', again"


@pytest.mark.parametrize(
    "text",
    [
        "task-sk-learn-for-everything",
        "desk-0123456789abcdefgh",
        "resnet-sk-",
        "AKIA",
        "whf_",
        "git@host:a/b",
        "a://b/c@d",
    ],
)
def test_text_that_only_resembles_a_token_is_shown(text: str) -> None:
    assert redact.shown("X", text) == text


@pytest.mark.parametrize("name", ["MY_API_KEY", "DB_PASSWORD", "GITHUB_TOKEN", "MYSQL_PWD", "accessToken", "--auth"])
def test_names_of_secrets(name: str) -> None:
    assert redact.is_secret(name, "x") and redact.is_secret(name, "1")


@pytest.mark.parametrize("name", ["MONKEY", "PWD", "KEYBOARD", "AUTHOR", "PASSENGERS", "TPU_NAME", "CERTAINTY"])
def test_names_that_only_contain_the_word_of_a_secret(name: str) -> None:
    assert not redact.is_secret(name, "x")


@pytest.mark.parametrize(
    ("name", "value", "secret"),
    [
        ("--tokenizer", "tokenizer.json", False),
        ("TOKENIZERS_PARALLELISM", "false", False),
        ("--max-tokens", "512", False),
        ("API_TOKENS", "abc,def", True),
        ("TOKEN", "512", True),
        ("TOKENIZER_TOKEN", "x", True),
    ],
)
def test_tokens_of_a_text_are_no_secrets(name: str, value: str, secret: bool) -> None:
    assert redact.is_secret(name, value) is secret


TWO_NODES = {
    "CLUSTER_SPEC": cluster_spec([1, 1], "workerpool0", 0).replace("cmle-training-workerpool0-ab-0", "m-0-host")
}


@pytest.mark.parametrize(
    "secrets",
    [
        pytest.param({"MONKEY": "master"}, id="word-inside-a-name"),
        pytest.param({"DB_PASSWORD": "master"}, id="word-of-the-report"),
        pytest.param({"AUTH_TYPE": "127.0.0.1"}, id="address"),
        pytest.param({"MY_TOKEN": "m-0-host", "SIGNING_KEY": "single"}, id="host"),
        pytest.param({"SSH_KEY": "MASTER_ADDR"}, id="name-of-a-variable"),
    ],
)
@pytest.mark.parametrize("env", [{"LAUNCHER_NPROC": "1"}, TWO_NODES], ids=["one-node", "two-nodes"])
def test_a_secret_does_not_change_other_values_that_programs_read(
    launch: Launch, secrets: dict[str, str], env: dict[str, str]
) -> None:
    env = {**env, "LAUNCHER_FRAMEWORK": "torch==2.9", "LAUNCHER_MASTER_PORT": "29500"}
    assert launch({**env, **secrets}).data == launch(env).data
    assert launch({**env, **secrets}, "--print-env").out == launch(env, "--print-env").out


def test_secrets_are_hidden_in_their_own_place_for_programs(launch: Launch) -> None:
    env = {"AIP_MODEL_DIR": "gs://b/model", "LAUNCHER_MIRROR_GCS": "1"}
    assert launch(env).exports["LAUNCHER_GCS_AIP_MODEL_DIR"] == "/gcs/b/model"
    assert redact.shown("LAUNCHER_TOKEN", "x") == "[redacted]"
    config = {**SECRETS, "CLOUD_ML_HP_METRIC_FILE": "hunter2-token"}
    warning = launch(config).data["warnings"][0]
    assert "CLOUD_ML_HP_METRIC_FILE=[redacted] has no folder" in warning


@pytest.mark.parametrize(
    ("command", "shown"),
    [
        (["t", "--token=abc"], "t --token=[redacted]"),
        (["t", "--api-key", "abc", "--lr", "1"], "t --api-key [redacted] --lr 1"),
        (["t", "--use-auth", "--lr", "1"], "t --use-auth --lr 1"),
        (
            ["t", "--max-tokens", "64", "--tokenizer=t.json", "--eval-tokens=5"],
            "t --max-tokens 64 --tokenizer=t.json --eval-tokens=5",
        ),
        (["t", "--token", "64"], "t --token [redacted]"),
        (["t", "a\nb\x1b[31m"], "t a\\nb\\x1b[31m"),
    ],
)
def test_secrets_in_command_lines_are_redacted(command: list[str], shown: str) -> None:
    assert redact.shown_command(command) == shown


def test_one_line_escapes_any_text() -> None:
    assert redact.one_line("a\r\n\udcff\u2028b") == "a\\r\\n\\udcff\\u2028b"
