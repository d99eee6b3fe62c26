"""Start of the trainer by exec, signals while waiting, and the termination log (R15)."""

from __future__ import annotations

# `signal` imports enum, which takes longer than the rest of the start.
import _signal  # type: ignore[import-not-found]  # not in typeshed
import os
import sys

from launcher.errors import NOT_EXECUTABLE, NOT_FOUND, LaunchError
from launcher.host import regular

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Callable, Mapping, NoReturn


TERMINATION_LOG = "/dev/termination-log"  # Kubernetes' default path (R15.5)
FAILURE_FILE = "/opt/ml/output/failure"  # SageMaker's (R15.5)
LONGEST_REASON = 3500  # bytes including escapes; Kubernetes keeps 4096
FORWARDED = ("SIGTERM", "SIGINT", "SIGHUP", "SIGQUIT", "SIGUSR1", "SIGUSR2", "SIGWINCH", "SIGCONT")
ENDING = ("SIGTERM", "SIGINT", "SIGHUP", "SIGQUIT")


def flush() -> None:
    """Write what is buffered for stdout and stderr. A full disk or a closed stream must not end a job."""
    for stream in (sys.stdout, sys.stderr):
        try:
            if stream is not None:  # the descriptor was closed when Python started
                stream.flush()
        except (OSError, ValueError):
            continue


def replace(command: list[str], env: Mapping[str, str]) -> NoReturn:
    """Replace this process by the command, without a shell (R15.1).

    Raises:
        LaunchError: (127) if there is no such command, (126) if it cannot be executed.
    """
    flush()
    # Python ignores these two, and exec would pass that on: `yes | head` would print an error in a shell script.
    for number in (_signal.SIGPIPE, _signal.SIGXFSZ):
        _signal.signal(number, _signal.SIG_DFL)
    try:
        os.execvpe(command[0], command, dict(env))
    except (FileNotFoundError, NotADirectoryError):
        raise LaunchError(
            f"{command[0][:200]!r} not found: no such file, no such command on PATH, or its #! line names a missing "
            "interpreter",
            NOT_FOUND,
        ) from None
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        hint = "; it may be a script without a #! line, or a program for another CPU" if "format" in reason else ""
        raise LaunchError(f"cannot execute {command[0][:200]!r}: {reason}{hint}", NOT_EXECUTABLE) from None


def become_child_of_tini(argv: list[str]) -> None:
    """As PID 1, start the launcher again below tini, which forwards signals and reaps orphans (R15.2).

    Another entry point has replaced the image's, as `command` of Kubernetes does. Returns if there is no tini.

    Args:
        argv: the launcher's arguments.
    """
    if not os.path.exists(sys.argv[0]):
        return
    try:
        os.execvp("tini", ["tini", "--", sys.executable, "-I", "-S", sys.argv[0], *argv])
    except OSError:
        return


def unignored(names: tuple[str, ...]) -> list[int]:
    """The numbers of these signals, without those that the parent has ignored, such as SIGHUP below `nohup` (R15.3)."""
    import signal

    numbers = [int(getattr(signal, name)) for name in names]
    return [number for number in numbers if signal.getsignal(number) != signal.SIG_IGN]


class ExitOnSignal:
    """In this context, SIGTERM, SIGINT, SIGHUP and SIGQUIT end the process at once with 128 + n (R15.3).

    A thread waits for them with `sigwait`. They therefore take effect as PID 1 too, for which the kernel drops signals
    without a handler, and during a DNS lookup of the main thread, where a Python handler would run only afterwards.

    Args:
        report: called with a message and the exit status before the process ends.
    """

    def __init__(self, report: Callable[[str, int], object]) -> None:
        self._report = report
        self._done = False

    def __enter__(self) -> None:
        import signal
        import threading

        self._numbers = unignored(ENDING)
        self._stop = signal.SIGUSR1
        self._before = signal.pthread_sigmask(signal.SIG_BLOCK, [*self._numbers, self._stop])
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()

    def _watch(self) -> None:
        import signal

        number = signal.sigwait([*self._numbers, self._stop])
        while number == self._stop and not self._done:
            number = signal.sigwait([*self._numbers, self._stop])  # SIGUSR1 from another process
        if not self._done:
            self._report(f"{signal.Signals(number).name} while waiting", 128 + number)
            os._exit(128 + number)

    def __exit__(self, *_: object) -> None:
        import signal

        # exec inherits the signal mask, and a fork must not happen with a second thread: undo both.
        self._done = True
        ident = self._thread.ident
        if ident is not None and self._thread.is_alive():
            signal.pthread_kill(ident, self._stop)
        self._thread.join()
        signal.pthread_sigmask(signal.SIG_SETMASK, self._before)


