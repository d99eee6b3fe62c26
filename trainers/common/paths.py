"""Files on local disks, ``/gcs/...`` mounts and ``gs://`` (or any other URL that fsspec supports)."""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator
from typing import IO, Any

from trainers.common.exits import UserError

_UNFINISHED = ".unfinished-"  # prefix of folders for files that are not complete
_EARLIER = ".earlier-"  # prefix of a folder while another one takes its name
# Otherwise gcsfs calls the gRPC control API for the bucket's type, which needs another permission.
os.environ.setdefault("GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT", "false")


def is_remote(path: str) -> bool:
    """Whether ``path`` is a URL such as ``gs://bucket/folder``."""
    return "://" in path


def join(folder: str, *names: str) -> str:
    """``folder/name``, for local paths and URLs."""
    return "/".join([folder.rstrip("/") or "/", *names]) if is_remote(folder) else os.path.join(folder, *names)


@contextlib.contextmanager
def remote(path: str) -> Iterator[Any]:
    """The file system of the URL ``path``. Its errors except FileNotFoundError are raised as :class:`UserError`.

    gcsfs itself repeats, six times within 31 seconds, what fails for a reason that can pass.
    """
    logging.getLogger("gcsfs").setLevel(logging.CRITICAL)  # it logs tracebacks of errors that are reported here
    try:
        import fsspec  # type: ignore[import-not-found, unused-ignore]

        yield fsspec.filesystem(path.partition("://")[0])
    except (FileNotFoundError, UserError):
        raise
    except Exception as error:  # OSError and exceptions of aiohttp, google.auth and gcsfs
        reason = (" ".join(str(error).split()) or type(error).__name__)[:300]
        raise UserError(f"{path}: cannot be reached: {reason}") from None


def open_file(path: str, mode: str = "rb") -> IO[Any]:
    """Open ``path``; raises :class:`UserError` if a URL cannot be reached, ``OSError`` like the built-in ``open``."""
    if is_remote(path):
        with remote(path) as filesystem:
            return filesystem.open(path, mode)  # type: ignore[no-any-return]
    return open(path, mode)


def read_file(path: str) -> bytes:
    """The contents of ``path``. Raises ``FileNotFoundError``; :class:`UserError` if a URL cannot be reached."""
    if is_remote(path):
        with remote(path) as filesystem:
            return filesystem.cat_file(filesystem._strip_protocol(path))  # type: ignore[no-any-return]
    with open(path, "rb") as file:
        return file.read()


def names(folder: str) -> list[str]:
    """The names in ``folder``, sorted; empty if the folder does not exist."""
    try:
        if not is_remote(folder):
            return sorted(os.listdir(folder))
        with remote(folder) as filesystem:
            filesystem.invalidate_cache()
            found = filesystem.ls(folder, detail=False)
    except FileNotFoundError:
        return []
    return sorted(path.rstrip("/").rsplit("/", 1)[-1] for path in found)


def is_folder(path: str) -> bool:
    """Whether ``path`` is an existing folder."""
    if not is_remote(path):
        return os.path.isdir(path)
    with remote(path) as filesystem, contextlib.suppress(FileNotFoundError):
        return filesystem.info(path)["type"] == "directory"  # type: ignore[no-any-return]
    return False


def make_folder(path: str) -> None:
    """Create ``path`` and its parents; object stores have no folders. Raises :class:`UserError` if that fails."""
    if not is_remote(path):
        try:
            os.makedirs(path, exist_ok=True)
        except OSError as error:
            raise UserError(f"{path}: cannot be created: {error.strerror}") from None


def check_writable(folder: str) -> None:
    """Create the local ``folder`` and a file in it; raises :class:`UserError` if that fails. URLs are not checked."""
    if not is_remote(folder):
        make_folder(folder)
        try:
            tempfile.TemporaryFile(dir=folder).close()
        except OSError as error:
            raise UserError(f"{folder}: cannot be written: {error.strerror}") from None


def move(path: str, target: str) -> None:
    """Rename a file or folder, into a folder that is created if necessary. Raises :class:`UserError`.

    Object stores copy all of it before anything is removed, so that one that is ended meanwhile loses nothing.
    """
    if is_remote(path):
        with remote(path) as filesystem:
            filesystem.invalidate_cache()
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
    """Remove a file or folder if it exists: what sorts first goes first, such as what says that it is complete."""
    with contextlib.suppress(FileNotFoundError):
        if is_remote(path):
            with remote(path) as filesystem:
                filesystem.invalidate_cache()
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
    """A binary file that appears as ``path`` when it is complete and on disk, and not at all after an exception.

    Locally: a temporary name in the same folder, fsync, rename. In object stores an object appears when it is
    closed.
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
def local_folder(path: str) -> Iterator[str]:
    """A local folder for the files of ``path``: ``path`` itself, or a temporary folder that is uploaded at the end."""
    if not is_remote(path):
        make_folder(path)
        yield path
        return
    with tempfile.TemporaryDirectory() as folder:
        yield folder
        with remote(path) as filesystem:
            filesystem.put(folder.rstrip("/") + "/", path.rstrip("/") + "/", recursive=True)


@contextlib.contextmanager
def complete_files(folder: str) -> Iterator[str]:
    """A temporary folder whose files and folders appear in ``folder`` when all are complete, none after an exception.

    They replace those of the same names. What a killed process has left in ``folder`` is removed, or put back.
    """
    with local_folder(folder) as local:
        for name in os.listdir(local):
            if name.startswith(_UNFINISHED):
                shutil.rmtree(os.path.join(local, name), ignore_errors=True)
            elif name.startswith(_EARLIER) and not os.path.exists(os.path.join(local, name.removeprefix(_EARLIER))):
                os.rename(os.path.join(local, name), os.path.join(local, name.removeprefix(_EARLIER)))
        with tempfile.TemporaryDirectory(prefix=_UNFINISHED, dir=local) as fresh:
            yield fresh
            for name in sorted(os.listdir(fresh)):
                old, new = os.path.join(local, name), os.path.join(fresh, name)
                earlier = os.path.join(local, _EARLIER + name)
                if os.path.isdir(old):  # which os.replace() does not replace
                    shutil.rmtree(earlier, ignore_errors=True)
                    os.rename(old, earlier)
                os.replace(new, old)
                shutil.rmtree(earlier, ignore_errors=True)


class Mirror:
    """A local folder for files that grow: ``folder`` itself, or for a URL a temporary folder.

    The temporary folder is copied to the URL ``every`` seconds and at the end, because objects cannot be
    appended to.
    """

    def __init__(self, folder: str, every: float = 60.0) -> None:
        self.folder, self.local, self.every = folder, folder, every
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
        if self.local != self.folder and time.monotonic() - self._sent > self.every:
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
