"""Build configurations that Cloud Build takes or refuses.

The results are those of validate/validate_test.go of Google's local builder, of the API's discovery document and of the
schema's page. The test's cases about registries (only gcr.io and quay.io), about step timeouts and about the lower
limits of 2022 (100 steps, 100 images, shorter arguments and variables) are left out: the service has changed there.
"""

from __future__ import annotations

import base64
from collections.abc import Iterator
from typing import Any

from tests.unit.corpus.case import Case, Document, cases, dumped

_LOCAL = "https://github.com/GoogleCloudPlatform/cloud-build-local/blob/ee604808232a647bd2738e7558a98e13d5e76040"
VALIDATE = f"{_LOCAL}/validate/validate_test.go"
SCHEMA = "https://cloud.google.com/build/docs/build-config-file-schema"
DYNAMIC = "https://cloud.google.com/build/docs/configuring-builds/use-bash-and-bindings-in-substitutions"
BUILDERS = "https://github.com/GoogleCloudPlatform/cloud-builders/blob/b70cb2afa75d0aae29cb2c91d9cdec3dd1c2e957"
COMMUNITY = (
    "https://github.com/GoogleCloudPlatform/cloud-builders-community/blob/1bf46a1cc217e6afd501c6bbbbb0735ae95fa46a"
)
SAMPLES = "https://github.com/GoogleCloudPlatform/cloud-build-samples/blob/128ab5d25bdaee5ec271eba29bcd685d32899db7"

MANY_STEPS = "https://github.com/terraform-google-modules/terraform-google-kubernetes-engine/blob/bb176b2/build/int.cloudbuild.yaml"

KEY = "projects/p/locations/global/keyRings/r/cryptoKeys/k"
LONG = "a" * 1001


def build(*steps: Document, **fields: Any) -> Document:
    return {"steps": list(steps) or [{"name": "foo"}], **fields}


def step(**fields: Any) -> Document:
    return {"name": "okay", **fields}


def volumes(*names: tuple[str, str]) -> Document:
    return step(volumes=[{"name": name, "path": path} for name, path in names])


def secret(*names: str, key: str = KEY, value: bytes = b"hunter2") -> Document:
    encoded = base64.b64encode(value).decode()
    return {"kmsKeyName": key, "secretEnv": dict.fromkeys(names, encoded)}


def _substitutions() -> Iterator[tuple[str, Document, bool]]:
    """TestCheckSubstitutions, TestCheckSubstitutionsLoose, TestCheckSubstitutionTemplate."""
    for name, value, valid in (
        ("_VARIABLE_1", "value", True),
        ("_1VARIABLE", "value", True),
        ("_VARIABLE", "a" * 4000, True),
        ("_VARIABLE", "a" * 4001, False),
        (f"_{'A' * 100}", "value", False),
        ("Variable", "value", False),
        ("VAR-1", "value", False),
        ("VARIABLE", "value", False),
        ("PROJECT_ID", "foo", False),
        ("BUILD_ID", "foo", False),
    ):
        used = step(args=[f"${{{name}}}"]) if name.startswith("_") else step()
        yield f"substitution {name[:20]} of {len(value)}", build(used, substitutions={name: value}), valid
    many = {f"_A{number}": "1" for number in range(101)}
    yield "101 substitutions", build(step(args=[f"${name}" for name in many][:100]), substitutions=many), False
    yield "used", build({"name": "$_FOO"}, substitutions={"_FOO": "bar"}), True
    yield "a shell's variable", build(step(args=["$$FOO"])), True
    yield "not defined", build({"name": "$_FOO"}), False
    yield "not used", build(substitutions={"_FOO": "bar"}), False
    yield "neither", build({"name": "$_BAZ"}, substitutions={"_FOO": "bar"}), False
    yield "no built-in", build(step(args=["$FOO"])), False
    loose = {"substitutionOption": "ALLOW_LOOSE"}
    yield "not defined, loose", build(step(args=["$_A $_B"]), options=loose), True
    yield "not used, loose", build(options=loose, substitutions={"_FOO": "bar"}), True
    objects = {"objects": {"location": "gs://bucket/$_FOO", "paths": ["$_FOO"]}}
    yield "in artifacts", build(artifacts=objects, substitutions={"_FOO": "bar"}), True


