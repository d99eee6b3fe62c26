"""What setup.cfg says, and setup.py where its call of ``setup()`` passes literals; neither is run.

https://setuptools.pypa.io/en/latest/userguide/declarative_config.html,
https://setuptools.pypa.io/en/latest/references/keywords.html
"""

from __future__ import annotations

import ast
import configparser
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from trainyard.common.errors import UserError
from trainyard.spec.model import relative
from trainyard.workspace.lines import text_of

#: Sections of setup.cfg by the keyword of ``setup()``, where they are not ``[options]``.
_SECTIONS = {"name": "metadata", "version": "metadata"}

#: Keywords that are passed to ``setup()`` with a computed value.
_COMPUTED = object()


@dataclass(frozen=True)
class Declared:
    """What the files of a project say.

    Attributes:
        file: that names the project.
        name, version, requires_python: empty if they say nothing; ``attr:`` and ``file:`` are not resolved.
        dependencies: requirements, ``extras``: those of each extra.
        entry_points: group -> name -> object.
        package_dir: package -> folder, ``where``: folders in which packages are found.
        computed: keywords that setup.py passes and that cannot be read.
    """

    file: Path
    name: str
    version: str
    requires_python: str
    dependencies: tuple[str, ...]
    extras: Mapping[str, tuple[str, ...]]
    entry_points: Mapping[str, Mapping[str, str]]
    package_dir: Mapping[str, str]
    where: tuple[str, ...]
    computed: frozenset[str]


def read(folder: Path) -> Declared:
    """The declarations of the setup.cfg and setup.py of a folder; those of setup.cfg come first, as in setuptools.

    Raises:
        UserError: setup.cfg cannot be read; the message names the line.
    """
    config = _config(folder / "setup.cfg")
    keywords = _keywords(folder / "setup.py")

    def text(key: str) -> str:
        value = config.get(_SECTIONS.get(key, "options"), key, fallback="").strip() or keywords.get(key)
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
    of_files = [line for name in named for line in _lines(text_of(folder / name))]
    package_dir = keywords.get("package_dir")
    return Declared(
        file=folder / ("setup.cfg" if config.has_option("metadata", "name") else "setup.py"),
        name=text("name"),
        version=text("version"),
        requires_python=text("python_requires"),
        dependencies=(*(one for one in lines("install_requires") if one not in files), *of_files),
        extras=table("extras_require"),
        entry_points={group: dict(_assignments(entries)) for group, entries in table("entry_points").items()},
        package_dir=dict(_assignments(_lines(config.get("options", "package_dir", fallback=""))))
        or ({str(key): str(value) for key, value in package_dir.items()} if isinstance(package_dir, dict) else {}),
        where=_lines(config.get("options.packages.find", "where", fallback="")),
        computed=frozenset(key for key, value in keywords.items() if value is _COMPUTED),
    )


def _config(path: Path) -> configparser.ConfigParser:
    config = configparser.ConfigParser(interpolation=None)
    config.optionxform = lambda option: option.replace("-", "_")  # type: ignore[assignment,method-assign]
    try:
        config.read(path, encoding="utf-8")
    except (configparser.Error, UnicodeDecodeError) as error:
        line = getattr(error, "lineno", None)
        words = str(error).splitlines()[0]
        raise UserError(f"{relative(path)}{f':{line}' if line else ''}: cannot be read: {words}") from None
    return config


def _keywords(path: Path) -> dict[str, object]:
    """The keywords that ``setup()`` is called with, and their literal values."""
    try:
        tree = ast.parse(path.read_bytes())
    except (OSError, SyntaxError, ValueError, RecursionError):
        return {}
    found: dict[str, object] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and ast.unparse(node.func) in ("setup", "setuptools.setup"):
            for keyword in node.keywords:
                try:
                    found[keyword.arg or "**"] = ast.literal_eval(keyword.value)
                except ValueError:
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
