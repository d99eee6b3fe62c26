"""The files of a user's repository that go into the image, and what must not be among them."""

from __future__ import annotations

import os
import re
import shutil
import stat
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cache
from itertools import islice
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, NamedTuple, NoReturn

from trainyard.common import git
from trainyard.common.errors import StepFailed, UserError, nearest
from trainyard.oci import secret_scan
from trainyard.spec import pylock, yaml_source
from trainyard.spec import workspace as names
from trainyard.spec.model import relative
from trainyard.spec.naming import FOLDER, JOB_MARK
from trainyard.spec.repository_files import PARTIAL, git_root
from trainyard.spec.units import in_units
from trainyard.spec.workspace import Workspace
from trainyard.workspace import dockerignore, python_projects

if TYPE_CHECKING:
    from pathspec import GitIgnoreSpec

#: Most bytes of a file of the code. What is larger is data or weights, which every edit would upload again.
LARGEST = 50 * 10**6

#: Left out wherever they are: repositories, byte code, what tools write, and environments of editors.
_LEFT_OUT = frozenset({".git", ".trainyard", "__pycache__", ".devcontainer", ".DS_Store"})
_LEFT_OUT_ENDINGS = (".pyc", ".pyo", ".egg-info", PARTIAL)

#: Left out beside trainyard.yaml, so that other smoke arguments or a new lock do not change the code's layer.
_OWN = frozenset({names.FILE, *pylock.file_names(Path(pylock.REPOSITORY_FILE))})

#: What the names of files begin with that remove others when a layer is unpacked:
#: https://github.com/opencontainers/image-spec/blob/main/layer.md#whiteouts
_WHITEOUT = "/.wh."

#: How many files git is given on a command line.
_BATCH = 500

_CHUNK = 1 << 20

#: The comment at the top of a file that ``trainyard job`` writes.
_JOB = re.compile(rf"\A(?:#.*\n)*# {JOB_MARK}".encode())

#: How a file begins that stands for another: https://github.com/git-lfs/git-lfs/blob/main/docs/spec.md#the-pointer
_POINTER, _LARGEST_POINTER = b"version https://git-lfs.github.com/spec/v1\n", 1024


@dataclass(frozen=True)
class CodeFile:
    """A file or symbolic link of the code.

    Attributes:
        path: below /workspace, with slashes; ``source``: on this host.
        size: bytes in the image; 0 for links.
        executable: whether it can be executed.
        link: what a symbolic link refers to; None for files.
        crlf: its line ends are CRLF on this host and LF in the image.
        address: line of an address that seems to have a password; 0 if there is none.
        pointer: it is what Git LFS has in the place of a file that was not fetched.
    """

    path: str
    source: Path
    size: int
    executable: bool = False
    link: str | None = None
    crlf: bool = False
    address: int = 0
    pointer: bool = False

    @property
    def mode(self) -> int:
        """Permission bits: the group may write, because platforms start containers with any uid, in group 0."""
        return 0o777 if self.link is not None else 0o775 if self.executable else 0o664

    def chunks(self) -> Iterator[bytes]:
        """The content in the image.

        Raises:
            StepFailed: the file was changed or removed since it was collected.
        """
        count = 0
        try:
            with self.source.open("rb") as file:
                while data := file.read() if self.crlf else file.read(_CHUNK):
                    data = data.replace(b"\r\n", b"\n") if self.crlf else data
                    count += len(data)
                    yield data
        except OSError as error:
            raise StepFailed(
                f"{_shown(self.source)}: {error.strerror}: it was there when the code was listed"
            ) from None
        if count != self.size:
            raise StepFailed(f"{_shown(self.source)} changed while it was read: try again")


class Listed(NamedTuple):
    """A path that the repository has. Paths are text: a repository may have tens of thousands.

    Attributes:
        path: on this host, absolute; ``repository``: of git that lists it; empty without one.
        executable: what git's index says; None if it says nothing.
        tracked: whether it is in git's index.
    """

    path: str
    repository: str = ""
    executable: bool | None = None
    tracked: bool = False


