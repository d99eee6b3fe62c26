"""Read and write ``trainyard.lock``: the frozen closure of a user's image, which is committed beside trainyard.yaml.

It is text. A header of comments says what the sections were resolved from; each section is a requirements file with
hashes and without addresses::

    # Written by 'trainyard lock'. Do not edit.
    # trainyard: 0.1.0 1a2b3c4d
    # target: xla
    # base: docker.io/library/debian:12-slim@sha256:...
    # inputs: <SHA-256 of what was resolved>
    # checksum: <SHA-256 of the sections>

    # [framework]
    torch==2.9.1 \\
        --hash=sha256:...

The sections are ``framework`` and ``requirements``, the same two with ``.<index>`` for another package index, and
``compiled`` for source distributions and ``build-requires`` for what these are compiled with. If the base holds the
framework, ``base``, the record of its contents in JSON, takes the place of ``framework``. :func:`split` writes them as
the files that a build installs from.

These are the sections of linux/amd64. Those of another platform begin with its architecture, ``arm64.framework``: a
Trainyard that builds for amd64 alone refuses such a lock.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from trainyard.common.console import UserError
from trainyard.spec import workspace, yaml_source
from trainyard.spec.architectures import AMD64, ARCHITECTURES, Architecture
from trainyard.spec.workspace import Workspace
from trainyard.spec.yaml_source import relative

#: First line of every file that :func:`split` writes: that of the catalogue's locks, so that equal locks are one layer.
SPLIT_HEADER = "# Locked by `make lock`. Do not edit.\n"

_TITLE = "# Written by 'trainyard lock'. Do not edit."
_FACTS = ("trainyard", "target", "base", "inputs", "checksum")
_SECTION = re.compile(r"^# \[([a-z0-9.-]+)\]$")
_NAMES = re.compile(r"(framework|requirements)(\.[a-z0-9-]+)?|compiled|build-requires|base")
_AGAIN = "run 'trainyard lock'"

#: The lines that git puts around the two sides of a conflict:
#: https://git-scm.com/docs/git-merge#_how_conflicts_are_presented
_CONFLICT = re.compile(r"^(<{7}|={7}|>{7})( |$)")


@dataclass(frozen=True)
class WorkspaceLock:
    """The content of a trainyard.lock.

    Attributes:
        version: of the Trainyard that wrote it, ``contents``: hash of what that one contributes to an image.
        target: name of the target that the image extends.
        base: reference of the base image, with a digest where a registry gave one.
        inputs: SHA-256 of what was resolved.
        sections: name -> requirements with hashes, without a header; ``base``: JSON. Of all platforms, see
            :func:`section`.
    """

    version: str
    contents: str
    target: str
    base: str
    inputs: str
    sections: dict[str, str] = field(default_factory=dict)

    def of(self, architecture: Architecture) -> dict[str, str]:
        """See :func:`of_platform`."""
        return of_platform(self.sections, architecture)

    def text(self) -> str:
        """The lock as it is written."""
        body = _body(self.sections)
        facts = {
            "trainyard": f"{self.version} {self.contents}",
            "target": self.target,
            "base": self.base,
            "inputs": self.inputs,
            "checksum": hashlib.sha256(body.encode()).hexdigest(),
        }
        return "\n".join([_TITLE, *(f"# {name}: {facts[name]}" for name in _FACTS), ""]) + body


def section(name: str, architecture: Architecture) -> str:
    """What the section ``name`` of a platform is called in a lock."""
    return name if architecture == AMD64 else f"{architecture.name}.{name}"


def of_platform(sections: Mapping[str, str], architecture: Architecture) -> dict[str, str]:
    """The sections of one platform, by their names without its architecture; none if it is not locked."""
    found = {_platform_and_name(section): text for section, text in sections.items()}
    return {name: text for (owner, name), text in found.items() if owner == architecture}


def _platform_and_name(section: str) -> tuple[Architecture, str]:
    """The reverse of :func:`section`."""
    first, _, rest = section.partition(".")
    found = ARCHITECTURES.get(first, AMD64)
    return (found, section) if found == AMD64 else (found, rest)


def _complete(sections: Mapping[str, str]) -> bool:
    """Whether a platform has the sections that an image needs, and no unknown ones."""
    known = all(_NAMES.fullmatch(name) for name in sections)
    return known and "requirements" in sections and ("framework" in sections) != ("base" in sections)


def _body(sections: dict[str, str]) -> str:
    return "".join(f"\n# [{name}]\n{text}" for name, text in sorted(sections.items()))


def read(ws: Workspace) -> WorkspaceLock:
    """The lock of a workspace.

    Raises:
        UserError: it is missing, has conflicts of a merge, or is not as ``trainyard lock`` wrote it.
    """
    where = relative(ws.lock)
    if not os.path.lexists(ws.lock):
        raise UserError(f"{where} is missing: {_AGAIN}")
    text = yaml_source.text(ws.lock)
    lines = text.splitlines(keepends=True)
    for number, line in enumerate(lines, 1):
        if _CONFLICT.match(line):
            raise UserError(f"{where}:{number}: conflicts of a merge: take one side, then {_AGAIN}")
    start = next((number for number, line in enumerate(lines) if _SECTION.match(line.rstrip("\n"))), len(lines))
    head = (line.removeprefix("# ").strip().partition(": ") for line in lines[:start] if line.startswith("# "))
    facts = {name: value for name, _, value in head}
    missing = [name for name in _FACTS if not facts.get(name)]
    version, _, contents = facts.get("trainyard", "").partition(" ")
    if missing or not contents:
        raise UserError(f"{where}: no '# {(missing or ['trainyard'])[0]}:' line, so not a lock: {_AGAIN}")
    sections = _sections("".join(lines[start:]))
    if hashlib.sha256(_body(sections).encode()).hexdigest() != facts["checksum"]:
        raise UserError(f"{where}: changed since 'trainyard lock' wrote it: restore it, or {_AGAIN} again")
    lock = WorkspaceLock(version, contents, facts["target"], facts["base"], facts["inputs"], sections)
    platforms = {_platform_and_name(name)[0] for name in sections} or {AMD64}
    if not all(_complete(lock.of(one)) for one in platforms):
        raise UserError(f"{where}: written by another version of Trainyard ({version}): {_AGAIN} again")
    return lock


def _sections(text: str) -> dict[str, str]:
    """Name -> text of each section; the empty line before a section's name belongs to neither."""
    sections: dict[str, str] = {}
    name = ""
    for line in text.splitlines(keepends=True):
        match = _SECTION.match(line.rstrip("\n"))
        if match:
            sections[name] = sections.get(name, "").removesuffix("\n")
            name = match[1]
            sections[name] = ""
        else:
            sections[name] = sections.get(name, "") + line
    sections.pop("", None)
    return {name: text + "\n" if text and not text.endswith("\n") else text for name, text in sections.items()}


