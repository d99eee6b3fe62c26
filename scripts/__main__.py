"""List the verbs: every module of this folder that ends with ``cli.run(main)`` is one."""

from __future__ import annotations

import ast
from pathlib import Path

from rich.table import Table

from scripts import cli


def verbs() -> dict[str, str]:
    """Verb -> first line of its module's docstring."""
    found = {}
    for path in sorted(Path(__file__).parent.glob("[a-z]*.py")):
        text = path.read_text(encoding="utf-8")
        if "\n    cli.run(main)\n" in text:
            found[path.stem.replace("_", "-")] = (ast.get_docstring(ast.parse(text)) or "").splitlines()[0]
    return found


def main(_arguments: list[str]) -> int:
    table = Table("make", "what it does", box=None)
    for verb, about in verbs().items():
        table.add_row(verb, about)
    cli.log.print(table)
    cli.log.print("\nTARGET names a folder under images/, as in: make image TARGET=tf-cpu (make list shows them)")
    return 0


cli.run(main)
