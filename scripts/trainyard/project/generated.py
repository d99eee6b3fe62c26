"""All generated files: what images are built from, the pipelines of Cloud Build and GitHub, and pages of docs/."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click

from trainyard.common import templates
from trainyard.common.settings import ROOT
from trainyard.image import catalog_page, dockerfile, gpu_page
from trainyard.project import error_page
from trainyard.release import pipelines
from trainyard.spec.architectures import AMD64
from trainyard.spec.model import Spec, catalogue, load, relative
from trainyard.spec.state import own

#: The reference of the command line, which is what ``--help`` prints, and the characters of a line of it.
REFERENCE = ROOT / "docs" / "commands.md"
_WIDTH = 100


def examples() -> list[Spec]:
    """The specs of users' images in examples/, whose Dockerfiles are committed."""
    return [load(relative(path.parent), AMD64.name) for path in sorted(ROOT.glob("examples/*/image.yaml"))]


def rendered(commands: Any, only: Spec | None = None) -> dict[Path, str]:
    """Return the path -> text of every generated file; with ``only``, of those that this image is built from.

    Args:
        commands: the group of all commands, a :class:`trainyard.cli.Commands`.
    """
    found = dockerfile.rendered(only)
    if only is not None:
        return found
    specs = catalogue()
    pages = {
        **pipelines.rendered(specs),
        **catalog_page.rendered(specs),
        **gpu_page.rendered(specs),
        **error_page.rendered(),
        REFERENCE: _reference(commands),
        **commands.pages(),
    }
    for spec in examples():
        found |= dockerfile.rendered(spec)
    made = templates.environment()
    return found | {path: made.get_template(template).render(values) for path, (template, values) in pages.items()}


def _reference(commands: Any) -> tuple[str, dict[str, Any]]:
    """Return the name of the template of docs/commands.md, and its variables."""
    return "commands.md.j2", {"commands": list(_described(commands))}


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


def drift(commands: Any, only: Spec | None = None) -> list[Path]:
    """Return the files of :func:`rendered` that are missing or out of date."""
    return dockerfile.differing(rendered(commands, only))


def write(commands: Any, only: Spec | None = None) -> list[Path]:
    """Bring the files of :func:`rendered` up to date, and return those that were written.

    Raises:
        UserError: one of them is part of the installed package.
    """
    if only and only.build_folder != only.folder:
        own(only.kept)
    return dockerfile.write(rendered(commands, only))
