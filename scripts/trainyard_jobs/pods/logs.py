"""Follow the logs of the containers on a TPU VM's workers, line by line, and their exit statuses."""

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

from trainyard_jobs.pods import shell_commands
from trainyard_jobs.pods.ssh import SSH_FAILED, Workers

#: Colours of the workers' prefixes, in turn.
COLOURS = ("cyan", "green", "yellow", "magenta", "blue", "red")

#: Seconds between two attempts to reconnect to a worker.
RECONNECT_INTERVAL = 5.0


def prefix(moment: datetime.datetime, address: str, worker: int) -> str:
    """The prefix of a line: date, time, address and ``[i]``, as torch_xla's xla_dist printed it
    (https://github.com/pytorch/xla/blob/v1.13.0/torch_xla/distributed/xla_dist.py).
    """
    return f"{moment:%Y-%m-%d %H:%M:%S} {address} [{worker}] "


class Printer:
    """Prints the lines of several workers without mixing them; on a terminal, each worker has a colour."""

    def __init__(self, addresses: tuple[str, ...], stream: TextIO | None = None) -> None:
        self._addresses = addresses
        self._stream = stream or sys.stdout
        self._console = Console(file=self._stream, highlight=False, soft_wrap=True, emoji=False)
        self._lock = threading.Lock()

    def __call__(self, worker: int, line: str) -> None:
        before = prefix(datetime.datetime.now(), self._addresses[worker], worker)
        with self._lock:
            if self._console.is_terminal:
                self._console.print(Text.assemble((before, COLOURS[worker % len(COLOURS)]), line))
            else:
                print(before + line, file=self._stream, flush=True)


class Follower:
    """Follows the log of one worker's container in a thread and reconnects if the connection is lost.

    Attributes:
        code: the container's exit status once it has ended.
        error: the error of writing its lines: their reader has ended.
    """

    def __init__(
        self,
        workers: Workers,
        worker: int,
        container: str,
        show: Callable[[int, str], None],
        changed: threading.Event,
        *,
        reconnect_interval: float = RECONNECT_INTERVAL,
    ) -> None:
        """
        Args:
            show: called with the worker's index and each line.
            changed: set when the container has ended or its log cannot be shown.
        """
        self._reconnect_interval = reconnect_interval
        self._workers, self.worker, self._container = workers, worker, container
        self._show, self._changed = show, changed
        self.code: int | None = None
        self.error: OSError | None = None
        self._disconnected_at: float | None = None
        self._seen = 0
        self._closed = threading.Event()
        self._process: subprocess.Popen[str] | None = None
        self._thread = threading.Thread(target=self._follow, daemon=True)
        self._thread.start()

    @property
    def disconnected_for(self) -> float:
        """Seconds since the connection was lost; 0 while connected."""
        return time.monotonic() - self._disconnected_at if self._disconnected_at is not None else 0.0

    def close(self) -> None:
        """Stop following; the container keeps running."""
        self._closed.set()
        if self._process:
            self._process.kill()
        self._thread.join()

    def join(self, timeout: float | None = None) -> None:
        """Wait until the container has ended, for at most ``timeout`` seconds."""
        self._thread.join(timeout)

    def _follow(self) -> None:
        ended = False
        while not self._closed.is_set():
            try:
                code: int | None = self._stream()
            except OSError as error:  # the reader of stdout ended, as in `make pod | head`
                self.error = error
                break
            if code != SSH_FAILED or ended:
                self.code, self._disconnected_at = code, None
                break
            # Either the connection was lost, or the container's own exit status is 255: ask Docker. The log of one that
            # has ended is read once more, for the lines that were lost.
            code = self._exit_code()
            ended = code == SSH_FAILED
            if code is None:
                self._disconnected_at = time.monotonic() if self._disconnected_at is None else self._disconnected_at
                self._closed.wait(self._reconnect_interval)
        self._changed.set()

    def _stream(self) -> int:
        """Show the lines after those that were shown already; the exit status of ssh."""
        words = self._workers.command(self.worker, shell_commands.follow(self._container, skip=self._seen))
        cut = ""
        with subprocess.Popen(
            words, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
            errors="replace", start_new_session=True,
        ) as process:  # fmt: skip
            self._process = process
            if self._closed.is_set():
                process.kill()
            try:
                for line in process.stdout or ():
                    if not line.endswith("\n"):
                        cut = line
                        continue
                    self._seen += 1
                    self._disconnected_at = None
                    self._show(self.worker, line[:-1])
            except OSError:
                process.kill()
                raise
        if cut and process.returncode != SSH_FAILED:  # not cut off: the program's log ends without a newline
            self._show(self.worker, cut)
        return process.returncode

    def _exit_code(self) -> int | None:
        """The exit status of the container; None if it is running or the worker does not answer."""
        finished = self._workers.on(self.worker, shell_commands.container_state(self._container), timeout=20)
        running, _, code = finished.stdout.strip().partition(" ")
        return int(code) if finished.returncode == 0 and running == "false" else None
