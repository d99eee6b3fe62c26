"""Ask the build backends of projects (PEP 517, PEP 660) in containers without a network, and keep what they tell.

A build backend is third-party code. It runs as a user without rights, with limits, in a container that has a copy
of the project, what the project's ``[build-system]`` requires, and nothing else of this machine: no network, no
variables, no credentials. uv downloads what the build requires, wheels alone, on the host, and runs nothing of it.

An answer is kept in the state folder with the files that it was made from: those that the backend opened, and the names
of all. It is asked again when one of them changes.
"""

from __future__ import annotations

import dataclasses
import hashlib
import io
import json
import logging
import os
import re
import shutil
import stat
import tarfile
import tempfile
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path, PurePosixPath
from typing import IO, Any, TypeVar

import pyproject_hooks
from docker.models.containers import Container
from packaging.utils import canonicalize_name

from trainyard.common import git, settings
from trainyard.common.context import Context
from trainyard.common.errors import StepFailed, UserError, one_line
from trainyard.image import base_image, resolver
from trainyard.sandbox import containers
from trainyard.spec import state, yaml_source
from trainyard.spec.architectures import ARCHITECTURES
from trainyard.spec.catalog import bases, plain_bases
from trainyard.spec.kinds import Wheels
from trainyard.spec.markers import requirement
from trainyard.spec.model import Spec
from trainyard.spec.naming import FILE_EPOCH, LABELS, NAME
from trainyard.spec.repository_files import git_root
from trainyard.spec.workspace import Told
from trainyard.workspace import code_files, import_names, indexes, python_projects
from trainyard.workspace.lines import without_credentials
from trainyard.workspace.project import IN_CONTAINER, Project
from trainyard.workspace.python_projects import Backend

S = TypeVar("S", bound=Spec)

logger = logging.getLogger(__name__)

#: Seconds that a build backend may take: 4 for any that was tried, more where it makes a wheel with gigabytes of data.
_SECONDS = 300

#: Bytes that are read of what a container wrote: with a wheel, and without; and of its log.
_LARGEST, _SMALL, _LOG = 4 << 30, 1 << 28, 1 << 20

#: How often a build backend may ask for more than it has; each one that was tried knew all at once.
_ROUNDS = 3

#: The folder of the container with everything that it is given, and the user that the backend runs as.
_FOLDER, _USER = "trainyard", 1000

#: The file in which ``git archive`` says which commit it is of.
_ARCHIVAL = ".git_archival.txt"

#: What a container with a build backend may do, besides :data:`trainyard.common.docker_engine.LIMITS`.
_RIGHTS: dict[str, Any] = {
    "cap_drop": ["ALL"],
    "security_opt": ["no-new-privileges"],
    "mem_limit": 4 << 30,
    "pids_limit": 1024,
}

#: The variables of this machine that a build backend gets: they say the version where no git is.
_VERSIONS = re.compile(r"SETUPTOOLS_SCM_PRETEND_VERSION\w*|PDM_BUILD_SCM_VERSION")

#: Programs that compile. A build backend that fails after it started one of them needs a compiler.
_COMPILERS = re.compile(
    r"(.*-)?(cc|gcc|g\+\+|c\+\+|clang|clang\+\+|nvcc|gfortran|cargo|rustc|cmake|ninja|meson|maturin)(-\d+)?"
)

#: Programs that read nothing of a project that is not recorded.
_HARMLESS = re.compile(r"python[\d.]*|git|hg|uname|ldconfig|ld")


@dataclass(frozen=True)
class Answer:
    """Hold what a container with a build backend leaves.

    Attributes:
        facts: what :func:`trainyard.image.ask_backend.main` returns.
        log: its last lines.
        reads: files of the project that were opened; ``programs``: names of those that were started.
    """

    facts: Mapping[str, Any]
    log: str
    reads: frozenset[str]
    programs: frozenset[str]

    @property
    def failure(self) -> str:
        """Return why it failed, a few words; empty if it did not."""
        if not self.facts.get("failure"):
            return ""
        lines = [line.strip() for line in self.log.splitlines() if line.strip()]
        errors = [line for line in lines if re.match(r"[\w.]*(Error|Exception|error)\b", line)]
        return one_line(without_credentials((errors or lines or [str(self.facts["failure"])])[-1]))[:300]

    @property
    def compiles(self) -> bool:
        """Return whether it failed after it had started a program that compiles."""
        return bool(self.facts.get("failure")) and any(map(_COMPILERS.fullmatch, self.programs))


