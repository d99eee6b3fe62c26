"""``gs://`` through TensorFlow's file systems, for everything that :mod:`trainers.common.paths` opens.

A TensorFlow program then uses one client for data, checkpoints, exports and TensorBoard, with the same credentials.
"""

from __future__ import annotations

import errno
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import fsspec
import tensorflow as tf
from fsspec.spec import AbstractBufferedFile, AbstractFileSystem

from trainers.common.exits import UserError
from trainers.common.paths import Unavailable

_BLOCK = 256 << 10  # bytes read ahead in a file that is read from its beginning
_STATS = 32  # requests at a time for a listing: TensorFlow asks for each object's size separately
_OPEN = 8  # files kept open per thread
# TensorFlow retries some of these itself, for up to about a minute.
_TRANSIENT = (tf.errors.UnavailableError, tf.errors.DeadlineExceededError, tf.errors.AbortedError,
              tf.errors.InternalError, tf.errors.ResourceExhaustedError, tf.errors.UnknownError)  # fmt: skip
Result = TypeVar("Result")


def register(*schemes: str) -> None:
    """Make fsspec use TensorFlow for URLs of ``schemes`` (default: ``gs``)."""
    for scheme in schemes or ("gs",):
        fsspec.register_implementation(scheme, type("GFiles", (_GFiles,), {"protocol": scheme}), clobber=True)


def _call(path: str, call: Callable[[], Result]) -> Result:
    """The result of ``call``; TensorFlow's errors are raised as ``OSError`` or :class:`UserError`."""
    try:
        return call()
    except tf.errors.NotFoundError:
        raise FileNotFoundError(errno.ENOENT, "no such object", path) from None
    except (tf.errors.PermissionDeniedError, tf.errors.UnauthenticatedError) as error:
        raise PermissionError(errno.EACCES, error.message.splitlines()[0], path) from None
    except _TRANSIENT as error:
        raise Unavailable(f"{path}: {error.message.splitlines()[0]}") from None
    except tf.errors.OpError as error:
        raise UserError(f"{path}: {error.message.splitlines()[0]}") from None


class _GFiles(AbstractFileSystem):  # type: ignore[misc]
    """One scheme of ``tf.io.gfile`` as a file system of fsspec; paths have no scheme, as in fsspec."""

    cachable = False
    protocol = "gs"

    def _address(self, path: str) -> str:
        return f"{self.protocol}://{self._strip_protocol(path)}"

    def info(self, path: str, **_: Any) -> dict[str, Any]:
        """Name, size in bytes and type of ``path``; raises ``FileNotFoundError``."""
        address = self._address(path)
        found = _call(path, lambda: tf.io.gfile.stat(address))
        kind = "directory" if found.is_directory else "file"
        size, name = 0 if found.is_directory else found.length, self._strip_protocol(path)
        return {"name": name, "size": size, "type": kind, "mtime": found.mtime_nsec}

    def ls(self, path: str, detail: bool = True, **_: Any) -> list[Any]:
        """The entries of the folder ``path``: their names, or :meth:`info` of each."""
        address = self._address(path)
        names = _call(path, lambda: tf.io.gfile.listdir(address))
        inside = [f"{self._strip_protocol(path)}/{name.rstrip('/')}" for name in names]
        if not detail:
            return inside
        with ThreadPoolExecutor(_STATS) as pool:
            return list(pool.map(self.info, inside))

    def cat_file(self, path: str, start: int | None = None, end: int | None = None, **_: Any) -> bytes:
        """The bytes of ``path``, all or those from ``start`` up to ``end``."""
        address = self._address(path)

        def read() -> bytes:
            handle = _handles.get(address)
            handle.seek(start or 0)
            return handle.read(-1 if end is None else end - (start or 0))  # type: ignore[no-any-return]

        found = b""
        try:
            found = _call(path, read)
            return found
        finally:
            if end is None or len(found) < end - (start or 0):
                _handles.files.pop(address, None)  # after an error, or if the file was replaced: open it again

    def rm_file(self, path: str) -> None:
        """Remove the object ``path``."""
        _call(path, lambda: tf.io.gfile.remove(self._address(path)))

    def cp_file(self, path1: str, path2: str, **_: Any) -> None:
        """Copy the object ``path1``."""
        _call(path1, lambda: tf.io.gfile.copy(self._address(path1), self._address(path2)))

    def _open(self, path: str, mode: str = "rb", **_: Any) -> _File:  # type: ignore[override]
        return _File(self, path, mode, _BLOCK)


class _Handles(threading.local):
    """Open files per thread: opening one costs a request."""

    def __init__(self) -> None:
        self.files: dict[str, tf.io.gfile.GFile] = {}

    def get(self, address: str) -> tf.io.gfile.GFile:
        """An open file."""
        if address not in self.files:
            if len(self.files) >= _OPEN:
                self.files.pop(next(iter(self.files))).close()
            self.files[address] = tf.io.gfile.GFile(address, "rb")
        return self.files[address]


_handles = _Handles()


class _File(AbstractBufferedFile):  # type: ignore[misc]
    """A file read in blocks. When writing, the object appears when the file is closed."""

    _handle: tf.io.gfile.GFile

    def _fetch_range(self, start: int, end: int) -> bytes:
        if not hasattr(self, "_handle"):
            self._handle = tf.io.gfile.GFile(self.fs._address(self.path), "rb")

        def read() -> bytes:
            self._handle.seek(start)
            return self._handle.read(end - start)  # type: ignore[no-any-return]

        return _call(self.path, read)

    def _initiate_upload(self) -> None:
        self._handle = tf.io.gfile.GFile(self.fs._address(self.path), "wb")

    def _upload_chunk(self, final: bool = False) -> bool:
        _call(self.path, lambda: self._handle.write(self.buffer.getvalue()))
        if final:
            _call(self.path, self._handle.close)
        return True
