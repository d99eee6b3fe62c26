"""Messages name commands and options as the user types them: as make's where make called, else as trainyard's."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import click
import pytest

from trainyard import cli
from trainyard.common import dialect, settings

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


def test_messages_name_commands_and_options_that_exist() -> None:
    """Each command and option in quotes is one that make's words can be found for."""
    seen, wrong = 0, []
    for path in sorted(PACKAGES.rglob("*.py")):
        for line, text in texts(path):
            for quoted in QUOTED.findall(text):
                named = f"'{''.join(quoted).removesuffix(' --help')}'"
                seen += 1
                # What follows ' -- ' is another program's; make has no such arguments.
                if " -- " not in named and dialect.of_make(named, click_commands(), "") == named:
                    wrong.append(f"{path.relative_to(PACKAGES)}:{line}: {named}")
    assert wrong == []
    assert seen > 150


TRANSLATED = {
    "run 'trainyard push' first": "run 'make push' first",
    "'trainyard push cpu'": "'make push TARGET=cpu'",
    "'trainyard lock cpu --upgrade'": "'make lock TARGET=cpu UPGRADE=1'",
    "'trainyard dev build cpu --compression gzip'": "'make build TARGET=cpu COMPRESSION=gzip'",
    "`trainyard job check job.yaml`": "`make check-job FILE=job.yaml`",
    "'TRAINYARD_ARCH=arm64 trainyard image xla'": "'make image TARGET=xla ARCH=arm64'",
    "'trainyard pod --action stop' or 'trainyard list'": "'make pod ACTION=stop' or 'make list'",
    "run 'sudo trainyard setup' once": "run 'sudo make setup' once",
    '`trainyard job cpu --name "a b"`': "`make job TARGET=cpu NAME='a b'`",
    "'trainyard lock cpu --workers=4'": None,
    "'--workers' or '--workers 4'": "'WORKERS' or 'WORKERS=4'",
    "'--pin'": "'PIN=1'",
    "'--mount gs://bucket/a b:/data'": "'MOUNT=gs://bucket/a b:/data'",
    "set 'TRAINYARD_BASE=<reference>'": "set 'BASE=<reference>'",
    # What is no command or option of Trainyard.
    "'trainyard unknown'": None,
    "'trainyard lock cpu more'": None,
    "'trainyard push --unknown'": None,
    "'--unknown 4'": None,
    "a trainyard of 'x'": None,
    "isn't --workers 4 or trainyard's": None,
    "'docker run --gpus all'": None,
}


@pytest.mark.parametrize(("text", "of_make"), TRANSLATED.items())
def test_under_make_messages_have_its_words(text: str, of_make: str | None) -> None:
    assert dialect.of_make(text, click_commands(), "job") == (of_make or text)


def test_an_option_is_most_likely_that_of_the_running_command() -> None:
    """`--mount` of job is a list of buckets, `--mount` of run is a flag."""
    assert dialect.of_make("'--mount'", click_commands(), "run") == "'MOUNT=1'"
    assert dialect.of_make("'--mount'", click_commands(), "job") == "'MOUNT'"


def test_who_calls_decides_the_words_of_a_message() -> None:
    def said(*words: str) -> str:
        return subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=False).stderr.splitlines()[0]

    wrong = "is neither a size in GB (200) nor a type and a size (hyperdisk-balanced:200)"
    called = said(sys.executable, "-m", "trainyard", "job", "cpu", "--platform", "vertex", "--disk", "large")
    assert called == f"job: '--disk large' {wrong}"
    assert said("make", "job", "TARGET=cpu", "PLATFORM=vertex", "DISK=large") == f"job: 'DISK=large' {wrong}"
