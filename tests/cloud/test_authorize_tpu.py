"""`trainyard authorize-tpu` with the real gcloud against a fake of a project's IAM policy."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from tests.fakes.project_iam import NUMBER, PROJECT, TPU_ACCOUNT, TPU_AGENT, ProjectIam

from trainyard.common.settings import ROOT

pytestmark = [pytest.mark.concurrent, pytest.mark.needs("gcloud")]

Finished = subprocess.CompletedProcess[str]


@pytest.fixture
def iam() -> Iterator[ProjectIam]:
    with ProjectIam() as found:
        yield found


@pytest.fixture
def authorize(iam: ProjectIam, tmp_path: Path) -> Callable[..., Finished]:
    def run(*flags: str) -> Finished:
        command = [sys.executable, "-m", "trainyard", "authorize-tpu", "--json", *flags]
        environment = os.environ | iam.environment(tmp_path)
        return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)

    return run


def test_ai_platforms_tpu_account_becomes_a_service_agent_once(
    iam: ProjectIam, authorize: Callable[..., Finished]
) -> None:
    first = authorize(f"--project={PROJECT}")
    assert first.returncode == 0, first.stderr
    assert json.loads(first.stdout) == {"project": PROJECT, "account": TPU_ACCOUNT, "given": ["roles/ml.serviceAgent"]}
    assert iam.bindings["roles/ml.serviceAgent"] == [f"serviceAccount:{TPU_ACCOUNT}"]
    assert iam.bindings["roles/owner"] == ["user:owner@example.com"]
    assert "AI Platform was shut down on 31 January 2025" in first.stderr
    again = authorize(f"--project={PROJECT}")
    assert json.loads(again.stdout)["given"] == []
    assert f"{TPU_ACCOUNT} already had roles/ml.serviceAgent" in again.stderr
    assert iam.writes == 1


def test_tpu_vms_get_a_service_agent_and_an_account_that_can_pull_the_image(
    iam: ProjectIam, authorize: Callable[..., Finished]
) -> None:
    iam.races = 1  # another process changes the policy at the same time
    done = authorize(f"--project={PROJECT}", "--for=tpu-vm")
    assert done.returncode == 0, done.stderr
    member = f"serviceAccount:{NUMBER}-compute@developer.gserviceaccount.com"
    assert f"the Cloud TPU service agent is {TPU_AGENT}" in done.stderr
    assert iam.bindings["roles/artifactregistry.reader"] == iam.bindings["roles/storage.objectUser"] == [member]
    own = authorize(f"--project={PROJECT}", "--for=tpu-vm", "--service-account=trainer@example.com")
    assert own.returncode == 0, own.stderr
    assert iam.bindings["roles/artifactregistry.reader"] == [member, "serviceAccount:trainer@example.com"]


def test_failures_are_one_line(iam: ProjectIam, authorize: Callable[..., Finished]) -> None:
    iam.shut_down = True
    gone = authorize(f"--project={PROJECT}")
    assert gone.returncode == 1
    assert "Cloud AI Platform has been deprecated. Please use Vertex AI" in gone.stderr
    assert "use '--for tpu-vm' for Cloud TPU VMs" in gone.stderr
    denied = authorize("--project=other-project", "--for=tpu-vm")
    assert denied.returncode == 1
    assert "The caller does not have permission" in denied.stderr
    assert authorize().returncode == authorize(f"--project={PROJECT}", "--for=tpu").returncode == 2
    assert "Traceback" not in gone.stderr + denied.stderr
    assert iam.writes == 0
