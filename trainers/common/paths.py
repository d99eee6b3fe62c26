"""Files on local disks, ``/gcs/...`` mounts and ``gs://`` (or any other URL that fsspec supports)."""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator
from typing import IO, Any

from trainers.common.exits import UserError


def is_remote(path: str) -> bool:
    """Whether ``path`` is a URL such as ``gs://bucket/folder``."""
    return "://" in path


def join(folder: str, *names: str) -> str:
    """``folder/name``, for local paths and URLs."""
    return "/".join([folder.rstrip("/") or "/", *names]) if is_remote(folder) else os.path.join(folder, *names)


@contextlib.contextmanager
def _remote(path: str) -> Iterator[Any]:
    """The file system of the URL ``path``. Its errors except FileNotFoundError are raised as :class:`UserError`."""
    # Without this, gcsfs calls the gRPC control API for the bucket's type, which needs another permission.
    os.environ.setdefault("GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT", "false")
    logging.getLogger("gcsfs").setLevel(logging.CRITICAL)  # it logs tracebacks of errors that are reported below
    try:
        import fsspec  # type: ignore[import-not-found, unused-ignore]

        yield fsspec.core.url_to_fs(path)[0]
    except (FileNotFoundError, UserError):
        raise
    except Exception as error:  # OSError and exceptions of aiohttp, google.auth and gcsfs
        reason = " ".join(str(error).split()) or type(error).__name__
        raise UserError(f"{path}: cannot be reached: {reason[:300]}") from None


def open_file(path: str, mode: str = "rb") -> IO[Any]:
    """Open ``path``; raises :class:`UserError` if a URL cannot be reached, ``OSError`` like the built-in ``open``."""
    if is_remote(path):
        with _remote(path) as filesystem:
            return filesystem.open(path, mode)  # type: ignore[no-any-return]
    return open(path, mode)


def names(folder: str) -> list[str]:
    """The names in ``folder``, sorted; empty if the folder does not exist."""
    try:
        if not is_remote(folder):
            return sorted(os.listdir(folder))
        with _remote(folder) as filesystem:
            filesystem.invalidate_cache()
            found = filesystem.ls(folder, detail=False)
    except FileNotFoundError:
        return []
    return sorted(path.rstrip("/").rsplit("/", 1)[-1] for path in found)


def is_folder(path: str) -> bool:
    """Whether ``path`` is an existing folder."""
    if not is_remote(path):
        return os.path.isdir(path)
    with _remote(path) as filesystem, contextlib.suppress(FileNotFoundError):
        return filesystem.info(path)["type"] == "directory"  # type: ignore[no-any-return]
    return False


def make_folder(path: str) -> None:
    """Create ``path`` and its parents; object stores have no folders. Raises :class:`UserError` if that fails."""
    if not is_remote(path):
        try:
            os.makedirs(path, exist_ok=True)
        except OSError as error:
            raise UserError(f"{path}: cannot be created: {error.strerror}") from None


def remove(path: str) -> None:
    """Remove a file if it exists."""
    with contextlib.suppress(FileNotFoundError):
        if not is_remote(path):
            return os.remove(path)
        with _remote(path) as filesystem:
            filesystem.rm(path)


@contextlib.contextmanager
def atomic_file(path: str) -> Iterator[IO[bytes]]:
    """A binary file that appears as ``path`` when it is complete and on disk, and not at all after an exception.

    Locally: a temporary name in the same folder, fsync, rename. In object stores an object appears when it is
    closed.
    """
    if is_remote(path):
        with tempfile.TemporaryFile() as local:
            yield local
            local.seek(0)
            with _remote(path) as filesystem, filesystem.open(path, "wb") as file:
                shutil.copyfileobj(local, file, 16 << 20)
        return
    temporary = os.path.join(os.path.dirname(path), f".{os.path.basename(path)}.{os.getpid()}.tmp")
    try:
        with open(temporary, "w+b") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        with contextlib.suppress(FileNotFoundError):
            os.remove(temporary)


@contextlib.contextmanager
def local_folder(path: str) -> Iterator[str]:
    """A local folder for the files of ``path``: ``path`` itself, or a temporary folder that is uploaded at the end."""
    if not is_remote(path):
        make_folder(path)
        yield path
        return
    with tempfile.TemporaryDirectory() as folder:
        yield folder
        with _remote(path) as filesystem:
            filesystem.put(folder.rstrip("/") + "/", path.rstrip("/") + "/", recursive=True)


class Mirror:
    """A local folder for files that grow: ``folder`` itself, or for a URL a temporary folder.

    The temporary folder is copied to the URL every ``EVERY`` seconds and at the end, because objects cannot be
    appended to.
    """

    EVERY = 60.0  # seconds

    def __init__(self, folder: str) -> None:
        self.folder, self.local = folder, folder
        self._sent = time.monotonic()
        if is_remote(folder):
            self.local = tempfile.mkdtemp(prefix="mirror-")
        else:
            make_folder(folder)

    def fetch(self, name: str) -> None:
        """Copy file ``name`` of ``folder`` to the local folder, if it exists."""
        if self.local != self.folder and name in names(self.folder):
            with open_file(join(self.folder, name)) as far, open(os.path.join(self.local, name), "wb") as near:
                shutil.copyfileobj(far, near)

    def keep_up(self) -> None:
        """Copy the files if the last copy is old enough; errors are printed, and the next copy is complete again."""
        if self.local != self.folder and time.monotonic() - self._sent > self.EVERY:
            self._sent = time.monotonic()
            try:
                self._send()
            except UserError as error:
                print(f"note: {error}; trying again in a minute", file=sys.stderr)

    def _send(self) -> None:
        for name in os.listdir(self.local):
            with open(os.path.join(self.local, name), "rb") as near, atomic_file(join(self.folder, name)) as far:
                shutil.copyfileobj(near, far)

    def close(self) -> None:
        """Copy the files a last time and remove the temporary folder."""
        if self.local != self.folder:
            try:
                self._send()
            finally:
                shutil.rmtree(self.local, ignore_errors=True)
