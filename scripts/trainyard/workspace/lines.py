"""Requirements with the file and line that they are written in."""

from __future__ import annotations

import ast
import re
import warnings
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Literal
from urllib.parse import unquote

from packaging.markers import Marker
from packaging.requirements import InvalidRequirement, Requirement
from packaging.utils import canonicalize_name

from trainyard.common import settings
from trainyard.common.errors import UserError
from trainyard.spec import markers, yaml_source
from trainyard.spec.yaml_source import relative

#: ``user:password@`` of a URL, also with a password that has a ``/``; not ``host:443/path@`` of a revision.
_USERINFO = re.compile(r"(?<=://)(?:[^/?#\s]+|[^/@:\[\s]*:(?!\d{1,5}[/?#])[^@\s]*)@")

#: The query of a URL, whose end a quote or bracket also is.
_QUERY = re.compile(r"(://[^\s?#\"'`<>]*)\?[^\s#\"'`<>]*")

#: ``${NAME}``, which pip and uv replace by the environment variable:
#: https://pip.pypa.io/en/stable/reference/requirements-file-format/#using-environment-variables
_VARIABLE = re.compile(r"\$\{([A-Z0-9_]+)\}")

#: The marker of an extra, with its name in quotes.
OF_EXTRA = r"""\bextra\s*==\s*("[^"]*"|'[^']*')"""

#: What makes a requirement a path. A PEP 508 name has none of it.
_PATH = re.compile(r"^(\.{1,2}(\[|$)|\.{0,2}/|file:|[^@;\s\[]+/)|\.(whl|zip|tar\.gz|tgz|tar\.bz2|tar\.xz)(\[|$)")


#: What an index is for uv: ``default`` replaces the Python Package Index, ``extra`` is asked before it, ``explicit`` is
#: for packages of ``[tool.uv.sources]`` alone, ``flat`` is a page of links.
Kind = Literal["default", "extra", "explicit", "flat"]


def text_of(path: Path) -> str:
    """The text of a file; empty if it cannot be read as UTF-8."""
    try:
        return yaml_source.text(path)
    except UserError:
        return ""


def is_script(name: str) -> bool:
    """Return whether a file of ``requirements`` is a script, whose header lists them: a setup.py is a project's."""
    return name.endswith(".py") and Path(name).name != "setup.py"


def syntax_tree(path: Path) -> ast.Module | None:
    """Return what a Python file consists of; None if it cannot be read, or this Python cannot parse it."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # SyntaxWarning of the user's strings
            return ast.parse(yaml_source.content(path))
    except (UserError, SyntaxError, ValueError, RecursionError, MemoryError):  # the last two of deep nesting
        return None


def syntax_error(path: Path) -> str:
    """Return why this Python cannot run a file, ``train.py:3: expected ':'``; empty if it can, or cannot read it."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            compile(yaml_source.content(path), str(path), "exec", dont_inherit=True)
    except SyntaxError as error:
        return f"{relative(path)}{f':{error.lineno}' if error.lineno else ''}: {error.msg}"
    except (UserError, ValueError, RecursionError, MemoryError):
        pass
    return ""


def line_with(file: Path, *words: str) -> int | None:
    """Return the number of the first line of a file with one of ``words``; None if none has."""
    lines = yaml_source.text(file, errors="replace").splitlines()
    return next((number for number, line in enumerate(lines, 1) if any(word in line for word in words)), None)


def where(file: Path, word: str) -> str:
    """Return ``pyproject.toml:12``, the first line of a file with ``word``; the file alone if none has it."""
    number = line_with(file, word)
    return f"{relative(file)}:{number}" if number else relative(file)


def without_userinfo(url: str) -> str:
    """A URL without the user name and password that it may contain."""
    return _USERINFO.sub("", url)


def userinfo(url: str) -> tuple[str, str]:
    """Return the user name and password of a URL, decoded; empty where it has none."""
    found = _USERINFO.search(url)
    user, _, password = (found[0][:-1] if found else "").partition(":")
    return unquote(user), unquote(password)


def without_credentials(text: str) -> str:
    """Return a text for messages: its URLs without user names, passwords and queries, which may be signatures."""
    return _QUERY.sub(r"\1", without_userinfo(text))


def expanded(text: str, where: str) -> str:
    """``text`` with ``${NAME}`` replaced by environment variables.

    Raises:
        UserError: one is not set.
    """

    def value(match: re.Match[str]) -> str:
        found = settings.standard_variable(match[1])
        if not found:
            raise UserError(f"{where}: the environment variable {match[1]} is not set")
        return found

    return _VARIABLE.sub(value, text)


@dataclass(frozen=True)
class Line:
    """A requirement, or another value, and where it is written.

    Attributes:
        text: as written, without options.
        number: of its line, from 1.
        hashes: SHA-256 of the files that it allows, or others such as ``sha512:...``; empty if it allows all.
    """

    text: str = field(repr=False)  # may contain credentials
    file: Path
    number: int
    hashes: frozenset[str] = frozenset()

    @property
    def where(self) -> str:
        """``requirements.txt:3``."""
        return f"{relative(self.file)}:{self.number}"

    @property
    def shown(self) -> str:
        """The text without credentials; only its beginning if it is long."""
        return without_credentials(self.text)[:200]

    def with_marker(self, marker: str) -> Line:
        """Return the requirement with a marker besides that which it may have."""
        requirement = Requirement(self.text)
        requirement.marker = Marker(f"({requirement.marker}) and ({marker})" if requirement.marker else marker)
        return replace(self, text=str(requirement))

    @cached_property
    def requirement(self) -> Requirement:
        """The text as PEP 508 requirement.

        Raises:
            UserError: it is none.
        """
        try:
            return markers.requirement(self.text)
        except InvalidRequirement as error:
            reason = str(error).splitlines()[0]
            raise UserError(f"{self.where}: {self.shown!r} is not a requirement ({reason})") from None

    @property
    def name(self) -> str:
        """Canonical name of the package."""
        return canonicalize_name(self.requirement.name)


