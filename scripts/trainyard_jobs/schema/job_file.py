"""Job files of all platforms: read with line numbers, recognized by their keys."""

from __future__ import annotations

import dataclasses
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from trainyard.common.errors import UserError, one_line
from trainyard.spec import yaml_source
from trainyard.spec.yaml_source import Location, Repeated, relative
from trainyard_jobs.schema import google, kinds

Kind = Literal["custom-job", "hyperparameter-tuning-job", "ai-platform", "gke"]

#: Keys that identify a kind, in camelCase.
_CUSTOM_JOB = ("workerPoolSpecs", "jobSpec")
_TUNING = ("studySpec", "trialJobSpec")
_AI_PLATFORM = ("trainingInput", "scaleTier", "masterConfig", "masterType", "workerConfig", "workerType", "packageUris")

_DESCRIPTIONS = {
    "custom-job": "a CustomJob or CustomJobSpec (workerPoolSpecs)",
    "hyperparameter-tuning-job": "a HyperparameterTuningJob (studySpec, trialJobSpec)",
    "ai-platform": "an AI Platform job (trainingInput, scaleTier)",
    "gke": f"Kubernetes manifests (apiVersion, kind) with one of {', '.join(kinds.KINDS)}",
}

#: Words of which a job file has at least one, whichever way it spells its keys.
_WORDS = re.compile(
    "apiVersion|" + "|".join(re.sub("([A-Z])", r"_?\1", key) for key in (*_CUSTOM_JOB, *_TUNING, *_AI_PLATFORM)),
    re.IGNORECASE,
)

#: Fields of a SkyPilot task, get_task_schema of sky/utils/schemas.py in SkyPilot 0.14.1; ``experimental`` is a field up
#: to 0.9. And those of the first document of a group of tasks: _JOB_GROUP_HEADER_FIELDS of sky/utils/dag_utils.py.
_SKY_PILOT = {
    "name", "workdir", "event_callback", "num_nodes", "resources", "file_mounts", "file_mounts_mapping", "service",
    "pool", "setup", "run", "envs", "secrets", "managed_secrets", "inputs", "outputs", "config", "volumes",
    "volume_mounts", "api_server_access", "_metadata", "experimental",
}  # fmt: skip
_SKY_PILOT_GROUP = {"name", "execution", "primary_tasks", "termination_delay", "inter_connection"}

#: Fields of which a task has at least one; all are optional.
_OF_A_TASK = {"run", "setup", "resources", "num_nodes", "file_mounts", "service", "pool"}


def described(document: dict[str, Any]) -> str:
    """Return kind and version of a Kubernetes object, for messages."""
    return one_line(f"{str(document.get('kind'))[:60]} of {str(document.get('apiVersion'))[:60]}")


def _is_sky_pilot(data: list[dict[str, Any]]) -> bool:
    tasks = data[1:] if len(data) > 1 and _SKY_PILOT_GROUP.issuperset(data[0]) else data
    return all(_SKY_PILOT.issuperset(one) and _OF_A_TASK & set(one) for one in tasks)


class NotAJobError(UserError):
    """A readable file that is not a job."""


