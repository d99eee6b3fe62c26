"""SageMaker's argument `train`, hyperparameters, and the failure file (R15.5, R15.7)."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from launcher import sagemaker
from launcher.errors import LaunchError
from launcher.image import Image
from launching import ROOT, Launch, Machine
from tests.examples import examples

SHOW = [sys.executable, "-c", "import os, sys; print(sys.argv[1:], os.environ.get('SM_CHANNEL_TRAINING'))"]
TRAINERS = {"mnist": SHOW, "flowers": [sys.executable, "-c", "print('flowers')"]}
JOB = {"TRAINING_JOB_NAME": "job-1"}
IMAGE = Image(
    framework="torch",
    trainers={"mnist": ["/venv/python", "-m", "mnist"], "flowers": ["py", "flowers"]},
    default="mnist",
)


def _config(machine: Machine, **files: object) -> None:
    for name, content in files.items():
        machine.add(f"/opt/ml/input/config/{name}.json", json.dumps(content))


def _command(machine: Machine, env: dict[str, str] | None = None, image: Image = IMAGE) -> tuple[list[str], bool]:
    return sagemaker.command("train", image, env or {}, str(machine.root))


def _run(machine: Machine, *argv: str, before: tuple[str, ...] = (), **env: str) -> subprocess.CompletedProcess[str]:
    command = [*before, sys.executable, "-I", "-S", str(ROOT / "launcher"), *argv]
    full = {"LAUNCHER_SYSROOT": str(machine.root), "PATH": os.environ["PATH"], **env}
    return subprocess.run(command, env=full, capture_output=True, text=True, timeout=60, check=False)


def test_train_starts_the_default_trainer_with_the_hyperparameters(machine: Machine) -> None:
    machine.add_image("torch", "2.9", TRAINERS)
    _config(machine, hyperparameters={"epochs": "2", "lr": "1e-3"}, inputdataconfig={"training": {}})
    ended = _run(machine, "train", **JOB)
    assert ended.stdout == "['--epochs', '2', '--lr', '1e-3'] /opt/ml/input/data/training\n", ended.stderr
    assert _run(machine, "train").stdout == ended.stdout  # the files are enough


@pytest.mark.needs("tini")
def test_tini_passes_train_on(machine: Machine) -> None:
    machine.add_image("torch", "2.9", TRAINERS)
    ended = _run(machine, "train", before=("tini", "-s", "--"), **JOB)
    assert (ended.returncode, ended.stdout) == (0, "[] None\n"), ended.stderr


def test_outside_sagemaker_train_is_a_word_like_any_other(launch: Launch, machine: Machine) -> None:
    machine.add_image("torch", "2.9", TRAINERS)
    launched = launch({}, "train")
    assert launched.status == 2
    assert "'train' is not a trainer of this image" in launched.err


@pytest.mark.parametrize("argv", [["train", "--epochs", "1"], ["--", "train"], ["mnist"]])
def test_only_the_single_word_train_reads_hyperparameters(launch: Launch, machine: Machine, argv: list[str]) -> None:
    machine.add_image("torch", "2.9", TRAINERS)
    _config(machine, hyperparameters={"epochs": "7"})
    assert "'7'" not in launch(JOB, "--explain", *argv).out


def test_a_trainer_of_the_image_named_train_is_started_without_hyperparameters(machine: Machine) -> None:
    machine.add_image("torch", "2.9", {"train": SHOW})
    _config(machine, hyperparameters={"epochs": "2"})
    assert _run(machine, "train", **JOB).stdout == "[] None\n"


@pytest.mark.parametrize(
    ("hyperparameters", "env", "command"),
    [
        pytest.param({"sagemaker_program": "flowers"}, {}, (["py", "flowers"], True), id="hyperparameter"),
        pytest.param({"sagemaker_program": '"flowers"'}, {}, (["py", "flowers"], True), id="encoded-by-the-sdk"),
        pytest.param({}, {"SAGEMAKER_PROGRAM": "flowers"}, (["py", "flowers"], True), id="variable"),
        pytest.param(
            {"sagemaker_program": "mnist"}, {"SAGEMAKER_PROGRAM": "flowers"}, (["py", "flowers"], True),
            id="variable-first",
        ),
        pytest.param({}, {}, (["/venv/python", "-m", "mnist"], True), id="default"),
        pytest.param(
            {"sagemaker_program": "my.py", "lr": "1"}, {}, (["/venv/python", "/opt/ml/code/my.py", "--lr", "1"], False),
            id="script",
        ),
        pytest.param({"sagemaker_program": "go.sh"}, {}, (["/opt/ml/code/go.sh"], False), id="program"),
    ],
)  # fmt: skip
def test_what_train_starts(
    machine: Machine, hyperparameters: dict[str, str], env: dict[str, str], command: tuple[list[str], bool]
) -> None:
    machine.add("/opt/ml/code/my.py")
    machine.add("/opt/ml/code/go.sh")
    _config(machine, hyperparameters=hyperparameters)
    assert _command(machine, env) == command


@pytest.mark.parametrize(
    ("given", "flags"),
    [
        pytest.param({"b": "x", "aa": "1"}, ["--aa", "1", "-b", "x"], id="sorted-and-one-letter"),
        pytest.param({"opt": '"sgd"', "n": "2", "lr": "1e-5"}, ["--lr", "1e-5", "-n", "2", "--opt", "sgd"], id="json"),
        pytest.param({"amp": "", "none": "null"}, ["--amp", "--none"], id="empty-is-the-flag-alone"),
        pytest.param({"amp": "true", "ema": "False"}, ["--amp", "True", "--ema", "False"], id="booleans"),
        pytest.param({"map": '{"b": 2, "a": 1}'}, ["--map", "a=1,b=2"], id="object"),
        pytest.param({"epochs": 3, "deep": {"a": 1}}, ["--deep", "a=1", "--epochs", "3"], id="not-strings"),
        pytest.param(
            {"sagemaker_region": "x", "_tuning_objective_metric": "a", "default_user_module_name": "m", "": "y"}, [],
            id="of-the-toolkit",
        ),
        pytest.param({"text": "a b; $HOME"}, ["--text", "a b; $HOME"], id="no-shell"),
    ],
)  # fmt: skip
def test_hyperparameters_are_flags(given: dict[str, object], flags: list[str]) -> None:
    assert sagemaker.arguments(given) == flags


@pytest.mark.parametrize(
    ("argv", "hyperparameters", "image", "message"),
    [
        pytest.param(["serve"], {}, True, "this image only trains", id="serve"),
        pytest.param(["train"], {}, False, "no default trainer: set the hyperparameter", id="no-trainer"),
        pytest.param(
            ["train"], {"sagemaker_program": "x.py"}, True, "'x.py', which is not in this image", id="no-file"
        ),
        pytest.param(
            ["train"],
            {"sagemaker_program": "x.py", "sagemaker_submit_directory": "s3://b/x.tar.gz"},
            True,
            "the launcher does not download code",
            id="code-in-s3",
        ),
        pytest.param(["train"], [], True, "is not a JSON object", id="list"),
        pytest.param(["train"], {"a": "x\0y"}, True, "cannot be an argument", id="nul"),
        pytest.param(["train"], {"a": "\ud800"}, True, "cannot be an argument", id="half-a-surrogate-pair"),
    ],
)
def test_what_cannot_be_started_is_one_line_and_status_2(
    launch: Launch, machine: Machine, argv: list[str], hyperparameters: object, image: bool, message: str
) -> None:
    if image:
        machine.add_image("torch", "2.9", TRAINERS)
    _config(machine, hyperparameters=hyperparameters)
    (machine.root / "opt" / "ml" / "output").mkdir()
    launched = launch(JOB, *argv)
    assert launched.status == 2
    assert message in launched.err
    assert launched.err.count("\n") == 1
    failure = (machine.root / "opt" / "ml" / "output" / "failure").read_text()
    assert failure == launched.err[len("launch: error: ") :]


def test_the_failure_file_is_written_on_sagemaker_only(launch: Launch, machine: Machine) -> None:
    failure = machine.root / "opt" / "ml" / "output" / "failure"
    assert launch({**JOB, "RANK": "0", "WORLD_SIZE": "2"}).status == 2  # no folder: nothing to write to
    failure.parent.mkdir(parents=True)
    assert launch({"RANK": "0", "WORLD_SIZE": "2"}).status == 2
    assert not failure.exists()
    assert launch({**JOB, "RANK": "0", "WORLD_SIZE": "2"}).status == 2
    assert "set MASTER_ADDR" in failure.read_text()


def test_the_folders_of_the_toolkit_are_exported(launch: Launch, machine: Machine) -> None:
    machine.add_image("torch", "2.9", TRAINERS)
    _config(machine, inputdataconfig={"training": {}, "val-1": {}, "../x": {}, "": {}})
    data = launch({**JOB, "SM_MODEL_DIR": "/kept"}, "--print-env", "--json", "train").data
    assert data["exports"] == {
        "SM_OUTPUT_DATA_DIR": "/opt/ml/output/data",
        "SM_CHANNEL_TRAINING": "/opt/ml/input/data/training",
        "SM_CHANNEL_VAL-1": "/opt/ml/input/data/val-1",
    }


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=9), inner, max_size=3),
    max_leaves=6,
)


@settings(derandomize=True, database=None, max_examples=examples(100))
@given(content=st.binary(max_size=60) | JSON.map(lambda data: json.dumps(data).encode()))
def test_any_hyperparameters_give_arguments_or_one_line(content: bytes) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder + sagemaker.CONFIG)
        path.mkdir(parents=True)
        for name in ("hyperparameters.json", "inputdataconfig.json"):
            (path / name).write_bytes(content)
        try:
            command, _ = sagemaker.command("train", IMAGE, {}, folder)
            assert all(b"\0" not in os.fsencode(word) for word in command)
            exported = sagemaker.variables(folder)
            assert all("=" not in name and "\0" not in name for name in exported)
        except LaunchError as error:
            assert error.status == 2
            assert "\n" not in error.message
