"""Read and write the ``trainyard.lock`` of a user's repository, which is beside its trainyard.yaml.

It has what an image is made from, for all its platforms and package indexes, as text; a target of the catalogue has a
:mod:`trainyard.spec.pylock`. A header of comments says what the sections were resolved from; a section is a
requirements file with hashes and without addresses::

    # Written by 'trainyard lock'. Do not edit.
    # checksum: <SHA-256 of the sections>

    # [amd64.framework]
    torch==2.15.0 \\
        --hash=sha256:...  # 539136850 bytes

    # [amd64.requirements.pytorch-cpu]
    ...

A section's name has its architecture, its kind and, unless that is the default one, its package index:

``framework``, ``requirements``
    The big wheels, and everything else. An entry ends with the bytes of its file, from which the image's layers are
    made up; ``, added`` marks what a user's repository requires and its target does not.
``base``
    In place of ``framework`` if the base image holds the framework: its contents, in JSON.
``compiled``, ``build-requires``
    Source distributions that are compiled for the image, and what they are compiled with.

The header also says which Trainyard wrote it, and for which target, base and requirements.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path

from packaging.utils import canonicalize_name
from pydantic import ValidationError

from trainyard.common.installation import check_writable
from trainyard.spec import repository_files, yaml_source
from trainyard.spec.architectures import ARCHITECTURES
from trainyard.spec.framework import BaseContents
from trainyard.spec.yaml_source import relative

#: Name of the file.
FILE = "trainyard.lock"

#: Name of the package index of everything that no other index has.
DEFAULT = "default"

_TITLE = "# Written by 'trainyard lock'. Do not edit."
_SECTION = re.compile(r"^# \[([a-z0-9.-]+)\]$")
_NAME = re.compile(
    rf"({'|'.join(ARCHITECTURES)})\.(?:(framework|requirements)(?:\.([a-z0-9-]+))?|(compiled|build-requires|base))"
)
_DAY = re.compile(r"\d{8}")

#: The lines that git puts around the two sides of a conflict:
#: https://git-scm.com/docs/git-merge#_how_conflicts_are_presented
_CONFLICT = re.compile(r"^(<{7}|={7}|>{7})( |$)")

_PIN = re.compile(r"([A-Za-z0-9._-]+)(?:\[[^]]*\])?==([^ ;\\]+)")
_SIZE = re.compile(r"  # (\d+) bytes(, added)?$")


@dataclass(frozen=True)
class Pin:
    """An entry of a section.

    Attributes:
        name: canonical.
        hashes: SHA-256 of the files that are accepted, hexadecimal.
        size: bytes of the file that is installed, packed; 0 if the index does not say.
        added: whether a user's repository requires it and its target does not.
    """

    name: str
    version: str
    hashes: tuple[str, ...]
    size: int = 0
    added: bool = False

    def text(self) -> str:
        """Return the entry as a lock has it."""
        about = f"  # {self.size} bytes{', added' if self.added else ''}" if self.size or self.added else ""
        return f"{self.requirement()}{about}\n"

    def requirement(self) -> str:
        """Return the entry without its size, as an installer reads it."""
        return " \\\n    ".join([f"{self.name}=={self.version}", *(f"--hash=sha256:{sha}" for sha in self.hashes)])


def parse(text: str) -> list[Pin]:
    """Return the entries of a section.

    Raises:
        ValueError: one of them is not a pin with a hash.
    """
    pins = []
    for entry in re.sub(r"\\\n", " ", text).splitlines():
        if not entry.strip() or entry.startswith("#"):
            continue
        match = _PIN.match(entry)
        hashes = tuple(re.findall(r"--hash=sha256:([0-9a-f]+)", entry))
        if not match or not hashes:
            raise ValueError(f"not a hash-pinned requirement: {entry[:80]!r}")
        size = _SIZE.search(entry)
        pins.append(
            Pin(canonicalize_name(match[1]), match[2], hashes, int(size[1]) if size else 0, bool(size and size[2]))
        )
    return pins


def mark_added(pins: Iterable[Pin], of_target: Iterable[Pin]) -> list[Pin]:
    """Return the pins, each marked as added unless ``of_target`` has it with the same version and hashes."""
    shared = {(pin.name, pin.version, pin.hashes) for pin in of_target}
    return [replace(pin, added=(pin.name, pin.version, pin.hashes) not in shared) for pin in pins]


@dataclass(frozen=True)
class Section:
    """The name of a section.

    Attributes:
        arch: name of an architecture.
        kind: ``framework``, ``requirements``, ``base``, ``compiled`` or ``build-requires``.
        index: name of a package index.
    """

    arch: str
    kind: str
    index: str = DEFAULT

    def __str__(self) -> str:
        return f"{self.arch}.{self.kind}{'' if self.index == DEFAULT else f'.{self.index}'}"


@dataclass(frozen=True)
class Locked:
    """Give the pins of a lock for one platform and one package index.

    Attributes:
        texts: kind of a section -> its text.
    """

    texts: Mapping[str, str]

    def text(self, kind: str) -> str:
        """Return a section; empty if there is none."""
        return self.texts.get(kind, "")

    @cached_property
    def framework(self) -> list[Pin]:
        """The framework's wheels; none if the base image holds it."""
        return parse(self.text("framework"))

    @cached_property
    def requirements(self) -> list[Pin]:
        """Everything that the framework does not need by itself."""
        return parse(self.text("requirements"))

    @cached_property
    def base(self) -> BaseContents | None:
        """Contents of a base image that holds the framework."""
        return BaseContents.model_validate(json.loads(self.texts["base"])) if "base" in self.texts else None

    @cached_property
    def versions(self) -> dict[str, str]:
        """Canonical name -> version of every package that the image has."""
        pins = [*self.framework, *self.requirements, *parse(self.text("compiled"))]
        return (dict(self.base.packages) if self.base else {}) | {pin.name: pin.version for pin in pins}


