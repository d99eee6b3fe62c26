"""Rules about fields, types and spelling, for every kind of job.

They check the file as it was written. All other rules check it without the values that have a wrong type.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from trainyard.common.rule_engine import Finding, Severity, rule
from trainyard.spec.yaml_source import Location, relative
from trainyard_jobs.rules.evidence import GOOGLE, KINDS, Evidence, validate
from trainyard_jobs.schema import job_file, kinds, kubernetes
from trainyard_jobs.schema.job_file import camel
from trainyard_jobs.schema.kubernetes_defaults import mapping


def walk(node: Any, at: Location = ()) -> Iterator[tuple[Location, Any]]:
    """Yield the location and the value of everything below a node."""
    below = node.items() if isinstance(node, dict) else enumerate(node) if isinstance(node, list) else ()
    for key, value in below:
        here = (*at, str(key) if isinstance(node, dict) else key)
        yield here, value
        yield from walk(value, here)


@rule(
    *GOOGLE,
    severity=Severity.REFUSE,
    source="discovery documents aiplatform v1 and ml v1; gcloud 528 sends unknown fields and misspelt values unchanged",
)
def fields_match_api(job: Evidence) -> Iterator[Finding]:
    """Every field, enum value and type is one of the API's."""
    for one in validate(job.job.kind, job.job.documents[0]):
        yield Finding(
            job.job.where(one.location),
            f"{'.'.join(map(str, one.location)) or 'the job'}: {one.what}",
            "the service ignores it"
            if one.ignored
            else "gcloud does not check it and submits the job; the service then refuses it",
            "remove it" if one.ignored else "correct it, or remove it",
            severity=Severity.NOTE if one.ignored or one.newer else Severity.REFUSE,
        )


@rule(
    *GOOGLE,
    severity=Severity.REFUSE,
    source=(
        "https://protobuf.dev/programming-guides/json: APIs read both spellings; what gcloud itself reads of a file: "
        "_ValidateWorkerPoolSpecsFromConfig in command_lib/ai/custom_jobs/validation.py, BuildTrainingJob in "
        "api_lib/ml_engine/jobs.py and, of tuning jobs, DictToMessageWithErrorCheck in api_lib/util/messages.py of "
        "gcloud 528"
    ),
)
def keys_are_in_camel_case(job: Evidence) -> Iterator[Finding]:
    """What gcloud itself reads of the file is in camelCase; it sends other keys as they are."""
    for location, _ in walk(job.job.nodes[0]):
        key = location[-1]
        if not isinstance(key, str) or camel(key) == key or "labels" in location[:-1]:
            continue
        read = _reads(job, location)
        yield Finding(
            job.job.where(location),
            f"'{key}' is the Python SDK's spelling; gcloud's is '{camel(key)}'",
            f"gcloud does not know the key, and ends with '{read}'" if read else "gcloud does not check the value",
            f"write {camel(key)}",
            severity=Severity.REFUSE if read else Severity.NOTE,
        )


#: Keys of a task, of a worker pool and of an AI Platform job, without which gcloud ends before it sends a request.
_TASK_KEYS = ("container_spec", "python_package_spec", "image_uri", "executor_image_uri", "python_module")
_PACKAGE_KEYS = ("training_input", "package_uris", "master_config", "image_uri")


def _reads(job: Evidence, location: Location) -> str:
    """The message with which gcloud refuses the file because of a key in snake_case; empty if it sends the file."""
    if job.job.kind == "hyperparameter-tuning-job":
        return "Failed to parse value(s) in protobuf"
    node, key = job.job.nodes[0], location[-1]
    if job.job.kind == "ai-platform":
        spec = mapping(node, "trainingInput")
        named = spec.get("packageUris") or mapping(spec, "masterConfig").get("imageUri")
        of_master = key != "image_uri" or "worker" not in str(location[-2:-1]).lower()
        return "" if named or key not in _PACKAGE_KEYS or not of_master else "Non-custom jobs must have packages."
    if job.job.kind != "custom-job" or location[0] != "workerPoolSpecs" or key not in _TASK_KEYS:
        return ""
    pools = node["workerPoolSpecs"]
    pool = mapping(pools[int(location[1])] if isinstance(pools, list) else pools)
    package = mapping(pool, "pythonPackageSpec")
    container = mapping(pool, "containerSpec").get("imageUri")
    one = bool(container) != bool(package.get("executorImageUri") or package.get("pythonModule"))
    return "" if one else "Exactly one of fields [pythonPackageSpec, containerSpec] is required"


