"""What this installation has: a checkout or only the installed package, its commands, and optional dependencies."""

from __future__ import annotations

import importlib.util
from pathlib import Path

from trainyard import settings
from trainyard.console import UserError

#: Variables of make that are arguments of ``trainyard`` without a flag.
_ARGUMENTS = frozenset({"A", "B", "FILE", "PACKAGE", "SUBJECT", "TARGET"})

#: Variables that libraries read and that no command has an option for.
_WITHOUT_OPTION = frozenset(settings.COMMON_VARIABLES) - {"JSON", "OFFLINE", "TARGET"}


def command(name: str, **values: str | bool) -> str:
    """A command as the user of this installation types it, for messages.

    Args:
        name: of the command.
        values: variable of make, such as ``TARGET`` -> its value; True for an option without one.
    Returns:
        ``make lock TARGET=cpu UPGRADE=1`` in a checkout, else ``trainyard lock cpu --upgrade``.
    """
    if settings.CHECKOUT:
        return " ".join(["make", name, *(option(variable, value) for variable, value in values.items())])
    before = [option(variable, value) for variable, value in values.items() if variable in _WITHOUT_OPTION]
    after = [option(variable, value) for variable, value in values.items() if variable not in _WITHOUT_OPTION]
    return " ".join([*before, "trainyard", name, *after])


def option(variable: str, value: object = "") -> str:
    """An option as the user of this installation types it, for messages.

    Args:
        variable: its variable of make, such as ``WORKERS``.
        value: True for an option without one; empty: the option's name alone.
    Returns:
        ``WORKERS=4``, ``PIN=1`` or ``WORKERS`` in a checkout, else ``--workers 4``, ``--pin`` or ``--workers``.
    """
    if settings.CHECKOUT or variable in _WITHOUT_OPTION:
        name = variable if settings.CHECKOUT else f"{settings.PREFIX}{variable}"
        return f"{name}={1 if value is True else value}" if value != "" else name
    if variable in _ARGUMENTS:
        return str(value) if value != "" else variable
    flag = f"--{variable.lower().replace('_', '-')}"
    return flag if value is True or value == "" else f"{flag} {value}"


def check_writable(path: Path) -> None:
    """Refuse to change a file of the installed package.

    Raises:
        UserError: ``path`` is one of the files that were installed with the package; a checkout's may be written.
    """
    if settings.CHECKOUT is None and path.resolve().is_relative_to(settings.ROOT):
        name = path.resolve().relative_to(settings.ROOT)
        raise UserError(f"{name} is part of the installed package: to change it, run this in a checkout of Trainyard")


def checkout(purpose: str) -> Path:
    """The folder of the checkout that this package runs from.

    Raises:
        UserError: it was installed from a wheel; the message says that ``purpose`` needs a checkout.
    """
    if settings.CHECKOUT is None:
        raise UserError(
            f"{purpose} needs a checkout of Trainyard, and this is an installed package: clone it, run 'make'"
        )
    return settings.CHECKOUT


def require_extra(module: str, extra: str, command: str = "") -> None:
    """Check that an optional dependency is installed; call it before the import.

    Args:
        module: what is imported, such as ``cryptography``.
        extra: the extra of ``trainyard-images`` that installs it (pyproject.toml).
        command: the command that needs it; the extra's name if empty.

    Raises:
        UserError: it is not installed.
    """
    if importlib.util.find_spec(module) is None:
        raise UserError(f"'trainyard {command or extra}' needs {module}: install 'trainyard-images[{extra}]'")
