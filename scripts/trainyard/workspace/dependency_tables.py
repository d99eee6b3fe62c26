"""Read the dependencies of a project or script from TOML: pyproject.toml's tables, headers of scripts, lock files.

The tables: https://packaging.python.org/en/latest/specifications/pyproject-toml/,
https://packaging.python.org/en/latest/specifications/dependency-groups/ and
https://docs.astral.sh/uv/reference/settings/. Headers of scripts:
https://packaging.python.org/en/latest/specifications/inline-script-metadata/. uv.lock:
https://docs.astral.sh/uv/concepts/projects/layout/#the-lockfile. pylock.toml:
https://packaging.python.org/en/latest/specifications/pylock-toml/.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from packaging.utils import canonicalize_name

from trainyard.common.errors import UserError, nearest
from trainyard.spec import yaml_source
from trainyard.spec.markers import Fits
from trainyard.spec.workspace import folders_upwards
from trainyard.spec.yaml_source import relative
from trainyard.workspace import poetry_table
from trainyard.workspace.lines import (
    Found,
    Line,
    Source,
    line_with,
    of_any_extra,
    parse_direct,
    parse_reference,
    text_of,
)
from trainyard.workspace.project import IN_CONTAINER, Project

#: Settings of ``[tool.uv]`` that decide what is resolved and do not name an index.
_RESOLVER_SETTINGS = (
    "allow-insecure-host", "dependency-metadata", "exclude-newer", "exclude-newer-package", "fork-strategy",
    "index-strategy", "keyring-provider", "prerelease", "resolution",
)  # fmt: skip

#: The header of a script, by the pattern of its specification.
_HEADER = re.compile(r"(?m)^# /// (?P<type>[a-zA-Z0-9-]+)$\s(?P<content>(^#(| .*)$\s)+)^# ///$")

#: What the values that are read have to be. In a path, ``*`` is every value of a table, ``[]`` every one of a list.
_TYPES: tuple[tuple[str, tuple[type, ...], str], ...] = (
    ("a table", (dict,), """
    build-system project project.optional-dependencies project.scripts project.gui-scripts project.entry-points
    dependency-groups tool tool.uv tool.uv.index.[] tool.uv.sources tool.uv.sources.*.[] tool.uv.workspace index.[]
    package.[] package.[].sdist package.[].source package.[].wheels.[]
    """),
    ("a table or a list", (dict, list), "tool.uv.sources.*"),
    ("a list", (list,), """
    dependency-groups.* project.dynamic script.dependencies tool.uv.constraint-dependencies
    tool.uv.exclude-dependencies tool.uv.index
    tool.uv.override-dependencies tool.uv.workspace.exclude tool.uv.workspace.members index package
    package.[].resolution-markers package.[].wheels
    """),
    ("a list or text", (list, str), "tool.uv.find-links find-links"),
    ("text", (str,), """
    script.dependencies.[] script.requires-python
    tool.uv.sources.*.marker tool.uv.sources.*.[].marker tool.uv.workspace.exclude.[] tool.uv.workspace.members.[]
    package.[].name package.[].version package.[].resolution-markers.[]
    """),
)  # fmt: skip


@dataclass(frozen=True)
class Toml:
    """A TOML file and its text, in which lines are looked up: tomllib keeps none."""

    path: Path
    data: dict[str, Any]
    text: str

    def line_of(self, word: str, *, after: str = "") -> int:
        """Number of the first line with ``word`` at or below the one that begins with ``after``.

        1 if there is neither; the line of ``after`` if ``word`` is not below it.
        """
        start = 0
        lines = self.text.splitlines()
        if after:
            start = next((number for number, line in enumerate(lines) if line.strip().startswith(after)), 0)
        return next((number for number in range(start, len(lines)) if word in lines[number]), start) + 1

    def line(self, text: str, *, after: str = "") -> Line:
        """``text``, a string of the file, with its place."""
        return Line(text, self.path, self.line_of(text, after=after))

    def where(self, word: str, *, after: str = "") -> str:
        """``pyproject.toml:3``."""
        return f"{relative(self.path)}:{self.line_of(word, after=after)}"


def has_header(path: Path) -> bool:
    """Return whether a file is a script with a header; one that cannot be read has none."""
    return any(one["type"] == "script" for one in _HEADER.finditer(text_of(path)))


def _header(path: Path, text: str) -> str:
    """Return the TOML in the header of a script, on the lines that it has there.

    Raises:
        UserError: it has several.
    """
    found = [one for one in _HEADER.finditer(text) if one["type"] == "script"]
    if len(found) > 1:
        line = text.count("\n", 0, found[1].start()) + 1
        raise UserError(f"{relative(path)}:{line}: a second '# /// script': a script has one header")
    if not found:
        return ""
    above = "\n" * text.count("\n", 0, found[0].start("content"))
    return above + "".join(line[2:] if line[1:2] == " " else line[1:] for line in found[0]["content"].splitlines(True))


def toml(path: Path) -> Toml:
    """Read a TOML file, or the header of a script.

    Raises:
        UserError: it cannot be read, is not TOML, or a value that is read has another type; the line is named.
    """
    text = yaml_source.text(path)
    text = _header(path, text) if path.suffix == ".py" else text
    try:
        data = tomllib.loads(text)
        if path.suffix == ".py":  # what is at the top of a header has other types at the top of other files
            data = {"tool": data.pop("tool", {}), "script": data}
        found = Toml(path, data, text)
    except tomllib.TOMLDecodeError as error:
        place = re.search(r"line (\d+)", str(error))
        words = re.sub(r" \(at .*\)$", "", str(error))
        where = f"{relative(path)}{f':{place[1]}' if place else ''}"
        header = "its '# /// script' header is " if path.suffix == ".py" else ""
        raise UserError(f"{where}: {header}not valid TOML: {words}") from None
    except (ValueError, RecursionError):
        raise UserError(f"{relative(path)}: a number of thousands of digits, or values nested too deeply") from None
    for words, types, paths in _TYPES:
        for at in paths.split():
            if not all(isinstance(value, types) for value in _values(found.data, at)):
                raise UserError(f"{found.where(re.findall(r'[a-z_-]+', at)[-1])}: {at}: expected {words}")
    return found


def _values(document: Any, path: str) -> list[Any]:
    """Return the values at a path of :data:`_TYPES`."""
    found = [document]
    for key in path.split("."):
        inside: list[Any] = [one for one in found if isinstance(one, list if key == "[]" else dict)]
        if key in ("[]", "*"):
            found = [value for one in inside for value in (one if key == "[]" else one.values())]
        else:
            found = [one[key] for one in inside if key in one]
    return found


def table(data: Mapping[str, Any], *names: str) -> dict[str, Any]:
    """The table at ``[a.b.c]``; empty if there is none."""
    for name in names:
        found = data.get(name)
        if not isinstance(found, dict):
            return {}
        data = found
    return dict(data)


def workspace_root(folder: Path) -> Toml | None:
    """The pyproject.toml of the uv workspace that ``folder`` is in: the nearest with ``[tool.uv.workspace]``."""
    for above in folders_upwards(folder):
        path = above / "pyproject.toml"
        if path.is_file() and "[tool.uv.workspace" in yaml_source.text(path, errors="replace"):
            return toml(path)
    return None


def read_project(
    path: Path,
    found: Found,
    *,
    fits: Fits,
    project: Project | None = None,
    extras: Sequence[str] = (),
    groups: Sequence[str] = (),
) -> None:
    """Add the dependencies of a pyproject.toml to ``found``.

    uv's default groups, such as ``dev``, are left out unless ``groups`` names them.

    Args:
        project: of the file, with what its build backend has told; what it was not asked is left out.
    Raises:
        UserError: a table is missing or invalid, or its build backend failed; the file and line are named.
    """
    source = toml(path)
    own = table(source.data, "project")
    if not project and not groups:
        remedy = "list the dependencies in 'requirements:' of trainyard.yaml"
        raise UserError(f"{relative(path)}: no [project] table and no build backend: {remedy}")
    lines = _dependencies(source, own, project) if project else []
    for line in [*lines, *extra_lines(source, extras, project=project), *_group_lines(source, groups)]:
        _add(source, line, found, fits)
    _uv_settings(source, found)


def read_script(path: Path, found: Found, *, fits: Fits) -> None:
    """Add what the header of a script lists to ``found``.

    Raises:
        UserError: it has none, or a mistake; the file and line are named.
    """
    source = toml(path)
    if not source.text:
        raise UserError(f"{relative(path)}: no '# /// script' header, which would list its requirements (PEP 723)")
    script = table(source.data, "script")
    for text in script.get("dependencies", []):
        _add(source, source.line(text, after="dependencies"), found, fits)
    if python := script.get("requires-python"):
        found.requires_python.append(source.line(python, after="requires-python"))
    _uv_settings(source, found)


def _dependencies(source: Toml, own: Mapping[str, Any], project: Project) -> list[Line]:
    """Return the lines of ``[project] dependencies``, or those that the build backend has told."""
    if own and "dependencies" not in own.get("dynamic", []):
        return [source.line(text, after="dependencies") for text in own.get("dependencies", [])]
    return told_lines(project, "dynamic" if own else "build-backend")


def told_lines(project: Project, word: str) -> list[Line]:
    """Return the dependencies that the build backend of a project has told.

    Args:
        word: text in the project's file that stands for a requirement which is on no line there.
    Raises:
        UserError: it failed.
    """
    if "dependencies" in project.unknown:
        raise UserError(project.unknown["dependencies"])
    # A folder beside the project, as the container has it.
    beside = f"{project.folder.parent.as_uri().rstrip('/')}/"
    texts = [(text, text.replace(IN_CONTAINER, beside)) for text in project.dependencies]
    lines = []
    for text, here in texts:
        name = re.split(r"[^\w.-]", text)[0]
        number = line_with(project.file, text) or line_with(project.file, f"{name} =") or line_with(project.file, word)
        lines.append(Line(here, project.file, number or 1))
    return lines


def extra_lines(
    source: Toml, extras: Iterable[str], above: tuple[str, ...] = (), *, project: Project | None = None
) -> list[Line]:
    """Return the requirements of extras of a project, without those that it asks of itself.

    Args:
        above: the extras that ask for these.
        project: of the file; extras that its build backend was not asked have none.
    Raises:
        UserError: it has no such extra; the nearest spelling is named.
    """
    own = table(source.data, "project")
    if project and ("optional-dependencies" in own.get("dynamic", []) or not own):
        own = {"name": project.name, "optional-dependencies": project.optional_dependencies}
        extras = () if project.pending else extras
    available = {canonicalize_name(name): name for name in own.get("optional-dependencies", {})}
    lines: list[Line] = []
    for extra in map(canonicalize_name, extras):
        if extra not in available:
            raise UserError(
                f"{source.where('[project.optional-dependencies]')}: no extra '{extra}'{nearest(extra, available)}; "
                f"there are: {', '.join(sorted(available)) or 'none'}"
            )
        if extra in above:
            continue
        for text in own["optional-dependencies"][available[extra]]:
            line = source.line(text, after=f"{available[extra]} ")
            line = replace(line, text=of_any_extra(text))
            if line.name == canonicalize_name(str(own.get("name", ""))):
                lines += extra_lines(source, sorted(line.requirement.extras), (*above, extra), project=project)
            else:
                lines.append(line)
    return lines


def groups(path: Path) -> dict[str, list[str]]:
    """Return the groups of a pyproject.toml, also Poetry's, and what each lists, without those of included groups."""
    return {name: [one for one in lines if isinstance(one, str)] for name, lines in _groups(toml(path)).items()}


