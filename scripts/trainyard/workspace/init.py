"""Propose a trainyard.yaml for a repository that has none: by tables of names; what they leave open is a question."""

from __future__ import annotations

import functools
import json
import os
import re
import shlex
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from trainyard.common import templates
from trainyard.common.errors import UserError, nearest
from trainyard.spec import model, repository_files, workspace, yaml_source
from trainyard.spec.catalog import plain_bases, pythons_of
from trainyard.spec.markers import allows
from trainyard.spec.model import Spec, relative
from trainyard.spec.naming import FOLDER, NAME
from trainyard.workspace import (
    code_files,
    copied_lists,
    dependency_tables,
    differing_lists,
    other_lists,
    python_projects,
    requirement_choice,
    short_run,
    system_libraries,
    torch_variant,
    wheel_contents,
)
from trainyard.workspace.framework_survey import Survey
from trainyard.workspace.framework_table import Name, table
from trainyard.workspace.lines import text_of
from trainyard.workspace.python_survey import Source, Sources, files

#: Where the schema is for editors, relative to trainyard.yaml. It is committed: the first line of trainyard.yaml names
#: it (https://github.com/redhat-developer/yaml-language-server#using-inlined-schema), and every clone has it.
SCHEMA = ".trainyard/schema.json"

#: The dev container's file (https://containers.dev/implementors/spec/#devcontainerjson).
DEVCONTAINER = ".devcontainer/devcontainer.json"

#: Bytes of a repository up to which all of it is the code.
_SMALL = 20_000_000

#: Folders that are not proposed as code of a larger repository, and endings of files that code reads.
_NOT_CODE = re.compile(r"tests?|docs?|notebooks?|assets|images|figures|media|data|datasets?|outputs?|results|examples?")
_CODE = (".py", ".sh", ".toml", ".cfg", ".ini", ".yaml", ".yml", ".json", ".txt", ".cu", ".cpp", ".h")

#: What an NVIDIA driver makes (https://docs.nvidia.com/cuda/cuda-installation-guide-linux/#device-node-verification).
NVIDIA_DRIVER = Path("/proc/driver/nvidia/version")

#: Words of the names of programs that train, the likeliest first. Those after "trainer" have many other purposes.
_TRAINING = ("train", "training", "finetune", "pretrain", "fit", "trainer", "main", "run")
_OTHER_PURPOSE = re.compile(
    "eval|evaluate|evaluation|tests?|demo|infer|inference|predict|prediction|generate|sample|plot|convert|download"
    "|prepare|preprocess|export|benchmark|bench|serve|server|app|score|visualize|analyze|setup|utils|check|tune|sweep"
    "|pip|release|publish"
)
_ASIDE = re.compile(r"(^|/)(examples?|demos?|projects|benchmarks?|tools|notebooks?|eval(uation)?|scripts/data)/")

#: Lines of documents and scripts that start programs.
_STARTS = re.compile(
    r"(?m)\b(?:python3?|torchrun|accelerate launch)\b[^\n|;&]*?\s(-m\s+(?!torch)[\w.]+|[\w./-]+\.py)\b"
)

#: Files that name a Python for tools, and the line that does: https://docs.astral.sh/uv/concepts/python-versions/,
#: https://devcenter.heroku.com/articles/python-runtimes, https://mybinder.readthedocs.io/en/latest/using/config_files.html
_PYTHON_FILES = (".python-version", "runtime.txt")
_PYTHON = re.compile(r"(?m)^\s*(?:cpython[@-]|python-)?(3\.\d+)(?:\.\d+)?\s*(?:#.*)?$")

#: What follows the name of a module in the path of its file.
_MODULE = (".py", "/__init__.py")


@dataclass(frozen=True)
class Candidate:
    """A command that may train.

    Attributes:
        words: the command. ``path``: the file of its program. ``why``: what speaks for it.
        rank: the lower, the likelier; two of one rank are a question.
    """

    words: tuple[str, ...]
    path: str
    why: str = ""
    rank: tuple[int, ...] = ()

    @property
    def command(self) -> str:
        """Return the command as a shell reads it."""
        return shlex.join(self.words)