@dataclass(frozen=True)
class Origin:
    """Record the inputs of the lock of a user's repository.

    Attributes:
        version: of the Trainyard that wrote it, ``contents``: hash of what that one contributes to an image.
        target: name of the target that the image extends.
        base: reference of the base image, with a digest where a registry gave one.
        inputs: SHA-256 of what was resolved.
        framework: requirements for which the framework is not that of the target; empty if it is.
    """

    version: str
    contents: str
    target: str
    base: str
    inputs: str
    framework: str = ""


@dataclass(frozen=True)
class Lock:
    """The content of a trainyard.lock.

    Attributes:
        day: when the versions of a nightly were chosen, as in 20261121 (UTC); empty for other images.
        origin: None for a target of the catalogue.
    """

    sections: Mapping[Section, str] = field(default_factory=dict)
    day: str = ""
    origin: Origin | None = None

    def of(self, arch: str, index: str = DEFAULT) -> Locked | None:
        """Return what the lock has for an architecture and an index; None if it was not locked for them."""
        return self._locked.get((arch, index))

    @cached_property
    def _locked(self) -> dict[tuple[str, str], Locked]:
        texts: dict[tuple[str, str], dict[str, str]] = {}
        for section, text in self.sections.items():
            texts.setdefault((section.arch, section.index), {})[section.kind] = text
        for (arch, _), own in texts.items():
            common = texts.get((arch, DEFAULT), {})
            own |= {kind: common[kind] for kind in ("compiled", "build-requires") if kind in common}
        return {key: Locked(own) for key, own in texts.items() if "requirements" in own}

    def indexes(self, arch: str) -> list[str]:
        """Return the names of the package indexes that an architecture is locked for, the default one first."""
        names = {one.index for one in self.sections if one.arch == arch and one.kind == "requirements"}
        return sorted(names, key=lambda name: (name != DEFAULT, name))

    def text(self) -> str:
        """Return the lock as it is written."""
        body = _body({str(section): text for section, text in self.sections.items()})
        facts: dict[str, str] = {}
        if self.origin:
            facts["trainyard"] = f"{self.origin.version} {self.origin.contents}"
            names = ("target", "base", "inputs", *(("framework",) if self.origin.framework else ()))
            facts |= {name: getattr(self.origin, name) for name in names}
        facts |= {"day": self.day} if self.day else {}
        facts["checksum"] = hashlib.sha256(body.encode()).hexdigest()
        return "\n".join([_TITLE, *(f"# {name}: {value}" for name, value in facts.items()), ""]) + body


