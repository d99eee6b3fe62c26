"""Write a trainyard.yaml for a repository that has none: what it is proposed to hold, and why."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from packaging.utils import canonicalize_name

from trainyard.common.console import UserError, nearest
from trainyard.spec import lock, model, workspace
from trainyard.spec.model import Spec, relative
from trainyard.spec.naming import NAME
from trainyard.workspace import (
    dependency_tables,
    python_projects,
    requirement_choice,
    target_choice,
    training_commands,
)
from trainyard.workspace.python_source import Sources, files

#: Where the schema is for editors, relative to trainyard.yaml. It is committed: the first line of trainyard.yaml names
#: it (https://github.com/redhat-developer/yaml-language-server#using-inlined-schema), and every clone has it.
SCHEMA = ".trainyard/schema.json"

#: The dev container's file (https://containers.dev/implementors/spec/#devcontainerjson).
DEVCONTAINER = ".devcontainer/devcontainer.json"

#: Bytes of a repository up to which all of it is the code.
_SMALL = 20_000_000

#: Folders that are not proposed as code of a larger repository.
_NOT_CODE = re.compile(r"tests?|docs?|notebooks?|assets|images|figures|media|data|datasets?|outputs?|results|examples?")

#: Endings of files that code reads.
_CODE = (".py", ".sh", ".toml", ".cfg", ".ini", ".yaml", ".yml", ".json", ".txt", ".cu", ".cpp", ".h")


@dataclass
class Proposal:
    """A trainyard.yaml that is not written yet.

    Attributes:
        folder: that it is for.
        target: that it extends.
        requirements: their source. ``code``: files and folders.
        run: the command; empty if none was found.
        smoke: arguments of a short run, its data, and what would prevent it.
        reasons: key -> what was found, and where.
        notes: what the user has to know.
        commands: the candidates for ``run``, the most likely first.
    """

    folder: Path
    name: str
    target: str
    requirements: requirement_choice.Choice
    code: list[str]
    run: str
    smoke: training_commands.ShortRun
    reasons: dict[str, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    commands: list[str] = field(default_factory=list)


def schema_text() -> str:
    """The JSON schema of trainyard.yaml."""
    return json.dumps(workspace.schema(), indent=2) + "\n"


def _home() -> Path | None:
    try:
        return Path.home()
    except RuntimeError:  # a user without an entry in /etc/passwd
        return None


class Repository:
    """A repository to propose a trainyard.yaml for.

    Args:
        folder: where trainyard.yaml is to be.
    Raises:
        UserError: its files of requirements have a mistake, or the folder is that of a whole system or user.
    """

    def __init__(self, folder: Path) -> None:
        if folder == Path(folder.anchor) or (folder == _home() and not (folder / ".git").exists()):
            raise UserError(f"{folder} is not the folder of a repository: change to the one that has your code")
        self.folder = folder
        self.names = files(folder)
        self.sources = Sources(folder, self.names)
        self.project = python_projects.read(folder)
        scripts = self.project.scripts if self.project and self.project.installed else {}
        self.commands = training_commands.candidates(folder, self.names, self.sources, scripts)

    def propose(self, target: str | None = None, *, name: str | None = None, run: str | None = None) -> Proposal:
        """What trainyard.yaml is to hold.

        Args:
            target: the target to extend, ``name``: of the image, ``run``: its command, instead of what is found.
        Raises:
            UserError: nothing tells the target, or there is none of this name.
        """
        command = self._command(run)
        closure = self.sources.closure(command.path, conditional=False) if command else []
        everything = [source for source in self.sources.all.values() if source.run]
        wanted = requirement_choice.written(self.folder, self.names)
        reasons: dict[str, str] = {}
        notes: list[str] = []
        if target is None:
            choice = target_choice.choose(closure, everything, wanted.names)
            if choice is None:
                raise UserError(
                    f"{relative(self.folder)}: neither requirements nor code that imports a framework was found: "
                    f"choose a target, as in 'trainyard init --target cpu'; targets: {', '.join(model.targets())}"
                )
            target, reasons["extends"] = choice.target, choice.why
            notes += choice.notes
        elif target not in model.targets():
            known = model.targets()
            raise UserError(f"unknown target '{target}'{nearest(target, known)}; valid targets: {', '.join(known)}")
        elif other := target_choice.other_framework(target, closure or everything):
            notes.append(other)
        spec = model.load(target)
        # Without a command, written requirements count alone: libraries import much that they can do without.
        self._requirements(wanted, closure or ([] if wanted.why else everything), spec, notes)
        reasons["requirements"] = wanted.why
        if command:
            reasons["run"] = command.why
        words = run or (command.command if command else "")
        smoke = training_commands.ShortRun()
        if not words:
            notes.append(f"no command that trains was found: write 'run' in {workspace.FILE}")
        if command:
            smoke = training_commands.short_run(command, self.sources, self.folder, self.names)
            if smoke.args and not smoke.obstacle:
                reasons["smoke"] = f"options of {command.path}"
        return Proposal(
            self.folder,
            name or self._name(),
            target,
            wanted,
            self._code(self.sources.closure(command.path) if command else []),
            words,
            smoke,
            {key: why for key, why in reasons.items() if why},
            notes + wanted.notes,
            [one.command for one in self.commands],
        )

    def _command(self, run: str | None) -> training_commands.Candidate | None:
        if run is None:
            return self.commands[0] if self.commands else None
        known = next((one for one in self.commands if one.command == run), None)
        if known:
            return known
        # Another command than the candidates: what is known of its file counts.
        try:
            words = tuple(shlex.split(run))
        except ValueError as error:
            raise UserError(f"--run: {str(error).lower()}: {run}") from None
        path = next((word for word in words if word in self.sources.all), "")
        return training_commands.Candidate(words, "", path, 0) if path else None

    def _name(self) -> str:
        text = self.project.name if self.project else self.folder.name
        name = re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-") or "image"
        return f"my-{name}" if name in model.targets() else name

    def _requirements(
        self, choice: requirement_choice.Choice, closure: list[Any], spec: Spec, notes: list[str]
    ) -> None:
        own: set[str] = {canonicalize_name(self.project.name)} if self.project else set()
        if choice.file == "uv.lock" and (other := _locked_otherwise(self.folder / "uv.lock", spec)):
            notes.append(f"uv.lock pins {other}: 'requirements' names pyproject.toml instead")
            choice.file, choice.why = "pyproject.toml", "[project] lists dependencies"
        requirement_choice.complete(choice, closure, self.sources, spec, self.folder, own)
        notes += requirement_choice.contradictions(choice, spec, self.folder)
        for module, where in choice.unknown.items():
            notes.append(f"{where} imports {module}: add the package that provides it to 'requirements'")
        python = spec.base_spec().python
        requires = (self.project.requires_python if self.project else "") or choice.requires_python
        from packaging.specifiers import SpecifierSet

        if requires and not SpecifierSet(requires).contains(f"{python}.99", prereleases=True):
            file = relative(self.project.file) if self.project else "pyproject.toml"
            notes.append(f"{file}: requires Python {requires}, and {spec.target} has {python}")

    def _code(self, closure: Sequence[Any]) -> list[str]:
        """All of a small repository; of a larger one, what holds code and no data."""
        sizes: dict[str, int] = {}
        for name in self.names:
            top = name.partition("/")[0]
            sizes[top] = sizes.get(top, 0) + (self.folder / name).lstat().st_size
        if sum(sizes.values()) <= _SMALL:
            return ["."]
        needed = {source.path.partition("/")[0] for source in closure}
        found = [
            top
            for top, size in sizes.items()
            if top in needed
            or (
                size <= _SMALL
                and not _NOT_CODE.fullmatch(top)
                and not top.startswith(".")
                and any(name.endswith(_CODE) for name in self.names if name.partition("/")[0] == top)
            )
        ]
        return sorted(found) or ["."]


def _name_of(requirement: str) -> str:
    return re.split(r"[^A-Za-z0-9._-]", requirement, maxsplit=1)[0]


def _locked_otherwise(path: Path, spec: Spec) -> str:
    """``torch 2.6.0, and cpu contains 2.15.0``, if uv.lock pins another framework than a target's; else empty."""
    framework = requirement_choice.framework(spec)
    try:
        locked = dependency_tables.toml(path).data.get("package", [])
    except UserError:
        return ""
    names = {canonicalize_name(_name_of(text)) for text in spec.packages}
    for one in locked:
        name, version = canonicalize_name(str(one.get("name", ""))), str(one.get("version", "")).partition("+")[0]
        if name in names and name in framework and version and version != framework[name].partition("+")[0]:
            return f"{name} {version}, and {spec.target} contains {framework[name]}"
    return ""


