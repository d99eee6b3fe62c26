"""Trainyard refuses the files of Vertex AI and AI Platform that gcloud's own loaders or the APIs' messages refuse.

The oracle has two parts, neither of this project: gcloud reads the file (gcloud_loader.py), and protobuf reads what
gcloud sends (google_api.py).
"""

from __future__ import annotations

import copy
import json
import re
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.cloud import google_api

from trainyard.common.rule_engine import Severity
from trainyard_jobs.platforms import all_rules
from trainyard_jobs.rules.evidence import Evidence
from trainyard_jobs.schema import job_file

pytestmark = [pytest.mark.concurrent, pytest.mark.needs("gcloud")]

LOADER = Path(__file__).with_name("gcloud_loader.py")

#: (kind, text) -> why gcloud or the API refuses a file; empty if neither does.
Refusal = Callable[[str, str], str]


@pytest.fixture(scope="module")
def refusal() -> Iterator[Refusal]:
    """gcloud's loaders in one process: starting it for each file would take 0.7 s."""
    program = Path(str(shutil.which("gcloud"))).resolve()
    root = program.parent.parent
    python = root / "platform" / "bundledpythonunix" / "bin" / "python3"
    interpreter = str(python) if python.is_file() else str(shutil.which("python3"))
    command = [interpreter, "-S", str(LOADER), str(root / "lib")]
    pipe, null = subprocess.PIPE, subprocess.DEVNULL
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=null, text=True) as process:
        assert process.stdin and process.stdout

        def ask(kind: str, text: str) -> Any:
            assert process.stdin and process.stdout
            process.stdin.write(json.dumps({"kind": kind, "text": text}) + "\n")
            process.stdin.flush()
            answer = process.stdout.readline()
            assert answer, "the loaders of gcloud ended"
            return json.loads(answer)

        read = google_api.reader(ask("messages", ""))

        def judge(kind: str, text: str) -> str:
            answer = ask(kind, text)
            return str(answer["error"] or read(kind, answer["sent"]))

        yield judge
        process.stdin.close()


#: The rules about what gcloud's loaders read: fields, types, enum values, and the task of each worker pool.
STRUCTURE = {"fields_match_api", "keys_are_in_camel_case", "pools_are_complete"}


def refused(text: str) -> list[str]:
    """What these rules refuse; the error, if the file cannot be read."""
    evidence = Evidence(job_file.parse(text, Path("job.yaml")))
    # gcloud compares the tasks of pools in the files of CustomJobs only.
    rules = STRUCTURE - ({"pools_are_complete"} if evidence.job.kind == "hyperparameter-tuning-job" else set())
    return [str(one) for one in all_rules.check(evidence) if one.severity is Severity.REFUSE and one.rule in rules]


