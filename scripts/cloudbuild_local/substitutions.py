"""Substitutions of a cloudbuild.yaml: ``$NAME`` and ``${NAME}`` in its strings, and their values.

The rules for references are those of subst/subst.go of https://github.com/GoogleCloudPlatform/cloud-build-local. With
`options.dynamicSubstitutions`, values may refer to other substitutions and have bash's parameter expansions
(https://cloud.google.com/build/docs/configuring-builds/use-bash-and-bindings-in-substitutions), with the meaning that
bash gives them (https://www.gnu.org/software/bash/manual/html_node/Shell-Parameter-Expansion.html).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from trainyard.common.errors import UserError

#: Substitutions that Cloud Build sets; those of triggers are empty in a submitted build
#: (https://cloud.google.com/build/docs/configuring-builds/substitute-variable-values).
BUILT_IN = ("PROJECT_ID", "PROJECT_NUMBER", "BUILD_ID", "LOCATION", "TRIGGER_NAME", "TRIGGER_BUILD_CONFIG_PATH",
            "COMMIT_SHA", "REVISION_ID", "SHORT_SHA", "REPO_NAME", "REPO_FULL_NAME", "BRANCH_NAME", "TAG_NAME",
            "REF_NAME", "SERVICE_ACCOUNT", "SERVICE_ACCOUNT_EMAIL")  # fmt: skip

#: Built-in substitutions that a submit may set: validBuiltInSubstitutions of validate/validate.go of cloud-build-local,
#: and `gcloud builds submit --help`.
OVERRIDABLE = ("REPO_NAME", "BRANCH_NAME", "TAG_NAME", "REVISION_ID", "COMMIT_SHA", "SHORT_SHA")

#: What the triggers for pull requests of GitHub give besides (the same page).
PULL_REQUEST = ("_HEAD_BRANCH", "_BASE_BRANCH", "_HEAD_REPO_URL", "_PR_NUMBER")

#: The value of a substitution that is not known before a trigger gives it: no name has its characters, and a part of it
#: remains in what an expansion makes of it.
UNKNOWN = "\0" * 100

_KEY = r"[A-Z_][A-Z0-9_]*"
#: `$$`, `$NAME`, `${NAME}`; other text after `$` has no meaning without dynamic substitutions.
_REFERENCE = re.compile(rf"\$\$|\$({_KEY})|\$\{{({_KEY})\}}")
#: The same, and `${NAME` or `${#NAME` before a parameter expansion.
_MENTION = re.compile(rf"\$\$|\$({_KEY})|\$\{{#?({_KEY})")

#: Name -> value; None for a name that is not set.
Lookup = Callable[[str], str | None]


def pairs(text: str, option: str) -> dict[str, str]:
    """Parse ``A=b,C=d``. As in gcloud, ``^:^A=b:C=d,e`` sets another delimiter
    (https://cloud.google.com/sdk/gcloud/reference/topic/escaping).

    Raises:
        UserError: an entry has no ``=``.
    """
    delimiter = ","
    if text.startswith("^") and text.count("^") >= 2:
        _, delimiter, text = text.split("^", 2)
    found = {}
    for entry in filter(None, text.split(delimiter)):
        key, equals, value = entry.partition("=")
        if not equals:
            raise UserError(f"'{option}': {entry!r} is not NAME=VALUE")
        found[key] = value
    return found


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
    """Names to which a part of a configuration refers by ``$NAME`` or ``${NAME}``."""
    return {match[1] or match[2] for text in strings(node) for match in _REFERENCE.finditer(text)} - {None}


def mentioned(node: object) -> set[str]:
    """The names of :func:`used`, and those in parameter expansions such as ``${NAME:-x}``."""
    return {match[1] or match[2] for text in strings(node) for match in _MENTION.finditer(text)} - {None}


def not_given(build: Mapping[str, Any]) -> dict[str, str]:
    """Return :data:`UNKNOWN` for each substitution without a value, or with one of the event (``$(body.ref)``)."""
    given: Mapping[str, str] = build.get("substitutions") or {}
    names = [*given, *(name for name in mentioned(build) if name.startswith("_"))]
    return {name: UNKNOWN for name in names if not given.get(name) or "$(" in given[name]}


def substitute(text: str, values: Mapping[str, str], *, dynamic: bool = False) -> str:
    """``text`` with ``$NAME`` and ``${NAME}`` replaced and ``$$`` made ``$``; undefined names are empty.

    Args:
        dynamic: whether parameter expansions are applied; otherwise ``${NAME:-x}`` is literal text.
    Raises:
        UserError: an expansion requires a value that is not set: ``${NAME:?message}``.
    """
    if dynamic:
        return _Expansion(text, values.get).text()
    return _REFERENCE.sub(lambda match: "$" if match[0] == "$$" else values.get(match[1] or match[2], ""), text)


def resolve(given: Mapping[str, str], built_in: Mapping[str, str], *, dynamic: bool) -> dict[str, str]:
    """The values of all substitutions.

    Args:
        given: those of the file, overridden by the user's.
        dynamic: whether values may refer to other substitutions and have parameter expansions.
    Raises:
        UserError: they refer to each other in a cycle, or an expansion requires a value that is not set.
    """
    values = dict(built_in) | dict(given)
    if not dynamic:
        return values
    done: dict[str, str] = {name: value for name, value in built_in.items() if name not in given}

    def value(name: str, above: tuple[str, ...] = ()) -> str | None:
        if name in done or name not in values:
            return done.get(name)
        if name in above:
            raise UserError(f"substitutions refer to each other in a cycle: {' -> '.join((*above, name))}")
        done[name] = _Expansion(values[name], lambda other: value(other, (*above, name))).text()
        return done[name]

    for name in values:
        value(name)
    return {name: done[name] for name in values}


def replace_in(node: Any, values: Mapping[str, str], *, dynamic: bool = False) -> Any:
    """A part of a configuration with :func:`substitute` applied to its strings."""
    if isinstance(node, str):
        return substitute(node, values, dynamic=dynamic)
    if isinstance(node, dict):
        return {key: replace_in(entry, values, dynamic=dynamic) for key, entry in node.items()}
    if isinstance(node, list):
        return [replace_in(entry, values, dynamic=dynamic) for entry in node]
    return node


# --- parameter expansions --------------------------------------------------------------------------------------------

#: A word of an expansion: its characters, and whether each is quoted. Quoted characters have no meaning in patterns.
_Word = list[tuple[str, bool]]

_EXPANSION = re.compile(rf"\$\{{(#?)({_KEY})")
_OPERATOR = re.compile(r":[-=+?]|[-=+?]|\^\^|\^|,,|,|##|#|%%|%|//|/#|/%|/|:")


class _Expansion:
    """Expands references and parameter expansions in one text, from left to right."""

    def __init__(self, text: str, lookup: Lookup) -> None:
        self._text, self._lookup = text, lookup
        self._at = 0

    def text(self) -> str:
        """The whole text, expanded."""
        found = ""
        while self._at < len(self._text):
            found += self._reference() if self._text[self._at] == "$" else self._take(1)
        return found

    def _take(self, count: int) -> str:
        self._at += count
        return self._text[self._at - count : self._at]

    def _reference(self) -> str:
        """What starts with the ``$`` here, expanded; a ``$`` without meaning is itself."""
        match = _REFERENCE.match(self._text, self._at)
        if match:
            self._at = match.end()
            return "$" if match[0] == "$$" else self._lookup(match[1] or match[2]) or ""
        start, match = self._at, _EXPANSION.match(self._text, self._at)
        # Another name is a variable of a shell, such as ${HOME:-/root}: it stays as it is.
        if match and (match[2].startswith("_") or match[2] in BUILT_IN or self._lookup(match[2]) is not None):
            self._at = match.end()
            expanded = self._length(match[2]) if match[1] else self._expanded(match[2])
            if expanded is not None:
                return expanded
        self._at = start
        return self._take(1)

    def _length(self, name: str) -> str | None:
        """``${#NAME}``."""
        return str(len(self._lookup(name) or "")) if self._take(1) == "}" else None

    def _expanded(self, name: str) -> str | None:
        """A parameter expansion, from behind its name; None if this is none."""
        match = _OPERATOR.match(self._text, self._at)
        if not match:
            return None
        self._at = match.end()
        operator = match[0]
        first = self._word("/}" if operator.startswith("/") else ":}" if operator == ":" else "}")
        second = None
        if first is not None and self._text[self._at] != "}":
            self._at += 1
            second = self._word("}")
        if first is None or self._at >= len(self._text):
            return None
        self._at += 1
        return _apply(operator, name, self._lookup(name), first, second)

    def _word(self, ends: str) -> _Word | None:
        """The word up to one of ``ends``, which is not consumed; None if the text ends before."""
        found: _Word = []
        quote = ""
        while self._at < len(self._text):
            character = self._text[self._at]
            if not quote and character in ends:
                return found
            if character == "$" and quote != "'":
                found += [(one, bool(quote)) for one in self._reference()]
            elif character == "\\" and quote != "'" and self._at + 1 < len(self._text):
                found.append((self._take(2)[1], True))
            elif character in "'\"" and quote in ("", character):
                quote = "" if quote else character
                self._at += 1
            else:
                found.append((self._take(1), bool(quote)))
        return None


def _plain(word: _Word | None) -> str:
    return "".join(character for character, _ in word or [])


def _apply(operator: str, name: str, value: str | None, first: _Word, second: _Word | None) -> str | None:
    """The result of an expansion; None if its words are invalid.

    Raises:
        UserError: ``${NAME:?word}`` of a name without a value.
    """
    kind = operator.lstrip(":")
    if kind and kind in "-=+?":
        missing = not value if operator.startswith(":") else value is None
        if kind == "+":
            return "" if missing else _plain(first)
        if missing and kind == "?":
            raise UserError(f"substitution {name}: {_plain(first) or 'it has no value'}")
        return _plain(first) if missing else value or ""
    value = value or ""
    if operator == ":":
        return _substring(value, _plain(first), None if second is None else _plain(second))
    if operator[0] in "^,":
        changed = str.upper if operator[0] == "^" else str.lower
        pattern = _pattern(first) if first else re.compile(".", re.DOTALL)
        reach = len(value) if len(operator) == 2 else 1
        return "".join(changed(one) if pattern.fullmatch(one) else one for one in value[:reach]) + value[reach:]
    if operator[0] in "#%":
        return _trimmed(value, operator, _pattern(first))
    return _replaced(value, operator, first, _plain(second))


def _pattern(word: _Word) -> re.Pattern[str]:
    """A regular expression for a shell pattern with ``*``, ``?`` and ``[...]``."""
    found, at = "", 0
    while at < len(word):
        character, quoted = word[at]
        at += 1
        if quoted or character not in "*?[":
            found += re.escape(character)
        elif character == "*":
            found += ".*"
        elif character == "?":
            found += "."
        else:
            end = next((other for other in range(at + 1, len(word)) if word[other] == ("]", False)), None)
            if end is None:
                found += re.escape(character)
                continue
            inner = "".join(re.escape(one) if is_quoted or one in "\\[^" else one for one, is_quoted in word[at:end])
            negated = word[at][0] in "!^" and not word[at][1]
            found += f"[^{inner[1 if word[at][0] == '!' else 2 :]}]" if negated else f"[{inner}]"
            at = end + 1
    try:
        return re.compile(found, re.DOTALL)
    except re.error:  # such as the range z-a, which matches nothing
        return re.compile(r"(?!)")


def _trimmed(value: str, operator: str, pattern: re.Pattern[str]) -> str:
    """``#``, ``##``: without the shortest or longest matching prefix; ``%``, ``%%``: suffix."""
    places = range(len(value) + 1)
    prefix, longest = operator[0] == "#", len(operator) == 2
    for place in reversed(places) if prefix == longest else places:
        part = value[:place] if prefix else value[place:]
        if pattern.fullmatch(part):
            return value[place:] if prefix else value[:place]
    return value


def _replaced(value: str, operator: str, first: _Word, new: str) -> str:
    """``/``: the first match replaced; ``//``: all; ``/#`` and ``/%``: only a prefix or suffix."""
    pattern = _pattern(first).pattern
    if operator in ("/#", "/%"):
        anchored = rf"\A(?:{pattern})" if operator == "/#" else rf"(?:{pattern})\Z"
        return re.sub(anchored, lambda _: new, value, count=1, flags=re.DOTALL)
    if not first or not value:
        return value
    found = re.compile(pattern, re.DOTALL).finditer(value)
    end, result = 0, ""
    for match in found:
        if match.start() == match.end():
            continue
        result += value[end : match.start()] + new
        end = match.end()
        if operator == "/":
            break
    return result + value[end:]


def _substring(value: str, offset: str, length: str | None) -> str | None:
    """``:offset`` or ``:offset:length``; negative numbers count from the end."""
    try:
        start, count = int(offset.strip() or "0"), None if length is None else int(length.strip() or "0")
    except ValueError:
        return None
    start = start + len(value) if start < 0 else start
    if start < 0 or start > len(value):
        return ""
    end = len(value) if count is None else start + count if count >= 0 else len(value) + count
    return value[start:end] if end >= start else None