def listing(workspace: Workspace) -> dict[str, Listed]:
    """Return the paths of ``code`` below /workspace, sorted: those that neither .gitignore nor .dockerignore leave out.

    Raises:
        UserError: ``code`` names what does not exist or is outside of the git repository, or has no files.
    """
    top = git_root(workspace.root)
    listed = _listed(workspace.root, top, folders(workspace))
    environments = {os.path.dirname(one.path) for one in listed if one.path.endswith("/pyvenv.cfg")}
    places = _Places(workspace)
    found: dict[str, Listed] = {}
    for one in listed:
        if _left_out(one.path, top, environments) or places.ignores(one.path):
            continue
        path = places.destination(one.path)
        if path in _OWN:
            continue
        if path in found and found[path].path != one.path:
            raise UserError(
                f"{_shown(found[path].path)} and {_shown(one.path)} would both be {FOLDER}/{path}: rename one, "
                f"or leave one out in {dockerignore.FILE}"
            )
        found[path] = one
    if workspace.converted:
        found[workspace.converted.name] = Listed(str(workspace.converted), str(top))
    if not found:
        raise UserError(
            f"{_where(workspace)}: code: no files: there are none, or .gitignore and {dockerignore.FILE} leave out all"
        )
    return {path: found[path] for path in sorted(found)}


def collect(workspace: Workspace) -> list[CodeFile]:
    """Return the files of ``code``; see :func:`listing` and :func:`inspected`, which raise a :class:`UserError`."""
    return inspected(workspace, listing(workspace))


def below(folder: Path) -> list[str]:
    """The files below a folder that .gitignore files do not leave out, relative to it and with slashes, sorted.

    Raises:
        UserError: git cannot list them.
    """
    listed = _listed(folder, git_root(folder), [folder])
    environments = {os.path.dirname(one.path) for one in listed if one.path.endswith("/pyvenv.cfg")}
    paths = (one.path for one in listed if not _left_out(one.path, folder, environments))
    return sorted(PurePosixPath(os.path.relpath(path, folder)).as_posix() for path in paths)


def destination(workspace: Workspace, path: Path) -> PurePosixPath:
    """Where a path of this host is below /workspace: as below trainyard.yaml's folder, else as in the repository."""
    return PurePosixPath(_Places(workspace).destination(str(path)))


class _Places:
    """The folders of the code: where their files are in the image, and which of them .dockerignore leaves out.

    The .dockerignore is that of trainyard.yaml's folder; a folder of code outside of it has its own.
    """

    def __init__(self, workspace: Workspace) -> None:
        self._folders = [f"{workspace.root}{os.sep}", f"{git_root(workspace.root)}{os.sep}"]
        outside = [Path(os.path.normpath(workspace.root / text)) for text in workspace.document.code]
        outside += python_projects.member_folders(workspace)
        self._matchers = [(self._folders[0], dockerignore.read(workspace.root))]
        self._matchers += [
            (f"{one}{os.sep}", dockerignore.read(one))
            for one in outside
            if one != workspace.root and not one.is_relative_to(workspace.root)
        ]

    def base(self, path: str) -> str:
        """The folder that decides where a path is in the image, with a slash at its end."""
        return next(folder for folder in self._folders if f"{path}{os.sep}".startswith(folder))

    def destination(self, path: str) -> str:
        """The path below /workspace, ``.`` for itself."""
        return path[len(self.base(path)) :].replace(os.sep, "/") or "."

    def ignores(self, path: str) -> bool:
        """Whether .dockerignore leaves a path out."""
        for folder, matcher in self._matchers:
            if path.startswith(folder):
                return matcher(path[len(folder) :].replace(os.sep, "/"))
        return False


