"""A fake of Vertex AI's and AI Platform's jobs, and of the log that gcloud follows, on 127.0.0.1.

    with Vertex(log=["Epoch 1"]) as cloud:
        subprocess.run(["gcloud", "ai", "custom-jobs", "create", ...], env=os.environ | cloud.environment(folder))

It refuses what the APIs' discovery documents and the services' documentation do not allow, with the fieldViolations
that gcloud shows. None of Trainyard's own rules are used: tests compare them with this fake. A job advances by one
state with each query. The real gcloud (528) and the google-cloud-aiplatform SDK (REST) work with it.
"""

from __future__ import annotations

import datetime
import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from google.cloud.aiplatform_v1.types import CustomJob, HyperparameterTuningJob
from google.protobuf.json_format import ParseError  # type: ignore[import-untyped]

from tests.fakes import discovery
from tests.fakes.server import ApiError, Route, Server, gcloud_environment

PROJECT = "fake-project"
TOKEN = "fake-token"

STATES = ("JOB_STATE_PENDING", "JOB_STATE_RUNNING", "JOB_STATE_SUCCEEDED")
OLD_STATES = ("QUEUED", "PREPARING", "RUNNING", "SUCCEEDED")
_ENDED = ("SUCCEEDED", "FAILED", "CANCELLED", "EXPIRED", "PARTIALLY_SUCCEEDED")

_TENSORBOARD = "type.googleapis.com/google.cloud.aiplatform.v1.Tensorboard"
_MESSAGES: dict[str, Any] = {"customJobs": CustomJob, "hyperparameterTuningJobs": HyperparameterTuningJob}


def _now() -> str:
    return datetime.datetime.now(tz=datetime.UTC).isoformat().replace("+00:00", "Z")


def message(kind: str, body: Mapping[str, Any]) -> dict[str, Any]:
    """A body parsed as the SDK's message of ``customJobs`` or ``hyperparameterTuningJobs``; JSON with enum names.

    Clients may send enums as numbers, which the SDK over REST does.

    Raises:
        ApiError: the message has no such field or value.
    """
    try:
        parsed = _MESSAGES[kind].from_json(json.dumps(body))
    except ParseError as error:
        raise ApiError(400, f"Invalid JSON payload received. {error}") from None
    text = _MESSAGES[kind].to_json(
        parsed,
        use_integers_for_enums=False,
        always_print_fields_with_no_presence=False,
        preserving_proto_field_name=False,
    )
    found: dict[str, Any] = json.loads(text)
    return found


