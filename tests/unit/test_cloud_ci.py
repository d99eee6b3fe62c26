"""Rendered triggers of Cloud Build and workflows of GitHub Actions, whose schema `make check` validates."""

from __future__ import annotations

import re
from typing import Any

import click
import pytest
import yaml

from trainyard import cli, settings
from trainyard.cloudbuild import config as cloud_config
from trainyard.cloudbuild import pipelines as cloud_plan
from trainyard.cloudbuild.pipelines import Schedule
from trainyard.commands import cloudbuild_step
from trainyard.jobs.schema import google
from trainyard.project import generated
from trainyard.spec import model

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
    assert {schedule.build, schedule.workflow, schedule.trigger} <= set(generated.rendered())


@schedules
def test_the_trigger_has_the_schema_of_the_api(schedule: Schedule) -> None:
    trigger = cloud_config.read(schedule.trigger.read_text(encoding="utf-8"), "trigger")
    assert not google.validate("cloudbuild.v1", "BuildTrigger", trigger)
    (one,) = google.validate("cloudbuild.v1", "BuildTrigger", trigger | {"descriptoin": "x"})
    assert "unknown field 'descriptoin' (did you mean 'description'?)" in one.what
    build = cloud_config.read(schedule.build.read_text(encoding="utf-8"), "build")
    assert set(trigger["substitutions"]) <= set(build["substitutions"])
    path = trigger.get("filename") or trigger["gitFileSource"]["path"]
    assert path == model.relative(schedule.build)


@schedules
def test_the_workflow_builds_every_target_and_pushes_after_make_image(schedule: Schedule) -> None:
    job = workflow(schedule)["jobs"]["image"]
    assert job["strategy"]["matrix"]["target"] == targets_of(schedule)
    runs = [step.get("run", "") for step in job["steps"]]
    (push,) = [step for step in job["steps"] if step.get("run", "").startswith("make login push")]
    image = "make lock image" if schedule is cloud_plan.NIGHTLY else "make image"
    assert runs.index(image) < runs.index(push["run"])
    assert push["if"] == "github.ref == 'refs/heads/main' && vars.REGISTRY != ''"


@schedules
def test_the_workflow_sets_variables_that_the_commands_read(schedule: Schedule) -> None:
    job = workflow(schedule)["jobs"]["image"]
    assert set(job["env"]) == {"TRAINYARD_TARGET", "TRAINYARD_REGISTRY"}


@schedules
def test_steps_get_every_substitution_that_they_read_as_a_variable(schedule: Schedule) -> None:
    build = cloud_config.read(schedule.build.read_text(encoding="utf-8"), "build")
    given = {entry.partition("=")[0] for entry in build["options"]["env"]}
    read = {str(parameter.envvar) for parameter in cloudbuild_step.command.params if parameter.envvar}
    assert read <= given
    build_variables = {f"{settings.PREFIX}{name}" for name in settings.COMMON_VARIABLES}
    assert given <= read | build_variables


def test_only_the_nightly_schedule_promotes() -> None:
    for schedule in SCHEDULES:
        build = cloud_config.read(schedule.build.read_text(encoding="utf-8"), "build")
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
    assert made["jobs"]["image"]["permissions"] == {"contents": "read", "id-token": "write"}
