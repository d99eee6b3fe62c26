"""Convert a cloudbuild.yaml to the API's resource ``Build`` as gcloud does before it submits the file.

`gcloud builds submit` accepts more than the API's JSON: keys in snake_case, one value for a list, ``null``, YAML 1.1.
The conversions are those of googlecloudsdk/api_lib/cloudbuild/cloudbuild_util.py and of apitools' protojson.py
(https://github.com/google/apitools/blob/master/apitools/base/protorpclite/protojson.py), read in gcloud 528 and
compared with it by tests/cloud/test_gcloud_build_oracle.py. The fields are those of the API's discovery document, which
may be newer than the installed gcloud.
"""

from __future__ import annotations

import base64
import binascii
import json
from collections.abc import Mapping
from typing import Any

from trainyard.common.errors import nearest
from trainyard.common.third_party import schemas

Schema = Mapping[str, Any]

#: Mappings whose keys are data: gcloud leaves what is below them as it is.
_DATA_KEYS = ("secretEnv", "secret_env", "substitutions", "envMap", "env_map")

#: No value: the field is left out of the message.
_UNSET: Any = object()


def camel_case(key: str) -> str:
    """A key in the API's spelling: ``waitFor`` for ``wait_for``."""
    body = key.lstrip("_")
    first, *others = body.split("_")
    return key[: len(key) - len(body)] + first + "".join(part.capitalize() for part in others)


def _respelled(node: Any, errors: list[str], where: str = "") -> Any:
    """``node`` with its keys in camelCase."""
    if isinstance(node, list):
        return [_respelled(entry, errors, f"{where}[{number}]") for number, entry in enumerate(node)]
    if not isinstance(node, dict):
        return node
    found = {}
    for key, value in node.items():
        if not isinstance(key, str):
            errors.append(f"{where or 'the file'}: the key {key!r} is not text: put it in quotes")
            continue
        below = f"{where}.{key}" if where else key
        found[camel_case(key)] = value if key in _DATA_KEYS else _respelled(value, errors, below)
    return found