class Backends:
    """Ask build backends in containers of a base's Python, which is made when the first one is asked.

    Args:
        context: of the command. ``base``: name of a base (images/bases.yaml) without a framework.
        target: in its image, a build backend that could not import a module of the target is asked again.
    """

    def __init__(self, context: Context, base: str, target: Spec | None = None) -> None:
        self._context, self._base, self._target = context, base, target

    @property
    def _python(self) -> str:
        return bases()[self._base].python

    def told(self, project: Project, compiled: Collection[str] | None = ()) -> Told:
        """Return what the build backend of a project tells: asked now, or before if no file changed since.

        Args:
            compiled: canonical names of projects whose extensions the image gets from their source distributions; None:
                it compiles those of this one.
        Raises:
            UserError: it may not be asked, or compiles, which the image cannot.
            StepFailed: the container, or what it needs, could not be made.
        """
        backend, names = python_projects.backend(project.folder), code_files.below(project.folder)
        version = _archival(project.folder)
        kept = self._kept(backend, names)
        known = _recalled(kept, project.folder, version)
        if known is not None and not (self._of_target(known.failure) and self._target_image):
            return known
        self._allow(f"{backend.shown} tells {project.pending}")
        logger.info(f"{backend.shown} is asked for {project.pending}")
        with _folder_of(project.folder, names, version, yaml_source.LARGEST) as packed:
            answer = self._asked(backend.shown, backend, packed, None)
        own = compiled is None and bool(answer.facts.get("metadata"))
        told = Told(
            answer.facts.get("metadata", ""),
            answer.facts.get("entry_points", ""),
            tuple(answer.facts["roots"]) if "roots" in answer.facts else None,
            "" if own else answer.failure + self._of_target(answer.failure),  # a compiler, which the build has
        )
        if not own and (answer.compiles or (answer.failure and python_projects.extension(project.folder))):
            name = canonicalize_name(project.name or python_projects.of_metadata(project.file, told).name)
            if compiled is not None and name not in compiled and (name or not compiled):
                raise UserError(_needs_compiler(backend.shown, answer.failure))
        else:
            _keep(kept, told, project.folder, names, answer, version)
        return told

    def wheel(self, where: str, folder: Path, names: Iterable[str], out: Path) -> Path:
        """Make a wheel of a folder in ``out``, and return its path.

        Args:
            where: the line of the requirement, and what it says. ``names``: of the files that its build gets.
        Raises:
            UserError: the build backend may not be run, or compiles.
            StepFailed: it failed; the message ends with its error.
        """
        backend = python_projects.backend(folder)
        subject = f"{where}: {backend.title}"
        self._allow(f"{subject} makes its wheel")
        logger.info(f"{subject} makes its wheel")
        with _folder_of(folder, names, _archival(folder), _LARGEST) as packed:
            answer = self._asked(subject, backend, packed, out)
        made = sorted(out.glob("*.whl"))
        if answer.compiles:
            raise UserError(_needs_compiler(subject, answer.failure))
        if answer.failure or not made:
            reason = answer.failure + self._of_target(answer.failure)
            raise StepFailed(f"{where}: building its wheel failed: {reason or 'there is none'}")
        return made[0]

    def _of_target(self, failure: str) -> str:
        """Return advice on a failure to import a module that the target has; empty for another failure."""
        missing = re.search(r"No module named '([\w.]+)'", failure)
        provided = self._target.provided if self._target else ({}, {})
        if not missing or not import_names.is_provided(missing[1], {**provided[0], **provided[1]}, ()):
            return ""
        target = self._target.target if self._target else ""
        return f" (which {target} has: after 'trainyard image {target}' it is asked in that image)"

    @cached_property
    def _target_image(self) -> str:
        """Return the target's image if it is on this machine and has the same base; empty otherwise."""
        reference = f"{NAME}:{self._target.target}" if self._target else ""
        image = self._context.engine.existing_image(reference) if reference else None
        return reference if image and image.labels.get(f"{LABELS}.base") == self._base else ""

    def _allow(self, what: str) -> None:
        if self._context.no_build:
            raise UserError(f"{what}, and '--no-build' lets none run")

    def _kept(self, backend: Backend, names: list[str]) -> Path:
        about = [backend.name, backend.requires, backend.path, backend.file.parent.name, self._python, names]
        about += [[name, value] for name, value in _given_versions().items()]
        digest = hashlib.sha256(json.dumps(about).encode("utf-8", "surrogateescape")).hexdigest()
        return self._context.state / "backends" / f"{digest[:32]}.json"

    def _asked(self, subject: str, backend: Backend, packed: IO[bytes], out: Path | None) -> Answer:
        """Return what a build backend answers; what it asks for besides ``[build-system]`` is installed, too.

        Args:
            subject: of messages. ``out``: folder for a wheel; None: the backend tells about the project.
        """
        requires = list(backend.requires)
        for _ in range(_ROUNDS):
            request = {
                "project": IN_CONTAINER.removeprefix("file://") + backend.file.parent.name,
                "backend": backend.name,
                "path": backend.path,
                "requires": requires,
                "wheel": out is not None,
            }
            answer = self._run(subject, packed, request, out)
            if self._of_target(answer.failure) and self._target_image:
                logger.info(f"{subject} is asked in {self._target_image}: {answer.failure}")
                answer = self._run(subject, packed, request, out, self._target_image)
            more = [str(line) for line in answer.facts.get("requires", []) if line not in requires]
            if not more:
                return answer
            python_projects.check_build_requires(backend.file, more)
            requires += more
        raise StepFailed(f"{subject} asks for other requirements each time, the last {more[0][:100]!r}")

    def _run(
        self, subject: str, packed: IO[bytes], request: Mapping[str, Any], out: Path | None, image: str = ""
    ) -> Answer:
        with tempfile.TemporaryDirectory(prefix="trainyard-backend-") as temporary, tempfile.TemporaryFile() as tar:
            here = Path(temporary)
            self._install(subject, request["requires"], here / "site")
            _pack(tar, here / "site", request)
            record = {
                "TRAINYARD_RECORD": f"/{_FOLDER}/out/record",
                "TRAINYARD_PROJECT": request["project"],
                "TRAINYARD_SITE": f"/{_FOLDER}/site",
            }
            variables = {
                **_given_versions(),
                **record,
                "HOME": "/tmp",
                "LC_ALL": "C.UTF-8",
                "PATH": f"/{_FOLDER}/site/bin:{Wheels.search_path}",
                "PYTHONPATH": f"/{_FOLDER}/library",
                "PYTHONDONTWRITEBYTECODE": "1",
                "PYTHONHASHSEED": "0",
                "SOURCE_DATE_EPOCH": str(FILE_EPOCH),
                **(dict.fromkeys(("CC", "CXX"), "false") if image else {}),  # a base has no compiler either
            }
            with containers.Sandbox(self._context.engine, "backend", network="none") as sandbox:
                container = sandbox.create(
                    image or self._image,
                    [f"/{_FOLDER}/library/ask_backend.py", f"/{_FOLDER}"],
                    entrypoint=["python3", "-s"],
                    environment=variables,
                    user=f"{_USER}:{_USER}",
                    working_dir="/tmp",
                    **_RIGHTS,
                )
                for content in (packed, tar):
                    content.seek(0)
                    container.put_archive("/", content)
                container.start()
                if containers.wait(container, _SECONDS) is None:
                    containers.signal(container)
                    raise StepFailed(f"{subject} does not end: given up after {_SECONDS} s")
                return _answer(container, out, request["project"])

    def _install(self, subject: str, lines: Iterable[str], folder: Path) -> None:
        """Install wheels that a build requires for the container's Python; nothing of them runs."""
        platform = ARCHITECTURES[self._context.engine.architecture].wheel_platform(bases()[self._base].glibc)
        wanted = resolver.Project(
            "build-system", list(lines), self._python, self._context.offline, indexes=indexes.of_machine()
        )
        try:
            wanted.install(folder, platform)
        except resolver.Failed as error:
            reason = one_line(" ".join(error.stderr.split()))[:400]
            raise StepFailed(f"{subject}: what it requires cannot be installed from wheels: {reason}") from None

    @cached_property
    def _image(self) -> str:
        """Return an image of the base with its Python, made with the engine if it is not there.

        Raises:
            UserError: there is no engine, or the base cannot be had.
            StepFailed: the Debian archive cannot be reached.
        """
        reference = f"{NAME}-base:{self._base}-python"
        engine = self._context.engine
        if engine.existing_image(reference) is None:
            engine.require()
            if self._context.offline:
                raise UserError(f"no local image {reference}, for build backends: run 'trainyard lock' with a network")
            base = base_image.resolve(self._context, self._base).build_base
            logger.info(f"making {reference}, in which build backends run")
            with tempfile.TemporaryDirectory() as empty:
                shutil.copy(settings.ROOT / "templates" / "Dockerfile.backends", Path(empty) / "Dockerfile")
                words = [f"--builder={engine.docker_context}", f"--build-arg=BASE={base}", f"--tag={reference}"]
                engine.buildx("build", "--load", *words, empty)
        return reference