class OtherFormatError(NotAJobError):
    """A job of a scheduler whose own program checks it."""


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
            reads them: see :func:`trainyard_jobs.schema.google.as_gcloud_reads`.
        nodes: the documents as parsed, with line numbers and the file's spelling.
        repeated: see :class:`trainyard.spec.yaml_source.Repeated`.
    """

    path: Path
    kind: Kind
    documents: list[dict[str, Any]]
    nodes: list[Any]
    repeated: tuple[tuple[str, int, int], ...] = ()

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
        first = getattr(self.nodes[document], "lc", None)
        return yaml_source.line_of(self.nodes[document], tuple(written)) or (first.line + 1 if first else None)

    def where(self, location: Location, document: int = 0) -> str:
        """``path:line`` of a value, for messages."""
        line = self.line(location, document)
        return f"{relative(self.path)}:{line}" if line else relative(self.path)

    def error(self, location: Location, what: str, document: int = 0) -> UserError:
        """Return an error that gives the line of a value."""
        return UserError(f"{self.where(location, document)}: {what}")

    @property
    def root(self) -> Location:
        """Location of :attr:`spec` in the first document."""
        if self.kind == "hyperparameter-tuning-job":
            return ("trialJobSpec",)
        # The other two may leave out what is around the spec.
        wrapper = google.WRAPPERS.get(self.kind)
        return (wrapper,) if wrapper in self.documents[0] else ()

    @property
    def spec(self) -> dict[str, Any]:
        """The CustomJobSpec (of a trial, for a tuning job), the TrainingInput, or the first of :data:`kinds.KINDS`."""
        if self.kind == "gke":
            return next(one for one in self.documents if kinds.kind_of(one))
        found: Any = self.documents[0]
        for step in self.root:
            found = found.get(str(step))
        return found if isinstance(found, dict) else {}


def _recognize(data: list[dict[str, Any]]) -> Kind | None:
    """The kind of job that the documents describe, by their keys; None if they describe none."""
    if any("apiVersion" in one and "kind" in one for one in data):
        return "gke" if any(map(kinds.kind_of, data)) else None
    keys = {camel(key) for key in data[0]}
    if keys & set(_TUNING):
        return "hyperparameter-tuning-job"
    if keys & set(_CUSTOM_JOB):
        return "custom-job"
    if keys & set(_AI_PLATFORM) - {"workerConfig", "workerType"}:  # Dataproc's policies have a workerConfig too
        return "ai-platform"
    return None


#: Unquoted words that are booleans in YAML 1.1, which gcloud and kubectl read, and text in YAML 1.2:
#: https://yaml.org/type/bool.html and https://github.com/kubernetes-sigs/yaml/blob/742f5e6/goyaml.v2/resolve.go
_BOOLEANS = dict.fromkeys(("y", "yes", "on"), True) | dict.fromkeys(("n", "no", "off"), False)


def _yaml_1_1(node: Any, *, base_60: bool) -> Any:
    """A node with these words as gcloud and kubectl read them; quoted text has another class than str.

    Args:
        base_60: whether ``1:30`` is the number 90, as for gcloud; for kubectl it is text.
    """
    if isinstance(node, dict):
        return {key: _yaml_1_1(value, base_60=base_60) for key, value in node.items()}
    if isinstance(node, list):
        return [_yaml_1_1(value, base_60=base_60) for value in node]
    if type(node) is str and node in (node.lower(), node.upper(), node.capitalize()):
        if node.lower() in _BOOLEANS:
            return _BOOLEANS[node.lower()]
        if (
            base_60
            and len(node) < yaml_source.LONGEST_NUMBER
            and re.fullmatch(r"[-+]?[1-9][0-9]*(:[0-5]?[0-9])+", node)
        ):
            number = 0
            for part in node.lstrip("-+").split(":"):
                number = number * 60 + int(part)
            return -number if node.startswith("-") else number
    return node


def load(path: Path) -> JobFile:
    """Read a job file, YAML or JSON.

    Raises:
        NotAJobError: it is not a job, or one that is not checked here.
        UserError: it cannot be read; the message gives file and line.
    """
    return parse(yaml_source.text(path), path)


def parse(text: str, path: Path) -> JobFile:
    """A job from its text; messages name ``path``. See :func:`load`."""
    if text.startswith("#!") and path.suffix not in (".yaml", ".yml", ".json"):  # where the lines are comments
        if re.search(r"^#SBATCH\s", text, re.MULTILINE):
            raise OtherFormatError(f"{relative(path)}: a Slurm script; 'sbatch --test-only {path.name}' checks it")
        if "gcloud compute tpus" in text:
            raise OtherFormatError(
                f"{relative(path)}: a script for Cloud TPU VMs; 'bash -n {path.name}' checks its syntax"
            )
        raise UserError(f"{relative(path)}: a shell script: job files are YAML or JSON")
    repeated = Repeated()
    nodes = yaml_source.parse(text, path, repeated)
    if repeated and any(isinstance(node, dict) and "apiVersion" in node for node in nodes):
        repeated = Repeated()
        repeated.last = True
        nodes = yaml_source.parse(text, path, repeated)
    return dataclasses.replace(_job_file(path, nodes), repeated=tuple(sorted(repeated, key=lambda one: one[1:])))


def _job_file(path: Path, nodes: list[Any]) -> JobFile:
    # As `kubectl get --output yaml` writes several objects.
    nodes = [
        one
        for node in nodes
        for one in (node["items"] if isinstance(node, dict) and isinstance(node.get("items"), list)
                    and (node.get("apiVersion"), node.get("kind")) == ("v1", "List") else [node])
    ]  # fmt: skip
    if not nodes:
        raise NotAJobError(f"{relative(path)}: empty; expected one of: {'; '.join(_DESCRIPTIONS.values())}")
    for node in nodes:
        if not isinstance(node, dict):
            raise NotAJobError(f"{relative(path)}: expected 'key: value' pairs at the top level")
    data = [yaml_source.plain(node) for node in nodes]
    kind = _recognize(data)
    if kind is None:
        if _is_sky_pilot(data):
            raise OtherFormatError(f"{relative(path)}: a SkyPilot task; 'sky launch --dryrun {path.name}' checks it")
        if named := [described(one) for one in data if "apiVersion" in one and "kind" in one]:
            more = f" and {len(named) - 3} more" if len(named) > 3 else ""
            checked = f"checked are {', '.join(kinds.KINDS)}"
            raise NotAJobError(f"{relative(path)}:1: {', '.join(named[:3])}{more}: not checked; {checked}")
        keys = one_line(", ".join(list(data[0])[:5]))
        raise NotAJobError(
            f"{relative(path)}:1: not a job: its keys are {keys}; expected one of: {'; '.join(_DESCRIPTIONS.values())}"
        )
    if kind == "gke":
        data = [yaml_source.plain(_yaml_1_1(node, base_60=False)) for node in nodes]
    else:
        if len(nodes) > 1:
            raise UserError(f"{relative(path)}: {len(nodes)} documents; {_DESCRIPTIONS[kind]} has one")
        document: dict[str, Any] = _camel(yaml_source.plain(_yaml_1_1(nodes[0], base_60=True)))
        data = [google.as_gcloud_reads(kind, document)]
    found = JobFile(path, kind, data, nodes)
    for step in found.root:
        if not isinstance(data[0].get(str(step), {}), dict):
            raise found.error(found.root, f"{step}: expected 'key: value' pairs")
    return found
