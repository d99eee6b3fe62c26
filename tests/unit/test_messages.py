"""Messages name a command and its options as the user can type them: with make in a checkout, else with trainyard."""

from __future__ import annotations

import ast
import itertools
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import click
import pytest

from trainyard import cli, installation, settings
from trainyard.console import UserError
from trainyard_jobs.model import request
from trainyard_jobs.platforms import by_name
from trainyard_jobs.rehearsal import faults, session

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ROOT / "scripts"

#: Modules whose texts may name make: file -> why.
ALLOWED = {
    "trainyard/cli.py": "the help says how both spellings belong together",
    "trainyard/commands/dev/check.py": "examples of a command that needs a checkout",
    "trainyard/commands/dev/test.py": "examples of a command that needs a checkout",
    "trainyard/image/catalog_page.py": "a page of a checkout's documentation",
    "trainyard/image/dockerfile.py": "the first line of a file that a checkout generates",
    "trainyard/image/sizes.py": "the creator named in a file that a checkout generates",
    "trainyard/installation.py": "the one place that knows both spellings",
    "trainyard_jobs/kubernetes/gke_objects.py": "the column NAME of kubectl",
    "trainyard/release/signature.py": "COSIGN_KEY and COSIGN_PUB, which cosign reads, too",
    "trainyard/spec/workspace_lock.py": "the first line of a file that the build reads",
}


@cache
def click_commands() -> dict[str, click.Command]:
    context = click.Context(cli.trainyard)
    found = {name: cli.trainyard.get_command(context, name) for name in cli.trainyard.list_commands(context)}
    return {name: command for name, command in found.items() if command is not None}


def variables_of(command: click.Command) -> dict[str, click.Parameter]:
    """Variable of make -> the option or argument that it sets."""
    return {
        parameter.envvar.removeprefix(settings.PREFIX): parameter
        for parameter in command.params
        if isinstance(parameter.envvar, str)
    }


@cache
def variables() -> set[str]:
    found = {name for command in click_commands().values() for name in variables_of(command)}
    return {name for name in found | set(settings.COMMON_VARIABLES) if not settings.STANDARD_VARIABLES.fullmatch(name)}


def texts(path: Path) -> Iterator[tuple[int, str]]:
    """Line and content of the strings of a module, without its docstrings."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    documentation = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in documentation:
            yield node.lineno, node.value
        if isinstance(node, ast.JoinedStr):
            for before, after in itertools.pairwise(node.values):
                named = isinstance(before, ast.FormattedValue) and ast.unparse(before.value) == "variable"
                if named and isinstance(after, ast.Constant) and str(after.value).startswith("="):
                    yield node.lineno, "REGISTRY="  # or any other option


def calls(path: Path) -> Iterator[tuple[int, str, ast.Call]]:
    """The calls of ``installation.command`` and ``installation.option`` in a module."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Call) and ast.unparse(node.func) in ("installation.command", "installation.option"):
            yield node.lineno, ast.unparse(node.func).partition(".")[2], node


def test_no_text_spells_a_command_or_an_option_of_make_itself() -> None:
    names = "|".join(sorted(click_commands(), key=len, reverse=True))
    options = "|".join(sorted(name for name in variables() if len(name) > 1))
    of_make = re.compile(rf"(?<![-\w])make ({names})\b(?! (it|both|another|larger))")
    of_variable = re.compile(rf"(?<![\w=-])({options})=(?!VALUE|value|LOCAL|URL)")
    found = [
        f"{path.relative_to(PACKAGES)}:{line}: {text.strip()[:100]}"
        for path in sorted(PACKAGES.rglob("*.py"))
        if str(path.relative_to(PACKAGES)) not in ALLOWED
        for line, text in texts(path)
        if of_make.search(text) or of_variable.search(text)
    ]
    assert found == [], "name them with installation.command() and installation.option()"


def test_every_exception_is_needed() -> None:
    words = re.compile(r"\bmake [a-z]|\b[A-Z]+=")
    for name in ALLOWED:
        assert any(words.search(text) for _, text in texts(PACKAGES / name)) or name == "trainyard/installation.py", (
            name
        )


