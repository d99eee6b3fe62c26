"""The rendered cloudbuild.yaml, and the rules of Cloud Build that Trainyard checks."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.fakes import cloud_build_rules, discovery

from cloudbuild_local import config as cloud_config
from cloudbuild_local import rules
from cloudbuild_local.normalization import normalize
from trainyard import cli
from trainyard.common.errors import UserError
from trainyard.common.settings import ROOT
from trainyard.project import generated
from trainyard.release import pipelines as cloud_plan
from trainyard.spec import model
from trainyard_jobs.schema import google

TEXT = cloud_plan.PUSHED.build.read_text(encoding="utf-8")


@pytest.fixture(params=[cloud_plan.PUSHED, cloud_plan.NIGHTLY], ids=lambda schedule: schedule.name)
def data(request: pytest.FixtureRequest) -> dict[str, Any]:
    """A rendered configuration, which the test may change."""
    return dict(cloud_config.read(request.param.build.read_text(encoding="utf-8"), request.param.build.name))


def images_of(data: dict[str, Any]) -> list[model.Spec]:
    """The specs of a configuration's targets, one for each of their platforms."""
    names = data["substitutions"]["_TARGETS"].split()
    return [one for name in names for one in model.each_platform(model.load(name))]


# --- rendered configuration ------------------------------------------------------------------------------------------


def test_every_target_is_built_verified_and_smoke_tested_before_anything_is_published(data: dict[str, Any]) -> None:
    build = cloud_config.load(data, where="x", built_in={})
    number = {step.id: step.number for step in build.steps}
    publish, promote = build.steps[number["publish"]], build.steps[-1]
    for name in (spec.local_name for spec in images_of(data)):
        assert build.steps[number[f"verify-{name}"]].wait_for == {number[f"build-{name}"]}
        assert build.steps[number[f"smoke-{name}"]].wait_for == {number[f"build-{name}"]}
        assert {number[f"verify-{name}"], number[f"smoke-{name}"]} <= publish.wait_for
    assert (promote.id, promote.wait_for) == ("promote", {publish.number})
    assert not build.images, "'images' would be pushed regardless of _TARGETS"
    assert not any(step.allow_failure or step.allow_exit_codes for step in build.steps)


def test_every_platform_of_a_target_has_steps_for_it(data: dict[str, Any]) -> None:
    steps = {step["id"]: step for step in data["steps"]}
    for spec in images_of(data):
        for name in ("build", "verify", "smoke"):
            step = steps[f"{name}-{spec.local_name}"]
            assert (step["args"][-2:], step["env"]) == ([name, spec.target], [f"TRAINYARD_ARCH={spec.arch}"])
    assert data["substitutions"]["_PLATFORMS"] == "linux/amd64", "others are emulated, and only on request"


def test_builds_run_in_parallel_and_those_for_arm64_after_its_emulation(data: dict[str, Any]) -> None:
    """Cloud Build's machines are x86-64."""
    steps = {step["id"]: step for step in data["steps"]}
    for spec in images_of(data):
        first = "prepare" if spec.arch == "amd64" else "emulation"
        assert steps[f"build-{spec.local_name}"]["waitFor"] == [first]
    assert ("emulation" in steps) is any(spec.arch == "arm64" for spec in images_of(data))


def test_cloud_build_has_no_machines_for_arm64() -> None:
    """N1 and E2 are x86-64 (https://cloud.google.com/compute/docs/general-purpose-machines). With others among them, a
    build for arm64 needs no emulation.
    """
    document = discovery.document("cloudbuild.v1")
    types = document["schemas"]["BuildOptions"]["properties"]["machineType"]["enum"]
    assert {name.partition("_")[0] for name in types} == {"UNSPECIFIED", "N1", "E2"}


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
    assert cloud_plan.PUSHED.build in generated.rendered(cli.trainyard)


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
VOLUME = {"name": "vol", "path": "/v"}


