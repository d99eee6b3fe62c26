"""A cloudbuild.yaml as Cloud Build understands it: reading, the server's documented rules, substitutions.

The schema is the `Build` resource of the Cloud Build API v1 (cloud.google.com/build/docs/build-config-file-schema).
Rules that the server checks and gcloud does not are functions here, each with its source; the best written record of
them is GoogleCloudPlatform/cloud-build-local (validate/validate.go, subst/subst.go), archived in 2022: limits may have
grown since.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from ruamel.yaml import YAML
from ruamel.yaml.error import MarkedYAMLError

from scripts.cli import UserError, nearest

#: Keys of a step that are carried out here; others are refused, since leaving them out would be another build.
STEP_KEYS = ("name", "id", "args", "entrypoint", "script", "env", "dir", "waitFor", "timeout", "volumes",
             "allowFailure", "allowExitCodes", "automapSubstitutions")  # fmt: skip
BUILD_KEYS = ("steps", "images", "substitutions", "timeout", "options", "tags", "serviceAccount", "logsBucket",
              "queueTtl")  # fmt: skip

#: Substitutions that Cloud Build fills in itself; those of triggers are empty in a submitted build.
BUILT_IN = ("PROJECT_ID", "PROJECT_NUMBER", "BUILD_ID", "LOCATION", "TRIGGER_NAME", "TRIGGER_BUILD_CONFIG_PATH",
            "COMMIT_SHA", "REVISION_ID", "SHORT_SHA", "REPO_NAME", "REPO_FULL_NAME", "BRANCH_NAME", "TAG_NAME",
            "REF_NAME", "SERVICE_ACCOUNT", "SERVICE_ACCOUNT_EMAIL")  # fmt: skip

#: Seconds a build may take that says nothing of it, and at most (build-config-file-schema: timeout).
DEFAULT_TIMEOUT, MAX_TIMEOUT = 3600.0, 24 * 3600.0

_KEY = r"[A-Z_][A-Z0-9_]*"
#: `$$`, `$NAME`, `${NAME}`; `${NAME<operator>...}` is bash's parameter expansion (dynamic substitutions know some).
_REFERENCE = re.compile(rf"\$\$|\$({_KEY})|\$\{{({_KEY})([^}}]*)\}}")


@dataclass(frozen=True)
class Step:
    """One step, after substitution.

    Attributes:
        number: position in the file, from 0; ``id`` may be empty.
        wait_for: numbers of the steps that must have ended before.
        timeout: seconds, or None for none of its own.
        volumes: (name, path) pairs.
    """

    number: int
    id: str
    name: str
    args: tuple[str, ...]
    entrypoint: str
    script: str
    env: tuple[str, ...]
    dir: str
    wait_for: frozenset[int]
    timeout: float | None
    volumes: tuple[tuple[str, str], ...]
    allow_failure: bool
    allow_exit_codes: frozenset[int]

    @property
    def title(self) -> str:
        """How Cloud Build's log names it."""
        return f'Step #{self.number} - "{self.id}"' if self.id else f"Step #{self.number}"


@dataclass(frozen=True)
class Build:
    """A build that is ready to run; ``timeout`` in seconds."""

    steps: tuple[Step, ...]
    images: tuple[str, ...]
    timeout: float
    substitutions: Mapping[str, str] = field(default_factory=dict)


def read(text: str, where: str) -> dict[str, Any]:
    """A cloudbuild.yaml (or .json, which is YAML) as plain data.

    Raises:
        UserError: not YAML, or not a mapping at the top.
    """
    try:
        data = YAML(typ="safe", pure=True).load(text)
    except MarkedYAMLError as error:
        line = f":{error.problem_mark.line + 1}" if error.problem_mark else ""
        raise UserError(f"{where}{line}: not valid YAML: {error.problem or error.context}") from None
    if not isinstance(data, dict):
        raise UserError(f"{where}: expected 'steps:' and other keys at the top")
    return data