def _builds() -> Iterator[tuple[str, Document, bool]]:
    """TestValidateBuild, TestCheckEnvVars, TestCheckBuildAfterSubstitutions."""
    two = [step(args=["gcr.io/some/image/tag"]), step(args=["gcr.io/some/image/tag2"])]
    yield "two steps", build(*two, images=["gcr.io/some/image/tag", "gcr.io/some/image/tag2"]), True
    yield "one step", build(), True
    for name in ("/a/b/c", "../b/c", "a/../b/../../c"):
        yield f"dir {name}", build(step(dir=name)), True
    yield "id of the start", build(step(id="-")), False
    yield "no steps", {"images": ["a"]}, False
    yield "nothing", {"steps": []}, False
    yield "env without =", build(step(env=["foobar"])), False
    yield "env", build(step(env=["foo=bar"])), True
    yield "201 images", build(images=["foo"] * 201), False
    yield "24 hours", build(timeout="86400s"), True
    yield "over 24 hours", build(timeout="86401s"), False
    yield "100 variables", build(step(env=[f"a{number}=b" for number in range(100)])), True
    yield "101 variables", build(step(env=["foo=bar"] * 101)), False
    yield "100 variables of all steps", build(options={"env": [f"a{number}=b" for number in range(100)]}), True
    yield "101 variables of all steps", build(options={"env": ["foo=bar"] * 101}), False
    yield "a variable of 32768", build(step(env=[f"a={'b' * 32766}"])), True
    yield "a variable of 32769", build(step(env=[f"a={'b' * 32767}"])), False
    yield "broken step name", build({"name": "gcr.io/:broken"}), False
    yield "broken image", build(images=["gcr.io/:broken"]), False


def _artifacts() -> Iterator[tuple[str, Document, bool]]:
    """TestCheckArtifacts."""
    for name, images, artifacts, valid in (
        ("images alone", ["hello", "world"], None, True),
        ("images of artifacts", None, {"images": ["hello", "world"]}, True),
        ("different images", ["goodbye", "world"], {"images": ["hello", "world"]}, False),
        ("the same images", ["hello", "world"], {"images": ["hello", "world"]}, True),
        ("a long image", [LONG], None, False),
        ("no location", None, {"objects": {"paths": ["a"]}}, False),
        ("no bucket", None, {"objects": {"location": "some-bucket", "paths": ["a"]}}, False),
        ("a bucket", None, {"objects": {"location": "gs://bucket", "paths": ["a"]}}, True),
        ("a folder", None, {"objects": {"location": "gs://bucket/", "paths": ["a"]}}, True),
        ("no paths", None, {"objects": {"location": "gs://bucket/"}}, False),
        ("101 paths", None, {"objects": {"location": "gs://bucket/", "paths": [str(n) for n in range(101)]}}, False),
        ("a path twice", None, {"objects": {"location": "gs://bucket/", "paths": ["a.xml", "a.xml"]}}, False),
        ("a path with a space", None, {"objects": {"location": "gs://b/", "paths": ["a.xml", "-n a.xml"]}}, False),
    ):
        fields = {"images": images, "artifacts": artifacts}
        yield name, build(**{key: value for key, value in fields.items() if value is not None}), valid


