"""The real `gcloud builds submit` against a fake of Cloud Build that runs builds."""

from __future__ import annotations

import io
import json
import os
import re
import subprocess
import tarfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.engine import CONTEXT, ENGINE
from tests.fakes.cloud_build import PROJECT, CloudBuild
from tests.image.registry import running

from trainyard.common.docker_engine import OWNED
from trainyard.common.settings import ROOT
from trainyard.image import base_image
from trainyard.oci import registry
from trainyard.release import pipelines as cloud_plan

pytestmark = pytest.mark.concurrent

Finished = subprocess.CompletedProcess[str]
DOCKER = "gcr.io/cloud-builders/docker"


@pytest.fixture(scope="session")
def small() -> str:
    """An image with a shell: the base of the project's images, which exists locally."""
    return base_image.resolve(CONTEXT, "debian-13").reference


@pytest.fixture(scope="session")
def local_registry() -> Iterator[str]:
    """host:port of a registry that is used instead of Artifact Registry."""
    with running.container() as started:
        yield running.address(started)


def nothing_is_left() -> bool:
    client = ENGINE.client
    labelled: Any = {"label": OWNED}
    owners = [one.labels[OWNED] for one in client.containers.list(all=True, filters=labelled)]
    owners += [one.attrs["Labels"][OWNED] for one in client.volumes.list(filters=labelled)]
    return not any(owner.startswith("trainyard-cloudbuild-") for owner in owners)


@pytest.fixture
def cloud(local_registry: str) -> Iterator[CloudBuild]:
    with CloudBuild(registry=local_registry) as started:
        yield started
    for image in ENGINE.images():
        for tag in image.tags:
            if f"/{PROJECT}/" in tag:
                ENGINE.client.images.remove(tag)


@pytest.fixture
def gcloud(cloud: CloudBuild, tmp_path: Path) -> Callable[..., Finished]:
    """Run gcloud against the fake."""
    home = tmp_path / "home"
    home.mkdir()

    def call(*words: str, timeout: float = 600) -> Finished:
        environment = os.environ | cloud.environment(home)
        return subprocess.run(
            ["gcloud", *words], env=environment, capture_output=True, text=True, timeout=timeout, check=False
        )

    return call


@pytest.fixture
def project(tmp_path: Path, small: str) -> Path:
    """A folder whose cloudbuild.yaml builds a small image, runs it, and pushes it."""
    folder = tmp_path / "project"
    folder.mkdir()
    (folder / "Dockerfile").write_text(f"FROM {small}\nCOPY word /word\n", encoding="utf-8")
    (folder / "word").write_text("hello\n", encoding="utf-8")
    (folder / "secret.pem").write_text("not for upload", encoding="utf-8")
    (folder / ".gcloudignore").write_text("*.pem\n", encoding="utf-8")
    image = "us-central1-docker.pkg.dev/$PROJECT_ID/$_REPOSITORY/word:$BUILD_ID"
    config = {
        "steps": [
            {"id": "build", "name": DOCKER, "args": ["build", "--quiet", "--provenance=false", f"--tag={image}", "."]},
            {"id": "try", "name": image, "entrypoint": "grep", "args": ["$_WORD", "/word"]},
        ],
        "images": [image],
        "substitutions": {"_REPOSITORY": "ml", "_WORD": "hello"},
        "options": {"logging": "CLOUD_LOGGING_ONLY"},
    }
    (folder / "cloudbuild.yaml").write_text(json.dumps(config), encoding="utf-8")
    return folder


def submit(gcloud: Callable[..., Finished], project: Path, *words: str) -> Finished:
    return gcloud(
        "builds", "submit", str(project), f"--config={project / 'cloudbuild.yaml'}", "--region=us-central1", *words
    )


Gcloud = Callable[..., Finished]


@pytest.mark.needs("gcloud")
def test_a_submitted_build_runs_and_pushes_its_image(
    gcloud: Gcloud, cloud: CloudBuild, project: Path, local_registry: str
) -> None:
    found = submit(gcloud, project)
    assert found.returncode == 0, found.stderr + "\n".join(
        line for build in cloud.builds.values() for line in build.log
    )
    assert "SUCCESS" in found.stdout
    ((identity, build),) = cloud.builds.items()
    (pushed,) = build.resource["results"]["images"]
    assert pushed["name"] == f"us-central1-docker.pkg.dev/{PROJECT}/ml/word:{identity}"
    assert registry.digest_of(ENGINE, f"{local_registry}/{PROJECT}/ml/word:{identity}") == pushed["digest"]
    shown = json.loads(gcloud("builds", "describe", identity, "--region=us-central1", "--format=json").stdout)
    assert [step["status"] for step in shown["steps"]] == ["SUCCESS", "SUCCESS"]
    log = gcloud("builds", "log", identity, "--region=us-central1").stdout
    assert 'Step #1 - "try": hello' in log
    with tarfile.open(fileobj=io.BytesIO(next(iter(cloud.objects.values())))) as tar:
        names = {name.removeprefix("./") for name in tar.getnames()}
    assert {"Dockerfile", "word"} <= names
    assert "secret.pem" not in names
    assert nothing_is_left()


