"""Build configurations are read as the installed gcloud reads them: same files refused, same message to the API.

gcloud's own loader (:mod:`tests.cloud.gcloud_build_loader`) judges generated files in one process; none of its answers
comes from this project.
"""

from __future__ import annotations

import json
import os
import subprocess
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from cloudbuild_local import config as cloud_config
from trainyard.common import third_party
from trainyard.common.errors import UserError
from trainyard.common.settings import ROOT

pytestmark = [pytest.mark.concurrent, pytest.mark.needs("gcloud")]

Loader = Callable[[str | None], Any]


@pytest.fixture(scope="module")
def gcloud_loader() -> Iterator[Loader]:
    """Text of a file -> gcloud's answer, with the key `message` or `error`."""
    show = ["gcloud", "info", "--format=value(installation.sdk_root,basic.python_location)"]
    root, python = subprocess.run(show, capture_output=True, text=True, check=True).stdout.split()
    libraries = os.pathsep.join([f"{root}/lib", f"{root}/lib/third_party"])
    server = subprocess.Popen(
        [python, str(Path(__file__).with_name("gcloud_build_loader.py"))],
        env=os.environ | {"PYTHONPATH": libraries}, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL, text=True,
    )  # fmt: skip
    assert server.stdin
    assert server.stdout

    def ask(text: str | None) -> Any:
        server.stdin.write(json.dumps(text) + "\n")
        server.stdin.flush()
        return json.loads(server.stdout.readline())

    yield ask
    server.stdin.close()
    server.wait(timeout=60)


def ours(text: str) -> dict[str, Any]:
    """Our answer, in the form of the loader's."""
    try:
        return {"message": cloud_config.message(text, "cloudbuild.yaml")}
    except UserError as error:
        assert "\n" not in str(error)
        return {"error": str(error)}


def as_sent(node: Any) -> Any:
    """gcloud's message with null substitutions as the empty text that Trainyard makes of them."""
    substitutions = node.get("substitutions")
    return node | {"substitutions": {k: v or "" for k, v in substitutions.items()}} if substitutions else node


def agree(loader: Loader, text: str) -> dict[str, Any]:
    theirs, found = loader(text), ours(text)
    assert ("error" in theirs) == ("error" in found), (text, theirs, found)
    if "message" in theirs:
        assert found["message"] == as_sent(theirs["message"]), text
    return theirs


# --- generated files -------------------------------------------------------------------------------------------------

#: Scalars as they are written in YAML. 1.1 reads many of them differently from 1.2.
SCALARS = (
    "x", "'x'", '"x"', "''", "yes", "no", "on", "'off'", "true", "False", "'false'", "~", "null", "Null", "0", "1",
    "-1", "010", "0o10", "0x1F", "1_000", "'1_0'", "' 7 '", "1:30", "1.5", "'1.5'", "1e3", ".nan", "-.inf",
    "2020-01-01", "600s", "'600s'", "=", "'-'", "a b", "${_A}", "$_A", "SUCCESS", "MUST_MATCH", "ALLOW_LOOSE", "NONE",
    "LEGACY", "E2_HIGHCPU_8", "HUGE", "gs://b/o", "YQ==", "'YQ'", "!!str 1", "!!binary YQ==", "é",
)  # fmt: skip
#: Fields that both gcloud 528 and the discovery document have, by message.
FIELDS = {
    "build": ("steps", "images", "substitutions", "timeout", "queueTtl", "queue_ttl", "options", "tags", "logsBucket",
              "logs_bucket", "serviceAccount", "artifacts", "secrets", "availableSecrets", "source", "id", "status",
              "stepz", "_steps"),
    "steps": ("name", "args", "env", "secretEnv", "secret_env", "dir", "id", "waitFor", "wait_for",
              "wait_For", "entrypoint", "script", "timeout", "volumes", "allowFailure", "allow_failure",
              "allowExitCodes", "allow_exit_codes", "automapSubstitutions", "status", "exitCode", "argz", "Name"),
    "options": ("env", "secretEnv", "volumes", "machineType", "machine_type", "diskSizeGb", "substitutionOption",
                "dynamicSubstitutions", "dynamic_substitutions", "automapSubstitutions", "logging",
                "logStreamingOption", "requestedVerifyOption", "sourceProvenanceHash", "pool", "workerPool",
                "defaultLogsBucketBehavior", "x"),
    "volumes": ("name", "path", "size"),
    "artifacts": ("images", "objects", "pythonPackages", "mavenArtifacts"),
    "objects": ("location", "paths"),
    "secrets": ("kmsKeyName", "kms_key_name", "secretEnv", "secret_env"),
    "availableSecrets": ("secretManager", "secret_manager", "inline"),
    "secretManager": ("versionName", "version_name", "env"),
    "inline": ("kmsKeyName", "envMap", "env_map"),
    "pool": ("name", "workerConfig"),
    "source": ("storageSource", "repoSource"),
    "substitutions": ("_A", "_B_2", "_a", "A", "COMMIT_SHA", "1", "true", "_"),
    "secretEnv": ("A", "wait_for", "1"),
    "envMap": ("A", "snake_case"),
}  # fmt: skip
ALIASES = {"secret_env": "secretEnv", "env_map": "envMap", "secret_manager": "secretManager"}
#: Strings in their place, so that many of the generated files are accepted.
TEXT = st.sampled_from(["x", "'y z'", "${_A}", "600s", "''"])


