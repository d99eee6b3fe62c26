"""Rules about fields, types and spelling, for every kind of job.

They check the file as it was written. All other rules check it without the values that have a wrong type.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from trainyard.jobs.job_file import camel
from trainyard.jobs.schema import kubernetes
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
            "the service ignores it" if one.ignored else "gcloud sends it unchanged; the service refuses the job",
            "remove it" if one.ignored else "correct it, or remove it",
            severity=Severity.NOTE if one.ignored else Severity.REFUSE,
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
    words = r"(?i:y|n|yes|no|on|off)"
    # kubectl reads no numbers to the base of 60: https://github.com/go-yaml/yaml/tree/v2#compatibility
    sixty = "" if job.job.kind == "gke" else r"|[-+]?[0-9][0-9_]*(:[0-5]?[0-9])+(\.[0-9_]*)?"
    odd = re.compile(words + sixty)

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
                # Of Google's fields the type is known: fields_match_api refuses such a word where text is required.
                severity=Severity.REFUSE if job.job.kind == "gke" else Severity.NOTE,
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
        if kubernetes.is_custom(document):
            yield Finding(
                job.job.where(("kind",), number),
                f"{document.get('kind')} of {document.get('apiVersion')} is not checked",
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
