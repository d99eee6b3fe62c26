"""The rules of Cloud Build for a build that gcloud does not check, and what the local executor does not support.

A build is the API's resource ``Build``, as :mod:`cloudbuild_local.normalization` returns it: its fields have the
types of the API's discovery document. The service's rules and limits are those of that document, of
https://cloud.google.com/build/docs/build-config-file-schema (below: "schema"), and of the service's open-source
implementation, validate/validate.go of https://github.com/GoogleCloudPlatform/cloud-build-local, which was archived in
2022: where the schema gives a higher limit, that is used. To add a rule, write a function that yields a message for
every violation, with the decorator ``_rule``.
"""

from __future__ import annotations

import base64
import functools
import posixpath
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from cloudbuild_local.substitutions import BUILT_IN, OVERRIDABLE, PULL_REQUEST, UNKNOWN, mentioned, used
from trainyard.common.errors import nearest
from trainyard.common.rule_engine import Finding, Rule, Severity, rule, rules_in
from trainyard.oci.reference import why_unusable

Build = Mapping[str, Any]

#: Default and maximum of a build's timeout in seconds (schema: timeout).
DEFAULT_TIMEOUT, MAX_TIMEOUT = 3600.0, 24 * 3600.0

#: What the local executor does not support, and rejects: without it, the build would do something else.
UNSUPPORTED = (
    "artifacts.genericArtifacts", "artifacts.goModules", "artifacts.mavenArtifacts", "artifacts.npmPackages",
    "artifacts.objects", "artifacts.oci", "artifacts.pythonPackages", "availableSecrets", "dependencies", "gitConfig",
    "options.secretEnv", "secrets", "steps.results", "steps.secretEnv",
)  # fmt: skip

#: What has no effect in a local build: where it runs, where its logs and messages are sent, what is recorded about it.
WITHOUT_EFFECT = (
    "logsBucket", "options.defaultLogsBucketBehavior", "options.diskSizeGb", "options.enableStructuredLogging",
    "options.logStreamingOption", "options.logging", "options.machineType", "options.pool", "options.pubsubTopic",
    "options.rankedMachineSeries", "options.requestedVerifyOption", "options.sourceProvenanceHash",
    "options.workerPool", "options.workerRelease", "queueTtl", "serviceAccount", "tags",
)  # fmt: skip

#: Mounts that Cloud Build makes (validate.go: reservedVolumePaths).
_RESERVED = ("/workspace", "/builder/home", "/var/run/docker.sock")
#: Bytes of an encrypted value at most.
_SECRET = 64 * 1024
_VOLUME_NAME = re.compile(r"[a-zA-Z0-9][a-zA-Z0-9_.-]+")
_TAG = re.compile(r"\w[\w.-]{0,127}", re.ASCII)

_FOR_TRIGGERS = "for a build of a trigger, give '--trigger'"

#: Option -> the values with which a user's service account needs no logsBucket.
_OWN_LOGS = {"logging": ("CLOUD_LOGGING_ONLY", "NONE"), "defaultLogsBucketBehavior": ("REGIONAL_USER_OWNED_BUCKET",)}


def seconds(text: object) -> float:
    """Seconds of a duration in JSON, such as ``600s`` or ``0.5s``
    (https://protobuf.dev/programming-guides/json/, Duration).

    Raises:
        ValueError: it is not a duration.
    """
    match = re.fullmatch(r"([0-9]+(?:\.[0-9]{1,9})?)s", str(text))
    if not match:
        raise ValueError(f"{text!r} is not a duration: write seconds with an 's', as in '600s'")
    return float(match[1])


def images_of(build: Build) -> list[str]:
    """The images to push: `images`, or `artifacts.images`, which has the same meaning."""
    found: list[str] = build.get("images") or (build.get("artifacts") or {}).get("images") or []
    return found


def _options(build: Build) -> dict[str, Any]:
    return build.get("options") or {}


def _steps(build: Build) -> Iterator[tuple[str, dict[str, Any]]]:
    """The steps with their names in messages."""
    for number, step in enumerate(build.get("steps") or []):
        yield f"step {number}", step


def _with_options(build: Build) -> Iterator[tuple[str, dict[str, Any]]]:
    yield from _steps(build)
    yield "options", _options(build)


