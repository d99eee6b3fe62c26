"""What setup.cfg says, and setup.py where its call of ``setup()`` passes literals; neither is run.

https://setuptools.pypa.io/en/latest/userguide/declarative_config.html,
https://setuptools.pypa.io/en/latest/references/keywords.html
"""

from __future__ import annotations

import ast
import configparser
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from trainyard.common.errors import UserError
from trainyard.spec import yaml_source
from trainyard.spec.model import relative
from trainyard.workspace import build_backends
from trainyard.workspace.lines import syntax_tree
from trainyard.workspace.project import Project

#: Keywords that are passed to ``setup()`` with a computed value.
_COMPUTED = object()


def read(folder: Path) -> tuple[Project, tuple[str, ...], frozenset[str]]:
    """Return what the setup.cfg and setup.py of a folder declare; setup.cfg comes first, as in setuptools.

    Returns:
        The project, whose values are not checked, with the version as it is written: ``attr:`` and ``file:`` are not
        resolved; the folders of its modules, if they tell them; the keywords that setup.py passes and that cannot be
        read.
    Raises:
        UserError: setup.cfg cannot be read; the message names the line.
    """
    config = _config(folder / "setup.cfg")
    keywords = keywords_of(folder / "setup.py")

    def text(key: str, section: str = "metadata") -> str:
        value = config.get(section, key, fallback="").strip() or keywords.get(key)
        return value if isinstance(value, str) else ""

    def lines(key: str) -> tuple[str, ...]:
        return _lines(config.get("options", key, fallback="")) or _texts(keywords.get(key))

    def table(key: str) -> dict[str, tuple[str, ...]]:
        section = f"options.{key}"
        if config.has_section(section):
            return {name: _lines(value) for name, value in config[section].items()}
        value = keywords.get(key)
        return {str(name): _texts(one) for name, one in value.items()} if isinstance(value, dict) else {}

    files = [one for one in lines("install_requires") if one.startswith("file:")]
    named = [name.strip() for one in files for name in one.removeprefix("file:").split(",")]
    package_dir: Any = dict(_assignments(_lines(config.get("options", "package_dir", fallback=""))))
    package_dir = package_dir or keywords.get("package_dir")
    told = [*_lines(config.get("options.packages.find", "where", fallback=""))]
    if isinstance(package_dir, dict):
        told += build_backends.of_package_dir({str(key): str(value) for key, value in package_dir.items()})
    project = Project(
        folder / ("setup.cfg" if config.has_option("metadata", "name") else "setup.py"),
        text("name"),
        text("version"),
        text("python_requires", "options"),
        (*(one for one in lines("install_requires") if one not in files), *build_backends.listed(folder, named)),
        table("extras_require"),
        {group: dict(_assignments(entries)) for group, entries in table("entry_points").items()},
    )
    return project, tuple(told), frozenset(key for key, value in keywords.items() if value is _COMPUTED)


def _config(path: Path) -> configparser.ConfigParser:
    config = configparser.ConfigParser(interpolation=None)
    config.optionxform = lambda option: option.replace("-", "_")  # type: ignore[assignment,method-assign]
    try:
        config.read_string(yaml_source.text(path) if os.path.lexists(path) else "")
    except configparser.Error as error:
        line = getattr(error, "lineno", None)
        words = str(error).splitlines()[0]
        raise UserError(f"{relative(path)}{f':{line}' if line else ''}: cannot be read: {words}") from None
    return config


def keywords_of(path: Path) -> dict[str, object]:
    """Return the keywords that ``setup()`` is called with, and their values: an object of no type if computed."""
    tree, found = syntax_tree(path), dict[str, object]()
    for node in ast.walk(tree) if tree else ():
        called = node.func if isinstance(node, ast.Call) else None
        of = called.value if isinstance(called, ast.Attribute) and called.attr == "setup" else None
        if getattr(called, "id", "") == "setup" or getattr(of, "id", "") == "setuptools":
            for keyword in getattr(node, "keywords", ()):
                try:
                    found[keyword.arg or "**"] = ast.literal_eval(keyword.value)
                except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):  # as its documentation says
                    found[keyword.arg or "**"] = _COMPUTED
    return found


def _lines(value: str) -> tuple[str, ...]:
    """A list of setup.cfg: one entry a line, comments left out."""
    return tuple(line.strip() for line in value.splitlines() if line.strip() and not line.strip().startswith("#"))


def _texts(value: object) -> tuple[str, ...]:
    """A list of setup.py, which may be one text with lines."""
    if isinstance(value, str):
        return _lines(value)
    return tuple(one for one in value if isinstance(one, str)) if isinstance(value, list | tuple) else ()


def _assignments(lines: Iterable[str]) -> Iterator[tuple[str, str]]:
    for line in lines:
        key, equals, value = line.partition("=")
        if equals:
            yield key.strip(), value.strip()
