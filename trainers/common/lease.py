"""Hold the folders that a run writes, so that no other run writes there as well."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import secrets
import socket
import sys
import threading
import time
from typing import Any

from trainers.common import paths
from trainers.common.exits import UserError

BEAT = 10.0  # seconds between two signs of life
WAIT = 35.0  # seconds that a run waits for another one; without a sign of life, that one has gone


class Lease:
    """Hold ``folder`` until :meth:`release`: the file ``.lease`` in it says who has it.

    On file systems it is locked with flock(2), which ends with the process, even after SIGKILL or on another host of a
    network file system that has locks. Of URLs and Cloud Storage FUSE (``/gcs``) it is written every ``BEAT`` seconds.
    """

    def __init__(self, folder: str) -> None:
        """Wait until no other run has the folder; raises :class:`UserError` with who has it after ``WAIT`` seconds."""
        self.folder, self.path = folder, paths.join(folder, ".lease")
        since = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime())
        self._me = {"host": socket.gethostname(), "process": os.getpid(), "since": since, "id": secrets.token_hex(8)}
        self._beats = paths.is_remote(folder) or folder.startswith("/gcs/")
        self._ended, self._thread = threading.Event(), threading.Thread(target=self._live, daemon=True)
        began, first, told = time.monotonic(), self._read(), False
        while not self._is_free():
            found, late = self._read(), time.monotonic() - began > WAIT
            if late and self._beats and found == first:
                break  # there was no sign of life
            who = f"process {found.get('process')} on {found.get('host')}, since {found.get('since')}"
            if late:
                raise UserError(f"{folder}: another run has it ({who}): end that run, or use another folder")
            if not told:
                print(f"note: {folder}: another run has it ({who}); waiting up to {WAIT:g} s", file=sys.stderr)
            told = True
            time.sleep(min(1.0, WAIT / 10))
        self._write()
        if self._beats:
            self._thread.start()

    def _is_free(self) -> bool:
        if self._beats:
            return not self._read()
        paths.make_folder(self.folder)
        try:
            self._file = os.open(self.path, os.O_RDWR | os.O_CREAT, 0o666)
        except OSError as error:
            raise UserError(f"{self.folder}: cannot be written: {error.strerror}") from None
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            free = os.fstat(self._file).st_nlink > 0  # else a run that has ended has removed it meanwhile
        except OSError as error:
            free = error.errno not in (errno.EWOULDBLOCK, errno.EACCES)  # others: a file system without locks
        if not free:
            os.close(self._file)
        return free

    def _read(self) -> dict[str, Any]:
        """What the file says; {} without one, and an unknown host while it is written."""
        try:
            found = json.loads(paths.read_file(self.path))
        except ValueError:
            return {"host": "?"}
        except (OSError, UserError):
            return {}
        return found if isinstance(found, dict) else {}

    def _write(self) -> None:
        content = json.dumps({**self._me, "beat": time.time()}).encode()
        if self._beats:
            with paths.atomic_file(self.path) as file:
                file.write(content)
            return
        with contextlib.suppress(OSError):  # on a full disk the lock holds, too
            os.ftruncate(self._file, 0)
            os.pwrite(self._file, content, 0)

    def _live(self) -> None:
        while not self._ended.wait(BEAT):
            with contextlib.suppress(OSError, UserError):
                self.check()
                self._write()

    def check(self) -> None:
        """Raise :class:`UserError` if another run has taken the folder because this one showed no sign of life."""
        if self._beats and (found := self._read()).get("id", self._me["id"]) != self._me["id"]:
            raise UserError(f"{self.folder}: process {found.get('process')} on {found.get('host')} has taken it over:"
                            " this run saves nothing more")  # fmt: skip

    def release(self) -> None:
        """Let other runs have the folder."""
        self._ended.set()
        with contextlib.suppress(OSError, UserError):
            if self._beats:
                self._thread.join()
                self.check()
            if self._beats or os.fstat(self._file).st_nlink:
                paths.remove(self.path)
            if not self._beats:
                os.close(self._file)
