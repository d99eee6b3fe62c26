"""What a job must keep to: one function a rule, each with its source; the platforms' own are in rules_*.py.

A rule takes the :class:`Evidence` and yields a :class:`Flaw` for everything that breaks it; the
first line of its docstring is what it promises, and the lines below are where that stands. To add a rule, write a
function and decorate it with :func:`rule` and the kinds of jobs it is about.
"""

from __future__ import annotations

import copy
import dataclasses
import importlib
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from scripts import discovery
from scripts.cli import nearest
from scripts.documents import Location
from scripts.findings import Finding
from scripts.jobs import kubernetes
from scripts.jobs.contents import Contents
from scripts.jobs.files import JobFile, Kind, camel


@dataclass(frozen=True)
class Evidence:
    """All that is known about a job; rules look at nothing else.

    Attributes:
        region: where it is to run, if it was said.
        images: reference -> what is in the image, or None if that could not be found out.
        missing: reference -> why there is no such image.
    """

    job: JobFile
    region: str | None = None
    images: Mapping[str, Contents | None] = field(default_factory=dict)
    missing: Mapping[str, str] = field(default_factory=dict)

    @property
    def spec(self) -> dict[str, Any]:
        return self.job.spec

    def at(self, *location: int | str, document: int = 0) -> str:
        """``file:line`` of a value, given from the top of :attr:`spec` (of a document, for Kubernetes)."""
        root = () if self.job.kind == "gke" else self.job.root
        return self.job.where((*root, *location), document)


@dataclass(frozen=True)
class Flaw:
    """What a rule finds; with the rule's name it is a :class:`~scripts.findings.Finding`."""

    where: str
    what: str
    why: str
    fix: str
    note: bool = False


Rule = Callable[[Evidence], Iterator[Flaw]]

#: Every rule with the kinds of jobs it is about, in the order in which they are told.
RULES: list[tuple[Rule, tuple[Kind, ...]]] = []

#: Rules that look at what was written, whatever it is; all others get it as :func:`shaped` leaves it.
OF_SHAPE: list[Rule] = []

VERTEX: tuple[Kind, ...] = ("custom-job", "hyperparameter-tuning-job")
GOOGLE: tuple[Kind, ...] = (*VERTEX, "ai-platform")


def rule(*kinds: Kind, of_shape: bool = False) -> Callable[[Rule], Rule]:
    def add(function: Rule) -> Rule:
        RULES.append((function, kinds))
        if of_shape:
            OF_SHAPE.append(function)
        return function

    return add


def title(function: Rule) -> str:
    """What a rule promises."""
    return (function.__doc__ or function.__name__).strip().splitlines()[0].rstrip(".")


def check(evidence: Evidence) -> list[Finding]:
    """Everything that is wrong with a job, rule by rule."""
    clean = shaped(evidence)
    return [
        Finding(function.__name__, one.where, one.what, one.why, one.fix, one.note)
        for function in rules_of(evidence.job.kind)
        for one in function(evidence if function in OF_SHAPE else clean)
    ]


def shaped(evidence: Evidence) -> Evidence:
    """The same job without values that are null or of another type than their schema says.

    The rules of shape tell of these; the others need not fear a list where a mapping belongs.
    """
    job = evidence.job
    documents = [_without_null(document) for document in job.documents]
    for number, document in enumerate(documents):
        # What stands higher goes first: what was below it is gone then.
        for one in sorted(complaints(job.kind, document), key=lambda one: len(one.location)):
            if one.instead is not None:
                _take_away(document, one.location, one.instead)
        documents[number] = document
    return dataclasses.replace(evidence, job=dataclasses.replace(job, documents=documents))


def _without_null(node: Any) -> Any:
    if isinstance(node, dict):
        return {key: _without_null(value) for key, value in node.items() if value is not None}
    return [_without_null(value) for value in node] if isinstance(node, list) else node


def _take_away(node: Any, location: Location, instead: object) -> None:
    """Remove a value from its mapping; in a list, whose positions must stay, put an empty one there."""
    *steps, last = location
    for step in steps:
        try:
            node = node[step]
        except (KeyError, IndexError, TypeError):
            return
    if isinstance(node, list) and isinstance(last, int):
        node[last] = copy.deepcopy(instead)
    elif isinstance(node, dict):
        node.pop(last, None)


def complaints(kind: Kind, document: dict[str, Any]) -> list[discovery.Complaint]:
    """What a document breaks of its schema."""
    if kind == "gke":
        return list(kubernetes.complaints(document))
    api, bare, wrapped = _SCHEMAS[kind]
    key = next((one for one in ("jobSpec", "trainingInput") if one in document), "")
    return list(discovery.complaints(discovery.schemas(api), wrapped if key and wrapped else bare, document))


