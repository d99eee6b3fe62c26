"""Check a user's repository before anything is resolved or built: what cannot work, and what most likely does not.

Only what is certain to fail is refused. A command may be a program of a package, or a line for a shell: then nothing is
known of it, and nothing is said.
"""

from __future__ import annotations

import logging
import os
import posixpath
import re
import shlex
import stat
import sys
from collections import Counter
from collections.abc import Collection, Container, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from packaging.utils import canonicalize_name

from trainyard.common.errors import UserError, nearest
from trainyard.oci import secret_scan
from trainyard.spec import catalog, yaml_source
from trainyard.spec.markers import allows
from trainyard.spec.model import RepositorySpec, relative
from trainyard.spec.naming import FOLDER
from trainyard.spec.units import in_units
from trainyard.workspace import (
    code_files,
    dockerignore,
    python_projects,
    requirement_choice,
    requirements,
    system_libraries,
)
from trainyard.workspace.code_files import CodeFile, Listed
from trainyard.workspace.import_names import proposed
from trainyard.workspace.lines import syntax_error
from trainyard.workspace.python_survey import Sources
from trainyard.workspace.requirements import Wanted

logger = logging.getLogger(__name__)

#: Bytes of all code from which on most of it is data.
LARGE = 10**9

#: Options of Python: those without a value, or with it in the same word, and those that the next word is the value of
#: (https://docs.python.org/3/using/cmdline.html).
_PYTHON, _SWITCH = re.compile(r"python(3(\.\d+)?)?"), re.compile(r"-([bBdEiIOPqRsSuvx]+|[WX].+)")
_WITH_VALUE = ("-W", "-X", "--check-hash-based-pycs")

#: What starts a script in several processes. No option takes the path of a Python file; these take the script away.
_LAUNCHER = re.compile(r"(torchrun|deepspeed|accelerate launch|python3? -m torch\.distributed\.(run|launch)) ")
_NO_SCRIPT = {"-m", "--module", "--no-python", "--no_python"}

#: Errors of syntax that no newer Python takes.
_NOT_PYTHON = re.compile(r"was never closed|indent|tabs|Missing parentheses in call to 'print'")

#: Debian packages with a compiler, or that depend on one.
_COMPILER = re.compile(r"(g\+\+|gcc|clang|gfortran|build-essential|cargo|rustc|nvidia-cuda-toolkit)(?![a-z])")


@dataclass
class Checked:
    """Hold what was found.

    Attributes:
        files: of the code; empty if one must not be in an image.
        size: of the code, in bytes.
        refused: lines about what cannot work; ``notes``: about what most likely does not.
    """

    files: list[CodeFile] = field(default_factory=list)
    size: int = 0
    refused: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def note(self, text: str) -> None:
        """Add a note, and report it at once: what follows may take longer."""
        self.notes.append(text)
        logger.warning(text)

    @contextmanager
    def refusing(self) -> Iterator[None]:
        """Add the :class:`UserError` that is raised in its body."""
        try:
            yield
        except UserError as error:
            if str(error) not in self.refused:
                self.refused.append(str(error))


def require(spec: RepositorySpec) -> list[CodeFile]:
    """Return the files of the code of a repository that :func:`check` does not refuse.

    Raises:
        UserError: it does; the message is the first line, and the others are reported as errors.
    """
    found = check(spec)
    for line in found.refused[1:]:
        logger.error(line)
    if found.refused:
        raise UserError(found.refused[0])
    return found.files


