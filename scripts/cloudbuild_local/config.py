"""Read a cloudbuild.yaml as gcloud does, check it by the rules of gcloud and Cloud Build, and substitute variables."""

from __future__ import annotations

import logging
import os
import re
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ruamel.yaml import YAML
from ruamel.yaml.error import MarkedYAMLError, YAMLError
from ruamel.yaml.nodes import MappingNode, Node, SequenceNode

from cloudbuild_local.normalization import camel_case, normalize
from cloudbuild_local.rules import (
    DEFAULT_TIMEOUT,
    images_of,
    seconds,
    unsupported,
    violations,
    violations_after_substitution,
    without_effect,
)
from cloudbuild_local.substitutions import BUILT_IN, not_given, replace_in, resolve, used
from trainyard.common.errors import UserError, one_line
from trainyard.spec import yaml_source

logger = logging.getLogger(__name__)

#: Fields of a step in which substitutions are replaced (subst.go: SubstituteBuildFields).
_SUBSTITUTED = ("name", "args", "env", "dir", "entrypoint")


@dataclass(frozen=True)
class Step:
    """A step after substitution.

    Attributes:
        number: index of the step, from 0.
        id: empty if it has none.
        wait_for: numbers of the steps that must have passed before it starts.
        timeout: in seconds; None for no timeout.
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
        """Its name in Cloud Build's log."""
        return f'Step #{self.number} - "{self.id}"' if self.id else f"Step #{self.number}"


@dataclass(frozen=True)
class Build:
    """A build that was checked and substituted.

    Attributes:
        timeout: in seconds.
        without_effect: fields that have no effect in a local build.
    """

    steps: tuple[Step, ...]
    images: tuple[str, ...]
    timeout: float
    substitutions: Mapping[str, str] = field(default_factory=dict)
    without_effect: tuple[str, ...] = ()


class Content(dict[Any, Any]):
    """The data of a file, which knows its text."""

    text = ""


def _below(node: Node, word: str) -> tuple[Node, int] | None:
    """Return the part of a node at a key or position, and its line; of a list, that of the first entry with the key."""
    if isinstance(node, SequenceNode):
        if word.isdecimal():
            return next(((one, one.start_mark.line + 1) for one in node.value[int(word) :]), None)
        return next(filter(None, (_below(one, word) for one in node.value if isinstance(one, MappingNode))), None)
    for key, value in node.value if isinstance(node, MappingNode) else ():
        if word in (key.value, camel_case(str(key.value))):
            return value, key.start_mark.line + 1
    return None


def line_of(data: object, message: str) -> int:
    """Return the line that a message about the data of a file is about; 1 if it is about all of it.

    Words that are keys lead to a part, as in ``step 3: env 'A' ...``; a text in quotes, to its line in that part.
    """
    text = getattr(data, "text", "")
    lines, found, end = text.splitlines(), 1, None
    node = YAML(typ="safe", pure=True).compose(text)
    for word in re.findall(r"'[^']*'|\$?\w+", re.sub(r"^step (\d+)", r"steps \1", message)):
        if word[0] in "'$":
            name = re.escape(word.strip("'$"))
            pattern = rf"(?<!\$)\$\{{?#?{name}\b" if word[0] == "$" else rf"(?<!\w){name}(?!\w)"
            places = range(0 if word[0] == "$" else found - 1, len(lines) if word[0] == "$" else end or len(lines))
            if (number := next((one for one in places if re.search(pattern, lines[one])), None)) is not None:
                return number + 1
        # One value stands for a list of one.
        elif node and (below := _below(node, word) or _below(node, f"{word}s")):
            (node, found), end = below, max(below[0].end_mark.line, below[1])
    return found


def read(text: str, where: str) -> dict[Any, Any]:
    """A cloudbuild.yaml (or .json, which is YAML) as plain data.

    It is read as YAML 1.1, as gcloud does: `yes` is true, and 010 is 8. Of a key that is written twice, the first value
    counts, as in gcloud, which warns too.

    Raises:
        UserError: it is not YAML, or not a mapping.
    """
    yaml = yaml_source.guarded(YAML(typ="safe", pure=True), where)
    yaml.version = (1, 1)
    yaml.allow_duplicate_keys = None  # type: ignore[assignment]  # with a warning; True is without
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            data = yaml.load(text)
    except MarkedYAMLError as error:
        line = f":{error.problem_mark.line + 1}" if error.problem_mark else ""
        raise UserError(f"{where}{line}: not valid YAML: {error.problem or error.context}") from None
    except RecursionError:
        raise UserError(f"{where}: nested too deeply") from None
    except (YAMLError, ValueError, TypeError, LookupError, AttributeError) as error:
        # The library raises these too: for a date such as 2020-13-45, an anchor of a key, a tag of another type.
        raise UserError(f"{where}: not valid YAML: {' '.join(str(error).split())}") from None
    for key in re.findall(r'found duplicate key "(.*?)" with', "".join(str(warning.message) for warning in caught)):
        logger.info(f"{where}: the key '{key}' is written twice; the first value is used")
    if not isinstance(data, dict):
        raise UserError(f"{where}: not a mapping with the key 'steps'")
    content = Content(data)
    content.text = text
    return content


