"""Documents in which a value is missing or of another type are read or refused in one line, never with a traceback."""

from __future__ import annotations

import copy
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from trainyard.common.errors import UserError
from trainyard.common.settings import ROOT
from trainyard.spec.workspace import Workspace, WorkspaceDocument
from trainyard.workspace import dependency_tables, indexes, python_projects, requirements
from trainyard_jobs import platforms
from trainyard_jobs.check import files
from trainyard_jobs.platforms.base import Conversion
from trainyard_jobs.rehearsal import session, tuning
from trainyard_jobs.schema import job_file

JOBS: dict[str, list[Any]] = {
    path.stem: [one for one in yaml.safe_load_all(path.read_text(encoding="utf-8")) if one]
    for path in sorted((ROOT / "examples" / "jobs").glob("*.yaml"))
}

JOBS["job"] = [
    yaml.safe_load(
        """
apiVersion: batch/v1
kind: Job
metadata: {name: digits}
spec:
  podFailurePolicy: {rules: [{action: FailJob, onExitCodes: {operator: In, values: [42]}}]}
  template:
    metadata: {annotations: {a: b}}
    spec:
      restartPolicy: Never
      nodeSelector: {cloud.google.com/gke-accelerator: nvidia-l4}
      containers:
      - name: main
        image: x
        args: [x]
        env: [{name: A, valueFrom: {fieldRef: {fieldPath: metadata.name}}}]
        resources: {limits: {nvidia.com/gpu: 1}}
        volumeMounts: [{name: v, mountPath: /data}]
      volumes: [{name: v, csi: {driver: gcsfuse.csi.storage.gke.io, volumeAttributes: {bucketName: b}}}]
"""
    )
]

JOBS["tuning"] = [
    yaml.safe_load(
        """
studySpec:
  metrics: [{metricId: accuracy, goal: MAXIMIZE}]
  parameters:
  - {parameterId: lr, doubleValueSpec: {minValue: 0.1, maxValue: 1}, scaleType: UNIT_LOG_SCALE}
  - {parameterId: c, categoricalValueSpec: {values: [a, b]}}
maxTrialCount: 2
parallelTrialCount: 1
trialJobSpec:
  scheduling: {timeout: 60s}
  baseOutputDirectory: {outputUriPrefix: "gs://b/x"}
  workerPoolSpecs:
  - machineSpec: {machineType: ct5lp-hightpu-4t, tpuTopology: 2x4}
    replicaCount: 1
    containerSpec: {imageUri: x, args: [x], env: [{name: A, value: b}]}
"""
    )
]

AI_PLATFORM = [
    yaml.safe_load(
        """
jobId: x
trainingInput:
  scaleTier: CUSTOM
  masterType: n1-standard-8
  masterConfig: {imageUri: x, acceleratorConfig: {type: NVIDIA_TESLA_T4, count: 1}}
  workerType: cloud_tpu
  workerCount: 1
  workerConfig: {imageUri: y, acceleratorConfig: {type: TPU_V2, count: 8}}
  hyperparameters:
    goal: MAXIMIZE
    params: [{parameterName: b, type: CATEGORICAL, categoricalValues: [x, y]}]
"""
    )
]


def places(node: Any, above: tuple[int | str, ...] = ()) -> Iterator[tuple[int | str, ...]]:
    """The location of every value in a document."""
    for key, value in node.items() if isinstance(node, dict) else enumerate(node) if isinstance(node, list) else ():
        yield (*above, key)
        yield from places(value, (*above, key))


def mutants(document: Any, values: tuple[Any, ...]) -> Iterator[tuple[str, Any]]:
    """A document without each of its values, and with others in its place; and what was done."""
    for *steps, last in places(document):
        for value in ("removed", *values):
            found = copy.deepcopy(document)
            parent = found
            for step in steps:
                parent = parent[step]
            if value == "removed":
                del parent[last]
            else:
                parent[last] = value
            yield f"{'.'.join(map(str, [*steps, last]))}: {value!r}", found


def test_a_job_of_ai_platform_is_converted_or_refused_in_one_line_whatever_a_value_is() -> None:
    for what, documents in mutants(AI_PLATFORM, (None, "text", 5, ["text"], [None])):
        try:
            platforms.by_name("vertex").convert(job_file._job_file(Path("job.yaml"), documents), Conversion())
        except UserError as error:
            assert "\n" not in str(error), what
        except Exception as error:
            pytest.fail(f"{what}: {error!r}")


