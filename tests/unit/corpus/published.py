"""Files that break one published schema in one place each, made from valid ones.

The code knows schemas, not Trainyard's rules: it gives a value another type, takes a required field away, adds an
unknown one, and leaves enums, minima and maximal numbers of entries. Schemas are JobSet's custom resource definition
(its facts are in jobset_schema.yaml, which also has those of Jobs and pods) and the discovery documents of Google's
APIs.
"""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import yaml
from tests.unit.corpus.case import Case, Document, dumped
from tests.unit.corpus.google_jobs import IMAGE, pool, pools, study
from tests.unit.corpus.kubernetes import JOBSET_DEFINITION

from trainyard.common.third_party import archive

Place = tuple[int | str, ...]

#: A value of another type, for each type of a schema. gcloud reads 7 as text and one value as a list of one.
_OTHER: Document = {
    "object": "x", "array": {"x": {}}, "string": {"x": {}}, "integer": "x", "number": "x", "boolean": "x",
}  # fmt: skip

SIDE: Document = {
    "name": "side",
    "image": "busybox",
    "restartPolicy": "Always",
    "imagePullPolicy": "Always",
    "command": ["sh"],
    "args": ["-c", "sleep 1"],
    "workingDir": "/w",
}
MAIN: Document = {
    "name": "main",
    "image": "busybox",
    "env": [
        {"name": "A", "value": "1"},
        {"name": "B", "valueFrom": {"fieldRef": {"fieldPath": "metadata.name"}}},
        {"name": "C", "valueFrom": {"secretKeyRef": {"name": "s", "key": "k"}}},
    ],
    "envFrom": [{"configMapRef": {"name": "c", "optional": True}}],
    "ports": [{"containerPort": 8471, "name": "tpu", "protocol": "TCP"}],
    "resources": {"limits": {"cpu": "1", "memory": "1Gi"}, "requests": {"cpu": "1"}},
    "securityContext": {"privileged": True, "capabilities": {"add": ["SYS_PTRACE"]}},
    "volumeMounts": [{"name": "shm", "mountPath": "/dev/shm", "readOnly": False}, {"name": "data", "mountPath": "/d"}],
    "lifecycle": {"preStop": {"exec": {"command": ["true"]}}},
    "readinessProbe": {"httpGet": {"path": "/", "port": 80}, "periodSeconds": 5},
}
POD_SPEC: Document = {
    "restartPolicy": "Never",
    "terminationGracePeriodSeconds": 60,
    "hostNetwork": True,
    "dnsPolicy": "ClusterFirstWithHostNet",
    "serviceAccountName": "training",
    "priorityClassName": "high",
    "nodeSelector": {"disk": "ssd"},
    "imagePullSecrets": [{"name": "pull"}],
    "schedulerName": "default-scheduler",
    "tolerations": [{"key": "google.com/tpu", "operator": "Exists", "effect": "NoSchedule"}],
    "initContainers": [SIDE],
    "containers": [MAIN],
    "volumes": [
        {"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": "1Gi"}},
        {"name": "data", "persistentVolumeClaim": {"claimName": "c", "readOnly": True}},
        {"name": "host", "hostPath": {"path": "/tmp", "type": "Directory"}},
        {"name": "config", "configMap": {"name": "c", "items": [{"key": "k", "path": "p"}]}},
    ],
    "affinity": {
        "nodeAffinity": {
            "requiredDuringSchedulingIgnoredDuringExecution": {
                "nodeSelectorTerms": [{"matchExpressions": [{"key": "a", "operator": "In", "values": ["b"]}]}]
            }
        }
    },
}
JOB_SPEC: Document = {
    "completions": 2,
    "parallelism": 2,
    "backoffLimit": 0,
    "completionMode": "Indexed",
    "activeDeadlineSeconds": 3600,
    "podReplacementPolicy": "Failed",
    "podFailurePolicy": {
        "rules": [
            {"action": "FailJob", "onExitCodes": {"containerName": "main", "operator": "In", "values": [1, 2]}},
            {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]},
        ]
    },
    "successPolicy": {"rules": [{"succeededIndexes": "0", "succeededCount": 1}]},
    "template": {"metadata": {"labels": {"a": "b"}}, "spec": POD_SPEC},
}
JOBSET: Document = {
    "apiVersion": "jobset.x-k8s.io/v1alpha2",
    "kind": "JobSet",
    "metadata": {"name": "js"},
    "spec": {
        "suspend": False,
        "ttlSecondsAfterFinished": 60,
        "coordinator": {"replicatedJob": "work", "jobIndex": 0, "podIndex": 0},
        "failurePolicy": {
            "maxRestarts": 2,
            "restartStrategy": "BlockingRecreate",
            "rules": [{"name": "a", "action": "FailJobSet", "onJobFailureReasons": ["PodFailurePolicy"],
                       "targetReplicatedJobs": ["work"]}],
        },
        "network": {"enableDNSHostnames": True, "publishNotReadyAddresses": True, "subdomain": "net"},
        "successPolicy": {"operator": "All", "targetReplicatedJobs": ["work"]},
        "startupPolicy": {"startupPolicyOrder": "AnyOrder"},
        "replicatedJobs": [
            {"name": "first", "replicas": 1, "template": {"spec": {"template": {"spec": {"containers": [
                {"name": "a", "image": "busybox"}]}}}}},
            {"name": "work", "replicas": 2, "groupName": "workers", "dependsOn": [{"name": "first", "status": "Ready"}],
             "template": {"spec": JOB_SPEC}},
        ],
    },
}  # fmt: skip
JOB: Document = {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": "job"}, "spec": JOB_SPEC}

#: Where the definition of JobSets has the fields of a Job.
_JOBS = ("spec", "replicatedJobs", "*", "template", "spec")


@cache
def _jobset_schema() -> Document:
    found: Document = yaml.safe_load(Path(__file__).with_name("jobset_schema.yaml").read_text(encoding="utf-8"))
    return found


def _at(document: Any, place: Place) -> Any:
    for step in place:
        document = document[step]
    return document


def _set(document: Document, place: Place, value: Any) -> Document:
    found = copy.deepcopy(document)
    _at(found, place[:-1])[place[-1]] = value
    return found


def _without(document: Document, place: Place) -> Document:
    found = copy.deepcopy(document)
    del _at(found, place[:-1])[place[-1]]
    return found


def _places(node: Any, at: Place = ()) -> Iterator[Place]:
    yield at
    items = node.items() if isinstance(node, dict) else enumerate(node) if isinstance(node, list) else ()
    for key, value in items:
        yield from _places(value, (*at, key))


def _faults(document: Document, place: Place, fact: Document) -> Iterator[tuple[str, Document]]:
    """Copies of a document that break the schema of one place: (what, copy)."""
    value, kind = _at(document, place), fact["type"]
    if kind in _OTHER and place:
        yield f"is no {kind}", _set(document, place, _OTHER[kind])
    if "enum" in fact:
        yield "is not in the enum", _set(document, place, "NoSuchValue")
    if "minimum" in fact:
        yield "below the minimum", _set(document, place, fact["minimum"] - 1)
    if "maxItems" in fact:
        yield "too many", _set(document, place, value * (fact["maxItems"] + 1))
    if kind == "object" and not fact.get("map") and isinstance(value, dict):
        yield "unknown field", _set(document, (*place, "noSuchField"), 1)
    for key in fact.get("required", ()):
        if isinstance(value, dict) and key in value:
            yield f"without {key}", _without(document, (*place, key))


def _kubernetes(name: str, document: Document, root: tuple[str, ...]) -> Iterator[Case]:
    """Faults in every place of a document whose schema is known; in lists, in the first of the same kind."""
    seen = set()
    for place in _places(document["spec"], ("spec",)):
        general = (*root, *("*" if isinstance(step, int) else step for step in place[1:]))
        fact = _jobset_schema()["fields"].get(".".join(general))
        if fact is None or general in seen:
            continue
        seen.add(general)
        for what, faulty in _faults(document, place, fact):
            where = ".".join(map(str, place))
            yield Case(f"{name} {where}: {what}", JOBSET_DEFINITION, dumped(faulty), valid=False)


# --- Google's APIs ---------------------------------------------------------------------------------------------------

TUNING: Document = {
    "displayName": "x",
    "studySpec": study(
        {"parameterId": "lr", "doubleValueSpec": {"minValue": 0.01, "maxValue": 1}, "scaleType": "UNIT_LOG_SCALE"},
        {"parameterId": "size", "integerValueSpec": {"minValue": 1, "maxValue": 8}},
        {"parameterId": "o", "categoricalValueSpec": {"values": ["sgd", "adam"]}},
        algorithm="RANDOM_SEARCH",
    ),
    "maxTrialCount": 4,
    "parallelTrialCount": 2,
    "trialJobSpec": pools(),
}
CUSTOM: Document = pools(
    pool(
        "n1-standard-8",
        "NVIDIA_TESLA_T4",
        1,
        diskSpec={"bootDiskType": "pd-ssd", "bootDiskSizeGb": 200},
        containerSpec={"imageUri": IMAGE, "command": ["a"], "args": ["b"], "env": [{"name": "A", "value": "b"}]},
    ),
    scheduling={"timeout": "3600s", "restartJobOnWorkerRestart": True, "strategy": "SPOT"},
    serviceAccount="a@p.iam",
    baseOutputDirectory={"outputUriPrefix": "gs://bucket/run"},
    enableWebAccess=False,
)
OLD: Document = {
    "jobId": "x",
    "trainingInput": {
        "scaleTier": "CUSTOM",
        "region": "us-central1",
        "masterType": "n1-standard-8",
        "masterConfig": {"imageUri": IMAGE, "containerArgs": ["a"],
                         "acceleratorConfig": {"type": "NVIDIA_TESLA_T4", "count": 1}},
        "hyperparameters": {
            "goal": "MAXIMIZE", "maxTrials": 2,
            "params": [{"parameterName": "a", "type": "DOUBLE", "minValue": 0.1, "maxValue": 1}],
        },
        "scheduling": {"maxRunningTime": "3600s"},
        "useChiefInTfConfig": True,
    },
}  # fmt: skip


#: Required fields that flags of gcloud give.
_FLAGS = ("displayName", "maxTrialCount", "parallelTrialCount")


@cache
def _discovery(api: str) -> Document:
    found: Document = json.loads(archive("google-api-python-client").read(f"{api}.json"))["schemas"]
    return found


def _document_of(api: str) -> str:
    """The link to a discovery document."""
    service, _, version = api.partition(".")
    return f"https://{service}.googleapis.com/$discovery/rest?version={version}"


def _schema_at(api: str, message: str, place: Place) -> Document | None:
    """The part of a discovery document about a place; None below mappings of any keys."""
    schema: Document = {"$ref": message}
    for step in (*place, None):
        schema = _discovery(api)[schema["$ref"]] | {"message": True} if "$ref" in schema else schema
        if step is None:
            return schema
        if isinstance(step, int):
            schema = schema["items"]
        elif step in schema.get("properties", {}):
            schema = schema["properties"][step]
        else:
            return None
    return None


def _google_fact(api: str, schema: Document) -> Document:
    """What :func:`_faults` needs of a schema."""
    required = [
        key
        for key, one in schema.get("properties", {}).items()
        if re.match(r"Required\.", one.get("description", ""))
        # A missing number is 0, a missing enum value the first, and the text of a variable may be empty.
        and "enum" not in one and not re.search("int|double", one.get("format", "")) and key not in (*_FLAGS, "value")
    ]  # fmt: skip
    if api == "ml.v1":
        required = []  # flags of gcloud can give all of them
    found = {"type": schema.get("type"), "required": required, "map": "additionalProperties" in schema}
    if re.fullmatch(r"u?int64", schema.get("format", "")):
        found["type"] = "integer"
    return found | ({"enum": schema["enum"]} if "enum" in schema else {})


def _google(name: str, api: str, message: str, document: Document) -> Iterator[Case]:
    for place in _places(document):
        schema = _schema_at(api, message, place)
        if schema is None:
            continue
        faults = list(_faults(document, place, _google_fact(api, schema)))
        if schema.get("format") == "google-duration":
            faults.append(("is no duration", _set(document, place, "1h")))
        for what, faulty in faults:
            where = ".".join(map(str, place)) or "the file"
            yield Case(f"{name} {where}: {what}", _document_of(api), dumped(faulty), valid=False)


def corpus() -> Iterator[Case]:
    """The valid files, and all faults."""
    for name, document, root in (("JobSet", JOBSET, ("spec",)), ("Job", JOB, _JOBS)):
        yield Case(f"{name} that faults are made from", JOBSET_DEFINITION, dumped(document), valid=True)
        yield from _kubernetes(name, document, root)
    vertex = "GoogleCloudAiplatformV1"
    for name, api, message, document in (
        ("CustomJob", "aiplatform.v1", f"{vertex}CustomJobSpec", CUSTOM),
        ("tuning job", "aiplatform.v1", f"{vertex}HyperparameterTuningJob", TUNING),
        ("AI Platform job", "ml.v1", "GoogleCloudMlV1__Job", OLD),
    ):
        yield Case(f"{name} that faults are made from", _document_of(api), dumped(document), valid=True)
        yield from _google(name, api, message, document)
