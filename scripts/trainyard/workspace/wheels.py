"""Make wheels of the requirements that are git repositories, folders and files.

Their build backends run in containers (:mod:`trainyard.image.build_backends`). The wheels are then rewritten so that
their bytes depend on their source alone: sorted entries, one time, two modes, no compression (zlib's output differs
between its versions). A wheel that contains compiled code would fit this machine only and is refused.
"""

from __future__ import annotations

import base64
import csv
import functools
import hashlib
import io
import logging
import os
import re
import shutil
import subprocess
import tarfile
import tempfile
import zipfile
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import requests as http
from packaging.metadata import parse_email
from packaging.requirements import Requirement
from packaging.tags import Tag
from packaging.utils import InvalidWheelFilename, canonicalize_name, parse_wheel_filename

from trainyard.common import settings
from trainyard.common.errors import StepFailed, UserError, nearest
from trainyard.spec.lock import File, Made, Pin
from trainyard.spec.yaml_source import relative
from trainyard.workspace import python_projects
from trainyard.workspace.lines import OF_EXTRA, Source, of_any_extra, userinfo, without_credentials, without_userinfo

logger = logging.getLogger(__name__)

#: What git fetches from; a remote helper such as ``ext::`` would run a program.
_GIT_SCHEMES = ("git+https://", "git+http://", "git+ssh://", "git+git://", "git+file://")

#: What gives git the password, a credential helper that the shell runs.
_GIT_HELPER = '!f() { [ "$1" != get ] || printf "password=%s\\n" "$TRAINYARD_GIT_PASSWORD"; }; f'

#: Folders that hold no source, and those at the top of a project that a build makes.
_NOT_SOURCE = {".git", ".venv", "__pycache__", ".mypy_cache", ".pytest_cache", ".ruff_cache"}
_OF_BUILDS = {"build", "dist"}

#: Earliest time that a zip file can hold.
_ZIP_TIME = (1980, 1, 1, 0, 0, 0)

#: ``make(where, folder, names, out)``: make a wheel in ``out`` of the files ``names`` of a folder, and return its path.
Make = Callable[[str, Path, Iterable[str], Path], Path]

#: Bytes of an unpacked source distribution.
_LARGEST = 4 << 30

#: Seconds to wait for bytes of a file that is downloaded.
_TIMEOUT = 60


@dataclass(frozen=True)
class Wheel:
    """A wheel that was made of a source.

    Attributes:
        name: canonical, ``version``: as in its file name.
        file: the wheel, ``sha256``: of its bytes.
        commit: of the git repository that it was built from; empty for other sources.
    """

    source: Source
    name: str
    version: str
    file: Path
    sha256: str
    commit: str = ""

    @property
    def pin(self) -> Pin:
        """The pin of it in a lock."""
        file = File(self.file.name, self.sha256, self.file.stat().st_size)
        return Pin(self.name, self.version, (file,), "added", Made(key(self.source), self.commit))


def requires(wheel: Path) -> tuple[list[str], list[str]]:
    """Return the requirements that a wheel states, and the names of its extras."""
    with zipfile.ZipFile(wheel) as archive:
        name = next(one for one in archive.namelist() if re.fullmatch(r"[^/]+\.dist-info/METADATA", one))
        raw, _ = parse_email(archive.read(name))
    return raw.get("requires_dist", []), raw.get("provides_extra", [])


def without_addresses(wheel: Wheel) -> dict[str, Any] | None:
    """Return what uv is to take for the metadata of a wheel that names addresses, which have wheels of their own.

    https://docs.astral.sh/uv/reference/settings/#dependency-metadata; None if it names none.
    """
    lines, extras = requires(wheel.file)
    known = [Requirement(line) for line in lines]
    if not any(one.url for one in known):
        return None
    for one in known:
        one.url = None
    return {"name": wheel.name, "version": wheel.version, "requires-dist": [*map(str, known)], "provides-extra": extras}