def seconds(text: object) -> float:
    """Seconds in a google.protobuf.Duration as JSON has it: ``600s``, ``0.5s``.

    Raises:
        ValueError: it is not one.
    """
    match = re.fullmatch(r"(\d+(?:\.\d{1,9})?)s", str(text))
    if not match:
        raise ValueError(f"{text!r} is not a duration: write seconds with an 's', as in '600s'")
    return float(match[1])


def strings(node: object) -> Iterator[str]:
    """Every text in a part of a configuration."""
    if isinstance(node, str):
        yield node
    elif isinstance(node, dict):
        for value in node.values():
            yield from strings(value)
    elif isinstance(node, list):
        for value in node:
            yield from strings(value)


def _template(data: Mapping[str, Any]) -> dict[str, Any]:
    """The parts in which substitutions are replaced: all but ``script``, whose ``$`` are the shell's, and the options.

    run-bash-scripts: "Scripts don't support substitutions directly, but they support environment variables."
    """
    found = {key: data.get(key) for key in ("images", "tags", "logsBucket", "serviceAccount") if data.get(key)}
    found["steps"] = [{k: v for k, v in step.items() if k != "script"} for step in _steps(data)]
    found["options"] = {"env": (data.get("options") or {}).get("env") or []}
    return found


def _steps(data: Mapping[str, Any]) -> list[dict[str, Any]]:
    steps = data.get("steps") or []
    return [step for step in steps if isinstance(step, dict)] if isinstance(steps, list) else []


def used(node: object) -> set[str]:
    """Names of the substitutions that a part of a configuration refers to."""
    names = set()
    for text in strings(node):
        for match in _REFERENCE.finditer(text):
            names |= {match[1] or match[2]} - {None}
    return names


# --- the server's rules: each yields what is wrong, nothing if all is well -------------------------------------------

Rule = Callable[[Mapping[str, Any]], Iterator[str]]


def rule_known_keys(data: Mapping[str, Any]) -> Iterator[str]:
    """Only what is understood here. gcloud refuses unknown keys too (`.steps[0].argz: unused`)."""
    for key in data:
        if key not in BUILD_KEYS:
            yield f"unknown or unsupported key '{key}'{nearest(str(key), BUILD_KEYS)}"
    for number, step in enumerate(_steps(data)):
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
            yield f"step {number}: 'name' is missing: the image it runs in"


def rule_sizes(data: Mapping[str, Any]) -> Iterator[str]:
    """At most 100 args of 4000 characters, 100 env of 32768, 100 images (validate.go)."""
    for number, step in enumerate(_steps(data)):
        for key, length in (("args", 4000), ("env", 32768)):
            values = step.get(key) or []
            if not isinstance(values, list) or not all(isinstance(value, str) for value in values):
                yield f"step {number}: '{key}' must be a list of texts"
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
    for number, step in enumerate(_steps(data)):
        name = step.get("id")
        if name == "-":
            yield f"step {number}: '-' is no id: it stands for the build's start"
        if name and name in seen:
            yield f"step {number}: id '{name}' is taken by an earlier step"
        seen.add(str(name))


def rule_wait_for(data: Mapping[str, Any]) -> Iterator[str]:
    """`waitFor` names earlier steps, or `-` alone (build-config-file-schema: waitFor; validate.go)."""
    earlier: set[str] = set()
    for number, step in enumerate(_steps(data)):
        wanted = step.get("waitFor") or []
        for name in wanted:
            if name == "-":
                if len(wanted) > 1:
                    yield f"step {number}: waitFor: '-' stands alone"
            elif name not in earlier:
                yield f"step {number}: waitFor '{name}' is no earlier step{nearest(str(name), earlier)}"
        if step.get("id"):
            earlier.add(str(step["id"]))


def rule_env(data: Mapping[str, Any]) -> Iterator[str]:
    """Every entry of env is KEY=VALUE (validate.go checkEnvVars)."""
    for number, step in enumerate([*_steps(data), data.get("options") or {}]):
        where = f"step {number}" if number < len(_steps(data)) else "options"
        for entry in step.get("env") or []:
            if not re.match(r"[^=]+=", str(entry)):
                yield f"{where}: env {entry!r} is not KEY=VALUE"


