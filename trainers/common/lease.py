"""Hold the folders that a run writes, so that no other run writes there as well."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import secrets
import socket
import sys
import threading
import time

from trainers.common import paths
from trainers.common.exits import UserError

BEAT = 10.0  # seconds between two signs of life
WAIT = 35.0  # seconds that a run waits for another one; without a sign of life, that one has gone


class Lease:
    """Hold ``folder`` until :meth:`release`: the file ``.lease`` in it says who has it.

    On file systems it is locked with flock(2), which ends with the process, even after SIGKILL or on another host of a
    network file system that has locks. Of URLs and Cloud Storage FUSE (``/gcs``) it is written every ``beat`` seconds.
    """

    def __init__(self, folder: str, wait: float | None = None, beat: float = BEAT) -> None:
        """Wait until no other run has the folder; raises :class:`UserError` with who has it after ``wait`` seconds."""
        wait = WAIT if wait is None else wait
        self.folder, self.path, self._beat = folder, paths.join(folder, ".lease"), beat
        self._beats = paths.is_remote(folder) or folder.startswith("/gcs/")
        since = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime())
        self._me = f"process {os.getpid()} on {socket.gethostname()}, since {since}, run {secrets.token_hex(4)}"
        self._ended, self._thread = threading.Event(), threading.Thread(target=self._live, daemon=True)
        paths.check_writable(folder)
        end, first, attempt = time.monotonic() + wait, self._read(), 0
        while not self._is_free():
            last, attempt = self._read(), attempt + 1
            says = f"{folder}: another run has it ({last[0]})"
            if time.monotonic() > end and self._beats and last == first:
                break  # there was no sign of life
            if time.monotonic() > end:
                raise UserError(f"{says}: end that run, or use another folder")
            if attempt == 1:
                print(f"note: {says}; waiting up to {wait:g} s", file=sys.stderr)
            time.sleep(min(1.0, wait / 10))
        self._write()
        if self._beats:
            self._thread.start()

    def _is_free(self) -> bool:
        if self._beats:
            return not self._read()[0]
        self._file = os.open(self.path, os.O_RDWR | os.O_CREAT, 0o666)
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            free = os.fstat(self._file).st_nlink > 0  # else a run that has ended has removed it meanwhile
        except OSError as error:
            free = error.errno != errno.EWOULDBLOCK  # a file system without locks
        if not free:
            os.close(self._file)
        return free

    def _read(self) -> list[str]:
        """Return the run that has the folder, "" if none has, and its last sign of life."""
        with contextlib.suppress(OSError, UserError):
            return paths.read_file(self.path).decode(errors="replace").split("\n")
        return [""]

    def _write(self) -> None:
        content = f"{self._me}\n{time.time()}\n".encode()
        if self._beats:
            with paths.atomic_file(self.path) as file:
                file.write(content)
            return
        with contextlib.suppress(OSError):  # on a full disk the lock holds, too
            os.ftruncate(self._file, os.pwrite(self._file, content, 0))

    def _live(self) -> None:
        while not self._ended.wait(self._beat):
            with contextlib.suppress(OSError, UserError):
                self.check()
                self._write()

    def check(self) -> None:
        """Raise :class:`UserError` if another run has taken the folder because this one showed no sign of life."""
        if self._beats and (holder := self._read()[0]) not in ("", self._me):
            raise UserError(f"{self.folder}: {holder} has taken it over: this run saves nothing more")

    def release(self) -> None:
        """Let other runs have the folder."""
        self._ended.set()
        with contextlib.suppress(OSError, UserError):
            if self._beats:
                self._thread.join()
                self.check()
                return paths.remove(self.path)
            if os.fstat(self._file).st_nlink:
                os.remove(self.path)
            os.close(self._file)
