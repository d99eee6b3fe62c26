"""The schemas of Google's APIs, strict and offline: from the discovery documents that google-api-python-client carries.

gcloud and the services let unknown fields and misspelt enum values through, or fail late; this does neither.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any

from scripts.cli import nearest
from scripts.documents import Location

Schemas = dict[str, Any]


@dataclass(frozen=True)
class Complaint:
    """What a value breaks of its schema.

    Attributes:
        what: what is wrong, in words.
        instead: an empty value of the type that is wanted, where the value is of another; None where the type is right.
    """

    location: Location
    what: str
    instead: object = None


@cache
def schemas(api: str) -> Schemas:
    """Name -> schema of an API such as ``aiplatform.v1``."""
    document = files("googleapiclient.discovery_cache").joinpath("documents", f"{api}.json")
    found: Schemas = json.loads(document.read_text(encoding="utf-8"))["schemas"]
    return found


def complaints(known: Schemas, name: str, value: object) -> Iterator[Complaint]:
    """Everything in ``value`` that is not as schema ``name`` says: unknown fields, enum values and types too."""
    return _message(known, known[name], value, ())


def _message(known: Schemas, schema: Any, value: object, at: Location) -> Iterator[Complaint]:
    if not isinstance(value, dict):
        yield Complaint(at, f"{_shown(value)} is not a mapping of fields", {})
        return
    properties, values = schema.get("properties", {}), schema.get("additionalProperties")
    for key, member in value.items():
        if key in properties:
            if properties[key].get("readOnly"):
                yield Complaint((*at, key), "is written by the service, not by you")
            else:
                yield from _value(known, properties[key], member, (*at, key))
        elif values:
            yield from _value(known, values, member, (*at, key))
        else:
            yield Complaint((*at, key), f"unknown field '{key}'{nearest(str(key), properties)}")


def _value(known: Schemas, schema: Any, value: object, at: Location) -> Iterator[Complaint]:
    if "$ref" in schema:
        yield from _message(known, known[schema["$ref"]], value, at)
        return
    kind = schema.get("type")
    if kind == "object":
        yield from _message(known, schema, value, at)
    elif kind == "array":
        if not isinstance(value, list):
            yield Complaint(at, f"{_shown(value)} is not a list", [])
            return
        for number, item in enumerate(value):
            yield from _value(known, schema["items"], item, (*at, number))
    elif wrong := _scalar(schema, value):
        plain = isinstance(value, str) if kind == "string" else isinstance(value, int | float)
        whole = kind == "string" and schema.get("format") in ("int64", "uint64") and isinstance(value, int)
        yield Complaint(at, wrong, None if plain or whole else _EMPTY.get(str(kind), ""))


_EMPTY: dict[str, object] = {"string": "", "boolean": False, "integer": 0, "number": 0}


def _scalar(schema: Any, value: object) -> str:
    """What is wrong with a single value; empty if nothing is. 64-bit numbers may be text, as in proto3's JSON."""
    kind, form = schema.get("type"), schema.get("format")
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if kind == "string" and form in ("int64", "uint64"):
        fits = re.fullmatch(r"-?\d+", str(value)) and not isinstance(value, bool)
        return "" if fits else f"{_shown(value)} is not a whole number"
    if kind == "string":
        if not isinstance(value, str):
            return f"{_shown(value)} is not text: put it in quotes"
        if schema.get("enum") and value not in schema["enum"]:
            return f"'{value}' is not one of its values{nearest(value, schema['enum'])}: {', '.join(schema['enum'])}"
        if form == "google-duration" and not re.fullmatch(r"\d+(\.\d{1,9})?s", value):
            return f"'{value}' is not a duration: write seconds with an 's', as in '3600s'"
        return ""
    if kind == "boolean" and not isinstance(value, bool):
        return f"{_shown(value)} is neither true nor false"
    if kind == "integer" and (not number or isinstance(value, float)):
        return f"{_shown(value)} is not a whole number"
    if kind == "number" and not number:
        return f"{_shown(value)} is not a number"
    return ""


def _shown(value: object) -> str:
    return repr(value) if isinstance(value, str) else json.dumps(value, default=str)[:80]
