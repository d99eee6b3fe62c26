"""What the local executor runs, refuses by name and leaves out, without a Docker engine; `cloudbuild-local --check`."""

from __future__ import annotations

import io
import json
import shutil
import subprocess
import tarfile
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import pytest
from click.testing import CliRunner
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.examples import examples

from cloudbuild_local import config as cloud_config
from cloudbuild_local import local, rules
from cloudbuild_local.executor import FAILURE, SUCCESS, TIMEOUT, Executor, Outcome
from trainyard import cli
from trainyard.common import third_party
from trainyard.common.errors import StepFailed, UserError
from trainyard.oci import docker_engine

STEP: dict[str, Any] = {"name": "debian"}


def load(config: dict[Any, Any]) -> cloud_config.Build:
    return cloud_config.load(config, where="x", built_in={"PROJECT_ID": "p"})


# --- every field of the API ------------------------------------------------------------------------------------------

#: Fields that the executor implements.
RUN = {
    "steps", "images", "substitutions", "timeout", "artifacts.images", "options.env", "options.volumes",
    "options.automapSubstitutions", "options.dynamicSubstitutions", "options.substitutionOption", "steps.name",
    "steps.args", "steps.env", "steps.dir", "steps.id", "steps.waitFor", "steps.entrypoint", "steps.script",
    "steps.timeout", "steps.volumes", "steps.allowFailure", "steps.allowExitCodes", "steps.automapSubstitutions",
}  # fmt: skip


def test_every_field_of_the_api_is_run_or_refused_or_named() -> None:
    """A field that Google adds fails this test until its kind is decided."""
    known = third_party.schemas("cloudbuild.v1")
    fields = set()
    for name, schema in known["Build"]["properties"].items():
        inner = {"steps": "BuildStep", "options": "BuildOptions", "artifacts": "Artifacts"}.get(name)
        parts = known[inner]["properties"] if inner else {}
        own = {f"{name}.{key}" for key, part in parts.items() if not part.get("readOnly")}
        fields |= own | ({name} if name == "steps" or not inner else set()) if not schema.get("readOnly") else set()
    kinds = [RUN, set(rules.UNSUPPORTED), set(rules.WITHOUT_EFFECT), {"source"}]
    assert fields == set().union(*kinds)
    assert len(fields) == sum(map(len, kinds)), "a field has two kinds"


UNSUPPORTED: dict[str, dict[str, Any]] = {
    "availableSecrets": {
        "availableSecrets": {"secretManager": [{"env": "S", "versionName": "projects/p/secrets/s/versions/1"}]}
    },
    "secrets": {
        "secrets": [{"kmsKeyName": "k", "secretEnv": {"S": "YQ=="}}],
        "steps": [STEP | {"secretEnv": ["S"]}],
    },
    "options.secretEnv": {"options": {"secretEnv": ["S"]}, "secrets": [{"secretEnv": {"S": "YQ=="}}]},
    "artifacts.objects": {"artifacts": {"objects": {"location": "gs://b", "paths": ["x"]}}},
    "artifacts.pythonPackages": {"artifacts": {"pythonPackages": [{"paths": ["x"]}]}},
    "artifacts.mavenArtifacts": {"artifacts": {"mavenArtifacts": [{"path": "x"}]}},
    "dependencies": {"dependencies": [{"empty": True}]},
    "gitConfig": {"gitConfig": {"http": {"proxySecretVersionName": "x"}}},
    "steps.secretEnv": {"steps": [STEP | {"secretEnv": ["S"]}], "secrets": [{"secretEnv": {"S": "YQ=="}}]},
    "steps.results": {"steps": [STEP | {"results": [{"name": "x"}]}]},
}


@pytest.mark.parametrize(("field", "config"), UNSUPPORTED.items(), ids=UNSUPPORTED)
def test_what_cannot_be_run_locally_is_refused_by_name(field: str, config: dict[str, Any]) -> None:
    config = {"steps": [STEP]} | config
    found = cloud_config.judge(config, built_in={})
    assert (found.errors, field in found.unsupported) == ([], True), "Cloud Build accepts it"
    with pytest.raises(UserError, match=r"is not supported by the local executor"):
        load(config)


def test_fields_without_effect_are_named() -> None:
    options = {"machineType": "E2_HIGHCPU_8", "pool": {"name": "projects/p/locations/l/workerPools/w"}}
    build = load({"steps": [STEP], "options": options, "queue_ttl": "60s"})
    assert build.without_effect == ("options.machineType", "options.pool", "queueTtl")


