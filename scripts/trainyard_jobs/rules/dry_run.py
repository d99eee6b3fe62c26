"""Ask a cluster's API server, with its webhooks, by a dry run of kubectl."""

from __future__ import annotations

import re
from collections.abc import Iterator

from trainyard.common.rule_engine import Finding, Severity, rule
from trainyard.spec.yaml_source import Location
from trainyard_jobs.rules.evidence import Answer, Evidence
from trainyard_jobs.schema.kubernetes_defaults import mapping

#: Lines of kubectl: StandardErrorMessage and MultilineError in staging/src/k8s.io/kubectl/pkg/cmd/util/helpers.go of
#: https://github.com/kubernetes/kubernetes.
_INVALID = re.compile(r'The (\S+) "([^"]*)" is invalid:? ?(.*)')
_ONE_OF_SEVERAL = re.compile(r"\* (.+)")
_OTHER = re.compile(r'Error from server(?: \(\w+\))?: (?:error when \w+ "(?:[^"\\]|\\.)*": )?(.+)')
_NAMED = re.compile(r'(\w+)[\w.-]* "([^"]*)" is invalid: (.+)')
_NO_KIND = re.compile(r'no matches for kind "([^"]*)" in version "([^"]*)"')
_WARNING = re.compile(r"Warning: (.+)")

#: What kubectl warns of an object that 'kubectl create' made, and the most characters of a message that are kept: that
#: of a field that cannot be changed has the whole field.
_CREATED = "last-applied-configuration"
_LONGEST = 300

#: The field that a message is about, at its start or in quotes.
_FIELD = re.compile(r'^([a-z]\w*(?:\.\w+|\[[^]]*\])*): |unknown field "([^"]+)"')


def answers(stderr: str) -> list[Answer]:
    """Return what a server says of the objects of a file, in the words of kubectl; nothing of other errors."""
    found: list[Answer] = []
    kind = name = ""
    for line in map(str.strip, stderr.splitlines()):
        if match := _INVALID.match(line):
            kind, name, line = match[1].partition(".")[0], match[2], match[3]
            found += [Answer(kind, name, line)] if line else []
        elif match := _ONE_OF_SEVERAL.match(line):
            found.append(Answer(kind, name, match[1]))
        elif match := _NO_KIND.search(line):
            found.append(Answer(match[1], "", f"the cluster has no {match[1]} of {match[2]}", unknown=True))
        elif match := _OTHER.match(line):
            named = _NAMED.match(match[1])
            found.append(Answer(named[1], named[2], named[3]) if named else Answer("", "", match[1]))
        elif (match := _WARNING.match(line)) and _CREATED not in line:
            found.append(Answer("", "", match[1], warning=True))
    return found


def _shown(message: str) -> str:
    half = _LONGEST // 2
    return message if len(message) <= _LONGEST else f"{message[:half]} ... {message[-half:]}"


def _place(job: Evidence, answer: Answer) -> tuple[Location, int]:
    """Return the field that an answer is about, and its document; the kind of the first if it names none."""
    kind = answer.kind or next(iter(re.findall(r'(\w+) in version "', answer.message)), "")
    numbers = [
        number
        for number, document in enumerate(job.job.documents)
        if document.get("kind") == kind and answer.name in ("", mapping(document, "metadata").get("name"))
    ]
    match = _FIELD.search(answer.message)
    steps = re.findall(r"\w+|\[[^]]*\]", match[1] or match[2]) if match and numbers else []
    location = tuple(int(step[1:-1]) if step[1:-1].isdigit() else step.strip("[]") for step in steps)
    return location or ("kind",), numbers[0] if numbers else 0


@rule(
    "gke",
    severity=Severity.REFUSE,
    source="https://kubernetes.io/docs/reference/using-api/api-concepts/#dry-run (asked with --server)",
)
def cluster_takes_the_objects(job: Evidence) -> Iterator[Finding]:
    """The cluster takes every object in a dry run, where it is asked."""
    for answer in job.server:
        where = job.job.where(*_place(job, answer))
        message = _shown(answer.message)
        if answer.warning:
            yield Finding(where, message, "the cluster warns of it", "correct it, or ignore it", Severity.NOTE)
        elif answer.unknown:
            fix = "install its controller there, or use another cluster"
            yield Finding(where, message, "its API server does not know the kind", fix)
        else:
            yield Finding(where, message, "the cluster refuses it", "correct it")