def _volumes() -> Iterator[tuple[str, Document, bool]]:
    """TestCheckVolumes."""
    mine, bad = ("myvol", "/foo"), "@#()*$@)(*$@"
    for name, steps, valid in (
        ("in 2 steps", [[mine], [mine]], True),
        ("in 3 steps", [[mine], [mine], [mine]], True),
        ("in 1 step", [[mine]], False),
        ("one of two in 1 step", [[mine], [("othervol", "/foo")], [("othervol", "/foo")]], False),
        ("name", [[(bad, "/foo")], [(bad, "/foo")]], False),
        ("path", [[("myvol", ")(!*!)($*@#")], [mine]], False),
        ("/workspace", [[("myvol", "/workspace")], [mine]], False),
        ("/cloudbuild", [[("myvol", "/cloudbuild/foo")], [mine]], False),
        ("relative path", [[("myvol", "/absolute")], [("myvol", "relative")]], False),
        ("name twice", [[mine, ("myvol", "/bar")], [mine, ("othervol", "/bar")]], False),
        ("path twice", [[mine, ("othervol", "/foo")], [mine, ("othervol", "/bar")]], False),
    ):
        yield f"volume {name}", build(*(volumes(*one) for one in steps)), valid
    nothing: list[tuple[str, str]] = []
    for name, shared, steps, valid in (
        ("happy", [mine], [nothing, nothing], True),
        ("one step", [mine], [nothing], False),
        ("path twice", [mine, ("othervol", "/foo")], [nothing, nothing], False),
        ("name twice", [mine, ("myvol", "/bar")], [nothing, nothing], False),
        ("relative path", [("myvol", "relative")], [nothing, nothing], False),
        ("path", [("myvol", ")(!*!)($*@#")], [nothing, nothing], False),
        ("name", [(bad, "/foo")], [nothing, nothing], False),
        ("/workspace", [("myvol", "/workspace")], [nothing, nothing], False),
        ("/cloudbuild", [("myvol", "/cloudbuild/foo")], [nothing, nothing], False),
        ("path of a step", [mine], [[("myothervol", "/foo")], [("myothervol", "/foo")]], False),
        ("name of a step", [mine], [[("myvol", "/bar")], [("myvol", "/bar")]], False),
    ):
        options = {"volumes": [{"name": one, "path": path} for one, path in shared]}
        yield f"global volume {name}", build(*(volumes(*one) for one in steps), options=options), valid


def _steps() -> Iterator[tuple[str, Document, bool]]:
    """TestCheckBuildSteps."""
    full = {"env": ["FOO=bar", "X=BAZ", "BUZ=78"], "args": ["a", "b", "c"], "dir": "a/b/c"}
    order = [step(id="A", waitFor=["-"]), step(id="B", waitFor=["A"]), step(id="C", waitFor=["B"])]
    yield "serial", build(*(one | full for one in order)), True
    a, b = step(id="A", waitFor=["-"]), step(id="B", waitFor=["-"])
    yield "mixed dependencies", build(a, step(waitFor=["A"]), step(id="C", waitFor=["A"])), True
    yield "several starts", build(step(waitFor=["-"]), a), True
    yield "several dependencies", build(a, b, step(waitFor=["A", "B"])), True
    yield "an undefined step", build(a, step(id="B", waitFor=["C"])), False
    yield "an id twice", build(a, step(id="A")), False
    yield "a later step", build(step(id="A", waitFor=["B"]), step(id="B", waitFor=["A"])), False
    yield "no name", {"steps": [{}]}, False
    yield "a long name", build({"name": LONG}), False
    yield "101 args", build(step(args=["foo=bar"] * 101)), False
    yield "a long argument", build(step(args=["a" * 10001])), False
    yield "a long dir", build(step(dir=LONG)), False
    yield "a step of 24 hours", build(step(timeout="86400s")), True
    yield "a step of 1 s, a build of 10 s", build(step(timeout="1s"), timeout="10s"), True
    yield "a step over 24 hours", build(step(timeout="86401s")), False