def read_file(path: Path) -> dict[Any, Any]:
    """Return a configuration as plain data.

    Raises:
        UserError: there is no such file, or it is not YAML.
    """
    if not os.path.lexists(path):
        raise UserError(f"no file {path}: give the path of a cloudbuild.yaml")
    return read(yaml_source.text(path), yaml_source.relative(path))


def _refuse(where: str, data: Mapping[Any, Any], found: Sequence[str]) -> None:
    """Raise the first of some problems of the data of a file.

    Raises:
        UserError: there is one.
    """
    if found:
        more = f" (and {len(found) - 1} more)" if len(found) > 1 else ""
        raise UserError(f"{where}:{line_of(data, found[0])}: {one_line(found[0])}{more}")


def _message(data: Mapping[Any, Any]) -> tuple[dict[str, Any], list[str]]:
    """The resource ``Build`` for a file, and everything for which gcloud refuses the file."""
    try:
        found, errors = normalize(data)
    except RecursionError:
        return {}, ["nested too deeply"]
    for name in found.get("substitutions") or {}:
        # A user's value for a built-in one is allowed on the command line, not in the file.
        if not errors and not re.fullmatch(r"_[A-Z0-9_]+", name):
            errors.append(f"substitutions: '{name}' is not a name such as _NAME, in capitals")
    if "source" in found:
        errors.append("source: gcloud sets it for the files that it uploads; remove it")
    if not found.get("steps"):
        errors.append("no steps")
    return found, errors


def message(text: str, where: str) -> dict[str, Any]:
    """The resource ``Build`` that gcloud sends for a cloudbuild.yaml.

    Raises:
        UserError: gcloud refuses the file; the message gives the first reason.
    """
    data = read(text, where)
    found, errors = _message(data)
    _refuse(where, data, errors)
    return found


@dataclass(frozen=True)
class Judgement:
    """What is wrong with a configuration.

    Attributes:
        body: the resource ``Build``, with the given substitutions.
        errors: for which gcloud or Cloud Build refuses it.
        unsupported: fields that the local executor does not support.
        without_effect: fields that have no effect in a local build.
        places: the line of each error.
    """

    body: dict[str, Any]
    errors: list[str]
    unsupported: list[str]
    without_effect: list[str]
    places: list[int]

    def _located(self, where: str) -> list[str]:
        """The errors after file and line."""
        return [f"{where}:{line}: {error}" for line, error in zip(self.places, self.errors, strict=True)]

    def lines(self, where: str) -> Iterator[str]:
        """The judgement for people, a line each; ``where`` is the name of the file."""
        yield from self._located(where)
        if not self.errors:
            yield f"{where}: valid, {len(self.body['steps'])} steps"
        yield from (f"{where}: note: {field} is not supported by the local executor" for field in self.unsupported)
        if self.without_effect:
            yield f"{where}: note: without effect in a local build: {', '.join(self.without_effect)}"

    def facts(self, where: str) -> dict[str, Any]:
        """The judgement for programs."""
        return {
            "file": where,
            "errors": self._located(where),
            "unsupported": self.unsupported,
            "withoutEffect": self.without_effect,
        }


#: Options of a trigger's builds, which a file cannot override (discovery document: BuildOptions).
_TRIGGERED = {"substitutionOption": "ALLOW_LOOSE", "dynamicSubstitutions": True}


def judge(
    data: Mapping[Any, Any],
    *,
    given: Mapping[str, str] | None = None,
    built_in: Mapping[str, str],
    trigger: bool = False,
) -> Judgement:
    """Check a configuration by the rules of gcloud and Cloud Build.

    Args:
        data: what :func:`read` returned.
        given: the user's substitutions, which override those of the file.
        built_in: values of :data:`BUILT_IN` names; missing ones are empty.
        trigger: whether it is for a trigger, which may give any substitution: those without a value are not known.
    """
    body, errors = _message(data)
    if not errors:
        body["substitutions"] = body.get("substitutions", {}) | dict(given or {})
        body |= {"options": body.get("options", {}) | _TRIGGERED} if trigger else {}
        errors = violations(body)
    if not errors:
        try:
            values = not_given(body) if trigger else {}
            build = substituted(body | {"substitutions": body["substitutions"] | values}, built_in)
            tags = replace_in(body.get("tags") or [], build.substitutions, dynamic=_is_dynamic(body))
            errors = violations_after_substitution([step.name for step in build.steps], list(build.images), tags)
            errors = [error + _empty_in(error, body, build.substitutions) for error in errors]
        except UserError as error:
            errors = [str(error)]
    places = [line_of(data, error) for error in errors]
    return Judgement(body, [one_line(error) for error in errors], unsupported(body), without_effect(body), places)


