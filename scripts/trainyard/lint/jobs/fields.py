"""Rules about fields, types and spelling, for every kind of job.

They check the file as it was written. All other rules check it without the values that have a wrong type.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from trainyard.jobs.job_file import camel
from trainyard.lint.engine import Finding, Severity, rule
from trainyard.lint.jobs.evidence import GOOGLE, KINDS, Evidence, validate
from trainyard.spec.yaml_source import Location


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
            "gcloud sends it unchanged; the service refuses the job, or ignores the field",
            "correct it, or remove it",
        )


@rule(
    *GOOGLE,
    severity=Severity.REFUSE,
    source="gcloud 528: custom-jobs sends snake_case keys as unknown fields, ai-platform ignores them",
)
def keys_are_in_camel_case(job: Evidence) -> Iterator[Finding]:
    """Keys are in camelCase, as 'gcloud --config' takes them."""

    def look(node: Any, at: Location) -> Iterator[tuple[Location, str]]:
        if isinstance(node, dict):
            for key, value in node.items():
                if camel(str(key)) != key and at[-1:] != ("labels",):
                    yield (*at, str(key)), str(key)
                if key != "labels":
                    yield from look(value, (*at, str(key)))
        elif isinstance(node, list):
            for number, value in enumerate(node):
                yield from look(value, (*at, number))

    for location, key in look(job.job.nodes[0], ()):
        yield Finding(
            job.job.where(location),
            f"'{key}' is the Python SDK's spelling; gcloud's is '{camel(key)}'",
            "gcloud does not know the key, and ignores its value",
            f"write {camel(key)}",
        )


@rule(
    *KINDS,
    severity=Severity.REFUSE,
    source="https://yaml.org/type/bool.html and https://yaml.org/type/float.html; gcloud and kubectl read YAML 1.1",
)
def no_ambiguous_yaml_words(job: Evidence) -> Iterator[Finding]:
    """No unquoted word is text in YAML 1.2 and a boolean or a number in YAML 1.1."""
    odd = re.compile(r"(?i:y|n|yes|no|on|off)|[-+]?[0-9][0-9_]*(:[0-5]?[0-9])+(\.[0-9_]*)?")

    def look(node: Any, at: Location) -> Iterator[tuple[Location, str]]:
        if isinstance(node, dict):
            for key, value in node.items():
                yield from look(value, (*at, str(key)))
        elif isinstance(node, list):
            for number, value in enumerate(node):
                yield from look(value, (*at, number))
        elif type(node) is str and odd.fullmatch(node):  # quoted text has another class
            yield at, node

    for number, document in enumerate(job.job.nodes):
        for location, word in look(document, ()):
            yield Finding(
                job.job.where(location, number),
                f"{word} without quotes is not text to gcloud and kubectl, which read YAML 1.1",
                "the service gets true, false or a number",
                f'write "{word}" if text is meant, true or false if not',
            )


@rule(
    "gke",
    severity=Severity.REFUSE,
    source=(
        "schemas of the newest Kubernetes in kubernetes-validate; "
        "https://github.com/kubernetes-sigs/jobset/blob/main/api/jobset/v1alpha2/jobset_types.go"
    ),
)
def manifests_match_schema(job: Evidence) -> Iterator[Finding]:
    """Every Kubernetes object matches the schema of its kind, without unknown fields."""
    for number, document in enumerate(job.job.documents):
        for one in validate("gke", document):
            yield Finding(
                job.job.where(one.location, number),
                f"{'.'.join(map(str, one.location)) or 'the object'}: {one.what}",
                "kubectl refuses the object, or the server drops the field with a warning",
                "correct it, or remove it",
            )
