"""Schemas of Google's APIs: what a value breaks, where, and in which order."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest

from trainyard_jobs.schema import google
from trainyard_jobs.schema.errors import SchemaError

SCHEMAS: dict[str, Any] = {
    "Pool": {
        "type": "object",
        "properties": {
            "count": {"type": "string", "format": "int64"},
            "small": {"type": "integer", "format": "int32"},
            "share": {"type": "number", "format": "double"},
            "wait": {"type": "string", "format": "google-duration"},
            "strategy": {"type": "string", "enum": ["SPOT", "STANDARD"]},
            "web": {"type": "boolean"},
            "state": {"type": "string", "readOnly": True},
            "labels": {"type": "object", "additionalProperties": {"type": "string"}},
            "inner": {"$ref": "Pool"},
            "args": {"type": "array", "items": {"type": "string"}},
            "anything": {"type": "any"},
        },
    }
}


@pytest.fixture
def errors(monkeypatch: pytest.MonkeyPatch) -> Any:
    """``errors(value)``: what a value breaks of the schema Pool."""
    monkeypatch.setattr(google, "schemas", {"test.v1": SCHEMAS}.__getitem__)
    return lambda value: google.validate("test.v1", "Pool", value)


@pytest.mark.parametrize(
    "value",
    [
        {"count": 3, "small": -1, "share": 1, "wait": "1.5s", "strategy": "SPOT", "web": True, "args": ["a"]},
        {"count": "-3", "share": 0.5, "labels": {"any": "thing"}, "inner": {"inner": {}}, "anything": [1, {}]},
        {},
    ],
)
def test_a_valid_value_has_no_error(errors: Any, value: dict[str, Any]) -> None:
    assert errors(value) == []


@pytest.mark.parametrize(
    ("value", "what"),
    [
        ({"count": 1.0}, "1.0 is not a whole number"),
        ({"count": True}, "true is not a whole number"),
        ({"count": "many"}, "'many' is not a whole number"),
        ({"small": 1.0}, "1.0 is not a whole number"),
        ({"small": "1"}, "'1' is not a whole number"),
        ({"share": True}, "true is not a number"),
        ({"wait": "1h"}, "'1h' is not a duration: write seconds with an 's', as in '3600s'"),
        ({"wait": 1}, "1 is not text: put it in quotes"),
        ({"strategy": "SPOTT"}, "'SPOTT' is not one of its values (did you mean 'SPOT'?): SPOT, STANDARD"),
        ({"strategy": None}, "null is not text: put it in quotes"),
        ({"web": "yes"}, "'yes' is neither true nor false"),
        ({"state": "DONE"}, "is written by the service, not by you"),
        ({"labels": {"a": 1}}, "1 is not text: put it in quotes"),
        ({"inner": {"wbe": True}}, "unknown field 'wbe' (did you mean 'web'?)"),
        ({"inner": []}, "[] is not a mapping of fields"),
        ({"args": "a"}, "'a' is not a list"),
        ([], "[] is not a mapping of fields"),
    ],
)
def test_an_error_says_what_is_wrong(errors: Any, value: Any, what: str) -> None:
    assert [one.what for one in errors(value)] == [what]


def test_errors_have_their_location_and_come_in_the_order_of_the_document(errors: Any) -> None:
    value = {"zone": 1, "web": 1, "inner": {"args": ["a", 2], "share": "x", "area": 1}, "count": []}
    assert [one.location for one in errors(value)] == [
        ("zone",), ("web",), ("inner", "args", 1), ("inner", "share"), ("inner", "area"), ("count",)
    ]  # fmt: skip


def test_an_error_of_type_has_an_empty_value_of_the_right_type(errors: Any) -> None:
    assert errors({"args": 1}) == [SchemaError(("args",), "1 is not a list", [])]
    assert errors({"inner": 1}) == [SchemaError(("inner",), "1 is not a mapping of fields", {})]
    assert [one.empty for one in errors({"wait": "1h", "strategy": "x", "state": "x", "odd": 1})] == [None] * 4


def test_published_schemas_are_read() -> None:
    for api, name in (
        ("aiplatform.v1", "GoogleCloudAiplatformV1CustomJob"),
        ("aiplatform.v1", "GoogleCloudAiplatformV1HyperparameterTuningJob"),
        ("ml.v1", "GoogleCloudMlV1__Job"),
        ("cloudbuild.v1", "Build"),
    ):
        (error,) = google.validate(api, name, {"x": 1})
        assert error.what.startswith("unknown field 'x'")


def test_jsonschema_is_imported_without_compiling_a_grammar() -> None:
    program = (
        "import sys; from trainyard_jobs.schema import library; library.jsonschema()\n"
        "assert 'jsonschema' in sys.modules and 'rfc3987_syntax' not in sys.modules, sys.modules.keys()"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)
