"""What the rules for jobs look at, and the schema of every kind of job."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from trainyard.common.errors import nearest
from trainyard.spec.yaml_source import Location
from trainyard_jobs.model.image_metadata import Contents, Targets
from trainyard_jobs.schema import google, kubernetes, kubernetes_defaults
from trainyard_jobs.schema.errors import SchemaError
from trainyard_jobs.schema.job_file import JobFile, Kind

VERTEX: tuple[Kind, ...] = ("custom-job", "hyperparameter-tuning-job")
GOOGLE: tuple[Kind, ...] = (*VERTEX, "ai-platform")
KINDS: tuple[Kind, ...] = (*GOOGLE, "gke")


@dataclass(frozen=True)
class Answer:
    """Report what a cluster says of an object in a dry run.

    Attributes:
        kind, name: of the object; empty if the message does not say.
        warning: whether it takes the object.
        unknown: whether it does not know the kind.
    """

    kind: str
    name: str
    message: str
    warning: bool = False
    unknown: bool = False


@dataclass(frozen=True)
class Evidence:
    """What the rules for jobs look at.

    Attributes:
        region: where it is to run; None if not given.
        images: reference -> what is in the image; None if unknown.
        missing: reference -> why there is no such image; for an image whose content is unknown, why.
        unsigned: reference -> why the image has no valid signature; None if no signatures are demanded.
        server: what a cluster answered to a dry run; nothing if none was asked.
        targets: what messages recommend.
    """

    job: JobFile
    region: str | None = None
    images: Mapping[str, Contents | None] = field(default_factory=dict)
    missing: Mapping[str, str] = field(default_factory=dict)
    unsigned: Mapping[str, str] | None = None
    server: Sequence[Answer] = ()
    targets: Targets = tuple

    @property
    def spec(self) -> dict[str, Any]:
        return self.job.spec

    @cached_property
    def with_defaults(self) -> list[dict[str, Any]]:
        """The documents with the defaults of Jobs and JobSets."""
        return list(map(kubernetes_defaults.jobs, self.job.documents))

    def at(self, *location: int | str, document: int = 0) -> str:
        """``file:line`` of a value, given from the top of :attr:`spec` (of a document, for Kubernetes)."""
        root = () if self.job.kind == "gke" else self.job.root
        return self.job.where((*root, *location), document)


def validate(kind: Kind, document: dict[str, Any]) -> list[SchemaError]:
    """Where a document does not match the schema of its kind."""
    if kind == "gke":
        return list(kubernetes.validate(document))
    return google.validate(*google.message_of(kind, document), document)


def drop_invalid_fields(evidence: Evidence) -> Evidence:
    """The same job without values that are null or of another type than their schema requires.

    The schema rules report these. All other rules get the job from here, and may rely on the types.
    """
    job = evidence.job
    documents = [kubernetes.without_null(document) for document in job.documents]
    for document in documents:
        # Outer values first: what was inside them is gone then.
        for one in sorted(validate(job.kind, document), key=lambda one: len(one.location)):
            if one.empty is not None:
                _drop(document, one.location, one.empty)
    return dataclasses.replace(evidence, job=dataclasses.replace(job, documents=documents))


def _drop(node: Any, location: Location, empty: object) -> None:
    """Remove a value from its mapping; replace it with an empty one in a list, whose positions must stay."""
    *steps, last = location
    for step in steps:
        try:
            node = node[step]
        except (KeyError, IndexError, TypeError):
            return
    if isinstance(node, list) and isinstance(last, int):
        node[last] = copy.deepcopy(empty)
    elif isinstance(node, dict):
        node.pop(last, None)


def unknown(word: str, valid: list[str]) -> str:
    """The end of a message about ``word``: the nearest valid word, and all of them."""
    return f"{nearest(word, valid)}; there are: {', '.join(valid)}"
