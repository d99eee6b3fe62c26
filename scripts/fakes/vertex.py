"""A fake of Vertex AI's and AI Platform's jobs, and of the log that gcloud follows, on 127.0.0.1.

    with Vertex(log=["Epoch 1"]) as cloud:
        subprocess.run(["gcloud", "ai", "custom-jobs", "create", ...], env=os.environ | cloud.environment(folder))

It takes what the SDK's own messages take, and refuses what breaks one of our rules (scripts/jobs/rules*.py), with the
fieldViolations that gcloud shows. A job goes one state further each time it is asked for. The real gcloud (528) and the
google-cloud-aiplatform SDK (REST) work with it.
"""

from __future__ import annotations

import datetime
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from google.cloud.aiplatform_v1.types import CustomJob, HyperparameterTuningJob
from google.protobuf.json_format import ParseError  # type: ignore[import-untyped]

from scripts import discovery
from scripts.fakes.server import ApiError, Route, Server, gcloud_environment
from scripts.jobs import files, rules

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
    """A body as the SDK's message of ``customJobs`` or ``hyperparameterTuningJobs`` has it, in JSON with enum names.

    Raises:
        ApiError: the message has no such field, or no such value.
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
        jobs: full name -> the job as it was taken, in JSON with enum names.
    """

    def __init__(
        self, *, log: Sequence[str] = (), states: Iterable[str] = STATES, ai_platform: bool = False, token: str = TOKEN
    ) -> None:
        """
        Args:
            log: lines that a job writes.
            states: of a job, one further at each look; the last stays.
            ai_platform: whether AI Platform takes jobs, as it did before 31 January 2025.
            token: "" for clients that have none.
        """
        super().__init__()
        self.token = token
        self.jobs: dict[str, dict[str, Any]] = {}
        self._log, self._states, self._ai_platform = list(log), list(states), ai_platform
        self._looks: dict[str, int] = {}
        self._cancelled: set[str] = set()

    def environment(self, folder: Path) -> dict[str, str]:
        """Variables that send gcloud here; ``folder`` is its home."""
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
        """Take a job.

        Raises:
            ApiError: it has no name, or breaks a rule.
        """
        job = message(kind, body)
        if not job.get("displayName"):
            raise ApiError(400, "List of found errors: 1. Field: display_name; Message: Required field is not set.",
                           [("display_name", "Required field is not set.")])  # fmt: skip
        _check(job, region)
        number = str(1000 + len(self.jobs))
        name = f"{parent}/{kind}/{number}"
        self.jobs[name] = job
        return self._resource(name)

    def _create_board(
        self, parent: str, region: str, *, body: dict[str, Any], query: Mapping[str, str]
    ) -> dict[str, Any]:
        """An operation that is done already."""
        board = body | {"name": f"{parent}/tensorboards/1", "@type": _TENSORBOARD}
        return {"name": f"{parent}/tensorboards/1/operations/1", "done": True, "response": board}

    def _create_old(self, project: str, *, body: dict[str, Any], query: Mapping[str, str]) -> dict[str, Any]:
        if not self._ai_platform:
            raise ApiError(400, "Cloud AI Platform has been deprecated. Please use Vertex AI")
        for one in discovery.complaints(discovery.schemas("ml.v1"), "GoogleCloudMlV1__Job", body):
            raise ApiError(400, f"Invalid JSON payload received. {'.'.join(map(str, one.location))}: {one.what}")
        _check(body, None)
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
        self._looks[name] = self._looks.get(name, 0) + 1
        return self._resource(name)

    def _cancel(self, name: str, _kind: str, *, body: Any, query: Mapping[str, str]) -> dict[str, Any]:
        self._cancelled.add(name)
        return {}

    def _resource(self, name: str) -> dict[str, Any]:
        """The job as the API shows it now."""
        old = "/locations/" not in name
        states = list(OLD_STATES) if old and self._states == list(STATES) else self._states
        state = states[min(self._looks.get(name, 0), len(states) - 1)]
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
        """Cloud Logging's entries:list, for the filter of stream-logs; clients leave out what they have seen."""
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


def _check(job: dict[str, Any], region: str | None) -> None:
    """Refuse what breaks a rule.

    Raises:
        ApiError: it does; every finding is a violation.
    """
    file = files.parse(json.dumps(job), Path("job.json"))
    wrong = [one for one in rules.check(rules.Evidence(file, region)) if not one.note]
    if wrong:
        words = " ".join(f"{number}. {one.what}." for number, one in enumerate(wrong, 1))
        violations = [(one.rule, f"{one.what}: {one.fix}") for one in wrong]
        raise ApiError(400, f"List of found errors: {words}", violations)
