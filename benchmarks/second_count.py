"""A second count of what a repository asks for, beside that of the product: with packaging, tomllib, PyYAML and ast.

It reads the files of requirements at the project's root, in folders such as requirements/, and on the way to the
command. Parts and files for development, tests and documentation are left out.
"""

from __future__ import annotations

import ast
import configparser
import re
import shlex
import subprocess
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import yaml
from packaging.requirements import InvalidRequirement, Requirement
from packaging.specifiers import InvalidSpecifier, SpecifierSet
from packaging.utils import canonicalize_name

#: Folders beside the root that have lists of requirements.
FOLDERS = {"requirements", "reqs", "env", "envs", "environment", "environments", "conda", "docker", ".devcontainer"}

#: Files and parts that are not for the training.
APART = re.compile(
    r"(^|[-_./ ])(dev(elopment)?|tests?|testing|docs?|lint\w*|format\w*|typ\w+|style|ci|build|release)([-_./ ]|$)"
)

#: What wishes CUDA: https://docs.astral.sh/uv/guides/integration/pytorch/, https://docs.jax.dev/en/latest/installation.html
WISH = re.compile(
    r"\+cu1\d\d|whl/(?:nightly/)?cu1\d\d|\bnvidia-[a-z]+-cu1\d|\bflash[-_]attn\b|\bbitsandbytes\b|\bxformers\b"
    r"|\b(?:cupy|jax|faiss-gpu)[-_](?:cuda|cu)1\d|\b(?:tensorflow|onnxruntime|faiss)-gpu\b|\[(?:and-cuda|cuda1\d)"
    r"|\bpytorch-cuda\b|\bcudatoolkit\b|\bcuda-version\b|FROM nvidia/cuda|FROM \S*pytorch:\S*cuda|^\s*gpu: true"
)

#: Lines of the output about an import: the file, the module, and the list that has no package, and what is added; one
#: that names another list which has it is true.
IMPORT = re.compile(
    r"WARNING: (?!.*is added, as )(\S+?):\d+ imports (\w+)[\w.]*[,:]"
    r"(?: for which (\S+) lists no package: (\S+) is added)?"
)


class Pin(NamedTuple):
    """A requirement with a version: its file, the extra or group there, its name and versions."""

    file: str
    part: str
    name: str
    versions: str


def pin(file: str, part: str, text: object) -> Iterator[Pin]:
    """Yield the requirement that a line states, if it states versions and is for Linux and CPython."""
    words = re.split(r"\s+(?:#|--)", str(text).strip())[0].rstrip("\\ ,")
    try:
        found = Requirement(words)
    except InvalidRequirement:
        return
    if found.specifier and (found.marker is None or found.marker.evaluate({"python_version": "3.13", "extra": part})):
        yield Pin(file, part, canonicalize_name(found.name), str(found.specifier))


def table(file: str, part: str, rows: Mapping[str, Any]) -> Iterator[Pin]:
    """Yield those of a table of Poetry, Pipenv or pixi: name = "versions", or a table with `version`."""
    for name, value in rows.items():
        versions = str(value.get("version", "") if isinstance(value, dict) else value)
        if caret := re.fullmatch(r"[\^~](\d+)(?:\.(\d+))?(\S*)", versions):
            major, minor = caret[1], caret[2] or "0"
            up = f"{int(major) + 1}" if versions[0] == "^" and major != "0" else f"{major}.{int(minor) + 1}"
            versions = f">={versions[1:]},<{up}"
        versions = f"=={versions}" if versions[:1].isdigit() else versions
        try:
            if name != "python" and versions not in ("", "*", "==*") and SpecifierSet(versions):
                yield Pin(file, part, canonicalize_name(name), versions)
        except InvalidSpecifier:
            continue