def _shown(path: str | Path) -> str:
    """A path in messages; a symbolic link is shown as such, not as what it refers to."""
    folder, name = os.path.split(path)
    shown = (PurePosixPath(relative(Path(folder))) / name).as_posix()
    return shown.encode("utf-8", "backslashreplace").decode()


def _where(workspace: Workspace, position: int | None = None) -> str:
    """``trainyard.yaml:4``: the line of ``code``, or of one of its paths."""
    data = yaml_source.read(workspace.file)
    line = yaml_source.line_of(data, ("code",) if position is None else ("code", position))
    return f"{relative(workspace.file)}{f':{line}' if line else ''}"


def folders(workspace: Workspace) -> list[Path]:
    """Return the files and folders of ``code``, and those of the uv workspace members that it needs.

    Raises:
        UserError: one does not exist, or is outside of the git repository.
    """
    top, found = git_root(workspace.root), []
    for position, text in enumerate(workspace.document.code):
        path = Path(os.path.normpath(workspace.root / text))

        def refuse(words: str, position: int = position, text: str = text) -> NoReturn:
            raise UserError(f"{_where(workspace, position)}: code: '{text}' {words}")

        if not path.is_relative_to(top):
            refuse(
                f"is outside of {'the git repository' if (top / '.git').exists() else 'this folder'}, {relative(top)}: "
                "copy it here, or install it as one of the 'requirements'"
            )
        if not path.exists():
            siblings = [one.name for one in path.parent.iterdir()] if path.parent.is_dir() else []
            refuse(f"does not exist{nearest(path.name, siblings)}")
        if path.resolve() != path:
            refuse(f"is a symbolic link, or below one: write '{os.path.relpath(path.resolve(), workspace.root)}'")
        found.append(path)
    for folder in python_projects.member_folders(workspace):
        if not folder.is_relative_to(top):
            raise UserError(f"{relative(folder)}: a member of the uv workspace outside of the git repository")
        found.append(folder)
    return list(dict.fromkeys(found))


def _left_out(path: str, top: Path, environments: set[str]) -> bool:
    """Whether a path is never code, whatever the ignore files say."""
    parts = path[len(str(top)) + 1 :].split(os.sep)
    if not _LEFT_OUT.isdisjoint(parts) or any(part.endswith(_LEFT_OUT_ENDINGS) for part in parts):
        return True
    return any(path.startswith(f"{folder}{os.sep}") for folder in environments)


def _listed(root: Path, top: Path, folders: list[Path]) -> list[Listed]:
    if (top / ".git").exists() and shutil.which("git"):
        # A folder that the repository around it ignores, such as an unpacked source distribution, is no part of it.
        below = os.path.relpath(root, top)
        if below == "." or git.run(top, "check-ignore", "--quiet", "--", below).returncode:
            repositories: dict[Path, list[Path]] = {}
            for folder in folders:  # which may be in a submodule
                repositories.setdefault(git_root(folder), []).append(folder)
            return [one for folder, paths in repositories.items() for one in _tracked_and_new(folder, paths)]
        top = root
    _check_submodules(top, folders)
    return list(_walked(top, folders))


def _check_submodules(top: Path, folders: list[Path]) -> None:
    """Raise a UserError if an unpacked archive lacks a submodule of the code: https://git-scm.com/docs/gitmodules."""
    file = top / ".gitmodules"
    text = yaml_source.text(file, errors="replace") if file.is_file() and not file.is_symlink() else ""
    for name in re.findall(r"(?m)^\s*path\s*=\s*(.*?)\s*$", text):
        path = Path(os.path.normpath(top / name))
        if any(path.is_relative_to(one) for one in folders) and not any(path.glob("*")):
            raise UserError(
                f"{_shown(path)}: a git submodule, which a downloaded archive does not have: clone the repository with "
                "'git clone --recurse-submodules'"
            )


