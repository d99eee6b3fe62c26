"""`job check --server` says in its own form what kubectl prints of a dry run.

What kubectl prints is in StandardErrorMessage, MultilineError and MultipleErrors of
https://github.com/kubernetes/kubernetes/blob/v1.32.0/staging/src/k8s.io/kubectl/pkg/cmd/util/helpers.go.
The real one asks a fake cluster in tests/cloud/test_jobs.py.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable
from pathlib import Path

import pytest

Command = Callable[..., tuple[int, str, str]]

JOB = """\
apiVersion: batch/v1
kind: Job
metadata:
  name: digits
spec:
  template:
    metadata:
      labels:
        team: a
    spec:
      restartPolicy: Never
      containers:
      - name: main
        image: gcr.io/p/i
"""

INVALID = """\
The Job "digits" is invalid:
* spec.template.spec.containers[0].image: Required value
* spec.template.labels: Invalid value: "a b": a valid label must be ...
"""
ONE = 'The Job "digits" is invalid: spec.template.spec.containers[0].name: Required value\n'
SEVERAL = (
    'Error from server (Invalid): error when creating "job.yaml": Job.batch "digits" is invalid: '
    "spec.template.spec.restartPolicy: Unsupported value\n"
    'Error from server (Forbidden): error when creating "job.yaml": admission webhook "vjobset.kb.io" denied the '
    "request: spec.replicatedJobs: too long\n"
)
UNKNOWN_FIELD = (
    'Error from server (BadRequest): error when creating "job.yaml": Job in version "v1" cannot be handled as a Job: '
    'strict decoding error: unknown field "spec.template.spec.containers[0].nam"\n'
)
NO_KIND = (
    'error: resource mapping not found for name: "digits" namespace: "" from "job.yaml": '
    'no matches for kind "Job" in version "batch/v1"\nensure CRDs are installed first\n'
)
WARNING = 'Warning: spec.template.spec.containers[0].env[1]: hides previous definition of "A"\n'


@pytest.fixture
def kubectl(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A program that keeps its arguments, and prints and ends as the files ``stderr`` and ``status`` say."""
    monkeypatch.chdir(tmp_path)
    Path("job.yaml").write_text(JOB, encoding="utf-8")
    program = tmp_path / "bin" / "kubectl"
    program.parent.mkdir()
    here = shlex.quote(str(tmp_path))
    program.write_text(f'#!/bin/sh\necho "$@" >>{here}/called\ncat {here}/stderr >&2\nexit "$(cat {here}/status)"\n')
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{program.parent}:/usr/bin:/bin")


def answering(stderr: str, status: int) -> None:
    Path("stderr").write_text(stderr, encoding="utf-8")
    Path("status").write_text(str(status), encoding="utf-8")


@pytest.mark.usefixtures("kubectl")
@pytest.mark.parametrize(
    ("stderr", "said"),
    [
        (INVALID, ["job.yaml:14: spec.template.spec.containers[0].image: Required value",
                   'job.yaml:6: spec.template.labels: Invalid value: "a b": a valid label must be ...']),
        (ONE, ["job.yaml:13: spec.template.spec.containers[0].name: Required value"]),
        (SEVERAL, ["job.yaml:11: spec.template.spec.restartPolicy: Unsupported value",
                   'job.yaml:2: admission webhook "vjobset.kb.io" denied the request: spec.replicatedJobs: too long']),
        (UNKNOWN_FIELD, ['job.yaml:13: Job in version "v1" cannot be handled as a Job: strict decoding error: unknown '
                         'field "spec.template.spec.containers[0].nam"']),
        (NO_KIND, ["job.yaml:2: the cluster has no Job of batch/v1"]),
    ],
    ids=["fields of an object", "a field", "several objects", "an unknown field", "an unknown kind"],
)  # fmt: skip
def test_every_line_of_the_server_is_a_finding_at_its_field(stderr: str, said: list[str], trainyard: Command) -> None:
    answering(stderr, 1)
    status, out, err = trainyard("job", "check", "job.yaml", "--offline", "--server", "--json")
    found = json.loads(out)["files"][0]["findings"]
    assert (status, [f"{one['where']}: {one['what']}" for one in found]) == (1, said)
    assert {one["rule"] for one in found} == {"cluster_takes_the_objects"}
    assert said[0] in err
    assert Path("called").read_text() == (
        "apply --dry-run=server --output=name --request-timeout=60s --filename=job.yaml\n"
    )