# --- what a step gets ------------------------------------------------------------------------------------------------


def test_options_are_merged_into_the_steps() -> None:
    options = {"env": ["A=options", "B=options"], "volumes": [{"name": "all", "path": "/all"}]}
    one = STEP | {"env": ["B=step"], "volumes": [{"name": "own", "path": "/own"}]}
    first, second = load({"steps": [one, one], "options": options}).steps
    assert first.env == ("A=options", "B=step")
    assert first.volumes == second.volumes == (("all", "/all"), ("own", "/own"))


def test_substitutions_are_mapped_to_variables_unless_the_step_says_otherwise() -> None:
    config = {
        "steps": [STEP, STEP | {"automapSubstitutions": False}],
        "substitutions": {"_A": "1"},
        "options": {"automapSubstitutions": True, "env": ["PROJECT_ID=mine"]},
    }
    first, second = load(config).steps
    assert {"_A=1", "PROJECT_ID=mine"} <= set(first.env)
    assert second.env == ("PROJECT_ID=mine",)


def test_a_step_without_waitfor_waits_for_all_before_it() -> None:
    steps = [{"id": "a"}, {"id": "b", "waitFor": ["-"]}, {"waitFor": ["-", "a"]}, {"waitFor": []}]
    build = load({"steps": [STEP | step for step in steps]})
    assert [sorted(step.wait_for) for step in build.steps] == [[], [], [0], [0, 1, 2]]


def test_images_are_those_of_artifacts_too() -> None:
    assert load({"steps": [STEP], "artifacts": {"images": ["gcr.io/$PROJECT_ID/a"]}}).images == ("gcr.io/p/a",)


def test_ids_and_scripts_are_not_substituted() -> None:
    (step,) = load({"steps": [STEP | {"id": "$BUILD_ID", "script": "echo $$ $HOME"}]}).steps
    assert (step.id, step.script) == ("$BUILD_ID", "echo $$ $HOME")


@pytest.mark.parametrize(
    ("fields", "code", "allowed"),
    [
        ({}, 3, False),
        ({"allowFailure": True}, 3, True),
        ({"allowExitCodes": [3]}, 3, True),
        ({"allowExitCodes": ["3", 4]}, 4, True),
        ({"allowFailure": True, "allowExitCodes": [4]}, 3, False),
        ({"allowFailure": True}, None, False),
    ],
)
def test_allowed_exit_codes_take_precedence_over_allowed_failures(
    fields: dict[str, Any], code: int | None, allowed: bool
) -> None:
    """https://cloud.google.com/build/docs/api/reference/rest/v1/projects.builds#buildstep: "If allowFailure is also
    specified, this field will take precedence"."""
    (step,) = load({"steps": [STEP | fields]}).steps
    assert Executor._failure_allowed(step, Outcome(FAILURE, code)) is allowed
    assert not Executor._failure_allowed(step, Outcome(TIMEOUT, code))


# --- reading ----------------------------------------------------------------------------------------------------------


def test_a_file_is_read_as_yaml_1_1(capsys: pytest.CaptureFixture[str]) -> None:
    """As gcloud reads it: googlecloudsdk/core/yaml.py."""
    text = "steps:\n- {name: debian, allow_failure: yes, allow_exit_codes: 010}\ntags: a\ntags: b\n"
    found = cloud_config.message(text, "x")
    assert found["steps"] == [{"name": "debian", "allowFailure": True, "allowExitCodes": [8]}]
    assert found["tags"] == ["a"]
    assert "x: the key 'tags' is written twice; the first value is used" in capsys.readouterr().err


LEAVES = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=6), st.dates(), st.binary(max_size=3),
    st.sampled_from(["$_A", "${_A:-x}", "${_A:?}", "-", "600s", "a", "gs://b", "/v", "NONE"]),
)  # fmt: skip
KEYS = st.one_of(
    st.sampled_from([
        "steps", "options", "substitutions", "images", "tags", "timeout", "artifacts", "objects", "secrets",
        "availableSecrets", "inline", "volumes", "name", "args", "env", "waitFor", "id", "script", "dir", "path", "_A",
        "dynamicSubstitutions", "allowExitCodes", "paths", "location", "secretEnv", "envMap", "serviceAccount",
    ]),
    LEAVES,
)  # fmt: skip
ANYTHING = st.recursive(
    LEAVES,
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(KEYS, inner, max_size=4)),
    max_leaves=12,
)