@dataclass(frozen=True)
class Unreadable:
    """A lock that cannot be used.

    Attributes:
        reason: a line for the user, with the command that mends it.
        missing: whether there is no file.
    """

    reason: str
    missing: bool = False


def _body(texts: Mapping[str, str]) -> str:
    """Return the sections as a lock has them, of which the checksum is taken."""
    return "".join(f"\n# [{name}]\n{text}" for name, text in sorted(texts.items()))


def read(path: Path, command: str) -> Lock | Unreadable:
    """Return a lock, or why it cannot be used.

    Args:
        command: what writes the lock, such as ``trainyard lock cpu``.
    Raises:
        UserError: the file is not text that can be read.
    """
    if not os.path.lexists(path):
        return Unreadable(f"{relative(path)} is missing: run '{command}'", missing=True)
    try:
        return loads(yaml_source.text(path), command)
    except ValueError as error:
        return Unreadable(f"{relative(path)}{error}")


def check_no_conflict(text: str, command: str) -> None:
    """Check that a lock has no conflicts of a merge.

    Raises:
        ValueError: it has; the message goes on after the name of the file.
    """
    for number, line in enumerate(text.splitlines(), 1):
        if _CONFLICT.match(line):
            raise ValueError(f":{number}: conflicts of a merge: take one side, then run '{command}'")


def loads(text: str, command: str) -> Lock:
    """Return the lock in a text; see :func:`read`.

    Raises:
        ValueError: it has conflicts of a merge, or is not as ``trainyard lock`` wrote it; the message goes on after the
            name of the file.
    """
    check_no_conflict(text, command)
    lines = text.splitlines(keepends=True)
    start = next((number for number, line in enumerate(lines) if _SECTION.match(line.rstrip("\n"))), len(lines))
    head = (line.removeprefix("# ").strip().partition(": ") for line in lines[:start] if line.startswith("# "))
    facts = {name: value for name, _, value in head}
    version, _, contents = facts.get("trainyard", "").partition(" ")
    absent = [name for name in ("trainyard", "target", "base", "inputs", "checksum") if not facts.get(name)]
    if absent or not contents:
        name = absent[0] if absent else "trainyard"
        raise ValueError(f": no '# {name}:' line, so not a lock: run '{command}'")
    texts = _sections("".join(lines[start:]))
    if hashlib.sha256(_body(texts).encode()).hexdigest() != facts["checksum"]:
        raise ValueError(f": changed since 'trainyard lock' wrote it: restore it, or run '{command}' again")
    named = {name: facts.get(name, "") for name in ("target", "base", "inputs", "framework")}
    origin = Origin(version, contents, **named)
    try:
        lock = Lock({_section(name): section for name, section in texts.items()}, facts.get("day", ""), origin)
        _check(lock)
    except ValueError as error:
        by = f"written by another version of Trainyard{f' ({version})' if version else ''}"
        raise ValueError(f": {by} ({error}): run '{command}' again") from None
    return lock


def _section(name: str) -> Section:
    match = _NAME.fullmatch(name)
    if not match:
        raise ValueError(f"unknown section '{name}'")
    return Section(match[1], match[2] or match[4], match[3] or DEFAULT)


def _check(lock: Lock) -> None:
    """Check that each platform and index has what an image needs.

    Raises:
        ValueError: it does not; the message says what.
    """
    if lock.day and not _DAY.fullmatch(lock.day):
        raise ValueError(f"day '{lock.day}'")
    for arch, index in {(one.arch, one.index) for one in lock.sections}:
        locked = lock.of(arch, index)
        if locked is None or ("framework" in locked.texts) == ("base" in locked.texts):
            raise ValueError(f"no complete pair of sections for {arch}")
        try:
            _ = locked.versions
        except ValidationError as error:
            raise ValueError(str(error).splitlines()[0]) from None


def _sections(text: str) -> dict[str, str]:
    """Return name -> text of each section; the empty line before a section's name belongs to neither."""
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


def write(path: Path, lock: Lock) -> None:
    """Write a lock atomically.

    Raises:
        UserError: it is part of the installed package, or its folder cannot be written.
    """
    check_writable(path)
    repository_files.write(path.parent, path.name, lock.text())