class Vertex(Server):
    """The fake.

    Attributes:
        jobs: full name -> the job as it was accepted, in JSON with enum names.
    """

    def __init__(
        self, *, log: Sequence[str] = (), states: Iterable[str] = STATES, ai_platform: bool = False, token: str = TOKEN
    ) -> None:
        """
        Args:
            log: lines that a job writes.
            states: states of a job, one for each query; the last remains.
            ai_platform: whether AI Platform accepts jobs, as it did until 31 January 2025.
            token: required access token; "" for clients without one.
        """
        super().__init__()
        self.token = token
        self.jobs: dict[str, dict[str, Any]] = {}
        self._log, self._states, self._ai_platform = list(log), list(states), ai_platform
        self._queries: dict[str, int] = {}
        self._cancelled: set[str] = set()

    def environment(self, folder: Path) -> dict[str, str]:
        """Variables that direct gcloud to the fake; ``folder`` is its home."""
        endpoints = dict.fromkeys(("AIPLATFORM", "ML", "LOGGING"), self.url)
        return gcloud_environment(folder, endpoints, token=TOKEN, project=PROJECT)

    def routes(self) -> list[Route]:
        kinds = "(customJobs|hyperparameterTuningJobs)"
        parent = r"/v1(?:beta1)?/(projects/[^/]+/locations/([^/]+))"
        return [
            ("POST", rf"{parent}/tensorboards", self._create_board),
            ("POST", rf"{parent}/{kinds}", self._create),
            ("GET", rf"{parent}/{kinds}", self._list),
            ("GET", rf"/v1(?:beta1)?/(projects/[^/]+/locations/[^/]+/{kinds}/\d+)", self._get),
            ("POST", rf"/v1(?:beta1)?/(projects/[^/]+/locations/[^/]+/{kinds}/\d+):cancel", self._cancel),
            ("POST", r"/v1/projects/([^/]+)/jobs", self._create_old),
            ("GET", r"/v1/(projects/[^/]+/jobs/\w+)()", self._get),
            ("POST", r"/v1/(projects/[^/]+/jobs/\w+)():cancel", self._cancel),
            ("POST", r"/v2/entries:list", self._entries),
        ]

    def _create(
        self, parent: str, region: str, kind: str, *, body: dict[str, Any], query: Mapping[str, str]
    ) -> dict[str, Any]:
        """Accept a job.

        Raises:
            ApiError: the service would refuse it.
        """
        job = message(kind, body)
        refuse_custom_job(job, kind)
        number = str(1000 + len(self.jobs))
        name = f"{parent}/{kind}/{number}"
        self.jobs[name] = job
        return self._resource(name)

    def _create_board(
        self, parent: str, region: str, *, body: dict[str, Any], query: Mapping[str, str]
    ) -> dict[str, Any]:
        """An operation that is already done."""
        board = body | {"name": f"{parent}/tensorboards/1", "@type": _TENSORBOARD}
        return {"name": f"{parent}/tensorboards/1/operations/1", "done": True, "response": board}

    def _create_old(self, project: str, *, body: dict[str, Any], query: Mapping[str, str]) -> dict[str, Any]:
        if not self._ai_platform:
            raise ApiError(400, "Cloud AI Platform has been deprecated. Please use Vertex AI")
        refuse_training_job(body)
        name = f"projects/{project}/jobs/{body['jobId']}"
        if name in self.jobs:
            raise ApiError(409, f"Field: job.job_id Error: A job with this id already exists: {body['jobId']}")
        self.jobs[name] = body
        return self._resource(name)

    def _list(self, parent: str, _region: str, kind: str, *, body: Any, query: Mapping[str, str]) -> dict[str, Any]:
        return {kind: [self._resource(name) for name in self.jobs if name.startswith(f"{parent}/{kind}/")]}

    def _get(self, name: str, _kind: str, *, body: Any, query: Mapping[str, str]) -> dict[str, Any]:
        if name not in self.jobs:
            raise ApiError(404, f"{name} is not found.")
        self._queries[name] = self._queries.get(name, 0) + 1
        return self._resource(name)

    def _cancel(self, name: str, _kind: str, *, body: Any, query: Mapping[str, str]) -> dict[str, Any]:
        self._cancelled.add(name)
        return {}

    def _resource(self, name: str) -> dict[str, Any]:
        """The job with its current state."""
        old = "/locations/" not in name
        states = list(OLD_STATES) if old and self._states == list(STATES) else self._states
        state = states[min(self._queries.get(name, 0), len(states) - 1)]
        if name in self._cancelled:
            state = "CANCELLED" if old else "JOB_STATE_CANCELLED"
        found = self.jobs[name] | {"state": state, "createTime": _now()}
        found |= {"etag": "YWJj"} if old else {"name": name}
        if state.removeprefix("JOB_STATE_") in _ENDED:
            found |= {"startTime": _now(), "endTime": _now()}
        if "studySpec" in found and state == "JOB_STATE_SUCCEEDED":
            metric = found["studySpec"]["metrics"][0]["metricId"]
            found["trials"] = [
                {
                    "id": str(number + 1),
                    "state": "SUCCEEDED",
                    "finalMeasurement": {"metrics": [{"metricId": metric, "value": 0.9}]},
                }
                for number in range(int(found["maxTrialCount"]))
            ]
        return found

    def _entries(self, *, body: dict[str, Any], query: Mapping[str, str]) -> dict[str, Any]:
        """Cloud Logging's entries:list, for the filter of stream-logs; clients skip entries that they have seen."""
        match = re.search(r'resource\.labels\.job_id="([^"]+)"', body.get("filter", ""))
        if not match:
            return {"entries": []}
        resource = {"type": "ml_job", "labels": {"job_id": match[1], "task_name": "workerpool0-0"}}
        return {
            "entries": [
                {
                    "insertId": f"{number:06d}",
                    "timestamp": f"2026-11-21T00:00:{number % 60:02d}Z",
                    "severity": "INFO",
                    "resource": resource,
                    "jsonPayload": {"message": line},
                    "logName": f"projects/{PROJECT}/logs/workerpool0-0",
                }
                for number, line in enumerate(self._log)
            ]
        }


