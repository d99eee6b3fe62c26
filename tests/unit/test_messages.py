"""Messages name commands that the user can type, and options that exist."""

from __future__ import annotations

import ast
import logging
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import click
import pytest

from trainyard import cli
from trainyard.common import console, settings

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
    "trainyard_jobs/kubernetes/gke_objects.py": "the column NAME of kubectl",
    "trainyard/release/keys.py": "COSIGN_KEY and COSIGN_PUB, which cosign reads, too",
    "trainyard/image/tool_locks.py": "the first line of a file that the build reads",
}


@cache
def click_commands() -> dict[str, click.Command]:
    return cli.trainyard.all_commands()


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
    """Line and content of the strings of a module, without its docstrings; ``X`` stands for what is filled in."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    skipped = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr):
            skipped |= {id(part) for part in node.values}
            yield node.lineno, "".join(part.value if isinstance(part, ast.Constant) else "X" for part in node.values)
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in skipped:
            yield node.lineno, node.value


def test_no_text_spells_a_command_or_an_option_of_make_itself() -> None:
    names = "|".join(sorted(cli.trainyard.list_commands(click.Context(cli.trainyard)), key=len, reverse=True))
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
    assert found == [], "write 'trainyard lock cpu' and '--option value', in quotes"


def test_every_exception_is_needed() -> None:
    words = re.compile(r"\bmake [a-z]|\b[A-Z]+=")
    for name in ALLOWED:
        assert any(words.search(text) for _, text in texts(PACKAGES / name)), name


#: A command or an option in quotes.
QUOTED = re.compile(r"(?<!\w)(?:'((?:trainyard |--)[a-z][^'\n]*)'|`((?:trainyard |--)[a-z][^`\n]*)`)")


def exists(text: str) -> bool:
    """Tell if there is a command, with its options and arguments, or an option of one."""
    known = click_commands()
    before, is_command, after = text.partition("trainyard ")
    words = shlex.split(after or before)
    if not is_command:
        return any(words[0] in parameter.opts for command in known.values() for parameter in command.params)
    name = " ".join(words[:2]) if " ".join(words[:2]) in known else words[0]
    if name not in known:
        return False
    words = words[len(name.split()) :]
    arguments = [one for one in known[name].params if isinstance(one, click.Argument)]
    while words:
        word = words.pop(0)
        option = next((one for one in known[name].params if word.partition("=")[0] in one.opts), None)
        if isinstance(option, click.Option):
            if not option.is_flag and "=" not in word:
                words.pop(0)
        elif word.startswith("-") or not arguments:
            return False
        elif arguments[0].nargs == 1:
            arguments.pop(0)
    return True


@pytest.mark.parametrize(
    ("text", "known"),
    [
        ("trainyard lock cpu --upgrade", True),
        ("TRAINYARD_ARCH=arm64 trainyard image xla", True),
        ("trainyard dev build cpu --compression gzip", True),
        ("--workers 4", True),
        ("trainyard unknown", False),
        ("trainyard lock cpu more", False),
        ("trainyard push --unknown", False),
        ("--unknown 4", False),
    ],
)
def test_commands_and_options_that_do_not_exist_are_found(text: str, known: bool) -> None:
    assert exists(text) == known


def test_messages_name_commands_and_options_that_exist() -> None:
    seen, wrong = 0, []
    for path in sorted(PACKAGES.rglob("*.py")):
        for line, text in texts(path):
            for quoted in QUOTED.findall(text):
                named = "".join(quoted).removesuffix(" --help").partition(" -- ")[0]
                seen += 1
                if not exists(named):
                    wrong.append(f"{path.relative_to(PACKAGES)}:{line}: {named}")
    assert wrong == []
    assert seen > 150


@pytest.mark.parametrize("called", [".venv/bin/trainyard", "../x/.venv/bin/trainyard"])
def test_where_the_command_was_called_by_its_path_messages_name_it_by_that(
    called: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    said = "run 'trainyard push' or `TRAINYARD_ARCH=arm64 trainyard image` and 'sudo trainyard setup'; a trainyard"
    monkeypatch.setattr(sys, "argv", [called])
    with console.Messages():
        console.say(said)
    assert capsys.readouterr().err == (
        f"run '{called} push' or `TRAINYARD_ARCH=arm64 {called} image` and 'sudo {called} setup'; a trainyard\n"
    )


def test_a_warning_is_shown_once_in_a_command(capsys: pytest.CaptureFixture[str]) -> None:
    for _ in range(2):
        with console.Messages():
            for text in ("a", "b", "a"):
                logging.getLogger("trainyard").warning(text)
    assert capsys.readouterr().err == "WARNING: a\nWARNING: b\n" * 2


@pytest.mark.parametrize("called", ["/usr/local/bin/trainyard", "/x/trainyard/__main__.py", "-c", "bin/pytest"])
def test_elsewhere_it_is_on_the_path(called: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", [called])
    assert settings.program() == "trainyard"


def test_make_has_the_messages_of_the_command_that_it_calls() -> None:
    words = ["make", "job", "TARGET=cpu", "PLATFORM=vertex", "DISK=large"]
    said = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=False).stderr.splitlines()[0]
    assert said == ("job: '--disk large' is neither a size in GB (200) nor a type and a size (hyperdisk-balanced:200)")