def of_spec(spec: Spec) -> Backends:
    """Return what asks build backends for the image of a repository: in its base, or else in the stable Debian."""
    base, target = spec.base if spec.base in plain_bases() else "debian-13", spec.target_below
    return Backends(spec.context, base, target if target and target.base == base else None)


def asked(spec: S) -> S:
    """Return the spec of a repository with what build backends tell of its projects that no static table describes.

    Raises:
        UserError: a project has a mistake; see also :meth:`Backends.told`.
        StepFailed: see there.
    """
    workspace, build = spec.workspace, spec.workspace.document.build
    if not python_projects.pending(workspace):
        return spec
    backends = of_spec(spec)
    compiled = {canonicalize_name(requirement(text).name) for text in (build.packages_compiled if build else ())}
    while pending := python_projects.pending(workspace):
        own = workspace.root if workspace.compiles_own else None
        new = {one.folder: backends.told(one, None if one.folder == own else compiled) for one in pending}
        workspace = dataclasses.replace(workspace, told={**workspace.told, **new})
    return spec.model_copy(update={"workspace": workspace})


def _needs_compiler(subject: str, failure: str) -> str:
    return (
        f"{subject} compiles, and no compiler is there ({failure}); 'compiler:' of trainyard.yaml is for "
        "torch.compile alone: publish its source distribution on an index, and name that in 'build'"
    )