def of_toml(file: str, text: str) -> Iterator[Pin]:
    """Yield those of pyproject.toml, Pipfile and pixi.toml."""
    data = tomllib.loads(text)
    project, tool = data.get("project", {}), data.get("tool", {})
    parts = {"": project.get("dependencies", []), **project.get("optional-dependencies", {})}
    for part, lines in [*parts.items(), *data.get("dependency-groups", {}).items()]:
        for line in lines:
            yield from pin(file, part, line)
    poetry, pixi = tool.get("poetry", {}), tool.get("pixi", data if file.endswith("pixi.toml") else {})
    tables = {"": poetry.get("dependencies", {})}
    tables |= {part: group.get("dependencies", {}) for part, group in poetry.get("group", {}).items()}
    for part, rows in [*tables.items(), ("packages", data.get("packages", {}))]:
        yield from table(file, part if part != "packages" else "", rows)
    for part, one in [("", pixi), *pixi.get("feature", {}).items()]:
        for key in ("dependencies", "pypi-dependencies"):
            yield from table(file, part, one.get(key, {}))


def of_yaml(file: str, text: str) -> Iterator[Pin]:
    """Yield those of an environment of conda, and of cog.yaml."""
    data = yaml.safe_load(text) or {}
    lines = [*(data.get("dependencies") or []), *((data.get("build") or {}).get("python_packages") or [])]
    for line in lines:
        for one in line.get("pip", []) if isinstance(line, dict) else [line]:
            plain = re.sub(r"^[\w-]+::", "", str(one))
            conda = re.fullmatch(r"([\w.-]+) ?=?=(\d[\w.*]*)(=\S+)?", plain)
            if not plain.startswith(("python=", "python>", "_", "lib")):
                yield from pin(file, "", f"{conda[1]}=={conda[2]}" if conda else plain)


def of_setup(file: str, text: str) -> Iterator[Pin]:
    """Yield those of setup.py that it has as a list of strings, and of setup.cfg."""
    if file.endswith(".cfg"):
        read = configparser.ConfigParser()
        read.read_string(text)
        for line in read.get("options", "install_requires", fallback="").splitlines():
            yield from pin(file, "", line)
        return
    for call in (node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.keyword)):
        if call.arg == "install_requires" and isinstance(call.value, ast.List):
            for one in call.value.elts:
                yield from pin(file, "", one.value if isinstance(one, ast.Constant) else "")


def of_lines(file: str, text: str) -> Iterator[Pin]:
    """Yield those of a list of requirements, of a Dockerfile's `pip install`, and of a script's header (PEP 723)."""
    if file.endswith(".py"):
        header = re.search(r"^# /// script\n((?:#.*\n)+?)# ///$", text, re.MULTILINE)
        found = tomllib.loads(re.sub(r"^# ?", "", header[1], flags=re.MULTILINE)) if header else {}
        lines = found.get("dependencies", [])
    elif "docker" in file.rpartition("/")[2].lower():
        installed = re.findall(r"pip3? install((?:[^&;\n\\]|\\\n|\\)*)", text)
        lines = [word for one in installed for word in re.sub(r"[\\\"']", " ", one).split()]
    else:
        lines = text.splitlines()
    for line in lines:
        yield from pin(file, "", line)


READERS = {
    r"(pyproject|pixi)\.toml|Pipfile": of_toml,
    r"(environment[-_.\w]*|cog)\.ya?ml": of_yaml,
    r"setup\.(py|cfg)": of_setup,
    r"[-_\w]*requirements?[-_.\w]*\.(txt|in)|requirements/.*\.(txt|in)|[-\w.]*Dockerfile[-\w.]*|.*\.py": of_lines,
}


def read(folder: Path, command: str) -> tuple[list[Pin], dict[str, str]]:
    """Return the pins of a project, and the text of the files that were read."""
    script = next((word for word in shlex.split(command) if word.endswith(".py")), "")
    near = {Path(), *Path(script).parents}
    named = subprocess.run(["git", "ls-files", "."], cwd=folder, capture_output=True, text=True).stdout.splitlines()
    pins: list[Pin] = []
    texts = {}
    for file in map(Path, named):
        reader = next(
            (one for name, one in READERS.items() if re.fullmatch(name, file.name) or re.fullmatch(name, str(file))),
            None,
        )
        close = file.parent in near or (file.parent.name in FOLDERS and len(file.parts) == 2)
        if not reader or not close or APART.search(str(file)) or not (folder / file).is_file():
            continue
        try:
            text = (folder / file).read_text(encoding="utf-8")
            pins += reader(str(file), text)
        except (ValueError, SyntaxError, yaml.YAMLError, configparser.Error, AttributeError):
            continue
        if file.suffix != ".py" or file.name == "setup.py":
            texts[str(file)] = text
    return [one for one in dict.fromkeys(pins) if not APART.search(one.part)], texts