def further(wheel: Path, source: Source) -> list[Source]:
    """Return the git repositories and files that the wheel of a source needs.

    Raises:
        UserError: it needs a folder of this machine.
    """
    found = []
    for text in requires(wheel)[0]:
        wanted = Requirement(text)
        extras = set(re.findall(OF_EXTRA, text))
        if not wanted.url or (extras and not {one.strip("\"'") for one in extras} & {*source.extras}):
            continue
        if not wanted.url.startswith(("git+", "http://", "https://")):
            raise UserError(
                f"{source.line.where}: {source.line.shown} needs {wanted.name} from a folder: name that in the "
                "requirements, too"
            )
        line = replace(source.line, text=text, hashes=frozenset())
        marker = of_any_extra(str(wanted.marker or ""))
        # Not expanded: a third party's URL must not receive environment variables of this host.
        found.append(Source(line, wanted.url, canonicalize_name(wanted.name), tuple(sorted(wanted.extras)), marker))
    return found


def key(source: Source) -> str:
    """12 hexadecimal digits of what is asked for, the same on every machine."""
    what = source.line.text if source.is_path else without_userinfo(source.location)
    return hashlib.sha256(f"{source.name} {what}".encode()).hexdigest()[:12]


def digest(source: Source) -> str:
    """SHA-256 of the files of a path; empty for an address."""
    if not source.is_path:
        return ""
    path = _existing(source)
    found = hashlib.sha256()
    for one in [path] if path.is_file() else _files(path):
        found.update(f"{one.relative_to(path).as_posix()}\0{one.stat().st_mode & 0o100:o}\0".encode())
        found.update(hashlib.sha256(one.read_bytes()).digest())
    return found.hexdigest()


def _files(folder: Path) -> Iterator[Path]:
    for name, folders, files in os.walk(folder):
        left_out = _NOT_SOURCE | (_OF_BUILDS if Path(name) == folder else set())
        folders[:] = sorted(one for one in folders if one not in left_out and not one.endswith(".egg-info"))
        yield from (Path(name) / one for one in sorted(files) if (Path(name) / one).is_file())


def _existing(source: Source) -> Path:
    """The path of a source, with its subdirectory.

    Raises:
        UserError: nothing is there, or no Python project is.
    """
    place, _, fragment = source.location.partition("#")
    path = Path(place, fragment[13:] if fragment.startswith("subdirectory=") else "")
    if not path.exists():
        raise UserError(f"{source.line.where}: {source.line.shown!r}: there is no {path}")
    if path.is_dir() and not any((path / name).is_file() for name in ("pyproject.toml", "setup.py")):
        raise UserError(f"{source.line.where}: {source.line.shown!r}: has neither a pyproject.toml nor a setup.py")
    return path


def check(source: Source) -> None:
    """Check what is known of a source before it is fetched or built; raise a UserError of :func:`build`."""
    if source.is_path:
        path = _existing(source)
        _check_hash(source, path)
        if path.is_dir():
            python_projects.backend(path)
        elif path.suffix == ".whl":
            _check_name(source, path)
    elif source.location.startswith("git+"):
        _git_address(source)


def ask(source: Source) -> None:
    """Check that the address of a source answers, with the revision of git unless that may be a commit.

    Raises:
        StepFailed: it does not.
    """
    if source.location.startswith("git+"):
        address, revision = _git_address(source)
        # In no repository: the configuration of the user's may name programs.
        names = [line.split("\t")[1] for line in _git(source, "-C", "/", "ls-remote", address).splitlines()]
        names += [name.split("/", 2)[-1] for name in names]
        if revision and revision not in names and not re.fullmatch(r"[0-9a-f]{4,40}", revision):
            near = nearest(revision, names)
            raise StepFailed(f"{source.line.where}: {source.line.shown}: the repository has no {revision!r}{near}")
    elif not source.is_path:
        with _opened(source, source.location.partition("#")[0]):
            pass


def build(sources: Sequence[Source], folder: Path, commits: Mapping[str, str], make: Make) -> list[Wheel]:
    """Make a wheel of each source in ``folder``.

    Args:
        commits: :func:`key` -> the commit to take; the revision that the requirement names if it has none.
        make: runs a build backend.
    Raises:
        UserError: a source does not exist, or contains code to compile.
        StepFailed: it could not be fetched or built; the message ends with the reason.
    """
    folder.mkdir(parents=True, exist_ok=True)
    return [_build(source, folder, commits.get(key(source), ""), make) for source in sources]


