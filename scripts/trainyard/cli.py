"""The command line: ``trainyard COMMAND``, with a module per command, in ``commands`` of the two packages.

A command module has a docstring, ``GROUP`` (one of :data:`GROUPS`) and ``command``, a click command. It imports what it
needs inside its function, so that ``--help`` loads no library. ``get_command`` imports the module of that name. The
module ``dev/build.py`` is the command ``dev build``, and ``build`` for short, which is also the name for make.
"""

from __future__ import annotations

import copy
import datetime
import errno
import importlib
import os
import signal
import sys
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import click

from trainyard import __version__
from trainyard.common import options, settings
from trainyard.common.console import Messages, fail
from trainyard.common.context import Context
from trainyard.common.errors import StepFailed, UserError, nearest

if TYPE_CHECKING:
    from trainyard.common.rule_engine import Rule

#: Group -> its heading in ``trainyard --help``, in this order.
GROUPS = {
    "workspace": "Your own repository",
    "build": "Build and check images",
    "publish": "Publish images",
    "jobs": "Run jobs",
    "shell": "Set up and clean up",
    "project": "Work on this project",
}

INTERRUPTED = 130

#: Import name of each package of commands, the builder's first -> its folder.
_FOLDERS = {f"{name}.commands": settings.PACKAGE.parent / name / "commands" for name in ("trainyard", "trainyard_jobs")}


class Ended(Exception):
    """Ctrl-C, SIGTERM or a closed pipe ended the command. click itself would print an empty line first."""


@cache
def _modules() -> dict[str, str]:
    """Return the name of each command, such as ``image`` or ``job check``, -> its module."""
    modules: dict[str, str] = {}
    for package, folder in _FOLDERS.items():
        for path in sorted(folder.rglob("*.py")):
            *groups, stem = path.relative_to(folder).with_suffix("").parts
            module = ".".join([package, *groups, stem]).removesuffix(".__init__")
            words = [*groups, stem.replace("_", "-").removesuffix("".join(f"-{group}" for group in groups))]
            if name := " ".join(word for word in words if word != "--init--"):
                modules.setdefault(name, module)
    return modules


@cache
def _short_names() -> dict[str, str]:
    """Return the name of each command of a group without it, as in ``make check-job`` -> its name."""
    names = {module.rpartition(".")[2].replace("_", "-"): name for name, module in _modules().items() if " " in name}
    return {short: name for short, name in names.items() if short not in _modules()}


class Commands(click.Group):
    """The commands of both packages, and what commands about both need: rules, pages and the age of tables."""

    def rules(self) -> list[Rule[Any]]:
        """Return the rules for images, then those for jobs."""
        from trainyard.lint.image import core
        from trainyard_jobs import platforms

        return [*core.RULES, *platforms.RULES]

    def pages(self) -> dict[Path, tuple[str, dict[str, Any]]]:
        """Return the path of each generated page about jobs -> name and variables of its template."""
        from trainyard_jobs.check import pages

        return pages.rendered()

    def outdated(self, day: datetime.date) -> list[str]:
        """Return a line for each table of machines that was compared with its source too long before a day."""
        from trainyard_jobs.model import machines

        return machines.outdated(day)

    def list_commands(self, ctx: click.Context) -> list[str]:
        return sorted([*(name for name in _modules() if " " not in name), *_short_names()])

    def all_commands(self) -> dict[str, click.Command]:
        """Return every command by its name, those of groups by the group's name and theirs."""
        context = click.Context(self)
        return {name: command for name in _modules() if (command := self.get_command(context, name))}

    def list_group(self, group: str) -> list[str]:
        """Return the names of the commands of a group, such as ``dev build``."""
        return sorted(name for name in _modules() if name.startswith(f"{group} "))

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        name = _short_names().get(cmd_name, cmd_name)
        if name not in _modules():
            return None
        command: click.Command = copy.copy(importlib.import_module(_modules()[name]).command)
        command.name = cmd_name
        command.hidden |= name != cmd_name
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        name, *rest = args
        if (inner := " ".join(args[:2])) in _modules():
            return inner, self.get_command(ctx, inner), args[2:]
        command = self.get_command(ctx, name)
        if ctx.resilient_parsing or name.startswith("-"):
            return super().resolve_command(ctx, args)
        if command is None:
            raise UserError(f"no such command{nearest(name, self.list_commands(ctx))}; 'trainyard --help' lists them")
        if rest and not command.params and isinstance(command, options.Group) and not rest[0].startswith("-"):
            suggested = nearest(inner, self.list_group(name))
            raise UserError(f"no such command {inner}{suggested}; 'trainyard {name} --help' lists them")
        return name, command, rest

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except (KeyboardInterrupt, BrokenPipeError) as error:
            raise Ended from error

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        self.write_commands(ctx, formatter, self.list_commands(ctx))

    def write_commands(self, ctx: click.Context, formatter: click.HelpFormatter, names: Sequence[str]) -> None:
        """Write commands below the headings of :data:`GROUPS`, without hidden commands."""
        rows: dict[str, list[tuple[str, str]]] = {group: [] for group in GROUPS}
        for name in names:
            command = self.get_command(ctx, name)
            if command is not None and not command.hidden:
                group = importlib.import_module(_modules()[name]).GROUP
                rows[group].append((name, command.get_short_help_str(limit=80)))
        for group, heading in GROUPS.items():
            if rows[group]:
                with formatter.section(heading):
                    formatter.write_dl(rows[group])


