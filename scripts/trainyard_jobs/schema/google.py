"""Strict, offline validation against the schemas of Google's APIs.

The discovery documents that google-api-python-client carries are converted to JSON schemas. Unknown fields and fields
that only the service writes are errors: gcloud and the services ignore these and misspelt enum values, or fail late.
The format of discovery documents: https://developers.google.com/discovery/v1/type-format.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator
from functools import cache
from typing import Any

from trainyard.common.errors import nearest
from trainyard.common.third_party import schemas, sources
from trainyard.spec.gpus import respelled
from trainyard.spec.yaml_source import Location
from trainyard_jobs.schema import library
from trainyard_jobs.schema.errors import EMPTY, SchemaError

#: The whole numbers that a format has. JSON's mapping of 64-bit numbers is text:
#: https://protobuf.dev/programming-guides/json/
_INTEGERS = {
    "int32": range(-(2**31), 2**31),
    "uint32": range(2**32),
    "int64": range(-(2**63), 2**63),
    "uint64": range(2**64),
}
_INT64 = ("int64", "uint64")
_DURATION = "google-duration"

#: Seconds of the longest duration, of about 10,000 years: https://protobuf.dev/reference/protobuf/google.protobuf/#duration
_LONGEST = 315_576_000_000

#: Kind of job file -> API, message of the bare specification, and of the file that has it below another key.
_MESSAGES = {
    "custom-job": ("aiplatform.v1", "GoogleCloudAiplatformV1CustomJobSpec", "GoogleCloudAiplatformV1CustomJob"),
    "hyperparameter-tuning-job": ("aiplatform.v1", "GoogleCloudAiplatformV1HyperparameterTuningJob", ""),
    "ai-platform": ("ml.v1", "GoogleCloudMlV1__TrainingInput", "GoogleCloudMlV1__Job"),
}

#: Kind -> the key of the whole resource that has the specification.
WRAPPERS = {"custom-job": "jobSpec", "ai-platform": "trainingInput"}


def _enum(*values: str) -> dict[str, Any]:
    return {"type": "string", "enum": list(values)}


_TEXT, _BOOLEAN, _INT32 = {"type": "string"}, {"type": "boolean"}, {"type": "integer", "format": "int32"}

#: The form of the API's names of accelerators.
_ACCELERATOR = re.compile(r"(NVIDIA|TPU|AMD)(_[A-Z0-9]+)+")

#: API -> message -> fields that its discovery document lacks, but the messages of gcloud 528 have
#: (googlecloudsdk/generated_clients/apis/ml/v1/ml_v1_messages.py).
_MORE: dict[str, dict[str, dict[str, Any]]] = {
    "ml.v1": {
        "GoogleCloudMlV1__Scheduling": {
            "resilientToWorkerRestart": _BOOLEAN,
            "strategy": _enum("STRATEGY_UNSPECIFIED", "ON_DEMAND", "LOW_COST"),
        },
        "GoogleCloudMlV1__TrainingInput": {"nasJobSpec": {"$ref": "GoogleCloudMlV1__NasSpec"}},
        "GoogleCloudMlV1__NasSpec": {
            "previousNasJobId": _TEXT,
            "searchSpaceSpec": _TEXT,
            "multiTrialAlgorithmSpec": {"$ref": "GoogleCloudMlV1__NasSpec_MultiTrialAlgorithmSpec"},
            "oneShotAlgorithmSpec": {"$ref": "GoogleCloudMlV1__NasSpec_OneShotAlgorithmSpec"},
        },
        "GoogleCloudMlV1__NasSpec_MultiTrialAlgorithmSpec": {
            "initialIgnoredModelCount": _INT32,
            "maxFailedNasTrials": _INT32,
            "maxNasTrials": _INT32,
            "maxParallelNasTrials": _INT32,
            "multiTrialAlgorithm": _enum(
                "MULTI_TRIAL_ALGORITHM_UNSPECIFIED", "REINFORCEMENT_LEARNING", "GRID_SEARCH", "REGULARIZED_EVOLUTION"
            ),
            "nasTargetRewardMetric": _TEXT,
        },
        "GoogleCloudMlV1__NasSpec_OneShotAlgorithmSpec": {
            "oneShotAlgorithm": _enum("ONE_SHOT_ALGORITHM_UNSPECIFIED", "REINFORCEMENT_LEARNING"),
        },
    }
}


@cache
def _messages(api: str) -> dict[str, Any]:
    """Name -> schema of the messages of an API, as discovery documents have them."""
    found = dict(schemas(api))
    for name, fields in _MORE.get(api, {}).items():
        message = found.get(name, {"type": "object"})
        found[name] = message | {"properties": message.get("properties", {}) | fields}
    return found


def message_of(kind: str, document: dict[str, Any]) -> tuple[str, str]:
    """API and message of a job file of a kind: of a bare specification, or of the whole resource that has it."""
    api, bare, wrapped = _MESSAGES[kind]
    return api, wrapped if wrapped and WRAPPERS[kind] in document else bare


def as_gcloud_reads(kind: str, document: dict[str, Any]) -> dict[str, Any]:
    """The message that gcloud sends for a file, where that is another than the file itself.

    gcloud 528 takes one value for a list of one, text that Python reads as a number for a number, true and false for 1
    and 0 where a number may have a fraction, and the number of an enum value, but 0, for the value. It leaves out null,
    and an empty list where no list is required (apitools' ``PyValueToMessage``). Other values stay as they are; so does
    null for an enum in the file of a tuning job, which gcloud refuses (``DictToMessageWithErrorCheck``).
    """
    api, name = message_of(kind, document)
    found: dict[str, Any] = _read({"$ref": name}, document, _messages(api), null_enums="tuning" in kind)
    key = WRAPPERS.get(kind)
    if key is not None and key in document:
        found.setdefault(key, {})  # null or []: gcloud adds the message, and its flags fill it
    return found


def _read(schema: dict[str, Any], value: Any, known: dict[str, Any], *, null_enums: bool) -> Any:
    schema = known[schema["$ref"]] if "$ref" in schema else schema
    kind = schema.get("type")
    if kind == "array":
        values = value if isinstance(value, list) else [value]
        return [one if one == [] else _read(schema["items"], one, known, null_enums=null_enums) for one in values]
    if kind == "object":
        if not isinstance(value, dict):
            return value
        fields, others = schema.get("properties", {}), schema.get("additionalProperties") or {}
        return {
            key: _read(fields.get(key, others), one, known, null_enums=null_enums)
            for key, one in value.items()
            if key not in fields or not _is_left_out(fields[key], one, null_enums)
        }
    if "enum" in schema and isinstance(value, int):
        return schema["enum"][value] if 0 < value < len(schema["enum"]) else value
    number = int if schema.get("format") in _INTEGERS else float if kind == "number" else None
    if number and (isinstance(value, str) or (number is float and isinstance(value, int))):
        try:
            return number(value)
        except (ValueError, OverflowError):
            return value
    return value


def _is_left_out(schema: dict[str, Any], value: object, null_enums: bool) -> bool:
    """Whether gcloud leaves out a value of a field."""
    if value is None:
        return not (null_enums and "enum" in schema)
    return value == [] and "enum" not in schema and schema.get("type") != "array"


def validate(api: str, name: str, value: object) -> list[SchemaError]:
    """Everything in ``value`` that does not match schema ``name`` of an API, in the order of the document.

    Unknown fields, fields that only the service writes, types, enum values, durations and 64-bit numbers are checked.
    """
    found = [one for error in _validator(api, name).iter_errors(value) for one in _errors(error)]
    return sorted(found, key=lambda one: _position(value, one.location))


@cache
def _validator(api: str, name: str) -> Any:
    jsonschema = library.jsonschema()
    definitions = {key: _converted(message) for key, message in _messages(api).items()}
    schema = {"$ref": f"#/$defs/{name}", "$defs": definitions}
    formats = jsonschema.FormatChecker(formats=())
    for form, numbers in _INTEGERS.items():
        formats.checks(form)(lambda one, numbers=numbers, form=form: _is_in(numbers, one, text=form in _INT64))
    formats.checks(_DURATION)(lambda one: not isinstance(one, str) or _is_duration(one))
    strict = jsonschema.validators.extend(
        jsonschema.Draft202012Validator,
        # JSON Schema takes 1.0 for an integer; the services do not.
        type_checker=jsonschema.Draft202012Validator.TYPE_CHECKER.redefine(
            "integer", lambda _, one: isinstance(one, int) and not isinstance(one, bool)
        ).redefine("number", lambda _, one: type(one) in (int, float) and math.isfinite(one)),
    )
    return strict(schema, format_checker=formats)


def _is_in(numbers: range, value: object, *, text: bool) -> bool:
    """Whether a whole number is one of these; True for values of other types, which are another error.

    Args:
        text: whether the field takes text too.
    """
    if isinstance(value, str) and text:
        return re.fullmatch(r"-?[0-9]{1,20}", value) is not None and int(value) in numbers
    return not isinstance(value, int) or value in numbers


def _is_duration(text: str) -> bool:
    """Whether a text is a duration of protobuf: https://protobuf.dev/programming-guides/json/."""
    found = re.fullmatch(r"(-?[0-9]+)(\.[0-9]{1,9})?s", text)
    return found is not None and abs(int(found[1])) <= _LONGEST


def _converted(schema: dict[str, Any]) -> dict[str, Any]:
    """A schema of a discovery document as JSON Schema."""
    if "$ref" in schema:
        return {"$ref": f"#/$defs/{schema['$ref']}"}
    kind, form = schema.get("type"), schema.get("format")
    if kind == "object":
        values = schema.get("additionalProperties")
        return {
            "type": "object",
            "properties": {
                key: {"not": {}} if one.get("readOnly") else _converted(one)
                for key, one in schema.get("properties", {}).items()
            },
            "additionalProperties": _converted(values) if values else False,
        }
    if kind == "array":
        return {"type": "array", "items": _converted(schema["items"])}
    if kind == "string" and form in _INT64:
        return {"type": ["string", "integer"], "format": form}
    if kind == "string":
        return {"type": "string"} | {key: schema[key] for key in ("enum", "format") if key in schema}
    if kind == "integer":
        return {"type": kind, "format": form}
    return {"type": kind} if kind in EMPTY else {}


def _errors(error: Any) -> Iterator[SchemaError]:
    """An error of jsonschema in our words; an unknown field each for ``additionalProperties``."""
    at, value, schema = tuple(error.absolute_path), error.instance, error.schema
    if error.validator == "additionalProperties":
        known = schema["properties"]
        for key in value:
            if key not in known:
                yield SchemaError((*at, key), f"unknown field '{key}'{nearest(str(key), known)}")
    elif error.validator == "not":
        yield SchemaError(at, "is written by the service, not by you", ignored=True)
    elif error.validator == "type":
        yield _type_error(at, schema, value)
    elif error.validator == "enum" and isinstance(value, str):
        values = schema["enum"]
        right = respelled(value, values)
        newer = not right and at[-1:] == ("acceleratorType",) and _ACCELERATOR.fullmatch(value) is not None
        guess = f" (did you mean '{right}'?)" if right else nearest(value, values)
        document = f" in google-api-python-client {sources()['google-api-python-client']['version']}" if newer else ""
        what = f"'{value}' is not one of its values{document}{guess}: {', '.join(values)}"
        yield SchemaError(at, what, newer=newer)
    elif error.validator == "format" and schema["format"] == _DURATION:
        yield SchemaError(at, f"'{value}' is not a duration: write seconds with an 's', as in '3600s'")
    elif error.validator == "format" and isinstance(value, int):
        yield SchemaError(at, f"{value} is out of range: the field has numbers of {schema['format'][-2:]} bits")
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
