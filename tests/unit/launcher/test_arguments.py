"""The command line: trainers, commands, options (R15.1), and the image's recipe (R10.3)."""

from __future__ import annotations

import json
from typing import Any

import pytest
from launcher.cli import find_command, parse
from launcher.errors import LaunchError
from launcher.host import Host
from launcher.image import Image, read_image
from launching import Launch, Machine

import trainyard
from trainyard.image import recipes
from trainyard.spec import model

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
        f"launch {trainyard.__version__}\nimage  no description (/opt/trainyard/recipe.json)\n"
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


RECIPE = "/opt/trainyard/recipe.json"


def recipe_of(machine: Machine, key: str) -> tuple[dict[str, Any], dict[str, Any], str]:
    """Return a recipe, and the part of it and its key that ``framework.name``, for example, means."""
    machine.add_image("torch", "2.9.1")
    whole = part = json.loads((machine.root / RECIPE.lstrip("/")).read_text())
    *parents, last = key.split(".")
    for name in parents:
        part = part[name]
    return whole, part, last


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "JSONDecodeError"),
        ("[]", "TypeError"),
        ('{"schema": 1}', "KeyError: 'framework'"),
        ("[" * 100000, "RecursionError"),
    ],
)
def test_a_file_that_is_no_recipe_is_status_2(launch: Launch, machine: Machine, content: str, message: str) -> None:
    machine.add(RECIPE, content)
    launched = launch({})
    assert launched.status == 2
    assert f"{RECIPE} is not a valid recipe ({message}" in launched.err
    assert launched.err.count("\n") == 1 and "rebuild the image" in launched.err


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("name", 3, "must be strings"),
        ("framework", "torch", "TypeError"),
        ("framework.name", "mxnet", "framework.name is 'mxnet'"),
        ("framework.name", ["torch"], "framework.name is ['torch']"),
        ("framework.version", 2, "must be strings"),
        ("commands", None, "TypeError"),
        ("commands", [], "TypeError"),
        ("commands.mnist", "x", "not a list of strings"),
        ("commands.mnist", [], "not a list of strings"),
        ("default", "gpt", "'gpt' is not among the trainers"),
        ("default", None, "must be strings"),
        ("accelerator", None, "TypeError"),
        ("accelerator.kind", "", "accelerator.kind is ''"),
        ("accelerator.gpus", None, "cuda, driver and gpus are '', '' and None"),
    ],
)
def test_a_recipe_whose_key_is_damaged_is_status_2(
    launch: Launch, machine: Machine, key: str, value: object, message: str
) -> None:
    whole, part, last = recipe_of(machine, key)
    part[last] = value
    machine.add(RECIPE, json.dumps(whole))
    launched = launch({})
    assert launched.status == 2
    assert "recipe.json is not a valid recipe (" in launched.err and message in launched.err
    assert launched.err.count("\n") == 1


@pytest.mark.parametrize(
    "key",
    ["name", "framework", "framework.name", "framework.version", "commands", "default", "accelerator"]
    + [f"accelerator.{name}" for name in ("kind", "cuda", "driver", "gpus")],
)
def test_a_recipe_without_a_key_is_status_2(launch: Launch, machine: Machine, key: str) -> None:
    whole, part, last = recipe_of(machine, key)
    del part[last]
    machine.add(RECIPE, json.dumps(whole))
    launched = launch({})
    assert launched.status == 2
    assert f"recipe.json is not a valid recipe (KeyError: '{last}'); rebuild the image" in launched.err


def test_the_launcher_reads_the_recipe_of_a_build(machine: Machine) -> None:
    made = recipes.make(model.load("gpu", "amd64"))
    machine.add(RECIPE, made.text())
    image = read_image(Host(str(machine.root)), {})
    assert (image.name, image.framework, image.version) == ("gpu", "torch", made.framework.version)
    assert (image.default, image.trainers) == ("mnist", {name: list(words) for name, words in made.commands.items()})
    code = made.accelerator
    assert (image.accelerator, image.cuda, image.driver, image.gpus) == ("nvidia", code.cuda, code.driver, code.gpus)
    assert code.cuda and code.gpus


def test_framework_and_version_come_from_the_recipe(launch: Launch, machine: Machine) -> None:
    machine.add_image("torch_xla", "2.0")
    assert launch({"TPU_NAME": "grpc://1.2.3.4"}).exports["XRT_TPU_CONFIG"] == "tpu_worker;0;1.2.3.4:8470"
    machine.add_image("torch_xla", "2.9.0+tpu")
    assert launch({"TPU_NAME": "grpc://1.2.3.4"}).status == 2