def rule_timeouts(data: Mapping[str, Any]) -> Iterator[str]:
    """Durations; a build's is at most 24 h, a step's at most its build's (build-config-file-schema: timeout)."""
    total = DEFAULT_TIMEOUT
    try:
        if data.get("timeout") is not None:
            total = seconds(data["timeout"])
    except ValueError as error:
        yield f"timeout: {error}"
    if not 0 < total <= MAX_TIMEOUT:
        yield f"timeout: {total:g} s; more than 0 and at most {MAX_TIMEOUT:g} s"
    for number, step in enumerate(_steps(data)):
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
    """A step with a script has neither args nor entrypoint (build-config-file-schema: script)."""
    for number, step in enumerate(_steps(data)):
        if step.get("script") and (step.get("args") or step.get("entrypoint")):
            yield f"step {number}: 'script' goes without 'args' and 'entrypoint'"


def rule_volumes(data: Mapping[str, Any]) -> Iterator[str]:
    """A volume is used by at least two steps, and not mounted over what Cloud Build mounts (validate.go)."""
    users: dict[str, int] = {}
    for number, step in enumerate(_steps(data)):
        for volume in step.get("volumes") or []:
            if (
                not isinstance(volume, dict)
                or not volume.get("name")
                or not str(volume.get("path", "")).startswith("/")
            ):
                yield f"step {number}: a volume has a name and an absolute path"
                continue
            users[volume["name"]] = users.get(volume["name"], 0) + 1
            for taken in ("/workspace", "/builder/home", "/var/run/docker.sock", "/cloudbuild"):
                if f"{volume['path'].rstrip('/')}/".startswith(f"{taken}/"):
                    yield f"step {number}: volume path {volume['path']} is Cloud Build's own"
    for name, count in users.items():
        if count < 2:
            yield f"volume '{name}' is used by one step only"


def rule_dir(data: Mapping[str, Any]) -> Iterator[str]:
    """A relative `dir` does not leave /workspace (validate.go)."""
    for number, step in enumerate(_steps(data)):
        if ".." in str(step.get("dir") or "").split("/"):
            yield f"step {number}: dir {step['dir']!r} leaves /workspace"


def rule_substitutions(data: Mapping[str, Any]) -> Iterator[str]:
    """Keys are `_[A-Z0-9_]+` (at most 100 of 100 characters, values of 4000); each is used, and each used is defined.

    MUST_MATCH, the default of submitted builds, is about both; ALLOW_LOOSE lets unused keys and undefined references
    pass (build-config-file-schema: substitutionOption). A reference to no built-in name is refused either way.
    """
    given = data.get("substitutions") or {}
    if len(given) > 100:
        yield f"{len(given)} substitutions; at most 100"
    for key, value in given.items():
        if not re.fullmatch(r"_[A-Z0-9_]{1,99}", str(key)):
            yield f"substitutions: '{key}' is not a name like _NAME, in capitals"
        if not isinstance(value, str):
            yield f"substitutions: {key}: {value!r} is no text: put it in quotes"
        elif len(value) > 4000:
            yield f"substitutions: {key} is longer than 4000 characters"
    options = data.get("options") or {}
    referred = used(_template(data))
    if options.get("dynamicSubstitutions"):
        referred |= used(given)
    for name in sorted(referred):
        if not name.startswith("_") and name not in BUILT_IN:
            yield f"${name} is no built-in substitution{nearest(name, BUILT_IN)}; write $${name} for a shell's own"
    if options.get("substitutionOption", "MUST_MATCH") == "ALLOW_LOOSE":
        return
    automapped = options.get("automapSubstitutions") or any(step.get("automapSubstitutions") for step in _steps(data))
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


def problems(data: Mapping[str, Any]) -> list[str]:
    """Everything the server would refuse about a configuration, in the order of :data:`RULES`."""
    return [problem for rule in RULES for problem in rule(data)]


# --- substitution ----------------------------------------------------------------------------------------------------