def ensure(required: Iterable[Source], pins: Iterable[Pin], lock_file: Path, folder: Path, make: Make) -> None:
    """Make ``folder`` hold the wheels that a workspace's lock pins, and no others; those that are missing are built.

    Args:
        required: the sources that the workspace requires. ``pins``: of its lock, the file ``lock_file``.
    Raises:
        UserError: a source is not what it was when it was locked, or see :func:`build`.
        StepFailed: see :func:`build`.
    """
    sources = {key(one): one for one in required}
    wanted = {pin.made.key: (pin.made.commit, pin.hashes[0]) for pin in pins if pin.made}
    there = {hashlib.sha256(one.read_bytes()).hexdigest(): one for one in sorted(folder.glob("*.whl"))}
    waiting = dict(wanted)
    while ready := [one for one in waiting if one in sources]:
        for one in ready:
            commit, sha256 = waiting.pop(one)
            if sha256 not in there:
                built = build([sources[one]], folder, {one: commit}, make)[0]
                there[built.sha256] = built.file
                if built.sha256 != sha256:
                    raise UserError(
                        f"{sources[one].line.where}: {sources[one].line.shown}: not what {relative(lock_file)} "
                        "pins: the source or its build backend has changed: run 'trainyard lock'"
                    )
            sources |= {key(more): more for more in further(there[sha256], sources[one])}
    if any(sha256 not in there for _, sha256 in waiting.values()):
        raise UserError(
            f"{relative(lock_file)}: pins a wheel that the requirements no longer name: run 'trainyard lock'"
        )
    kept = {there[sha256] for _, sha256 in wanted.values()}
    for path in folder.glob("*.whl"):
        if path not in kept:
            path.unlink()


def _build(source: Source, folder: Path, commit: str, make: Make) -> Wheel:
    with tempfile.TemporaryDirectory(prefix="trainyard-wheel-") as temporary:
        here = Path(temporary)
        with _fetched(source, here, commit) as (path, taken):
            _check_hash(source, path)
            if path.suffix == ".whl":
                made, built = path, False
            else:
                unpacked = path if path.is_dir() else _unpacked(source, path, here / "unpacked")
                names = [one.relative_to(unpacked).as_posix() for one in _files(unpacked)]
                made = make(f"{source.line.where}: {source.line.shown}", unpacked, names, here / "out")
                built = True
            name, version, tags = _check_name(source, made)
            if built and any(tag.platform != "any" for tag in tags):
                raise UserError(
                    f"{source.line.where}: {source.line.shown}: compiles code ({made.name}), which fits this machine "
                    f"only: put its release on a package index and name '{name}=={version}' under 'build:' of "
                    "trainyard.yaml"
                )
            output = folder / made.name
            if built:
                normalise(made, output)
            else:
                shutil.copyfile(made, output)
    return Wheel(source, name, version, output, hashlib.sha256(output.read_bytes()).hexdigest(), taken)


def _check_name(source: Source, wheel: Path) -> tuple[str, str, frozenset[Tag]]:
    """Return name, version and tags of a wheel, which must be of the project that its line names."""
    try:
        name, version, _, tags = parse_wheel_filename(wheel.name)
    except InvalidWheelFilename as error:
        raise UserError(f"{source.line.where}: {error}") from None
    if source.name and name != source.name:
        raise UserError(f"{source.line.where}: {source.line.shown}: it is the project '{name}'")
    return str(name), str(version), tags


def _unpacked(source: Source, path: Path, folder: Path) -> Path:
    """Unpack a source distribution, and return the folder of its project."""
    try:
        if zipfile.is_zipfile(path):
            with zipfile.ZipFile(path) as archive:
                size = sum(one.file_size for one in archive.infolist())
                if size <= _LARGEST:
                    archive.extractall(folder)
        else:
            with tarfile.open(path) as archive_:
                size = sum(one.size for one in archive_)
                if size <= _LARGEST:
                    archive_.extractall(folder, filter="data")
    except (tarfile.TarError, zipfile.BadZipFile, zlib.error, EOFError, OSError, RuntimeError):
        raise UserError(
            f"{source.line.where}: {source.line.shown}: no source distribution that can be unpacked"
        ) from None
    if size > _LARGEST:
        raise UserError(f"{source.line.where}: {source.line.shown}: has {size} bytes, more than {_LARGEST}")
    inside = [one for one in folder.iterdir() if one.is_dir()]
    return inside[0] if len(inside) == 1 else folder