def _scalar(text: str) -> str:
    """A YAML scalar: plain where it reads as text (https://yaml.org/spec/1.2.2/#733-plain-style), else quoted."""
    plain = re.fullmatch(r"[A-Za-z./_][A-Za-z0-9./_+=@%-]*( [A-Za-z0-9./_+=@%-]+)*", text)
    special = re.fullmatch(r"(?i)true|false|null|yes|no|on|off|y|n|\.nan|\.inf|\.+", text)
    return text if plain and (not special or text == ".") else json.dumps(text)


def _flow(values: Sequence[str]) -> str:
    return "[" + ", ".join(_scalar(one) if one.startswith("--") is False else _item(one) for one in values) + "]"


def _item(text: str) -> str:
    """An argument such as ``--epochs=1``, plain if YAML reads it as text."""
    return text if re.fullmatch(r"--?[A-Za-z][A-Za-z0-9_-]*(=[A-Za-z0-9./_+-]+)?", text) else json.dumps(text)


def _requirement_lines(choice: requirement_choice.Choice) -> list[str]:
    if choice.file and not choice.packages and not choice.extras:
        lines = [f"requirements: {choice.file}"]
    elif choice.file:
        lines = ["requirements:", f"  file: {choice.file}"]
        lines += [f"  extras: {_flow(choice.extras)}"] if choice.extras else []
        lines += [f"  packages: {_flow(choice.packages)}"] if choice.packages else []
    elif choice.packages:
        lines = ["requirements:", *(f"  - {_scalar(one)}" for one in choice.packages)]
    else:
        lines = ["# requirements: [einops, tqdm]"]
    return [
        *lines,
        *(f"  # {module}: which package provides it? ({where})" for module, where in choice.unknown.items()),
    ]


