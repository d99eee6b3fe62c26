"""docs/commands.md: the reference of the command line, which is what ``--help`` prints."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click

from trainyard.common.settings import ROOT

PAGE = ROOT / "docs" / "commands.md"

#: Characters of a line of ``--help``.
_WIDTH = 100


def rendered(root: Any) -> dict[Path, tuple[str, dict[str, Any]]]:
    """Return the path of the page -> name and variables of its template.

    Args:
        root: the group of all commands, a :class:`trainyard.cli.Commands`.
    """
    return {PAGE: ("commands.md.j2", {"commands": list(_described(root))})}


def _described(root: Any) -> Iterator[dict[str, str]]:
    """Yield name, summary and help of each command that is not hidden, groups with their commands after the others."""
    context = root.make_context("trainyard", ["--help"], resilient_parsing=True, terminal_width=_WIDTH)
    top = [name for name in root.list_commands(context) if not root.get_command(context, name).hidden]
    for name in sorted(top, key=lambda name: bool(root.list_group(name))):
        for inner in (name, *root.list_group(name)):
            command = root.get_command(context, inner)
            if not command.hidden:
                own = click.Context(command, parent=context, info_name=inner)
                yield {"name": inner, "summary": command.short_help, "help": command.get_help(own)}