# --- what the services document beyond their schemas -----------------------------------------------------------------

_GUIDE = "https://cloud.google.com/vertex-ai/docs/training"
_DISTRIBUTED = f"{_GUIDE}/distributed-training"
_COMPUTE = f"{_GUIDE}/configure-compute"
#: Google's client library refuses several replicas with a TPU, and TPU v5 and later without a topology.
_CLIENT = "https://github.com/googleapis/python-aiplatform, aiplatform/utils/worker_spec_utils.py"
_TENSORBOARD_GUIDE = "https://cloud.google.com/vertex-ai/docs/experiments/tensorboard-training"

#: Worker pools: primary, workers, parameter or reduction servers, evaluators.
_MAX_POOLS = 4
_MAX_DISPLAY_NAME = 128
_MAX_DISCRETE_VALUES = 1000

Violation = tuple[str, str]


def refuse_custom_job(job: Mapping[str, Any], kind: str = "customJobs") -> None:
    """Refuse a job that the discovery document or the service's documentation does not allow.

    Raises:
        ApiError: 400, with every violation.
    """
    name = {"customJobs": "CustomJob", "hyperparameterTuningJobs": "HyperparameterTuningJob"}[kind]
    discovery.refuse(discovery.violations("aiplatform.v1", f"GoogleCloudAiplatformV1{name}", job))
    tuning = kind == "hyperparameterTuningJobs"
    at, spec = ("trialJobSpec", job["trialJobSpec"]) if tuning else ("jobSpec", job["jobSpec"])
    found = [*_job_violations(at, spec), *(_study_violations(job) if tuning else ())]
    if len(job["displayName"]) > _MAX_DISPLAY_NAME:
        found.append(
            ("displayName", f"The name can be up to {_MAX_DISPLAY_NAME} characters long (discovery document).")
        )
    discovery.refuse(found)


def _job_violations(at: str, spec: Mapping[str, Any]) -> Iterator[Violation]:
    pools = spec["workerPoolSpecs"]
    where = f"{at}.workerPoolSpecs"
    if len(pools) > _MAX_POOLS:
        yield where, f"At most {_MAX_POOLS} worker pools ({_DISTRIBUTED})."
    if not pools or not pools[0]:
        yield where, f"The first worker pool, of the primary replica, is missing ({_DISTRIBUTED})."
        return
    if int(pools[0].get("replicaCount", 0)) != 1:
        yield f"{where}[0].replicaCount", f"The replica count of the first worker pool must be 1 ({_DISTRIBUTED})."
    for number, pool in enumerate(pools):
        if pool:
            yield from _pool_violations(f"{where}[{number}]", pool)
    if any(_is_tpu(pool) for pool in pools) and len([pool for pool in pools if pool]) > 1:
        yield where, f"A job with TPUs has one worker pool and replica ({_CLIENT})."
    output = spec.get("baseOutputDirectory", {}).get("outputUriPrefix", "gs://")
    if not output.startswith("gs://"):
        yield f"{at}.baseOutputDirectory.outputUriPrefix", "A Cloud Storage URI is required (discovery document)."
    if spec.get("tensorboard") and not spec.get("serviceAccount"):
        yield f"{at}.serviceAccount", f"A job with a TensorBoard requires a service account ({_TENSORBOARD_GUIDE})."


def _is_tpu(pool: Mapping[str, Any]) -> bool:
    machine = pool.get("machineSpec", {})
    return "tpuTopology" in machine or str(machine.get("acceleratorType", "")).startswith("TPU")