def two(**step: Any) -> dict[str, Any]:
    """A build of two steps with the same fields."""
    return {"steps": [{"name": "debian"} | step, {"name": "debian"} | step]}


#: What Cloud Build refuses: its fields' descriptions (https://cloud.google.com/build/docs/api/reference/rest/v1/projects.builds)
#: and https://github.com/GoogleCloudPlatform/cloud-build-local/blob/master/validate/validate.go.
BROKEN: list[tuple[dict[str, Any], str]] = [
    ({"steps": []}, "no steps"),
    ({"steps": [{"args": ["x"]}]}, "step 0: 'name' is missing"),
    ({"steps": [STEP, STEP]}, "id 'a' is already used by an earlier step"),
    ({"steps": [STEP | {"id": "-"}]}, "the id '-' is reserved"),
    ({"steps": [STEP | {"waitFor": ["b"]}, STEP | {"id": "b"}]}, "waitFor 'b' is not the id of an earlier step"),
    ({"steps": [STEP | {"waitFor": ["a"]}]}, "waitFor 'a' is not the id of an earlier step"),
    ({"steps": [STEP | {"env": ["HOME"]}]}, "env 'HOME' is not KEY=VALUE"),
    ({"steps": [STEP], "options": {"env": ["=x"]}}, "options: env '=x' is not KEY=VALUE"),
    ({"steps": [STEP | {"timeout": "10m"}]}, "'10m' is not a duration"),
    ({"steps": [STEP | {"timeout": "86401s"}]}, "step 0: timeout: 86401 s; at most 86400 s"),
    ({"steps": [STEP], "timeout": "86401s"}, "at most 86400 s"),
    ({"steps": [STEP], "timeout": "-5s"}, "'-5s' is not a duration"),
    ({"steps": [STEP], "queueTtl": "x"}, "queueTtl: 'x' is not a duration"),
    ({"steps": [STEP | {"script": "true", "args": ["x"]}]}, "'script' cannot be combined with 'args'"),
    ({"steps": [STEP | {"script": "true", "entrypoint": "sh"}]}, "'script' cannot be combined with 'args'"),
    ({"steps": [STEP | {"volumes": [VOLUME]}]}, "volume 'vol' is used by only one step"),
    ({"steps": [STEP], "options": {"volumes": [VOLUME]}}, "options: volumes: the build has only one step"),
    (two(volumes=[VOLUME]) | {"options": {"volumes": [VOLUME]}}, "volume name 'vol' is used by options.volumes too"),
    (two(volumes=[{"name": "vol", "path": "/workspace/"}]), "'/workspace' is reserved by Cloud Build"),
    (two(volumes=[{"name": "vol", "path": "/cloudbuild/x"}]), "is reserved by Cloud Build"),
    (two(volumes=[{"name": "vol", "path": "v"}]), "path 'v' is not absolute"),
    (two(volumes=[{"name": "vol"}]), "path '' is not absolute"),
    (two(volumes=[{"name": "v", "path": "/v"}]), "volume name 'v' must be two or more letters"),
    (two(volumes=[VOLUME, {"name": "other", "path": "/v/"}]), "volume path '/v' is used twice"),
    (two(volumes=[VOLUME, {"name": "vol", "path": "/w"}]), "volume name 'vol' is used twice"),
    ({"steps": [STEP | {"args": ["$_X"]}]}, "substitution $_X is not defined"),
    ({"steps": [STEP], "substitutions": {"_X": "1"}}, "substitution _X is defined but never used"),
    ({"steps": [STEP | {"script": "$_X"}], "substitutions": {"_X": "1"}}, "substitution _X is defined but never used"),
    ({"steps": [STEP], "substitutions": {"X": "1"}}, "'X' is not a name such as _NAME"),
    ({"steps": [STEP], "substitutions": {"COMMIT_SHA": "1"}}, "'COMMIT_SHA' is not a name such as _NAME"),
    ({"steps": [STEP | {"args": ["$_X"]}], "substitutions": {"_X": 2.1}}, "_X: 2.1 is not text: put it in quotes"),
    ({"steps": [STEP], "substitutions": ["a"]}, 'substitutions: ["a"] is not a mapping of fields'),
    (
        {"steps": [STEP | {"args": ["$PROJECTID"]}]},
        "$PROJECTID is not a built-in substitution (did you mean 'PROJECT_ID'?)",
    ),
    ({"steps": [STEP | {"args": ["x"] * 101}]}, "101 args; at most 100"),
    ({"steps": [STEP | {"args": ["x" * 10_001]}]}, "longer than 10000 characters"),
    ({"steps": [STEP | {"dir": "x" * 1001}]}, "dir is longer than 1000 characters"),
    ({"steps": [STEP], "images": ["a"] * 201}, "201 images; at most 200"),
    ({"steps": [STEP], "tags": ["a"] * 65}, "65 tags; at most 64"),
    ({"steps": [STEP], "tags": ["a b"]}, "tags: 'a b' is not a tag"),
    ({"steps": [STEP], "images": ["A/B"]}, "images: 'A/B' is not an image reference"),
    ({"steps": [STEP], "images": ["a:b:c"]}, "images: 'a:b:c' is not an image reference"),
    ({"steps": [{"name": "debian:"}]}, "step 0: name: 'debian:' is not an image reference"),
    ({"steps": [STEP], "images": ["a"], "artifacts": {"images": ["b"]}}, "'images' and 'artifacts.images' differ"),
    ({"steps": [STEP], "artifacts": {"objects": {"location": "b", "paths": ["x"]}}}, "starts with gs://"),
    ({"steps": [STEP], "artifacts": {"objects": {"location": "gs://b"}}}, "0 paths; must be 1 to 100"),
    ({"steps": [STEP | {"secretEnv": ["S"]}]}, "secretEnv 'S' is not defined by a secret"),
    ({"steps": [STEP], "secrets": [{"kmsKeyName": "k", "secretEnv": {"S": "YQ=="}}]}, "'S' is used by no step"),
    ({"steps": [STEP | {"allowExitCodes": [2**31]}]}, "2147483648 is not an exit status"),
    ({"steps": [STEP | {"allowExitCodes": [True]}]}, "true is not an exit status"),
    ({"steps": [STEP | {"allowExitCodes": "x"}]}, "steps[0].allowExitCodes[0]: 'x' is not a whole number"),
    ({"steps": [STEP], "options": {"diskSizeGb": 4001}}, "diskSizeGb: 4001 is not a number of GB up to 4000"),
    (
        {"steps": [STEP], "serviceAccount": "projects/p/serviceAccounts/s"},
        "serviceAccount: set logsBucket, or options.logging",
    ),
    (
        {"steps": [STEP], "options": {"pool": {"name": "p"}}},
        "options.pool.name: 'p' is not projects/PROJECT/locations/",
    ),
    ({"steps": [STEP | {"argz": []}]}, "steps[0].argz: unknown field 'argz' (did you mean 'args'?)"),
    ({"steps": [STEP], "options": "x"}, "options: 'x' is not a mapping of fields"),
    ({"steps": [STEP], "options": [1]}, "options: [1] is not a mapping of fields"),
    ({"steps": [STEP], "options": {"machineType": "HUGE"}}, "options.machineType: 'HUGE' is not one of its values"),
    ({"steps": [STEP], "options": {"logging": None}}, "options.logging: null is not one of its values"),
    ({"steps": [STEP | {"entrypoint": ["x"]}]}, 'steps[0].entrypoint: ["x"] is not text'),
    ({"steps": [STEP | {"allowFailure": "false"}]}, "steps[0].allowFailure: 'false' is neither true nor false"),
    ({"steps": [STEP | {"dir": 5}]}, "steps[0].dir: 5 is not text"),
    ({"steps": [STEP | {"args": [None]}]}, "steps[0].args[0]: null is not a value"),
    ({"steps": [STEP], 1: 2}, "the key 1 is not text"),
    ({"steps": [STEP], "source": {}}, "source: gcloud sets it"),
]


