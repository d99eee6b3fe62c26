"""Listing and reading data sets: in any order, by many threads, on local disks, mounts and ``gs://``."""

from __future__ import annotations

import contextlib
import errno
import os
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import IO

from trainers.common.exits import UserError
from trainers.common.paths import Unavailable, is_remote, names, remote, retry

_LISTING_THREADS = 32  # requests at a time where names and sizes need one request each
# Of mounted network file systems: I/O error, stale handle, timeout, disconnected, no answer.
_TRANSIENT = (errno.EIO, errno.ESTALE, errno.ETIMEDOUT, errno.ENOTCONN, errno.EHOSTDOWN)


@dataclass(frozen=True)
class Entry:
    """A name in a folder. ``version`` differs after the file is replaced: its generation or time of modification."""

    size: int = 0  # bytes
    version: str = ""
    folder: bool = False


def is_slow(path: str) -> bool:
    """Return whether a read in ``path`` takes a request: of URLs, and of Cloud Storage mounted under ``/gcs``."""
    return is_remote(path) or path.startswith("/gcs/")


class _Handles(threading.local):
    """Open local files per thread: opening one on a network file system costs a request."""

    def __init__(self) -> None:
        self.files: dict[str, IO[bytes]] = {}

    def get(self, path: str) -> int:
        """A descriptor of ``path``."""
        if path not in self.files:
            if len(self.files) >= 8:  # with 64 threads, half of the usual limit of 1,024 open files
                self.files.pop(next(iter(self.files))).close()
            self.files[path] = open(path, "rb", buffering=0)  # noqa: SIM115 (kept open)
        return self.files[path].fileno()


_handles = _Handles()


def read_range(path: str, start: int, end: int) -> bytes:
    """The bytes of ``path`` from ``start`` up to ``end``, fewer if a local file ends before; transient errors are
    retried. Raises :class:`UserError` if reading fails."""

    def far() -> bytes:
        try:
            with remote(path) as filesystem:
                found: bytes = filesystem.cat_file(filesystem._strip_protocol(path), start, end)
        except FileNotFoundError:
            raise UserError(f"{path}: was removed during the run") from None
        if len(found) < end - start:
            raise Unavailable(f"{path}: {len(found)} bytes arrived instead of {end - start}")
        return found

    def local() -> bytes:
        try:
            return os.pread(_handles.get(path), end - start, start)
        except OSError as error:
            kind = Unavailable if error.errno in _TRANSIENT else UserError
            raise kind(f"{path}: cannot be read: {error.strerror}") from None

    return retry(path, far if is_remote(path) else local)


def entries(folder: str) -> dict[str, Entry]:
    """The contents of ``folder`` by name, sorted; empty if it does not exist."""
    found = {}
    try:
        if is_remote(folder):
            return retry(folder, lambda: _remote_entries(folder))
        with os.scandir(folder) as scanned:
            for entry in scanned:
                if entry.is_dir():
                    found[entry.name] = Entry(folder=True)
                    continue
                with contextlib.suppress(FileNotFoundError):  # another process's temporary file, renamed meanwhile
                    about = entry.stat()
                    found[entry.name] = Entry(about.st_size, str(about.st_mtime_ns))
    except (FileNotFoundError, NotADirectoryError):
        return {}
    except OSError as error:
        raise UserError(f"{error.filename or folder}: cannot be read: {error.strerror}") from None
    return dict(sorted(found.items()))


def _remote_entries(folder: str) -> dict[str, Entry]:
    with remote(folder) as filesystem:
        filesystem.invalidate_cache()
        place = filesystem._strip_protocol(folder).rstrip("/")
        listed = filesystem.ls(place, detail=True)
    found = {}
    for about in listed:
        name = about["name"].rstrip("/").rpartition("/")[2]
        if about["name"].rstrip("/") != place:  # the empty object that marks a folder
            version = about.get("generation") or about.get("mtime") or ""
            is_directory = about["type"] == "directory"
            found[name] = Entry(0 if is_directory else int(about["size"]), str(version), is_directory)
    return dict(sorted(found.items()))


def names_of(folders: list[str]) -> list[list[str]]:
    """The names in each of ``folders``; several are listed at a time where that takes a request each."""
    if not folders or not is_remote(folders[0]):
        return [names(folder) for folder in folders]
    with ThreadPoolExecutor(_LISTING_THREADS) as pool:
        return list(pool.map(lambda folder: retry(folder, lambda: names(folder)), folders))
