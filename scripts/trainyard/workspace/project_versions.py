"""Dynamic versions and dependencies, where the settings of the build backend name a file that has them."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from packaging.version import InvalidVersion, Version

from trainyard.common import git
from trainyard.workspace import module_folders
from trainyard.workspace.lines import text_of

#: Hatchling's default (https://hatch.pypa.io/latest/plugins/version-source/regex/), also of PDM's files.
_ASSIGNMENT = r"""(?im)^(__version__|VERSION)(?: ?\: ?str)? *= *(['"])v?(?P<version>.+?)\2"""


def of(folder: Path, name: str, document: Mapping[str, Any]) -> str | None:
    """The dynamic version of a project, by the settings of its backend; None if they name nothing that can be read.

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
        found = _matched(folder / hatch["path"], hatch.get("pattern", _ASSIGNMENT))
    elif pdm.get("source") == "file":
        found = _matched(folder / pdm.get("path", ""), _ASSIGNMENT)
    elif pdm.get("source") == "scm":
        found = _from_git(folder)
    elif settings := tool.get("setuptools", {}).get("dynamic", {}).get("version"):
        found = from_setuptools(folder, settings)
    else:
        # Flit reads it from the module (https://flit.pypa.io/en/stable/pyproject_toml.html).
        module = tool.get("flit", {}).get("module", {}).get("name") or name.replace("-", "_").lower()
        found = _attribute(folder, f"{module}.__version__", module_folders.of(folder, document))
    return _normal(found)


def from_setuptools(folder: Path, settings: Mapping[str, Any]) -> str | None:
    """``{attr = "package.__version__"}`` or ``{file = "VERSION"}``; None if it cannot be read without running code.

    https://setuptools.pypa.io/en/latest/userguide/pyproject_config.html#dynamic-metadata
    """
    if attribute := settings.get("attr"):
        return _normal(_attribute(folder, str(attribute), [folder, folder / "src"]))
    file = settings.get("file")
    files = file if isinstance(file, list) else [file]
    text = "\n".join(text_of(folder / str(one)) for one in files if one)
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
    lines = (re.sub(r"(^|\s)#.*", "", line).strip() for file in files for line in text_of(folder / file).splitlines())
    return tuple(filter(None, lines))


def _normal(text: str | None) -> str | None:
    try:
        return str(Version(text)) if text else None
    except InvalidVersion:
        return None


def _matched(path: Path, pattern: str) -> str | None:
    try:
        found = re.search(pattern if pattern.startswith("(?") else f"(?m){pattern}", text_of(path))
    except re.error:
        return None
    return found["version"] if found and "version" in found.re.groupindex else None


def _attribute(folder: Path, name: str, roots: Iterable[Path]) -> str | None:
    """The literal that ``package.module.attribute`` is assigned."""
    module, _, attribute = name.rpartition(".")
    for root in roots:
        path = root.joinpath(*module.split("."))
        for file in (path.with_suffix(".py"), path / "__init__.py"):
            if file.is_file() and file.resolve().is_relative_to(folder.resolve()):
                return _literal(text_of(file), attribute)
    return None


def _literal(source: str, name: str) -> str | None:
    try:
        tree = ast.parse(source)
    except SyntaxError:
        return None
    for node in tree.body:
        if not isinstance(node, ast.Assign | ast.AnnAssign):
            continue
        targets = node.targets if isinstance(node, ast.Assign) else [node.target]
        if any(isinstance(target, ast.Name) and target.id == name for target in targets):
            value = node.value
            return value.value if isinstance(value, ast.Constant) and isinstance(value.value, str) else None
    return None


def _from_git(folder: Path) -> str | None:
    """The version of the commit, as setuptools-scm counts: the tag, or the next version's ``.dev<commits since>``.

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
