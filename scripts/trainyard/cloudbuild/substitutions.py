"""Substitutions of a cloudbuild.yaml: ``$NAME`` and ``${NAME}`` in its strings, and their values.

The rules for them are those of subst/subst.go of https://github.com/GoogleCloudPlatform/cloud-build-local.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from trainyard.console import UserError

#: Substitutions that Cloud Build sets; those of triggers are empty in a submitted build
#: (https://cloud.google.com/build/docs/configuring-builds/substitute-variable-values).
BUILT_IN = ("PROJECT_ID", "PROJECT_NUMBER", "BUILD_ID", "LOCATION", "TRIGGER_NAME", "TRIGGER_BUILD_CONFIG_PATH",
            "COMMIT_SHA", "REVISION_ID", "SHORT_SHA", "REPO_NAME", "REPO_FULL_NAME", "BRANCH_NAME", "TAG_NAME",
            "REF_NAME", "SERVICE_ACCOUNT", "SERVICE_ACCOUNT_EMAIL")  # fmt: skip

_KEY = r"[A-Z_][A-Z0-9_]*"
#: `$$`, `$NAME`, `${NAME}`; `${NAME<operator>...}` is a parameter expansion as in bash.
_REFERENCE = re.compile(rf"\$\$|\$({_KEY})|\$\{{({_KEY})([^}}]*)\}}")


def strings(node: object) -> Iterator[str]:
    """Every string in a part of a configuration."""
    if isinstance(node, str):
        yield node
    elif isinstance(node, dict):
        for value in node.values():
            yield from strings(value)
    elif isinstance(node, list):
        for value in node:
            yield from strings(value)


def used(node: object) -> set[str]:
    """Names of the substitutions that are used in a part of a configuration."""
    names = set()
    for text in strings(node):
        for match in _REFERENCE.finditer(text):
            names |= {match[1] or match[2]} - {None}
    return names


def substitute(text: str, values: Mapping[str, str]) -> str:
    """``text`` with ``$NAME`` and ``${NAME}`` replaced and ``$$`` made ``$``; undefined names are empty.

    Raises:
        UserError: a parameter expansion such as ``${NAME:-x}``, which Cloud Build supports and Trainyard does not.
    """

    def one(match: re.Match[str]) -> str:
        if match[0] == "$$":
            return "$"
        if match[3]:
            raise UserError(f"{match[0]}: parameter expansions are not supported; use ${{{match[2]}}}")
        return values.get(match[1] or match[2], "")

    return _REFERENCE.sub(one, text)


def resolve(given: Mapping[str, str], built_in: Mapping[str, str], *, dynamic: bool) -> dict[str, str]:
    """The values of all substitutions.

    Args:
        given: those of the file, overridden by the user's.
        dynamic: whether values may refer to other substitutions.
    Raises:
        UserError: they refer to each other in a cycle.
    """
    values = dict(built_in) | dict(given)
    if not dynamic:
        return values
    done: dict[str, str] = dict(built_in)

    def value(name: str, above: tuple[str, ...]) -> str:
        if name in done:
            return done[name]
        if name in above:
            raise UserError(f"substitutions refer to each other in a cycle: {' -> '.join((*above, name))}")
        inner = {key: value(key, (*above, name)) for key in used(values.get(name, "")) if key in values}
        done[name] = substitute(values[name], inner)
        return done[name]

    return {name: value(name, ()) for name in values}


def replace_in(node: Any, values: Mapping[str, str]) -> Any:
    """A part of a configuration with :func:`substitute` applied to its strings, except to scripts."""
    if isinstance(node, str):
        return substitute(node, values)
    if isinstance(node, dict):
        return {key: entry if key == "script" else replace_in(entry, values) for key, entry in node.items()}
    if isinstance(node, list):
        return [replace_in(entry, values) for entry in node]
    return node
