"""CI for users: a trigger and a workflow, of the same plan, valid by their publishers' schemas."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from importlib.resources import files
from typing import Any

import yaml

from scripts import cloud_config, cloud_plan, render, spec
from tests.unit.test_cloud_config import complaints

WORKFLOW: dict[Any, Any] = yaml.safe_load(cloud_plan.WORKFLOW.read_text(encoding="utf-8"))


def test_both_are_rendered_and_so_checked_for_drift() -> None:
    assert {cloud_plan.WORKFLOW, cloud_plan.TRIGGER} <= set(render.rendered())


def test_the_trigger_has_the_schema_of_the_api() -> None:
    document = files("googleapiclient.discovery_cache").joinpath("documents", "cloudbuild.v1.json")
    schemas = json.loads(document.read_text(encoding="utf-8"))["schemas"]
    trigger = cloud_config.read(cloud_plan.TRIGGER.read_text(encoding="utf-8"), "trigger")
    assert list(complaints(schemas, "BuildTrigger", trigger)) == []
    assert list(complaints(schemas, "BuildTrigger", trigger | {"brunch": "x"})) == ["build.brunch: unknown"]
    build = cloud_config.read(cloud_plan.CLOUD_BUILD.read_text(encoding="utf-8"), "build")
    assert set(trigger["substitutions"]) <= set(build["substitutions"])
    assert trigger["filename"] == spec.relative(cloud_plan.CLOUD_BUILD)


def test_the_workflow_has_githubs_schema() -> None:
    command = [sys.executable, "-m", "check_jsonschema", "--builtin-schema=vendor.github-workflows"]
    found = subprocess.run([*command, str(cloud_plan.WORKFLOW)], capture_output=True, text=True, check=False)
    assert found.returncode == 0, found.stdout + found.stderr


def test_the_workflow_makes_every_target_and_pushes_only_after_make_image() -> None:
    job = WORKFLOW["jobs"]["image"]
    assert job["strategy"]["matrix"]["target"] == spec.targets()
    runs = [step.get("run", "") for step in job["steps"]]
    assert runs.index("make image") < runs.index("make login push")
    push = job["steps"][runs.index("make login push")]
    assert push["if"] == "github.ref == 'refs/heads/main' && vars.REGISTRY != ''"


def test_the_workflow_calls_only_verbs_that_exist_with_the_least_rights() -> None:
    modules = [path for path in (spec.ROOT / "scripts").glob("*.py") if "\n    cli.run(main)\n" in path.read_text()]
    known = {path.stem.replace("_", "-") for path in modules} | {"setup"}
    for job in WORKFLOW["jobs"].values():
        for step in job["steps"]:
            for word in re.findall(r"(?<=make )[a-z -]+", step.get("run", "")):
                assert set(word.split()) <= known
        assert job["timeout-minutes"]
    assert WORKFLOW["permissions"] == {"contents": "read"}
    assert WORKFLOW["jobs"]["image"]["permissions"] == {"contents": "read", "id-token": "write"}