def taken(config: Mapping[str, Any], texts: Mapping[str, str]) -> tuple[set[str], set[str], list[str]]:
    """Return the files and parts that trainyard.yaml takes, and the requirements that it has itself."""
    wanted = config.get("requirements")
    rows = wanted if isinstance(wanted, list) else [wanted] if wanted else ["setup.py", "setup.cfg", "pyproject.toml"]
    files, parts, own = set(), {""}, []
    for row in rows:
        if isinstance(row, dict):
            files.add(str(row.get("file", "")))
            parts |= {*row.get("extras", []), *row.get("groups", [])}
            own += row.get("packages", [])
        elif row in texts or re.fullmatch(r"\S+\.(lock|txt|in|toml|py|cfg|ya?ml)|Pipfile\S*", row):
            files.add(row)
        else:
            own.append(row)
    if any(name.endswith(".lock") for name in files):
        files |= {"pyproject.toml", "Pipfile", "pixi.toml"}
    for name in list(files):
        files |= {str(Path(name).parent / one) for one in re.findall(r"^-r\s*(\S+)", texts.get(name, ""), re.MULTILINE)}
    return files, parts, own


def lost(
    pins: Sequence[Pin], config: Mapping[str, Any], texts: Mapping[str, str], said: str, versions: Mapping[str, str]
) -> list[str]:
    """Return the pins that are lost in silence; ``versions`` are those of the lock, by name."""
    files, parts, own = taken(config, texts)
    lines = [line for line in said.splitlines() if "WARNING" in line]
    has = {(one.name, one.versions) for text in own for one in pin("", "", text)}
    has |= {(one.name, one.versions) for one in pins if one.file in files and one.part in parts}
    found = []
    for one in pins:
        locked, here = versions.get(one.name), one.file in files and one.part in parts
        if (one.name, one.versions) in has and (locked is None or SpecifierSet(one.versions).contains(locked, True)):
            continue
        words = {one.name, one.name.replace("-", "_"), *([] if here else [one.part or one.file])}
        if not any(re.search(rf"(?<![\w-]){re.escape(word)}(?![\w-])", line) for word in words for line in lines):
            where = f"{one.file} {one.part}".strip()
            found.append(f"{where}: {one.name}{one.versions}" + (f", and {locked} is locked" if here else ""))
    return found


def unsaid(texts: Mapping[str, str], target: str, said: str) -> list[str]:
    """Return the files whose wish of CUDA no line names, while the target is for CPUs."""
    if re.search(r"gpu|cuda", target):
        return []
    lines = [line for line in said.splitlines() if re.search(r"CUDA|GPU|CPU|not read", line)]
    bare = {file: re.sub(r"(?m)(^|\s)#.*$", "", text) for file, text in texts.items()}
    wishes = {file: match[0].strip() for file, text in bare.items() if (match := WISH.search(text))}
    return [f"{file}: {wish}" for file, wish in wishes.items() if not any(file in line for line in lines)]


def untrue(roots: Sequence[Path], listed: Mapping[str, set[str]], locked: set[str], said: str) -> list[str]:
    """Return the lines about imports that folders of modules, ``listed`` names by file, or the lock disprove."""
    modules = {path.name.removesuffix(".py") for root in roots for path in [*root.glob("*.py"), *root.glob("*/")]}
    found = []
    for line in dict.fromkeys(said.splitlines()):
        if about := IMPORT.match(line):
            name, added = canonicalize_name(about[2]), canonicalize_name(about[4] or "")
            names = listed.get(about[3], set()) if about[3] else set().union(*listed.values())
            if about[2] in modules or name in names or (name in locked and name != added):
                found.append(line.removeprefix("WARNING: "))
    return found


def lists(config: Mapping[str, Any]) -> str:
    """Return which lists trainyard.yaml takes, in words."""
    wanted = config.get("requirements")
    rows = wanted if isinstance(wanted, list) else [wanted] if wanted else []
    words = [str(row["file"]) if isinstance(row, dict) else str(row) for row in rows]
    return ", ".join(words) if len(words) < 4 else f"{len(words)} packages"
