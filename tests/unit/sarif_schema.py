"""What SARIF 2.1.0 requires of the parts that code scanning reads, as JSON Schema.

Written from https://docs.oasis-open.org/sarif/sarif/v2.1.0/sarif-v2.1.0.html: section numbers are beside each object.
No package of the package index carries the schema itself. Unlike there, properties that are not listed are errors.
"""

from __future__ import annotations

from typing import Any


def _object(required: list[str], **properties: Any) -> dict[str, Any]:
    return {"type": "object", "required": required, "properties": properties, "additionalProperties": False}


_TEXT = {"type": "string", "minLength": 1}
_LEVEL = {"enum": ["none", "note", "warning", "error"]}
_MESSAGE = _object(["text"], text=_TEXT)  # 3.11, 3.12
_BAG = {"type": "object", "properties": {"tags": {"type": "array", "items": _TEXT, "uniqueItems": True}}}  # 3.8
_REGION = _object(["startLine"], startLine={"type": "integer", "minimum": 1})  # 3.30
_ARTIFACT = _object(["uri"], uri={"type": "string", "pattern": r"^[^\s\\]+$"}, uriBaseId=_TEXT)  # 3.4
_LOCATION = _object(  # 3.28, 3.29
    ["physicalLocation"],
    physicalLocation=_object(["artifactLocation"], artifactLocation=_ARTIFACT, region=_REGION),
)
_RULE = _object(  # 3.49
    ["id"],
    id=_TEXT,
    name=_TEXT,
    shortDescription=_MESSAGE,
    fullDescription=_MESSAGE,
    help=_MESSAGE,
    helpUri={"type": "string", "pattern": "^https?://"},
    defaultConfiguration=_object([], level=_LEVEL),  # 3.50
    properties=_BAG,
)
_RESULT = _object(  # 3.27
    ["message", "ruleId", "locations"],
    ruleId=_TEXT,
    ruleIndex={"type": "integer", "minimum": 0},
    level=_LEVEL,
    message=_MESSAGE,
    locations={"type": "array", "items": _LOCATION, "minItems": 1, "maxItems": 10},
    partialFingerprints={"type": "object", "additionalProperties": {"type": "string"}},
    properties=_BAG,
)
_NOTIFICATION = _object(  # 3.58
    ["message"], level=_LEVEL, message=_MESSAGE, locations={"type": "array", "items": _LOCATION}
)
_INVOCATION = _object(  # 3.20
    ["executionSuccessful"],
    executionSuccessful={"type": "boolean"},
    toolExecutionNotifications={"type": "array", "items": _NOTIFICATION},
)
_DRIVER = _object(["name"], name=_TEXT, version=_TEXT, rules={"type": "array", "items": _RULE})  # 3.19
_RUN = _object(  # 3.14
    ["tool"],
    tool=_object(["driver"], driver=_DRIVER),  # 3.18
    invocations={"type": "array", "items": _INVOCATION},
    results={"type": "array", "items": _RESULT},
)

SCHEMA: dict[str, Any] = {
    "$schema": "http://json-schema.org/draft-07/schema#",
    **_object(  # 3.13
        ["version", "runs"],
        version={"const": "2.1.0"},
        runs={"type": "array", "items": _RUN},
        **{"$schema": {"type": "string", "pattern": "^https://.*sarif-schema-2.1.0.json$"}},
    ),
}
