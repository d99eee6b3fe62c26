"""The logs of a pod's containers as they come, line by line, and how each container ended."""

from __future__ import annotations

import datetime
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from typing import TextIO

from rich.console import Console
from rich.text import Text

from scripts.pods import remote
from scripts.pods.workers import SSH_FAILED, Workers

#: One colour a worker, over and over.
COLOURS = ("cyan", "green", "yellow", "magenta", "blue", "red")

#: Seconds between two attempts to reach a worker again whose connection was lost.
AGAIN = 5.0


def prefix(moment: datetime.datetime, address: str, worker: int) -> str:
    """What stands before a line: date, time, address and ``[i]``, as torch_xla's xla_dist wrote it."""
    return f"{moment:%Y-%m-%d %H:%M:%S} {address} [{worker}] "


class Printer:
    """Prints lines of several workers, whole and one after the other; with a colour a worker on a terminal."""

    def __init__(self, addresses: tuple[str, ...], stream: TextIO | None = None) -> None:
        self._addresses = addresses
        self._stream = stream or sys.stdout
        self._console = Console(file=self._stream, highlight=False, soft_wrap=True)
        self._lock = threading.Lock()

    def __call__(self, worker: int, line: str) -> None:
        before = prefix(datetime.datetime.now(), self._addresses[worker], worker)
        with self._lock:
            if self._console.is_terminal:
                self._console.print(Text.assemble((before, COLOURS[worker % len(COLOURS)]), line))
            else:
                print(before + line, file=self._stream, flush=True)


class Follower:
    """Follows the container of one worker in a thread, over as many connections as it takes.

    Attributes:
        code: the container's exit status once it has ended.
        error: why its lines cannot be shown any more.
    """

    def __init__(self, workers: Workers, worker: int, container: str, show: Callable[[int, str], None],
                 changed: threading.Event) -> None:  # fmt: skip
        self._workers, self.worker, self._container = workers, worker, container
        self._show, self._changed = show, changed
        self.code: int | None = None
        self.error: OSError | None = None
        self._lost_at: float | None = None
        self._seen = 0
        self._left = threading.Event()
        self._process: subprocess.Popen[str] | None = None
        self._thread = threading.Thread(target=self._follow, daemon=True)
        self._thread.start()

    @property
    def lost_for(self) -> float:
        """Seconds since the connection was lost and could not be made again; 0 while it stands."""
        return time.monotonic() - self._lost_at if self._lost_at is not None else 0.0

    def leave(self) -> None:
        """Follow no longer; the container goes on."""
        self._left.set()
        if self._process:
            self._process.kill()
        self._thread.join()

    def _follow(self) -> None:
        over = False
        while not self._left.is_set():
            try:
                code = self._stream()
            except OSError as error:  # the reader of stdout went away, as `make pod | head` does
                self.error = error
                break
            if code != SSH_FAILED or over:
                self.code, self._lost_at = code, None
                break
            # Either the connection's end, or the container's own exit status: the engine knows. One that has ended
            # is followed once more, for the lines that the connection lost.
            asked = self._asked()
            over = asked == SSH_FAILED
            if asked is None:
                self._lost_at = time.monotonic() if self._lost_at is None else self._lost_at
                self._left.wait(AGAIN)
        self._changed.set()

    def _stream(self) -> int:
        """Show the lines from where the last connection ended; how ssh ended."""
        words = self._workers.words(self.worker, remote.follow(self._container, skip=self._seen))
        cut = ""
        with subprocess.Popen(
            words, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
            errors="replace", start_new_session=True,
        ) as process:  # fmt: skip
            self._process = process
            if self._left.is_set():
                process.kill()
            assert process.stdout is not None
            try:
                for line in process.stdout:
                    if not line.endswith("\n"):
                        cut = line
                        continue
                    self._seen += 1
                    self._lost_at = None
                    self._show(self.worker, line[:-1])
            except OSError:
                process.kill()
                raise
        if cut and process.returncode != SSH_FAILED:  # the connection did not cut it: the program ended its log so
            self._show(self.worker, cut)
        return process.returncode

    def _asked(self) -> int | None:
        """The exit status of the container; None if it runs, or if nobody can tell."""
        done = self._workers.on(self.worker, remote.ended(self._container), timeout=20)
        running, _, code = done.stdout.strip().partition(" ")
        return int(code) if done.returncode == 0 and running == "false" else None
