"""``gs://`` through TensorFlow's file systems, for everything that :mod:`trainers.common.paths` opens.

A TensorFlow program then uses one client for data, checkpoints, exports and TensorBoard, with the same credentials.
"""

from __future__ import annotations

import errno
from collections.abc import Callable
from typing import Any, TypeVar

import fsspec
import tensorflow as tf
from fsspec.spec import AbstractBufferedFile, AbstractFileSystem

from trainers.common.exits import UserError

_BLOCK = 256 << 10  # bytes read ahead, two or three photographs: records are read in random order
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
        return {"name": self._strip_protocol(path), "size": 0 if found.is_directory else found.length, "type": kind}

    def ls(self, path: str, detail: bool = True, **_: Any) -> list[Any]:
        """The entries of the folder ``path``: their names, or :meth:`info` of each."""
        address = self._address(path)
        names = _call(path, lambda: tf.io.gfile.listdir(address))
        inside = [f"{self._strip_protocol(path)}/{name.rstrip('/')}" for name in names]
        return [self.info(name) for name in inside] if detail else inside

    def rm_file(self, path: str) -> None:
        """Remove the object ``path``."""
        _call(path, lambda: tf.io.gfile.remove(self._address(path)))

    def _open(self, path: str, mode: str = "rb", **_: Any) -> _File:  # type: ignore[override]
        return _File(self, path, mode, _BLOCK)


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