def _print_version(ctx: click.Context, _parameter: click.Parameter, given: bool) -> None:
    if given:
        click.echo(f"trainyard {__version__}")
        ctx.exit()


@click.group(
    cls=Commands,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
    epilog="'trainyard COMMAND --help' describes a command. In a checkout, 'make COMMAND NAME=value' is the same as "
    "'trainyard COMMAND --name value', by the variable TRAINYARD_NAME.",
)
@click.option(
    "--version", is_flag=True, expose_value=False, is_eager=True, callback=_print_version, help="Print the version."
)
@click.pass_context
def trainyard(context: click.Context) -> None:
    """Build training images that are what their tags say and find their accelerator by themselves."""
    context.ensure_object(Context)


def _interrupted(number: int, _frame: object) -> NoReturn:
    raise KeyboardInterrupt(signal.Signals(number).name)


def _check_make_variables(name: str, given: list[str], goals: list[str]) -> None:
    """Refuse a variable on make's command line that no command of the call has: most likely it is misspelt."""
    known = set(settings.COMMON_VARIABLES)
    for goal in {name, *goals}:
        if command := trainyard.get_command(click.Context(trainyard), goal):
            for parameter in command.params:
                names = [parameter.envvar] if isinstance(parameter.envvar, str) else parameter.envvar or []
                known.update(variable.removeprefix(settings.PREFIX) for variable in names)
    for variable in given:
        if variable not in known and not variable.startswith("INDEX_"):  # one per package index
            raise UserError(f"no variable {variable}{nearest(variable, known)}; 'trainyard {name} --help' lists them")


def _open_closed_streams() -> None:
    """Replace streams that the caller closed (``trainyard list >&-``), for which Python has None, with /dev/null."""
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        if getattr(sys, name) is None:
            setattr(sys, name, os.fdopen(os.open(os.devnull, os.O_RDWR), "w" if number else "r", encoding="utf-8"))


def _reason(error: OSError) -> str:
    try:
        os.getcwd()
    except FileNotFoundError:
        return "the current folder was removed: change to another one"
    if error.filename:
        path = Path(os.path.abspath(str(error.filename)))
        state = settings.state_folder()
        refused = error.errno in (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR)
        # A folder above it that is missing could not be made, as below /proc.
        missing = error.errno == errno.ENOENT and state.is_relative_to(path)
        if missing or (refused and (path.is_relative_to(state) or state.is_relative_to(path))):
            kept = f"{state}, where results are kept, cannot be written"
            return f"{kept} ({error.strerror}): set 'TRAINYARD_BUILD=<folder>'"
    return f"{error.strerror or error}{f' ({error.filename})' if error.filename else ''}"


def run(arguments: list[str], commands: click.Group = trainyard) -> int:
    """Run one of the commands; its exit status.

    0 success · 1 a step failed · 2 a mistake of the user's · 130 interrupted. What went wrong is one line on stderr.
    """
    if signal.getsignal(signal.SIGINT) is signal.SIG_DFL:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, _interrupted)
    _open_closed_streams()
    given, goals = settings.adopt_make_variables(), settings.make_goals()
    words = [word for word in arguments if not word.startswith("-")] or ["trainyard"]
    name = inner if (inner := " ".join(words[:2])) in _modules() else words[0]
    with Messages():
        status = _run(commands, arguments, name, given, goals)
        try:
            sys.stdout.flush()
        except OSError as error:  # what is left would fail again, in Python's words, when the process ends
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            if not status and not isinstance(error, BrokenPipeError):
                fail(f"{name}: stdout: {error.strerror}")
            return status or 1
        return status


def _run(commands: click.Group, arguments: list[str], name: str, given: list[str], goals: list[str]) -> int:
    try:
        _check_make_variables(name, given, goals)
        status = commands.main(arguments or ["--help"], prog_name="trainyard", standalone_mode=False)
        return status if isinstance(status, int) else 0
    except UserError as error:
        fail(f"{name}: {error}")
        return 2
    except StepFailed as error:
        fail(f"{name}: {error}")
        return 1
    except click.ClickException as error:
        fail(f"{name}: {' '.join(error.format_message().split())}")  # click lists choices on a line each
        return 2
    except (Ended, KeyboardInterrupt, BrokenPipeError, click.Abort) as error:
        if isinstance(error.__cause__ or error, BrokenPipeError):  # the reader of stdout ended: `trainyard list | head`
            return 1
        if isinstance(error, click.Abort) and sys.stderr.isatty():
            click.echo(err=True)  # ends the line of the question that was not answered
        fail(f"{name}: interrupted")
        return INTERRUPTED
    except OSError as error:
        wrong = settings.wrong_ca_bundle() if error.errno is None else _reason(error)
        if not wrong:
            raise
        fail(f"{name}: {wrong}")
        return 1