def _secrets() -> Iterator[tuple[str, Document, bool]]:
    """TestCheckSecrets."""
    uses = step(secretEnv=["MY_SECRET"])
    many = [f"MY_SECRET_{number}" for number in range(101)]
    plain = ["MY_SECRET=awesome"]
    everywhere = {"secretEnv": ["MY_SECRET"]}
    yield "a secret", build(uses, secrets=[secret("MY_SECRET")]), True
    yield "never used", build(secrets=[secret("MY_SECRET")]), False
    yield "not defined", build(uses), False
    defined = [secret("MY_SECRET"), secret("MY_SECRET", key=f"{KEY}-2")]
    yield "defined twice", build(uses, secrets=defined), False
    yield "no values", build(secrets=[{"kmsKeyName": KEY}]), False
    yield "a key twice", build(step(secretEnv=["A", "B"]), secrets=[secret("A"), secret("B")]), False
    yield "used twice", build(step(secretEnv=["MY_SECRET"] * 2), secrets=[secret("MY_SECRET")]), False
    yield "over 64 KiB", build(uses, secrets=[secret("MY_SECRET", value=b"a" * 65537)]), False
    yield "100 secrets", build(step(secretEnv=many[:100]), secrets=[secret(*many[:100])]), True
    yield "101 secrets", build(step(secretEnv=many), secrets=[secret(*many)]), False
    given: Document = {"secrets": [secret("MY_SECRET")]}
    yield "env and secretEnv", build(step(env=plain, secretEnv=["MY_SECRET"]), **given), False
    yield "global, not defined", build(options=everywhere), False
    yield "global", build(options=everywhere, **given), True
    yield "global env", build(uses, options={"env": plain}, **given), False
    yield "global secretEnv", build(step(env=plain), options=everywhere, **given), False
    yield "global both", build(options=everywhere | {"env": plain}, **given), False
    yield "global twice", build(options={"secretEnv": ["MY_SECRET"] * 2}, **given), False
    yield "in separate steps", build(step(env=plain), uses, **given), True


def _names() -> Iterator[tuple[str, Document, bool]]:
    """TestCheckBuildStepName, TestCheckImageNames, TestCheckImageTags, TestCheckBuildTags."""
    valid = ("gcr.o/works/folder:tag", "gcr.io/z", "subdomain.gcr.io/works/folder/folder", "gcr.io/works:tag",
             "gcr.io/works/folder:Tag", "ubuntu", "ubuntu:latest", "gcr.io/cloud-builders/docker@sha256:blah",
             "quay.io/blah/blah:blah", "gcr.io/google.com/project/quickstart-image")  # fmt: skip
    invalid = ("gcr.io/cloud-builders/docker@sha256:", "gcr.io/cloud-builders/docker@sha56:blah", "ubnutu::latest",
               "gcr.io/:broken", "gcr.io/project/Broken")  # fmt: skip
    for name in (*valid, *invalid):
        yield f"step named {name}", build({"name": name}), name in valid
        yield f"image {name}", build(images=[name]), name in valid
    for name in ("contains space", "_ubuntu", "gcr.io/broken/noth:", "gcr.io/project/image:foo:bar", "UBUNTU:latest",
                 "gcr.io/project/image@sha256:abcdefg:foo", "subdom.gcr.io/project/i.name@digest.here"):  # fmt: skip
        yield f"image {name}", build(images=[name]), False
    for tags, taken in ((["ABCabc-._"], True), (["_"], True), (["%"], False), (["a" * 129], False), ([""], True),
                        (["a", "", "b"], True), (["a"] * 3, True), ([f"t{n}" for n in range(65)], False)):  # fmt: skip
        yield f"tags {' '.join(tags)[:9]!r} of {len(tags)}", build(tags=tags), taken


