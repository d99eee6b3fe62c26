"""The checks that need no engine: specs, locks and advisories, generated files, style, types, workflows."""

from __future__ import annotations

import datetime
import itertools
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

from trainyard.common.installation import checkout
from trainyard.lint import waivers
from trainyard.project import generated
from trainyard.release import audit, pipelines, sources
from trainyard.spec import matrix
from trainyard.spec.model import Spec, catalogue, each_platform, load, relative, targets

#: Rules of hadolint that are not ShellCheck's, and that the programs need not keep: what they install is pinned by
#: hashes, or cannot be pinned, pip's cache is mounted, and they set pipefail.
_OF_DOCKERFILES = ("DL3008", "DL3013", "DL3042", "DL4006")


def checks(commands: Any, *, ends: bool = False) -> dict[str, Callable[[], list[str]]]:
    """Return the name of each check -> a function that returns its findings, a line each.

    Args:
        commands: the group of all commands, which a generated page describes.
        ends: find targets that are past their last day; that depends on the date.
    Raises:
        UserError: the package does not run from a checkout, or a spec cannot be read.
    """
    root = checkout("'trainyard dev check'")
    specs = [*map(load, targets()), *generated.examples()]
    return {
        "locks": partial(_locks, specs),
        "generated files": partial(_generated, commands),
        "matrix": partial(_matrix, specs),
        "advisories": partial(_advisories, specs),
        "shell programs": partial(_shell_programs, root),
        **({"ends": lambda: past(waivers.today())} if ends else {}),
        **{name: partial(_run, root, command) for name, command in programs(root, commands).items()},
    }


def _locks(specs: list[Spec]) -> list[str]:
    for spec in specs:
        if spec.version_known:
            spec.locked()
    return [
        f"{relative(spec.lock_file)}: not the framework of {relative(spec.framework_of)}: run '{spec.command('lock')}'"
        for spec in specs
        if spec.framework_of and not _same_framework(spec, load(str(spec.framework_of), spec.arch))
    ]


def _matrix(specs: list[Spec]) -> list[str]:
    """Return a line for each release, base, Python and CUDA of an image that images/matrix.yaml does not have."""
    known = matrix.matrix()
    lines = []
    for spec in itertools.chain.from_iterable(map(each_platform, specs)):
        name = f"{spec.framework.name} {spec.version}"
        released = matrix.release(spec.framework.name, spec.version)
        has = {
            name: spec.nightly or not spec.version_known or released is not None,
            f"base {spec.base}": spec.base in known.bases,
            f"Python {spec.python_version}": spec.python_version in known.python.versions,
        }
        if released and not spec.nightly:
            row = released[1]
            has[f"{name} for Python {spec.python_version}"] = spec.python_version in row.pythons(spec.arch)
            if spec.accelerator == "nvidia":
                majors, installed = (
                    {cuda.partition(".")[0] for cuda in versions} for versions in (row.cuda, spec.cuda)
                )
                has |= {f"{name} with CUDA {major}": major in majors for major in installed}
        lines += [f"{relative(matrix.FILE)}: no {what}, which {spec.target} has" for what, ok in has.items() if not ok]
    return list(dict.fromkeys(lines))


def _same_framework(spec: Spec, parent: Spec) -> bool:
    return (spec.locked().framework, spec.locked().base) == (parent.locked().framework, parent.locked().base)


def _generated(commands: Any) -> list[str]:
    command = "trainyard dev render"
    return [f"{relative(path)}: out of date: run '{command}' and commit it" for path in generated.drift(commands)]


def _advisories(specs: list[Spec]) -> list[str]:
    pins = {spec.target: sources.pins(spec) for spec in specs}
    failing = [finding for finding in audit.offline(pins) if finding.fails]
    return [f"{finding}: update the package, or add a waiver to images/waivers.yaml" for finding in failing]


