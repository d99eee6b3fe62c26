"""Job files of every platform: read with their lines, recognised by their shape."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from scripts import documents
from scripts.cli import UserError
from scripts.documents import Location, relative

Kind = Literal["custom-job", "hyperparameter-tuning-job", "ai-platform", "gke"]

#: Keys that tell a kind, in camelCase.
_CUSTOM_JOB = ("workerPoolSpecs", "jobSpec")
_TUNING = ("studySpec", "trialJobSpec")
_AI_PLATFORM = ("trainingInput", "scaleTier", "masterConfig", "masterType", "workerConfig", "workerType", "packageUris")

#: Kubernetes objects that are jobs.
GKE_JOBS = ("Job", "JobSet")

_WORDS = {
    "custom-job": "a CustomJob or CustomJobSpec (workerPoolSpecs)",
    "hyperparameter-tuning-job": "a HyperparameterTuningJob (studySpec, trialJobSpec)",
    "ai-platform": "an AI Platform job (trainingInput, scaleTier)",
    "gke": "Kubernetes manifests with a Job or JobSet (apiVersion, kind)",
}


def camel(key: str) -> str:
    """``worker_pool_specs`` as ``workerPoolSpecs``; other keys as they are."""
    if not re.fullmatch(r"[a-z]+(_[a-z0-9]+)+", key):
        return key
    first, *rest = key.split("_")
    return first + "".join(word.capitalize() for word in rest)


def _camel(node: Any) -> Any:
    """The keys of Google's messages in camelCase; ``labels`` are the user's own words."""
    if isinstance(node, dict):
        return {camel(key): value if key == "labels" else _camel(value) for key, value in node.items()}
    if isinstance(node, list):
        return [_camel(value) for value in node]
    return node


@dataclass(frozen=True)
class JobFile:
    """A job's configuration as its file has it.

    Attributes:
        documents: plain data. Google's keys are in camelCase, whichever way the file spells them, and
            ``workerPoolSpecs`` is a list, also where the file has one pool alone, which gcloud takes too.
        nodes: the documents as they were written, with their lines and spellings.
    """

    path: Path
    kind: Kind
    documents: list[dict[str, Any]]
    nodes: list[Any]

    def line(self, location: Location, document: int = 0) -> int | None:
        """1-based line of the value at ``location`` (camelCase) of a document; of what encloses it if it is missing."""
        node = self.nodes[document]
        written: list[int | str] = []
        for step in location:
            if isinstance(step, int) and isinstance(node, dict):
                continue  # a list of one that the file has as a mapping
            if isinstance(node, dict) and step not in node:
                step = next((key for key in node if camel(str(key)) == step), step)
            written.append(step)
            try:
                node = node[step]
            except (KeyError, IndexError, TypeError):
                node = None
        return documents.line_of(self.nodes[document], tuple(written)) or self._first_line(document)

    def _first_line(self, document: int) -> int | None:
        lines = getattr(self.nodes[document], "lc", None)
        return lines.line + 1 if lines else None

    def where(self, location: Location, document: int = 0) -> str:
        """``path:line`` of a value, as messages name it."""
        line = self.line(location, document)
        return f"{relative(self.path)}:{line}" if line else relative(self.path)

    @property
    def root(self) -> Location:
        """Where in the first document :attr:`spec` is."""
        wrapper = {
            "custom-job": "jobSpec",
            "hyperparameter-tuning-job": "trialJobSpec",
            "ai-platform": "trainingInput",
        }.get(self.kind)
        return (wrapper,) if wrapper and wrapper in self.documents[0] else ()

    @property
    def spec(self) -> dict[str, Any]:
        """The CustomJobSpec (of a trial, for a tuning job), the TrainingInput, or the first Job or JobSet."""
        if self.kind == "gke":
            return next(one for one in self.documents if one.get("kind") in GKE_JOBS)
        found = self.documents[0]
        for step in self.root:
            found = found[str(step)]
        return found


def _kind(data: list[dict[str, Any]]) -> Kind | None:
    """The kind of job that documents hold, by their keys; None if they hold none."""
    if any("apiVersion" in one and "kind" in one for one in data):
        return "gke" if any(one.get("kind") in GKE_JOBS for one in data) else None
    keys = {camel(key) for key in data[0]}
    if keys & set(_TUNING):
        return "hyperparameter-tuning-job"
    if keys & set(_CUSTOM_JOB):
        return "custom-job"
    if keys & set(_AI_PLATFORM):
        return "ai-platform"
    return None


def _normalised(document: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = _camel(document)
    for holder in (found, found.get("jobSpec"), found.get("trialJobSpec")):
        if isinstance(holder, dict) and isinstance(holder.get("workerPoolSpecs"), dict):
            holder["workerPoolSpecs"] = [holder["workerPoolSpecs"]]
    return found


def load(path: Path) -> JobFile:
    """Read a job's file, YAML or JSON.

    Raises:
        UserError: it cannot be read, or is no job; the file and line are named.
    """
    if path.suffix == ".sh":
        raise UserError(f"{relative(path)}: a script: configurations are YAML or JSON")
    return _recognised(path, documents.read_all(path))


def parse(text: str, path: Path) -> JobFile:
    """A job out of a text that ``path`` names in messages; see :func:`load`."""
    return _recognised(path, documents.parse(text, path))


def _recognised(path: Path, nodes: list[Any]) -> JobFile:
    if not nodes:
        raise UserError(f"{relative(path)}: empty; expected one of: {'; '.join(_WORDS.values())}")
    for node in nodes:
        if not isinstance(node, dict):
            raise UserError(f"{relative(path)}: expected 'key: value' pairs at the top")
    data = [documents.plain(node) for node in nodes]
    kind = _kind(data)
    if kind is None:
        keys = ", ".join(list(data[0])[:5])
        raise UserError(
            f"{relative(path)}:1: no job: its keys are {keys}; expected one of: {'; '.join(_WORDS.values())}"
        )
    if kind != "gke":
        if len(nodes) > 1:
            raise UserError(f"{relative(path)}: {len(nodes)} documents; {_WORDS[kind]} is one")
        data = [_normalised(data[0])]
    found = JobFile(path, kind, data, nodes)
    for step in found.root:
        if not isinstance(data[0][str(step)], dict):
            raise UserError(f"{found.where(found.root)}: {step}: expected 'key: value' pairs")
    return found