def write(ws: Workspace, lock: WorkspaceLock) -> None:
    """Write the lock of a workspace atomically.

    Raises:
        UserError: its folder cannot be written.
    """
    temporary = ws.lock.with_name(f".{workspace.LOCK}.new")
    try:
        temporary.write_text(lock.text(), encoding="utf-8")
        temporary.replace(ws.lock)
    except OSError as error:
        raise UserError(f"{relative(ws.lock)}: cannot be written ({error.strerror})") from None


def split(ws: Workspace, folder: Path, architecture: Architecture) -> list[Path]:
    """Write each section of a platform as ``<section>.lock`` into ``folder``, and remove those it has no longer.

    ``base`` is written as base.json. As in the catalogue, the names of other platforms than linux/amd64 end with the
    architecture: ``framework.arm64.lock``.

    Files that have their text already are left as they are. The paths of all sections.

    Raises:
        UserError: see :func:`read`.
    """
    end = ".lock" if architecture == AMD64 else f".{architecture.name}.lock"
    folder.mkdir(parents=True, exist_ok=True)
    wanted = {
        folder / ("base.json" if name == "base" else f"{name}{end}"): text if name == "base" else SPLIT_HEADER + text
        for name, text in read(ws).of(architecture).items()
    }
    for path in (*folder.glob(f"*{end}"), *folder.glob("base.json")):
        if path not in wanted and _NAMES.fullmatch(path.name.removesuffix(end).removesuffix(".json")):
            path.unlink()
    for path, text in wanted.items():
        if not path.is_file() or path.read_text(encoding="utf-8") != text:
            temporary = path.with_suffix(f"{path.suffix}.new")
            temporary.write_text(text, encoding="utf-8")
            temporary.replace(path)
    return sorted(wanted)
