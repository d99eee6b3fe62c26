"""Read a cloudbuild.yaml, check it by the rules of Cloud Build that gcloud does not check, and substitute variables."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ruamel.yaml import YAML
from ruamel.yaml.error import MarkedYAMLError

from trainyard.cloudbuild.rules import DEFAULT_TIMEOUT, seconds, steps_of, violations
from trainyard.cloudbuild.substitutions import BUILT_IN, replace_in, resolve
from trainyard.console import UserError


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
    """A build that was checked and substituted; ``timeout`` in seconds."""

    steps: tuple[Step, ...]
    images: tuple[str, ...]
    timeout: float
    substitutions: Mapping[str, str] = field(default_factory=dict)


def read(text: str, where: str) -> dict[str, Any]:
    """A cloudbuild.yaml (or .json, which is YAML) as plain data.

    Raises:
        UserError: it is not YAML, or not a mapping.
    """
    try:
        data = YAML(typ="safe", pure=True).load(text)
    except MarkedYAMLError as error:
        line = f":{error.problem_mark.line + 1}" if error.problem_mark else ""
        raise UserError(f"{where}{line}: not valid YAML: {error.problem or error.context}") from None
    if not isinstance(data, dict):
        raise UserError(f"{where}: not a mapping with the key 'steps'")
    return data


def load(
    data: Mapping[str, Any], *, where: str, given: Mapping[str, str] | None = None, built_in: Mapping[str, str]
) -> Build:
    """Check a configuration and substitute its variables.

    Args:
        data: what :func:`read` returned.
        where: name of the file, for messages.
        given: the user's substitutions, which override those of the file.
        built_in: values of :data:`BUILT_IN` names; missing ones are empty.
    Raises:
        UserError: it violates a rule; the message gives the first violation.
    """
    merged = dict(data) | {"substitutions": dict(data.get("substitutions") or {}) | dict(given or {})}
    found = violations(merged)
    if found:
        more = f" (and {len(found) - 1} more)" if len(found) > 1 else ""
        raise UserError(f"{where}: {found[0]}{more}")
    return substituted(merged, built_in)


def substituted(data: Mapping[str, Any], built_in: Mapping[str, str]) -> Build:
    """A build from a valid configuration, with its variables substituted.

    Args:
        built_in: values of :data:`BUILT_IN` names; missing ones are empty.
    Raises:
        UserError: substitutions refer to each other in a cycle, or have a parameter expansion.
    """
    options = data.get("options") or {}
    values = resolve(
        data.get("substitutions") or {},
        {name: built_in.get(name, "") for name in BUILT_IN},
        dynamic=bool(options.get("dynamicSubstitutions")),
    )
    numbers = {str(step["id"]): number for number, step in enumerate(steps_of(data)) if step.get("id")}
    steps = []
    for number, raw in enumerate(steps_of(data)):
        step = replace_in(raw, values)
        wanted = raw.get("waitFor") or []
        before = frozenset(range(number)) if not wanted else frozenset(numbers[name] for name in wanted if name != "-")
        environment = [*replace_in(options.get("env") or [], values), *(step.get("env") or [])]
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
    return Build(tuple(steps), tuple(replace_in(data.get("images") or [], values)), timeout, values)
