"""The command line: trainers, commands, options (R15.1), and the image's description (R10.3)."""

from __future__ import annotations

import pytest
from launcher.cli import find_command, parse
from launcher.errors import LaunchError
from launcher.image import Image
from launching import Launch, Machine

import trainyard

IMAGE = Image(framework="torch", trainers={"mnist": ["py", "-m", "mnist"], "env": ["py", "-m", "env"]}, default="mnist")


@pytest.mark.parametrize(
    ("argv", "command", "named"),
    [
        pytest.param([], ["py", "-m", "mnist"], True, id="default"),
        pytest.param(["mnist", "--epochs", "1"], ["py", "-m", "mnist", "--epochs", "1"], True, id="name"),
        pytest.param(["--epochs", "1"], ["py", "-m", "mnist", "--epochs", "1"], True, id="arguments-only"),
        pytest.param(["--job-dir=gs://b"], ["py", "-m", "mnist", "--job-dir=gs://b"], True, id="ai-platform"),
        pytest.param(["--", "ls", "-l"], ["ls", "-l"], False, id="command"),
        pytest.param(["--", "mnist"], ["mnist"], False, id="command-called-like-a-trainer"),
        pytest.param(["env"], ["py", "-m", "env"], True, id="trainer-over-PATH"),
        pytest.param(["/bin/sh", "-c", "x"], ["/bin/sh", "-c", "x"], False, id="path"),
        pytest.param(["./no-such"], ["./no-such"], False, id="missing-path"),
        pytest.param(["sh"], ["sh"], False, id="on-PATH"),
        pytest.param(["mnist", "--", "x"], ["py", "-m", "mnist", "--", "x"], True, id="dashes-of-the-trainer"),
        pytest.param(
            ["--force", "mnist", "--force"], ["py", "-m", "mnist", "--force"], True, id="options-end-at-the-name"
        ),
    ],
)
def test_command_to_start(argv: list[str], command: list[str], named: bool) -> None:
    assert find_command(parse(argv), IMAGE, {"PATH": "/usr/bin:/bin"}) == (command, named)


def test_an_unknown_trainer_lists_the_valid_ones() -> None:
    with pytest.raises(LaunchError) as caught:
        find_command(parse(["mnits"]), IMAGE, {"PATH": "/usr/bin:/bin"})
    assert caught.value.status == 2
    assert caught.value.message.startswith("'mnits' is not a trainer of this image; trainers: env, mnist;")


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--"], "a command must follow"),
        (["--json"], "--json requires --print-env"),
        (["--explain", "--json"], "--json requires --print-env"),
        (["--explain", "--print-env"], "cannot be used together"),
        (["--runtime"], "--runtime needs a name"),
        (["--runtime", "tpu", "--print-env"], "LAUNCHER_RUNTIME is 'tpu'"),
        ([], "nothing to run"),
        (["nosuch"], "'nosuch' is not a command on PATH, and this image has no trainers"),
        (["--epochs"], "this image has no default trainer"),
    ],
)
def test_invalid_command_lines_are_one_line_and_status_2(launch: Launch, argv: list[str], message: str) -> None:
    launched = launch({}, *(argv or ["--force"]))
    assert launched.status == 2
    assert message in launched.err
    assert launched.err.count("\n") == 1


@pytest.mark.parametrize("argv", [["--runtime=cpu"], ["--runtime", "cpu"]])
def test_options_take_precedence_over_variables(launch: Launch, argv: list[str]) -> None:
    assert "cpu" in launch({"LAUNCHER_RUNTIME": "gpu"}, *argv, "--print-env", "--json").data["why"]


def test_help_names_every_option_and_variable(launch: Launch) -> None:
    from launcher.cli import MODES, SWITCHES
    from launcher.settings import VARIABLES

    out = launch({}, "--help").out
    for name in (*MODES, *SWITCHES, *VARIABLES):
        assert name in out


def test_version_names_the_image(launch: Launch, machine: Machine) -> None:
    assert launch({}, "--version").out == (
        f"launch {trainyard.__version__}\nimage  no description (/opt/trainyard/image.json)\n"
    )
    machine.add_image("torch_xla", "2.9.0", {"mnist": ["python", "-m", "x"], "flowers": ["y"]}, "tpu")
    assert launch({}, "--version").out == (
        f"launch {trainyard.__version__}\nimage  test: torch_xla 2.9.0; accelerator tpu; trainers flowers, mnist\n"
    )
    # An invalid setting is no reason to hide the version.
    assert launch({"LAUNCHER_NPROC": "x"}, "--version").status == 0


def test_print_env_as_assignments(launch: Launch, machine: Machine) -> None:
    machine.add_image("torch_xla", "2.9.0")
    launched = launch({"CLOUD_ML_HP_METRIC_FILE": ""}, "--print-env")
    assert "PJRT_DEVICE=CPU\n" in launched.out
    assert launched.out.endswith("unset CLOUD_ML_HP_METRIC_FILE\n")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "JSONDecodeError"),
        ("[]", "AttributeError"),
        ('{"schema": 1}', "KeyError: 'framework'"),
        ('{"framework": "mxnet"}', "framework is 'mxnet'"),
        ('{"framework": "torch", "versions": 3}', "AttributeError"),
        ('{"framework": "torch", "trainers": {"mnist": "x"}}', "not a list of strings"),
        ('{"framework": "torch", "trainers": {"mnist": []}}', "not a list of strings"),
        ('{"framework": "torch", "default": "mnist"}', "not among the trainers"),
        ('{"framework": "torch", "versions": {"torch": 2}}', "must be strings"),
        ("[" * 100000, "RecursionError"),
    ],
)
def test_an_invalid_image_description_is_status_2(launch: Launch, machine: Machine, content: str, message: str) -> None:
    machine.add("/opt/trainyard/image.json", content)
    launched = launch({})
    assert launched.status == 2
    assert message in launched.err
    assert "rebuild the image" in launched.err


def test_framework_and_version_come_from_the_image_description(launch: Launch, machine: Machine) -> None:
    machine.add_image("torch_xla", "2.0")
    assert launch({"TPU_NAME": "grpc://1.2.3.4"}).exports["XRT_TPU_CONFIG"] == "tpu_worker;0;1.2.3.4:8470"
    machine.add_image("torch_xla", "2.9.0+tpu")
    assert launch({"TPU_NAME": "grpc://1.2.3.4"}).status == 2
