"""How trainers end: exit codes, the exceptions that carry them, the wrapper around ``main``, and SIGTERM."""

from __future__ import annotations

import contextlib
import errno
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any, NoReturn, TextIO, cast

FAILED = 1
USAGE = 2
TARGET_MISSED = 21  # as pytorch/xla's test trainers exit if the accuracy is below --target_accuracy
DIVERGED = 22
INTERRUPTED = 130  # 128 + SIGINT
PREEMPTED = 143  # 128 + SIGTERM: Vertex AI and GKE can restart such a job
# Preemption and docker stop; Ctrl-C; a terminal that is closed; Slurm's --signal=USR1@60. SIGQUIT ends at once.
SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1)


class UserError(Exception):
    """An error that the user can fix: one line with what is wrong, where, and what to do. Exits with ``code``."""

    def __init__(self, message: str, code: int = FAILED) -> None:
        super().__init__(message)
        self.code = code


class Damaged(UserError):
    """A sample of the data that cannot be decoded; a few of many are skipped."""


class Diverged(UserError):
    """End a run whose loss or weights stopped being finite numbers."""

    def __init__(self, message: str) -> None:
        super().__init__(message, DIVERGED)


class Stop:
    """A signal as a request to stop after the current step, and the time of the next checkpoint.

    All processes of a run call :meth:`poll` after each step. At most about once in ``EVERY`` seconds they agree: they
    exchange what each has received, and the slowest one's time per call decides after how many calls they do so again.
    The number doubles at most, so that a step that takes longer than the steps before it delays them little.

    ``maximum`` returns the element-wise maximum of a list over all processes; None for a single process. ``minutes``
    is the time between checkpoints, 0 for none.
    """

    EVERY = 1.0  # seconds: GKE's notice is 15 seconds for a Spot VM, in which a checkpoint must be written, too

    def __init__(
        self,
        maximum: Callable[[list[float]], list[float]] | None = None,
        minutes: float = 0.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.received = 0  # the exit code for the signal that this process received
        self.code = 0  # the exit code on which all processes have agreed
        self.save_due = False  # whether ``minutes`` have passed, on any process, as of the last agreement
        self._maximum, self._minutes, self._clock = maximum, minutes, clock
        self._saved_at = clock()
        self.restart()

    def install(self) -> None:
        """Catch SIGNALS, but one that is ignored, as SIGHUP below nohup; a second SIGINT interrupts."""
        for number in SIGNALS:
            if signal.getsignal(number) != signal.SIG_IGN:
                signal.signal(number, self._record)

    def _record(self, number: int, frame: FrameType | None) -> None:
        self.received = self.received or 128 + number
        if number == signal.SIGINT:
            signal.signal(signal.SIGINT, signal.default_int_handler)

    def restart(self) -> None:
        """Agree at the next call: between calls there will be another kind of work, such as a test."""
        self._calls, self._interval, self._since = 0, 1, self._clock()

    def saved(self) -> None:
        """Count ``minutes`` from now."""
        self._saved_at, self.save_due = self._clock(), False

    def poll(self) -> int:
        """The exit code for a signal that any process has received, 0 while there is none."""
        now = self._clock()
        due = bool(self._minutes) and now - self._saved_at >= 60 * self._minutes
        if self._maximum is None:
            self.code, self.save_due = self.received, due
            return self.code
        self._calls += 1
        if self._calls >= self._interval and not self.code:
            seconds = (now - self._since) / self._calls
            code, saves, seconds = self._maximum([self.received, due, seconds])
            self.code, self.save_due = int(code), bool(saves)
            self._interval = max(1, min(2 * self._interval, int(self.EVERY / max(seconds, 1e-9))))
            self._calls, self._since = 0, self._clock()
        return self.code


_unwritten: list[str] = []  # why lines of the log were not written


@contextlib.contextmanager
def dropping(line: bool = True) -> Iterator[None]:
    """Go on if the log cannot be written, as on a full disk or without a reader; :func:`guard` says how many lines."""
    try:
        yield
    except (OSError, ValueError) as error:  # ValueError: a closed file
        _unwritten.extend([getattr(error, "strerror", None) or str(error)] * line)


class Lines:
    """Write lines to a text file or stream; those that it does not take are dropped, see :func:`dropping`."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        """Write ``text``, and flush at the end of a line."""
        with dropping(text.endswith("\n")):
            self._stream.write(text)
            if text.endswith("\n"):
                self._stream.flush()
        return len(text)

    def flush(self) -> None:
        """Flush the rest of a line."""
        with dropping(False):
            self._stream.flush()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def again(resume: bool) -> str:
    """Return how to run a command again to resume, for messages: ``--no-resume`` would start over."""
    return "again" if resume else "again without --no-resume"


def leave(code: int) -> NoReturn:
    """Exit immediately with ``code``, without the shutdown of the frameworks.

    Their background threads (collectives, profilers, compilation pools) can hang or print when a process exits in
    the middle of a distributed run. All files are closed before this is called.
    """
    for stream in filter(None, (sys.stdout, sys.stderr)):  # None if it was closed before the start
        stream.flush()
    os._exit(code)


def end_idle_replica() -> None:
    """Raise :class:`UserError` with status 0 if this replica does not train: a parameter server or an evaluator.

    Such a replica has no rank: it would train alone, as if it were the chief, into the chief's folder. Its role is
    ``LAUNCHER_ROLE``, which the launcher sets, or without the launcher the task in ``TF_CONFIG``. It ends with status 0
    because the job's result is that of the replicas that train; a platform would restart the job for another status
    (https://cloud.google.com/vertex-ai/docs/training/understanding-training-service).
    """
    names = {"server": "a parameter server", "ps": "a parameter server", "evaluator": "an evaluator"}
    role = os.environ.get("LAUNCHER_ROLE") or _role_in_tf_config()
    if role in names:
        raise UserError(
            f"this replica is {names[role]}, which this trainer does not need: it ends with status 0 and the others"
            " train; leave it out of the job",
            0,
        )


def _role_in_tf_config() -> str:
    """The type of this task in ``TF_CONFIG``; "" without one, or if it is invalid."""
    text = os.environ.get("TF_CONFIG")
    if not text:
        return ""
    import json

    try:
        config = json.loads(text)
    except ValueError:
        return ""
    task = config.get("task") if isinstance(config, dict) else None
    role = task.get("type") if isinstance(task, dict) else None
    return role if isinstance(role, str) else ""


def follows() -> bool:
    """Return whether this host of a rehearsed TPU slice leaves logs and files to the first host.

    XLA's CPU backend has no collectives between hosts, so each host runs the same training independently. The
    launcher sets ``NODE_RANK``.
    """
    return os.environ.get("LAUNCHER_REHEARSE") == "1" and (os.environ.get("NODE_RANK") or "0") != "0"


def guard(main: Callable[[Any], int], args: Any, name: str) -> NoReturn:
    """Run ``main(args)`` and end the process with the code it returns.

    A :class:`UserError`, or an ``OSError`` about a full or read-only disk or missing permissions, is printed as one
    line on stderr. Any other exception is a bug and keeps its traceback.
    """
    sys.stdout, sys.stderr = (stream and cast(TextIO, Lines(stream)) for stream in (sys.stdout, sys.stderr))
    try:
        code = main(args)
    except UserError as error:
        print(f"{name}: {error}", file=sys.stderr)
        code = error.code
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES):
            raise
        print(f"{name}: {error.filename or 'writing'}: {error.strerror}", file=sys.stderr)
        code = FAILED
    except KeyboardInterrupt:
        print(f"{name}: interrupted", file=sys.stderr)
        code = INTERRUPTED
    if _unwritten:
        print(f"{name}: {len(_unwritten)} lines of the log were not written ({_unwritten[-1]})", file=sys.stderr)
    leave(code)
