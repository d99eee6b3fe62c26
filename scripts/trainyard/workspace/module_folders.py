"""The folders that a project's modules are imported from after ``pip install --editable``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import Any


def of(folder: Path, document: Mapping[str, Any], told: Sequence[str] = ()) -> list[Path]:
    """Return the import roots of the project in ``folder``: the settings of its build backend, else what backends find.

    Args:
        document: its pyproject.toml; empty if it has none.
        told: folders that other files of settings tell.
    """
    tool = document.get("tool", {})
    told = [
        *told,
        *_setuptools(tool.get("setuptools", {})),
        *_hatch(tool.get("hatch", {}).get("build", {})),
        *_poetry(tool.get("poetry", {})),
        *_text(tool.get("uv", {}).get("build-backend", {}).get("module-root")),
        *_text(tool.get("pdm", {}).get("build", {}).get("package-dir")),
        *_text(tool.get("maturin", {}).get("python-source")),
        *_parents(tool.get("scikit-build", {}).get("wheel", {}).get("packages", [])),
    ]
    found = [(folder / one).resolve() for one in told]
    if not found:
        found = [_default(folder)]
    return [one for one in dict.fromkeys(found) if one.is_relative_to(folder) and one.is_dir()]


def _default(folder: Path) -> Path:
    """``src`` unless it is a package itself: what setuptools, hatchling, uv, flit and PDM find by themselves.

    https://packaging.python.org/en/latest/discussions/src-layout-vs-flat-layout/
    """
    source = folder / "src"
    return source if source.is_dir() and not (source / "__init__.py").exists() else folder


def _text(value: object) -> list[str]:
    return [value or "."] if isinstance(value, str) else []


def _parents(packages: object) -> list[str]:
    """The folders of packages that are given by path, ``["src/mypackage"]``, or by name, ``{mypackage = "path"}``."""
    paths = packages.values() if isinstance(packages, dict) else packages if isinstance(packages, list) else []
    return [PurePosixPath(path).parent.as_posix() for path in paths if isinstance(path, str)]


def of_package_dir(folders: Mapping[str, str]) -> list[str]:
    """Return the import roots of setuptools' ``package_dir``: package -> folder.

    https://setuptools.pypa.io/en/latest/userguide/package_discovery.html.
    """
    found = []
    for package, path in folders.items():
        parts = package.split(".") if package else []
        if list(PurePosixPath(path).parts[-len(parts) :] if parts else []) == parts:
            above = PurePosixPath(path).parts[: -len(parts)] if parts else PurePosixPath(path).parts
            found.append(PurePosixPath(*above).as_posix())
    return found


def _setuptools(table: Mapping[str, Any]) -> list[str]:
    packages = table.get("packages", {})
    find = packages.get("find", {}) if isinstance(packages, dict) else {}
    return [*find.get("where", []), *of_package_dir(table.get("package-dir", {}))]


def _hatch(table: Mapping[str, Any]) -> list[str]:
    """https://hatch.pypa.io/latest/config/build/: ``dev-mode-dirs`` is what an editable install takes."""
    found = list(table.get("dev-mode-dirs", []))
    for one in (table, table.get("targets", {}).get("wheel", {})):
        sources = one.get("sources", [])
        found += _parents(one.get("packages", []))
        found += sources if isinstance(sources, list) else [path for path, name in sources.items() if not name]
    return found


def _poetry(table: Mapping[str, Any]) -> list[str]:
    """As in https://python-poetry.org/docs/pyproject/#packages."""
    return [entry.get("from", ".") for entry in table.get("packages", []) if isinstance(entry, dict)]
