"""`trainyard cloudbuild-local`, and the real `gcloud builds submit` against a fake of Cloud Build that runs builds."""

from __future__ import annotations

import base64
import io
import json
import os
import re
import signal
import subprocess
import sys
import tarfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.fakes.cloud_build import PROJECT, CloudBuild
from tests.image.registry import running
from tests.miniature import Miniature

from cloudbuild_local import builder_images
from cloudbuild_local import config as cloud_config
from cloudbuild_local.executor import Executor, Result
from trainyard.common.errors import UserError
from trainyard.common.settings import ROOT
from trainyard.image import base_image
from trainyard.oci import attached_sbom, docker_engine, image_index, registry
from trainyard.release import claims
from trainyard.release import pipelines as cloud_plan

pytestmark = pytest.mark.concurrent

Finished = subprocess.CompletedProcess[str]
DOCKER = "gcr.io/cloud-builders/docker"


@pytest.fixture(scope="session")
def small() -> str:
    """An image with a shell: the base of the project's images, which exists locally."""
    return base_image.resolve("debian-13").reference


@pytest.fixture(scope="session")
def local_registry() -> Iterator[str]:
    """host:port of a registry that is used instead of Artifact Registry."""
    with running.container() as started:
        yield running.address(started)


@pytest.fixture
def run(small: str) -> Callable[..., tuple[Result, list[str]]]:
    """Run a build given as data, by default with the small image for every step; its result and its log."""

    def start(config: dict[str, Any], **options: Any) -> tuple[Result, list[str]]:
        lines: list[str] = []
        config = config | {"steps": [{"name": small} | step for step in config["steps"]]}
        build = cloud_config.load(config, where="test", built_in={"PROJECT_ID": "p", "BUILD_ID": "b"})
        return Executor(build, write=lines.append, **options).run(), lines

    return start


def script(text: str, **more: Any) -> dict[str, Any]:
    return {"script": text} | more


def statuses(result: Result) -> list[str]:
    return [outcome.status for outcome in result.steps]


def nothing_is_left() -> bool:
    client = docker_engine.client()
    labelled: Any = {"label": docker_engine.OWNED}
    owners = [one.labels[docker_engine.OWNED] for one in client.containers.list(all=True, filters=labelled)]
    owners += [one.attrs["Labels"][docker_engine.OWNED] for one in client.volumes.list(filters=labelled)]
    return not any(owner.startswith("trainyard-cloudbuild-") for owner in owners)


# --- the executor ----------------------------------------------------------------------------------------------------

Run = Callable[..., tuple[Result, list[str]]]


def test_steps_share_the_workspace_and_run_in_the_order_of_the_file(run: Run) -> None:
    steps = [
        script("echo one >first"),
        script("mkdir sub; cat first >sub/second"),
        script("cat second; pwd", dir="sub"),
    ]
    result, lines = run({"steps": steps})
    assert (result.status, statuses(result)) == ("SUCCESS", ["SUCCESS"] * 3)
    assert "Step #2: one" in lines
    assert "Step #2: /workspace/sub" in lines
    assert nothing_is_left()


def test_steps_start_after_those_they_wait_for_and_branches_run_in_parallel(run: Run) -> None:
    """Two branches wait for each other's file: they end only if they run at the same time."""
    meet = "touch {mine}; for i in $(seq 600); do [ -e {other} ] && exit 0; sleep 0.1; done; exit 1"
    steps = [
        script("true", id="start"),
        script(meet.format(mine="a", other="b"), id="a", waitFor=["start"]),
        script(meet.format(mine="b", other="a"), id="b", waitFor=["start"]),
        script("[ -e a ] && [ -e b ]", id="both", waitFor=["a", "b"]),
        script("true", id="at-once", waitFor=["-"]),
    ]
    result, _ = run({"steps": steps})
    assert statuses(result) == ["SUCCESS"] * 5
    start, _, _, both, at_once = result.steps
    assert at_once.started < start.ended
    assert both.started >= max(result.steps[1].ended, result.steps[2].ended)


def test_a_failed_step_ends_the_build_and_is_named_in_the_error(run: Run, small: str) -> None:
    steps = [
        script("exit 3", id="bad", waitFor=["-"]),
        script("sleep 300", id="long", waitFor=["-"]),
        script("touch never", id="after", waitFor=["bad"]),
    ]
    started = time.monotonic()
    result, _ = run({"steps": steps})
    assert result.status == "FAILURE"
    assert result.detail == f'build step 0 "{small}" failed: step exited with non-zero status: 3'
    assert statuses(result) == ["FAILURE", "CANCELLED", "QUEUED"]
    assert time.monotonic() - started < 120, "parallel steps are cancelled"
    assert nothing_is_left()


