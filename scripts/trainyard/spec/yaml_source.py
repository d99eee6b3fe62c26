"""YAML and JSON files whose values know their lines, so that messages can name the line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from ruamel.yaml import YAML
from ruamel.yaml.comments import CommentedMap, CommentedSeq
from ruamel.yaml.error import YAMLError

from trainyard.console import UserError
from trainyard.settings import ROOT

#: Path of a value in a document: keys and list positions from its top.
Location = tuple[int | str, ...]


def relative(path: Path) -> str:
    """A path as messages and generated files show it: relative to the project, or to the current folder, if inside."""
    found = path.resolve()
    for folder in (ROOT, Path.cwd()):
        if found.is_relative_to(folder):
            return found.relative_to(folder).as_posix()
    return str(path)


def text(path: Path) -> str:
    """The text of a file.

    Raises:
        UserError: it cannot be read.
    """
    try:
        return path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError:
        raise UserError(f"{relative(path)}: not UTF-8 text") from None
    except OSError as error:
        raise UserError(f"{relative(path)}: {error.strerror}") from None


def read_all(path: Path) -> list[Any]:
    """Every document of a YAML or JSON file; see :func:`parse`.

    Raises:
        UserError: the file cannot be read, or is neither YAML nor JSON; the line is named.
    """
    return parse(text(path), path)


def parse(text: str, path: Path) -> list[Any]:
    """Every document of a text, as nodes that know their lines, without empty documents.

    Plain scalars are ``str``, quoted ones a subclass of it, so that callers can apply the rules of YAML 1.1.

    Args:
        path: the text's name in messages.
    Raises:
        UserError: it is neither YAML nor JSON; the line is named.
    """
    reader = YAML(typ="rt")
    reader.preserve_quotes = True
    try:
        return [node for node in reader.load_all(text) if node is not None]
    except RecursionError:
        raise UserError(f"{relative(path)}: its values are nested too deeply") from None
    except YAMLError as error:
        if path.suffix == ".json":  # JSON allows tabs before a key, YAML does not
            try:
                return [json.loads(text)]
            except json.JSONDecodeError as other:
                raise UserError(f"{relative(path)}:{other.lineno}: not valid JSON: {other.msg}") from None
        mark = getattr(error, "problem_mark", None) or getattr(error, "context_mark", None)
        line = f":{mark.line + 1}" if mark else ""
        words = getattr(error, "problem", None) or getattr(error, "context", None) or str(error).splitlines()[0]
        raise UserError(f"{relative(path)}{line}: not valid YAML: {words}") from None


def read(path: Path) -> CommentedMap:
    """The one document of a YAML file, which must be a mapping.

    Raises:
        UserError: it cannot be read, or is something else.
    """
    nodes = read_all(path)
    if not nodes:
        raise UserError(f"{relative(path)}: the file is empty: expected 'key: value' pairs")
    if len(nodes) != 1 or not isinstance(nodes[0], CommentedMap):
        raise UserError(f"{relative(path)}: expected 'key: value' pairs at the top")
    return nodes[0]


def line_of(data: Any, location: Location) -> int | None:
    """1-based line of the value at ``location``; of the nearest enclosing one if it is missing."""
    line: int | None = None
    for step in location:
        if isinstance(data, CommentedMap) and step in data:
            line = data.lc.key(step)[0] + 1
        elif isinstance(data, CommentedSeq) and isinstance(step, int) and step < len(data):
            line = data.lc.item(step)[0] + 1
        else:
            return line
        data = data[step]
    return line


def plain(node: Any) -> Any:
    """YAML nodes as plain Python values."""
    if isinstance(node, dict):
        return {str(key): plain(value) for key, value in node.items()}
    if isinstance(node, list):
        return [plain(value) for value in node]
    if isinstance(node, bool) or node is None:
        return node
    if isinstance(node, float):
        return float(node)
    if isinstance(node, int):
        return int(node)
    return str(node)
