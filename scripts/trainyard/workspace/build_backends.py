"""Read the settings of build backends: folders of modules, dynamic versions and dependencies.

The folders are those that modules are imported from after ``pip install --editable``. Dynamic values are read where the
settings name a file that has them.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import Any

from packaging.version import InvalidVersion, Version

from trainyard.common import git
from trainyard.spec.repository_files import inside, leads_out
from trainyard.spec.yaml_source import relative
from trainyard.workspace.lines import syntax_tree, text_of

#: Hatchling's default (https://hatch.pypa.io/latest/plugins/version-source/regex/), also of PDM's files.
_ASSIGNMENT = r"""(?im)^(__version__|VERSION)(?: ?\: ?str)? *= *(['"])v?(?P<version>.+?)\2"""


def module_folders(folder: Path, document: Mapping[str, Any], told: Sequence[str] = ()) -> list[Path]:
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
    """Return ``src`` unless it is a package itself: what setuptools, hatchling, uv, flit and PDM find by themselves.

    https://packaging.python.org/en/latest/discussions/src-layout-vs-flat-layout/
    """
    source = folder / "src"
    return source if source.is_dir() and not (source / "__init__.py").exists() else folder


def _text(value: object) -> list[str]:
    return [value or "."] if isinstance(value, str) else []


def _parents(packages: object) -> list[str]:
    """Return the folders of packages given by path, ``["src/mypackage"]``, or by name, ``{mypackage = "path"}``."""
    paths = packages.values() if isinstance(packages, dict) else packages if isinstance(packages, list) else []
    return [PurePosixPath(path).parent.as_posix() for path in paths if isinstance(path, str)]


def of_package_dir(folders: Mapping[str, str]) -> list[str]:
    """Return the import roots of setuptools' ``package_dir``: package -> folder.

    https://setuptools.pypa.io/en/latest/userguide/package_discovery.html.
    """
    roots = []
    for package, path in folders.items():
        parts, own = PurePosixPath(path).parts, tuple(filter(None, package.split(".")))
        above = len(parts) - len(own)
        if parts[above:] == own:
            roots.append(PurePosixPath(*parts[:above]).as_posix())
    return roots


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
    """Follow https://python-poetry.org/docs/pyproject/#packages."""
    return [entry.get("from", ".") for entry in table.get("packages", []) if isinstance(entry, dict)]


def version(folder: Path, name: str, document: Mapping[str, Any]) -> str | None:
    """Return a project's dynamic version, by the settings of its backend; None if they name nothing that can be read.

    Args:
        name: of the project.
        document: its pyproject.toml.
    """
    tool = document.get("tool", {})
    hatch = tool.get("hatch", {}).get("version", {})
    pdm = tool.get("pdm", {}).get("version", {})
    found = None
    if "setuptools_scm" in tool or "setuptools-scm" in tool or "vcs" in hatch.get("source", ""):
        found = _from_git(folder)
    elif hatch.get("path"):
        found = _matched(_content(folder, hatch["path"]), hatch.get("pattern", _ASSIGNMENT))
    elif pdm.get("source") == "file":
        found = _matched(_content(folder, pdm.get("path", "")), _ASSIGNMENT)
    elif pdm.get("source") == "scm":
        found = _from_git(folder)
    elif settings := tool.get("setuptools", {}).get("dynamic", {}).get("version"):
        found = from_setuptools(folder, settings)
    else:
        # Flit reads it from the module (https://flit.pypa.io/en/stable/pyproject_toml.html).
        module = tool.get("flit", {}).get("module", {}).get("name") or name.replace("-", "_").lower()
        found = _attribute(folder, f"{module}.__version__", module_folders(folder, document))
    return _normal(found)


def from_setuptools(folder: Path, settings: Mapping[str, Any]) -> str | None:
    """Read ``{attr = "package.__version__"}`` or ``{file = "VERSION"}``; None if that would run code.

    https://setuptools.pypa.io/en/latest/userguide/pyproject_config.html#dynamic-metadata
    """
    if attribute := settings.get("attr"):
        return _normal(_attribute(folder, str(attribute), [folder, folder / "src"]))
    file = settings.get("file")
    files = file if isinstance(file, list) else [file]
    text = "\n".join(_content(folder, str(one)) for one in files if one)
    return _normal(text.strip())


def dependencies(folder: Path, document: Mapping[str, Any]) -> tuple[str, ...] | None:
    """Dynamic dependencies that the backend reads from requirements files; None if its settings name none."""
    tool = document.get("tool", {})
    found = tool.get("setuptools", {}).get("dynamic", {}).get("dependencies", {}).get("file")
    # https://github.com/repo-helper/hatch-requirements-txt
    hook = tool.get("hatch", {}).get("metadata", {}).get("hooks", {}).get("requirements_txt")
    if hook is not None:
        found = hook.get("files") or hook.get("filename", "requirements.txt")
    files = [found] if isinstance(found, str) else found
    if not files or not all((folder / str(file)).is_file() for file in files):
        return None
    return listed(folder, files)


def listed(folder: Path, files: Iterable[str]) -> tuple[str, ...]:
    """Return the requirements that files of a folder list, a line each; none of a file that cannot be read."""
    lines = (re.sub(r"(^|\s)#.*", "", line).strip() for file in files for line in _content(folder, file).splitlines())
    return tuple(filter(None, lines))


def _normal(text: str | None) -> str | None:
    try:
        return str(Version(text)) if text else None
    except InvalidVersion:
        return None


def _content(folder: Path, name: str) -> str:
    return text_of(inside(folder / name, folder, relative(folder)))


def _matched(text: str, pattern: str) -> str | None:
    try:
        found = re.search(pattern if pattern.startswith("(?") else f"(?m){pattern}", text)
    except re.error:
        return None
    return found["version"] if found and "version" in found.re.groupindex else None


def _attribute(folder: Path, name: str, roots: Iterable[Path]) -> str | None:
    """Return the literal that ``package.module.attribute`` is assigned."""
    module, _, attribute = name.rpartition(".")
    for root in roots:
        path = root.joinpath(*module.split("."))
        for file in (path.with_suffix(".py"), path / "__init__.py"):
            if file.is_file() and not leads_out(file, folder):
                return _literal(file, attribute)
    return None


def _literal(file: Path, name: str) -> str | None:
    tree = syntax_tree(file)
    for node in tree.body if tree else ():
        if not isinstance(node, ast.Assign | ast.AnnAssign):
            continue
        targets = node.targets if isinstance(node, ast.Assign) else [node.target]
        if any(isinstance(target, ast.Name) and target.id == name for target in targets):
            value = node.value
            return value.value if isinstance(value, ast.Constant) and isinstance(value.value, str) else None
    return None


def _from_git(folder: Path) -> str | None:
    """Return the commit's version, as setuptools-scm counts: the tag, or the next version's ``.dev<commits since>``.

    https://setuptools-scm.readthedocs.io/en/latest/extending/#version-number-construction; the commit and the day,
    which it adds as a local version, are left out: the code's layer would differ between builds.
    """
    try:
        described = git.run(folder, "describe", "--tags", "--long", "--match", "*[0-9]*")
    except FileNotFoundError:
        return None
    text = described.stdout.decode(errors="replace").strip()
    found = re.fullmatch(r"(?:.*?[^0-9.])??v?(\d.*)-(\d+)-g[0-9a-f]+", text)
    tag = _normal(found[1]) if found and described.returncode == 0 else None
    if not found or tag is None or found[2] == "0":
        return tag
    version = Version(tag)
    if version.is_prerelease and version.pre:
        return f"{version.base_version}{version.pre[0]}{version.pre[1] + 1}.dev{found[2]}"
    release = [*version.release[:-1], version.release[-1] + 1]
    return f"{'.'.join(map(str, release))}.dev{found[2]}"
