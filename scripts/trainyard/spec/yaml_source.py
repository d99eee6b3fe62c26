"""Read a user's files; YAML and JSON with values that know their lines, so that messages can name the line.

Documents are checked against a strict model.
"""

from __future__ import annotations

import codecs
import datetime
import functools
import itertools
import json
import os
import re
import stat
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, NoReturn, TypeVar, get_args, get_origin

from pydantic import BaseModel, BeforeValidator, ConfigDict, ValidationError
from ruamel.yaml import YAML
from ruamel.yaml.comments import CommentedMap, CommentedSeq
from ruamel.yaml.error import YAMLError
from ruamel.yaml.nodes import MappingNode, Node, ScalarNode

from trainyard.common.errors import UserError, nearest, one_line
from trainyard.common.settings import ROOT
from trainyard.spec.units import in_units

#: Path of a value in a document: keys and list positions from its top.
Location = tuple[int | str, ...]

M = TypeVar("M", bound=BaseModel)

#: Most bytes of a user's text file: settings, requirements, a lock, a job. A uv.lock has 2 kB for
#: each package.
LARGEST = 10 * 10**6

#: Most values of a document, those of an alias counted wherever it is used: a few lines of aliases of aliases would
#: fill the memory. To read as many took 9 s on a busy machine (2026-11-25).
_MOST_VALUES = 100_000

#: Deepest nesting of values, which readers of documents can follow within Python's limit of recursion.
_DEEPEST = 100

#: Most characters of a number; Python writes none of more than 4,300 digits:
#: https://docs.python.org/3/library/stdtypes.html#integer-string-conversion-length-limitation
LONGEST_NUMBER = 1000


def _date(value: object) -> object:
    """Return a date, which YAML has as such or as text."""
    try:
        return datetime.date.fromisoformat(str(value))
    except ValueError:
        raise ValueError(f"{value!r} is not a date: write it as 2026-12-31") from None


Date = Annotated[datetime.date, BeforeValidator(_date)]


