"""Judge job files with gcloud's own loaders; runs in gcloud's Python, see test_gcloud_job_files.py.

For each line of stdin, ``{"kind": ..., "text": ...}``, a JSON object on a line of stdout: ``error``, why gcloud
refuses the file, or ``sent``, the message that gcloud sends. Without a network and without
the checks of flags. For the kind ``messages``, the fields of every message of AI Platform: see :func:`described`.
"""

import json
import os
import sys
import tempfile
from types import SimpleNamespace

LIB = sys.argv[1]
sys.path[:0] = [LIB, os.path.join(LIB, "third_party")]

from apitools.base.protorpclite import messages as messages_base  # noqa: E402
from apitools.base.py import encoding  # noqa: E402
from googlecloudsdk.api_lib.ml_engine import jobs  # noqa: E402
from googlecloudsdk.api_lib.util import apis, messages  # noqa: E402
from googlecloudsdk.command_lib.ai.custom_jobs import validation  # noqa: E402
from googlecloudsdk.command_lib.export import util  # noqa: E402
from googlecloudsdk.core import yaml  # noqa: E402

VERTEX = apis.GetMessagesModule("aiplatform", "v1")
ML = apis.GetMessagesModule("ml", "v1")


def unrecognized(message):
    """Numbers that are no value of an enum to gcloud, which sends them. Whether other words are, the API decides.

    Of text that is a number, implementations of protobuf's reader of JSON differ; here it is no value.
    """
    found = []
    for at, names in encoding.UnrecognizedFieldIter(message):
        parent, part = json.loads(encoding.MessageToJson(message)), message
        for edge in at:
            parent, part = parent[edge.field], getattr(part, edge.field)
            if edge.index is not None:
                parent, part = parent[edge.index], part[edge.index]
        enums = {field.name for field in part.all_fields() if isinstance(field, messages_base.EnumField)}
        found += [f"{name}: {parent[name]}" for name in names if name in enums and is_number(parent[name])]
    return f"unrecognized: {'; '.join(found)}" if found else ""


def is_number(value):
    try:
        return value is not None and float(value) is not None
    except (TypeError, ValueError):
        return False


def described(module):
    """Message -> its fields, each with name, type (a scalar's, or a message's name), values of an enum, repeated."""
    found = {}
    for name, message in vars(module).items():
        if isinstance(message, type) and issubclass(message, messages_base.Message):
            found[name] = [field_of(field) for field in sorted(message.all_fields(), key=lambda one: one.number)]
            for inner in vars(message).values():
                if isinstance(inner, type) and issubclass(inner, messages_base.Message):
                    # A mapping; its only field is a list of keys and values.
                    entry = inner.AdditionalProperty.field_by_name("value")
                    found[f"{name}.{inner.__name__}"] = [field_of(entry)]
    return found


def field_of(field):
    kind, values = str(field.variant).lower(), []
    if isinstance(field, messages_base.EnumField):
        values = list(field.type.names())
    elif isinstance(field, messages_base.MessageField):
        outer = field.type.outer_definition_name() or ""
        kind = ".".join(filter(None, [outer.rpartition("messages.")[2], field.type.__name__]))
    return {"name": field.name, "type": kind, "values": values, "repeated": field.repeated}


def custom_job(text):
    if "jobSpec" in (yaml.load(text) or {}):  # a whole CustomJob, as the API takes it
        message = util.Import(VERTEX.GoogleCloudAiplatformV1CustomJob, text)
        spec = message.jobSpec
    else:
        message = spec = util.Import(VERTEX.GoogleCloudAiplatformV1CustomJobSpec, text)
    # gcloud takes no empty pools in files. To the API, and in another rule, it matters which pool is empty.
    pools = [json.loads(encoding.MessageToJson(pool)) for pool in spec.workerPoolSpecs]
    kept = {"workerPoolSpecs": [pool for pool in pools if pool]}
    if pools == kept["workerPoolSpecs"] or any(pools):
        validation._ValidateWorkerPoolSpecsFromConfig(encoding.PyValueToMessage(type(spec), kept))
    return message


def tuning_job(text):
    return messages.DictToMessageWithErrorCheck(yaml.load(text), VERTEX.GoogleCloudAiplatformV1HyperparameterTuningJob)


def training_job(text):
    client = jobs.JobsClient(client=SimpleNamespace(MESSAGES_MODULE=ML, projects_jobs=None, _version="v1"))
    with tempfile.NamedTemporaryFile("w", suffix=".yaml") as file:
        file.write(text)
        file.flush()
        # Packages as if --packages were given: without an image, gcloud refuses jobs that have none.
        return client.BuildTrainingJob(path=file.name, trainer_uri=["gs://bucket/package.tar.gz"])


LOADERS = {"custom-job": custom_job, "hyperparameter-tuning-job": tuning_job, "ai-platform": training_job}

for line in sys.stdin:
    request = json.loads(line)
    try:
        if request["kind"] == "messages":
            answer = described(ML)
        else:
            read = LOADERS[request["kind"]](request["text"])
            answer = {"sent": json.loads(encoding.MessageToJson(read)), "error": unrecognized(read)}
    except Exception as error:  # gcloud shows some of these as a crash; all of them end it before a request
        answer = {"error": f"{type(error).__name__}: {error}"}
    print(json.dumps(answer), flush=True)
