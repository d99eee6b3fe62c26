"""Read requirements files in pip's format: https://pip.pypa.io/en/stable/reference/requirements-file-format/."""

from __future__ import annotations

import re
import tempfile
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.parse import unquote

from trainyard.common.errors import UserError, nearest
from trainyard.spec import yaml_source
from trainyard.spec.repository_files import git_root, inside, leads_out
from trainyard.workspace.lines import Found, Line, is_direct, parse_direct, parse_reference, without_credentials

#: Options of a requirement, after its text.
_OPTIONS = re.compile(r"\s+--(hash|config-settings?|global-option|install-option)\b.*")

#: An index on the line of a requirement, which pip does not read; :mod:`trainyard.workspace.torch_variant` does.
_INDEX_OF_LINE = re.compile(
    r"(?m)^([ \t]*[^-#\s].*?)[ \t]+(?:(?:--(?:extra-)?index-url|--find-links|--trusted-host|-[if])[= ]\S+[ \t]*)+$"
)

#: What pip takes as a hash: https://pip.pypa.io/en/stable/topics/secure-installs/#hash-checking-mode.
_HASH = re.compile(r"sha256:[0-9a-f]{64}|sha384:[0-9a-f]{96}|sha512:[0-9a-f]{128}")

#: A package from a file, as ``pip freeze`` writes all that conda has built:
#: https://packaging.python.org/en/latest/specifications/direct-url/
_BUILT = re.compile(r"[\w.-]+(?:\[[^]]*])?\s*@\s*file:(?://(?:localhost)?)?(/[^\s;#]+)")

#: Options that say nothing about the versions of a lock.
_WITHOUT_EFFECT = {"prefer_binary", "require_hashes", "features_enabled"}


def read(path: Path, found: Found, *, constraints: bool = False, above: tuple[Path, ...] = ()) -> None:
    """Add the contents of a requirements file, and of the files that it includes, to ``found``.

    Args:
        constraints: its lines constrain versions and ask for no package.
        above: the files that include it; the first may be another one of the repository that it is in.
    Raises:
        UserError: a line is not understood or has no place in an image; the file and line are named.
    """
    from pip_requirements_parser import RequirementsFile

    with tempfile.NamedTemporaryFile("w", encoding="utf-8", suffix=".txt") as copy:
        copy.write(_INDEX_OF_LINE.sub(r"\1", yaml_source.text(path)))
        copy.flush()
        parsed = RequirementsFile.from_file(copy.name, include_nested=False)
    if parsed.invalid_lines:
        first = parsed.invalid_lines[0]
        reason = " ".join(first.error_message.removeprefix("pip_requirements_parser: error: ").split())
        line = Line(first.line, path, first.line_number)
        raise UserError(f"{line.where}: {line.shown!r}: {without_credentials(reason)}")
    written = (one.requirement_line for one in parsed.requirements)
    _check_files([Line(one.line, path, one.line_number) for one in written], git_root((*above, path)[0].parent))
    entries: list[tuple[int, Any]] = [(one.requirement_line.line_number, one) for one in parsed.requirements]
    entries += [(one.requirement_line.line_number, one) for one in parsed.options]
    for number, entry in sorted(entries, key=lambda one: one[0]):
        text = entry.requirement_line.line.strip()
        hashes = [one.lower() for one in getattr(entry, "hash_options", ())]
        line = Line(text, path, number, frozenset(one.removeprefix("sha256:") for one in hashes))
        if wrong := [one for one in hashes if not _HASH.fullmatch(one)]:
            raise UserError(
                f"{line.where}: {wrong[0]!r} is no hash that pip takes: write sha256: and 64 hexadecimal digits"
            )
        if hasattr(entry, "options") and not hasattr(entry, "req"):
            found.require_hashes = line.where if "require_hashes" in entry.options else found.require_hashes
            for name, value in entry.options.items():
                _option(line, name, value, found, (*above, path))
        else:
            _requirement(line, found, constraints=constraints)


def _check_files(lines: Iterable[Line], top: Path) -> None:
    """Check that no line names a file of another machine, outside of the git repository ``top``."""
    built = [(line, _BUILT.match(line.text)) for line in lines]
    named = [(line, unquote(match[1]).partition("\0")[0]) for line, match in built if match]
    outside = [line for line, path in named if leads_out(Path(path), top)]
    if outside:
        more = f", as {len(outside) - 1} more line{'s do' if outside[2:] else ' does'}" if outside[1:] else ""
        raise UserError(
            f"{outside[0].where}: {outside[0].shown!r} names a file of the machine where 'pip freeze' ran{more}: write "
            f"the list there with 'pip list --format=freeze > {outside[0].file.name}'"
        )


def _requirement(line: Line, found: Found, *, constraints: bool) -> None:
    text = re.sub(r"^(-e|--editable)[\s=]+", "", line.text)
    line = replace(line, text=" ".join(_OPTIONS.sub("", text).split()))
    if is_direct(line.text):
        source = parse_direct(line, line.text)
    elif line.requirement.url:
        source = parse_reference(line)
    else:
        (found.constraints if constraints else found.lines).append(line)
        return
    if constraints:
        raise UserError(f"{line.where}: {line.shown!r}: a constraint is a version, not an address")
    found.sources.append(source)


def _option(line: Line, name: str, value: Any, found: Found, above: tuple[Path, ...]) -> None:
    """Apply an option line such as ``-r other.txt`` or ``--index-url URL``."""
    if name in ("requirements", "constraints"):
        for one in value:
            _include(line, one, found, above, constraints=name == "constraints")
    elif name == "index_url":
        found.addresses.append(("default", Line(value, line.file, line.number)))
    elif name == "extra_index_urls":
        found.addresses += [("extra", Line(one, line.file, line.number)) for one in value]
    elif name == "find_links":
        for one in value:
            if "://" not in one:
                raise UserError(
                    f"{line.where}: {line.shown!r}: a folder of this machine is no index of a build: "
                    "list its wheels, as in './wheels/x-1.0-py3-none-any.whl'"
                )
            found.addresses.append(("flat", Line(one, line.file, line.number)))
    elif name == "pre":
        found.options["prerelease"] = "allow"
    elif name == "trusted_hosts":
        found.options.setdefault("allow-insecure-host", []).extend(value)
    elif name in ("no_binary", "only_binary"):
        if name == "no_binary" and value != [":none:"]:
            raise UserError(
                f"{line.where}: {line.shown!r}: what is compiled is listed in trainyard.yaml under 'build:'"
            )
    elif name not in _WITHOUT_EFFECT:
        raise UserError(f"{line.where}: {line.shown!r} has no place in an image: remove it")


def _include(line: Line, name: str, found: Found, above: tuple[Path, ...], *, constraints: bool) -> None:
    if "://" in name:
        raise UserError(f"{line.where}: {line.shown!r}: download it and include the file")
    path = inside(line.file.parent / name, above[0].parent, line.where)
    if path in above:
        raise UserError(f"{line.where}: {line.shown!r} includes itself")
    if not path.is_file():
        beside = [one.name for one in path.parent.glob("*")] if path.parent.is_dir() else []
        raise UserError(f"{line.where}: no file {name!r}{nearest(path.name, beside)}")
    read(path, found, constraints=constraints, above=above)