def _groups(source: Toml) -> dict[str, list[Any]]:
    of_poetry = poetry_table.groups(source.path) if table(source.data, "tool", "poetry") else {}
    return {**of_poetry, **table(source.data, "dependency-groups")}


def _group_lines(source: Toml, groups: Sequence[str]) -> list[Line]:
    from packaging.dependency_groups import resolve_dependency_groups

    available = _groups(source)
    names = {canonicalize_name(name): name for name in available}
    lines = []
    for group in groups:
        if canonicalize_name(group) not in names:
            raise UserError(
                f"{source.where('[dependency-groups]')}: no group '{group}'{nearest(group, available)}; "
                f"there are: {', '.join(available) or 'none'}"
            )
        try:
            texts = resolve_dependency_groups(available, group)
        except Exception as error:
            reason = getattr(error, "exceptions", [error])[0]
            where = source.where(names[canonicalize_name(group)], after="[dependency-groups]")
            raise UserError(f"{where}: group '{group}': {reason}") from None
        lines += [_group_line(source, text) for text in texts]
    return lines


def _group_line(source: Toml, text: str) -> Line:
    """A requirement of a group. Its text is normalised, so its line is looked up by the name."""
    name = re.split(r"[^A-Za-z0-9._-]", text)[0]
    exact = source.line(text, after="[dependency-groups]")
    if text in source.text:
        return exact
    pattern = re.compile(r"[\"']" + re.escape(name).replace("\\-", "[-_.]") + r"\b", re.IGNORECASE)
    lines = source.text.splitlines()
    start = source.line_of("[dependency-groups]") - 1
    number = next((n for n in range(start, len(lines)) if pattern.search(lines[n])), start)
    return Line(text, source.path, number + 1)


