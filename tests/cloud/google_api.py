"""Whether Google's APIs read a message that gcloud sends: protobuf's own reader of JSON, with the APIs' messages.

Vertex AI's messages are those of google-cloud-aiplatform. AI Platform's are built from what gcloud has of them.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

from google.cloud import aiplatform_v1
from google.protobuf import descriptor_pb2, descriptor_pool, duration_pb2, json_format, message_factory

#: Fields of AI Platform that are durations; gcloud has them as text.
_DURATIONS = {"maxRunningTime", "maxWaitTime"}
_DURATION = "google.protobuf.Duration"

_Field = descriptor_pb2.FieldDescriptorProto

#: (kind, the message that gcloud sends) -> why the API does not read it; empty if it does.
Reader = Callable[[str, dict[str, Any]], str]


def reader(ai_platform: dict[str, list[dict[str, Any]]]) -> Reader:
    """The reader of the messages of both APIs.

    Args:
        ai_platform: the fields of every message of AI Platform, as ``described`` of gcloud_loader.py returns them.
    """
    training_job = _classes(ai_platform, "GoogleCloudMlV1Job")

    def read(kind: str, sent: dict[str, Any]) -> str:
        message = {
            "custom-job": aiplatform_v1.CustomJob if "jobSpec" in sent else aiplatform_v1.CustomJobSpec,
            "hyperparameter-tuning-job": aiplatform_v1.HyperparameterTuningJob,
        }.get(kind)
        try:
            json_format.ParseDict(sent, message.pb()() if message else training_job())
        except json_format.ParseError as error:
            return str(error)
        return ""

    return read


def _classes(described: dict[str, list[dict[str, Any]]], root: str) -> Any:
    """The protobuf class of a message, with the messages that it refers to."""
    file = descriptor_pb2.FileDescriptorProto(name="ml.proto", package="ml", syntax="proto3")
    file.dependency.append(duration_pb2.DESCRIPTOR.name)
    seen, waiting = set[str](), [root]
    while waiting:
        name = waiting.pop()
        if name in seen:
            continue
        seen.add(name)
        message = file.message_type.add(name=name)
        for number, about in enumerate(described[name], 1):
            waiting += _add_field(message, number, about, described)
    pool = descriptor_pool.DescriptorPool()
    pool.AddSerializedFile(duration_pb2.DESCRIPTOR.serialized_pb)
    pool.Add(file)
    return message_factory.GetMessageClass(pool.FindMessageTypeByName(f"ml.{root}"))


def _add_field(
    message: descriptor_pb2.DescriptorProto, number: int, about: dict[str, Any], described: dict[str, Any]
) -> list[str]:
    """Add a field to a message; the names of the messages that it refers to."""
    name, kind = about["name"], about["type"].removeprefix("ml.")
    field = message.field.add(name=re.sub("([A-Z])", r"_\1", name).lower(), json_name=name, number=number)
    field.label = _Field.LABEL_REPEATED if about["repeated"] else _Field.LABEL_OPTIONAL
    if name in _DURATIONS:
        field.type, field.type_name = _Field.TYPE_MESSAGE, f".{_DURATION}"
    elif about["values"]:
        # Within one message, no two enums may have the same value.
        scope = message.nested_type.add(name=f"{name}Enum")
        enum = scope.enum_type.add(name="Value")
        for value, word in enumerate(about["values"]):
            enum.value.add(name=word, number=value)
        field.type, field.type_name = _Field.TYPE_ENUM, f".ml.{message.name}.{scope.name}.{enum.name}"
    elif "." in kind:  # a mapping: a list of messages of a key and a value
        (value_field,) = described[kind]
        entry = message.nested_type.add(name=f"{name}Entry")
        entry.options.map_entry = True
        entry.field.add(name="key", number=1, type=_Field.TYPE_STRING, label=_Field.LABEL_OPTIONAL)
        found = _add_field(entry, 2, value_field, described)
        field.label = _Field.LABEL_REPEATED
        field.type, field.type_name = _Field.TYPE_MESSAGE, f".ml.{message.name}.{entry.name}"
        return found
    elif kind in described:
        field.type, field.type_name = _Field.TYPE_MESSAGE, f".ml.{kind}"
        return [kind]
    else:
        field.type = _Field.Type.Value(f"TYPE_{kind.upper()}")
    return []