@pytest.mark.parametrize(("config", "problem"), BROKEN, ids=[problem for _, problem in BROKEN])
def test_a_violation_is_one_line(config: dict[str, Any], problem: str) -> None:
    with pytest.raises(UserError) as refused:
        cloud_config.load(config, where="cloudbuild.yaml", built_in={})
    assert problem in str(refused.value)
    assert "\n" not in str(refused.value)


def test_every_rule_has_a_violation_above() -> None:
    built = [normalize(config)[0] for config, _ in BROKEN]
    broken = {rule.id for rule in rules.RULES for build in built if rule(build)}
    assert broken == {rule.id for rule in rules.RULES}


#: What Cloud Build accepts, read as gcloud reads it (tests/cloud/test_gcloud_build_oracle.py compares with gcloud).
ACCEPTED: dict[str, dict[str, Any]] = {
    "keys in snake_case": {"steps": [STEP, {"name": "debian", "wait_for": ["a"], "allow_failure": True}]},
    "one value for a list": {"steps": [STEP, {"name": "debian", "waitFor": "a", "args": "x"}], "images": "a"},
    "null": {"steps": [STEP | {"args": None, "dir": None}], "substitutions": None, "options": None},
    "a null substitution": {"steps": [STEP | {"args": ["$_X"]}], "substitutions": {"_X": None}},
    "- among ids": {"steps": [STEP, {"name": "debian", "waitFor": ["-", "a"]}]},
    "a dir above": {"steps": [STEP | {"dir": "../b/c"}]},
    "a step longer than its build": {"steps": [STEP | {"timeout": "61s"}], "timeout": "60s"},
    "an expansion for a shell": {"steps": [STEP | {"args": ["-c", "echo ${FOO:-x} ${_Y%z}"]}]},
    "a volume below the workspace": two(volumes=[{"name": "vol", "path": "/workspace/x"}]),
    "a volume of all steps": two() | {"options": {"volumes": [VOLUME]}},
    "a digest": {"steps": [{"name": "debian@sha256:" + "0" * 64}]},
    "equal images": {"steps": [STEP], "images": ["a"], "artifacts": {"images": ["a"]}},
    "an empty tag": {"steps": [STEP], "tags": ["$BRANCH_NAME", "x"]},
    "what the service writes": {"steps": [STEP | {"status": "SUCCESS"}], "id": "x", "status": "SUCCESS"},
    "a timeout of 0": {"steps": [STEP], "timeout": "0s"},
}