def _add(source: Toml, line: Line, found: Found, fits: Fits) -> None:
    """Add a dependency, which ``[tool.uv.sources]`` may take from elsewhere."""
    if line.requirement.url:
        found.sources.append(parse_reference(line))
        return
    entry, owner = _uv_source(source, line.name, fits)
    if entry is None or entry.get("workspace"):
        found.lines.append(line)
    elif "index" in entry:
        found.lines.append(line)
        found.index_of[line.name] = str(entry["index"])
    else:
        found.sources.append(_direct(owner, line, entry))


def _uv_source(source: Toml, name: str, fits: Fits) -> tuple[dict[str, Any] | None, Toml]:
    """The entry of ``[tool.uv.sources]`` for a package in the image, and the file that has it.

    The project's own entries are preferred to those of its uv workspace:
    https://docs.astral.sh/uv/concepts/projects/workspaces/#workspace-sources
    """
    for owner in (source, _above(source)):
        if owner is None:
            continue
        for key, value in table(owner.data, "tool", "uv", "sources").items():
            if canonicalize_name(key) == name:
                entries = value if isinstance(value, list) else [value]
                fitting = (one for one in entries if fits(one.get("marker")) and not ({"extra", "group"} & set(one)))
                return next(fitting, None), owner
    return None, source