#: Field -> the form of its value; words in capitals stand for names.
_RESOURCES = {
    "options.pool.name": "projects/PROJECT/locations/REGION/workerPools/POOL",
    "availableSecrets.secretManager.versionName": "projects/PROJECT(/locations/REGION)?/secrets/NAME/versions/VERSION",
    "serviceAccount": "projects/PROJECT/serviceAccounts/EMAIL",
}


def _rule(source: str) -> Callable[[Callable[[Build], Iterator[str]]], Rule[Build]]:
    """Make a function that yields messages a rule: Cloud Build refuses a build for each.

    Args:
        source: see the module's docstring for its short names.
    """

    def decorate(function: Callable[[Build], Iterator[str]]) -> Rule[Build]:
        @functools.wraps(function)
        def findings(build: Build) -> Iterator[Finding]:
            for message in function(build):
                yield Finding("", message, "Cloud Build refuses the build", "correct it, or remove it")

        return rule("cloud-build", severity=Severity.REFUSE, source=source)(findings)

    return decorate


@_rule("validate.go: CheckBuildSteps")
def builds_have_steps(build: Build) -> Iterator[str]:
    """There are steps, each with a name.

    Their number is not limited here: validate.go has 100, but public builds have more
    (https://github.com/terraform-google-modules/terraform-google-kubernetes-engine/blob/bb176b2/build/int.cloudbuild.yaml).
    """
    steps = build.get("steps") or []
    if not steps:
        yield "no steps"
    for where, step in _steps(build):
        if not step.get("name"):
            yield f"{where}: 'name' is missing: the image that it runs in"


@_rule(
    "validate.go; schema: args for 100 arguments of 10,000 characters; 200 images: "
    "https://github.com/GoogleContainerTools/distroless/pull/556#issuecomment-665330724"
)
def build_sizes_are_within_limits(build: Build) -> Iterator[str]:
    """Numbers and lengths are within Cloud Build's limits."""
    for where, part in _with_options(build):
        for key, length in (("args", 10_000), ("env", 32_768)):
            values = part.get(key) or []
            if len(values) > 100:
                yield f"{where}: {len(values)} {key}; at most 100"
            if any(len(value) > length for value in values):
                yield f"{where}: one of {key} is longer than {length} characters"
        for key in ("name", "dir"):
            if len(part.get(key) or "") > 1000:
                yield f"{where}: {key} is longer than 1000 characters"
    for key, values, most in (("images", images_of(build), 200), ("tags", build.get("tags") or [], 64)):
        if len(values) > most:
            yield f"{len(values)} {key}; at most {most}"
    if any(len(image) > 1000 for image in images_of(build)):
        yield "one of images is longer than 1000 characters"


@_rule("discovery document: BuildStep, BuildOptions")
def numbers_are_in_range(build: Build) -> Iterator[str]:
    """Exit codes are 32-bit numbers, the disk has at most 4000 GB."""
    for where, step in _steps(build):
        for code in step.get("allowExitCodes") or []:
            if isinstance(code, bool) or not -(2**31) <= code < 2**31:
                yield f"{where}: allowExitCodes: {str(code).lower()} is not an exit status"
    size = _options(build).get("diskSizeGb")
    if size is not None and not (re.fullmatch(r"[0-9]+", str(size)) and int(size) <= 4000):
        yield f"options: diskSizeGb: {size} is not a number of GB up to 4000"


@_rule("validate.go: CheckBuildSteps")
def step_ids_are_unique(build: Build) -> Iterator[str]:
    """Ids are unique, and none is `-`, which is reserved."""
    seen: set[str] = set()
    for where, step in _steps(build):
        name = step.get("id")
        if name == "-":
            yield f"{where}: the id '-' is reserved for the start of the build"
        if name and name in seen:
            yield f"{where}: id '{name}' is already used by an earlier step"
        seen.add(name or "")


@_rule("validate.go: CheckBuildSteps")
def wait_for_names_earlier_steps(build: Build) -> Iterator[str]:
    """`waitFor` names earlier steps, or `-`, the start of the build."""
    earlier = {"-"}
    for where, step in _steps(build):
        for name in step.get("waitFor") or []:
            if name not in earlier:
                yield f"{where}: waitFor '{name}' is not the id of an earlier step{nearest(name, earlier)}"
        if step.get("id"):
            earlier.add(step["id"])


