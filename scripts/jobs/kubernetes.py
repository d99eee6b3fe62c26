"""Kubernetes manifests against the schemas of their kinds: core kinds by kubernetes-validate, JobSets by our own."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

from scripts import documents
from scripts.cli import nearest
from scripts.discovery import Complaint
from scripts.documents import Location

JOBSET_SCHEMA = Path(__file__).with_name("jobset.schema.yaml")


#: Type, as JSON Schema calls it -> an empty value of it.
_EMPTY: dict[Any, object] = {"object": {}, "array": [], "string": "", "boolean": False, "integer": 0, "number": 0}


@cache
def _libraries() -> Any:
    """kubernetes-validate, once it is needed: with jsonschema it takes more than a second to import."""
    from kubernetes_validate import utils  # type: ignore[import-untyped]

    return utils


@cache
def _validator(kind: str, api: str) -> Any:
    """A strict validator of a core kind, or None if Kubernetes has none of that name."""
    from referencing import Registry, Resource

    utils = _libraries()
    folder = f"kubernetes-json-schema/v{utils.latest_version()}-local-strict"
    group, _, version = api.rpartition("/")
    prefix = f"{group.partition('.')[0]}-" if group else ""
    name = f"{kind.lower()}-{prefix}{version}"
    try:
        schema = utils.schema_contents(f"{folder}/{name}.json", utils.latest_version())
    except FileNotFoundError:
        return None
    definitions = utils.schema_contents(f"{folder}/_definitions.json", utils.latest_version())
    registry = Resource.from_contents(definitions) @ (Resource.from_contents(schema) @ Registry())
    return utils.jsonschema.Draft202012Validator(schema, registry=registry)


@cache
def _jobset() -> Any:
    return _libraries().jsonschema.Draft202012Validator(documents.plain(documents.read(JOBSET_SCHEMA)))


def complaints(document: dict[str, Any]) -> Iterator[Complaint]:
    """Everything in an object that is not as its kind's schema says."""
    kind, api = str(document.get("kind", "")), str(document.get("apiVersion", ""))
    if kind == "JobSet":
        yield from _of(_jobset(), document, ())
        for number, one in enumerate(replicated_jobs(document)):
            template = one.get("template")
            if isinstance(template, dict):
                job = {"apiVersion": "batch/v1", "kind": "Job", **template}
                yield from _of(_validator("Job", "batch/v1"), job, ("spec", "replicatedJobs", number, "template"))
        return
    validator = _validator(kind, api)
    if validator is None:
        yield Complaint(("apiVersion",), f"Kubernetes {_libraries().latest_version()} has no {kind} of {api}")
        return
    yield from _of(validator, document, ())


def replicated_jobs(document: dict[str, Any]) -> list[dict[str, Any]]:
    """The replicated jobs of a JobSet that are mappings at all."""
    spec = document.get("spec")
    found = spec.get("replicatedJobs") if isinstance(spec, dict) else None
    return [one for one in found if isinstance(one, dict)] if isinstance(found, list) else []


def _of(validator: Any, value: dict[str, Any], at: Location) -> Iterator[Complaint]:
    for error in sorted(validator.iter_errors(value), key=lambda one: str(list(one.absolute_path))):
        where = (*at, *error.absolute_path)
        if error.validator == "additionalProperties":
            known = error.schema.get("properties", {})
            for key in error.instance:
                if key not in known:
                    yield Complaint((*where, key), f"unknown field '{key}'{nearest(str(key), known)}")
        else:
            words = error.message if len(error.message) < 160 else f"{error.message[:150]} ..."
            wanted = error.validator_value if error.validator == "type" else None
            yield Complaint(where, words, _EMPTY.get(wanted[0] if isinstance(wanted, list) else wanted))
