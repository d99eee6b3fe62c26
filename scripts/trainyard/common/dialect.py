"""Messages in the words of make, where make called the command.

A message names commands and options in quotes, as in ``run 'trainyard lock cpu'`` and ``give '--workers 2'``. Under
make these are ``run 'make lock TARGET=cpu'`` and ``give 'WORKERS=2'``.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable, Mapping

import click

from trainyard.common.settings import PREFIX

#: Text in quotes that begins with a command, after variables for it, or with an option or a variable.
_QUOTED = re.compile(
    r"(?<!\w)(?P<quote>['`])(?P<sudo>(?:sudo )?)(?P<text>"
    rf"(?:{PREFIX}[A-Z_]+=\S* )*trainyard [^'`]+|--[a-z][^'`]*|{PREFIX}[A-Z_]+[^'`]*)(?P=quote)(?!\w)"
)


def of_make(message: str, commands: Mapping[str, click.Command], running: str) -> str:
    """Return a message with the words of make for the commands and options that it names in quotes.

    Text that is no command or option of Trainyard, such as a user's, stays as it is.

    Args:
        commands: name of each command, such as ``lock`` or ``dev build`` -> the command.
        running: name of the command that prints the message; an option is most likely its own.
    """

    def translated(match: re.Match[str]) -> str:
        try:
            text = _command(match["text"], commands) or _option(match["text"], commands, running)
        except LookupError:
            return match[0]
        return f"{match['quote']}{match['sudo']}{text}{match['quote']}"

    return _QUOTED.sub(translated, message)


def _command(text: str, commands: Mapping[str, click.Command]) -> str:
    """Return a command in the words of make; empty for an option.

    Raises:
        LookupError: there is no such command, or it has no such option or argument.
    """
    before, is_command, after = text.partition("trainyard ")
    if not is_command:
        return ""
    try:
        words = shlex.split(after)
    except ValueError as error:
        raise LookupError(after) from error
    name = " ".join(words[:2]) if " ".join(words[:2]) in commands else words[0]
    command, words = commands[name], words[len(name.split()) :]
    arguments = iter(parameter for parameter in command.params if isinstance(parameter, click.Argument))
    translated = []
    while words:
        word = words.pop(0)
        if not word.startswith("-"):
            argument = next(arguments, None)
            if argument is None:
                raise LookupError(word)
            translated.append(f"{_variable(argument)}={shlex.quote(word)}")
            continue
        option = _find(word, [command])
        value = "1" if option.is_flag else words.pop(0)
        translated.append(f"{_variable(option)}={shlex.quote(value)}")
    module = str(getattr(command.callback, "__module__", "")).rpartition(".")[2].replace("_", "-")
    return " ".join(["make", module, *translated, *(one.removeprefix(PREFIX) for one in before.split())])


def _option(text: str, commands: Mapping[str, click.Command], running: str) -> str:
    """Return an option or a variable in the words of make.

    Raises:
        LookupError: no command has such an option.
    """
    if text.startswith(PREFIX):
        return text.removeprefix(PREFIX)
    flag, separated, value = text.partition(" ")
    own = [commands[running]] if running in commands else []
    option = _find(flag, [*own, *commands.values()])
    value = "1" if option.is_flag and not separated else value
    return f"{_variable(option)}={value}" if value else _variable(option)


def _find(flag: str, commands: Iterable[click.Command]) -> click.Option:
    """Return the option with a flag of the first command that has it.

    Raises:
        LookupError: none has it.
    """
    for command in commands:
        for parameter in command.params:
            if isinstance(parameter, click.Option) and flag in parameter.opts and parameter.envvar:
                return parameter
    raise LookupError(flag)


def _variable(parameter: click.Parameter) -> str:
    """Return the variable of make that sets a parameter.

    Raises:
        LookupError: there is none.
    """
    if not isinstance(parameter.envvar, str):
        raise LookupError(parameter.name)
    return parameter.envvar.removeprefix(PREFIX)