def _given_versions() -> dict[str, str]:
    """Return the variables of this machine that say a version to build backends."""
    return {name: value for name, value in sorted(settings.environment().items()) if _VERSIONS.fullmatch(name)}


def _archival(folder: Path) -> str:
    """Return what ``git archive`` would write into .git_archival.txt; empty without git or a commit.

    setuptools_scm and hatch-vcs take the version from it, so that no container gets a .git, which may have credentials:
    https://setuptools-scm.readthedocs.io/en/latest/usage/#git-archives
    """
    if not (git_root(folder) / ".git").exists():
        return ""
    try:
        node = git.run(folder, "rev-parse", "HEAD")
        described = git.run(folder, "describe", "--tags", "--match", "*[0-9]*")
    except FileNotFoundError:
        return ""
    tag = described.stdout.decode(errors="replace").strip()
    return "" if node.returncode else f"node: {node.stdout.decode().strip()}\n" + f"describe-name: {tag}\n" * bool(tag)


@contextmanager
def _folder_of(folder: Path, names: Iterable[str], version: str, largest: int) -> Iterator[IO[bytes]]:
    """Yield a tar archive with files of a project; those of more than ``largest`` bytes are empty in it."""
    top = f"{IN_CONTAINER.removeprefix('file:///')}{folder.name}"
    with tempfile.TemporaryFile() as file:
        with tarfile.open(fileobj=file, mode="w") as tar:
            folders = {parent.as_posix() for name in names for parent in PurePosixPath(top, name).parents}
            for name in sorted(folders - {".", _FOLDER}):
                _add(tar, name, tarfile.DIRTYPE)
            for name in names:
                path = folder / name
                about = path.lstat()
                if stat.S_ISLNK(about.st_mode):
                    _add(tar, f"{top}/{name}", tarfile.SYMTYPE, link=os.readlink(path))
                elif stat.S_ISREG(about.st_mode):
                    mode = 0o755 if about.st_mode & 0o100 else 0o644
                    size = about.st_size if about.st_size <= largest else 0
                    with path.open("rb") as content:
                        _add(tar, f"{top}/{name}", content=content, size=size, mode=mode)
            if version:
                _add_text(tar, f"{top}/{_ARCHIVAL}", version)
        yield file


def _add(
    tar: tarfile.TarFile,
    name: str,
    kind: bytes = tarfile.REGTYPE,
    content: IO[bytes] | None = None,
    *,
    size: int = 0,
    link: str = "",
    mode: int = 0o755,
) -> None:
    entry = tarfile.TarInfo(name)
    entry.type, entry.mode, entry.linkname, entry.size = kind, mode, link, size
    entry.uid = entry.gid = _USER
    entry.mtime = FILE_EPOCH
    tar.addfile(entry, content)


def _add_text(tar: tarfile.TarFile, name: str, text: str) -> None:
    _add(tar, name, content=io.BytesIO(text.encode()), size=len(text.encode()), mode=0o644)


