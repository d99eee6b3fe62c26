"""Read the templates of templates/, in which an undefined variable is an error."""

from __future__ import annotations

import functools
import sys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import yaml

from trainyard.common.settings import ROOT

if TYPE_CHECKING:
    import jinja2


@functools.cache
def environment() -> jinja2.Environment:
    """Return the environment of all templates, in which each is compiled once, with the filter ``yaml``.

    Importing Jinja2 takes longer than ``--help`` may.
    """
    import jinja2

    made = jinja2.Environment(
        loader=jinja2.FileSystemLoader(ROOT / "templates"),
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        autoescape=False,
    )
    made.filters["yaml"] = _yaml
    return made


def _yaml(value: str | Sequence[str] | Mapping[str, str]) -> str:
    """Return a scalar, a list or a mapping in YAML, in one line; text that would read as something else is quoted."""
    value = value if isinstance(value, str | Mapping) else list(value)
    text = yaml.safe_dump(value, default_flow_style=True, width=sys.maxsize, allow_unicode=True)
    return text.removesuffix("...\n").strip()
