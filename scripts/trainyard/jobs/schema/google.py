"""Strict, offline validation against the schemas of Google's APIs.

The discovery documents that google-api-python-client carries are converted to JSON schemas. Unknown fields and fields
that only the service writes are errors: gcloud and the services ignore these and misspelt enum values, or fail late.
The format of discovery documents: https://developers.google.com/discovery/v1/type-format.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from functools import cache
from importlib.resources import files
from typing import Any

from trainyard.console import nearest
from trainyard.jobs.schema import library
from trainyard.jobs.schema.errors import EMPTY, SchemaError
from trainyard.spec.yaml_source import Location

#: JSON's mapping of 64-bit numbers is text: https://protobuf.dev/programming-guides/json/
_INT64 = ("int64", "uint64")
_DURATION = "google-duration"


@cache
def schemas(api: str) -> dict[str, Any]:
    """Name -> schema of an API such as ``aiplatform.v1``, in the language of discovery documents."""
    document = files("googleapiclient.discovery_cache").joinpath("documents", f"{api}.json")
    found: dict[str, Any] = json.loads(document.read_text(encoding="utf-8"))["schemas"]
    return found


def validate(api: str, name: str, value: object) -> list[SchemaError]:
    """Everything in ``value`` that does not match schema ``name`` of an API, in the order of the document.

    Unknown fields, fields that only the service writes, types, enum values, durations and 64-bit numbers are checked.
    """
    found = [one for error in _validator(api, name).iter_errors(value) for one in _errors(error)]
    return sorted(found, key=lambda one: _position(value, one.location))


@cache
def _validator(api: str, name: str) -> Any:
    jsonschema = library.jsonschema()
    known = schemas(api)
    definitions = {one: _converted(known[one]) for one in _reachable(known, name)}
    schema = {"$ref": f"#/$defs/{name}", "$defs": definitions}
    formats = jsonschema.FormatChecker(formats=())
    for form in _INT64:
        formats.checks(form)(lambda one: not isinstance(one, str) or bool(re.fullmatch(r"-?\d+", one)))
    formats.checks(_DURATION)(lambda one: not isinstance(one, str) or bool(re.fullmatch(r"\d+(\.\d{1,9})?s", one)))
    strict = jsonschema.validators.extend(
        jsonschema.Draft202012Validator,
        # JSON Schema takes 1.0 for an integer; the services do not.
        type_checker=jsonschema.Draft202012Validator.TYPE_CHECKER.redefine(
            "integer", lambda _, one: isinstance(one, int) and not isinstance(one, bool)
        ),
    )
    return strict(schema, format_checker=formats)


def _reachable(known: dict[str, Any], name: str) -> set[str]:
    """Names of the schemas that ``name`` refers to, itself among them."""
    found: set[str] = set()
    waiting = [name]
    while waiting:
        one = waiting.pop()
        if one not in found:
            found.add(one)
            waiting.extend(_references(known[one]))
    return found


def _references(schema: Any) -> Iterator[str]:
    if isinstance(schema, dict):
        if isinstance(schema.get("$ref"), str):
            yield schema["$ref"]
        for part in (*schema.get("properties", {}).values(), schema.get("items"), schema.get("additionalProperties")):
            yield from _references(part)


def _converted(schema: dict[str, Any]) -> dict[str, Any]:
    """A schema of a discovery document as JSON Schema."""
    if "$ref" in schema:
        return {"$ref": f"#/$defs/{schema['$ref']}"}
    kind, form = schema.get("type"), schema.get("format")
    if kind == "object":
        values = schema.get("additionalProperties")
        return {
            "type": "object",
            "properties": {key: _property(one) for key, one in schema.get("properties", {}).items()},
            "additionalProperties": _converted(values) if values else False,
        }
    if kind == "array":
        return {"type": "array", "items": _converted(schema["items"])}
    if kind == "string" and form in _INT64:
        return {"type": ["string", "integer"], "format": form}
    if kind == "string":
        return {"type": "string"} | {key: schema[key] for key in ("enum", "format") if key in schema}
    return {"type": kind} if kind in EMPTY else {}


def _property(schema: dict[str, Any]) -> dict[str, Any]:
    return {"not": {}} if schema.get("readOnly") else _converted(schema)


def _errors(error: Any) -> Iterator[SchemaError]:
    """An error of jsonschema in our words; an unknown field each for ``additionalProperties``."""
    at, value, schema = tuple(error.absolute_path), error.instance, error.schema
    if error.validator == "additionalProperties":
        known = schema["properties"]
        for key in value:
            if key not in known:
                yield SchemaError((*at, key), f"unknown field '{key}'{nearest(str(key), known)}")
    elif error.validator == "not":
        yield SchemaError(at, "is written by the service, not by you")
    elif error.validator == "type":
        yield _type_error(at, schema, value)
    elif error.validator == "enum" and isinstance(value, str):
        values = schema["enum"]
        yield SchemaError(at, f"'{value}' is not one of its values{nearest(value, values)}: {', '.join(values)}")
    elif error.validator == "format" and schema["format"] == _DURATION:
        yield SchemaError(at, f"'{value}' is not a duration: write seconds with an 's', as in '3600s'")
    elif error.validator == "format":
        yield SchemaError(at, f"{_shown(value)} is not a whole number")


_TYPE_WORDS = {
    "object": "is not a mapping of fields",
    "array": "is not a list",
    "string": "is not text: put it in quotes",
    "boolean": "is neither true nor false",
    "integer": "is not a whole number",
    "number": "is not a number",
}


def _type_error(at: Location, schema: dict[str, Any], value: object) -> SchemaError:
    kind = "integer" if isinstance(schema["type"], list) else str(schema["type"])
    # A number of another kind can stay: rules that count take any number.
    is_number = kind in ("integer", "number") and isinstance(value, int | float) and schema["type"] == kind
    return SchemaError(at, f"{_shown(value)} {_TYPE_WORDS[kind]}", None if is_number else EMPTY[kind])


def _position(value: Any, location: Location) -> tuple[int, ...]:
    """Where a location is in the document: the position in its mapping or list, of every step."""
    found: list[int] = []
    for step in location:
        found.append(list(value).index(step) if isinstance(value, dict) else int(step))
        value = value[step]
    return tuple(found)


def _shown(value: object) -> str:
    return repr(value) if isinstance(value, str) else json.dumps(value, default=str)[:80]