def rules_of(kind: Kind) -> list[Rule]:
    """The rules about a kind of job."""
    _load_all()
    return [function for function, kinds in RULES if kind in kinds]


def _load_all() -> None:
    """Have the platforms' rules register themselves; they import this module, so it cannot import them first."""
    for name in ("vertex", "accelerators", "tuning", "ai_platform", "gke", "image"):
        importlib.import_module(f"scripts.jobs.rules_{name}")


#: Kind -> API, schema of the whole file, schema of the wrapped form and its key.
_SCHEMAS: dict[Kind, tuple[str, str, str]] = {
    "custom-job": (
        "aiplatform.v1",
        "GoogleCloudAiplatformV1CustomJobSpec",
        "GoogleCloudAiplatformV1CustomJob",
    ),
    "hyperparameter-tuning-job": ("aiplatform.v1", "GoogleCloudAiplatformV1HyperparameterTuningJob", ""),
    "ai-platform": ("ml.v1", "GoogleCloudMlV1__TrainingInput", "GoogleCloudMlV1__Job"),
}


@rule(*GOOGLE, of_shape=True)
def fields_are_the_apis(job: Evidence) -> Iterator[Flaw]:
    """Every field, enum value and type is one of the API's.

    Discovery documents aiplatform v1 and ml v1. gcloud 528 sends unknown and misspelt ones as they are.
    """
    for one in complaints(job.job.kind, job.job.documents[0]):
        yield Flaw(
            job.job.where(one.location),
            f"{'.'.join(map(str, one.location)) or 'the job'}: {one.what}",
            "gcloud sends it as it is; the service refuses the job, or starts it without what was meant",
            "correct it, or leave it out",
        )


@rule(*GOOGLE, of_shape=True)
def keys_are_in_camel_case(job: Evidence) -> Iterator[Flaw]:
    """Keys are in camelCase, as gcloud's --config takes them.

    gcloud 528 passes snake_case keys on as unknown fields (custom-jobs), or does not see them (ai-platform).
    """

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
        yield Flaw(
            job.job.where(location),
            f"'{key}' is the Python SDK's spelling; gcloud's is '{camel(key)}'",
            "gcloud does not know the key, and sends the job without what it says",
            f"write {camel(key)}",
        )


@rule("custom-job", "hyperparameter-tuning-job", "ai-platform", "gke", of_shape=True)
def words_mean_the_same_to_every_reader(job: Evidence) -> Iterator[Flaw]:
    """No plain word is text to one reader of YAML and true, false or a number to another.

    YAML 1.1 (yaml.org/type/bool.html, float.html), which gcloud and kubectl read, and YAML 1.2.
    """
    odd = re.compile(r"(?i:y|n|yes|no|on|off)|[-+]?[0-9][0-9_]*(:[0-5]?[0-9])+(\.[0-9_]*)?")

    def look(node: Any, at: Location) -> Iterator[tuple[Location, str]]:
        if isinstance(node, dict):
            for key, value in node.items():
                yield from look(value, (*at, str(key)))
        elif isinstance(node, list):
            for number, value in enumerate(node):
                yield from look(value, (*at, number))
        elif type(node) is str and odd.fullmatch(node):  # quoted text is of a class of its own
            yield at, node

    for number, document in enumerate(job.job.nodes):
        for location, word in look(document, ()):
            yield Flaw(
                job.job.where(location, number),
                f"{word} without quotes is not text to gcloud and kubectl, which read YAML 1.1",
                "what arrives at the service is true, false or a number",
                f'write "{word}" if text is meant, true or false if not',
            )


@rule("custom-job")
def config_is_the_spec_alone(job: Evidence) -> Iterator[Flaw]:
    """The file is a CustomJobSpec, which is what gcloud's --config takes.

    gcloud 528: an extra jobSpec: at the top is passed on inside the job's own jobSpec.
    """
    if job.job.root:
        yield Flaw(
            job.job.where(("jobSpec",)),
            "the whole CustomJob, with its spec below jobSpec:",
            "the REST API and the SDK take it; gcloud's --config takes what is below jobSpec: alone",
            "for gcloud, leave the level of jobSpec: out",
            note=True,
        )


def unknown(word: str, valid: list[str]) -> str:
    """`` (did you mean ...?); there are: ...``"""
    return f"{nearest(word, valid)}; there are: {', '.join(valid)}"