def substitute(text: str, values: Mapping[str, str]) -> str:
    """``text`` with ``$NAME`` and ``${NAME}`` replaced and ``$$`` made ``$``; undefined names are empty.

    Raises:
        UserError: a parameter expansion such as ``${NAME:-x}``, which Cloud Build has and this does not.
    """

    def one(match: re.Match[str]) -> str:
        if match[0] == "$$":
            return "$"
        if match[3]:
            raise UserError(f"{match[0]}: parameter expansions are not supported here; use ${{{match[2]}}}")
        return values.get(match[1] or match[2], "")

    return _REFERENCE.sub(one, text)


def resolve(given: Mapping[str, str], built_in: Mapping[str, str], *, dynamic: bool) -> dict[str, str]:
    """The values of all substitutions.

    Args:
        given: the file's, overridden by the user's.
        dynamic: whether values may refer to other substitutions.
    Raises:
        UserError: they refer to one another in a circle.
    """
    values = dict(built_in) | dict(given)
    if not dynamic:
        return values
    done: dict[str, str] = dict(built_in)

    def value(name: str, above: tuple[str, ...]) -> str:
        if name in done:
            return done[name]
        if name in above:
            raise UserError(f"substitutions refer to one another in a circle: {' -> '.join((*above, name))}")
        inner = {key: value(key, (*above, name)) for key in used(values.get(name, "")) if key in values}
        done[name] = substitute(values[name], inner)
        return done[name]

    return {name: value(name, ()) for name in values}


def _replaced(node: Any, values: Mapping[str, str]) -> Any:
    if isinstance(node, str):
        return substitute(node, values)
    if isinstance(node, dict):
        return {key: entry if key == "script" else _replaced(entry, values) for key, entry in node.items()}
    if isinstance(node, list):
        return [_replaced(entry, values) for entry in node]
    return node


def load(
    data: Mapping[str, Any], *, where: str, given: Mapping[str, str] | None = None, built_in: Mapping[str, str]
) -> Build:
    """A build, checked and with its substitutions made.

    Args:
        data: what :func:`read` gave, or a build's JSON.
        where: its name in messages.
        given: the user's substitutions, which go before the file's.
        built_in: values of :data:`BUILT_IN` names; those left out are empty.
    Raises:
        UserError: the first thing the server would refuse.
    """
    merged = dict(data) | {"substitutions": dict(data.get("substitutions") or {}) | dict(given or {})}
    wrong = problems(merged)
    if wrong:
        more = f" (and {len(wrong) - 1} more)" if len(wrong) > 1 else ""
        raise UserError(f"{where}: {wrong[0]}{more}")
    options = data.get("options") or {}
    values = resolve(
        merged["substitutions"],
        {name: built_in.get(name, "") for name in BUILT_IN},
        dynamic=bool(options.get("dynamicSubstitutions")),
    )
    numbers = {str(step["id"]): number for number, step in enumerate(_steps(data)) if step.get("id")}
    steps = []
    for number, raw in enumerate(_steps(data)):
        step = _replaced(raw, values)
        wanted = raw.get("waitFor") or []
        before = frozenset(range(number)) if not wanted else frozenset(numbers[name] for name in wanted if name != "-")
        environment = [*_replaced(options.get("env") or [], values), *(step.get("env") or [])]
        if raw.get("automapSubstitutions", options.get("automapSubstitutions")):
            environment = [f"{name}={value}" for name, value in values.items()] + environment
        steps.append(
            Step(
                number=number,
                id=step.get("id") or "",
                name=step["name"],
                args=tuple(step.get("args") or ()),
                entrypoint=step.get("entrypoint") or "",
                script=step.get("script") or "",
                env=tuple(environment),
                dir=step.get("dir") or "",
                wait_for=before,
                timeout=seconds(step["timeout"]) if step.get("timeout") else None,
                volumes=tuple((volume["name"], volume["path"]) for volume in step.get("volumes") or []),
                allow_failure=bool(step.get("allowFailure")),
                allow_exit_codes=frozenset(int(code) for code in step.get("allowExitCodes") or []),
            )
        )
    timeout = seconds(data["timeout"]) if data.get("timeout") else DEFAULT_TIMEOUT
    return Build(tuple(steps), tuple(_replaced(data.get("images") or [], values)), timeout, values)
