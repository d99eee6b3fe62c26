"""List and read data sets on local disks, mounts and ``gs://``."""

from __future__ import annotations

import contextlib
import os
import stat
from dataclasses import dataclass

from trainers.common import files
from trainers.common.files import UserError


@dataclass(frozen=True)
class Entry:
    """Describe a name in a folder. ``version``, a generation or time of change, differs after the file is replaced."""

    size: int = 0  # bytes
    version: str = ""
    folder: bool = False


def is_slow(path: str) -> bool:
    """Return whether a read in ``path`` takes a request: of URLs, and of Cloud Storage mounted under ``/gcs``."""
    return files.is_remote(path) or path.startswith("/gcs/")


def entries(folder: str) -> dict[str, Entry]:
    """Return the files and folders in ``folder`` by name, sorted, without pipes and devices; none if it does not exist.

    Raises :class:`UserError` if it cannot be read.
    """
    found = {}
    try:
        if files.is_remote(folder):
            return _remote_entries(folder)
        with os.scandir(folder) as scanned:
            for entry in scanned:
                with contextlib.suppress(FileNotFoundError):  # another process's temporary file, renamed meanwhile
                    about = entry.stat()
                    if stat.S_ISDIR(about.st_mode):
                        found[entry.name] = Entry(folder=True)
                    elif stat.S_ISREG(about.st_mode):
                        found[entry.name] = Entry(about.st_size, str(about.st_mtime_ns))
    except (FileNotFoundError, NotADirectoryError):
        return {}
    except OSError as error:
        raise UserError(f"{error.filename or folder}: cannot be read: {error.strerror}") from None
    return dict(sorted(found.items()))


def _remote_entries(folder: str) -> dict[str, Entry]:
    with files.remote(folder) as filesystem:
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


def is_folder(path: str) -> bool:
    """Return whether ``path`` is an existing folder; raises :class:`UserError` if a URL cannot be reached."""
    if not files.is_remote(path):
        return os.path.isdir(path)
    with files.remote(path) as filesystem, contextlib.suppress(FileNotFoundError):
        return filesystem.info(path)["type"] == "directory"  # type: ignore[no-any-return]
    return False


def read_file(path: str) -> bytes:
    """Return the contents of ``path``; raises ``OSError``, or :class:`UserError` if a URL cannot be reached."""
    if files.is_remote(path):
        with files.remote(path) as filesystem:
            return filesystem.cat_file(filesystem._strip_protocol(path))  # type: ignore[no-any-return]
    with open(path, "rb") as file:
        return file.read()


def read_range(path: str, start: int, end: int) -> bytes:
    """Return the bytes of the URL ``path`` from ``start`` up to ``end``; raises :class:`UserError` if reading fails."""
    try:
        with files.remote(path) as filesystem:
            return filesystem.cat_file(filesystem._strip_protocol(path), start, end)  # type: ignore[no-any-return]
    except FileNotFoundError:
        raise UserError(f"{path}: was removed during the run") from None