@_rule("discovery document: BuildStep.env, BuildOptions.env")
def env_is_key_and_value(build: Build) -> Iterator[str]:
    """Every entry of env is KEY=VALUE."""
    for where, part in _with_options(build):
        for entry in part.get("env") or []:
            if not re.match(r"[^=]+=", entry):
                yield f"{where}: env {entry!r} is not KEY=VALUE"


@_rule("validate.go: MaxTimeout")
def durations_are_within_limits(build: Build) -> Iterator[str]:
    """Durations are valid, and at most 24 h.

    A step's may be longer than its build's.
    """
    parts = [("timeout", build.get("timeout")), ("queueTtl", build.get("queueTtl"))]
    for key, value in [*parts, *((f"{where}: timeout", step.get("timeout")) for where, step in _steps(build))]:
        try:
            found = 0.0 if value is None else seconds(value)
        except ValueError as error:
            yield f"{key}: {error}"
            continue
        if found > MAX_TIMEOUT and key != "queueTtl":
            yield f"{key}: {found:g} s; at most {MAX_TIMEOUT:g} s"


@_rule("discovery document: BuildStep.script")
def scripts_have_no_arguments(build: Build) -> Iterator[str]:
    """A step with a script has neither args nor entrypoint."""
    for where, step in _steps(build):
        if step.get("script") and (step.get("args") or step.get("entrypoint")):
            yield f"{where}: 'script' cannot be combined with 'args' or 'entrypoint'"


@_rule("validate.go: checkVolumes")
def build_volumes_are_valid(build: Build) -> Iterator[str]:
    """Volumes have valid names and paths, and two steps that use them."""
    shared = _options(build).get("volumes") or []
    if shared and len(build.get("steps") or []) < 2:
        yield "options: volumes: the build has only one step"
    users: dict[str, int] = {}
    for where, part in _with_options(build):
        volumes = part.get("volumes") or []
        yield from (f"{where}: {problem}" for problem in _volume_problems(volumes))
        if where == "options":
            continue
        for volume in volumes:
            users[volume.get("name", "")] = users.get(volume.get("name", ""), 0) + 1
            for key in ("name", "path"):
                if any(volume.get(key) == other.get(key) for other in shared):
                    yield f"{where}: volume {key} '{volume.get(key)}' is used by options.volumes too"
    for name, count in users.items():
        if count < 2:
            yield f"volume '{name}' is used by only one step"


def _volume_problems(volumes: list[dict[str, Any]]) -> Iterator[str]:
    names, paths = set(), set()
    for volume in volumes:
        name, path = volume.get("name", ""), posixpath.normpath(volume.get("path", "") or ".")
        if not _VOLUME_NAME.fullmatch(name):
            yield f"volume name '{name}' must be two or more letters, digits, '_', '.' and '-'"
        if not path.startswith("/"):
            yield f"volume '{name}': path '{volume.get('path', '')}' is not absolute"
        if path in _RESERVED or path.startswith("/cloudbuild/"):
            yield f"volume path '{path}' is reserved by Cloud Build"
        if name in names:
            yield f"volume name '{name}' is used twice"
        if path in paths:
            yield f"volume path '{path}' is used twice"
        names.add(name)
        paths.add(path)


@_rule("validate.go: checkSecrets")
def secrets_are_defined(build: Build) -> Iterator[str]:
    """Variables of secrets are defined, and used once."""
    available = build.get("availableSecrets") or {}
    defined = {name for secret in build.get("secrets") or [] for name in secret.get("secretEnv") or {}}
    defined |= {name for secret in available.get("inline") or [] for name in secret.get("envMap") or {}}
    defined |= {secret["env"] for secret in available.get("secretManager") or [] if secret.get("env")}
    shared = _options(build).get("secretEnv") or []
    for where, part in _with_options(build):
        own = part.get("secretEnv") or []
        for name in dict.fromkeys(own):
            if name not in defined:
                yield f"{where}: secretEnv '{name}' is not defined by a secret{nearest(name, defined)}"
            if own.count(name) > 1 or (where != "options" and name in shared):
                yield f"{where}: secretEnv '{name}' is used more than once"
        plain = {entry.partition("=")[0] for entry in [*(_options(build).get("env") or []), *(part.get("env") or [])]}
        for name in sorted({*own, *shared} & plain):
            yield f"{where}: '{name}' is set by env and by secretEnv"


