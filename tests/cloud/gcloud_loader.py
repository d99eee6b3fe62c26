"""Judge job files with gcloud's own loaders; runs in gcloud's Python, see test_gcloud_validation.py.

For each line of stdin, ``{"kind": ..., "text": ...}``, a line of stdout: why gcloud, or the API whose messages it has,
refuses the file; empty if neither does. Without a network and without the checks of flags.
"""

import json
import os
import sys
import tempfile
from types import SimpleNamespace

LIB = sys.argv[1]
sys.path[:0] = [LIB, os.path.join(LIB, "third_party")]

from apitools.base.py import encoding  # noqa: E402
from googlecloudsdk.api_lib.ml_engine import jobs  # noqa: E402
from googlecloudsdk.api_lib.util import apis, messages  # noqa: E402
from googlecloudsdk.command_lib.ai.custom_jobs import validation  # noqa: E402
from googlecloudsdk.command_lib.export import util  # noqa: E402
from googlecloudsdk.core import yaml  # noqa: E402

VERTEX = apis.GetMessagesModule("aiplatform", "v1")
ML = apis.GetMessagesModule("ml", "v1")


def unrecognized(message):
    """Fields and enum values that the messages do not have. gcloud sends them; the API refuses them."""
    found = [f"{'.'.join(map(str, at))}: {', '.join(names)}" for at, names in encoding.UnrecognizedFieldIter(message)]
    return f"unrecognized: {'; '.join(found)}" if found else ""


def custom_job(text):
    if "jobSpec" in (yaml.load(text) or {}):  # a whole CustomJob, as the API takes it
        message = util.Import(VERTEX.GoogleCloudAiplatformV1CustomJob, text)
        spec = message.jobSpec
    else:
        message = spec = util.Import(VERTEX.GoogleCloudAiplatformV1CustomJobSpec, text)
    validation._ValidateWorkerPoolSpecsFromConfig(spec)
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
        answer = unrecognized(LOADERS[request["kind"]](request["text"]))
    except Exception as error:  # gcloud shows some of these as a crash; all of them end it before a request
        answer = f"{type(error).__name__}: {error}"
    print(json.dumps(answer), flush=True)