class Strict(BaseModel):
    """Allow no unknown key, no silent conversion, no change after loading."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


def relative(path: Path) -> str:
    """Return a path as messages and generated files show it: one line, relative to the project or current folder."""
    found = path.resolve()
    for folder in (ROOT, Path.cwd()):
        if found.is_relative_to(folder):
            return one_line(found.relative_to(folder).as_posix())
    return one_line(str(path))


def content(path: Path) -> bytes:
    """Read the bytes of a user's file.

    Named pipes and devices, which could be waited for without end, are not read, nor more than :data:`LARGEST`.

    Raises:
        UserError: it cannot be read.
    """
    try:
        with open(path, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK)) as file:
            mode = os.fstat(file.fileno()).st_mode
            # The shell's <(command) is a pipe below /dev, whose writer exists.
            if not stat.S_ISREG(mode) and not (stat.S_ISFIFO(mode) and path.is_relative_to("/dev")):
                raise UserError(f"{relative(path)}: not a regular file")
            os.set_blocking(file.fileno(), True)
            if len(data := file.read(LARGEST + 1)) <= LARGEST:
                return data
    except OSError as error:
        raise UserError(f"{relative(path)}: {error.strerror}") from None
    raise UserError(f"{relative(path)}: more than {in_units(LARGEST)}, too much for a file of text: name another one")


def text(path: Path, errors: str = "strict") -> str:
    """Return the text of a file, whose lines end with a line feed; see :func:`content`, which raises errors, too.

    It is UTF-8, or UTF-16 that says so, as PowerShell writes and pip reads:
    https://pip.pypa.io/en/stable/reference/requirements-file-format/#encoding

    Args:
        errors: what becomes of bytes that are not UTF-8, as for :func:`open`.
    Raises:
        UserError: it is neither.
    """
    found = content(path)
    encoding = "utf-16" if found.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)) else "utf-8-sig"
    try:
        return re.sub("\r\n?", "\n", found.decode(encoding, errors))
    except UnicodeDecodeError:
        raise UserError(f"{relative(path)}: not UTF-8 text") from None


class Repeated(list[tuple[str, int, int]]):
    """The keys that a mapping has more than once: key, line of one that does not count, line of the one that does.

    Without this, they are an error. The first one counts, as for gcloud; with ``last`` the last one, as for kubectl.
    """

    last = False

    def drop(self, node: MappingNode) -> None:
        """Remove those that do not count from a node."""
        order, counts = -1 if self.last else 1, dict[object, Any]()
        for pair in node.value[::order]:
            key = pair[0]
            merge = not isinstance(key, ScalarNode) or key.tag == "tag:yaml.org,2002:merge"
            kept = counts.setdefault(id(key) if merge else (key.tag, key.value), pair)
            if kept is not pair:
                self.append((key.value, key.start_mark.line + 1, kept[0].start_mark.line + 1))
        node.value = list(counts.values())[::order]


def guarded(reader: YAML, where: str, repeated: Repeated | None = None) -> YAML:
    """Return ``reader``, which raises a :class:`UserError` before values fill the memory or are no text.

    Args:
        where: name of the file in messages.
        repeated: collects keys that are written more than once.
    """

    nodes = itertools.count()

    class Guarded(reader.Constructor):  # type: ignore[misc,name-defined]  # a class that the instance holds
        def construct_document(self, node: Node) -> Any:
            _measure(node, {}, where, repeated)
            return super().construct_document(node)

    class Counted(reader.Composer):  # type: ignore[misc,name-defined]
        def compose_node(self, *args: Any) -> Any:
            if next(nodes) == _MOST_VALUES:
                raise UserError(f"{where}: more than {_MOST_VALUES:,} values")
            return super().compose_node(*args)

    reader.Constructor, reader.Composer = Guarded, Counted
    return reader


def _measure(node: Node, known: dict[int, tuple[int, int]], where: str, repeated: Repeated | None) -> tuple[int, int]:
    """Return the number of values in a node, aliases expanded, and how deeply they are nested.

    Args:
        known: id of a node -> its result; (0, 0) until all below it is known.
    """

    def refuse(words: str) -> NoReturn:
        raise UserError(f"{where}:{node.start_mark.line + 1}: {words}")

    if (found := known.get(id(node))) is not None:
        return found if found[0] else refuse("an alias for a value that contains it")
    known[id(node)] = (0, 0)
    parts = []
    if isinstance(node, ScalarNode):
        if node.tag == "tag:yaml.org,2002:int" and len(node.value) > LONGEST_NUMBER:
            refuse(f"a number of {len(node.value)} digits")
        try:  # JSON escapes a character beyond 16 bits as a pair
            node.value = node.value.encode("utf-16", "surrogatepass").decode("utf-16")
        except UnicodeDecodeError:
            refuse("half of a surrogate pair, which is no character")
    else:
        if repeated is not None and isinstance(node, MappingNode):
            repeated.drop(node)
        inner = [one for pair in node.value for one in pair] if isinstance(node, MappingNode) else node.value
        parts = [_measure(one, known, where, repeated) for one in inner]
    values, depth = 1 + sum(part[0] for part in parts), 1 + max((part[1] for part in parts), default=0)
    if values > _MOST_VALUES:
        refuse(f"more than {_MOST_VALUES:,} values, those of aliases counted wherever they are used")
    if depth > _DEEPEST:
        refuse(f"values nested more than {_DEEPEST} deep")
    known[id(node)] = (values, depth)
    return values, depth


def parse(text: str, path: Path, repeated: Repeated | None = None) -> list[Any]:
    """Return every document of a text, as nodes that know their lines, without empty documents.

    Plain scalars are ``str``, quoted ones a subclass of it, so that callers can apply the rules of YAML 1.1.

    Args:
        path: the text's name in messages.
        repeated: collects keys that are written more than once.
    Raises:
        UserError: it is neither YAML nor JSON; the line is named.
    """
    reader = guarded(YAML(typ="rt"), relative(path), repeated)
    reader.preserve_quotes = True
    try:
        return [node for node in reader.load_all(text) if node is not None]
    except RecursionError:
        raise UserError(f"{relative(path)}: its values are nested too deeply") from None
    except YAMLError as error:
        if path.suffix == ".json":  # JSON allows tabs before a key, YAML does not
            try:
                found = json.loads(text)
                json.dumps(found, ensure_ascii=False).encode()
                return [found]
            except json.JSONDecodeError as other:
                raise UserError(f"{relative(path)}:{other.lineno}: not valid JSON: {other.msg}") from None
            except (ValueError, RecursionError):
                words = "a number of thousands of digits, half of a surrogate pair, or values nested too deeply"
                raise UserError(f"{relative(path)}: {words}") from None
        mark = getattr(error, "problem_mark", None) or getattr(error, "context_mark", None)
        line = f":{mark.line + 1}" if mark else ""
        words = getattr(error, "problem", None) or getattr(error, "context", None) or str(error).splitlines()[0]
        raise UserError(f"{relative(path)}{line}: not valid YAML: {words}") from None
    except (ValueError, TypeError, LookupError, AttributeError) as error:
        # The library raises these too: for a date such as 2020-13-45, an anchor of a key, a tag of another type.
        raise UserError(f"{relative(path)}: not valid YAML: {' '.join(str(error).split())}") from None


def read(path: Path) -> CommentedMap:
    """Return the one document of a YAML file, which must be a mapping. Callers share it, and do not change it.

    Raises:
        UserError: it cannot be read, or is something else.
    """
    return _mapping(text(path), path)


@functools.lru_cache(maxsize=64)
def _mapping(text: str, path: Path) -> CommentedMap:
    """Parse a text once: a command reads the same file again for each line that it names."""
    nodes = parse(text, path)
    if not nodes:
        raise UserError(f"{relative(path)}: the file is empty: expected 'key: value' pairs")
    if len(nodes) != 1 or not isinstance(nodes[0], CommentedMap):
        raise UserError(f"{relative(path)}: expected 'key: value' pairs at the top")
    return nodes[0]


def line_of(data: Any, location: Location) -> int | None:
    """Return the 1-based line of the value at ``location``; of the nearest enclosing one if it is missing."""
    line: int | None = None
    for step in location:
        if isinstance(data, CommentedMap) and step in data:
            line = data.lc.key(step)[0] + 1
        elif isinstance(data, CommentedSeq) and isinstance(step, int) and step < len(data):
            line = data.lc.item(step)[0] + 1
        else:
            return line
        data = data[step]
    return line


def plain(node: Any) -> Any:
    """Return YAML nodes as plain Python values."""
    if isinstance(node, dict):
        return {str(key): plain(value) for key, value in node.items()}
    if isinstance(node, list):
        return [plain(value) for value in node]
    if isinstance(node, bool) or node is None:
        return node
    if isinstance(node, float):
        return float(node)
    if isinstance(node, int):
        return int(node)
    return str(node)


def _keys_at(model: type[BaseModel], location: tuple[int | str, ...]) -> list[str]:
    """Return the keys that ``model`` allows at ``location``."""
    for step in location:
        if isinstance(step, int):  # a position in the list of the key before it
            continue
        field = model.model_fields.get(step)
        kinds = [field.annotation] if field else []
        kinds += [kind for outer in kinds if get_origin(outer) in (list, UnionType) for kind in get_args(outer)]
        found = [kind for kind in kinds if isinstance(kind, type) and issubclass(kind, BaseModel)]
        if not found:
            return []
        model = found[0]
    return [field.alias or name for name, field in model.model_fields.items()]


def _explain(path: Path, data: CommentedMap, model: type[BaseModel], error: ValidationError) -> UserError:
    """Return the first mistake of a document, in one line."""
    # A misspelt key is both unknown and missing: report the spelling.
    first = min(error.errors(), key=lambda one: one["type"] != "extra_forbidden")
    location = first["loc"]
    line = line_of(data, location)
    where = f"{relative(path)}:{line}" if line else relative(path)
    key = ".".join(str(step) for step in location)
    more = f" (and {error.error_count() - 1} more)" if error.error_count() > 1 else ""
    if first["type"] == "extra_forbidden":
        valid = _keys_at(model, location[:-1])
        return UserError(
            f"{where}: unknown key '{key}'{nearest(str(location[-1]), valid)}; valid here: {', '.join(valid)}{more}"
        )
    if first["type"] == "missing":
        return UserError(f"{where}: '{key}' is missing{more}")
    if first["type"].startswith("bool"):
        return UserError(f"{where}: {key}: {first['input']!r} is neither true nor false{more}")
    return UserError(f"{where}: {key}: {first['msg'].removeprefix('Value error, ')}{more}")


def validated(path: Path, model: type[M], data: CommentedMap, plain: dict[str, Any]) -> M:
    """Return a document as ``model``.

    Raises:
        UserError: it is invalid; the message has the file, the line, the key and the nearest valid spelling.
    """
    try:
        return model.model_validate(plain)
    except ValidationError as error:
        raise _explain(path, data, model, error) from None