IMAGE = "us-docker.pkg.dev/p/r/image:tag"
POOL = {
    "machineSpec": {"machineType": "n1-standard-8", "acceleratorType": "NVIDIA_TESLA_T4", "acceleratorCount": 1},
    "replicaCount": 1,
    "diskSpec": {"bootDiskType": "pd-ssd", "bootDiskSizeGb": 200},
    "containerSpec": {
        "imageUri": IMAGE,
        "command": ["python"],
        "args": ["-m", "x"],
        "env": [{"name": "A", "value": "b"}],
    },
}
PACKAGE = {
    "machineSpec": {"machineType": "n1-standard-8"},
    "replicaCount": "2",
    "pythonPackageSpec": {
        "executorImageUri": IMAGE,
        "packageUris": ["gs://b/p.tgz"],
        "pythonModule": "a.b",
        "args": ["c"],
    },
}
SPEC: dict[str, Any] = {
    "workerPoolSpecs": [POOL, PACKAGE],
    "scheduling": {"timeout": "3600s", "restartJobOnWorkerRestart": True, "strategy": "SPOT", "maxWaitDuration": "60s"},
    "serviceAccount": "a@p.iam.gserviceaccount.com",
    "baseOutputDirectory": {"outputUriPrefix": "gs://bucket/run"},
    "tensorboard": "projects/p/locations/us-central1/tensorboards/1",
    "enableWebAccess": False,
    "reservedIpRanges": ["a"],
}
TUNING: dict[str, Any] = {
    "displayName": "x",
    "labels": {"team": "a"},
    "studySpec": {
        "algorithm": "RANDOM_SEARCH",
        "metrics": [{"metricId": "accuracy", "goal": "MAXIMIZE"}],
        "parameters": [
            {"parameterId": "lr", "doubleValueSpec": {"minValue": 0.01, "maxValue": 1}, "scaleType": "UNIT_LOG_SCALE"},
            {"parameterId": "size", "integerValueSpec": {"minValue": "1", "maxValue": 8}},
            {"parameterId": "b", "discreteValueSpec": {"values": [1, 2.5]}},
            {"parameterId": "opt", "categoricalValueSpec": {"values": ["sgd", "adam"]}},
        ],
        "measurementSelectionType": "BEST_MEASUREMENT",
    },
    "maxTrialCount": 4,
    "parallelTrialCount": 2,
    "maxFailedTrialCount": 1,
    "trialJobSpec": SPEC,
}
CONFIG = {"imageUri": IMAGE, "acceleratorConfig": {"type": "NVIDIA_TESLA_T4", "count": 1}}
OLD: dict[str, Any] = {
    "jobId": "x",
    "labels": {"team": "a"},
    "trainingInput": {
        "scaleTier": "CUSTOM",
        "masterType": "n1-standard-8",
        "masterConfig": CONFIG | {"containerCommand": ["a"], "diskConfig": {"bootDiskSizeGb": 9}},
        "workerType": "n1-standard-8",
        "workerCount": "2",
        "workerConfig": CONFIG | {"tpuTfVersion": "2.11", "containerArgs": ["--a"]},
        "packageUris": ["gs://b/p.tgz"],
        "pythonModule": "a.b",
        "pythonVersion": "3.7",
        "runtimeVersion": "2.11",
        "region": "us-central1",
        "jobDir": "gs://b/d",
        "args": ["--x=1"],
        "useChiefInTfConfig": True,
        "encryptionConfig": {"kmsKeyName": "k"},
        "scheduling": {
            "maxRunningTime": "60s", "maxWaitTime": "1800s", "priority": 3, "strategy": "LOW_COST",
            "resilientToWorkerRestart": True,
        },
        "nasJobSpec": {
            "searchSpaceSpec": "a", "previousNasJobId": "b", "oneShotAlgorithmSpec": {"oneShotAlgorithm": 1},
            "multiTrialAlgorithmSpec": {"maxNasTrials": 3, "multiTrialAlgorithm": "GRID_SEARCH"},
        },
        "hyperparameters": {
            "goal": "MAXIMIZE",
            "maxTrials": 4,
            "hyperparameterMetricTag": "m",
            "enableTrialEarlyStopping": True,
            "params": [{
                "parameterName": "a", "type": "DOUBLE", "minValue": 0.1, "maxValue": 1,
                "scaleType": "UNIT_LOG_SCALE", "discreteValues": [1, 2], "categoricalValues": ["a"],
            }],
        },
    },
}  # fmt: skip
FILES: dict[str, list[dict[str, Any]]] = {
    "custom-job": [SPEC, {"displayName": "x", "labels": {"a": "b"}, "jobSpec": SPEC}],
    "hyperparameter-tuning-job": [TUNING],
    "ai-platform": [OLD],
}