def flow_list(entries: list[str]) -> str:
    return f"[{', '.join(entries)}]"


def flow_mapping(entries: dict[str, str]) -> str:
    return "{" + ", ".join(f"{key}: {value}" for key, value in entries.items()) + "}"


def value_of(field: str, depth: int) -> st.SearchStrategy[str]:
    """What may be written after a key: usually of the right type, else anything."""
    scalar = st.sampled_from(SCALARS)
    field = ALIASES.get(field, field)
    right: st.SearchStrategy[str]
    if field in FIELDS and depth < 4:
        one = mapping(field, depth + 1)
        right = st.one_of(one, st.lists(one, max_size=2).map(flow_list))
    elif field in ("args", "env", "images", "tags", "waitFor", "wait_for", "paths"):
        right = st.one_of(TEXT, st.lists(TEXT, max_size=2).map(flow_list))
    elif field.startswith(("allow", "automap", "dynamic")) and not field.lower().endswith("codes"):
        right = st.sampled_from(["true", "false", "yes", "off"])
    elif field.endswith(("Codes", "codes", "Gb", "exitCode")):
        right = st.one_of(st.sampled_from(["1", "'2'", "100"]), st.just("[1, '2']"))
    else:
        right = TEXT
    wrong = st.one_of(scalar, st.lists(scalar, max_size=2).map(flow_list), st.sampled_from(["{}", "{a: b}", "[{}]"]))
    return st.integers(0, 11).flatmap(lambda dice: wrong if dice == 0 else right)


@st.composite
def mapping(draw: st.DrawFn, kind: str, depth: int = 0) -> str:
    """A mapping of a message, in YAML's flow style."""
    known = FIELDS[kind]
    keys = draw(st.lists(st.sampled_from(known), max_size=4))
    # The last names are wrong: use few of them.
    keys = [key for key in keys if key not in known[-2:] or draw(st.integers(0, 5)) == 0]
    if kind == "steps" and draw(st.integers(0, 19)):
        keys = ["name", *(key for key in keys if key != "name")]
    return flow_mapping({key: draw(value_of(key, depth)) for key in dict.fromkeys(keys)})


@st.composite
def files(draw: st.DrawFn) -> str:
    keys = draw(st.lists(st.sampled_from(FIELDS["build"]), max_size=3))
    keys = [key for key in keys if key not in ("source", "stepz", "_steps") or draw(st.integers(0, 5)) == 0]
    if draw(st.integers(0, 19)):
        keys.append("steps")
    return "".join(f"{key}: {draw(value_of(key, 0))}\n" for key in dict.fromkeys(keys))


def test_generated_files_are_read_as_gcloud_reads_them(gcloud_loader: Loader) -> None:
    kinds = Counter[str]()

    # The same files in every run, so that a change of the code alone can fail it.
    @settings(max_examples=600, derandomize=True, suppress_health_check=list(HealthCheck))
    @given(text=files())
    def compare(text: str) -> None:
        (kind,) = agree(gcloud_loader, text)
        kinds[kind] += 1

    compare()
    assert min(kinds["message"], kinds["error"]) >= 100, "files of one kind alone say little"