def _ls_files(repository: Path, options: list[str], paths: list[str]) -> list[str]:
    """The records that ``git ls-files`` prints about ``paths``, in which nothing is a pattern.

    Raises:
        UserError: it failed; the message has its first line.
    """
    ended = git.run(repository, "--literal-pathspecs", "ls-files", "-z", *options, "--", *paths)
    if ended.returncode:
        lines = ended.stderr.decode("utf-8", "replace").splitlines() or [f"exit status {ended.returncode}"]
        raise UserError(f"{relative(repository)}: git ls-files: {lines[0]}")
    return [os.fsdecode(record) for record in ended.stdout.split(b"\0") if record]


def _tracked_and_new(repository: Path, folders: list[Path]) -> Iterator[Listed]:
    """The files of a git repository below ``folders``: those in its index, and new ones that it does not ignore."""
    below = [os.path.relpath(folder, repository) for folder in folders]
    top = str(repository)
    file_modes = git.run(repository, "config", "--type=bool", "core.fileMode").stdout.strip() != b"false"
    real = os.path.realpath(top)
    seen = set()

    @cache
    def through_link(folder: str) -> bool:  # git takes what is below a folder that became a link for removed
        return os.path.realpath(os.path.join(top, folder)) != os.path.normpath(os.path.join(real, folder))

    for record in _ls_files(repository, ["--stage"], below):
        described, _, name = record.partition("\t")
        mode = described[:6]
        path = os.path.join(top, name)
        # A file in conflict is listed three times; one may be removed.
        if name in seen or not os.path.lexists(path) or through_link(os.path.dirname(name)):
            continue
        seen.add(name)
        if mode == "160000":
            if os.path.islink(path) or not os.path.exists(os.path.join(path, ".git")):
                raise UserError(f"{_shown(path)}: a git submodule that is not checked out: git submodule update --init")
            yield from _tracked_and_new(Path(path), [Path(path)])
            continue
        yield Listed(path, top, None if file_modes else mode == "100755", tracked=True)
    for name in _ls_files(repository, ["--others", "--exclude-standard"], below):
        if name.endswith("/"):  # another repository
            yield from _tracked_and_new(repository / name, [repository / name])
        else:
            yield Listed(os.path.join(top, name), top)


def _walked(top: Path, folders: list[Path]) -> Iterator[Listed]:
    """The files below ``folders`` that the .gitignore files from ``top`` on do not leave out, without git."""
    from pathspec import GitIgnoreSpec

    @cache
    def spec(folder: str) -> GitIgnoreSpec | None:
        try:
            found = GitIgnoreSpec.from_lines(yaml_source.text(Path(folder, ".gitignore")).splitlines())
            return _without_retries(found)
        except UserError:
            return None

    def ignored(path: str, is_folder: bool) -> bool:
        folder = path
        while folder != str(top):
            folder = os.path.dirname(folder)
            found = spec(folder)
            decision = found.check_file(path[len(folder) + 1 :] + "/" * is_folder).include if found else None
            if decision is not None:
                return bool(decision)
        return False

    def walk(path: str) -> Iterator[Listed]:
        is_folder = os.path.isdir(path) and not os.path.islink(path)
        if path != str(top) and (os.path.basename(path) in _LEFT_OUT or ignored(path, is_folder)):
            return
        if not is_folder:
            yield Listed(path)
        elif not os.path.isfile(os.path.join(path, "pyvenv.cfg")):
            for name in os.listdir(path):
                yield from walk(os.path.join(path, name))

    for folder in folders:
        # The folders between top and this one may be ignored, too.
        between = [one for one in reversed(folder.parents) if one != top and one.is_relative_to(top)]
        if not any(ignored(str(one), True) for one in between):
            yield from walk(str(folder))


