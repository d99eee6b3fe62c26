"""Read the templates of templates/, in which an undefined variable is an error."""

from __future__ import annotations

from typing import TYPE_CHECKING

from trainyard.common.settings import ROOT

if TYPE_CHECKING:
    import jinja2


def environment() -> jinja2.Environment:
    """Return a new environment of all templates. Importing Jinja2 takes longer than ``--help`` may."""
    import jinja2

    return jinja2.Environment(
        loader=jinja2.FileSystemLoader(ROOT / "templates"),
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        autoescape=False,
    )