#: Build configurations in the form of public ones: (link, substitutions that are given, text).
EXAMPLES: list[tuple[str, dict[str, str], str]] = [
    (f"{BUILDERS}/docker/cloudbuild.yaml", {},
     "steps:\n- name: gcr.io/cloud-builders/docker\n  args: ['build', '--tag=gcr.io/$PROJECT_ID/a', '.']\n"
     "images: ['gcr.io/$PROJECT_ID/a']\ntimeout: 3600s\n"),
    (f"{BUILDERS}/gcs-fetcher/cloudbuild.yaml", {},
     "steps:\n- name: golang\n  args: ['test', './...']\n  env: ['GO111MODULE=on']\n  dir: src\n"
     "- {name: gcr.io/cloud-builders/docker, waitFor: ['-'], id: other, args: ['build', '.']}\n"),
    (f"{BUILDERS}/gcloud/cloudbuild.yaml", {},
     "steps:\n- name: 'gcr.io/cloud-builders/docker'\n  entrypoint: bash\n  args:\n  - -c\n  - |\n"
     "    docker build -t a . && echo $$HOME\n"),
    (f"{BUILDERS}/bazel/cloudbuild.yaml", {"_BAZEL_VERSION": "7.0.0"},
     "steps:\n- name: a\n  args: ['--build-arg=V=${_BAZEL_VERSION}']\nsubstitutions:\n  _BAZEL_VERSION: '6.0'\n"),
    (f"{COMMUNITY}/terraform/examples/infra_at_scale/cloudbuild.yaml", {"_ZONE": "a", "_REGION": "b"},
     "steps:\n- name: a\n  env: ['TF_VAR_region=${_REGION}', 'TF_VAR_zone=${_ZONE}']\n"),
    (f"{COMMUNITY}/android/cloudbuild.yaml", {"_ANDROID_VERSION": "29"},
     "steps:\n- name: 'gcr.io/cloud-builders/docker'\n  args: ['build', '--build-arg', 'v=${_ANDROID_VERSION}']\n"
     "tags: ['cloud-builders-community']\n"),
    (f"{COMMUNITY}/vault/examples/cloudbuild-vault-alpine.yaml", {},
     f"secrets:\n- kmsKeyName: {KEY}\n  secretEnv: {{TOKEN: aHVudGVyMg==}}\n"
     "steps:\n- {name: a, secretEnv: [TOKEN], entrypoint: sh, args: [-c, 'echo $$TOKEN']}\n"),
    (f"{SAMPLES}/basic-config/cloudbuild.yaml", {},
     "steps:\n- name: 'gcr.io/cloud-builders/docker'\n  args: [build, -t, 'us-docker.pkg.dev/$PROJECT_ID/r/i', .]\n"
     "options:\n  machineType: 'E2_HIGHCPU_8'\n  diskSizeGb: 200\ntags: ['mytag1', 'mytag2']\n"),
    (SCHEMA, {}, "steps:\n- {name: a, script: \"#!/usr/bin/env bash\\necho $FOO\", env: ['FOO=$PROJECT_ID']}\n"),
    (SCHEMA, {}, "steps:\n- {name: a, allowFailure: true}\n- {name: a, allowExitCodes: [1, 2]}\n"),
    (SCHEMA, {}, "steps: [{name: a, args: [x]}]\nserviceAccount: projects/p/serviceAccounts/a@p.iam\n"
     "options: {logging: CLOUD_LOGGING_ONLY}\n"),
    (SCHEMA, {}, "steps: [{name: a}]\nserviceAccount: projects/p/serviceAccounts/a@p.iam\nlogsBucket: gs://b\n"),
    (SCHEMA, {}, "steps: [{name: a}]\noptions: {pool: {name: projects/p/locations/l/workerPools/w}}\nqueueTtl: 10s\n"),
    (SCHEMA, {}, "availableSecrets:\n  secretManager:\n  - {versionName: projects/p/secrets/s/versions/1, env: A}\n"
     "steps: [{name: a, secretEnv: [A], entrypoint: bash, args: [-c, 'x $$A']}]\n"),
    (SCHEMA, {}, "steps: [{name: a}]\noptions: {requestedVerifyOption: VERIFIED, sourceProvenanceHash: [SHA256]}\n"),
    (SCHEMA, {}, "steps: [{name: a}]\noptions: {automapSubstitutions: true}\nsubstitutions: {_A: b}\n"),
    (SCHEMA, {}, "steps: [{name: a}]\nartifacts: {mavenArtifacts: [{repository: 'https://l-maven.pkg.dev/p/r', path: a,"
     " artifactId: a, groupId: b, version: '1'}]}\n"),
    (SCHEMA, {}, "steps: [{name: a}]\nartifacts: {pythonPackages: [{repository: 'https://l-python.pkg.dev/p/r',"
     " paths: ['dist/*']}]}\n"),
    (SCHEMA, {}, "steps: [{name: a, wait_for: ['-'], allow_failure: true}]\nlogs_bucket: gs://b\n"),
    (SCHEMA, {}, "{\"steps\": [{\"name\": \"a\", \"args\": [\"b\"]}], \"timeout\": \"600s\"}\n"),
    (DYNAMIC, {}, "steps: [{name: a, args: ['${_X:-d}', '${_X%.*}', '${_X/a/b}', '${_X:0:7}', '${_X^^}']}]\n"
     "substitutions: {_X: abc}\noptions: {dynamicSubstitutions: true}\n"),
    (DYNAMIC, {}, "steps: [{name: a, args: ['${_B}']}]\nsubstitutions: {_A: '${PROJECT_ID}', _B: 'x-${_A}'}\n"
     "options: {dynamic_substitutions: true}\n"),
    (DYNAMIC, {}, "steps: [{name: a, args: ['$(body.message)', '${_A}']}]\nsubstitutions: {_A: $(body.a)}\n"),
]  # fmt: skip

