"""What Cloud Build accepts as a build, by its published description alone.

The schema is that of the API's discovery document (:mod:`tests.fakes.discovery`). The constraints that it cannot
express are stated by the descriptions of its fields, by Google's documentation, or by Google's own local builder
(https://github.com/GoogleCloudPlatform/cloud-build-local/blob/master/validate/validate.go, below: validate.go).
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

from tests.fakes import discovery

Build = dict[str, Any]


def _steps(build: Build) -> Iterator[str]:
    """Steps are required (Build.steps, BuildStep.name); ids are unique (BuildStep.id)."""
    steps = build.get("steps") or []
    if not steps:
        yield "invalid build: no steps"
    for number, step in enumerate(steps):
        if not step.get("name"):
            yield f"invalid build: build step {number} must specify a name"
    for name, count in Counter(step["id"] for step in steps if step.get("id")).items():
        if count > 1:
            yield f'invalid build: build step ID "{name}" is used {count} times'


def _dependencies(build: Build) -> Iterator[str]:
    """waitFor refers to earlier steps, or to ``-``, the start of the build (validate.go: CheckBuildSteps, StartStep).

    https://cloud.google.com/build/docs/configuring-builds/configure-build-step-order
    """
    defined = {"-"}
    for number, step in enumerate(build.get("steps") or []):
        for name in step.get("waitFor") or []:
            if name not in defined:
                yield f'invalid build: build step {number} depends on "{name}", which has not been defined'
        defined.add(step.get("id") or "")


def _variables(build: Build) -> Iterator[str]:
    """Elements of env have the form KEY=VALUE (BuildStep.env, BuildOptions.env)."""
    for part in [*(build.get("steps") or []), build.get("options") or {}]:
        for entry in part.get("env") or []:
            if "=" not in entry[1:]:
                yield f'invalid build: env "{entry}" is not of the form KEY=VALUE'


def _scripts(build: Build) -> Iterator[str]:
    """With a script, neither entrypoint nor args can be set (BuildStep.script)."""
    for number, step in enumerate(build.get("steps") or []):
        if step.get("script") and (step.get("args") or step.get("entrypoint")):
            yield f"invalid build: build step {number} has a script, and so can have neither args nor entrypoint"


def _timeouts(build: Build) -> Iterator[str]:
    """A build takes at most 24 hours (https://cloud.google.com/build/docs/build-config-file-schema#timeout_2)."""
    timeout = build.get("timeout")
    if timeout and not 0 < float(timeout.removesuffix("s")) <= 24 * 3600:
        yield f"invalid build: timeout {timeout} must be between 1 second and 24 hours"


def _volumes(build: Build) -> Iterator[str]:
    """Paths are absolute, and a named volume is used by at least two steps (Volume, BuildStep.volumes)."""
    users: Counter[str] = Counter()
    for step in build.get("steps") or []:
        for volume in step.get("volumes") or []:
            users[volume.get("name", "")] += 1
            if not volume.get("path", "").startswith("/"):
                yield f'invalid build: path of volume "{volume.get("name")}" is not absolute'
    for name, count in users.items():
        if count < 2:
            yield f'invalid build: volume "{name}" is used by only one step'


def _disk(build: Build) -> Iterator[str]:
    """The maximum is 4000 GB (BuildOptions.diskSizeGb)."""
    if int((build.get("options") or {}).get("diskSizeGb") or 0) > 4000:
        yield "invalid build: diskSizeGb must be at most 4000"


def _logs(build: Build) -> Iterator[str]:
    """A user-specified service account needs a place for the logs.

    https://cloud.google.com/build/docs/securing-builds/configure-user-specified-service-accounts
    """
    options = build.get("options") or {}
    elsewhere = options.get("logging") in ("CLOUD_LOGGING_ONLY", "NONE") or options.get("defaultLogsBucketBehavior")
    if build.get("serviceAccount") and not build.get("logsBucket") and not elsewhere:
        yield (
            "if 'build.service_account' is specified, the build must either (a) specify 'build.logs_bucket', (b) use "
            "the REGIONAL_USER_OWNED_BUCKET build.options.default_logs_bucket_behavior option, or (c) use either "
            "CLOUD_LOGGING_ONLY / NONE logging options"
        )


#: Substitutions that the service sets (https://cloud.google.com/build/docs/configuring-builds/substitute-variable-values).
_BUILT_IN = {
    "PROJECT_ID", "PROJECT_NUMBER", "BUILD_ID", "LOCATION", "TRIGGER_NAME", "COMMIT_SHA", "REVISION_ID", "SHORT_SHA",
    "REPO_NAME", "REPO_FULL_NAME", "BRANCH_NAME", "TAG_NAME", "REF_NAME", "TRIGGER_BUILD_CONFIG_PATH",
    "SERVICE_ACCOUNT_EMAIL", "SERVICE_ACCOUNT",
}  # fmt: skip


def _references(text: str) -> set[str]:
    """Names of the substitutions in a text; ``$$`` is a literal dollar sign."""
    return set(re.findall(r"\$\{?([A-Z_][A-Z0-9_]*)", text.replace("$$", "")))


def _substitutions(build: Build) -> Iterator[str]:
    """User-defined names start with an underscore and have only capitals, digits and underscores.

    At most 100 of them, with names of 100 bytes and values of 4000 bytes (validate.go). With MUST_MATCH, names that are
    used are defined, and names that are defined are used.

    https://cloud.google.com/build/docs/configuring-builds/substitute-variable-values
    """
    given = build.get("substitutions") or {}
    options = build.get("options") or {}
    if len(given) > 100:
        yield f"invalid build: {len(given)} substitutions; at most 100 are allowed"
    for name, value in given.items():
        if not re.fullmatch(r"_[A-Z0-9_]+", name):
            yield f'invalid build: invalid key in the substitution data: "{name}"'
        if len(name.encode()) > 100 or len(value.encode()) > 4000:
            yield f'invalid build: substitution "{name}" is too long'
    steps = [{key: value for key, value in step.items() if key != "script"} for step in build.get("steps") or []]
    template = {
        key: build.get(key) for key in ("images", "tags", "artifacts", "logsBucket", "serviceAccount", "options")
    }
    used = _references(json.dumps([steps, template]))
    if options.get("dynamicSubstitutions"):
        used |= _references(json.dumps(given))
    for name in sorted(used - _BUILT_IN):
        if not name.startswith("_"):
            yield f'invalid build: key in the template "{name}" is not a valid built-in substitution'
    if options.get("substitutionOption") == "ALLOW_LOOSE":
        return
    own = {name for name in used if name.startswith("_")}
    mapped = options.get("automapSubstitutions") or any(step.get("automapSubstitutions") for step in steps)
    for name in sorted(own - set(given)):
        yield f'invalid build: key in the template "{name}" is not matched in the substitution data'
    for name in sorted(set() if mapped else set(given) - own):
        yield f'invalid build: key "{name}" in the substitution data is not matched in the template'


_CONSTRAINTS: tuple[Callable[[Build], Iterator[str]], ...] = (
    _steps, _dependencies, _variables, _scripts, _timeouts, _volumes, _disk, _logs, _substitutions,
)  # fmt: skip


def violations(build: Build) -> list[str]:
    """Everything for which Cloud Build would reject a build: violations of its schema, else of its constraints."""
    errors = discovery.violations("cloudbuild.v1", "Build", build, required=False)
    found = [f"build.{field}: {what}" for field, what in errors]
    return found or [violation for constraint in _CONSTRAINTS for violation in constraint(build)]