def _above(source: Toml) -> Toml | None:
    """Return the root of the uv workspace of a project; scripts are in none."""
    return None if source.path.suffix == ".py" else workspace_root(source.path.parent)


def _direct(owner: Toml, line: Line, entry: Mapping[str, Any]) -> Source:
    """An entry of ``[tool.uv.sources]`` with a git repository, path or URL."""
    wanted = line.requirement
    extras, marker = tuple(sorted(wanted.extras)), str(wanted.marker or "")
    if "git" in entry:
        revision = next((str(entry[key]) for key in ("rev", "tag", "branch") if entry.get(key)), "")
        address = str(entry["git"])
        text = f"git+{address}" + (f"@{revision}" if revision else "")
    elif "path" in entry or "url" in entry:
        text = str(entry.get("path") or entry["url"])
    else:
        where = owner.where(line.requirement.name, after="[tool.uv.sources")
        raise UserError(f"{where}: {wanted.name}: none of index, git, path, url and workspace")
    if entry.get("subdirectory"):
        text += f"#subdirectory={entry['subdirectory']}"
    found = parse_direct(Line(text, owner.path, line.number), text)
    return Source(line, found.location, line.name, extras, marker, found.hashes)


def _uv_settings(source: Toml, found: Found) -> None:
    """Constraints, overrides and resolver settings; those of a uv workspace are at its root."""
    owner = _above(source) or source
    settings = table(owner.data, "tool", "uv")
    for key, lines in (("constraint-dependencies", found.constraints), ("override-dependencies", found.overrides)):
        lines += [owner.line(text, after=key) for text in settings.get(key, []) if isinstance(text, str)]
    found.excludes += settings.get("exclude-dependencies", [])
    found.options |= {key: settings[key] for key in _RESOLVER_SETTINGS if key in settings}


