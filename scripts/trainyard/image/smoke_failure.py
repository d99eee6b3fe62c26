"""Explain why a user's command failed, in one line that names the user's file: read from its log.

``src/model/train.py:12: ModuleNotFoundError: No module named 'einops': add it to requirements in trainyard.yaml``
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from trainyard.common.errors import nearest
from trainyard.recipe import Recipe
from trainyard.spec import yaml_source
from trainyard.spec.catalog import packages_with
from trainyard.spec.naming import FOLDER, GENERATED
from trainyard.spec.naming import SETTINGS as FILE
from trainyard.spec.repository_files import git_root
from trainyard.spec.yaml_source import relative
from trainyard.workspace import import_names, wheel_contents

#: The launcher's own lines, and what it says when it cannot start a command (launcher/process.py).
_LAUNCHER = re.compile(r"^launch: ")
_NOT_STARTED = re.compile(
    r"^launch: error: (?:'(?P<missing>.+?)' not found|cannot execute '(?P<refused>.+?)': (?P<why>.*))"
)

#: What ``python FILE`` and ``python -m MODULE`` print without a traceback
#: (https://github.com/python/cpython/blob/3.13/Modules/main.c, Lib/runpy.py).
_NO_FILE = re.compile(r"^\S*python\S*: can't open file '(.+?)': \[Errno 2\]")
_NO_MODULE = re.compile(
    r"^\S*python\S*: (?:Error while finding module specification for '(.+?)'|No module named '?([\w.]+))"
)

#: Interpreter of a #! line that env does not find (https://www.gnu.org/software/coreutils/env).
_NO_INTERPRETER = re.compile(r"^(?:/usr/bin/)?env: \W(.+?)\W: No such file or directory")

#: ``./train.sh: line 3: foo: command not found`` of bash, ``./train.sh: 3: foo: not found`` of dash.
_SHELL = re.compile(r"^(?P<file>\S+): (?:line )?(?P<line>\d+): (?P<what>.*(?:not found|No such file|denied|error).*)$")

#: Prefixes that torchrun puts before the lines of a process.
_RANK = re.compile(r"^\[(?:rank|default|\w+:)?\d+\]:\s?")
_FRAME = re.compile(r'^\s*File "(?P<file>[^"]+)", line (?P<line>\d+)')
_ERROR = re.compile(r"^(?:(?:\w+\.)+\w+|[A-Z_]\w*)(?:: .*)?$")

#: Errors of a program that asked for something on a network.
_NETWORK = re.compile(
    r"Connect(?:ion)?Error|ConnectTimeout|gaierror|URLError|MaxRetryError|NameResolutionError|HTTPError|TimeoutError|"
    r"OfflineModeIsEnabled|LocalEntryNotFoundError|[Nn]ame resolution|Name or service not known|"
    r"Network is unreachable|couldn't connect|outgoing traffic has been disabled|offline mode",
)
#: Exceptions of a process whose worker has exited, with the traceback of the worker before them in the log: of Python's
#: multiprocessing and concurrent.futures, and of PyTorch's torch.multiprocessing.spawn and DataLoader.
_WORKER_EXITED = re.compile(
    r"(?:BrokenPipe|ConnectionReset|EOF)Error\b|(?:\w+\.)*(?:BrokenProcessPool|ProcessExitedException)\b|"
    r"RuntimeError: DataLoader worker .* exited unexpectedly"
)

#: What a module that was built for numpy 1 makes numpy 2 print, and what a package that lacks a name makes Python say.
_OLD_NUMPY = "compiled using NumPy 1.x cannot be run"
_OF_OLD_NUMPY = r"numpy\.core\.multiarray|_ARRAY_API|binary incompatibility"
_LACKS = (
    r"cannot import name '(?P<name>\w+)' from (?:partially initialized module )?'(?P<module>[\w.]+)'"
    r"|(?:module|type object)? ?'(?P<of>[\w.]+)'(?: object)? has no attribute '(?P<attribute>\w+)'"
)

_ADDRESS = re.compile(r"https?://([A-Za-z0-9.-]+)")

#: Module -> its framework, for the targets that have it.
_FRAMEWORKS = {"tensorflow": "tensorflow", "torch": "torch", "torch_xla": "torch_xla", "jax": "jax"}


@dataclass(frozen=True)
class Run:
    """Describe a run of the user's command that ended by itself.

    Attributes:
        status: its exit status.
        lines: of its log.
        hosts: that it asked for.
        out_of_memory: the engine says that it was killed for its memory.
    """

    status: int
    lines: list[str]
    hosts: list[str] = field(default_factory=list)
    out_of_memory: bool = False


@dataclass(frozen=True)
class HostFiles:
    """Say where the repository of an image is on this host.

    Attributes:
        file: its trainyard.yaml.
        data: folder that containers have at /data; None: none. ``given``: it is not of the repository.
    """

    file: Path
    data: Path | None = None
    given: bool = False

    @property
    def root(self) -> Path:
        """Return the folder of trainyard.yaml, or of the one file that is the project, which is /workspace."""
        folder = self.file.parent
        return folder.parent if folder.name == GENERATED else folder


@dataclass(frozen=True)
class Traceback:
    """Hold ``frames``, files with lines, the innermost last, and ``error``, the line of the exception."""

    frames: list[tuple[str, int]]
    error: str


def own_lines(lines: Iterable[str]) -> list[str]:
    """Return the lines that the command printed, without those of the launcher."""
    return [line for line in lines if not _LAUNCHER.match(line)]


def tracebacks(lines: Iterable[str]) -> Iterator[Traceback]:
    """Yield the tracebacks of Python in a log; a syntax error in the file that is run has no headline."""
    frames: list[tuple[str, int]] = []
    for raw in lines:
        line = _RANK.sub("", raw)
        frame = _FRAME.match(line)
        if frame:
            frames.append((frame["file"], int(frame["line"])))
        elif line.startswith("Traceback (most recent call last)"):
            frames = []
        elif frames and _ERROR.match(line):
            yield Traceback(frames, line.strip())
            frames = []


class Explanation:
    """Explain failures of one command.

    Args:
        command: what was run, the words of ``run``.
        recipe: of the image; None of one that a user's own Dockerfile made without a trainyard.yaml.
        files: the repository that it is from; None if it is not known.
        folder: the working directory of the image.
    Attributes:
        network: whether the command had a network; ``otherwise``: what is added where nothing else is known to do.
    """

    network, otherwise = False, ""

    def __init__(
        self, command: Iterable[str], recipe: Recipe | None, files: HostFiles | None, folder: str = FOLDER
    ) -> None:
        self.command = list(command)
        self.recipe = recipe
        self.files = files
        self.folder = folder.rstrip("/")

    def key(self, *location: str) -> str:
        """Return where a key is, ``trainyard.yaml:5: smoke.expect``; the command itself without a trainyard.yaml."""
        if self.files is None:
            return shlex.join(self.command)
        line = yaml_source.line_of(yaml_source.read(self.files.file), location)
        return f"{relative(self.files.file)}:{line or 1}: {'.'.join(location)}"

    def local(self, path: str) -> Path | None:
        """Return the file of the repository that is at ``path`` in the image; None if it is not from the repository."""
        if self.files is None or not path.startswith(f"{self.folder}/"):
            return None
        inside = path.removeprefix(f"{self.folder}/")
        places = (self.files.root, git_root(self.files.root))
        return next((place / inside for place in places if (place / inside).exists()), None)

    def shown(self, path: str) -> str:
        """Return how messages name a file of the image: as in the repository, if it is from there."""
        file = self.local(path)
        return relative(file) if file else path

    def of(self, run: Run) -> str:
        """Return why a run failed, whose status is not 0, in one line."""
        if run.out_of_memory or run.status == 137:
            what = "ran out of memory" if run.out_of_memory else "was killed (137), as when memory is short"
            return f"{self.key('run')}: {what}: give smoke.args that need less, such as a smaller batch"
        lines = own_lines(run.lines)
        if reason := self._not_started(run.lines) or self._in_python(lines, run.hosts) or self._in_shell(lines):
            return reason
        last = next((line.strip() for line in reversed(lines) if line.strip()), "it printed nothing")
        return f"{self.key('run')}: exit status {run.status}: {last[:300]}{self._network(last, run) or self.otherwise}"

    def _network(self, error: str, run: Run) -> str:
        """Return what to add if a run failed because it has no network."""
        asked = run.hosts or list(dict.fromkeys(_ADDRESS.findall(" ".join(own_lines(run.lines)[-30:]))))
        if self.network or (not _NETWORK.search(error) and not run.hosts):
            return ""
        return f": {asked_for(asked)}" if asked else f": a smoke test has no network: {_GIVE_DATA}"

    def _not_started(self, lines: list[str]) -> str | None:
        """Explain a command that the launcher, or Python, could not start at all."""
        for line in lines:
            if said := _NOT_STARTED.match(line):
                missing = said["missing"]
                return self._missing(missing) if missing else self._refused(said["refused"], said["why"])
            if said := _NO_FILE.match(line):
                return self._missing(said[1])
            if said := _NO_MODULE.match(line):
                name = said[1] or said[2]
                where = f"{self.key('run')}: no module {name!r} in the image"
                return where + (self._left_out(name) or nearest(name, self._modules()))
            if said := _NO_INTERPRETER.match(line):
                return self._interpreter(self.command[0], said[1])
        return None

    def _path(self, word: str) -> str:
        """Return the absolute path of a file that a command names."""
        return word if word.startswith("/") else f"{self.folder}/{word.removeprefix('./')}"

    def _missing(self, word: str) -> str:
        """Explain a file or command that does not exist in the image, or whose interpreter does not."""
        inside = self._path(word).removeprefix(f"{self.folder}/")
        if "/" not in word:
            known = ["python", "python3", "bash", "sh", "torchrun", "accelerate", "deepspeed"]
            return f"{self.key('run')}: no command {word!r} in the image{nearest(word, known)}"
        file = self.local(self._path(word))
        if file is None:
            return f"{self.key('run')}: no file {word if word.startswith('./') else inside} in the image"
        first = file.read_bytes().split(b"\n", 1)[0].decode(errors="replace")
        if first.startswith("#!"):
            return self._interpreter(word, first.removeprefix("#!").strip(" "))
        return f"{self.key('run')}: {relative(file)} is not in the image: add it to code in {FILE}"

    def _interpreter(self, word: str, name: str) -> str:
        """Explain a script whose ``#!`` line names what the image does not have."""
        where = f"{self.shown(self._path(word))}:1"
        if name.endswith("\r"):
            return (
                f"{where}: the line ends with a carriage return, so that there is no such interpreter: save it with LF"
            )
        return f"{where}: the image has no interpreter {name!r}: write '#!/usr/bin/env python3' or '#!/bin/bash'"

    def _refused(self, word: str, why: str) -> str:
        where = self.shown(self._path(word))
        if "ermission" in why:
            return f"{self.key('run')}: {where} is not executable: run 'chmod +x {where}'"
        if "format" in why:
            return f"{where}:1: the file has no #! line: begin it with '#!/usr/bin/env python3' or '#!/bin/bash'"
        return f"{self.key('run')}: cannot execute {word}: {why}"

    def _in_shell(self, lines: list[str]) -> str | None:
        """Return the last error of a shell script of the user's."""
        for line in reversed(lines):
            if said := _SHELL.match(line):
                return f"{self.shown(self._path(said['file']))}:{said['line']}: {said['what']}"
        return None

    def _in_python(self, lines: list[str], hosts: list[str]) -> str | None:
        """Return the last exception that has a line of the user's, else the last.

        An exception which says that a worker has exited does not replace that of the worker.
        """
        where, error = "", ""
        for traceback in tracebacks(lines):
            own = [(path, line) for path, line in traceback.frames if path.startswith(f"{self.folder}/")]
            if own and not (where and _WORKER_EXITED.match(traceback.error)):
                where, error = f"{self.shown(own[-1][0])}:{own[-1][1]}", traceback.error
            elif not where:
                error = traceback.error
        if not error:
            return None
        return f"{where or self.key('run')}: {error[:300]}{self._advice(error, Run(1, lines, hosts))}"

    def _advice(self, error: str, run: Run) -> str:
        """Return what to do about an exception: `` : do this``; empty if nothing is known about it."""
        kind, _, text = error.partition(": ")
        if kind in ("SyntaxError", "IndentationError", "TabError") or (self.otherwise and "--help" in error):
            return self.otherwise if "--help" in error else ""
        if kind == "ModuleNotFoundError" and (named := re.search(r"No module named '([\w.]+)'", text)):
            return f": {self._module_advice(named[1])}"
        if kind in ("ImportError", "OSError") and (library := re.match(r"(lib[\w.+-]+\.so[.\d]*): cannot open", text)):
            base = self.recipe.base.name if self.recipe else ""
            return f": add {packages_with([library[1]], base)} to system in {FILE}"
        if advice := self._package_advice(text, run.lines):
            return f": {advice}"
        if kind == "FileNotFoundError" and (named := re.search(r"No such file or directory: '(.+)'", text)):
            return f": {self._file_advice(named[1])}"
        if "getpwuid" in text:
            return f": the image has no such user: set USER to a name in environment in {FILE}"
        if kind == "PermissionError":
            return f": the image runs as any user: write to {self.folder}, /tmp or a folder that is mounted"
        if "[Errno 30]" in text and re.search(r"['/]data\b", text):
            return f": /data is mounted read-only: write to {self.folder} or /tmp"
        # What a module does not have is missing with other arguments, too.
        missing = kind in ("NameError", "ImportError") or text.startswith("module '")
        return self._network(error, run) or ("" if missing else self.otherwise)

    def _module_advice(self, module: str) -> str:
        top = module.split(".")[0]
        framework = _FRAMEWORKS.get(top)
        if framework:
            return f"the image has no {top}: set extends to a target with {framework} ('trainyard list' shows them)"
        if without := import_names.removed(top):
            return f"Python {without} has no {top} any longer: set base in {FILE} to one with an earlier Python"
        known = import_names.proposed(module) or None
        if self.recipe and (version := self.recipe.versions.get(known or "")):
            return f"{known} {version}, which the image has, has no {top}"
        name = "the package that has it" if known is None else "it" if known == top else f"{known}, which has it,"
        if left_out := self._left_out(module).removeprefix(": "):
            return left_out
        add = f"add {name} to requirements in {FILE}"
        if known is None and self.files and (self.files.root / "__init__.py").is_file():
            return f"if {top} is this folder, which is a package, run trainyard in the folder above; else {add}"
        return add

    def _package_advice(self, text: str, lines: list[str]) -> str:
        """Return what to do if a package of the image lacks a name, or is of another time than numpy; empty if not."""
        old = re.search(_OF_OLD_NUMPY, text) and re.findall(r"-packages/(\w+)", self._warning(lines))
        named = re.search(_LACKS, text)
        module = old[-1] if old else named["module"] or named["of"] if named else ""
        path = re.search(r"\((\S+)\)$", text)
        if path and path[1].startswith(f"{self.folder}/"):
            hides = path[1].startswith((f"{self.folder}/{module}.py", f"{self.folder}/{module}/__init__.py"))
            known = hides and import_names.proposed(module)
            return f"{self.shown(path[1])} hides the package {known}: rename it" if known else ""
        installed, root = self.recipe.versions if self.recipe else {}, import_names.root(module) if module else ""
        # Not what has a part of a namespace package, such as google, nor the framework, whose version the target has.
        names = [name for name in wheel_contents.providers().get(root, ()) if name in installed]
        names = [name for name in names if not self.recipe or name not in self.recipe.framework.packages]
        shown = " and ".join(f"{name} {installed[name]}" for name in names)
        if names[1:]:
            return f"{shown} have the same module, {root}, and one overwrites the other: require one of them alone"
        if names and old:
            return f"{shown} was built for numpy 1: require a later one in {FILE}, or numpy<2"
        if not names or named is None or "'numpy.ndarray' object" in text:
            return ""
        version, lacks = installed[names[0]], named["name"] or named["attribute"]
        major = ".".join(version.split(".")[: 2 if version.startswith("0.") else 1])
        earlier = f"if an earlier one has it, require that in {FILE}, as in {names[0]}<{major}"
        return f"{shown}, which the image has, has no {lacks}: {earlier}"

    @staticmethod
    def _warning(lines: list[str]) -> str:
        """Return the log from numpy's warning about a module on, up to the next traceback; empty without one."""
        text = "\n".join(lines)
        return text[text.find(_OLD_NUMPY) :].split("AttributeError: _ARRAY_API")[0] if _OLD_NUMPY in text else ""

    def _left_out(self, module: str) -> str:
        """Return `` : ...`` for a module that the repository has and the image does not."""
        if self.files is None:
            return ""
        parts = Path(*module.split("."))
        for place in (self.files.root, self.files.root / "src"):
            for path in (place / parts, place / f"{parts}.py"):
                if path.exists():
                    return f": {relative(path)} is not in the image: add it to code in {FILE}"
        return ""

    def _file_advice(self, path: str) -> str:
        if file := self.local(path if path.startswith("/") else f"{self.folder}/{path}"):
            return f"add {relative(file)} to code in {FILE}, or give its folder as smoke.data"
        return "a smoke test finds data in /data: give its folder as smoke.data, and name /data in smoke.args"

    def _files(self) -> list[str]:
        """Return files of the code that could be meant, relative to the repository."""
        if self.files is None:
            return []
        root, patterns = self.files.root, ("*.py", "*.sh", "*/*.py", "*/*.sh", "*/*/*.py")
        files = [path.relative_to(root) for pattern in patterns for path in root.glob(pattern)]
        return [path.as_posix() for path in files if not path.parts[0].startswith(".")]

    def _modules(self) -> list[str]:
        names = [name.removesuffix(".py").removesuffix("/__init__").replace("/", ".") for name in self._files()]
        return [name.removeprefix("src.") for name in names]


_GIVE_DATA = f"give the files as smoke.data in {FILE}, and read them from /data, or give '--smoke-network'"


def asked_for(hosts: Iterable[str]) -> str:
    """Return ``asked for huggingface.co, which a smoke test cannot reach``, and what to do."""
    return f"asked for {', '.join(hosts)}, which a smoke test cannot reach: {_GIVE_DATA}"
