"""Strict, offline validation of Kubernetes objects.

Core kinds and pods by the schemas of kubernetes-validate, JobSets by jobset.yaml, TrainJobs by trainjob.yaml.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

from trainyard.common import third_party
from trainyard.common.errors import nearest
from trainyard.spec import yaml_source
from trainyard.spec.yaml_source import Location
from trainyard_jobs.schema import kinds, library
from trainyard_jobs.schema.errors import EMPTY, SchemaError
from trainyard_jobs.schema.kubernetes_defaults import entries, sequence

#: Schema of JobSets, from jobset_types.go of https://github.com/kubernetes-sigs/jobset.
JOBSET_SCHEMA = Path(__file__).with_name("jobset.yaml")
TRAIN_JOB_SCHEMA = Path(__file__).with_name("trainjob.yaml")
TRAIN_JOB_VERSION = "trainer.kubeflow.org/v1alpha1"

#: Archive of the schemas of Kubernetes' newest version, which has the number of the package's.
_SCHEMAS = "kubernetes-validate"


@cache
def _validator(kind: str, api: str) -> Any:
    """A strict validator of a core kind, or None if Kubernetes has none of that name."""
    from referencing import Registry, Resource

    jsonschema = library.jsonschema()
    if not re.fullmatch(r"[A-Za-z0-9]{1,100}", kind):  # a user's text, which becomes a name in the archive
        return None
    group, _, version = api.rpartition("/")
    prefix = f"{group.partition('.')[0]}-" if group else ""
    name = f"{kind.lower()}-{prefix}{version}"
    try:
        schema = _schema(name)
    except KeyError:
        return None
    registry = Resource.from_contents(_schema("_definitions")) @ (Resource.from_contents(schema) @ Registry())
    formats = jsonschema.FormatChecker(formats=())
    formats.checks("int32")(lambda one: not isinstance(one, int) or -(2**31) <= one < 2**31)
    return jsonschema.Draft202012Validator(schema, registry=registry, format_checker=formats)


@cache
def _schema(name: str) -> Any:
    """Return the schema of a kind, or of ``_definitions``: the types of which Kubernetes' objects consist."""
    return json.loads(third_party.archive(_SCHEMAS).read(f"{name}.json"))


@cache
def _custom(schema: Path) -> Any:
    """Return the validator of a custom resource, whose schema may refer to Kubernetes' types."""
    from referencing import Registry, Resource

    definitions = Resource.from_contents(_schema("_definitions"))
    registry = (definitions @ Registry()).with_resource("kubernetes", definitions)
    return library.jsonschema().Draft202012Validator(yaml_source.plain(yaml_source.read(schema)), registry=registry)


def without_null(node: Any) -> Any:
    """The same data without fields that are null, as the API server reads it."""
    if isinstance(node, dict):
        return {key: without_null(value) for key, value in node.items() if value is not None}
    return [without_null(value) for value in node] if isinstance(node, list) else node


def is_custom(document: dict[str, Any]) -> bool:
    """Whether an object is of a custom resource definition, whose schema is not known here."""
    group, slash, _ = str(document.get("apiVersion", "")).rpartition("/")
    core = not slash or group in ("apps", "autoscaling", "batch", "policy") or document.get("kind") == "JobSet"
    known = core or (document.get("kind"), document.get("apiVersion")) == ("TrainJob", TRAIN_JOB_VERSION)
    return not known and _validator(str(document.get("kind", "")), str(document.get("apiVersion", ""))) is None


def validate(document: dict[str, Any]) -> Iterator[SchemaError]:
    """Everything in an object that does not match the schema of its kind, unknown fields included.

    Of other custom resource definitions than JobSets and TrainJobs, only the pod templates of known kinds are.
    """
    document = without_null(document)
    kind, api = str(document.get("kind", "")), str(document.get("apiVersion", ""))
    if kind == "JobSet":
        yield from _errors(_custom(JOBSET_SCHEMA), document, ())
        yield from _part(document, "ConfigMap", "v1", ("metadata",), ())
        for number, one in enumerate(replicated_jobs(document)):
            at: Location = ("spec", "replicatedJobs", number, "template")
            if isinstance(one.get("template"), dict):
                yield from _errors(_validator("Job", "batch/v1"), _object("Job", "batch/v1", one["template"]), at)
        for place, policy in entries(document, (), "spec", "volumeClaimPolicies"):
            for at, template in entries(policy, place, "templates"):
                yield from _part(template, "PersistentVolumeClaim", "v1", ("metadata", "spec"), at)
    elif (kind, api) == ("TrainJob", TRAIN_JOB_VERSION):
        yield from _errors(_custom(TRAIN_JOB_SCHEMA), document, ())
    elif is_custom(document):
        for at, template in kinds.pod_templates(document):
            yield from _part(template, "Pod", "v1", ("metadata", "spec"), at)
    elif (validator := _validator(kind, api)) is None:
        yield SchemaError(
            ("apiVersion",), f"Kubernetes {third_party.sources()[_SCHEMAS]['version']} has no {kind} of {api}"
        )
    else:
        yield from _errors(validator, document, ())


def _object(kind: str, api: str, fields: dict[str, Any]) -> dict[str, Any]:
    return {"apiVersion": api, "kind": kind, **fields}


def _part(document: dict[str, Any], kind: str, api: str, keys: tuple[str, ...], at: Location) -> Iterator[SchemaError]:
    """Errors of some fields of an object, which are those of a core kind."""
    fields = {key: document[key] for key in keys if isinstance(document.get(key), dict)}
    yield from _errors(_validator(kind, api), _object(kind, api, fields), at)


def replicated_jobs(document: dict[str, Any]) -> list[dict[str, Any]]:
    """The replicated jobs of a JobSet, as far as they are mappings."""
    return [job for job in sequence(document, "spec", "replicatedJobs") if isinstance(job, dict)]


def _errors(validator: Any, value: dict[str, Any], at: Location) -> Iterator[SchemaError]:
    for error in sorted(validator.iter_errors(value), key=lambda one: str(list(one.absolute_path))):
        where = (*at, *error.absolute_path)
        if error.validator == "additionalProperties":
            known = error.schema.get("properties", {})
            for key in error.instance:
                if key not in known:
                    yield SchemaError((*where, key), f"unknown field '{key}'{nearest(str(key), known)}")
        else:
            words = error.message if len(error.message) < 160 else f"{error.message[:150]} ..."
            wanted = error.validator_value if error.validator == "type" else None
            if error.validator == "enum" and not isinstance(error.instance, str):
                wanted = "string"  # all enums are of text; a mapping there has another type too
            yield SchemaError(where, words, EMPTY.get(str(wanted[0] if isinstance(wanted, list) else wanted)))