def check(spec: RepositorySpec) -> Checked:
    """Check the code, the command and the requirements of a repository, without an engine or a network.

    10,000 files take 0.6 s on 2 cores (2026-11-26).
    """
    found, wanted, read = Checked(), Wanted(), False
    listed: dict[str, Listed] = {}
    with found.refusing():
        listed = code_files.listing(spec.workspace) if spec.has_code else {}
    with found.refusing():
        wanted, read = requirements.of_platform(spec), True
    with found.refusing():
        for text in python_projects.notes(spec.workspace):
            found.note(text)
    build = spec.workspace.document.build
    if build and not any(map(_COMPILER.match, build.packages)):
        line = yaml_source.line_of(yaml_source.read(spec.workspace.file), ("build",))
        found.note(f"{relative(spec.workspace.file)}:{line}: build: 'packages' has no compiler, such as g++")
    if listed:
        found.size = _check_sizes(found, listed)
        lines = (*wanted.lines, *wanted.compiled)
        named = {line.name for line in lines} | {one.name for one in wanted.sources}
        provided = [names for one in (spec.extends, spec) for names in one.provided]
        program, module = program_of(spec.run or [])
        with found.refusing():
            reason = (
                _no_program(spec, listed)
                or _missing_module(spec, module, listed, named.union(*provided))
                or _missing_file(spec, program, listed)
            )
            if reason:
                line = yaml_source.line_of(yaml_source.read(spec.workspace.file), ("run",))
                where = f"{relative(spec.workspace.file)}:{line}: run"
                found.refused.append(f"{where}: '{shlex.join(spec.run or [])}': {reason}")
            sources = Sources({path: one.path for path, one in listed.items()})
            start = _start(spec, program, module, sources)
            if start in listed:
                _check_syntax(found, spec, start, listed, sources)
            untold = any("dependencies" in one.pending for one in python_projects.pending(spec.workspace))
            whole = requirement_choice.is_complete(spec.workspace.document.requirements.file)
            of_lock = {line.name for line in wanted.constraints if line.file.name == "uv.lock"}
            pins = named.union(*spec.provided).difference(*spec.extends.provided) | named | of_lock
            _check_system(found, spec, pins)
            if read and provided[0] and "" not in named and not untold and not whole:
                _check_imports(found, spec, start, sources, pins, pins.union(*provided))
        with found.refusing():
            installed = named | ({""} if wanted.compiled else set())
            folders = python_projects.folders_of(spec.workspace)
            folders = [one for one in folders if not (spec.workspace.compiles_own and one == spec.workspace.root)]
            for text in python_projects.extensions(folders, installed):
                found.note(text)
        with found.refusing():
            found.files = code_files.inspected(spec.workspace, listed)
            if files := code_files.pointers(spec.workspace, found.files):
                more = f", and {len(files) - 1} more files like this" if files[1:] else ""
                found.note(f"{files[0]}: what Git LFS has in the place of the file{more}: fetch it with 'git lfs pull'")
            if seen := [f"{relative(one.source)}:{one.address}" for one in found.files if one.address]:
                more = f" ({len(seen) - 1} more file{'s' if seen[2:] else ''} like this)" if seen[1:] else ""
                found.note(f"{seen[0]}: an address with a password is copied into the image{more}: remove a real one")
    _check_settings(found, spec)
    return found


def _check_sizes(found: Checked, listed: Mapping[str, Listed]) -> int:
    """Return the bytes of the code, and note the largest folders if they are many."""
    folders: Counter[str] = Counter()
    for path, one in listed.items():
        folders["/".join(path.split("/")[:-1][:2]) or "."] += os.lstat(one.path).st_size
    size = folders.total()
    if size > LARGE:
        largest = ", ".join(f"{name} {in_units(bytes_)}" for name, bytes_ in folders.most_common(5))
        found.note(
            f"the code has {in_units(size)}, all of which is built and pushed: move data to a bucket or a mounted "
            f"folder, or add it to {dockerignore.FILE}; the largest folders: {largest}"
        )
    return size


