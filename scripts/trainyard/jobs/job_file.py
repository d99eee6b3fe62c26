"""Job files of all platforms: read with line numbers, recognized by their keys."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from trainyard.console import UserError
from trainyard.jobs.schema import google
from trainyard.spec import yaml_source
from trainyard.spec.yaml_source import Location, relative

Kind = Literal["custom-job", "hyperparameter-tuning-job", "ai-platform", "gke"]

#: Keys that identify a kind, in camelCase.
_CUSTOM_JOB = ("workerPoolSpecs", "jobSpec")
_TUNING = ("studySpec", "trialJobSpec")
_AI_PLATFORM = ("trainingInput", "scaleTier", "masterConfig", "masterType", "workerConfig", "workerType", "packageUris")

#: Kubernetes objects that are jobs.
GKE_JOBS = ("Job", "JobSet")

_DESCRIPTIONS = {
    "custom-job": "a CustomJob or CustomJobSpec (workerPoolSpecs)",
    "hyperparameter-tuning-job": "a HyperparameterTuningJob (studySpec, trialJobSpec)",
    "ai-platform": "an AI Platform job (trainingInput, scaleTier)",
    "gke": "Kubernetes manifests with a Job or JobSet (apiVersion, kind)",
}


#: Words of which a job file has at least one, whichever way it spells its keys.
_WORDS = re.compile(
    "apiVersion|" + "|".join(re.sub("([A-Z])", r"_?\1", key) for key in (*_CUSTOM_JOB, *_TUNING, *_AI_PLATFORM)),
    re.IGNORECASE,
)


class NotAJobError(UserError):
    """A readable file that is not a job."""


def may_be_job(text: str) -> bool:
    """Whether a text has a word that every job has; False for most other files, which then need not be parsed."""
    return bool(_WORDS.search(text))


def camel(key: str) -> str:
    """``worker_pool_specs`` as ``workerPoolSpecs``; other keys as they are."""
    if not re.fullmatch(r"[a-z]+(_[a-z0-9]+)+", key):
        return key
    first, *rest = key.split("_")
    return first + "".join(word.capitalize() for word in rest)


def _camel(node: Any) -> Any:
    """The keys of Google's messages in camelCase; those below ``labels`` are the user's and stay."""
    if isinstance(node, dict):
        return {camel(key): value if key == "labels" else _camel(value) for key, value in node.items()}
    if isinstance(node, list):
        return [_camel(value) for value in node]
    return node


@dataclass(frozen=True)
class JobFile:
    """The configuration of a job.

    Attributes:
        documents: plain data. Google's keys are in camelCase, whichever way the file spells them, and values as gcloud
            reads them: see :func:`trainyard.jobs.schema.google.as_gcloud_reads`.
        nodes: the documents as parsed, with line numbers and the file's spelling.
    """

    path: Path
    kind: Kind
    documents: list[dict[str, Any]]
    nodes: list[Any]

    def line(self, location: Location, document: int = 0) -> int | None:
        """1-based line of the value at ``location`` (camelCase) of a document; of its parent if it is missing."""
        node = self.nodes[document]
        written: list[int | str] = []
        for step in location:
            if isinstance(step, int) and isinstance(node, dict):
                continue  # the file has a mapping where the data has a list of one
            if isinstance(node, dict) and step not in node:
                step = next((key for key in node if camel(str(key)) == step), step)
            written.append(step)
            try:
                node = node[step]
            except (KeyError, IndexError, TypeError):
                node = None
        return yaml_source.line_of(self.nodes[document], tuple(written)) or self._first_line(document)

    def _first_line(self, document: int) -> int | None:
        lines = getattr(self.nodes[document], "lc", None)
        return lines.line + 1 if lines else None

    def where(self, location: Location, document: int = 0) -> str:
        """``path:line`` of a value, for messages."""
        line = self.line(location, document)
        return f"{relative(self.path)}:{line}" if line else relative(self.path)

    @property
    def root(self) -> Location:
        """Location of :attr:`spec` in the first document."""
        wrapper = {
            "custom-job": "jobSpec",
            "hyperparameter-tuning-job": "trialJobSpec",
            "ai-platform": "trainingInput",
        }.get(self.kind)
        # Only the other two may leave out what is around the spec.
        tuning = self.kind == "hyperparameter-tuning-job"
        return (wrapper,) if wrapper and (tuning or wrapper in self.documents[0]) else ()

    @property
    def spec(self) -> dict[str, Any]:
        """The CustomJobSpec (of a trial, for a tuning job), the TrainingInput, or the first Job or JobSet."""
        if self.kind == "gke":
            return next(one for one in self.documents if one.get("kind") in GKE_JOBS)
        found: Any = self.documents[0]
        for step in self.root:
            found = found.get(str(step))
        return found if isinstance(found, dict) else {}


def _recognize(data: list[dict[str, Any]]) -> Kind | None:
    """The kind of job that the documents describe, by their keys; None if they describe none."""
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


#: Unquoted words that are booleans in YAML 1.1, which gcloud reads, and text in YAML 1.2: https://yaml.org/type/bool.html
_BOOLEANS = dict.fromkeys(("y", "yes", "on"), True) | dict.fromkeys(("n", "no", "off"), False)


def _yaml_1_1(node: Any) -> Any:
    """A node with these words, and numbers to base 60, as gcloud reads them; quoted text has another class than str."""
    if isinstance(node, dict):
        return {key: _yaml_1_1(value) for key, value in node.items()}
    if isinstance(node, list):
        return [_yaml_1_1(value) for value in node]
    if type(node) is str and node in (node.lower(), node.upper(), node.capitalize()):
        if node.lower() in _BOOLEANS:
            return _BOOLEANS[node.lower()]
        if re.fullmatch(r"[-+]?[1-9][0-9]*(:[0-5]?[0-9])+", node):
            number = 0
            for part in node.lstrip("-+").split(":"):
                number = number * 60 + int(part)
            return -number if node.startswith("-") else number
    return node


def load(path: Path) -> JobFile:
    """Read a job file, YAML or JSON.

    Raises:
        NotAJobError: it is not a job.
        UserError: it cannot be read; the message gives file and line.
    """
    if path.suffix == ".sh":
        raise UserError(f"{relative(path)}: a shell script: job files are YAML or JSON")
    return _job_file(path, yaml_source.read_all(path))


def parse(text: str, path: Path) -> JobFile:
    """A job from its text; messages name ``path``. See :func:`load`."""
    return _job_file(path, yaml_source.parse(text, path))


def _job_file(path: Path, nodes: list[Any]) -> JobFile:
    if not nodes:
        raise NotAJobError(f"{relative(path)}: empty; expected one of: {'; '.join(_DESCRIPTIONS.values())}")
    for node in nodes:
        if not isinstance(node, dict):
            raise NotAJobError(f"{relative(path)}: expected 'key: value' pairs at the top level")
    data = [yaml_source.plain(node) for node in nodes]
    kind = _recognize(data)
    if kind is None:
        keys = ", ".join(list(data[0])[:5])
        raise NotAJobError(
            f"{relative(path)}:1: not a job: its keys are {keys}; expected one of: {'; '.join(_DESCRIPTIONS.values())}"
        )
    if kind != "gke":
        if len(nodes) > 1:
            raise UserError(f"{relative(path)}: {len(nodes)} documents; {_DESCRIPTIONS[kind]} has one")
        document: dict[str, Any] = _camel(yaml_source.plain(_yaml_1_1(nodes[0])))
        data = [google.as_gcloud_reads(kind, document)]
    found = JobFile(path, kind, data, nodes)
    for step in found.root:
        if not isinstance(data[0].get(str(step), {}), dict):
            raise UserError(f"{found.where(found.root)}: {step}: expected 'key: value' pairs")
    return found
