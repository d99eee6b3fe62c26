"""Files on local disks, ``/gcs/...`` mounts and ``gs://`` (or any other address fsspec knows) alike."""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
from collections.abc import Iterator
from typing import IO, Any

from trainers.common.exits import UserError


def is_remote(path: str) -> bool:
    """Whether ``path`` is an address such as ``gs://bucket/folder``."""
    return "://" in path


def join(folder: str, *names: str) -> str:
    """``folder/name``, for local paths and addresses."""
    return "/".join([folder.rstrip("/") or "/", *names]) if is_remote(folder) else os.path.join(folder, *names)


def _filesystem(path: str) -> Any:
    try:
        import fsspec

        return fsspec.core.url_to_fs(path)[0]
    except (ImportError, ValueError) as error:
        raise UserError(f"{path}: cannot be reached: {error}") from None


def open_file(path: str, mode: str = "rb") -> IO[Any]:
    """Open ``path``; raises :class:`UserError` if a remote side refuses, ``OSError`` as ``open`` does."""
    if is_remote(path):
        return _filesystem(path).open(path, mode)  # type: ignore[no-any-return]
    return open(path, mode)


def names(folder: str) -> list[str]:
    """Names in ``folder``, sorted; empty if there is no such folder."""
    if is_remote(folder):
        filesystem = _filesystem(folder)
        filesystem.invalidate_cache()
        found = filesystem.ls(folder, detail=False) if filesystem.exists(folder) else []
        return sorted(path.rstrip("/").rsplit("/", 1)[-1] for path in found)
    try:
        return sorted(os.listdir(folder))
    except FileNotFoundError:
        return []


def is_folder(path: str) -> bool:
    """Whether ``path`` is an existing folder."""
    return _filesystem(path).isdir(path) if is_remote(path) else os.path.isdir(path)


def make_folder(path: str) -> None:
    """Create ``path`` and its parents (object stores have no folders: nothing to do there)."""
    if not is_remote(path):
        try:
            os.makedirs(path, exist_ok=True)
        except OSError as error:
            raise UserError(f"{path}: cannot be created: {error.strerror}") from None


def remove(path: str) -> None:
    """Remove a file; one that is already gone is fine."""
    with contextlib.suppress(FileNotFoundError):
        _filesystem(path).rm(path) if is_remote(path) else os.remove(path)


@contextlib.contextmanager
def atomic_file(path: str) -> Iterator[IO[bytes]]:
    """A binary file that appears under ``path`` only once it is complete and on disk.

    Locally: a temporary name in the same folder, fsync, rename. Object stores publish an object when it is
    closed, which is the same promise.
    """
    if is_remote(path):
        with tempfile.TemporaryFile() as local:
            yield local  # type: ignore[misc]
            local.seek(0)
            with open_file(path, "wb") as file:
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
    """A local folder whose files end up in ``path``: ``path`` itself, or a temporary one that is uploaded."""
    if not is_remote(path):
        make_folder(path)
        yield path
        return
    with tempfile.TemporaryDirectory() as folder:
        yield folder
        _filesystem(path).put(folder.rstrip("/") + "/", path.rstrip("/") + "/", recursive=True)
