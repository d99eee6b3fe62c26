"""Rendered triggers of Cloud Build and workflows of GitHub Actions, whose schema `make check` validates."""

from __future__ import annotations

import re
from typing import Any

import click
import pytest
import yaml

from trainyard import cli
from trainyard.commands import promote, push
from trainyard.commands.dev import cloudbuild_step, image_index
from trainyard.common import settings
from trainyard.project import generated
from trainyard.release import pipelines as cloud_plan
from trainyard.release.pipelines import Schedule
from trainyard.spec import model
from trainyard_jobs.schema import google

SCHEDULES = (cloud_plan.PUSHED, cloud_plan.NIGHTLY)
schedules = pytest.mark.parametrize("schedule", SCHEDULES, ids=lambda one: one.name)


def workflow(schedule: Schedule) -> dict[Any, Any]:
    """A schedule's workflow. YAML 1.1 reads its key `on` as True."""
    return dict(yaml.safe_load(schedule.workflow.read_text(encoding="utf-8")))


def targets_of(schedule: Schedule) -> list[str]:
    return [name for name in model.targets() if cloud_plan.schedule_of(model.load(name)) is schedule]


def test_every_target_but_fallbacks_has_one_schedule() -> None:
    found = sorted(name for schedule in SCHEDULES for name in targets_of(schedule))
    assert found == [name for name in model.targets() if name != "xla-nightly-fallback"]
    assert targets_of(cloud_plan.NIGHTLY) == ["tf-nightly", "xla-nightly"]


@schedules
def test_all_files_of_a_schedule_are_generated(schedule: Schedule) -> None:
    assert {schedule.build, schedule.workflow, schedule.trigger} <= set(generated.rendered(cli.trainyard))


@schedules
def test_the_trigger_has_the_schema_of_the_api(schedule: Schedule) -> None:
    trigger = yaml.safe_load(schedule.trigger.read_text(encoding="utf-8"))
    assert not google.validate("cloudbuild.v1", "BuildTrigger", trigger)
    (one,) = google.validate("cloudbuild.v1", "BuildTrigger", trigger | {"descriptoin": "x"})
    assert "unknown field 'descriptoin' (did you mean 'description'?)" in one.what
    build = yaml.safe_load(schedule.build.read_text(encoding="utf-8"))
    assert set(trigger["substitutions"]) <= set(build["substitutions"])
    path = trigger.get("filename") or trigger["gitFileSource"]["path"]
    assert path == model.relative(schedule.build)


@schedules
def test_the_workflow_builds_every_target_and_pushes_after_make_image(schedule: Schedule) -> None:
    job = workflow(schedule)["jobs"]["image"]
    assert list(dict.fromkeys(one["target"] for one in job["strategy"]["matrix"]["include"])) == targets_of(schedule)
    runs = [step.get("run", "") for step in job["steps"]]
    (push,) = [step for step in job["steps"] if "make push" in step.get("run", "")]
    image = "make lock image" if schedule is cloud_plan.NIGHTLY else "make image"
    assert runs.index(image) < runs.index(push["run"])
    assert push["if"] == "github.ref == 'refs/heads/main' && vars.REGISTRY != ''"


@schedules
def test_the_workflow_sets_variables_that_the_commands_read(schedule: Schedule) -> None:
    job = workflow(schedule)["jobs"]["image"]
    assert set(job["env"]) == {"TRAINYARD_TARGET", "TRAINYARD_ARCH", "TRAINYARD_REGISTRY", "TRAINYARD_KEYLESS"}


@schedules
def test_jobs_that_may_sign_by_their_identity_do_if_the_repository_says_so(schedule: Schedule) -> None:
    """Sigstore publishes the identity: without the variable, which is empty then, nothing is signed."""
    for module in (push, image_index, promote):
        assert "TRAINYARD_KEYLESS" in {parameter.envvar for parameter in module.command.params}, module.__name__
    pushing = [job for name, job in workflow(schedule)["jobs"].items() if name in ("image", "index")]
    for job in pushing:
        assert job["permissions"]["id-token"] == "write"
        assert job["env"]["TRAINYARD_KEYLESS"] == "${{ vars.KEYLESS }}"


def images_of(schedule: Schedule) -> list[model.Spec]:
    return [one for name in targets_of(schedule) for one in model.each_platform(model.load(name))]