def _without_retries(spec: GitIgnoreSpec) -> GitIgnoreSpec:
    """Make pathspec's expressions match what is between two wildcards at its first place only, in linear time.

    The second wildcard reaches all later places, because a set contains no slash, as for git.
    """
    text = r"(?:\\.|(?:\(\?!/\))?\[\^?]?[^]]*]|[^][\\()*])+"
    for one in spec.patterns:
        regex = re.sub(r"(\[\^/]\*)+", "[^/]*", one.regex.pattern if one.regex else "")
        regex = re.sub(r"(\\.|\[\^/])|(\[\^?]?[^]]*])", lambda found: found[1] or f"(?!/){found[2]}", regex)
        regex = re.sub(rf"\[\^/]\*({text})(?=\[\^/]\*)", r"(?>[^/]*?\1)", regex)
        first, *between = regex.split("(?:/.+)?")
        last = ["(?:/.+)?" + between.pop()] if between else []
        if last and first.startswith("^(?:.+/)?"):
            first = f"^(?>(?:.+?/)??{first[9:]}(?=/))"
        regex = "".join([first, *(f"(?>(?:/.+?)??{part}(?=/))" for part in between), *last])
        one.regex = re.compile(regex) if one.regex else None
    return spec


class _Refused(Exception):
    """A file that must not be in an image: why, and what to do; and the line, if it is one."""


#: Ending of a file that names package indexes -> what to write instead of a password:
#: https://docs.astral.sh/uv/concepts/authentication/http/,
#: https://pip.pypa.io/en/stable/reference/requirements-file-format/#using-environment-variables
_INSTEAD = {
    ".toml": "remove it, and set UV_INDEX_<NAME>_USERNAME and UV_INDEX_<NAME>_PASSWORD",
    ".txt": "write '${NAME}' in its place and set that variable",
    ".in": "write '${NAME}' in its place and set that variable",
}


def inspected(workspace: Workspace, listed: dict[str, Listed]) -> list[CodeFile]:
    """Return the files of a listing, read once.

    Line ends are LF where git has LF and the checkout has CRLF, as with ``core.autocrlf``
    (https://git-scm.com/docs/gitattributes#_text), and in scripts, since the kernel takes the CR of ``#!`` lines for a
    part of the interpreter's name. Files are executable where git says so if ``core.fileMode`` is off.

    Raises:
        UserError: one must not be in an image: a credential, more than 50 MB, a link that leads out of the code, a
            device. The message names the first and counts the others.
    """
    found, with_crlf, reasons = _read(workspace, listed)
    refused = list(reasons.values())
    if refused:
        others = len(refused) - 1
        more = f" ({others} more file{'s' if others > 1 else ''} like this)" if others else ""
        raise UserError(refused[0] + more)
    normalised = _normalised_by_git(with_crlf)
    return [_with_lf(file) if file.path in normalised else file for file in found]


def pointers(workspace: Workspace, files: Iterable[CodeFile]) -> list[str]:
    """Return the code's files, and those of the folder of data, that Git LFS has pointers in the place of."""
    found = [_shown(one.source) for one in files if one.pointer]
    data = workspace.data.rglob("*") if workspace.data else ()  # of which the first thousands say enough
    for path in islice(data, 10_000):
        if path.is_file() and path.stat().st_size < _LARGEST_POINTER and path.read_bytes().startswith(_POINTER):
            found.append(_shown(path))
    return list(dict.fromkeys(found))


def refused(workspace: Workspace) -> dict[str, str]:
    """Return path -> line of the files of ``code`` that must not be in an image; see :func:`inspected`.

    Raises:
        UserError: see :func:`listing`.
    """
    return _read(workspace, listing(workspace))[2]


def _read(workspace: Workspace, listed: dict[str, Listed]) -> tuple[list[CodeFile], dict[str, Listed], dict[str, str]]:
    """Return the files of a listing, those of git with CRLF, and path -> line of those that must not be in an image."""
    places = _Places(workspace)
    found: list[CodeFile] = []
    refused: dict[str, str] = {}
    with_crlf: dict[str, Listed] = {}
    own = {names.FILE: Listed(str(workspace.file))} if workspace.file.is_file() else {}  # labels and variables
    for path, one in (listed | own).items():
        try:
            file, crlf = _inspect(places, path, one)
        except _Refused as error:
            reason, *line = error.args
            more = "" if path in own else f", or add it to {dockerignore.FILE}"
            refused[path] = f"{':'.join([_shown(one.path), *map(str, line)])}: {reason}{more}"
            continue
        except OSError as error:
            refused[path] = f"{_shown(one.path)}: {error.strerror}"
            continue
        found += [file] if file and path not in own else []
        if crlf and one.tracked:
            with_crlf[path] = one
    return found, with_crlf, refused