#: Files that the published schema refuses: (words, text).
_UNREADABLE: list[tuple[str, str]] = [
    ("options is text", "steps: [{name: a}]\noptions: x\n"),
    ("substitutions is a list", "steps: [{name: a}]\nsubstitutions: [a]\n"),
    ("entrypoint is a list", "steps: [{name: a, entrypoint: [x]}]\n"),
    ("allowFailure is text", 'steps: [{name: a, allowFailure: "false"}]\n'),
    ("dir is a number", "steps: [{name: a, dir: 5}]\n"),
    ("allowExitCodes is text", "steps: [{name: a, allowExitCodes: x}]\n"),
    ("queueTtl is no duration", "steps: [{name: a}]\nqueueTtl: x\n"),
    ("timeout is no duration", "steps: [{name: a}]\ntimeout: 1h\n"),
    ("timeout of a step is no duration", "steps: [{name: a, timeout: 10}]\n"),
    ("an argument is a number", "steps: [{name: a, args: [1]}]\n"),
    ("an argument is null", "steps: [{name: a, args: [null]}]\n"),
    ("an unknown field", "steps: [{name: a, argz: [x]}]\n"),
    ("an unknown option", "steps: [{name: a}]\noptions: {machine: E2_HIGHCPU_8}\n"),
    ("an unknown machine", "steps: [{name: a}]\noptions: {machineType: HUGE}\n"),
    ("an unknown kind of logging", "steps: [{name: a}]\noptions: {logging: FILE}\n"),
    ("diskSizeGb is text", "steps: [{name: a}]\noptions: {diskSizeGb: large}\n"),
    ("diskSizeGb over 4000", "steps: [{name: a}]\noptions: {diskSizeGb: 4001}\n"),
    ("a script with arguments", "steps: [{name: a, script: x, args: [y]}]\n"),
    ("a script with an entrypoint", "steps: [{name: a, script: x, entrypoint: y}]\n"),
    ("steps is text", "steps: a\n"),
    ("no place for logs", "steps: [{name: a}]\nserviceAccount: projects/p/serviceAccounts/a@p.iam\n"),
    ("a secret without base64", f"steps: [{{name: a, secretEnv: [A]}}]\nsecrets: [{{kmsKeyName: {KEY}, secretEnv:"
     " {A: '<TOKEN>'}}]\n"),
]  # fmt: skip


def corpus() -> Iterator[Case]:
    """All of them."""
    for part in (_substitutions, _builds, _artifacts, _volumes, _steps, _secrets, _names):
        yield from cases((part.__doc__ or "").partition(",")[0].rstrip("."), VALIDATE, part(), build=True)
    for name in ("REPO_NAME", "BRANCH_NAME", "TAG_NAME", "REVISION_ID", "COMMIT_SHA", "SHORT_SHA"):
        # gcloud takes them as a flag, not in the file: api_lib/cloudbuild/config.py of gcloud 528.
        yield Case(f"TestCheckSubstitutionsLoose: {name}", VALIDATE, dumped(build()), True, True, {name: "foo"})
    for number, (source, given, text) in enumerate(EXAMPLES):
        yield Case(f"example {number} {source.rpartition('/')[2]}", source, text, True, True, given)
    yield Case("105 steps", MANY_STEPS, dumped(build(*[step()] * 105)), True, True)
    for name, text in _UNREADABLE:
        yield Case(f"schema: {name}", SCHEMA, text, False, True)