def program_of(command: Sequence[str]) -> tuple[str, str]:
    """Return the file below /workspace, or the module, that a command runs; empty if that is not known for certain."""
    name, *words = command or [""]
    file, module = name if "/" in name else "", ""
    if launcher := _LAUNCHER.match(" ".join([*command, ""])):
        words = list(command[launcher[0].count(" ") :])
        scripts = [word for word in words if word.endswith(".py") and not word.startswith("-")]
        file = scripts[0] if scripts and _NO_SCRIPT.isdisjoint(words) else ""
    elif name in ("bash", "sh") and words and "/" in words[0]:  # else it is also looked for in PATH
        file = words[0]
    elif _PYTHON.fullmatch(name):
        while words and (words[0] in _WITH_VALUE or _SWITCH.fullmatch(words[0])):
            words = words[2 if words[0] in _WITH_VALUE else 1 :]
        module = words[1] if words[:1] == ["-m"] and words[1:] else ""
        file = words[0] if words and not words[0].startswith("-") else ""
    path = posixpath.normpath(posixpath.join(FOLDER, file))
    return path.removeprefix(f"{FOLDER}/") if path.startswith(f"{FOLDER}/") and "$" not in path else "", module


def _missing_file(spec: RepositorySpec, path: str, listed: Mapping[str, Listed]) -> str:
    """Return why a file cannot be run, or the code does not have it; empty if it does."""
    if path.endswith(".ipynb"):
        return f"a notebook, which no program runs: make one of it with 'jupyter nbconvert --to script {path}'"
    if not path or _is_there(path, listed):
        return ""
    if (spec.workspace.root / path).exists():
        return f"'{path}' is left out by .gitignore, {dockerignore.FILE} or 'code'"
    return f"no file '{path}' in the code" + nearest(path, [one for one in listed if one[-3:] == path[-3:]])


def _is_there(path: str, listed: Mapping[str, Listed]) -> bool:
    """Return whether the code has a file, or a folder or a link that may have it."""
    above = (path[:place] for place, letter in enumerate(path) if letter == "/")
    return path in listed or any(one in listed for one in above) or any(one.startswith(f"{path}/") for one in listed)


def _missing_module(spec: RepositorySpec, name: str, listed: Mapping[str, Listed], known: Container[str]) -> str:
    """Return why ``python -m`` does not find a module in a package of the code; empty if it may find it.

    Args:
        known: canonical names of packages that may be meant instead.
    """
    top, inside = name.partition(".")[0], name.replace(".", "/")
    roots = [code_files.destination(spec.workspace, root) for root in python_projects.import_roots(spec.workspace)]
    prefixes = ["", *(f"{root}/" for root in roots)]
    modules = {path.removeprefix(one): listed[path] for one in prefixes for path in listed if path.startswith(one)}
    others = canonicalize_name(top) in known or "PYTHONPATH" in spec.environment
    if others or f"{top}/__init__.py" not in modules:
        return ""
    if any(_is_there(one, modules) for one in (f"{inside}.py", f"{inside}/__main__.py")):
        return ""
    if f"{inside}/__init__.py" in modules:
        return f"the package '{name}' has no __main__.py"
    names = [path.removesuffix(".py").replace("/", ".") for path in modules if path.endswith(".py")]
    return f"no module '{name}' in the code{nearest(name, names)}"


def _no_program(spec: RepositorySpec, listed: Mapping[str, Listed]) -> str:
    """Return why the first word of ``run`` is no program although the code has a file of this name; empty if it may be.

    /workspace is not in PATH.
    """
    name, *arguments = spec.run or [""]
    path, ending = posixpath.normpath(name), posixpath.splitext(name)[1]
    interpreter = {".py": "python", ".sh": "bash"}.get(ending)
    if path not in listed or not interpreter or "PATH" in spec.workspace.document.environment:
        return ""
    one = listed[path]
    if "/" not in name:
        scripts = (project.scripts for project in python_projects.projects(spec.workspace))
        reason = "" if any(name in each for each in scripts) else "a file is no program without a path"
    else:
        executable = os.lstat(one.path).st_mode & stat.S_IXUSR if one.executable is None else one.executable
        reason = "" if executable else "the file is not executable"
    return f"{reason}: write '{shlex.join([interpreter, path, *arguments])}'" if reason else ""


