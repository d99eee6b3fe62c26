"""The rules of Cloud Build for a cloudbuild.yaml that gcloud does not check.

The file has the schema of the resource ``Build`` (https://cloud.google.com/build/docs/build-config-file-schema, below:
"schema"). The service's other rules and limits are those of its open-source implementation, validate/validate.go of
https://github.com/GoogleCloudPlatform/cloud-build-local, which was archived in 2022: some limits may have been raised
since. To add a rule, write a function that yields a message for every violation, and add it to :data:`RULES`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from trainyard.cloudbuild.substitutions import BUILT_IN, used
from trainyard.console import nearest

#: Keys of a step that the executor implements. Others are rejected: ignoring them would change what the build does.
STEP_KEYS = ("name", "id", "args", "entrypoint", "script", "env", "dir", "waitFor", "timeout", "volumes",
             "allowFailure", "allowExitCodes", "automapSubstitutions")  # fmt: skip
BUILD_KEYS = ("steps", "images", "substitutions", "timeout", "options", "tags", "serviceAccount", "logsBucket",
              "queueTtl")  # fmt: skip

#: Default and maximum of a build's timeout in seconds (schema: timeout).
DEFAULT_TIMEOUT, MAX_TIMEOUT = 3600.0, 24 * 3600.0


def seconds(text: object) -> float:
    """Seconds of a duration in JSON, such as ``600s`` or ``0.5s``
    (https://protobuf.dev/programming-guides/json/, Duration).

    Raises:
        ValueError: it is not a duration.
    """
    match = re.fullmatch(r"(\d+(?:\.\d{1,9})?)s", str(text))
    if not match:
        raise ValueError(f"{text!r} is not a duration: write seconds with an 's', as in '600s'")
    return float(match[1])


def steps_of(data: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The steps of a configuration, as far as they are mappings."""
    steps = data.get("steps") or []
    return [step for step in steps if isinstance(step, dict)] if isinstance(steps, list) else []


def _template(data: Mapping[str, Any]) -> dict[str, Any]:
    """The parts of a configuration in which substitutions are replaced.

    Scripts are not among them: "Scripts don't support substitutions directly, but they support environment variables."
    (https://cloud.google.com/build/docs/configuring-builds/run-bash-scripts)
    """
    found = {key: data.get(key) for key in ("images", "tags", "logsBucket", "serviceAccount") if data.get(key)}
    found["steps"] = [{k: v for k, v in step.items() if k != "script"} for step in steps_of(data)]
    found["options"] = {"env": (data.get("options") or {}).get("env") or []}
    return found


Rule = Callable[[Mapping[str, Any]], Iterator[str]]


def rule_known_keys(data: Mapping[str, Any]) -> Iterator[str]:
    """Only keys that the executor implements. gcloud also rejects unknown keys (`.steps[0].argz: unused`)."""
    for key in data:
        if key not in BUILD_KEYS:
            yield f"unknown or unsupported key '{key}'{nearest(str(key), BUILD_KEYS)}"
    for number, step in enumerate(steps_of(data)):
        for key in step:
            if key not in STEP_KEYS:
                yield f"step {number}: unknown or unsupported key '{key}'{nearest(str(key), STEP_KEYS)}"


def rule_steps(data: Mapping[str, Any]) -> Iterator[str]:
    """1 to 100 steps (validate.go maxNumSteps), each with a name."""
    steps = data.get("steps")
    if not isinstance(steps, list) or not steps:
        yield "no steps"
        return
    if len(steps) > 100:
        yield f"{len(steps)} steps; at most 100"
    for number, step in enumerate(steps):
        if not isinstance(step, dict) or not isinstance(step.get("name"), str) or not step["name"]:
            yield f"step {number}: 'name' is missing: the image that it runs in"


def rule_sizes(data: Mapping[str, Any]) -> Iterator[str]:
    """At most 100 args of 4000 characters, 100 env of 32768, 100 images (validate.go)."""
    for number, step in enumerate(steps_of(data)):
        for key, length in (("args", 4000), ("env", 32768)):
            values = step.get(key) or []
            if not isinstance(values, list) or not all(isinstance(value, str) for value in values):
                yield f"step {number}: '{key}' must be a list of strings"
                continue
            if len(values) > 100:
                yield f"step {number}: {len(values)} {key}; at most 100"
            if any(len(value) > length for value in values):
                yield f"step {number}: one of {key} is longer than {length} characters"
    if len(data.get("images") or []) > 100:
        yield f"{len(data['images'])} images; at most 100"


def rule_ids(data: Mapping[str, Any]) -> Iterator[str]:
    """Ids are unique; `-` is reserved (validate.go checkBuildSteps)."""
    seen: set[str] = set()
    for number, step in enumerate(steps_of(data)):
        name = step.get("id")
        if name == "-":
            yield f"step {number}: the id '-' is reserved for the start of the build"
        if name and name in seen:
            yield f"step {number}: id '{name}' is already used by an earlier step"
        seen.add(str(name))


def rule_wait_for(data: Mapping[str, Any]) -> Iterator[str]:
    """`waitFor` names earlier steps, or `-` alone (schema: waitFor; validate.go)."""
    earlier: set[str] = set()
    for number, step in enumerate(steps_of(data)):
        wanted = step.get("waitFor") or []
        for name in wanted:
            if name == "-":
                if len(wanted) > 1:
                    yield f"step {number}: waitFor: '-' cannot be combined with ids"
            elif name not in earlier:
                yield f"step {number}: waitFor '{name}' is not the id of an earlier step{nearest(str(name), earlier)}"
        if step.get("id"):
            earlier.add(str(step["id"]))


def rule_env(data: Mapping[str, Any]) -> Iterator[str]:
    """Every entry of env is KEY=VALUE (validate.go checkEnvVars)."""
    for number, step in enumerate([*steps_of(data), data.get("options") or {}]):
        where = f"step {number}" if number < len(steps_of(data)) else "options"
        for entry in step.get("env") or []:
            if not re.match(r"[^=]+=", str(entry)):
                yield f"{where}: env {entry!r} is not KEY=VALUE"


def rule_timeouts(data: Mapping[str, Any]) -> Iterator[str]:
    """Durations; a build's is at most 24 h, a step's at most its build's (schema: timeout)."""
    total = DEFAULT_TIMEOUT
    try:
        if data.get("timeout") is not None:
            total = seconds(data["timeout"])
    except ValueError as error:
        yield f"timeout: {error}"
    if not 0 < total <= MAX_TIMEOUT:
        yield f"timeout: {total:g} s; must be more than 0 and at most {MAX_TIMEOUT:g} s"
    for number, step in enumerate(steps_of(data)):
        if step.get("timeout") is None:
            continue
        try:
            own = seconds(step["timeout"])
        except ValueError as error:
            yield f"step {number}: timeout: {error}"
            continue
        if own > total:
            yield f"step {number}: timeout of {own:g} s is longer than the build's {total:g} s"


def rule_script(data: Mapping[str, Any]) -> Iterator[str]:
    """A step with a script has neither args nor entrypoint (schema: script)."""
    for number, step in enumerate(steps_of(data)):
        if step.get("script") and (step.get("args") or step.get("entrypoint")):
            yield f"step {number}: 'script' cannot be combined with 'args' or 'entrypoint'"


def rule_volumes(data: Mapping[str, Any]) -> Iterator[str]:
    """A volume is used by at least two steps, and not mounted over what Cloud Build mounts (validate.go)."""
    users: dict[str, int] = {}
    for number, step in enumerate(steps_of(data)):
        for volume in step.get("volumes") or []:
            if (
                not isinstance(volume, dict)
                or not volume.get("name")
                or not str(volume.get("path", "")).startswith("/")
            ):
                yield f"step {number}: a volume needs a name and an absolute path"
                continue
            users[volume["name"]] = users.get(volume["name"], 0) + 1
            for taken in ("/workspace", "/builder/home", "/var/run/docker.sock", "/cloudbuild"):
                if f"{volume['path'].rstrip('/')}/".startswith(f"{taken}/"):
                    yield f"step {number}: volume path {volume['path']} is reserved by Cloud Build"
    for name, count in users.items():
        if count < 2:
            yield f"volume '{name}' is used by only one step"


def rule_dir(data: Mapping[str, Any]) -> Iterator[str]:
    """A relative `dir` does not leave /workspace (validate.go)."""
    for number, step in enumerate(steps_of(data)):
        if ".." in str(step.get("dir") or "").split("/"):
            yield f"step {number}: dir {step['dir']!r} is outside /workspace"


def rule_substitutions(data: Mapping[str, Any]) -> Iterator[str]:
    """Keys are `_[A-Z0-9_]+` (at most 100 of 100 characters, values of 4000); each is used, and each used is defined.

    MUST_MATCH, the default of submitted builds, rejects unused keys and undefined references; ALLOW_LOOSE accepts them
    (schema: substitutionOption). References to unknown built-in names are always rejected.
    """
    given = data.get("substitutions") or {}
    if len(given) > 100:
        yield f"{len(given)} substitutions; at most 100"
    for key, value in given.items():
        if not re.fullmatch(r"_[A-Z0-9_]{1,99}", str(key)):
            yield f"substitutions: '{key}' is not a name such as _NAME, in capitals"
        if not isinstance(value, str):
            yield f"substitutions: {key}: {value!r} is not a string: quote it"
        elif len(value) > 4000:
            yield f"substitutions: {key} is longer than 4000 characters"
    options = data.get("options") or {}
    referred = used(_template(data))
    if options.get("dynamicSubstitutions"):
        referred |= used(given)
    for name in sorted(referred):
        if not name.startswith("_") and name not in BUILT_IN:
            yield f"${name} is not a built-in substitution{nearest(name, BUILT_IN)}; $${name} is a shell variable"
    if options.get("substitutionOption", "MUST_MATCH") == "ALLOW_LOOSE":
        return
    automapped = options.get("automapSubstitutions") or any(step.get("automapSubstitutions") for step in steps_of(data))
    own = {name for name in referred if name.startswith("_")}
    for name in sorted(own - set(given)):
        yield f"substitution ${name} is not defined{nearest(name, given)}"
    if not automapped:
        for name in sorted(set(given) - own):
            yield f"substitution {name} is defined but never used"


RULES: tuple[Rule, ...] = (
    rule_known_keys, rule_steps, rule_sizes, rule_ids, rule_wait_for, rule_env, rule_timeouts, rule_script,
    rule_volumes, rule_dir, rule_substitutions,
)  # fmt: skip


def violations(data: Mapping[str, Any]) -> list[str]:
    """All violations of :data:`RULES` in a configuration, in the order of the rules."""
    return [violation for rule in RULES for violation in rule(data)]
