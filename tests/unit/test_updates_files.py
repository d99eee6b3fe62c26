"""The files in examples/updates that users copy, to update a repository every week. `make check` has their schemas."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from trainyard import cli
from trainyard.common.settings import ROOT
from trainyard.project import check, generated
from trainyard.release import pipelines
from trainyard_jobs.schema import google

WORKFLOW = pipelines.UPDATES / "updates.yml"
BUILD, TRIGGER = (pipelines.UPDATES / f"cloudbuild-updates{suffix}.yaml" for suffix in ("", "-trigger"))


def jobs() -> dict[str, Any]:
    return dict(yaml.safe_load(WORKFLOW.read_text(encoding="utf-8"))["jobs"])


def texts(job: dict[str, Any]) -> str:
    return "\n".join(step.get("run", "") for step in job["steps"])


def test_the_workflow_is_generated_with_actions_pinned_by_commit() -> None:
    assert WORKFLOW in generated.rendered(cli.trainyard)
    uses = re.findall(r"uses: (\S+)", WORKFLOW.read_text(encoding="utf-8"))
    assert uses and all(re.fullmatch(r"[\w/-]+@[0-9a-f]{40}", one) for one in uses)


def test_no_job_that_runs_packages_may_write_and_none_that_may_write_runs_them() -> None:
    writing = {name for name, job in jobs().items() if "write" in job["permissions"].values()}
    running = {name for name, job in jobs().items() if re.search(r"trainyard (update|lock)|pipx", texts(job))}
    assert running == {"update", "prove"} and writing == {"propose", "comment"}
    for job in jobs().values():
        assert job["timeout-minutes"] and "${{" not in texts(job), "a name of a branch may hold a command"
        checkouts = [step for step in job["steps"] if step.get("uses", "").startswith("actions/checkout@")]
        assert all(step["with"]["persist-credentials"] is False for step in checkouts)


def test_a_pull_request_is_proved_and_never_proposed() -> None:
    found = jobs()
    assert found["prove"]["if"] == "github.event_name == 'pull_request'"
    assert found["update"]["if"] == "github.event_name != 'pull_request'"
    assert (found["propose"]["needs"], found["comment"]["needs"]) == ("update", "prove")
    assert "--proof" in texts(found["prove"]) and "--branch" in texts(found["update"])
    assert "head.repo.full_name == github.repository" in found["comment"]["if"]


def test_the_build_and_its_trigger_have_the_schema_of_the_api() -> None:
    build, trigger = (yaml.safe_load(path.read_text(encoding="utf-8")) for path in (BUILD, TRIGGER))
    assert not google.validate("cloudbuild.v1", "Build", build)
    assert not google.validate("cloudbuild.v1", "BuildTrigger", trigger)
    assert trigger["gitFileSource"]["path"] == BUILD.name
    assert set(trigger["substitutions"]) <= set(build["substitutions"])
    steps = {step["id"]: step for step in build["steps"]}
    assert "secretEnv" not in steps["update"] and "trainyard update" in steps["update"]["args"][1]
    assert "trainyard " not in steps["propose"]["args"][1]


def test_the_steps_are_shell_after_substitution() -> None:
    for step in yaml.safe_load(BUILD.read_text(encoding="utf-8"))["steps"]:
        script = re.sub(r"(?<!\$)\$(\w+)", "value", step["args"][1]).replace("$$", "$")
        done = subprocess.run(["bash", "-n"], input=script, text=True, capture_output=True, check=False)
        assert not done.stderr


@pytest.mark.parametrize(
    ("name", "file", "text"),
    [
        ("workflow schema", "updates.yml", "jobs: {update: {steps: []}}"),
        ("Dependabot schema", "dependabot.yml", "version: 2\nupdates: [{package-ecosystem: conda}]"),
        ("Renovate schema", "renovate.json", '{"minimumReleaseAge": 7}'),
        ("zizmor", "updates.yml", "on: push\njobs: {a: {runs-on: b, steps: [{uses: actions/checkout@v5}]}}"),
    ],
)
def test_the_schemas_are_those_of_the_tools(name: str, file: str, text: str, tmp_path: Path) -> None:
    """Each file passes; one that the tool would not take, in its place, does not."""
    command = check.programs(ROOT, cli.trainyard)[name]
    path = f"examples/updates/{file}"
    assert path in command
    options = [word for word in command if word != ".github" and not word.endswith((".yml", ".json"))]
    (tmp_path / file).write_text(text, encoding="utf-8")
    for words in ([path], [str(tmp_path / file)]):
        done = subprocess.run([*options, *words], cwd=ROOT, capture_output=True, text=True, check=False)
        assert (done.returncode == 0) is (words == [path]), done.stdout + done.stderr