@pytest.mark.parametrize("name", JOBS)
def test_a_job_is_rehearsed_or_refused_in_one_line_whatever_a_value_is(name: str) -> None:
    for what, documents in mutants(JOBS[name], (None, "text", 5, ["text"], [None])):
        try:
            job = job_file._job_file(Path("job.yaml"), documents)
            platform = platforms.of_job_file(job)
            with files.explain_invalid_fields(job):
                study = tuning.study_of(job)
                session.plan(platform.rehearse(job, session.placeholder_trial(study)))
        except UserError as error:
            assert "\n" not in str(error), what
        except Exception as error:
            pytest.fail(f"{what}: {error!r}")


PROJECTS = {
    "project": """
[project]
name = "pkg"
version = "1.0"
requires-python = ">=3.9"
dependencies = ["numpy>=1", "member"]
dynamic = ["readme"]
optional-dependencies = {gpu = ["pkg[cpu]"], cpu = ["z"]}
scripts = {train = "pkg:main"}
entry-points = {group = {a = "pkg:b"}}
[dependency-groups]
dev = ["pytest", {include-group = "x"}]
x = ["w"]
[tool.hatch.build.targets.wheel]
packages = ["src/pkg"]
[tool.uv]
constraint-dependencies = ["c<2"]
exclude-dependencies = ["e"]
find-links = ["https://example.com/links"]
index = [{name = "i", url = "https://example.com/simple", explicit = true}]
workspace = {members = ["member"], exclude = ["z"]}
[tool.uv.sources]
member = {workspace = true}
numpy = [{index = "i", marker = "sys_platform == 'linux'"}, {git = "https://example.com/n.git", rev = "a"}]
""",
    "dynamic": """
[project]
name = "pkg"
dynamic = ["version", "dependencies"]
[tool.setuptools]
package-dir = {"" = "src"}
packages = {find = {where = ["src"]}}
dynamic = {version = {attr = "pkg.__version__"}, dependencies = {file = ["requirements.txt"]}}
[tool.hatch]
version = {path = "src/pkg/__init__.py"}
metadata = {hooks = {requirements_txt = {files = ["requirements.txt"]}}}
[tool.pdm.version]
source = "file"
""",
    "poetry": """
[tool.poetry]
name = "pkg"
version = "1.0"
packages = [{include = "pkg", from = "src"}]
scripts = {train = "pkg:main"}
plugins = {group = {a = "pkg:b"}}
dependencies = {python = "^3.9", numpy = "^1.2", torch = [{version = "2", python = ">=3.10"}]}
""",
}

LOCK = """
[[package]]
name = "numpy"
version = "1.0"
source = {registry = "https://index.example/simple"}
resolution-markers = ["sys_platform == 'linux'"]
"""


def read_project(root: Path, file: str, **more: Any) -> None:
    document = WorkspaceDocument(extends="cpu", run=["python"], requirements={"file": file, **more})
    workspace = Workspace(root / "trainyard.yaml", document)
    python_projects.read(root)
    requirements.read(workspace, "3.11")
    python_projects.import_roots(workspace)
    indexes.of_project(workspace)


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name in ("src/pkg", "member", ".git"):
        (tmp_path / name).mkdir(parents=True)
    (tmp_path / "src/pkg/__init__.py").touch()
    (tmp_path / "trainyard.yaml").write_text("extends: cpu\nrequirements: pyproject.toml\n", encoding="utf-8")
    (tmp_path / "requirements.txt").write_text("a\n", encoding="utf-8")
    (tmp_path / "member/pyproject.toml").write_text('[project]\nname = "member"\nversion = "1"\n', encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize("name", [*PROJECTS, "lock"])
def test_a_project_is_read_or_refused_in_one_line_whatever_a_value_is(
    root: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    file = "uv.lock" if name == "lock" else "pyproject.toml"
    more = {"extras": ["gpu"], "groups": ["dev"]} if name == "project" else {}
    (root / "pyproject.toml").write_text(PROJECTS["project" if name == "lock" else name], encoding="utf-8")
    (root / file).write_text(text := LOCK if name == "lock" else PROJECTS[name], encoding="utf-8")
    real = tomllib.loads
    for what, changed in mutants(real(text), ("text", 5, [5])):
        parsed = {text: changed}
        monkeypatch.setattr(
            dependency_tables.tomllib, "loads", lambda given, parsed=parsed: parsed.get(given) or real(given)
        )
        try:
            read_project(root, file, **more)
        except UserError as error:
            assert "\n" not in str(error), what
        except Exception as error:
            pytest.fail(f"{what}: {error!r}")


def test_the_line_of_a_value_of_another_type_is_named(root: Path) -> None:
    for text, said in (
        ('\ntool = "x"', "pyproject.toml:2: tool: expected a table"),
        ("[tool.uv]\nworkspace = {members = 5}", "pyproject.toml:2: tool.uv.workspace.members: expected a list"),
    ):
        (root / "pyproject.toml").write_text(text, encoding="utf-8")
        with pytest.raises(UserError) as error:
            python_projects.read(root)
        assert str(error.value) == said
