"""Files on local disks, ``/gcs/...`` mounts and ``gs://`` (or any other URL that fsspec supports)."""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from typing import IO, Any, TypeVar

from trainers.common.files import UserError
from trainers.common.files import atomic_file as atomic_file
from trainers.common.files import check_writable as check_writable
from trainers.common.files import is_remote as is_remote
from trainers.common.files import join as join
from trainers.common.files import local_folder as local_folder
from trainers.common.files import make_folder as make_folder
from trainers.common.files import move as move
from trainers.common.files import names as names
from trainers.common.files import remove as remove

# Attempts for one read. gcsfs and TensorFlow's client retry as well, gcsfs six times within 31 seconds, so a read
# fails after about 100 seconds without an answer.
_ATTEMPTS = 3
_UNFINISHED = ".unfinished-"  # prefix of folders for files that are not complete
_EARLIER = ".earlier-"  # prefix of a folder while another one takes its name
Result = TypeVar("Result")


class Unavailable(UserError):
    """A read that failed for a reason that can pass, such as a timeout or the status 503."""


class Retries:
    """Counts the reads of this process that were repeated, and reports them: the first, the second, the fourth..."""

    def __init__(self, pause: float = 1.0) -> None:
        self.count = 0
        self.pause = pause  # seconds before the second attempt, doubled for each further one
        self._lock = threading.Lock()

    def add(self, path: str, error: Exception) -> None:
        """Count a read of ``path`` that failed with ``error`` and is repeated."""
        with self._lock:
            self.count += 1
            count = self.count
        if count & (count - 1) == 0:
            print(f"note: {path}: {_reason(error)}; trying again ({count} reads repeated so far)", file=sys.stderr)


retries = Retries()


@contextlib.contextmanager
def remote(path: str) -> Iterator[Any]:
    """The file system of the URL ``path``. Its errors except FileNotFoundError are raised as :class:`UserError`."""
    try:
        yield _filesystem(path.partition("://")[0])
    except (FileNotFoundError, UserError):
        raise
    except Exception as error:  # OSError and exceptions of aiohttp, google.auth and gcsfs
        kind = Unavailable if _is_transient(error) else UserError
        raise kind(f"{path}: cannot be reached: {_reason(error)}") from None


def _filesystem(scheme: str) -> Any:
    logging.getLogger("gcsfs").setLevel(logging.CRITICAL)  # it logs tracebacks of errors that are reported here
    import fsspec  # type: ignore[import-not-found, unused-ignore]

    return fsspec.filesystem(scheme)


def _reason(error: Exception) -> str:
    return (" ".join(str(error).split()) or type(error).__name__)[:300]


def _is_transient(error: Exception) -> bool:
    """Whether a read that failed with ``error`` can succeed later: not if access is denied or the request is wrong."""
    code = str(getattr(error, "code", ""))  # of gcsfs' HttpError
    if isinstance(error, (PermissionError, ValueError, TypeError, ImportError)) or str(error).startswith("Forbidden"):
        return False
    return not code.startswith("4") or code in ("408", "429")


def retry(path: str, read: Callable[[], Result]) -> Result:
    """The result of ``read()``, which is repeated with growing pauses while it raises :class:`Unavailable`."""
    for attempt in range(_ATTEMPTS - 1):
        try:
            return read()
        except Unavailable as error:
            retries.add(path, error)
            time.sleep(retries.pause * 2**attempt)
    return read()


def open_file(path: str, mode: str = "rb") -> IO[Any]:
    """Open ``path``; raises :class:`UserError` if a URL cannot be reached, ``OSError`` like the built-in ``open``."""
    if is_remote(path):
        with remote(path) as filesystem:
            return filesystem.open(path, mode)  # type: ignore[no-any-return]
    return open(path, mode)


def read_file(path: str) -> bytes:
    """The contents of ``path``; remote reads are retried. Raises ``FileNotFoundError`` and :class:`UserError`."""

    def read() -> bytes:
        with remote(path) as filesystem:
            return filesystem.cat_file(filesystem._strip_protocol(path))  # type: ignore[no-any-return]

    if is_remote(path):
        return retry(path, read)
    with open(path, "rb") as file:
        return file.read()


def is_folder(path: str) -> bool:
    """Whether ``path`` is an existing folder."""
    if not is_remote(path):
        return os.path.isdir(path)
    with remote(path) as filesystem, contextlib.suppress(FileNotFoundError):
        return filesystem.info(path)["type"] == "directory"  # type: ignore[no-any-return]
    return False


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