@dataclass
class Proposal:
    """Propose what a trainyard.yaml is to hold.

    Attributes:
        build: of trainyard.yaml, which compiles the repository's extension modules; empty if it has none.
        base: that with the Python that is asked for; empty if the target's has it.
        system: the Debian packages that wheels need.
        run: the command; empty if none was found.
        reasons: a value, as ``extends: cpu`` -> what was found, and where.
        notes: what the user has to know.
        commands: the candidates for ``run``, the most likely first.
        question: what only the user knows; empty if nothing.
    """

    name: str
    target: str
    base: str
    requirements: requirement_choice.Choice
    system: list[str]
    environment: dict[str, str]
    code: list[str]
    run: str
    reasons: dict[str, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    commands: list[str] = field(default_factory=list)
    question: str = ""
    build: dict[str, list[str]] = field(default_factory=dict)


def schema_text() -> str:
    """Return the JSON schema of trainyard.yaml."""
    return json.dumps(workspace.schema(), indent=2) + "\n"


def _is_home(folder: Path) -> bool:
    try:
        return folder == Path.home()
    except RuntimeError:  # a user without an entry in /etc/passwd
        return False


class Repository:
    """A repository to propose a trainyard.yaml for.

    Args:
        folder: where trainyard.yaml is to be.
        program: the command, if one file is the project; ``needed``: the files that it needs.
    Raises:
        UserError: its files of requirements have a mistake, or the folder is that of a whole system or user.
    """

    def __init__(self, folder: Path, program: Candidate | None = None, needed: Sequence[str] = ()) -> None:
        home = _is_home(folder) and not (folder / ".git").exists()
        if program is None and (folder == Path(folder.anchor) or home):
            raise UserError(f"{folder} is not the folder of a repository: change to the one that has your code")
        repository_files.check_links(folder)
        self.folder = folder
        self.names = needed or files(folder)
        self.sources = Sources({name: folder / name for name in self.names})
        self.project = None if program else python_projects.read(folder)
        self.one_file = program is not None
        self._shown = program.path if program else relative(folder)
        self.scripts = self.project.scripts if self.project and self.project.installed else {}
        self.documents = short_run.documents(folder, self.names)
        given = self.names, self.sources, self.scripts, self.documents
        self.commands = [program] if program else candidates(folder, *given)

    def propose(self, target: str | None = None, *, name: str | None = None, run: str | None = None) -> Proposal:
        """Return what trainyard.yaml is to hold.

        Args:
            target: the target to extend, ``name``: of the image, ``run``: its command, instead of what is found.
        Raises:
            UserError: nothing tells the target, or there is none of this name.
        """
        command = self._command(run)
        closure = self.sources.closure(command.path, conditional=False) if command else []
        wanted = requirement_choice.written(self.folder, self.names, self.project, command.path if command else "")
        survey = Survey(self.folder, self.names, self.sources, closure, wanted)
        reasons: dict[str, str] = {}
        notes: list[str] = []
        known = model.targets()
        if target is None:
            target, why = choose_target(survey, notes)
            if not target:
                undecided = survey.undecided()
                found = (
                    f"{undecided}, which goes with several frameworks"
                    if undecided
                    else f"{self._shown}: neither requirements nor code that imports a framework was found"
                )
                how = (
                    "with 'extends = \"cpu\"' in '# [tool.trainyard]' of its header"
                    if self.one_file
                    else ("as in 'trainyard init --target cpu'")
                )
                raise UserError(f"{found}: choose a target, {how}; targets: {', '.join(known)}")
            reasons[f"extends: {target}"] = why
        elif target not in known:
            raise UserError(f"unknown target '{target}'{nearest(target, known)}; valid targets: {', '.join(known)}")
        spec = model.load(target)
        framework = table().of_target(spec.framework.name)
        if not reasons and (other := survey.other_than(framework)):
            notes.append(f"{other[1]}, and {target} does not contain {other[0]}")
        # Without a command, written requirements count alone: libraries import much that they can do without.
        needing = closure or ([] if wanted.why else self.sources.run)
        pyproject = (wanted.project or self).folder / "pyproject.toml"
        has_groups = os.path.relpath(pyproject, self.folder) in self.names
        groups = dependency_tables.groups(pyproject) if has_groups else {}
        others = requirement_choice.others(self.folder, self.names, wanted, self.project)
        requirement_choice.complete(wanted, needing, self.sources, spec, self.project, groups, others.values())
        script, provided = command.path if command else "", {name for names in spec.provided for name in names}
        notes += differing_lists.notes(wanted, others)
        notes += other_lists.unread(self.folder, self.names, wanted, self.project, script, provided)
        shown = [*([wanted.file] if wanted.file else []), *wanted.packages]
        reasons[f"requirements: {', '.join(shown) or 'none'}"] = wanted.why
        base = self._base(spec, wanted, needing, reasons)
        system, needs = system_libraries.lacking(wanted.installed, base or spec.base, [], spec.system)
        place, listed = copied_lists.debian(self.folder, self.names)
        more = [one for one in dict.fromkeys(listed) if one not in (*system, *spec.system)]
        needs = [*needs, f"{place} lists {', '.join(more)}"] if more else needs
        system = [*system, *more]
        reasons[f"system: {', '.join(system)}"] = ", and ".join(needs)
        libraries = self._libraries(wanted, reasons)
        code = self._code(self.sources.closure(command.path) if command else [])
        if command:
            code = self._without_refused(code, target, {source.path for source in closure}, notes)
        if wanted.project and wanted.project.folder.resolve() not in wanted.project.import_roots:
            libraries = [*libraries, os.path.relpath(wanted.project.folder, self.folder)]
            reasons[f"code: {libraries[-1]}"] = "its project has modules in src"
        environment = _keras_environment(survey, framework, reasons)
        roots = [os.path.relpath(root, self.folder) for root in self.project.import_roots] if self.project else []
        above = self.sources.above(closure[0], command.words, ("src", *roots)) if command and closure else []
        if command and above:
            environment["PYTHONPATH"] = ":".join(f"{FOLDER}/{folder}" for folder in above)
            reasons[f"environment: PYTHONPATH={environment['PYTHONPATH']}"] = (
                f"{command.path} needs modules of {' and '.join(above)}"
            )
        words = run or (command.command if command else "")
        if not words:
            notes.append(f"no command that trains was found: write 'run' in {workspace.FILE}")
            if notebooks := [name for name in self.names if name.endswith(".ipynb")]:
                some = f"{', '.join(notebooks[:3])}{', ...' * bool(notebooks[3:])}"
                notes.append(
                    f"{some}: the image is an environment without these notebooks: 'trainyard image "
                    f"{shlex.quote(notebooks[0])}' makes a program of one, in its own image; or add jupyterlab to "
                    "'requirements' for 'trainyard run --mount --jupyter'"
                )
        elif command:
            reasons[f"run: {words}"] = command.why
        if words:
            documents = self.documents.values()
            first = short_run.propose(shlex.split(words), script, self.sources, self.names, documents).words
            tried = f"the command with {shlex.join(first)}" if first else "the command"
            reasons["smoke: none yet"] = (
                f"'trainyard image' tries {tried}, and writes what passes; 'trainyard push' needs it"
            )
        build = self._build(spec, reasons)
        text = (self.project.name if self.project else "") or self.folder.name
        image = re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-") or "image"
        return Proposal(
            name or (f"my-{image}" if image in known else image),
            target,
            base,
            wanted,
            system,
            environment,
            [*code, *libraries],
            words,
            {value: why for value, why in reasons.items() if why},
            [
                *notes,
                *(python_projects.extensions([self.folder]) if not build else ()),
                *wanted.notes,
                *self._others(command),
            ],
            [candidate.command for candidate in self.commands],
            self._question() if run is None else "",
            build,
        )

    def _build(self, spec: Spec, reasons: dict[str, str]) -> dict[str, list[str]]:
        """Return ``build`` for the extension modules of the project; empty if there are none, or they are of Rust.

        A build has no network, from which Cargo would take its crates, and none on a base that has the framework.
        """
        place, script = python_projects.extension(self.folder), text_of(self.folder / "setup.py")
        if not place or python_projects.is_rust(place) or not spec.locked().framework:
            return {}
        reasons["build: sources: [.]"] = f"{place}: extension modules"
        found = {"packages": ["g++", "ninja-build"], "sources": ["."]}
        runtime = {pin.name: pin.version for pin in spec.locked().pins}.get("nvidia-cuda-runtime", "")
        if "CUDAExtension" in script and runtime:
            of = ".".join(runtime.split(".")[:2])
            found["requires"] = [f"{name}=={of}.*" for name in ("nvidia-cuda-nvcc", "nvidia-cuda-crt", "nvidia-nvvm")]
        return found

    def _base(
        self, spec: Spec, wanted: requirement_choice.Choice, closure: Sequence[Source], reasons: dict[str, str]
    ) -> str:
        """Return the base with a Python that suits all that ask for one; empty if the target's does, or none.

        Args:
            reasons: of the proposal; that of the base is added.
        """
        asked = [wanted.python]
        for module, (place, version) in requirement_choice.removed(closure, self.sources).items():
            asked.append((f"<{version}", f"{place} imports {module}, which Python {version} has no longer"))
        for name in _PYTHON_FILES:
            if name in self.names and (match := _PYTHON.search(yaml_source.text(self.folder / name, errors="replace"))):
                asked.append((f"=={match[1]}.*", f"{name} asks for Python {match[1]}"))
        if self.project and self.project.requires_python:
            text = self.project.requires_python
            asked.append((text, f"{self.project.file.name} requires Python {text}"))
        why = next((why for versions, why in asked if not allows(versions, spec.python_version)), "")
        if not why:
            return ""
        others = plain_bases() if spec.base in plain_bases() else {}
        fits = (name for name, base in others.items() if all(allows(versions, base.python) for versions, _ in asked))
        if found := next(fits, ""):
            reasons[f"base: {found}"] = why
        else:
            other = f", and the bases are {pythons_of(others)}" if others else ""
            wanted.notes.append(f"{why}: the image has Python {spec.python_version}{other}")
        return found

    def _command(self, run: str | None) -> Candidate | None:
        if run is None:
            return self.commands[0] if self.commands else None
        try:
            words = tuple(shlex.split(run))
        except ValueError as error:
            raise UserError(f"--run: {str(error).lower()}: {run}") from None
        # Another command than the candidates: what is known of its file counts.
        path = short_run.program_of(words, self.sources, self.scripts)
        known = (candidate for candidate in self.commands if candidate.command == run)
        return next(known, Candidate(words, path) if path else None)

    def _question(self) -> str:
        """Return the line that asks which of several files is the command; empty if the first is the likeliest."""
        first = [candidate for candidate in self.commands if candidate.rank == self.commands[0].rank]
        paths = list(dict.fromkeys(candidate.path for candidate in first))
        if len(paths) < 2:
            return ""
        last = paths[-1] if len(paths) <= 4 else f"{len(paths) - 3} others"
        places = f"{', '.join(paths[: min(len(paths) - 1, 3)])} and {last}"
        folder = paths[0].rpartition("/")[0]
        apart = f", or one folder for each image, as in 'trainyard init {folder}'" if folder else ""
        chosen = f"choose the one that trains, as in 'trainyard init --run \"{first[0].command}\"'"
        return f"{places} are equally likely: {chosen}{apart}"

    def _others(self, command: Candidate | None) -> list[str]:
        """Return the line about programs that train in other folders than the command's; none without them."""
        taken = {"", command.path.rpartition("/")[0] if command else ""}
        found: dict[str, str] = {}
        for one in self.commands:
            folder = one.path.rpartition("/")[0]
            if folder not in taken and one.words == ("python", one.path) and not any((one.rank[0], *one.rank[2:5])):
                found.setdefault(folder, one.path)
        if not found:
            return []
        shown = f"{', '.join(list(found.values())[:3])}{', ...' if len(found) > 3 else ''}"
        return [f"also found: {shown}; for an image of it: 'trainyard init {next(iter(found))}'"]

    def _libraries(self, wanted: requirement_choice.Choice, reasons: dict[str, str]) -> list[str]:
        """Return the folders of the git repository, outside of this one, that the code imports from.

        Args:
            wanted: the modules that are in one of them are removed; the others are noted.
            reasons: of the proposal; those of the folders are added.
        """
        top = repository_files.git_root(self.folder)
        names = files(top) if wanted.unknown and top != self.folder and not self.one_file else []
        found: list[str] = []
        for module, place in list(wanted.unknown.items()):
            ends = [f"/{module}{end}" for end in _MODULE]
            places = [
                (f"/{name}".removesuffix(end), name) for end in ends for name in names if f"/{name}".endswith(end)
            ]
            # Or a namespace package, which has no __init__.py.
            places = places or [("", name) for name in names if name.startswith(f"{module}/") and name.endswith(".py")]
            # At the top, which is on the module path, the module alone.
            roots = {root[1:] or name.partition("/")[0] for root, name in places}
            if len(roots) == 1:
                folder = os.path.relpath(top / roots.pop(), self.folder)
                reasons[f"code: {folder}"] = f"{place} imports {module}"
                found.append(folder)
                del wanted.unknown[module]
            elif self._may_list_more or any(wheel_contents.is_open(name) for name in wanted.names):
                del wanted.unknown[module]
            else:
                wanted.notes.append(
                    f"{place} imports {module}: add the package that provides it to 'requirements', unless one of them "
                    "needs it"
                )
        return list(dict.fromkeys(found))

    @property
    def _may_list_more(self) -> bool:
        """Return whether the project has requirements that only its build backend tells."""
        return self.project is not None and "dependencies" in self.project.pending

    def _code(self, closure: Sequence[Source]) -> list[str]:
        """Return all of a small repository; of a larger one, what holds code and no data."""
        if self.one_file:
            return [name for name in self.names if name.endswith(".py")]
        needed = {source.path.partition("/")[0] for source in closure}
        sizes: dict[str, int] = {}
        code: set[str] = set(needed)
        for name in self.names:
            top = name.partition("/")[0]
            sizes[top] = sizes.get(top, 0) + (self.folder / name).lstat().st_size
            if name.endswith(_CODE) and not _NOT_CODE.fullmatch(top) and not top.startswith("."):
                code.add(top)
        if sum(sizes.values()) <= _SMALL:
            return ["."]
        return sorted(top for top in code if top in needed or sizes[top] <= _SMALL) or ["."]

    def _without_refused(self, code: list[str], target: str, needed: Collection[str], notes: list[str]) -> list[str]:
        """Return ``code`` without what no image may have, such as .env, unless the command needs it.

        Args:
            needed: the files of the command, ``notes``: what is left out is added to them.
        """
        document = workspace.WorkspaceDocument(extends=target, code=code)
        try:
            refused = code_files.refused(workspace.Workspace(self.folder / workspace.FILE, document))
        except UserError:
            return code
        out = {path.partition("/")[0] for path in refused if path not in needed}
        tops = {name.partition("/")[0] for name in self.names if code == ["."] or name.partition("/")[0] in code}
        if not out or any(path.partition("/")[0] in out for path in needed):
            return code
        notes += [f"{line.partition(': remove it')[0]}: left out of 'code'" for line in refused.values()]
        return sorted(tops - out)


def choose_target(survey: Survey, notes: list[str]) -> tuple[str, str]:
    """Return the target of a repository, and what speaks for it; both empty if nothing tells.

    Args:
        notes: what the user has to know is added to them.
    """
    notes += [
        f"{place} lists {name}, which is for {table().foreign[name]} alone: remove it"
        for name, place in survey.wanted.names.items()
        if name in table().foreign
    ]
    uses = survey.frameworks()
    if not uses:
        return "", ""
    first, *others = uses
    why, targets = uses[first], table().frameworks[first].targets
    notes += [f"{why}, and {uses[name]}: --target chooses the other" for name in others]
    target, decides = survey.deciding(first)
    if target:
        return target, f"{why}, and {decides}"
    sources = reversed(survey.closure or survey.sources.run)
    marks = {mark: place for source in sources for mark in source.marks if (place := source.where(mark))}
    cpu, gpu = targets["cpu"], targets["gpu"]
    if "tpu" in marks and "tpu" in targets:
        return targets["tpu"], f"{why}, and {marks['tpu']} TPUs"
    asked, note = _variant(survey, first)
    program = survey.closure[0] if survey.closure else None
    if program and "demands" in program.marks and not asked:
        return gpu, f"{why}, and {program.where('demands')} needs a GPU ({program.marks['demands'][1]})"
    if asked:
        notes += [note] if note else []
        return asked[0], f"{why}, and {asked[1]}"
    notes += [note] if note else []
    if "cuda" not in marks:
        return cpu, why
    if "asks" not in marks:
        return gpu, f"{why}, and {marks['cuda']} needs a GPU"
    if NVIDIA_DRIVER.exists():
        return gpu, f"{why}, {marks['cuda']} uses GPUs, and this machine has one"
    notes.append(f"{marks['cuda']} uses a GPU where there is one: --target {gpu} is the image for GPUs")
    return cpu, why


def _variant(survey: Survey, name: Name) -> tuple[tuple[str, str] | None, str]:
    """Return the target that the requirements ask for by a variant of a framework, why, and what is to be known of it.

    Without a target, the note tells why none is taken, or what other files say.
    """
    root, names, wanted = survey.root, survey.names, survey.wanted
    targets = table().frameworks[name].targets
    stated = torch_variant.stated(root, names, wanted, name)
    kinds = {one.kind for one in stated}
    if "cuda" in kinds and "cpu" not in kinds:
        exact = next((one for one in stated if one.version), stated[0])
        target, note = torch_variant.target_for(name, exact, wanted)
        return (target, exact.why), note
    if kinds == {"cpu"}:
        return (targets["cpu"], stated[0].why), ""
    if kinds:
        said = ", ".join(one.why for one in stated)
        if "cuda" in kinds:
            return None, f"{said}: --target {targets['gpu']} is the image for GPUs"
        return None, f"{said}, for which there is no target: this image is for CPUs"
    told = [one for one in torch_variant.told(root, names) if one.kind == "cuda"]
    return None, f"{told[0].why}: --target {targets['gpu']} is the image for GPUs" if told else ""


def _keras_environment(survey: Survey, name: Name, reasons: dict[str, str]) -> dict[str, str]:
    """Return the variable that Keras needs for a framework which is not its default, unless the code sets it.

    Args:
        reasons: of the proposal; that of the variable is added.
    """
    default = table().several["keras"].default
    if not survey.uses_keras or name == default or (survey.backend and survey.backend.by_code):
        return {}
    stated = survey.backend and survey.backend.name == name
    reasons[f"environment: KERAS_BACKEND={name}"] = (
        survey.backend.why if survey.backend and stated else f"Keras uses {default} otherwise"
    )
    return {"KERAS_BACKEND": name}


def _name_rank(name: str) -> int:
    """Return a place in :data:`_TRAINING`, or one behind all for other names; 99 for those of another purpose."""
    words = set(re.split(r"[^a-z0-9]+", re.sub(r"([a-z])([A-Z])", r"\1-\2", name).lower()))
    if any(_OTHER_PURPOSE.fullmatch(word) for word in words):
        return 99
    return min((_TRAINING.index(word) for word in words if word in _TRAINING), default=len(_TRAINING))


def _documented(documents: Mapping[str, str]) -> dict[str, int]:
    """Return what documents and shell scripts (name -> text) give to Python, paths and ``-m MODULE``, -> 0, or 1.

    Paths may be below the top, or below the folder of the document. 0 is for what the README at the top gives.
    """
    said: dict[str, int] = {}
    for name, text in documents.items():
        started = {" ".join(match[1].removeprefix("./").split()) for match in _STARTS.finditer(text)}
        for path in started | {f"{name.rpartition('/')[0]}/{path}".lstrip("/") for path in started}:
            said[path] = min(said.get(path, 1), 0 if name.startswith("README") else 1)
    return said


def candidates(
    folder: Path, names: Sequence[str], sources: Sources, scripts: dict[str, str], documents: Mapping[str, str]
) -> list[Candidate]:
    """Return the commands that may train, the likeliest first: a shell script if there is no other.

    A program is one if its name says so, or if it has a main program and trains.

    Args:
        names: the files of the repository.
        scripts: command -> object of its projects, as ``package.module:function``.
        documents: names of documents and shell scripts -> their text.
    """
    programs = [(source, "", "") for source in sources.run]
    programs += [
        (source, command, target)
        for command, target in scripts.items()
        if (source := sources.of_module(target.partition(":")[0])) and source.run
    ]
    commands, said = [], _documented(documents)

    @functools.cache  # most repositories need no look at what all programs import
    def imported() -> set[str]:
        return {part.path for source in sources.run if source.main for part in sources.closure(source.path)[1:]}

    for source, command, target in programs:
        *_, parent, file = ["", *source.path.split("/")]
        main = source.main or file == "__main__.py" or bool(command)
        rank = _name_rank(command or (parent if file == "__main__.py" else file.removesuffix(".py")))
        trains = any("trains" in part.marks for part in sources.closure(source.path) if part.run)
        by_name = rank < _TRAINING.index("main")
        acts = not main and source.acts and rank < len(_TRAINING) and source.path not in imported()
        if rank == 99 or not (by_name or trains) or not (main or acts):
            continue
        reasons = ["a main program"] * main + ["a training loop"] * trains
        why = f"{source.path} has {' and '.join(reasons) or 'the name of a training program'}"
        depth = -1 if command else source.path.count("/")
        words = (command,) if command else sources.run_as(source, said)
        shown, aside = said.get(" ".join(words[1:]), 2), bool(_ASIDE.search(source.path))
        # What the README starts comes first, then what other documents start, a file with a name for training before
        # one that only trains, and examples before what is deep.
        order = (not trains, shown, rank == len(_TRAINING), depth > 3, aside, rank, depth)
        why = f"a command of the project, {target}" if command else why
        commands.append(Candidate(words, source.path, why, order))
    for name in names if not commands else ():
        rank = _name_rank(name.rpartition("/")[2].removesuffix(".sh"))
        deepest = 1 if rank < _TRAINING.index("main") else 0
        if not name.endswith(".sh") or name.count("/") > deepest or rank >= len(_TRAINING):
            continue
        if re.search(r"\b(python3?|torchrun|accelerate)\b", yaml_source.text(folder / name, errors="replace")):
            words = (f"./{name}",) if (folder / name).stat().st_mode & 0o100 else ("bash", name)
            commands.append(Candidate(words, name, f"{name} runs Python", (rank, name.count("/"))))
    return sorted(commands, key=lambda candidate: (candidate.rank, len(candidate.command), candidate.command))


def text(proposal: Proposal) -> str:
    """Return the trainyard.yaml of a proposal."""
    template = templates.environment().get_template("trainyard.yaml.j2")
    return template.render(vars(proposal), schema=SCHEMA, repository=NAME)


def write(folder: Path, content: str) -> list[Path]:
    """Write trainyard.yaml and its schema into a folder, and return their paths.

    Raises:
        UserError: there is one already, or the content is not valid; nothing is left then.
    """
    if os.path.lexists(folder / workspace.FILE):
        raise UserError(f"{relative(folder / workspace.FILE)} exists already: edit it, or remove it first")
    path = repository_files.write(folder, workspace.FILE, content)
    try:
        model.load(str(folder.resolve()))
        return [path, repository_files.write(folder, SCHEMA, schema_text())]
    except UserError:
        path.unlink()
        raise


def write_devcontainer(spec: Spec) -> Path:
    """Write devcontainer.json for the image of a repository, beside its trainyard.yaml, and return its path.

    The properties: https://containers.dev/implementors/json_reference/. The repository takes the place of the code in
    the image, so that edits count at once. ``gpu: optional`` gives the container the GPUs of a host that has some.

    Raises:
        UserError: there is one already.
    """
    path = spec.folder / DEVCONTAINER
    for known in (path, spec.folder / ".devcontainer.json"):
        if os.path.lexists(known):
            raise UserError(f"{relative(known)} exists already: edit it, or remove it first")
    document: dict[str, Any] = {
        "name": spec.target,
        "image": f"{NAME}:{spec.local_name}",
        "workspaceMount": f"source=${{localWorkspaceFolder}},target={FOLDER},type=bind",
        "workspaceFolder": FOLDER,
        "remoteUser": "trainer",
        "overrideCommand": True,
        "customizations": {
            "vscode": {
                "settings": {"python.defaultInterpreterPath": spec.kind.python},
                "extensions": ["ms-python.python"],
            }
        },
    }
    if spec.accelerator == "nvidia":
        document["hostRequirements"] = {"gpu": "optional"}
    return repository_files.write(spec.folder, DEVCONTAINER, json.dumps(document, indent=2) + "\n")