def read_uv_lock(path: Path, found: Found, *, fits: Fits) -> None:
    """Add every version of a package index that a uv.lock pins to the constraints.

    Raises:
        UserError: it cannot be read.
    """
    source = toml(path)
    lines = source.text.splitlines()
    places: dict[tuple[str, str], int] = {}
    for number, text in enumerate(lines, 1):
        if text == "[[package]]" and number + 1 < len(lines):
            name, version = (lines[number + at].partition("=")[2].strip().strip('"') for at in (0, 1))
            places[name, version] = number + 2
    for package in source.data.get("package", []):
        markers = package.get("resolution-markers", [])
        if "registry" not in package.get("source", {}) or not {"name", "version"} <= package.keys():
            continue
        if markers and not any(map(fits, markers)):
            continue
        key = (package["name"], package["version"])
        files = [*package.get("wheels", []), package.get("sdist", {})]
        hashes = frozenset(str(file["hash"]).removeprefix("sha256:") for file in files if "hash" in file)
        found.constraints.append(Line(f"{key[0]}=={key[1]}", path, places.get(key, 1), hashes))


def read_pylock(path: Path, found: Found, environment: Mapping[str, str]) -> None:
    """Add every package that a pylock.toml pins for an image, without those of extras and of further groups.

    Args:
        environment: the variables of markers in the image.
    Raises:
        UserError: it is not valid.
    """
    from packaging.pylock import Pylock, PylockValidationError

    source = toml(path)
    try:
        document = Pylock.from_dict(source.data)
    except PylockValidationError as error:
        raise UserError(f"{relative(path)}: {str(error).splitlines()[0]}") from None
    if document.requires_python:
        found.requires_python.append(source.line(str(document.requires_python), after="requires-python"))
    groups = {"extras": frozenset[str](), "dependency_groups": frozenset(document.default_groups or ())}
    lines = [number for number, text in enumerate(source.text.splitlines(), 1) if text.strip() == "[[packages]]"]
    for position, package in enumerate(document.packages):
        if package.marker and not package.marker.evaluate({**environment, **groups}, context="lock_file"):
            continue
        number = lines[position] + 1 if position < len(lines) else 1
        place = package.vcs or package.directory or package.archive
        if not place:
            files = [*(file.hashes for file in package.wheels or ()), package.sdist.hashes if package.sdist else {}]
            hashes = frozenset(file["sha256"] for file in files if "sha256" in file)
            text = f"{package.name}=={package.version}" if package.version else package.name
            found.lines.append(Line(text, path, number, hashes))
            continue
        text = str(getattr(place, "url", None) or place.path)
        if package.vcs:
            text = f"{package.vcs.type}+{text}@{package.vcs.commit_id}"
        text += f"#subdirectory={place.subdirectory}" if place.subdirectory else ""
        direct = parse_direct(Line(text, path, number), text)
        found.sources.append(Source(direct.line, direct.location, package.name, hashes=direct.hashes))