@settings(max_examples=examples(200), suppress_health_check=list(HealthCheck))
@given(data=st.dictionaries(KEYS, ANYTHING, max_size=5), step=st.dictionaries(KEYS, ANYTHING, max_size=4))
def test_any_data_is_judged_without_a_traceback(data: dict[Any, Any], step: dict[Any, Any]) -> None:
    for config in (data, data | {"steps": [STEP | step, STEP]}):
        found = cloud_config.judge(config, given={"_A": "x"}, built_in={})
        assert not any("\n" in error for error in found.errors)
        if not found.errors and not found.unsupported:
            assert load(config | {"substitutions": {**(found.body["substitutions"])}}).steps


@settings(max_examples=examples(150), suppress_health_check=list(HealthCheck))
@given(text=st.text(alphabet="steps:name- \n{}[],'\"#&*!|>%@`?~0123<\t\u0001é", max_size=60))
def test_any_text_is_read_or_refused_in_one_line(text: str) -> None:
    try:
        cloud_config.read(text, "x")
    except UserError as error:
        assert "\n" not in str(error)


@pytest.mark.parametrize(
    "text",
    [
        "steps: &a [*a]",
        "a: &a {b: *a}",
        "substitutions: &a {_A: *a}",
        "steps: [{name: {2020-01-01: x}}]",
        "[" * 3000,
        "- 2020-13-45",
        "a: !!float x",
        "&a",
    ],
)
def test_unusual_yaml_is_one_line(text: str) -> None:
    with pytest.raises(UserError) as refused:
        cloud_config.message(text, "x")
    assert "\n" not in str(refused.value)


# --- --check ----------------------------------------------------------------------------------------------------------


def check(path: Path, *words: str) -> Any:
    return CliRunner().invoke(cli.trainyard, ["cloudbuild-local", f"--check={path}", *words])


def test_a_file_is_checked_without_an_engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DOCKER_HOST", "unix:///nowhere")
    path = tmp_path / "cloudbuild.yaml"
    path.write_text("steps: [{name: debian, args: [$_X]}]\noptions: {machineType: E2_MEDIUM}\nsecrets: []\n")
    found = check(path, "--json", "--substitutions=_X=1")
    assert (found.exit_code, json.loads(found.stdout)) == (
        0,
        {"file": str(path), "errors": [], "unsupported": [], "withoutEffect": ["options.machineType"]},
    )


def test_a_file_for_a_trigger_is_valid(tmp_path: Path) -> None:
    """In a submitted build, without values for them, Cloud Build refuses these images."""
    path = tmp_path / "cloudbuild.yaml"
    path.write_text("steps: [{name: debian}]\nimages: ['gcr.io/p/$REPO_NAME:$COMMIT_SHA']\n")
    assert check(path).exit_code == 0
    with pytest.raises(UserError, match=r"images: 'gcr\.io/p/:' is not an image reference"):
        load(cloud_config.read(path.read_text(), "x"))


def test_what_only_a_trigger_runs_names_the_option_that_takes_it(tmp_path: Path) -> None:
    path = tmp_path / "cloudbuild.yaml"
    path.write_text("steps: [{name: debian, args: [$_PR_NUMBER, $_X]}]\nsubstitutions: {_Y: a}\n")
    option = "for a build of a trigger, give '--trigger'"
    assert json.loads(check(path, "--json").stdout)["errors"] == [
        f"{path}:1: substitution $_PR_NUMBER is not defined: a trigger for pull requests gives it; {option}",
        f"{path}:1: substitution $_X is not defined: define it; {option}",
        f"{path}:2: substitution _Y is defined but never used: remove it; {option}",
    ]
    assert check(path, "--trigger").exit_code == 0


def test_a_local_build_may_be_that_of_a_trigger() -> None:
    """Substitutions that the trigger would give are empty; expansions apply, as they always do for triggers."""
    data = cloud_config.read("steps: [{name: debian, args: ['$_X', '${_Y^^}']}]\nsubstitutions: {_Y: a, _Z: b}", "x")
    build = cloud_config.load(data, where="x", built_in={}, trigger=True)
    assert build.steps[0].args == ("", "A")
    with pytest.raises(UserError, match="give '--trigger'"):
        cloud_config.load(data, where="x", built_in={})


