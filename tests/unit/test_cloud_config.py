"""The rendered cloudbuild.yaml, and the rules of Cloud Build that Trainyard checks."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.fakes import cloud_build_rules

from trainyard.cloudbuild import config as cloud_config
from trainyard.cloudbuild import pipelines as cloud_plan
from trainyard.cloudbuild import rules, substitutions
from trainyard.console import UserError
from trainyard.jobs.schema import google
from trainyard.project import generated
from trainyard.settings import ROOT

TEXT = cloud_plan.PUSHED.build.read_text(encoding="utf-8")


@pytest.fixture(params=[cloud_plan.PUSHED, cloud_plan.NIGHTLY], ids=lambda schedule: schedule.name)
def data(request: pytest.FixtureRequest) -> dict[str, Any]:
    """A rendered configuration, which the test may change."""
    return dict(cloud_config.read(request.param.build.read_text(encoding="utf-8"), request.param.build.name))


# --- rendered configuration ------------------------------------------------------------------------------------------


def test_every_target_is_built_verified_and_smoke_tested_before_anything_is_published(data: dict[str, Any]) -> None:
    build = cloud_config.load(data, where="x", built_in={})
    number = {step.id: step.number for step in build.steps}
    publish, promote = build.steps[number["publish"]], build.steps[-1]
    for target in data["substitutions"]["_TARGETS"].split():
        assert build.steps[number[f"verify-{target}"]].wait_for == {number[f"build-{target}"]}
        assert build.steps[number[f"smoke-{target}"]].wait_for == {number[f"build-{target}"]}
        assert {number[f"verify-{target}"], number[f"smoke-{target}"]} <= publish.wait_for
    assert (promote.id, promote.wait_for) == ("promote", {publish.number})
    assert not build.images, "'images' would be pushed regardless of _TARGETS"
    assert not any(step.allow_failure or step.allow_exit_codes for step in build.steps)


def test_targets_are_built_in_parallel(data: dict[str, Any]) -> None:
    build = cloud_config.load(data, where="x", built_in={})
    waits = {step.wait_for for step in build.steps if step.id.startswith("build-")}
    assert len(waits) == 1


def test_substitutions_have_the_documented_names_and_reach_the_steps(data: dict[str, Any]) -> None:
    names = {"_TARGETS", "_REGION", "_REPOSITORY", "_TAG", "_INDEX", "_CACHE"}
    assert names <= set(data["substitutions"])
    given = {"_REGION": "europe-west4", "_REPOSITORY": "ml", "_TARGETS": "tf-cpu"}
    build = cloud_config.load(data, where="x", given=given, built_in={"PROJECT_ID": "p", "BUILD_ID": "b-1"})
    environment = dict(entry.split("=", 1) for entry in build.steps[-1].env)
    assert environment["TRAINYARD_REGISTRY"] == "europe-west4-docker.pkg.dev/p/ml"
    assert environment["TRAINYARD_TAG"] == "b-1"
    assert environment["TRAINYARD_TARGETS"] == "tf-cpu"


def test_every_time_limit_has_its_measurement_in_a_comment() -> None:
    limits = [line for line in TEXT.splitlines() if re.match(r" *timeout:", line)]
    assert len(limits) > 4
    assert all(re.search(r"# .*\d+ (s|min)\b.*\(20\d\d-\d\d\)", line) for line in limits), limits


def test_logs_go_to_cloud_logging_only(data: dict[str, Any]) -> None:
    """Builds with a user-specified service account need it:
    https://cloud.google.com/build/docs/securing-builds/configure-user-specified-service-accounts.
    """
    assert data["options"]["logging"] == "CLOUD_LOGGING_ONLY"


def test_it_is_marked_as_generated() -> None:
    assert "Generated from images/*/image.yaml by `make render`. Do not edit." in TEXT.splitlines()[0]
    assert cloud_plan.PUSHED.build in generated.rendered()


# --- the schema of the API's discovery document ----------------------------------------------------------------------


def errors(data: dict[str, Any]) -> list[str]:
    """Violations of the schema in the discovery document, with unknown keys and enum values."""
    found = google.validate("cloudbuild.v1", "Build", data)
    return [f"{'.'.join(map(str, one.location))}: {one.what}" for one in found]


def test_it_has_the_schema_of_the_api(data: dict[str, Any]) -> None:
    assert errors(data) == []


@pytest.mark.parametrize(
    ("change", "error"),
    [
        (lambda d: d["steps"][0].update(argz=[]), "steps.0.argz: unknown field 'argz' (did you mean 'args'?)"),
        (lambda d: d["options"].update(machineType="E2_HIGHCPU_7"), "'E2_HIGHCPU_7' is not one of its values"),
        (lambda d: d["options"].update(diskSizeGb="100 GB"), "options.diskSizeGb: '100 GB' is not a whole number"),
        (lambda d: d.update(timeout="2h"), "'2h' is not a duration"),
        (lambda d: d["steps"][1].update(args="all"), "steps.1.args: 'all' is not a list"),
    ],
)
def test_the_schema_is_strict(data: dict[str, Any], change: Callable[[dict[str, Any]], None], error: str) -> None:
    change(data)
    assert error in " ".join(errors(data))


# --- rules ------------------------------------------------------------------------------------------------------------


def test_it_violates_no_rule(data: dict[str, Any]) -> None:
    assert rules.violations(data) == []


def test_every_substitution_is_used_and_defined(data: dict[str, Any]) -> None:
    """ALLOW_LOOSE, which the file sets, does not check this; MUST_MATCH does."""
    data["options"]["substitutionOption"] = "MUST_MATCH"
    assert rules.violations(data) == []


def test_cloud_build_accepts_it(data: dict[str, Any]) -> None:
    """By the service's published description, not by the rules that are tested here."""
    assert cloud_build_rules.violations(data) == []
    data["steps"][0]["waitFor"] = ["publish"]
    assert cloud_build_rules.violations(data) != []


