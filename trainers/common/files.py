"""Read and write files on local disks, ``/gcs/...`` mounts and URLs of fsspec, such as ``gs://``; say who may write."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import logging
import os
import secrets
import shutil
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from typing import IO, Any

FAILED, USAGE = 1, 2  # exit statuses: any failure; a wrong option, or checkpoints of another run
# Otherwise gcsfs calls the gRPC control API for the bucket's type, which needs another permission.
os.environ.setdefault("GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT", "false")


class UserError(Exception):
    """Tell an error that the user can fix in one line: what is wrong, where, and what to do. Exits with ``code``."""

    def __init__(self, message: str, code: int = FAILED) -> None:
        super().__init__(message)
        self.code = code


def is_remote(path: str) -> bool:
    """Return whether ``path`` is a URL such as ``gs://bucket/folder``."""
    return "://" in path


def join(folder: str, *names: str) -> str:
    """Return ``folder/name`` for each of ``names`` in turn, of local paths and URLs."""
    return "/".join([folder.rstrip("/") or "/", *names]) if is_remote(folder) else os.path.join(folder, *names)


@contextlib.contextmanager
def remote(path: str) -> Iterator[Any]:
    """Yield fsspec's file system of the URL ``path``; raises its errors but FileNotFoundError as :class:`UserError`."""
    logging.getLogger("gcsfs").setLevel(logging.CRITICAL)  # it logs tracebacks of errors that are reported here
    try:
        import fsspec  # type: ignore[import-not-found, unused-ignore]

        filesystem = fsspec.filesystem(path.partition("://")[0])
        filesystem.invalidate_cache()
        yield filesystem
    except (FileNotFoundError, UserError):
        raise
    except Exception as error:  # OSError and exceptions of aiohttp, google.auth and gcsfs, which repeats what can pass
        reason = (" ".join(str(error).split()) or type(error).__name__)[:300]
        raise UserError(f"{path}: cannot be reached: {reason}") from None


def open_file(path: str, mode: str = "rb") -> IO[Any]:
    """Open ``path``; raises :class:`UserError` if a URL cannot be reached, ``OSError`` like the built-in ``open``."""
    if is_remote(path):
        with remote(path) as filesystem:
            return filesystem.open(path, mode)  # type: ignore[no-any-return]
    return open(path, mode)


def names(folder: str) -> list[str]:
    """Return the names in ``folder``, sorted; none if it does not exist. Raises ``OSError`` or :class:`UserError`."""
    try:
        if not is_remote(folder):
            return sorted(os.listdir(folder))
        with remote(folder) as filesystem:
            return sorted(path.rstrip("/").rpartition("/")[2] for path in filesystem.ls(folder, detail=False))
    except FileNotFoundError:
        return []


def make_folder(path: str) -> None:
    """Create ``path`` and its parents; object stores have no folders. Raises :class:`UserError` if that fails."""
    try:
        None if is_remote(path) else os.makedirs(path, exist_ok=True)
    except OSError as error:
        raise UserError(f"{path}: cannot be created: {error.strerror}") from None


def check_writable(folder: str) -> None:
    """Create the local ``folder`` and a file in it; raises :class:`UserError` if that fails. URLs are not checked."""
    make_folder(folder)
    try:
        None if is_remote(folder) else tempfile.TemporaryFile(dir=folder).close()
    except OSError as error:
        raise UserError(f"{folder}: cannot be written: {error.strerror}") from None


def move(path: str, target: str) -> None:
    """Rename a file or folder, into a folder that is created if necessary. Raises :class:`UserError`.

    Object stores copy all of it before anything is removed, so that one that is ended meanwhile loses nothing.
    """
    if is_remote(path):
        with remote(path) as filesystem:
            start = filesystem._strip_protocol(path)
            for name in filesystem.find(start):
                filesystem.cp_file(name, filesystem._strip_protocol(target) + name[len(start) :])
        return remove(path)
    make_folder(os.path.dirname(target))
    try:
        os.rename(path, target)
    except OSError as error:
        raise UserError(f"{path}: cannot be moved to {target}: {error.strerror}") from None


def remove(path: str) -> None:
    """Remove a file or folder if it exists: what sorts first goes first."""
    with contextlib.suppress(FileNotFoundError):
        if is_remote(path):
            with remote(path) as filesystem:
                for name in sorted(filesystem.find(filesystem._strip_protocol(path))) or [path]:
                    filesystem.rm(name)
        elif os.path.isdir(path) and not os.path.islink(path):
            for name in names(path):
                remove(os.path.join(path, name))
            os.rmdir(path)
        else:
            os.remove(path)


@contextlib.contextmanager
def atomic_file(path: str) -> Iterator[IO[bytes]]:
    """Yield a binary file that appears as ``path`` when it is complete and on disk, and not at all after an exception.

    Locally: a temporary name in the same folder, fsync, rename. In object stores an object appears when it is closed.
    """
    if is_remote(path):
        with tempfile.TemporaryFile() as local:
            yield local
            local.seek(0)
            with remote(path) as filesystem, filesystem.open(path, "wb") as file:
                shutil.copyfileobj(local, file, 16 << 20)
        return
    unique = secrets.token_hex(8)  # process ids of two containers are alike
    temporary = os.path.join(os.path.dirname(path), f".{os.path.basename(path)}.{unique}.tmp")
    try:
        with open(temporary, "x+b") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        with contextlib.suppress(FileNotFoundError):
            os.remove(temporary)


