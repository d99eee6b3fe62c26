"""gcloud's validation, which requires no network, accepts the generated configurations and refuses invalid ones."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from trainyard.release import pipelines as cloud_plan

TEXT = cloud_plan.PUSHED.build.read_text(encoding="utf-8")

pytestmark = [pytest.mark.concurrent, pytest.mark.needs("gcloud")]


def gcloud_submit(config: Path, home: Path) -> subprocess.CompletedProcess[str]:
    """Run the real gcloud, with an unreachable address for the service."""
    environment = os.environ | {
        "HOME": str(home),
        "CLOUDSDK_CONFIG": str(home / "gcloud"),
        "CLOUDSDK_CORE_PROJECT": "fake-project",
        "CLOUDSDK_CORE_DISABLE_PROMPTS": "1",
        "CLOUDSDK_AUTH_ACCESS_TOKEN": "fake-token",
        "CLOUDSDK_API_ENDPOINT_OVERRIDES_CLOUDBUILD": "http://127.0.0.1:9/",
    }
    command = ["gcloud", "builds", "submit", "--no-source", "--async", f"--config={config}"]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=False)


@pytest.mark.slow("test_cloud_build.py, which submits cloudbuild.yaml with gcloud")
@pytest.mark.parametrize("plan", [cloud_plan.PUSHED.build, cloud_plan.NIGHTLY.build], ids=lambda path: path.name)
def test_gcloud_accepts_the_configuration_and_connects_to_the_service(plan: Path, tmp_path: Path) -> None:
    found = gcloud_submit(plan, tmp_path)
    assert "127.0.0.1" in found.stderr, found.stderr
    assert "unused" not in found.stderr
    assert "INVALID" not in found.stderr


def test_gcloud_refuses_a_misspelt_key(tmp_path: Path) -> None:
    config = tmp_path / "cloudbuild.yaml"
    config.write_text(TEXT.replace("  waitFor:", "  waitfor:", 1), encoding="utf-8")
    found = gcloud_submit(config, tmp_path)
    assert found.returncode == 1
    assert "waitfor: unused" in found.stderr
    assert "127.0.0.1" not in found.stderr
