"""CI for users: triggers and workflows, of the same plans. `make check` holds workflows to GitHub's schema."""

from __future__ import annotations

import re
from typing import Any

import pytest
import yaml

from scripts import discovery, render, spec
from scripts.cloud import config as cloud_config
from scripts.cloud import plan as cloud_plan
from scripts.cloud.plan import Schedule

SCHEDULES = (cloud_plan.PUSHED, cloud_plan.NIGHTLY)
schedules = pytest.mark.parametrize("schedule", SCHEDULES, ids=lambda one: one.name)


def workflow(schedule: Schedule) -> dict[Any, Any]:
    """A schedule's workflow. YAML 1.1 reads its key `on` as True."""
    return dict(yaml.safe_load(schedule.workflow.read_text(encoding="utf-8")))


def targets_of(schedule: Schedule) -> list[str]:
    return [name for name in spec.targets() if cloud_plan.schedule_of(spec.load(name)) is schedule]


def test_every_target_is_on_one_schedule_and_the_nightly_is_on_its_own() -> None:
    assert sorted(name for schedule in SCHEDULES for name in targets_of(schedule)) == spec.targets()
    assert targets_of(cloud_plan.NIGHTLY) == ["xla-nightly"]


@schedules
def test_all_are_rendered_and_so_checked_for_drift(schedule: Schedule) -> None:
    assert {schedule.build, schedule.workflow, schedule.trigger} <= set(render.rendered())


@schedules
def test_the_trigger_has_the_schema_of_the_api(schedule: Schedule) -> None:
    schemas = discovery.schemas("cloudbuild.v1")
    trigger = cloud_config.read(schedule.trigger.read_text(encoding="utf-8"), "trigger")
    assert not list(discovery.complaints(schemas, "BuildTrigger", trigger))
    (one,) = discovery.complaints(schemas, "BuildTrigger", trigger | {"descriptoin": "x"})
    assert "unknown field 'descriptoin' (did you mean 'description'?)" in one.what
    build = cloud_config.read(schedule.build.read_text(encoding="utf-8"), "build")
    assert set(trigger["substitutions"]) <= set(build["substitutions"])
    path = trigger.get("filename") or trigger["gitFileSource"]["path"]
    assert path == spec.relative(schedule.build)


@schedules
def test_the_workflow_makes_every_target_and_pushes_only_after_make_image(schedule: Schedule) -> None:
    job = workflow(schedule)["jobs"]["image"]
    assert job["strategy"]["matrix"]["target"] == targets_of(schedule)
    runs = [step.get("run", "") for step in job["steps"]]
    (push,) = [step for step in job["steps"] if step.get("run", "").startswith("make login push")]
    image = "make lock image" if schedule is cloud_plan.NIGHTLY else "make image"
    assert runs.index(image) < runs.index(push["run"])
    assert push["if"] == "github.ref == 'refs/heads/main' && vars.REGISTRY != ''"


def test_only_the_nightly_promotes_by_itself() -> None:
    for schedule in SCHEDULES:
        build = cloud_config.read(schedule.build.read_text(encoding="utf-8"), "build")
        promotes = schedule is cloud_plan.NIGHTLY
        assert bool(build["substitutions"]["_PROMOTE"]) is promotes
        assert ("promote" in workflow(schedule)["jobs"]["image"]["steps"][-1]["run"]) is promotes
        assert ("schedule" in workflow(schedule)[True]) is promotes


@schedules
def test_the_workflow_calls_only_verbs_that_exist_with_the_least_rights(schedule: Schedule) -> None:
    modules = [path for path in (spec.ROOT / "scripts").glob("*.py") if "\n    cli.run(main)\n" in path.read_text()]
    known = {path.stem.replace("_", "-") for path in modules} | {"setup"}
    made = workflow(schedule)
    for job in made["jobs"].values():
        for step in job["steps"]:
            for word in re.findall(r"(?<=make )[a-z -]+", step.get("run", "")):
                assert set(word.split()) <= known
            action, at, commit = step.get("uses", "").partition("@")
            assert not at or re.fullmatch(r"[0-9a-f]{40}", commit), f"{action}: a tag can be moved, a commit cannot"
        assert job["timeout-minutes"]
    assert made["permissions"] == {"contents": "read"}
    assert made["jobs"]["image"]["permissions"] == {"contents": "read", "id-token": "write"}