#: Values of every type.
VALUES: list[Any] = [
    "x", "", "7", "1.5", "yes", 7, 0, 1, -1, 2.5, [], ["x"], [7], [None], [[]], [{}], {}, {"a": 1}, {"a": "b"},
    {"name": "x"}, "TPU_V3", "GRID_SEARCH", None, True, False, [True], {"a": None}, {"a": True}, "true", "null",
    "60s", "1.5s", "-60s", "60", "1m", "s", "1,5s", "0s", "315576000000s", "315576000001s", "0.000000001s",
    "-1", "+7", "07", "1e3", "1_0", "0x10", "7.0", "2.50", " ", "NaN", "Infinity", 1e30, -0.0, 2.0, 2**31 - 1, 2**31,
    -(2**31), 2**63 - 1, 2**63, str(2**63 - 1), str(2**63), [1, "2"], ["1.5", 2], [1, None],
]  # fmt: skip


def places(node: Any, at: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The location of every value below a node."""
    for key, value in node.items() if isinstance(node, dict) else enumerate(node) if isinstance(node, list) else ():
        yield (*at, key)
        yield from places(value, (*at, key))


def changed(document: dict[str, Any], change: tuple[str, tuple[Any, ...], Any]) -> None:
    """Change a place of a document, if an earlier change has left it there."""
    action, location, value = change
    *steps, last = location
    node: Any = document
    for step in steps:
        try:
            node = node[step]
        except (KeyError, IndexError, TypeError):
            return
    if not isinstance(node, dict | list) or (
        isinstance(node, list) and not (isinstance(last, int) and last < len(node))
    ):
        return
    if isinstance(node, dict) and not isinstance(last, str):
        return
    if action == "replace" and last in ("trainingInput", "jobSpec"):
        return  # without these, it is another kind of file
    if action == "replace":
        node[last] = copy.deepcopy(value)
    elif action == "remove" and (isinstance(node, list) or last in node):
        del node[last]
    elif action == "misspell" and isinstance(node, dict) and last in node:
        node[f"{last}x"] = node.pop(last)


@st.composite
def files(draw: st.DrawFn) -> tuple[str, str]:
    """A valid file of a kind with up to two changes, as YAML or JSON."""
    kind = draw(st.sampled_from(list(FILES)))
    document = copy.deepcopy(draw(st.sampled_from(FILES[kind])))
    document = json.loads(json.dumps(document))  # nothing shared
    locations = list(places(document))
    change = st.tuples(
        st.sampled_from(["replace", "replace", "replace", "remove", "misspell"]),
        st.sampled_from(locations),
        st.sampled_from(VALUES),
    )
    for one in draw(st.lists(change, max_size=2)):
        changed(document, one)
    as_json = draw(st.booleans())
    return kind, json.dumps(document, indent=1) if as_json else yaml.safe_dump(document, sort_keys=False)


def recognized(kind: str, text: str) -> bool:
    """Whether the file still is a job of that kind; other files are no jobs, or jobs of another kind."""
    try:
        return job_file.parse(text, Path("job.yaml")).kind == kind
    except job_file.NotAJobError:
        return False
    except Exception:
        return True


def judged(refusal: Refusal, kind: str, text: str) -> tuple[list[str], str]:
    """What Trainyard and what gcloud have against a file."""
    try:
        ours = refused(text)
    except job_file.UserError as error:
        ours = [str(error)]
    return ours, refusal(kind, text)


@pytest.mark.parametrize(
    ("kind", "number"), [(kind, number) for kind, all_ in FILES.items() for number in range(len(all_))]
)
def test_gcloud_accepts_the_files_that_are_changed_below(refusal: Refusal, kind: str, number: int) -> None:
    assert judged(refusal, kind, yaml.safe_dump(FILES[kind][number], sort_keys=False)) == ([], "")


def _spelt_with_underscores() -> Iterator[Any]:
    """Each valid file with one key in the spelling of protobuf, which the APIs read too."""
    for kind, (document, *_) in FILES.items():
        for location in places(document):
            *steps, last = location
            spelt = re.sub("([A-Z])", r"_\1", str(last)).lower()
            if spelt == str(last) or last == "trainingInput":
                continue  # a file without trainingInput is of another kind
            other = json.loads(json.dumps(document))
            node = other
            for step in steps:
                node = node[step]
            node[spelt] = node.pop(last)
            yield pytest.param(kind, other, id=f"{kind}-{'.'.join(map(str, location))}")


@pytest.mark.parametrize(("kind", "document"), list(_spelt_with_underscores()))
def test_a_key_with_underscores_is_refused_if_gcloud_or_the_api_refuses_it(
    refusal: Refusal, kind: str, document: dict[str, Any]
) -> None:
    text = yaml.safe_dump(document, sort_keys=False)
    ours, theirs = judged(refusal, kind, text)
    assert bool(ours) == bool(theirs), (ours, theirs)


CASES = [
    ("custom-job", "workerPoolSpecs: {containerSpec: {imageUri: a}}"),
    ("custom-job", "workerPoolSpecs: [{containerSpec: {imageUri: a, args: b}}]"),
    ("custom-job", "workerPoolSpecs: [{containerSpec: {imageUri: a, env: {name: b}}}]"),
    ("custom-job", "workerPoolSpecs: [{containerSpec: {imageUri: a}, machineSpec: {acceleratorCount: '1'}}]"),
    ("custom-job", "workerPoolSpecs: [{containerSpec: {imageUri: a}, machineSpec: []}]"),
    ("custom-job", "workerPoolSpecs: [{containerSpec: {imageUri: a}, machineSpec: {acceleratorType: 1}}]"),
    ("custom-job", "{enableWebAccess: yes, workerPoolSpecs: [{containerSpec: {imageUri: a}}]}"),
    ("custom-job", "{enableWebAccess: 'yes', workerPoolSpecs: [{containerSpec: {imageUri: a}}]}"),
    ("custom-job", "workerPoolSpecs: [{containerSpec: {imageUri: a, args: [no]}}]"),
    ("custom-job", "workerPoolSpecs: [{containerSpec: {imageUri: a, args: [1:30]}}]"),
    ("custom-job", "workerPoolSpecs: [{containerSpec: {imageUri: a}, pythonPackageSpec: {pythonModule: b}}]"),
    ("custom-job", "workerPoolSpecs: [{pythonPackageSpec: {args: [b]}}]"),
    ("custom-job", "{state: JOB_STATE_FAILED, jobSpec: {workerPoolSpecs: [{containerSpec: {imageUri: a}}]}}"),
    ("custom-job", "workerPoolSpecs: [{container_spec: {image_uri: a}}]"),
    ("hyperparameter-tuning-job", "{studySpec: {}, maxTrialCount: 2.0}"),
    ("hyperparameter-tuning-job", "{studySpec: {}, labels: {a: 1}}"),
    ("ai-platform", "trainingInput: {scheduling: {strategy: LOW_COST}, nasJobSpec: {searchSpaceSpec: a}}"),
    ("ai-platform", "trainingInput: {runtimeVersion: 2.11}"),
    ("custom-job", "{network: null, scheduling: [], workerPoolSpecs: [{containerSpec: {imageUri: a, args: null}}]}"),
    ("custom-job", "workerPoolSpecs: [{containerSpec: {imageUri: a, args: [null]}}]"),
]


@pytest.mark.parametrize(("kind", "text"), CASES)
def test_a_file_is_refused_if_gcloud_refuses_it(refusal: Refusal, kind: str, text: str) -> None:
    ours, theirs = judged(refusal, kind, text)
    assert bool(ours) == bool(theirs), (ours, theirs)


# The same files in every run, so that a change of the code alone can fail it.
@settings(max_examples=300, derandomize=True, suppress_health_check=list(HealthCheck))
@given(file=files())
def test_generated_files_are_refused_if_gcloud_refuses_them(refusal: Refusal, file: tuple[str, str]) -> None:
    kind, text = file
    if recognized(kind, text):
        ours, theirs = judged(refusal, kind, text)
        assert bool(ours) == bool(theirs), f"{text}\nTrainyard: {ours}\ngcloud: {theirs or 'accepts it'}"
