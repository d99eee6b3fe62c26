"""The discovery documents of Google's APIs as JSON schemas, for fakes: what an API's published description refuses.

The package carries the documents. Their format: https://developers.google.com/discovery/v1/type-format.
Nothing here uses Trainyard's own validation, which tests compare with the fakes.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from functools import cache
from typing import Any

import jsonschema

from tests.fakes.server import ApiError
from trainyard.common.third_party import archive

#: proto3's JSON allows a number or text for these (https://protobuf.dev/programming-guides/json/).
_WIDE = {"int64", "uint64"}

#: Fields whose description begins with "Required", although their empty value is valid.
_MAY_BE_EMPTY = {("GoogleCloudAiplatformV1EnvVar", "value")}


@cache
def document(api: str) -> dict[str, Any]:
    """The discovery document of an API, such as ``cloudbuild.v1``."""
    found: dict[str, Any] = json.loads(archive("google-api-python-client").read(f"{api}.json"))
    return found


def _converted(schema: Mapping[str, Any]) -> dict[str, Any]:
    """A schema of a discovery document as JSON Schema."""
    if "$ref" in schema:
        return {"$ref": f"#/$defs/{schema['$ref']}"}
    kind, form = schema.get("type"), schema.get("format")
    if kind == "array":
        return {"type": "array", "items": _converted(schema["items"])}
    if kind == "object":
        extra = schema.get("additionalProperties")
        return {
            "type": "object",
            "properties": {name: _converted(one) for name, one in schema.get("properties", {}).items()},
            "additionalProperties": _converted(extra) if extra else False,
        }
    if kind == "string" and form in _WIDE:
        return {"anyOf": [{"type": "integer"}, {"type": "string", "pattern": "^-?[0-9]+$"}]}
    if kind == "string" and form == "google-duration":
        return {"type": "string", "pattern": r"^[0-9]+(\.[0-9]{1,9})?s$"}
    if kind == "any":
        return {}
    return {"type": kind} | ({"enum": schema["enum"]} if "enum" in schema else {})


def _required(name: str, schema: Mapping[str, Any]) -> list[str]:
    """Properties that a message must have: their description begins with "Required".

    Numbers are left out: JSON written from proto3 lacks those that are 0.
    """
    return [
        key
        for key, one in schema.get("properties", {}).items()
        if one.get("description", "").startswith("Required")
        and one.get("type") not in ("integer", "number", "boolean")
        and one.get("format") not in _WIDE
        and (name, key) not in _MAY_BE_EMPTY
    ]


@cache
def _validator(api: str, name: str, required: bool) -> Any:
    schemas = document(api)["schemas"]
    definitions = {}
    for one, schema in schemas.items():
        definitions[one] = _converted(schema)
        if required and schema.get("type") == "object":
            definitions[one]["required"] = _required(one, schema)
    return jsonschema.Draft202012Validator({"$ref": f"#/$defs/{name}", "$defs": definitions})


def _described(error: Any) -> Iterator[tuple[str, str]]:
    where = "".join(f"[{one}]" if isinstance(one, int) else f".{one}" for one in error.absolute_path).lstrip(".")
    if error.validator == "additionalProperties":
        for key in error.instance.keys() - error.schema.get("properties", {}).keys():
            yield f"{where}.{key}".lstrip("."), f"Unknown name \"{key}\" at '{where}': Cannot find field."
    elif error.validator == "required":
        for key in set(error.validator_value) - set(error.instance):
            yield f"{where}.{key}".lstrip("."), "Required field is not set."
    else:
        yield where, f"Invalid value at '{where}': {error.message}"


def violations(api: str, name: str, value: object, *, required: bool = True) -> list[tuple[str, str]]:
    """(field, what is wrong) for everything in ``value`` that message ``name`` of an API does not allow.

    Args:
        required: whether fields are checked that the descriptions call required.
    """
    errors = _validator(api, name, required).iter_errors(value)
    return sorted(one for error in errors for one in _described(error))


def refuse(found: list[tuple[str, str]]) -> None:
    """Answer as Vertex AI does, if there is a violation.

    Raises:
        ApiError: 400, with every violation.
    """
    if found:
        lines = (f"{number}. Field: {field}; Message: {words}" for number, (field, words) in enumerate(found, 1))
        raise ApiError(400, f"List of found errors: {' '.join(lines)}", found)