STEP: dict[str, Any] = {"name": "debian", "id": "a"}

BROKEN: list[tuple[dict[str, Any], str]] = [
    ({"steps": []}, "no steps"),
    ({"steps": [{"args": ["x"]}]}, "step 0: 'name' is missing"),
    ({"steps": [STEP | {"id": str(number)} for number in range(101)]}, "101 steps; at most 100"),
    ({"steps": [STEP, STEP]}, "id 'a' is already used by an earlier step"),
    ({"steps": [STEP | {"id": "-"}]}, "the id '-' is reserved"),
    ({"steps": [STEP | {"waitFor": ["b"]}, STEP | {"id": "b"}]}, "waitFor 'b' is not the id of an earlier step"),
    ({"steps": [STEP, STEP | {"id": "b", "waitFor": ["-", "a"]}]}, "'-' cannot be combined with ids"),
    ({"steps": [STEP | {"waitFor": ["a"]}]}, "waitFor 'a' is not the id of an earlier step"),
    ({"steps": [STEP | {"env": ["HOME"]}]}, "env 'HOME' is not KEY=VALUE"),
    ({"steps": [STEP], "options": {"env": ["=x"]}}, "options: env '=x' is not KEY=VALUE"),
    ({"steps": [STEP | {"timeout": "10m"}]}, "'10m' is not a duration"),
    ({"steps": [STEP | {"timeout": "61s"}], "timeout": "60s"}, "longer than the build's 60 s"),
    ({"steps": [STEP], "timeout": "86401s"}, "at most 86400 s"),
    ({"steps": [STEP | {"script": "true", "args": ["x"]}]}, "'script' cannot be combined with 'args'"),
    ({"steps": [STEP | {"volumes": [{"name": "v", "path": "/v"}]}]}, "volume 'v' is used by only one step"),
    ({"steps": [STEP | {"volumes": [{"name": "v", "path": "/workspace/x"}]}]}, "is reserved by Cloud Build"),
    ({"steps": [STEP | {"dir": "../up"}]}, "is outside /workspace"),
    ({"steps": [STEP | {"args": ["$_X"]}]}, "substitution $_X is not defined"),
    ({"steps": [STEP], "substitutions": {"_X": "1"}}, "substitution _X is defined but never used"),
    ({"steps": [STEP], "substitutions": {"X": "1"}}, "'X' is not a name such as _NAME"),
    ({"steps": [STEP | {"args": ["$_X"]}], "substitutions": {"_X": 2.1}}, "2.1 is not a string: quote it"),
    (
        {"steps": [STEP | {"args": ["$PROJECTID"]}]},
        "$PROJECTID is not a built-in substitution (did you mean 'PROJECT_ID'?)",
    ),
    ({"steps": [STEP | {"args": ["x"] * 101}]}, "101 args; at most 100"),
    ({"steps": [STEP | {"args": ["x" * 4001]}]}, "longer than 4000 characters"),
    ({"steps": [STEP | {"argz": []}]}, "unknown or unsupported key 'argz' (did you mean 'args'?)"),
]


@pytest.mark.parametrize(("config", "problem"), BROKEN, ids=[problem for _, problem in BROKEN])
def test_a_violation_is_one_line(config: dict[str, Any], problem: str) -> None:
    with pytest.raises(UserError) as refused:
        cloud_config.load(config, where="cloudbuild.yaml", built_in={})
    assert problem in str(refused.value)
    assert "\n" not in str(refused.value)


def test_every_rule_has_a_violation_above() -> None:
    broken = {rule.__name__ for rule in rules.RULES for config, _ in BROKEN if list(rule(config))}
    assert broken == {rule.__name__ for rule in rules.RULES}


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("$_A-${_A}_", "1-1_"),
        ("$$_A $$$_A", "$_A $1"),
        ("${PROJECT_ID}:$BUILD_ID", "p:b"),
        ("[$SHORT_SHA]", "[]"),
        ("$lower and 5$", "$lower and 5$"),
    ],
)
def test_references_are_replaced_by_their_values(text: str, expected: str) -> None:
    assert substitutions.substitute(text, {"_A": "1", "PROJECT_ID": "p", "BUILD_ID": "b"}) == expected


def test_dynamic_substitutions_refer_to_each_other() -> None:
    given = {"_A": "${_B}/x", "_B": "$PROJECT_ID"}
    assert substitutions.resolve(given, {"PROJECT_ID": "p"}, dynamic=True)["_A"] == "p/x"
    assert substitutions.resolve(given, {"PROJECT_ID": "p"}, dynamic=False)["_A"] == "${_B}/x"
    with pytest.raises(UserError, match="in a cycle: _A -> _B -> _A"):
        substitutions.resolve({"_A": "$_B", "_B": "$_A"}, {}, dynamic=True)


def test_a_parameter_expansion_is_rejected() -> None:
    with pytest.raises(UserError, match="parameter expansions are not supported"):
        substitutions.substitute("${_A:-x}", {})


def test_scripts_are_not_substituted() -> None:
    config = {"steps": [{"name": "debian", "script": "echo $HOME $$ $_X"}]}
    assert cloud_config.load(config, where="x", built_in={}).steps[0].script == "echo $HOME $$ $_X"


def test_a_missing_configuration_is_one_line(tmp_path: Path) -> None:
    command = ["make", "cloudbuild-local", f"CONFIG={tmp_path / 'nowhere.yaml'}"]
    found = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)
    assert found.returncode == 2
    assert found.stderr.startswith("cloudbuild-local: no file ")
    assert "Traceback" not in found.stderr