@pytest.mark.parametrize("config", ACCEPTED.values(), ids=ACCEPTED)
def test_what_cloud_build_accepts_is_accepted(config: dict[str, Any]) -> None:
    assert cloud_config.load(config, where="x", built_in={}).steps


def test_given_substitutions_may_set_built_in_ones() -> None:
    """`gcloud builds submit --help` lists them."""
    config = {"steps": [STEP | {"args": ["$COMMIT_SHA"]}]}
    assert cloud_config.load(config, where="x", given={"COMMIT_SHA": "abc"}, built_in={}).steps[0].args == ("abc",)
    with pytest.raises(UserError, match="'PROJECT_ID' is not a name such as _NAME"):
        cloud_config.load(config, where="x", given={"PROJECT_ID": "p"}, built_in={})


def test_scripts_are_not_substituted() -> None:
    config = {"steps": [{"name": "debian", "script": "echo $HOME $$ $_X"}]}
    assert cloud_config.load(config, where="x", built_in={}).steps[0].script == "echo $HOME $$ $_X"


def test_a_missing_configuration_is_one_line(tmp_path: Path) -> None:
    command = ["make", "cloudbuild-local", f"CONFIG={tmp_path / 'nowhere.yaml'}"]
    found = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)
    assert found.returncode == 2
    assert found.stderr.startswith("cloudbuild-local: no file ")
    assert "Traceback" not in found.stderr