def _empty_in(error: str, body: Mapping[str, Any], values: Mapping[str, str]) -> str:
    """Return which empty substitutions an error about the name of an image is due to; empty if none is."""
    for written in [*(str(step["name"]) for step in body["steps"]), *images_of(body)]:
        empty = [f"${name}" for name in sorted(used(written)) if not values.get(name)]
        if empty and repr(replace_in(written, values, dynamic=_is_dynamic(body))) in error:
            return f"; {written} is this because {', '.join(empty)} is empty"
    return ""


def built_in(project: str, build_id: str) -> dict[str, str]:
    """Return the built-in substitutions of a submitted build; those of triggers, such as the commit, are empty."""
    return {"PROJECT_ID": project, "PROJECT_NUMBER": "0", "BUILD_ID": build_id, "LOCATION": "local"}


def check(path: Path, *, substitutions: Mapping[str, str], project: str, trigger: bool = False) -> Judgement:
    """Check a configuration by the rules of gcloud and Cloud Build, without a Docker engine.

    The file may be one for a trigger, which sets the built-in substitutions that are empty in a submitted build: names
    of images are checked as if each had a value.

    Args:
        substitutions: they override those of the configuration.
        project: value of ``$PROJECT_ID``.
        trigger: see :func:`judge`.
    Raises:
        UserError: there is no such file, or it is not YAML.
    """
    values = dict.fromkeys(BUILT_IN, "value") | {"REPO_FULL_NAME": "owner/name"} | built_in(project, "local-check")
    return judge(read_file(path), given=substitutions, built_in=values, trigger=trigger)


def load(
    data: Mapping[Any, Any],
    *,
    where: str,
    given: Mapping[str, str] | None = None,
    built_in: Mapping[str, str],
    trigger: bool = False,
) -> Build:
    """Check a configuration for a local build, and substitute its variables.

    Args:
        data: what :func:`read` returned.
        where: name of the file, for messages.
        given: the user's substitutions, which override those of the file.
        built_in: values of :data:`BUILT_IN` names; missing ones are empty.
        trigger: see :func:`judge`.
    Raises:
        UserError: it violates a rule, or has a field that the local executor does not support; the message gives the
            first violation.
    """
    found = judge(data, given=given, built_in=built_in, trigger=trigger)
    _refuse(where, data, found.errors)
    _refuse(where, data, [f"{field} is not supported by the local executor" for field in found.unsupported])
    return substituted(found.body, built_in)


def _is_dynamic(body: Mapping[str, Any]) -> bool:
    return bool((body.get("options") or {}).get("dynamicSubstitutions"))


def substituted(body: Mapping[str, Any], built_in: Mapping[str, str]) -> Build:
    """A build from a valid resource ``Build``, with its variables substituted.

    Args:
        built_in: values of :data:`BUILT_IN` names; missing ones are empty.
    Raises:
        UserError: substitutions refer to each other in a cycle, or an expansion requires a value that is not set.
    """
    options = body.get("options") or {}
    dynamic = _is_dynamic(body)
    values = resolve(
        body.get("substitutions") or {}, {name: built_in.get(name, "") for name in BUILT_IN}, dynamic=dynamic
    )
    all_steps = body["steps"]
    numbers = {step["id"]: number for number, step in enumerate(all_steps) if step.get("id")}
    steps = []
    for number, raw in enumerate(all_steps):
        step = raw | replace_in({key: raw[key] for key in _SUBSTITUTED if key in raw}, values, dynamic=dynamic)
        wanted = raw.get("waitFor") or []
        before = frozenset(range(number)) if not wanted else frozenset(numbers[name] for name in wanted if name != "-")
        environment = [*replace_in(options.get("env") or [], values, dynamic=dynamic), *(step.get("env") or [])]
        if raw.get("automapSubstitutions", options.get("automapSubstitutions")):
            environment = [f"{name}={value}" for name, value in values.items()] + environment
        volumes = [*(options.get("volumes") or []), *(step.get("volumes") or [])]
        steps.append(
            Step(
                number=number,
                id=step.get("id") or "",
                name=step["name"],
                args=tuple(step.get("args") or ()),
                entrypoint=step.get("entrypoint") or "",
                script=step.get("script") or "",
                env=tuple(_last_of_each(environment)),
                dir=step.get("dir") or "",
                wait_for=before,
                timeout=seconds(step["timeout"]) if step.get("timeout") else None,
                volumes=tuple((volume["name"], volume["path"]) for volume in volumes),
                allow_failure=bool(step.get("allowFailure")),
                allow_exit_codes=frozenset(int(code) for code in step.get("allowExitCodes") or []),
            )
        )
    timeout = (seconds(body["timeout"]) if body.get("timeout") else 0) or DEFAULT_TIMEOUT
    images = tuple(replace_in(images_of(body), values, dynamic=dynamic))
    return Build(tuple(steps), images, timeout, values, tuple(without_effect(body)))


def _last_of_each(environment: Sequence[str]) -> list[str]:
    """Of the entries of each variable the last: a step's env overrides that of the options."""
    return list({entry.partition("=")[0]: entry for entry in environment}.values())