def test_allowed_failures_do_not_end_the_build(run: Run) -> None:
    steps = [script("exit 7", allowFailure=True), script("exit 4", allowExitCodes=["4"]), script("exit 0")]
    result, _ = run({"steps": steps})
    assert (result.status, statuses(result)) == ("SUCCESS", ["FAILURE", "FAILURE", "SUCCESS"])
    result, _ = run({"steps": [script("exit 5", allowExitCodes=["4"])]})
    assert result.status == "FAILURE"


def test_timeouts_end_a_step_and_a_build(run: Run) -> None:
    result, _ = run({"steps": [script("sleep 300", timeout="1s"), script("true")]})
    assert (result.status, statuses(result)) == ("TIMEOUT", ["TIMEOUT", "QUEUED"])
    assert "took longer than its timeout of 1 s" in result.detail
    result, _ = run({"steps": [script("sleep 300")], "timeout": "3s"})
    assert (result.status, result.detail) == ("TIMEOUT", "the build took longer than its timeout of 3 s")
    assert result.seconds < 120


def test_environment_entrypoint_arguments_and_substitutions(run: Run) -> None:
    steps = [
        {"entrypoint": "sh", "args": ["-c", "echo $$A ${_B} $PROJECT_ID $$HOME"], "env": ["A=from-env"]},
        script('echo "$_B and $BUILD_ID"', automapSubstitutions=True),
    ]
    result, lines = run(
        {"steps": steps, "substitutions": {"_B": "$BUILD_ID!"}, "options": {"dynamicSubstitutions": True}}
    )
    assert result.status == "SUCCESS"
    assert "Step #0: from-env b! p /builder/home" in lines
    assert "Step #1: b! and b" in lines


def test_volumes_are_shared_between_steps_and_outputs_are_kept(run: Run) -> None:
    volumes = [{"name": "vol", "path": "/v"}]
    steps = [
        script("echo kept >/v/file", volumes=volumes),
        script('cp /v/file "$BUILDER_OUTPUT/output"', volumes=volumes),
    ]
    result, _ = run({"steps": steps})
    assert result.steps[1].output == b"kept\n"
    assert nothing_is_left()


def test_options_are_merged_into_every_step(run: Run) -> None:
    options = {
        "volumes": [{"name": "all", "path": "/all"}],
        "env": ["A=options", "B=options"],
        "dynamicSubstitutions": True,
    }
    steps = [
        script("echo kept >/all/file; mkdir -p /tmp/x", env=["B=step"]),
        {"entrypoint": "sh", "args": ["-c", 'echo "$$A $$B ${_X^^} $(cat /all/file) $(pwd)"'], "dir": "../tmp"},
    ]
    result, lines = run({"steps": steps, "options": options, "substitutions": {"_X": "${_Y:-loud}", "_Y": ""}})
    assert result.status == "SUCCESS", lines
    assert "Step #1: options options LOUD kept /tmp" in lines


def test_an_exit_code_that_is_not_allowed_ends_the_build(run: Run) -> None:
    """`allowExitCodes` takes precedence over `allowFailure`."""
    steps = [
        script("exit 3", allowExitCodes=[3]),
        script("exit 4", allowFailure=True, allowExitCodes=[3]),
        script("true"),
    ]
    result, _ = run({"steps": steps})
    assert (result.status, statuses(result)) == ("FAILURE", ["FAILURE", "FAILURE", "QUEUED"])


def test_a_step_that_cannot_be_started_fails_the_build(run: Run) -> None:
    result, _ = run({"steps": [{"entrypoint": "/nowhere"}, script("true")]})
    assert (result.status, statuses(result)) == ("FAILURE", ["FAILURE", "QUEUED"])
    assert result.detail.startswith("Step #0 could not start: ")
    assert "/nowhere" in result.detail
    assert nothing_is_left()


def test_an_image_that_cannot_be_found_is_one_line(run: Run) -> None:
    with pytest.raises(UserError, match=r"registry\.invalid/x does not exist locally and cannot be pulled"):
        run({"steps": [{"name": "registry.invalid/x"}]})
    assert nothing_is_left()


@pytest.mark.slow("the test of the project's cloudbuild.yaml below, whose steps have such images")
@pytest.mark.needs("gcloud")
def test_googles_builder_images_that_cannot_be_pulled_are_replaced(run: Run) -> None:
    """gcloud and gsutil are mounted from this host, without the user's configuration."""
    steps = [
        {"name": "gcr.io/cloud-builders/gcloud", "args": ["config", "list", "--format=value(core.account)"]},
        {"name": "gcr.io/cloud-builders/gsutil:latest", "args": ["version"]},
        script("gcloud --version", name="gcr.io/google.com/cloudsdktool/cloud-sdk:slim"),
    ]
    result, lines = run({"steps": steps})
    assert statuses(result) == ["SUCCESS"] * 3, lines
    assert any(line.startswith("Step #1: gsutil version: ") for line in lines)
    assert any(line.startswith("Step #2: Google Cloud SDK ") for line in lines)
    assert not [line for line in lines if "@" in line], "no account"