@pytest.mark.usefixtures("kubectl")
def test_a_warning_is_a_note_and_a_generated_name_needs_create(trainyard: Command) -> None:
    answering(WARNING, 0)
    Path("job.yaml").write_text(JOB.replace("name: digits", "generateName: digits-"), encoding="utf-8")
    status, out, _ = trainyard("job", "check", "job.yaml", "--offline", "--server", "--json")
    (note,) = json.loads(out)["files"][0]["notes"]
    assert (status, note["what"]) == (0, WARNING.removeprefix("Warning: ").strip())
    assert Path("called").read_text().startswith("create --dry-run=server")


@pytest.mark.usefixtures("kubectl")
def test_a_job_that_exists_is_compared_in_one_line_without_what_kubectl_says_of_its_own(trainyard: Command) -> None:
    own = "Warning: resource jobs/digits is missing the kubectl.kubernetes.io/last-applied-configuration annotation\n"
    template = f"core.PodTemplateSpec{{{'x' * 5000}}}"
    said = f'The Job "digits" is invalid: spec.template: Invalid value: {template}: field is immutable\n'
    answering(own + said, 1)
    status, out, _ = trainyard("job", "check", "job.yaml", "--offline", "--server", "--json")
    (file,) = json.loads(out)["files"]
    (found,) = file["findings"]
    assert (status, file["notes"], found["where"]) == (1, [], "job.yaml:6")
    assert found["what"].endswith(": field is immutable") and len(found["what"]) < 400


@pytest.mark.usefixtures("kubectl")
@pytest.mark.parametrize(
    ("stderr", "said"),
    [
        ("The connection to the server localhost:8080 was refused - did you specify the right host or port?\n",
         "The connection to the server localhost:8080 was refused - did you specify the right host or port?"),
        ('error: error validating "job.yaml": error validating data: failed to download openapi: Get "http://h/api": '
         "dial tcp: connection refused; if you choose to ignore these errors, turn validation off with "
         "--validate=false\n", 'Get "http://h/api": dial tcp: connection refused'),
        ("error: You must be logged in to the server (Unauthorized)\n", "You must be logged in to the server (Unau"),
        ("", "no message"),
    ],
    ids=["no server", "no schema", "no login", "nothing"],
)  # fmt: skip
def test_no_cluster_is_one_line(stderr: str, said: str, trainyard: Command) -> None:
    answering(stderr, 1)
    Path("two.yaml").write_text(JOB, encoding="utf-8")
    status, _, err = trainyard("job", "check", "job.yaml", "two.yaml", "--offline", "--server")
    assert (status, len(err.splitlines())) == (1, 1), err
    assert f"job.yaml: kubectl could not ask its cluster: {said}" in err


def test_no_kubectl_is_one_line(trainyard: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    status, _, err = trainyard("job", "check", "job.yaml", "--server")
    assert (status, err) == (2, "job check: kubectl is not installed: see https://kubernetes.io/docs/tasks/tools/\n")


@pytest.mark.usefixtures("kubectl")
def test_files_for_other_platforms_are_not_for_a_cluster(trainyard: Command) -> None:
    pool = "{machineSpec: {machineType: n1-standard-8}, replicaCount: 1, containerSpec: {imageUri: gcr.io/p/i}}"
    Path("job.yaml").write_text(f"workerPoolSpecs: [{pool}]\n", encoding="utf-8")
    status, _, err = trainyard("job", "check", "job.yaml", "--offline", "--server")
    assert (status, err) == (2, "job check: --server: none of these is a Kubernetes job, which a cluster checks\n")
    assert not Path("called").exists()
