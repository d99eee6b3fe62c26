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

_UNFINISHED = ".unfinished-"  # prefix of folders for files that are not complete
_EARLIER = ".earlier-"  # prefix of a folder while another one takes its name
# Otherwise gcsfs calls the gRPC control API for the bucket's type, which needs another permission.
os.environ.setdefault("GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT", "false")


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