def _check_hash(source: Source, path: Path) -> None:
    """Check that a file is one of those that its line allows; folders and git repositories have no hash."""
    content = path.read_bytes() if source.hashes and path.is_file() else b""
    pinned = (one.rpartition(":") for one in source.hashes)
    if content and all(hashlib.new(kind or "sha256", content).hexdigest() != sha for kind, _, sha in pinned):
        made = hashlib.sha256(content).hexdigest()
        raise UserError(
            f"{source.line.where}: {source.line.shown}: the file has the SHA-256 {made}: pin that if it is right"
        )


@contextmanager
def _fetched(source: Source, here: Path, commit: str) -> Iterator[tuple[Path, str]]:
    """The folder or file of a source, and the commit that it is."""
    location, _, fragment = source.location.partition("#")
    subdirectory = fragment.removeprefix("subdirectory=") if fragment.startswith("subdirectory=") else ""
    if source.is_path:
        yield _existing(source), ""
        return
    if location.startswith("git+"):
        taken = _checkout(source, here / "repository", commit)
        path = here / "repository" / subdirectory
        if not path.is_dir():
            raise UserError(f"{source.line.where}: {source.line.shown!r}: the repository has no folder {subdirectory}")
        yield path, taken
        return
    yield _download(source, location, here), ""


def git_address(location: str) -> tuple[str, str]:
    """Return the address of a git repository, and the revision, of ``git+https://host/path@revision``.

    It has no password, and a user only where that is part of the address, as in ``ssh://git@host/path``.
    """
    scheme, _, rest = without_userinfo(location.removeprefix("git+")).partition("://")
    host, slash, path = rest.partition("/")
    user = userinfo(location)[0]
    if user and not scheme.startswith("http"):
        host = f"{user}@{host}"
    path, _, revision = path.partition("@")
    return f"{scheme}://{host}{slash}{path}", revision


def _git_address(source: Source) -> tuple[str, str]:
    """Return :func:`git_address` of a source, which git must be able to fetch from."""
    location = source.location.partition("#")[0]
    if not location.startswith(_GIT_SCHEMES):
        raise UserError(
            f"{source.line.where}: {source.line.shown!r}: git's addresses begin with git+https:// or git+ssh://"
        )
    address, revision = git_address(location)
    if revision.startswith("-"):
        raise UserError(f"{source.line.where}: {source.line.shown!r}: {revision!r} is no revision")
    if not shutil.which("git"):
        raise UserError(f"{source.line.where}: {source.line.shown}: needs git, which is not installed")
    return address, revision


def _git(source: Source, *arguments: str) -> str:
    """Return what git prints, which has the user's credentials for the host of a source."""
    host = "/".join(git_address(source.location)[0].split("/", 3)[:3])
    done = subprocess.run(
        ["git", "-c", "advice.detachedHead=false", *arguments],
        env=settings.environment(GIT_TERMINAL_PROMPT="0", **_git_credentials(host, *userinfo(source.location))),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        errors="replace",
        check=False,
    )
    if done.returncode:
        lines = done.stderr.strip().splitlines() or ["git failed"]
        words = without_credentials(next((line for line in lines if line.startswith("fatal: ")), lines[-1]))
        raise StepFailed(f"{source.line.where}: {source.line.shown}: {words.removeprefix('fatal: ')}")
    return done.stdout.strip()


def _checkout(source: Source, folder: Path, commit: str) -> str:
    """Check a git repository out with git and the user's credentials for it; the commit."""
    address, revision = _git_address(source)
    git = functools.partial(_git, source, "-C", str(folder))
    folder.mkdir()
    git("init", "--quiet")
    git("remote", "add", "origin", address)
    # With tags: build backends take the version from them. A commit may not be fetched by its name from every server.
    git("fetch", "--quiet", "--tags", "origin", "+refs/heads/*:refs/remotes/origin/*", "+HEAD:refs/remotes/origin/HEAD")
    git("checkout", "--quiet", "--detach", commit or _revision(git, revision))
    git("submodule", "--quiet", "update", "--init", "--recursive")
    return git("rev-parse", "HEAD")