class _Decoder:
    """Converts values to the types of their schemas, and collects what cannot be converted."""

    def __init__(self, known: Mapping[str, Schema]) -> None:
        self.known = known
        self.errors: list[str] = []

    def _fail(self, where: str, what: str) -> Any:
        self.errors.append(f"{where}: {what}")
        return _UNSET

    def message(self, value: Any, schema: Schema, where: str) -> Any:
        """A mapping with the fields of a schema."""
        if not isinstance(value, dict):
            return self._fail(where or "the file", f"{_shown(value)} is not a mapping of fields")
        if "additionalProperties" in schema:
            return self._map(value, schema["additionalProperties"], where)
        fields: Mapping[str, Schema] = schema["properties"]
        found = {}
        for key, entry in value.items():
            below = f"{where}.{key}" if where else key
            if key not in fields:
                # A container's image is the name of a step.
                guess = " (did you mean 'name'?)" if key == "image" and "entrypoint" in fields else nearest(key, fields)
                self._fail(below, f"unknown field '{key}'{guess}")
                continue
            decoded = self._field(entry, self._resolved(fields[key]), below)
            if decoded is not _UNSET and decoded != []:
                found[key] = decoded
        return found

    def _resolved(self, schema: Schema) -> Schema:
        return self.known[schema["$ref"]] if "$ref" in schema else schema

    def _map(self, value: Mapping[Any, Any], schema: Schema, where: str) -> dict[str, Any]:
        found = {}
        for key, entry in value.items():
            # JSON's keys are text: gcloud writes the key 1 as "1".
            name = (
                key if isinstance(key, str) else json.dumps(key) if isinstance(key, int | float | None) else repr(key)
            )
            decoded = "" if entry is None else self._scalar(entry, self._resolved(schema), f"{where}.{name}")
            if decoded is not _UNSET:
                found[name] = decoded
        return found

    def _field(self, value: Any, schema: Schema, where: str) -> Any:
        if schema.get("type") == "array":
            return self._list(value, self._resolved(schema["items"]), where)
        # gcloud takes null and [] for a field that is not set; but it keeps them for enumerations, and then fails.
        if (value is None or value == []) and "enum" not in schema:
            return _UNSET
        return self._one(value, schema, where)

    def _list(self, value: Any, schema: Schema, where: str) -> Any:
        if "enum" in schema and not isinstance(value, list):
            return self._fail(where, f"{_shown(value)} is not a list")
        if value is None:
            return _UNSET
        if isinstance(value, dict) and schema.get("type") == "string":
            form = " of KEY=VALUE, as in '- A=b'" if where.endswith(".env") else ""
            return self._fail(where, f"{_shown(value)} is not a list{form}")
        entries = value if isinstance(value, list) else [value]
        found = []
        for number, entry in enumerate(entries):
            place = f"{where}[{number}]"
            decoded = self._fail(place, "null is not a value") if entry is None else self._one(entry, schema, place)
            if decoded is not _UNSET:
                found.append(decoded)
        return found

    def _one(self, value: Any, schema: Schema, where: str) -> Any:
        return (
            self.message(value, schema, where) if schema.get("type") == "object" else self._scalar(value, schema, where)
        )

    def _scalar(self, value: Any, schema: Schema, where: str) -> Any:
        kind, form = schema.get("type"), schema.get("format")
        if "enum" in schema:
            return self._enum(value, schema["enum"], where)
        if kind == "integer" or form in ("int64", "uint64"):
            number = self._integer(value, where)
            # JSON has no 64-bit numbers: https://protobuf.dev/programming-guides/json/
            return number if kind == "integer" or number is _UNSET else str(number)
        if kind == "boolean":
            return value if isinstance(value, bool) else self._fail(where, f"{_shown(value)} is neither true nor false")
        if form == "byte":
            return self._bytes(value, where)
        fix = "" if isinstance(value, dict | list) else ": put it in quotes"
        return value if isinstance(value, str) else self._fail(where, f"{_shown(value)} is not text{fix}")

    def _enum(self, value: Any, names: list[str], where: str) -> Any:
        """One of its names, or the number of one; with 0, gcloud fails."""
        if isinstance(value, str) and value in names:
            return value
        if isinstance(value, int) and 0 < value < len(names):
            return names[value]
        guess = nearest(value, names) if isinstance(value, str) else ""
        return self._fail(where, f"{_shown(value)} is not one of its values{guess}: {', '.join(names)}")

    def _integer(self, value: Any, where: str) -> Any:
        if isinstance(value, str):
            try:
                return int(value)
            except ValueError:
                pass
        return value if isinstance(value, int) else self._fail(where, f"{_shown(value)} is not a whole number")

    def _bytes(self, value: Any, where: str) -> Any:
        """Base64, of either alphabet, in the one that gcloud sends."""
        try:
            return base64.urlsafe_b64encode(base64.urlsafe_b64decode(str(value))).decode()
        except (binascii.Error, ValueError):
            return self._fail(where, f"{_shown(value)} is not base64")


def normalize(data: Mapping[Any, Any]) -> tuple[dict[str, Any], list[str]]:
    """The resource ``Build`` that gcloud would submit for a file, and why it would not.

    Args:
        data: the file's content, read as YAML 1.1.
    Returns:
        The message, without what is wrong; and one line for everything for which gcloud refuses the file.
    """
    known = schemas("cloudbuild.v1")
    decoder = _Decoder(known)
    respelled = _respelled(data, decoder.errors)
    message = decoder.message(respelled, known["Build"], "")
    found: dict[str, Any] = {} if message is _UNSET else message
    return found, decoder.errors


def _shown(value: object) -> str:
    if isinstance(value, str):
        return repr(value)
    try:
        return json.dumps(value, default=str)[:80]
    except (TypeError, ValueError, RecursionError):  # a key that JSON does not have, or a value that contains itself
        return repr(value)[:80]