def _inspect(places: _Places, path: str, one: Listed) -> tuple[CodeFile | None, bool]:
    """Return a file of the code, None for a job that Trainyard wrote, and whether git may have made its CRLF line ends.

    Raises:
        _Refused: it must not be in an image.
    """
    if not path.isascii() and any("\udc80" <= letter <= "\udcff" for letter in path):
        raise _Refused("a file name that is not UTF-8: rename it")
    if _WHITEOUT in f"/{path}":
        raise _Refused("a name that begins with '.wh.' removes another file from an image: rename it")
    status = os.lstat(one.path)
    if stat.S_ISLNK(status.st_mode):
        link = os.readlink(one.path)
        target = os.path.normpath(os.path.join(os.path.dirname(one.path), link))
        if os.path.isabs(link) or not f"{target}{os.sep}".startswith(places.base(one.path)):
            raise _Refused(f"a symbolic link to {link}, which is not in the image: replace it by a file")
        return CodeFile(path, Path(one.path), 0, link=link), False
    if not stat.S_ISREG(status.st_mode):
        raise _Refused("neither a file nor a folder nor a symbolic link: remove it")
    if status.st_size > LARGEST:
        raise _Refused(
            f"{in_units(status.st_size)}, more than the {in_units(LARGEST)} that a file of the code may have: move it "
            "to a bucket or a mounted folder"
        )
    executable = bool(status.st_mode & stat.S_IXUSR) if one.executable is None else one.executable
    with open(one.path, "rb") as content:
        data = content.read()
    if _JOB.match(data):
        return None, False
    line, certain = secret_scan.address_with_password(data, path)
    if certain:
        instead = _INSTEAD.get(PurePosixPath(path).suffix, "remove it")
        words = "an address with a password, which everybody who can pull the image could read"
        raise _Refused(f"{words}: {instead}, or keep it in ~/.netrc", line)
    file = CodeFile(path, Path(one.path), len(data), executable, address=line, pointer=data.startswith(_POINTER))
    kind = secret_scan.in_name(path) or next(iter(secret_scan.in_text(data, path)), None)
    if kind:
        raise _Refused(f"{kind}, which everybody who can pull the image could read: remove it")
    if data.startswith(b"#!") and data.partition(b"\n")[0].endswith(b"\r"):
        return _with_lf(file), False
    return file, b"\r\n" in data


def _with_lf(file: CodeFile) -> CodeFile:
    pairs = file.source.read_bytes().count(b"\r\n")
    return replace(file, crlf=True, size=file.size - pairs)


def _normalised_by_git(listed: dict[str, Listed]) -> set[str]:
    """Those files that git has with LF and the checkout with CRLF.

    https://git-scm.com/docs/git-ls-files#Documentation/git-ls-files.txt---eol
    """
    found = set()
    by_repository: dict[str, dict[str, str]] = {}
    for path, one in listed.items():
        by_repository.setdefault(one.repository, {})[one.path[len(one.repository) + 1 :].replace(os.sep, "/")] = path
    for repository, paths in by_repository.items():
        for batch in _batches(list(paths)):
            for record in _ls_files(Path(repository), ["--eol"], batch):
                described, _, name = record.partition("\t")
                if re.match(r"i/lf +w/crlf\b", described):
                    found.add(paths[name])
    return found


def _batches(items: list[str]) -> Iterable[list[str]]:
    return (items[start : start + _BATCH] for start in range(0, len(items), _BATCH))