def _shell_programs(root: Path) -> list[str]:
    """Return what ShellCheck finds in templates/steps: hadolint has it, for what a RUN instruction contains."""
    with tempfile.TemporaryDirectory() as folder:
        copies = []
        for path in sorted(root.glob("templates/steps/**/*.sh")):
            copy = Path(folder, path.relative_to(root))
            copy.parent.mkdir(parents=True, exist_ok=True)
            text = path.read_text(encoding="utf-8")
            copy.write_text(
                f'FROM scratch\nSHELL ["/bin/bash", "-c"]\nRUN <<\'SHELL\'\n{text}SHELL\n', encoding="utf-8"
            )
            copies.append(str(copy.relative_to(folder)))
        ignored = [f"--ignore={rule}" for rule in _OF_DOCKERFILES]
        return _run(Path(folder), [_tool("hadolint"), *ignored, *copies])


def programs(root: Path, commands: Any) -> dict[str, list[str]]:
    """Return the name of each check by another program -> its command, to be run in ``root``, the checkout."""
    dockerfiles = [relative(path) for path in generated.rendered(commands) if path.name.startswith("Dockerfile")]
    dockerfiles += [
        "scripts/trainyard/builder/Dockerfile",
        "templates/Dockerfile.backends",
        "tests/fakes/worker/Dockerfile",
    ]
    updates = relative(pipelines.UPDATES)
    workflows = [relative(path) for path in sorted(root.glob(".github/workflows/*.yml"))] + [f"{updates}/updates.yml"]
    schema = [_tool("check-jsonschema"), "--quiet", "--builtin-schema"]
    return {
        "mypy": [_tool("mypy"), "--no-error-summary"],  # the longest first
        "hadolint": [_tool("hadolint"), *dockerfiles],
        "ruff check": [_tool("ruff"), "check", "--quiet", "--output-format=concise"],
        "ruff format": [_tool("ruff"), "format", "--check", "--quiet"],
        "workflow schema": [*schema, "vendor.github-workflows", *workflows],
        "Dependabot schema": [*schema, "vendor.dependabot", ".github/dependabot.yml", f"{updates}/dependabot.yml"],
        "Renovate schema": [*schema, "vendor.renovate", f"{updates}/renovate.json"],
        "zizmor": [_tool("zizmor"), "--offline", "--quiet", "--no-progress", ".github", f"{updates}/updates.yml"],
    }


def _tool(name: str) -> str:
    """A program of this project's environment."""
    installed = Path(sys.executable).parent / name
    return str(installed) if installed.exists() else shutil.which(name) or name


def _run(root: Path, command: list[str]) -> list[str]:
    """Run a program; its output if it failed."""
    found = subprocess.run(
        command,
        cwd=root,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        stdin=subprocess.DEVNULL,
        text=True,
        check=False,
    )
    return (found.stdout.splitlines() or [f"exited with {found.returncode}"]) if found.returncode else []


def warnings(commands: Any) -> list[str]:
    """Return what to look at without being wrong: it depends on the date, so that no check may fail because of it."""
    today = waivers.today()
    return [*past(today), *commands.outdated(today)]


def past(today: datetime.date) -> list[str]:
    """Return a line for each target that is past its last day, unless a waiver of images/waivers.yaml is for it."""
    lines = []
    for spec in catalogue():
        first = next(iter(spec.ends), None)
        waived = waivers.of_end(spec.target)
        if first and first.day < today and not any(not waiver.expired(today) for waiver in waived):
            lines.append(
                f"{spec.where}: {first.what} was supported until {first.day}: update or remove the target, or add a "
                f"waiver of '{waivers.ENDS}' to images/waivers.yaml"
            )
    return lines


def check(commands: Any, *, ends: bool = False) -> dict[str, list[str]]:
    """Run all checks side by side, and return the findings of those that failed, by the check's name.

    Raises:
        UserError: a spec or lock cannot be read.
    """
    parts = checks(commands, ends=ends)
    with ThreadPoolExecutor(len(parts)) as threads:
        running = {name: threads.submit(part) for name, part in parts.items()}
        return {name: findings for name, part in running.items() if (findings := part.result())}