def _smoke_lines(proposal: Proposal) -> list[str]:
    smoke = proposal.smoke
    about = [
        "# How the command is run before the image gets its name: offline, with 'data' at /data. Without 'smoke' it is",
        "# only started, with --help.",
    ]
    if not proposal.run or (smoke.obstacle and not smoke.args):
        example = "# smoke: {args: [--epochs=1], data: tests/data, expect: loss}"
        return [*about, *([f"# Not proposed: {smoke.obstacle}."] if smoke.obstacle else []), example]
    lines = ["smoke:", f"  args: {_flow(smoke.args)}"]
    lines += [f"  data: {smoke.data}"] if smoke.data else []
    lines += ["  # expect: loss  # a regular expression that a line of the output matches: it has trained"]
    if smoke.obstacle:
        return [*about, f"# Not proposed: {smoke.obstacle}.", *(f"# {line}" for line in lines[:-1])]
    return [*about, *lines]


def text(proposal: Proposal) -> str:
    """The trainyard.yaml of a proposal."""
    lines = [
        f"# yaml-language-server: $schema={SCHEMA}",
        "# The image that 'trainyard image' builds from this repository. 'trainyard dev schema' describes every key.",
        "",
        "# The target of the catalogue that the image extends ('trainyard list').",
        f"extends: {proposal.target}",
        f"# The image is called {NAME}:{proposal.name}.",
        f"name: {_scalar(proposal.name)}",
        "# Packages in addition to the target's: requirements.txt, pyproject.toml, uv.lock or a list. Ranges are fine:",
        f"# {lock.FILE} pins them.",
        *_requirement_lines(proposal.requirements),
        "# Debian packages, such as libsndfile1.",
        "# system: []",
        f"# What is copied to {workspace.FOLDER}, the working directory. .gitignore and .dockerignore are respected.",
        f"{'' if proposal.run else '# '}code: {_flow(proposal.code)}",
        "# The command of the image; a job's arguments are appended to it.",
        f"run: {_scalar(proposal.run)}" if proposal.run else "# run: python train.py",
        *_smoke_lines(proposal),
    ]
    return "\n".join(lines) + "\n"


def write(proposal: Proposal) -> list[Path]:
    """Write trainyard.yaml and its schema; their paths.

    Raises:
        UserError: there is one already, or the proposal is not valid; nothing is left then.
    """
    path = proposal.folder / workspace.FILE
    try:
        with path.open("x", encoding="utf-8") as file:
            file.write(text(proposal))
    except FileExistsError:
        raise UserError(f"{relative(path)} exists already: edit it, or remove it first") from None
    try:
        model.load(str(proposal.folder.resolve()))
    except UserError:
        path.unlink()
        raise
    schema = proposal.folder / SCHEMA
    schema.parent.mkdir(exist_ok=True)
    schema.write_text(schema_text(), encoding="utf-8")
    return [path, schema]


def devcontainer(spec: Spec) -> dict[str, Any]:
    """The content of devcontainer.json for the image of a repository.

    The properties: https://containers.dev/implementors/json_reference/. The repository takes the place of the code in
    the image, so that edits count at once. ``gpu: optional`` gives the container the GPUs of a host that has some.
    """
    found: dict[str, Any] = {
        "name": spec.target,
        "image": f"{NAME}:{spec.local_name}",
        "workspaceMount": f"source=${{localWorkspaceFolder}},target={workspace.FOLDER},type=bind",
        "workspaceFolder": workspace.FOLDER,
        "remoteUser": "trainer",
        "overrideCommand": True,
        "customizations": {
            "vscode": {
                "settings": {"python.defaultInterpreterPath": spec.python},
                "extensions": ["ms-python.python"],
            }
        },
    }
    if spec.accelerator == "nvidia":
        found["hostRequirements"] = {"gpu": "optional"}
    return found


def write_devcontainer(spec: Spec) -> Path:
    """Write devcontainer.json beside the trainyard.yaml of ``spec``; its path.

    Raises:
        UserError: there is one already.
    """
    path = spec.folder / DEVCONTAINER
    other = spec.folder / ".devcontainer.json"
    if path.exists() or other.exists():
        raise UserError(f"{relative(path if path.exists() else other)} exists already: edit it, or remove it first")
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(devcontainer(spec), indent=2) + "\n", encoding="utf-8")
    return path


def shown(proposal: Proposal, key: str) -> str:
    """The value of a key of a proposal, in a line for people."""
    choice = proposal.requirements
    values = {
        "extends": proposal.target,
        "requirements": ", ".join([*([choice.file] if choice.file else []), *choice.packages[:5]]) or "none",
        "run": proposal.run,
        "smoke": " ".join(proposal.smoke.args),
    }
    return values[key]