@_rule("discovery document: Secret.secretEnv; validate.go: checkSecrets")
def encrypted_secrets_are_used(build: Build) -> Iterator[str]:
    """Each encrypted value has one definition, is used, and has at most 64 KiB."""
    secrets = build.get("secrets") or []
    used_ = {name for _, part in _with_options(build) for name in part.get("secretEnv") or []}
    keys = [secret.get("kmsKeyName") for secret in secrets]
    for number, secret in enumerate(secrets):
        values = secret.get("secretEnv") or {}
        if not values:
            yield f"secrets: {number} has no secretEnv"
        if secret.get("kmsKeyName") in keys[:number]:
            yield f"secrets: {number} has the kmsKeyName of an earlier secret: write one secret for each key"
        for name, value in values.items():
            if len(base64.urlsafe_b64decode(value)) > _SECRET:
                yield f"secrets: the value of '{name}' is longer than {_SECRET} bytes"
    names = [name for secret in secrets for name in secret.get("secretEnv") or {}]
    for name in dict.fromkeys(names):
        if names.count(name) > 1:
            yield f"secrets: '{name}' is defined more than once"
        if name not in used_:
            yield f"secrets: '{name}' is used by no step: add it to the secretEnv of a step"
    if len(set(names)) > 100:
        yield f"secrets: {len(set(names))} values; at most 100"


@_rule(
    "discovery document: PoolOption.name, SecretManagerSecret.versionName, Build.serviceAccount; secrets of a region: "
    "https://cloud.google.com/secret-manager/regional-secrets/access-regional-secret-version"
)
def resources_have_full_names(build: Build) -> Iterator[str]:
    """Pools, versions of secrets and service accounts have full names, as far as they are without substitutions."""
    for path, form in _RESOURCES.items():
        found: list[Any] = [build]
        for key in path.split("."):
            below = [one.get(key) for one in found]
            found = [entry for one in below for entry in (one if isinstance(one, list) else [one]) if entry]
        for value in found:
            if "$" not in value and not re.fullmatch(re.sub("[A-Z]{2,}", "[^/]+", form), value):
                yield f"{path}: '{value}' is not {form.replace('(/locations/REGION)?', '')}"


@_rule("validate.go: CheckArtifacts")
def artifacts_agree(build: Build) -> Iterator[str]:
    """`images` and `artifacts.images` do not differ; objects have a bucket and paths."""
    artifacts = build.get("artifacts") or {}
    if build.get("images") and artifacts.get("images") not in (None, build["images"]):
        yield "'images' and 'artifacts.images' differ"
    objects = artifacts.get("objects")
    if objects is None:
        return
    if not str(objects.get("location", "")).startswith(("gs://", "$")):
        yield "artifacts.objects: location must be a Cloud Storage URL that starts with gs://"
    paths = objects.get("paths") or []
    if not 0 < len(paths) <= 100:
        yield f"artifacts.objects: {len(paths)} paths; must be 1 to 100"
    if any(re.search(r"\s", path) for path in paths):
        yield "artifacts.objects: a path contains whitespace"
    if len(set(paths)) < len(paths):
        yield "artifacts.objects: a path is listed twice"


@_rule("https://cloud.google.com/build/docs/securing-builds/configure-user-specified-service-accounts")
def logs_have_a_place(build: Build) -> Iterator[str]:
    """A user's service account needs a place for logs."""
    options = _options(build)
    elsewhere = any(options.get(key) in values for key, values in _OWN_LOGS.items())
    if build.get("serviceAccount") and not build.get("logsBucket") and not elsewhere:
        yield "serviceAccount: set logsBucket, or options.logging to CLOUD_LOGGING_ONLY or NONE"


def _references(build: Build) -> dict[str, Any]:
    """The parts of a build in which substitutions are replaced (validate.go: CheckSubstitutionTemplate).

    Scripts are not among them: "Scripts don't support substitutions directly, but they support environment variables."
    (https://cloud.google.com/build/docs/configuring-builds/run-bash-scripts)
    """
    found = {key: build.get(key) for key in ("tags", "logsBucket", "serviceAccount")}
    found["images"] = images_of(build)
    found["objects"] = (build.get("artifacts") or {}).get("objects")
    found["steps"] = [
        {key: step.get(key) for key in ("name", "args", "env", "dir", "entrypoint")} for _, step in _steps(build)
    ]
    found["env"] = _options(build).get("env")
    return found