@schedules
def test_every_platform_is_built_on_a_runner_of_its_architecture(schedule: Schedule) -> None:
    """https://docs.github.com/en/actions/reference/runners/github-hosted-runners."""
    runners = {"amd64": "ubuntu-24.04", "arm64": "ubuntu-24.04-arm"}
    job = workflow(schedule)["jobs"]["image"]
    assert job["runs-on"] == "${{ matrix.runner }}"
    assert job["env"]["TRAINYARD_ARCH"] == "${{ matrix.arch }}"
    assert job["strategy"]["matrix"]["include"] == [
        {"target": one.target, "arch": one.arch, "runner": runners[one.arch], "until": f"{one.ends[0].day}"}
        for one in images_of(schedule)
    ]
    assert job["strategy"]["fail-fast"] is False, "a platform that fails does not stop the others"


def test_the_index_of_a_target_is_made_of_the_digests_that_its_jobs_pushed() -> None:
    """Outputs have one value for all jobs of a matrix: each job needs a name that no other has."""
    jobs = workflow(cloud_plan.PUSHED)["jobs"]
    several = {one.target: one for one in images_of(cloud_plan.PUSHED) if len(one.platforms) > 1}
    made = {one["target"]: one["images"].split("} ") for one in jobs["index"]["strategy"]["matrix"]["include"]}
    assert list(made) == list(several)
    push = jobs["image"]["steps"][-1]
    assert push["id"] == "push" and '"${TRAINYARD_TARGET//./_}-$TRAINYARD_ARCH=$(' in push["run"]
    for target, spec in several.items():
        outputs = [f"{target}-{one.arch}" for one in model.each_platform(spec)]
        assert [re.findall(r"needs\.image\.outputs\.([a-z0-9-]+)", text) for text in made[target]] == [
            [name] for name in outputs
        ]
        for name in outputs:
            assert jobs["image"]["outputs"][name] == f"${{{{ steps.push.outputs.{name} }}}}"
    assert set(jobs["index"]["env"]) == {
        "TRAINYARD_TARGET", "TRAINYARD_IMAGES", "TRAINYARD_REGISTRY", "TRAINYARD_KEYLESS",
    }  # fmt: skip
    read = {parameter.envvar for parameter in image_index.command.params}
    assert {"TRAINYARD_IMAGES", "TRAINYARD_REGISTRY", "TRAINYARD_TARGET"} <= read


def test_an_index_is_made_of_what_passed_if_other_jobs_failed() -> None:
    index = workflow(cloud_plan.PUSHED)["jobs"]["index"]
    assert index["needs"] == "image"
    assert index["if"].startswith("!cancelled() && needs.image.result != 'skipped' && github.ref == 'refs/heads/main'")
    last = index["steps"][-1]
    assert "make image-index" in last["run"] and "$GITHUB_STEP_SUMMARY" in last["run"], "which names what is missing"
    assert last["shell"] == "bash", "with pipefail: the status of `tee` would hide an error"


def test_targets_of_one_platform_have_no_index() -> None:
    assert "index" not in workflow(cloud_plan.NIGHTLY)["jobs"]


@schedules
def test_steps_get_every_substitution_that_they_read_as_a_variable(schedule: Schedule) -> None:
    build = yaml.safe_load(schedule.build.read_text(encoding="utf-8"))
    given = {entry.partition("=")[0] for entry in build["options"]["env"]}
    read = {str(parameter.envvar) for parameter in cloudbuild_step.command.params if parameter.envvar}
    assert read <= given
    build_variables = {f"{settings.PREFIX}{name}" for name in settings.COMMON_VARIABLES}
    assert given <= read | build_variables


def test_only_the_nightly_schedule_promotes() -> None:
    for schedule in SCHEDULES:
        build = yaml.safe_load(schedule.build.read_text(encoding="utf-8"))
        promotes = schedule is cloud_plan.NIGHTLY
        assert bool(build["substitutions"]["_PROMOTE"]) is promotes
        assert ("promote" in workflow(schedule)["jobs"]["image"]["steps"][-1]["run"]) is promotes
        assert ("schedule" in workflow(schedule)[True]) is promotes


@schedules
def test_the_workflow_calls_existing_commands_with_minimal_permissions(schedule: Schedule) -> None:
    known = {*cli.trainyard.list_commands(click.Context(cli.trainyard)), "setup"}
    made = workflow(schedule)
    for job in made["jobs"].values():
        for step in job["steps"]:
            for word in re.findall(r"(?<=make )[a-z -]+", step.get("run", "")):
                assert set(word.split()) <= known
            action, at, commit = step.get("uses", "").partition("@")
            assert not at or re.fullmatch(r"[0-9a-f]{40}", commit), f"{action}: tags can be moved, commits cannot"
        assert job["timeout-minutes"]
    assert made["permissions"] == {"contents": "read"}
    for name in {"image", "index"} & set(made["jobs"]):
        assert made["jobs"][name]["permissions"] == {"contents": "read", "id-token": "write"}