def test_messages_name_commands_and_options_that_exist() -> None:
    seen = 0
    for path in PACKAGES.rglob("*.py"):
        for line, kind, call in calls(path):
            where = f"{path.relative_to(PACKAGES)}:{line}"
            name = call.args[0]
            if not isinstance(name, ast.Constant):
                continue
            seen += 1
            if kind == "option":
                assert name.value in variables(), where
                continue
            assert name.value in click_commands(), where
            own = variables_of(click_commands()[name.value])
            for keyword in call.keywords:
                assert keyword.arg is None or keyword.arg in {*own, *settings.COMMON_VARIABLES}, where
    assert seen > 50


def test_options_are_spelt_as_click_has_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """Outside a checkout, ``installation.option`` names the flag or argument that the variable sets."""
    monkeypatch.setattr(settings, "CHECKOUT", None)
    for name, command in click_commands().items():
        for variable, parameter in variables_of(command).items():
            if settings.STANDARD_VARIABLES.fullmatch(variable):
                continue
            spelt = installation.option(variable)
            if isinstance(parameter, click.Argument) or (name, variable) == ("init", "TARGET"):
                assert spelt == variable, name
            else:
                assert spelt in [*parameter.opts, *parameter.secondary_opts], name


@pytest.mark.parametrize(
    ("checkout", "spelt"),
    [
        (
            True,
            [
                "make push",
                "make push TARGET=cpu",
                "make lock TARGET=cpu UPGRADE=1",
                "make pod ACTION=delete NAME=run1",
                "make check-job FILE=job.yaml",
                "make base DEBIAN_MIRROR=http://mirror",
                "PIN=1",
                "REGISTRY",
                "WORKERS=4",
                "BASE=<reference>",
            ],
        ),
        (
            False,
            [
                "trainyard push",
                "trainyard push cpu",
                "trainyard lock cpu --upgrade",
                "trainyard pod --action delete --name run1",
                "trainyard check-job job.yaml",
                "TRAINYARD_DEBIAN_MIRROR=http://mirror trainyard base",
                "--pin",
                "--registry",
                "--workers 4",
                "TRAINYARD_BASE=<reference>",
            ],
        ),
    ],
)
def test_commands_and_options_are_spelt_for_the_installation(
    checkout: bool, spelt: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    if not checkout:
        monkeypatch.setattr(settings, "CHECKOUT", None)
    assert spelt == [
        installation.command("push"),
        installation.command("push", TARGET="cpu"),
        installation.command("lock", TARGET="cpu", UPGRADE=True),
        installation.command("pod", ACTION="delete", NAME="run1"),
        installation.command("check-job", FILE="job.yaml"),
        installation.command("base", DEBIAN_MIRROR="http://mirror"),
        installation.option("PIN", True),
        installation.option("REGISTRY"),
        installation.option("WORKERS", 4),
        installation.option("BASE", "<reference>"),
    ]


def test_messages_of_the_installed_package_do_not_name_make(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(settings, "CHECKOUT", None)
    mistakes = [
        lambda: request.pinned("trainyard:cpu"),
        lambda: request.image_of(None, None, None),
        lambda: request.words("'open"),
        lambda: request.seconds("soon"),
        lambda: request.accelerator("a b"),
        lambda: request.parse_request(request.Options(target="cpu", metric="loss"), tpu_machine=lambda _: ""),
        lambda: session.parse_size("much"),
        lambda: session.parse_variables("1=2"),
        lambda: faults.parse("PREEMPT", "@@", []),
        lambda: by_name(None),
    ]
    said = []
    for mistake in mistakes:
        with pytest.raises(UserError) as caught:
            mistake()
        said.append(str(caught.value))
    assert not [text for text in said if re.search(r"\bmake [a-z]|\b[A-Z_]{3,}=(?!VALUE)", text)]
    assert said[0] == "--pin: trainyard:cpu names no registry: give --registry"
    assert "--metric requires --tune" in said[5]
    assert said[6].startswith("--memory much: ")
    assert said[9].startswith("no --platform given")