def test_all_errors_of_a_file_are_listed(tmp_path: Path) -> None:
    path = tmp_path / "cloudbuild.yaml"
    path.write_text("steps: [{name: debian, argz: x, dir: 5}]\noptions: x\n")
    found = check(path, "--json")
    assert isinstance(found.exception, StepFailed)
    assert "not a valid build" in str(found.exception)
    assert json.loads(found.stdout)["errors"] == [
        f"{path}:1: steps[0].argz: unknown field 'argz' (did you mean 'args'?)",
        f"{path}:1: steps[0].dir: 5 is not text: put it in quotes",
        f"{path}:2: options: 'x' is not a mapping of fields",
    ]


def test_a_file_that_cannot_be_read_is_a_users_mistake(tmp_path: Path) -> None:
    missing = tmp_path / "nowhere"
    for words in (f"--check={missing}", f"--config={missing}"):
        error = CliRunner().invoke(cli.trainyard, ["cloudbuild-local", words]).exception
        assert isinstance(error, UserError)
        assert str(error) == f"no file {missing}: give the path of a cloudbuild.yaml"
    assert isinstance(check(tmp_path).exception, UserError)
    (tmp_path / "latin").write_bytes(b"steps: \xff")
    assert isinstance(check(tmp_path / "latin").exception, UserError)


# --- what a step's container gets ------------------------------------------------------------------------------------


@pytest.mark.parametrize("words", [[], ["--no-socket"]])
def test_no_socket_keeps_the_engine_from_the_steps(
    words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With an engine that accepts everything, and steps that end at once."""
    engine = MagicMock()
    engine.containers.create.return_value.wait.return_value = {"StatusCode": 0}
    monkeypatch.setattr(docker_engine, "client", lambda: engine)
    (tmp_path / "cloudbuild.yaml").write_text("steps: [{name: debian, args: [ls]}]\n")
    CliRunner().invoke(cli.trainyard, ["cloudbuild-local", f"--config={tmp_path}/cloudbuild.yaml", *words])
    (mounts,) = [call.kwargs["mounts"] for call in engine.containers.create.call_args_list if "mounts" in call.kwargs]
    assert "/workspace" in [mount["Target"] for mount in mounts]
    assert [mount["Source"] for mount in mounts].count("/var/run/docker.sock") == (0 if words else 1)


# --- files ------------------------------------------------------------------------------------------------------------


def test_files_are_uploaded_whatever_their_names_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    which = shutil.which
    monkeypatch.setattr(shutil, "which", lambda name: which(name) if name == "git" else None)
    names = ["a b.py", "a\nb.py", "é.py", '"quoted".py', "caf\udce9.py"]
    for name in names:
        (tmp_path / name).touch()
    assert local.source_files(tmp_path) == sorted(names), "without a repository"
    subprocess.run(["git", "-C", str(tmp_path), "init", "--quiet"], check=True)
    subprocess.run(["git", "-C", str(tmp_path), "add", "é.py"], check=True)
    assert local.source_files(tmp_path) == sorted(names)
    with tarfile.open(fileobj=local.source_archive(tmp_path)) as tar:
        assert sorted(tar.getnames()) == sorted(names)


def packed(entry: tarfile.TarInfo, content: bytes = b"") -> bytes:
    """The archive that the engine returns for a path with this entry."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as tar:
        entry.size = len(content)
        tar.addfile(entry, io.BytesIO(content))
    return buffer.getvalue()


def test_an_output_that_is_a_link_or_a_folder_is_empty(monkeypatch: pytest.MonkeyPatch) -> None:
    link, folder, file = (tarfile.TarInfo("output") for _ in range(3))
    link.type, link.linkname, folder.type = tarfile.SYMTYPE, "/etc/hostname", tarfile.DIRTYPE
    for answer, expected in ((packed(link), b""), (packed(folder), b""), (packed(file, b"x" * 5000), b"x" * 4096)):
        engine = MagicMock()
        container = engine.containers.create.return_value
        container.wait.return_value, container.get_archive.return_value = {"StatusCode": 0}, ([answer], {})
        monkeypatch.setattr(docker_engine, "client", lambda engine=engine: engine)
        (outcome,) = Executor(load({"steps": [STEP]}), write=lambda _: None).run().steps
        assert (outcome.status, outcome.output) == (SUCCESS, expected)