def _git_credentials(host: str, user: str, password: str) -> dict[str, str]:
    """Return the variables by which git has credentials for a host: its arguments are shown to every user.

    https://git-scm.com/docs/git-config#Documentation/git-config.txt-GITCONFIGCOUNT, https://git-scm.com/docs/gitcredentials
    """
    if not user:
        return {}
    first = int(settings.standard_variable("GIT_CONFIG_COUNT") or 0)
    # The empty value removes the user's own helpers for this host.
    pairs = [("username", user), *([("helper", ""), ("helper", _GIT_HELPER)] if password else [])]
    found = {"GIT_CONFIG_COUNT": str(first + len(pairs)), "TRAINYARD_GIT_PASSWORD": password}
    for number, (key, value) in enumerate(pairs, first):
        found |= {f"GIT_CONFIG_KEY_{number}": f"credential.{host}.{key}", f"GIT_CONFIG_VALUE_{number}": value}
    return found


def _revision(git: Callable[..., str], revision: str) -> str:
    """What ``revision``, a branch, tag or commit, is called in a clone."""
    if not revision:
        return "refs/remotes/origin/HEAD"
    for name in (f"refs/tags/{revision}", f"refs/remotes/origin/{revision}", revision):
        try:
            return git("rev-parse", "--verify", "--quiet", f"{name}^{{commit}}")
        except StepFailed:
            continue
    git("fetch", "--quiet", "origin", revision)  # a ref outside branches and tags, or a commit that none reaches
    return "FETCH_HEAD"


def _download(source: Source, url: str, here: Path) -> Path:
    path = here / Path(unquote(urlsplit(url).path)).name  # %2B of a local version
    with _opened(source, url) as answer, path.open("wb") as file:
        for part in answer.iter_content(1 << 20):
            file.write(part)
    return path


@contextmanager
def _opened(source: Source, url: str) -> Iterator[http.Response]:
    try:
        with http.get(url, stream=True, timeout=_TIMEOUT) as answer:
            answer.raise_for_status()
            yield answer
    except (http.RequestException, OSError) as error:
        reason = getattr(getattr(error, "response", None), "reason", None) or type(error).__name__
        raise StepFailed(f"{source.line.where}: {source.line.shown}: cannot be downloaded ({reason})") from None


def normalise(wheel: Path, output: Path) -> None:
    """Rewrite a wheel so that its bytes depend on the contents of its files alone.

    The name of the tool that made it, which changes with each release of that, is replaced in its WHEEL file. RECORD is
    the last entry: https://packaging.python.org/en/latest/specifications/binary-distribution-format/
    """
    with zipfile.ZipFile(wheel) as archive:
        entries = {
            one.filename: (archive.read(one), bool(one.external_attr >> 16 & 0o111))
            for one in archive.infolist()
            if not one.is_dir()
        }
    record = next(name for name in entries if re.fullmatch(r"[^/]+\.dist-info/RECORD", name))
    about = record.replace("/RECORD", "/WHEEL")
    text = re.sub(rb"(?m)^Generator:.*$", b"Generator: trainyard", entries[about][0])
    entries[about] = (text, False)
    del entries[record]
    rows = io.StringIO()
    writer = csv.writer(rows, lineterminator="\n")
    for name, (data, _) in sorted(entries.items()):
        sum_of = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
        writer.writerow([name, f"sha256={sum_of}", len(data)])
    writer.writerow([record, "", ""])
    temporary = output.with_suffix(".new")
    with zipfile.ZipFile(temporary, "w", zipfile.ZIP_STORED) as archive:
        for name, (data, executable) in [*sorted(entries.items()), (record, (rows.getvalue().encode(), False))]:
            entry = zipfile.ZipInfo(name, _ZIP_TIME)
            entry.create_system = 3  # Unix, whose modes the attributes are
            entry.external_attr = (0o100755 if executable else 0o100644) << 16
            archive.writestr(entry, data)
    temporary.replace(output)