@pytest.mark.needs("gcloud")
def test_nothing_is_pushed_if_a_step_fails(
    gcloud: Gcloud, cloud: CloudBuild, project: Path, local_registry: str
) -> None:
    found = submit(gcloud, project, "--substitutions=_WORD=goodbye,_REPOSITORY=failed")
    assert found.returncode == 1
    assert "step exited with non-zero status: 1" in found.stderr
    ((identity, build),) = cloud.builds.items()
    assert build.resource["status"] == "FAILURE"
    assert build.resource["results"]["images"] == []
    assert registry.digest_of(ENGINE, f"{local_registry}/{PROJECT}/failed/word:{identity}") is None


@pytest.mark.needs("gcloud")
def test_an_invalid_build_is_rejected_by_the_service(gcloud: Gcloud, cloud: CloudBuild, project: Path) -> None:
    config = json.loads((project / "cloudbuild.yaml").read_text())
    config["steps"][0]["waitFor"] = ["try"]
    (project / "cloudbuild.yaml").write_text(json.dumps(config), encoding="utf-8")
    found = submit(gcloud, project)
    assert found.returncode == 1
    assert 'depends on "try", which has not been defined' in found.stderr
    assert not cloud.builds


@pytest.mark.needs("gcloud")
def test_a_missing_permission_is_reported(gcloud: Gcloud, cloud: CloudBuild, project: Path) -> None:
    cloud.denied.add("/v1/projects/.*/builds")
    found = submit(gcloud, project)
    assert found.returncode == 1
    assert "PERMISSION_DENIED" in found.stderr


@pytest.mark.needs("gcloud")
def test_cancelling_a_build_ends_its_steps(gcloud: Gcloud, cloud: CloudBuild, project: Path, small: str) -> None:
    config = {"steps": [{"name": small, "script": "sleep 300"}], "options": {"logging": "CLOUD_LOGGING_ONLY"}}
    (project / "cloudbuild.yaml").write_text(json.dumps(config), encoding="utf-8")
    assert submit(gcloud, project, "--async").returncode == 0
    (identity,) = cloud.builds
    found = gcloud("builds", "cancel", identity, "--region=us-central1")
    assert found.returncode == 0, found.stderr
    assert cloud.builds[identity].resource["status"] == "CANCELLED"
    assert nothing_is_left()


@pytest.mark.parametrize("schedule", [cloud_plan.PUSHED, cloud_plan.NIGHTLY], ids=lambda one: one.name)
@pytest.mark.needs("gcloud")
def test_gcloud_imports_the_rendered_trigger(
    schedule: cloud_plan.Schedule, gcloud: Gcloud, cloud: CloudBuild, tmp_path: Path
) -> None:
    """With the names that the command in its first lines replaces."""
    text = schedule.trigger.read_text(encoding="utf-8")
    sed = re.search(r"#   sed '([^']+)'", text)
    assert sed
    filled = tmp_path / "trigger.yaml"
    filled.write_text(subprocess.run(["sed", sed[1]], input=text, capture_output=True, text=True, check=True).stdout)
    found = gcloud("builds", "triggers", "import", f"--source={filled}", "--region=us-central1")
    assert found.returncode == 0, found.stderr
    trigger = cloud.triggers[f"trainyard-{schedule.name}"]
    if schedule is cloud_plan.PUSHED:
        assert trigger["filename"] == "cloudbuild.yaml"
        assert trigger["github"] == {"owner": "my-company", "name": "trainyard", "push": {"branch": "^main$"}}
    else:
        assert trigger["gitFileSource"]["path"] == "cloudbuild-nightly.yaml"
        assert trigger["sourceToBuild"]["uri"] == "https://github.com/my-company/trainyard"
    assert trigger["serviceAccount"].startswith("projects/my-project/serviceAccounts/trainyard-build@my-project.")


@pytest.mark.needs("gcloud")
def test_an_upload_of_this_project_is_under_4_mb(gcloud: Gcloud, cloud: CloudBuild) -> None:
    """It has the files of the package, the images and their content, and neither tests nor documentation."""
    cloud.denied.add("/v1/projects/.*/builds")  # only the upload is tested here
    submit(gcloud, ROOT)
    ((_, archive),) = cloud.objects.items()
    assert len(archive) < 4_000_000
    with tarfile.open(fileobj=io.BytesIO(archive)) as tar:
        members = tar.getmembers()
    names = {member.name.removeprefix("./") for member in members}
    assert sum(member.size for member in members) < 10_000_000
    listed = ["git", "ls-files", "scripts", "images", "launcher", "trainers", "templates", "cloudbuild.yaml"]
    tracked = subprocess.run(listed, cwd=ROOT, capture_output=True, text=True, check=True).stdout.split()
    assert {name for name in tracked if (ROOT / name).exists()} <= names
    assert not [name for name in names if name.split("/")[0] in (".git", ".venv", "build", "tests", "docs")]