def test_a_replacement_that_needs_a_missing_gcloud_is_one_line(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(builder_images.shutil, "which", lambda _: None)
    with pytest.raises(UserError, match="needs the Google Cloud CLI on this host: install it"):
        run({"steps": [{"name": "gcr.io/cloud-builders/gcloud"}]})


def test_ctrl_c_removes_the_containers(small: str, tmp_path: Path) -> None:
    config = tmp_path / "cloudbuild.yaml"
    config.write_text(json.dumps({"steps": [{"name": small, "script": "echo started; sleep 300"}]}), encoding="utf-8")
    command = [sys.executable, "-m", "trainyard", "cloudbuild-local", f"--config={config}"]
    process = subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    seen = ""
    for line in process.stderr:
        seen += line
        if "Step #0: started" in line:
            break
    process.send_signal(signal.SIGINT)
    _, rest = process.communicate(timeout=60)
    assert process.returncode == 130, seen + rest
    assert rest.splitlines()[-1] == "cloudbuild-local: interrupted"
    assert nothing_is_left()


# --- gcloud builds submit --------------------------------------------------------------------------------------------


@pytest.fixture
def cloud(local_registry: str) -> Iterator[CloudBuild]:
    with CloudBuild(registry=local_registry) as started:
        yield started
    for image in docker_engine.images():
        for tag in image.tags:
            if f"/{PROJECT}/" in tag:
                docker_engine.client().images.remove(tag)


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
    assert registry.digest_of(f"{local_registry}/{PROJECT}/ml/word:{identity}") == pushed["digest"]
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
    assert registry.digest_of(f"{local_registry}/{PROJECT}/failed/word:{identity}") is None


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


@pytest.mark.parametrize("target", ["mini", pytest.param("tf-cpu", marks=pytest.mark.slow("with mini"))])
@pytest.mark.needs("gcloud")
def test_the_projects_cloudbuild_yaml_builds_verifies_and_pushes_a_target(
    target: str, miniature: Miniature, gcloud: Gcloud, cloud: CloudBuild, local_registry: str
) -> None:
    """It takes 50 s with cached layers and 5 minutes without them (tf-cpu, 2 cores, 2026-11).

    Under emulation, training for linux/arm64 would take 17 minutes more.
    """
    checkout = miniature.folder if target == "mini" else ROOT
    address = f"{local_registry}/{PROJECT}/round-trip"
    resolved = base_image.resolve("debian-13")
    own_base = resolved.reference if resolved.note else ""  # without Docker Hub: the bootstrapped base, for all steps
    given = {
        "_TARGETS": target,
        "_PLATFORMS": "linux/amd64",
        "_REGISTRY": address,
        "_TAG": "rehearsal",
        "_BASE": own_base,
        "_PROMOTE": "yes",
        "_REVISION": "a" * 40,
    }
    substitutions = ",".join(f"{name}={value}" for name, value in given.items())
    words = [f"--config={checkout / 'cloudbuild.yaml'}", "--region=us-central1", f"--substitutions={substitutions}"]
    found = gcloud("builds", "submit", str(checkout), *words, timeout=880)
    (build,) = cloud.builds.values()
    assert found.returncode == 0, found.stderr + "\n".join(build.log[-30:])
    steps = {step["id"]: step for step in build.resource["steps"]}
    assert {step["status"] for step in steps.values()} == {"SUCCESS"}
    trained = steps[f"smoke-{target}"]["timing"]["endTime"]
    assert trained < steps["publish"]["timing"]["startTime"]
    output = base64.b64decode(build.resource["results"]["buildStepOutputs"][list(steps).index("publish")])
    image = json.loads(output)[target]
    words = [build.resource["id"], "--region=us-central1", "--format=value(results.buildStepOutputs[-2])"]
    shown = gcloud("builds", "describe", *words).stdout  # the command of docs/cloud-build.md
    assert base64.b64decode(shown) == output
    assert registry.digest_of(image["tag"]) == image["digest"]
    assert registry.digest_of(f"{address}/trainyard:{target}-rehearsal") == image["digest"]
    repository = registry.Repository(f"{address}/trainyard")
    members = image_index.members(repository, repository.existing(image["digest"]))
    assert list(members) == ["linux/amd64"]
    member = members["linux/amd64"]
    assert claims.passed(repository, member.digest)
    assert attached_sbom.document(repository, member.digest)
    labels = repository.config(member)["config"]["Labels"]
    assert labels["org.opencontainers.image.revision"] == "a" * 40
    assert registry.digest_of(f"{address}/trainyard:{labels['org.opencontainers.image.version']}") == member.digest
    assert registry.digest_of(f"{address}/trainyard:{target}") == image["digest"], "promoted by a step"
    log = "\n".join(build.log)
    assert "xla is not among _TARGETS: nothing to do" in log
    assert "linux/arm64 is not among _PLATFORMS: nothing to do" in log
    assert "the image index has no linux/arm64" in log
    assert nothing_is_left()