def _pool_violations(at: str, pool: Mapping[str, Any]) -> Iterator[Violation]:
    if ("containerSpec" in pool) == ("pythonPackageSpec" in pool):
        yield at, f"Either containerSpec or pythonPackageSpec is required ({_GUIDE}/create-custom-job)."
    machine = pool.get("machineSpec", {})
    if not machine.get("machineType"):
        yield f"{at}.machineSpec.machineType", f"A machine type is required ({_COMPUTE})."
    if bool(machine.get("acceleratorType")) != bool(machine.get("acceleratorCount")):
        yield f"{at}.machineSpec", f"acceleratorType and acceleratorCount are given together ({_COMPUTE})."
    if re.match(r"ct(5lp|6e)-", str(machine.get("machineType"))) and not machine.get("tpuTopology"):
        yield f"{at}.machineSpec.tpuTopology", f"Machine types of TPU v5e and v6e require a topology ({_CLIENT})."


def _study_violations(job: Mapping[str, Any]) -> Iterator[Violation]:
    """All of these are in the descriptions of the discovery document."""
    for key in ("maxTrialCount", "parallelTrialCount"):
        if int(job.get(key, 0)) < 1:
            yield key, "Required field is not set."
    study = job["studySpec"]
    for key, name in (("metrics", "metricId"), ("parameters", "parameterId")):
        names = [one[name] for one in study[key]]
        for number, one in enumerate(names):
            if re.search(r"\s", one) or names.count(one) > 1:
                yield f"studySpec.{key}[{number}].{name}", "IDs must be unique, without whitespace."
    for number, one in enumerate(study["parameters"]):
        values = one.get("discreteValueSpec", {}).get("values", [])
        if values != sorted(values) or len(values) > _MAX_DISCRETE_VALUES:
            yield f"studySpec.parameters[{number}].discreteValueSpec.values", "Values must be in increasing order."


def refuse_training_job(job: Mapping[str, Any]) -> None:
    """Refuse a job of AI Platform that the ml v1 discovery document does not allow, by its schemas or descriptions.

    Raises:
        ApiError: 400, with every violation.
    """
    # Some fields are required only for Python packages; _training_violations checks those that always are.
    discovery.refuse(discovery.violations("ml.v1", "GoogleCloudMlV1__Job", job, required=False))
    discovery.refuse(list(_training_violations(job)))


def _training_violations(job: Mapping[str, Any]) -> Iterator[Violation]:
    if not re.fullmatch(r"[A-Za-z]\w*", str(job.get("jobId", ""))):
        yield "jobId", "Required: letters, numbers and underscores, beginning with a letter."
    source = job.get("trainingInput", {})
    for key in ("scaleTier", "region"):
        if not source.get(key):
            yield f"trainingInput.{key}", "Required field is not set."
    if source.get("scaleTier") == "CUSTOM" and not source.get("masterType"):
        yield "trainingInput.masterType", "You must specify this field when scaleTier is set to CUSTOM."
    for role in ("worker", "parameterServer", "evaluator"):
        if int(source.get(f"{role}Count", 0)) and not source.get(f"{role}Type"):
            yield f"trainingInput.{role}Type", f"If you set {role}Count, you must also set {role}Type."
        if int(source.get(f"{role}Count", 0)) and source.get("scaleTier") != "CUSTOM":
            yield f"trainingInput.{role}Count", "This value can only be used when scaleTier is set to CUSTOM."
    if not source.get("runtimeVersion") and not source.get("masterConfig", {}).get("imageUri"):
        yield "trainingInput.runtimeVersion", "You must specify this field or masterConfig.imageUri."
    tpu = source.get("workerType") == "cloud_tpu" or source.get("scaleTier") == "BASIC_TPU"
    worker = source.get("workerConfig", {})
    if bool(worker.get("tpuTfVersion")) != bool(tpu and worker.get("imageUri")):
        yield "trainingInput.workerConfig.tpuTfVersion", "Required for a TPU worker with a custom container, only then."