@rule(
    *KINDS,
    severity=Severity.NOTE,  # of every field the type is known: a word where text is required breaks the schema's rule
    source="https://yaml.org/type/bool.html and https://yaml.org/type/float.html; gcloud and kubectl read YAML 1.1",
)
def no_ambiguous_yaml_words(job: Evidence) -> Iterator[Finding]:
    """No unquoted word is text in YAML 1.2 and a boolean or a number in YAML 1.1."""
    words = r"(?i:y|n|yes|no|on|off)"
    # kubectl reads no numbers to the base of 60: https://github.com/go-yaml/yaml/tree/v2#compatibility
    sixty = "" if job.job.kind == "gke" else r"|[-+]?[0-9][0-9_]*(:[0-5]?[0-9])+(\.[0-9_]*)?"
    odd = re.compile(words + sixty)
    for number, document in enumerate(job.job.nodes):
        for location, word in walk(document):
            if type(word) is not str or not odd.fullmatch(word):  # quoted text has another class
                continue
            yield Finding(
                job.job.where(location, number),
                f"{word} without quotes is not text to gcloud and kubectl, which read YAML 1.1",
                "the service gets true, false or a number",
                f'write "{word}" if text is meant, true or false if not',
            )


@rule(
    *KINDS,
    severity=Severity.NOTE,
    source="https://github.com/kubernetes/kubernetes/issues/89303; https://yaml.dev/doc/ruamel.yaml/api/#Duplicate_keys",
)
def keys_are_unique(job: Evidence) -> Iterator[Finding]:
    """No key is written twice in a mapping."""
    program = "kubectl" if job.job.kind == "gke" else "gcloud"
    for key, line, read in job.job.repeated:
        yield Finding(
            f"{relative(job.job.path)}:{line}",
            f"'{key}' is written twice",
            f"{program} reads that of line {read}, and not this one",
            "remove one of them",
        )


@rule(
    "gke",
    severity=Severity.REFUSE,
    source=(
        "schemas of the newest Kubernetes in kubernetes-validate; "
        "https://github.com/kubernetes-sigs/jobset/blob/main/api/jobset/v1alpha2/jobset_types.go; "
        "https://github.com/kubeflow/trainer/blob/master/pkg/apis/trainer/v1alpha1/trainjob_types.go"
    ),
)
def manifests_match_schema(job: Evidence) -> Iterator[Finding]:
    """Every Kubernetes object matches the schema of its kind, without unknown fields."""
    for number, document in enumerate(job.job.documents):
        kind, api = str(document.get("kind")), str(document.get("apiVersion"))
        if kind == "TrainJob" and re.fullmatch(r"trainer\.kubeflow\.org/v\d+", api):
            yield Finding(
                job.job.where(("apiVersion",), number),
                f"no release of Kubeflow Trainer has a TrainJob of {api}",
                "the API server does not know the kind: no matches for kind TrainJob",
                f"write {kubernetes.TRAIN_JOB_VERSION}",
            )
        elif kubernetes.is_custom(document):
            known = kinds.kind_of(document)
            checked = ": only its pods are checked" if known and known.pods else " is not checked"
            yield Finding(
                job.job.where(("kind",), number),
                job_file.described(document) + checked,
                "its schema is that of a custom resource definition",
                "nothing, if the cluster has that definition",
                severity=Severity.NOTE,
            )
        for one in validate("gke", document):
            yield Finding(
                job.job.where(one.location, number),
                f"{'.'.join(map(str, one.location)) or 'the object'}: {one.what}",
                "kubectl refuses the object, or the server drops the field with a warning",
                "correct it, or remove it",
            )
