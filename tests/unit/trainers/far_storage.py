"""Stand in for fsspec's file systems with a folder that counts requests, and fails or waits on demand."""

from __future__ import annotations

import io
import threading
import time
from pathlib import Path
from typing import IO, Any


class Object(io.BytesIO):
    """Write a file that appears when it is closed, as objects do: no listing has a part of it, or another name."""

    def __init__(self, place: Path, folder: Path) -> None:
        super().__init__()
        self.place = place
        self.unique = folder.with_name(f"{folder.name}.{place.name}.{id(self)}")

    def close(self) -> None:
        if not self.closed:
            self.unique.write_bytes(self.getvalue())
            self.unique.replace(self.place)
        super().close()


class Ranged(io.FileIO):
    """Read a file, each time with a request."""

    def __init__(self, storage: FarStorage, path: str) -> None:
        super().__init__(storage.folder / path)
        self.storage, self.path = storage, path

    def readinto(self, buffer: Any) -> int:
        start, count = self.tell(), super().readinto(buffer) or 0
        self.storage.ranges.append((self.path, start, start + count))
        return count


class FarStorage:
    """Do what :mod:`trainers.common.files` needs of a file system; ``far://x`` is ``folder/x``."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.ranges: list[tuple[str, int, int]] = []  # path, start, end
        self.failures: list[Exception] = []  # raised by the next reads
        self.seconds = 0.0  # that a read takes
        self.gather = 0  # reads wait until so many have been made at a time, for at most 20 seconds
        self.at_once = self.most_at_once = 0
        self.lock = threading.Condition()

    def _strip_protocol(self, path: str) -> str:
        return path.rpartition("://")[2].rstrip("/")

    def invalidate_cache(self) -> None: ...

    def cat_file(self, path: str, start: int | None = None, end: int | None = None) -> bytes:
        with self.lock:
            self.at_once += 1
            self.most_at_once = max(self.most_at_once, self.at_once)
            failure = self.failures.pop(0) if self.failures else None
            self.lock.notify_all()
            if self.gather:
                self.lock.wait_for(lambda: self.most_at_once >= self.gather, 20)
        time.sleep(self.seconds)
        try:
            if failure:
                raise failure
            with (self.folder / path).open("rb") as file:
                file.seek(start or 0)
                content = file.read(-1 if end is None else end - (start or 0))
            with self.lock:
                self.ranges.append((path, start or 0, (start or 0) + len(content)))
            return content
        finally:
            with self.lock:
                self.at_once -= 1

    def info(self, path: str) -> dict[str, Any]:
        about = (self.folder / path).stat()
        kind = "directory" if (self.folder / path).is_dir() else "file"
        return {"name": path, "size": about.st_size, "type": kind, "generation": str(about.st_mtime_ns)}

    def ls(self, path: str, detail: bool) -> list[Any]:
        path = self._strip_protocol(path)
        inside = [f"{path}/{entry.name}" for entry in (self.folder / path).iterdir()]
        return [self.info(name) for name in inside] if detail else inside

    def find(self, path: str, detail: bool = False) -> Any:
        place = self.folder / path
        inside = [place] if place.is_file() else sorted(entry for entry in place.rglob("*") if entry.is_file())
        names = [str(entry.relative_to(self.folder)) for entry in inside]
        return {name: self.info(name) for name in names} if detail else names

    def open(self, path: str, mode: str, block_size: int = 1 << 10, cache_type: str = "", **_: object) -> IO[bytes]:
        path = self._strip_protocol(path)
        if mode == "wb":
            (self.folder / path).parent.mkdir(parents=True, exist_ok=True)
            return Object(self.folder / path, self.folder)
        # As gcsfs: its default cache asks for what each read wants, and no more.
        return io.BufferedReader(Ranged(self, path), block_size if cache_type == "readahead" else 1 << 10)

    def rm(self, path: str) -> None:
        place = self.folder / self._strip_protocol(path)
        place.unlink()
        for parent in place.relative_to(self.folder).parents[:-2]:  # there are no folders, but the bucket stays
            if not any((self.folder / parent).iterdir()):
                (self.folder / parent).rmdir()

    def cp_file(self, path: str, target: str) -> None:
        new = self.folder / self._strip_protocol(target)
        new.parent.mkdir(parents=True, exist_ok=True)
        new.write_bytes((self.folder / self._strip_protocol(path)).read_bytes())

    def put(self, source: str, target: str, recursive: bool) -> None:
        for path in Path(source).rglob("*"):
            if path.is_file():
                place = self.folder / self._strip_protocol(target) / path.relative_to(source)
                place.parent.mkdir(parents=True, exist_ok=True)
                place.write_bytes(path.read_bytes())

    def get(self, path: str, target: str) -> None:
        Path(target).write_bytes((self.folder / self._strip_protocol(path)).read_bytes())

    def bytes_of(self, suffix: str) -> int:
        """Return how many bytes were read of files whose names end with ``suffix``."""
        return sum(end - start for path, start, end in self.ranges if path.endswith(suffix))