@dataclass(frozen=True)
class Source:
    """A requirement that names a git repository, a folder or a file instead of a version of an index.

    Attributes:
        line: where it is written.
        location: ``git+https://host/repository@revision#subdirectory=x``, an http(s) address, or an absolute path.
            It may contain credentials.
        name: canonical name; empty if only its metadata says.
        extras: that are asked for.
        marker: PEP 508 marker; empty if there is none.
        hashes: those of the line, and of the fragment of an address.
    """

    line: Line
    location: str = field(repr=False)
    name: str = ""
    extras: tuple[str, ...] = ()
    marker: str = ""
    hashes: frozenset[str] = frozenset()

    @property
    def shown(self) -> str:
        """The location without credentials, for messages."""
        return without_credentials(self.location)

    def with_marker(self, marker: str) -> Source:
        """Return the requirement with a marker besides that which it may have."""
        return replace(self, marker=f"({self.marker}) and ({marker})" if self.marker else marker)

    @property
    def is_path(self) -> bool:
        """Whether it is a file or folder of this machine."""
        return "://" not in self.location


@dataclass
class Found:
    """What files of requirements say, in the order of their lines.

    Attributes:
        options: resolver settings, by their names in uv's ``[tool.uv]``.
        addresses: kind and address of indexes that a requirements file names.
        requires_python: versions of Python that a script or a lock is for.
        require_hashes: place of the option ``--require-hashes``; empty without it.
        index_of: canonical name -> name of the index that ``[tool.uv.sources]`` takes it from.
    """

    lines: list[Line] = field(default_factory=list)
    constraints: list[Line] = field(default_factory=list)
    overrides: list[Line] = field(default_factory=list)
    excludes: list[str] = field(default_factory=list)
    sources: list[Source] = field(default_factory=list)
    options: dict[str, Any] = field(default_factory=dict)
    addresses: list[tuple[Kind, Line]] = field(default_factory=list)
    index_of: dict[str, str] = field(default_factory=dict)
    requires_python: list[Line] = field(default_factory=list)
    require_hashes: str = ""


def of_any_extra(text: str) -> str:
    """Return a requirement of METADATA with a marker that always holds in the place of ``extra == ...``."""
    return re.sub(OF_EXTRA, "python_version > '0'", text)


def is_direct(text: str) -> bool:
    """Whether a requirement is a bare URL or path, as requirements files allow, instead of a PEP 508 requirement."""
    return "://" in text.split(" ")[0] or bool(_PATH.search(text.split(" ")[0]))


def parse_direct(line: Line, text: str) -> Source:
    """A bare URL or path, such as ``./libs/x[extra]`` or ``git+https://host/r@v1#egg=name``.

    Raises:
        UserError: a variable of its text is not set.
    """
    body, _, marker = text.partition(" ;")
    body, extras = _extras(body.strip())
    location, _, fragment = body.partition("#")
    name = ""
    parts = dict(part.partition("=")[::2] for part in fragment.split("&"))
    if egg := parts.get("egg"):
        egg, more = _extras(egg)
        name, extras = canonicalize_name(egg), extras or more
    subdirectory = f"#subdirectory={parts['subdirectory']}" if "subdirectory" in parts else ""
    where = _location(line, location) + subdirectory
    return Source(line, where, name, extras, marker.strip(), line.hashes | _hashes(body))


def parse_reference(line: Line) -> Source:
    """A PEP 508 requirement with an address, such as ``name[extra] @ git+https://host/r@v1``.

    Raises:
        UserError: a variable of its text is not set.
    """
    wanted = line.requirement
    location, extras = _location(line, wanted.url or ""), tuple(sorted(wanted.extras))
    return Source(line, location, line.name, extras, str(wanted.marker or ""), line.hashes | _hashes(location))


def _hashes(address: str) -> frozenset[str]:
    """Return the hashes of an address: https://pip.pypa.io/en/stable/topics/secure-installs/#hash-checking-mode."""
    found = re.findall(r"[#&](md5|sha1|sha224|sha256|sha384|sha512)=([0-9a-f]+)", address.lower())
    return frozenset(f"{kind}:{sha}".removeprefix("sha256:") for kind, sha in found)


def _extras(text: str) -> tuple[str, tuple[str, ...]]:
    match = re.fullmatch(r"(.+)\[([^\]]*)\]", text)
    if not match:
        return text, ()
    return match[1], tuple(sorted(canonicalize_name(one) for one in match[2].split(",") if one.strip()))


def _location(line: Line, text: str) -> str:
    text = expanded(text, line.where)
    if text.startswith("file:"):
        text = re.sub(r"^file:(//(localhost)?(?=/))?", "", text)
    if re.match(r"[A-Za-z][A-Za-z0-9+.-]*://", text):
        return text
    if text.startswith("git+"):  # the scp form, git+git@host:path, has no scheme
        raise UserError(f"{line.where}: {line.shown!r}: write the address as 'git+ssh://git@host/path'")
    path, _, fragment = text.partition("#")
    absolute = str((line.file.parent / path).resolve())
    return absolute + (f"#{fragment}" if fragment else "")
