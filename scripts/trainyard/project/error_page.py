"""Write docs/troubleshooting.md: the error messages of the sources, grouped by subject."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from trainyard.common.settings import ROOT

PAGE = ROOT / "docs" / "troubleshooting.md"

#: Heading -> the folders and files whose errors are below it.
_PLACES = {
    "trainyard.yaml, requirements and code": ("scripts/trainyard/spec", "scripts/trainyard/workspace"),
    "Locks, builds and tests of images": tuple(f"scripts/trainyard/{room}" for room in ("image", "lint", "sandbox")),
    "Registries, tags and signatures": ("scripts/trainyard/oci", "scripts/trainyard/release"),
    "Options, the engine and this machine": (
        *(f"scripts/trainyard/{room}" for room in ("cli.py", "commands", "common", "project", "recipe.py")),
        "scripts/trainyard_jobs/commands",
    ),
    "Job files and platforms": tuple(
        f"scripts/trainyard_jobs/{room}" for room in ("check", "kubernetes", "model", "platforms", "schema")
    ),
    "Rehearsals": ("scripts/trainyard_jobs/rehearsal",),
    "TPU pods": ("scripts/trainyard_jobs/pods",),
    "In the container (`launch: error:`)": ("launcher",),
}
_RAISED = {"UserError", "StepFailed", "EngineFailed", "LaunchError", "config_error"}


def _placeholder(value: ast.expr) -> str:
    """Return the word that stands for a value in a line: the last name of its expression, in capitals."""
    names = [
        node.attr if isinstance(node, ast.Attribute) else node.id
        for node in ast.walk(value)
        if isinstance(node, (ast.Attribute, ast.Name))
    ]
    if isinstance(value, ast.Call):
        called = value.func.attr if isinstance(value.func, ast.Attribute) else names[0]
        if called == "nearest":
            return ""
        names = [name for name in names if name != called] or [called]
    return re.sub(r"\W|^_+", "", names[0]).upper() if names else "..."


def _line(message: ast.expr) -> str | None:
    """Return the line that an expression prints, with placeholders; None if it is made of placeholders alone."""
    parts = message.values if isinstance(message, ast.JoinedStr) else [message]
    own = "".join(str(part.value) for part in parts if isinstance(part, ast.Constant))
    if len(re.findall(r"[a-z]{2,}", own)) < 3:
        return None
    words = [
        str(part.value)
        if isinstance(part, ast.Constant)
        else _placeholder(part.value)
        if isinstance(part, ast.FormattedValue)
        else "..."
        for part in parts
    ]
    return " ".join("".join(words).replace("`", "'").split())


def _errors(path: Path) -> Iterator[str]:
    """Yield the error lines that a source file raises."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call) and node.exc.args:
            called = node.exc.func
            name = called.attr if isinstance(called, ast.Attribute) else getattr(called, "id", "")
            line = _line(node.exc.args[0]) if name in _RAISED else None
            if line:
                yield line


def rendered() -> dict[Path, tuple[str, dict[str, Any]]]:
    """Return path of the page -> its template's name and variables."""
    groups = {}
    for heading, places in _PLACES.items():
        files = (file for place in places for file in [ROOT / place, *(ROOT / place).rglob("*.py")] if file.is_file())
        groups[heading] = sorted({line for file in files for line in _errors(file)}, key=str.casefold)
    return {PAGE: ("troubleshooting.md.j2", {"groups": groups})}