def wait_for_name(name: str, bound: float, sleep: Callable[[float], None], clock: Callable[[], float]) -> bool:
    """Wait until a host name resolves, because workers start in parallel with node 0 (R12.5).

    Args:
        name: host name or address.
        bound: seconds; the name is looked up at least once.
        sleep, clock: `time.sleep` and `time.monotonic`.

    Returns:
        whether the name resolved.
    """
    import socket

    end = clock() + bound
    while True:
        try:
            socket.getaddrinfo(name, None)
            return True
        except (OSError, UnicodeError):
            left = end - clock()
            if left <= 0:
                return False
            sleep(min(5.0, left))  # the interval that JAX uses (R12.5)


def wait_for_port(
    host: str, port: int, bound: float, sleep: Callable[[float], None], clock: Callable[[], float]
) -> str:
    """Wait until a host accepts a connection, because nodes start in parallel with node 0 (R12.6).

    Args:
        host, port: its address; the name need not resolve yet.
        bound: seconds; at least one connection is tried.
        sleep, clock: `time.sleep` and `time.monotonic`.

    Returns:
        "" if it accepted a connection, else why the last one failed.
    """
    import socket

    end = clock() + bound
    while True:
        try:
            socket.create_connection((host, port), timeout=max(1.0, min(5.0, end - clock()))).close()
            return ""
        except (OSError, UnicodeError) as error:
            left = end - clock()
            if left <= 0:
                return getattr(error, "strerror", None) or str(error) or type(error).__name__
            sleep(min(0.5, left))


def termination_log(path: str, sysroot: str, status: int, reason: str) -> None:
    """Write the reason to the termination log, as one line of JSON (R15.5). Errors are ignored.

    Replace a file directly in /dev, where Kubernetes mounts it, and the line of an earlier run. Append the line to any
    other content, which may be the user's.

    Args:
        path: TERMINATION_LOG; "" for Kubernetes' default, which is written only if it exists.
        sysroot: prefix of the default.
        status: exit status.
        reason: one line.
    """
    import json

    target = path or sysroot + TERMINATION_LOG
    # ASCII only, so that escapes make the line at most twice as long as the reason.
    plain = reason.encode("ascii", "replace").decode("ascii")[: LONGEST_REASON // 2]
    line = json.dumps({"exit_code": status, "exit_reason": plain, "traceback": ""}).encode() + b"\n"
    try:
        with open(target, "a+b" if path else "r+b", opener=regular) as file:
            file.seek(0)
            old = file.readline(4096)
            ours = old.startswith(b'{"exit_code": ') and old.endswith(b'"traceback": ""}\n') and not file.read(1)
            if ours or os.path.dirname(os.path.realpath(target)) == os.path.realpath(sysroot + "/dev"):
                file.truncate(0)
            file.seek(max(0, file.seek(0, os.SEEK_END) - 1))
            file.write(line if file.read(1) in (b"", b"\n") else b"\n" + line)
    except (OSError, ValueError):
        return


def failure_file(sysroot: str, reason: str) -> None:
    """Write the reason to SageMaker's failure file, which becomes the job's FailureReason (R15.5). Errors are ignored.

    Args:
        sysroot: prefix of the file.
        reason: one line; SageMaker keeps 1024 characters.
    """
    try:
        with open(sysroot + FAILURE_FILE, "w", encoding="utf-8", errors="replace", opener=regular) as file:
            file.write(reason + "\n")
    except OSError:
        return