@settings(max_examples=200, derandomize=True, suppress_health_check=list(HealthCheck))
@given(text=st.text(alphabet="steps:name- \n{}[],'\"#&*!|>%@`?~0\t\u0001é", max_size=40))
def test_any_text_is_read_as_gcloud_reads_it(gcloud_loader: Loader, text: str) -> None:
    agree(gcloud_loader, text)


def test_every_field_of_gcloud_is_one_whose_effect_is_decided(gcloud_loader: Loader) -> None:
    """Fields of the API's discovery document, which is newer: tests/unit/test_cloud_executor.py."""
    known = third_party.schemas("cloudbuild.v1")
    parts = {"": "Build", "steps.": "BuildStep", "options.": "BuildOptions"}
    fields = {at + field for at, name in parts.items() for field in known[name]["properties"]}
    private = set(gcloud_loader(None)) - fields
    assert private == {"options.anthosCluster", "options.cluster", "options.dockerDaemon"}, "the public API lacks these"
    for name in private:
        field = name.partition(".")[2]
        assert f"unknown field '{field}'" in ours(f"steps: [{{name: a}}]\noptions: {{{field}: {{}}}}\n")["error"]


STEP = "steps: [{name: a}]\n"


@pytest.mark.parametrize(
    "text",
    [
        "steps: [{name: a, wait_for: x}]",
        "steps: {name: a, allow_failure: yes}\nsubstitutions: {_A: null}",
        "steps: [{name: a, waitFor: ['-', b], dir: ../x}]",
        "options: {logging: null}\n" + STEP,
        "options: {logging: 0}\n" + STEP,
        "options: {sourceProvenanceHash: [0]}\n" + STEP,
        "steps: {name: a, status: no}\n",
        "steps: {name: a, status: yes}\n",
        "options: []\n" + STEP,
        "options: x\n" + STEP,
        "options: [1]\n" + STEP,
        "options: {sourceProvenanceHash: SHA256}\n" + STEP,
        "options: {sourceProvenanceHash: [SHA256]}\n" + STEP,
        "options: {logging: 2, diskSizeGb: '1_0'}\n" + STEP,
        "substitutions: [a]\n" + STEP,
        "substitutions: {COMMIT_SHA: a}\n" + STEP,
        "steps: [{name: a, allowExitCodes: x}]",
        "steps: [{name: a, allowFailure: 'false'}]",
        "steps: [{name: a, entrypoint: [x]}]",
        "steps: [{name: a, dir: 5}]",
        "steps: [{name: a, timeout: 2020-01-01}]",
        "steps: [{name: a, args: [1:30, 010]}]",
        "images: a\n" + STEP,
        "queueTtl: x\n" + STEP,
        "source: {}\n" + STEP,
        "secrets: [{secret_env: {1: YQ==, snake_case: 1234}}]\n" + STEP,
        "1: 2\n" + STEP,
        "true: 2\n" + STEP,
        "{1: 2}",
        "[]",
        "",
        "steps: &a [*a]",
        "steps: [{name: a, name: b}]",
        "steps:\n  - name: a\n---\nsteps: []\n",
        "%YAML 1.2\n---\nsteps: [{name: yes}]",
        "? [a, b]\n: c\n" + STEP,
        "steps: !!set {a, b}",
        "steps: !unknown [{name: a}]",
        "steps: [{name: a, timeout: 2020-13-45}]",
        "steps:\n- <<: {name: a}\n  args: [b]\n",
        json.dumps({"steps": [{"name": "a", "script": "é\u2028\n"}]}),
    ],
)
def test_a_file_is_read_as_gcloud_reads_it(gcloud_loader: Loader, text: str) -> None:
    agree(gcloud_loader, text)


@pytest.mark.parametrize("path", sorted(ROOT.glob("cloudbuild*.yaml")), ids=lambda path: path.name)
def test_the_files_of_this_project_are_read_as_gcloud_reads_them(gcloud_loader: Loader, path: Path) -> None:
    answer = agree(gcloud_loader, path.read_text(encoding="utf-8"))
    assert ("message" in answer) == ("trigger" not in path.name)