@contextlib.contextmanager
def growing_folder(path: str, *earlier: str) -> Iterator[tuple[str, Callable[[], None]]]:
    """Yield a local folder for files of ``path`` that grow, itself or a temporary one, and what uploads it each minute.

    It has the files ``earlier`` of a URL, and is uploaded at the end, too.
    """
    if not is_remote(path):
        make_folder(path)
        yield path, lambda: None
        return
    sent = time.monotonic()

    def upload(every: float = 60.0) -> None:
        nonlocal sent
        if time.monotonic() - sent >= every:
            sent = time.monotonic()
            with remote(path) as filesystem:
                filesystem.put(folder.rstrip("/") + "/", path.rstrip("/") + "/", recursive=True)

    with tempfile.TemporaryDirectory() as folder:
        for name in earlier:
            with contextlib.suppress(FileNotFoundError), remote(path) as filesystem:
                filesystem.get(join(path, name), os.path.join(folder, name))
        yield folder, upload
        upload(0.0)


@contextlib.contextmanager
def local_folder(path: str) -> Iterator[str]:
    """Yield a local folder for the files of ``path``: itself, or a temporary one that is uploaded at the end."""
    with growing_folder(path) as (folder, _):
        yield folder


@contextlib.contextmanager
def complete_files(folder: str) -> Iterator[str]:
    """Yield a temporary folder, whose contents appear in ``folder`` when all are complete, none after an exception.

    They replace what has the same names. What a killed process has left in ``folder`` is removed, or put back.
    """
    with local_folder(folder) as local:
        for name in os.listdir(local):
            path, earlier = os.path.join(local, name), os.path.join(local, name.removeprefix(".earlier-"))
            if name.startswith(".unfinished-"):
                shutil.rmtree(path, ignore_errors=True)
            elif not os.path.exists(earlier):
                os.rename(path, earlier)
        with tempfile.TemporaryDirectory(prefix=".unfinished-", dir=local) as fresh:
            yield fresh
            for name in sorted(os.listdir(fresh)):
                old, earlier = os.path.join(local, name), os.path.join(local, f".earlier-{name}")
                if os.path.isdir(old):  # which os.replace() does not replace
                    shutil.rmtree(earlier, ignore_errors=True)
                    os.rename(old, earlier)
                os.replace(os.path.join(fresh, name), old)
                shutil.rmtree(earlier, ignore_errors=True)


BEAT = 10.0  # seconds between two signs of life
WAIT = 35.0  # seconds that a run waits for another one; without a sign of life, that one has gone


class Lease:
    """Hold ``folder`` until :meth:`release`: the file ``.lease`` in it says who has it.

    On file systems it is locked with flock(2), which ends with the process, even after SIGKILL or on another host of a
    network file system that has locks. Of URLs and Cloud Storage FUSE (``/gcs``) it is written every ``beat`` seconds.
    """

    def __init__(self, folder: str, wait: float | None = None, beat: float = BEAT) -> None:
        """Wait until no other run has the folder; raises :class:`UserError` with who has it after ``wait`` seconds."""
        wait = WAIT if wait is None else wait
        self.folder, self.path, self._beat = folder, join(folder, ".lease"), beat
        self._beats = is_remote(folder) or folder.startswith("/gcs/")
        since = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime())
        self._me = f"process {os.getpid()} on {socket.gethostname()}, since {since}, run {secrets.token_hex(4)}"
        self._ended, self._thread = threading.Event(), threading.Thread(target=self._live, daemon=True)
        check_writable(folder)
        end, first, attempt = time.monotonic() + wait, self._read(), 0
        while not self._is_free():
            last, attempt = self._read(), attempt + 1
            says = f"{folder}: another run has it ({last[0]})"
            if time.monotonic() > end and self._beats and last == first:
                break  # there was no sign of life
            if time.monotonic() > end:
                raise UserError(f"{says}: end that run, or use another folder")
            if attempt == 1:
                print(f"note: {says}; waiting up to {wait:g} s", file=sys.stderr)
            time.sleep(min(1.0, wait / 10))
        self._write()
        if self._beats:
            self._thread.start()

    def _is_free(self) -> bool:
        if self._beats:
            return not self._read()[0]
        self._file = os.open(self.path, os.O_RDWR | os.O_CREAT, 0o666)
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            free = os.fstat(self._file).st_nlink > 0  # else a run that has ended has removed it meanwhile
        except OSError as error:
            free = error.errno != errno.EWOULDBLOCK  # a file system without locks
        if not free:
            os.close(self._file)
        return free

    def _read(self) -> list[str]:
        """Return the run that has the folder, "" if none has, and its last sign of life."""
        with contextlib.suppress(OSError, UserError), open_file(self.path) as file:
            return str(file.read().decode(errors="replace")).split("\n")
        return [""]

    def _write(self) -> None:
        content = f"{self._me}\n{time.time()}\n".encode()
        if self._beats:
            with atomic_file(self.path) as file:
                file.write(content)
            return
        with contextlib.suppress(OSError):  # on a full disk the lock holds, too
            os.ftruncate(self._file, os.pwrite(self._file, content, 0))

    def _live(self) -> None:
        while not self._ended.wait(self._beat):
            with contextlib.suppress(OSError, UserError):
                self.check()
                self._write()

    def check(self) -> None:
        """Raise :class:`UserError` if another run has taken the folder because this one showed no sign of life."""
        if self._beats and (holder := self._read()[0]) not in ("", self._me):
            raise UserError(f"{self.folder}: {holder} has taken it over: this run saves nothing more")

    def release(self) -> None:
        """Let other runs have the folder."""
        self._ended.set()
        with contextlib.suppress(OSError, UserError):
            if self._beats:
                self._thread.join()
                self.check()
                return remove(self.path)
            if os.fstat(self._file).st_nlink:
                os.remove(self.path)
            os.close(self._file)