@_rule("validate.go; schema: substitutionOption")
def substitutions_match(build: Build) -> Iterator[str]:
    """Names and lengths are valid; each is used, and each used is defined.

    MUST_MATCH, the default of submitted builds, rejects unused keys and undefined references; ALLOW_LOOSE, which builds
    of triggers always have, accepts them.
    References to unknown built-in names are always rejected.
    """
    given: dict[str, str] = build.get("substitutions") or {}
    if len(given) > 100:
        yield f"{len(given)} substitutions; at most 100"
    for key, value in given.items():
        if not re.fullmatch(r"_[A-Z0-9_]+", key) and key not in OVERRIDABLE:
            yield f"substitutions: '{key}' is not a name such as _NAME, in capitals"
        if len(key) > 100 or len(value) > 4000:
            yield f"substitutions: {key[:40]}: a name has at most 100 characters, a value at most 4000"
    options = _options(build)
    dynamic = bool(options.get("dynamicSubstitutions"))
    referred = used(_references(build)) | (used(given) if dynamic else set())
    for name in sorted(referred):
        if not name.startswith("_") and name not in BUILT_IN:
            yield f"${name} is not a built-in substitution{nearest(name, BUILT_IN)}; $${name} is a shell variable"
    if options.get("substitutionOption", "MUST_MATCH") != "MUST_MATCH":
        return
    own = {name for name in referred if name.startswith("_")}
    for name in sorted(own - set(given)):
        by = "a trigger for pull requests gives it" if name in PULL_REQUEST else "define it"
        yield f"substitution ${name} is not defined{nearest(name, given)}: {by}; {_FOR_TRIGGERS}"
    if options.get("automapSubstitutions") or any(step.get("automapSubstitutions") for _, step in _steps(build)):
        return
    steps = [{key: part for key, part in step.items() if key != "script"} for _, step in _steps(build)]
    others = {key: part for key, part in build.items() if dynamic or key != "substitutions"}
    own |= mentioned(others | {"steps": steps})
    for name in sorted(name for name in set(given) - own if name.startswith("_")):
        yield f"substitution {name} is defined but never used: remove it; {_FOR_TRIGGERS}"


#: Every rule, in the order in which they report.
RULES: tuple[Rule[Build], ...] = rules_in(sys.modules[__name__])


def violations(build: Build) -> list[str]:
    """Return what breaks one of :data:`RULES`, in the order of the rules."""
    return [finding.what for one in RULES for finding in one(build)]


def violations_after_substitution(steps: list[str], images: list[str], tags: list[str]) -> list[str]:
    """Names of images and tags that Cloud Build refuses after substitution (validate.go: CheckBuildAfterSubstitutions).

    Args:
        steps: the names of the steps.
    """
    found = [
        f"step {number}: name: {problem}"
        for number, name in enumerate(steps)
        for problem in _image_problems(name, pushed=False)
    ]
    found += [f"images: {problem}" for name in images for problem in _image_problems(name, pushed=True)]
    known = [tag for tag in tags if UNKNOWN[0] not in tag]
    return found + [f"tags: '{tag}' is not a tag: {_TAG.pattern}" for tag in known if tag and not _TAG.fullmatch(tag)]


def _image_problems(name: str, *, pushed: bool) -> Iterator[str]:
    """Yield why a name is no image's. That of a step may be on the machine alone, where an earlier step built it."""
    plain, _, digest = name.partition("@")
    if UNKNOWN[0] in name:
        return
    if digest and not re.fullmatch(rf"sha256:{_TAG.pattern}", digest, re.ASCII):
        yield f"{name!r} is not an image reference: the digest must be sha256:..."
    elif not re.fullmatch(r"[0-9a-f]{64}", name):  # a name for Cloud Build, an ID for Docker
        yield from filter(None, [why_unusable(plain, pushed=pushed)])


def _present(build: Build, paths: tuple[str, ...]) -> list[str]:
    """Those of some fields that a build has."""
    found = []
    for path in paths:
        first, _, second = path.partition(".")
        value = build.get(first)
        parts = value if isinstance(value, list) else [value]
        if any(part.get(second) if second and isinstance(part, dict) else part for part in parts):
            found.append(path)
    return found


def unsupported(build: Build) -> list[str]:
    """Fields of a valid build that the local executor does not support."""
    return _present(build, UNSUPPORTED)


def without_effect(build: Build) -> list[str]:
    """Fields of a build that have no effect in a local build."""
    return _present(build, WITHOUT_EFFECT)