def _check_settings(found: Checked, spec: RepositorySpec) -> None:
    """Refuse secrets under ``environment``, and packages of ``system`` that the base's Debian does not have."""
    document, data = spec.workspace.document, yaml_source.read(spec.workspace.file)

    def refuse(*location: str | int, words: str) -> None:
        where = f"{relative(spec.workspace.file)}:{yaml_source.line_of(data, location)}: "
        if not any(one.startswith(where) for one in found.refused):  # as a file of the code
            found.refused.append(f"{where}{location[0]}: {words}")

    for name, value in document.environment.items():
        if kinds := secret_scan.in_setting(name, value):
            words = f"'{name}': {kinds[0]}, which everybody who can pull the image could read: remove it, and set it"
            refuse("environment", name, words=f"{words} where the image runs, as in 'trainyard run --env {name}=...'")
    gone = catalog.gone(spec.base)
    for position, name in enumerate(document.system):
        if name in gone:
            instead = f"write '{gone[name]}'" if gone[name] else "remove it"
            refuse("system", position, words=f"{spec.base} has no package '{name}': {instead}")


def _start(spec: RepositorySpec, program: str, module: str, sources: Sources) -> str:
    """Return the path of the Python file that the command starts with; empty if it is not known."""
    scripts = {name: target for one in python_projects.projects(spec.workspace) for name, target in one.scripts.items()}
    module = module or scripts.get((spec.run or [""])[0], "").partition(":")[0]
    file = program if program.endswith(".py") else ""
    return sources.path_of(module) or sources.path_of(f"{module}.__main__") or file


def _check_syntax(
    found: Checked, spec: RepositorySpec, start: str, listed: Mapping[str, Listed], sources: Sources
) -> None:
    """Refuse a command whose file is not Python, and note files that are not and that it imports.

    A newer Python of the image may know what this one does not.
    """
    here = f"{sys.version_info[0]}.{sys.version_info[1]}"
    newer = sys.version_info[:2] < tuple(map(int, spec.python_version.split(".")))
    more = f" (by Python {here}; the image has {spec.python_version})" if newer else ""
    if error := syntax_error(Path(listed[start].path)):
        if newer and not _NOT_PYTHON.search(error):
            found.note(error + more)
        else:
            found.refused.append(f"{error}: the command cannot start")
    for path, place in sources.unread(start).items():
        if error := syntax_error(Path(listed[path].path)):
            found.note(f"{error}{more}, and {place} imports it")


def _check_imports(
    found: Checked,
    spec: RepositorySpec,
    start: str,
    sources: Sources,
    named: Collection[str],
    known: Container[str],
) -> None:
    """Note the packages that the command always imports and nothing provides.

    Args:
        start: path of the file that the command starts with.
        named: canonical names of what the repository requires or has locked, ``known``: of these and of all that the
            target has.
    """
    closure = sources.closure(start, conditional=False)
    for module, (place, version) in requirement_choice.removed(closure, sources).items():
        if not allows(f"<{version}", spec.python_version):
            found.note(f"{place} imports {module}, which Python {version} has no longer: 'base' chooses an earlier one")
    for module, place in requirement_choice.missing(closure, sources, known, named).items():
        if name := proposed(module):
            found.note(
                f"{place} imports {module}, which neither the requirements nor '{spec.extends.target}' has: add "
                f"{name} to 'requirements' unless one of them needs it"
            )


def _check_system(found: Checked, spec: RepositorySpec, names: Collection[str]) -> None:
    """Note the Debian packages that wheels need and ``system`` lacks.

    Args:
        names: canonical names of what the repository requires or has locked.
    """
    asked = spec.workspace.document.system
    packages, reasons = system_libraries.lacking(names, spec.base, asked, spec.extends.system)
    if packages:
        found.note(
            f"{relative(spec.workspace.file)}: {', and '.join(reasons)}, which the image lacks: write 'system: "
            f"[{', '.join([*asked, *packages])}]'"
        )