def _pack(file: IO[bytes], site: Path, request: Mapping[str, Any]) -> None:
    """Write the tar archive of what runs in the container: program, pyproject_hooks, and what the build requires."""

    def of_root(entry: tarfile.TarInfo) -> tarfile.TarInfo | None:
        entry.uid = entry.gid = 0
        return entry if entry.isreg() or entry.isdir() else None

    here, hooks = Path(__file__).parent, Path(pyproject_hooks.__file__).parent
    with tarfile.open(fileobj=file, mode="w") as tar:
        if site.is_dir():
            tar.add(site, f"{_FOLDER}/site", filter=of_root)
        tar.add(hooks, f"{_FOLDER}/library/{hooks.name}", filter=of_root)
        for name, other in (("ask_backend.py", "ask_backend.py"), ("record_reads.py", "sitecustomize.py")):
            tar.add(here / name, f"{_FOLDER}/library/{other}", filter=of_root)
        _add_text(tar, f"{_FOLDER}/request.json", json.dumps(request))
        _add(tar, f"{_FOLDER}/out", tarfile.DIRTYPE)


def _answer(container: Container, out: Path | None, project: str) -> Answer:
    """Return what a container wrote, and put its wheels into ``out``.

    Raises:
        StepFailed: it wrote too much.
    """
    pieces, _ = container.get_archive(f"/{_FOLDER}/out")
    facts: dict[str, Any] = {"failure": "it wrote no answer"}
    record = ""
    with tempfile.TemporaryFile() as file:
        for piece in pieces:
            file.write(piece)
            if file.tell() > (_LARGEST if out else _SMALL):
                raise StepFailed(f"the build backend of {project.rpartition('/')[2]} wrote {file.tell()} bytes")
        file.seek(0)
        with tarfile.open(fileobj=file) as tar:
            for entry in tar:
                name = entry.name.removeprefix("out/")
                content = tar.extractfile(entry) if entry.isreg() and "/" not in name else None
                if content and name == "answer.json" and entry.size <= _LOG:
                    facts = _facts(content.read())
                elif content and name == "record":
                    record = content.read(_LOG).decode(errors="replace")
                elif content and name.endswith(".whl") and out:
                    out.mkdir(parents=True, exist_ok=True)
                    with (out / name).open("wb") as made:
                        shutil.copyfileobj(content, made)
    lines = [line.partition(" ") for line in record.splitlines()]
    log = container.logs(tail=200)[-_LOG:].decode(errors="replace")
    return Answer(
        facts,
        log,
        frozenset(name for kind, _, name in lines if kind == "read"),
        frozenset(name for kind, _, name in lines if kind == "run"),
    )


def _facts(content: bytes) -> dict[str, Any]:
    """Return an answer of :mod:`trainyard.image.ask_backend`; a failure if the build backend wrote another one."""
    types = {"requires": list, "metadata": str, "entry_points": str, "roots": list, "failure": str}
    wrong = {"failure": "it wrote no answer"}
    try:
        found = json.loads(content)
    except (ValueError, RecursionError):
        return wrong
    known = isinstance(found, dict) and all(isinstance(found[key], types.get(key, object)) for key in found)
    lists = (*found.get("requires", ()), *found.get("roots", ())) if known else (0,)
    return found if all(isinstance(one, str) for one in lists) else wrong


def _keep(path: Path, told: Told, folder: Path, names: Iterable[str], answer: Answer, version: str) -> None:
    """Keep an answer with the hashes of the files that it was made from: all, if a program may have read others."""
    everything = any(not _HARMLESS.fullmatch(program) for program in answer.programs)
    read = {name: _hash(folder, name, version) for name in (*names, _ARCHIVAL) if everything or name in answer.reads}
    state.own(path.parent)
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_suffix(f".{os.getpid()}")
    temporary.write_text(json.dumps({"told": dataclasses.asdict(told), "read": read}), encoding="utf-8")
    temporary.replace(path)


def _recalled(path: Path, folder: Path, version: str) -> Told | None:
    """Return an answer that was kept; None if there is none, or a file that it was made from changed."""
    try:
        kept = json.loads(path.read_text(encoding="utf-8"))
        if any(_hash(folder, name, version) != known for name, known in kept["read"].items()):
            return None
        roots = kept["told"]["roots"]
        return Told(**{**kept["told"], "roots": None if roots is None else tuple(roots)})
    except (OSError, ValueError, LookupError, TypeError, AttributeError):
        return None


def _hash(folder: Path, name: str, version: str) -> str:
    path = folder / name
    if name == _ARCHIVAL:
        data = version.encode()
    elif path.is_symlink():
        data = os.fsencode(os.readlink(path))
    else:
        about = path.lstat()
        data = path.read_bytes() if about.st_size <= yaml_source.LARGEST else str(about.st_size).encode()
    return hashlib.sha256(data).hexdigest()
