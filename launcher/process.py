"""Start of the trainer, duties of PID 1 without an init, and the termination log (R15)."""

from __future__ import annotations

import os
import sys

from launcher.errors import NOT_EXECUTABLE, NOT_FOUND, LaunchError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Callable, Mapping, NoReturn

    from launcher.settings import Settings

TERMINATION_LOG = "/dev/termination-log"  # Kubernetes' default path (R15.5)
LONGEST_REASON = 3500  # bytes including escapes; Kubernetes keeps 4096
FORWARDED = ("SIGTERM", "SIGINT", "SIGHUP", "SIGQUIT", "SIGUSR1", "SIGUSR2", "SIGWINCH", "SIGCONT")
ENDING = ("SIGTERM", "SIGINT", "SIGHUP", "SIGQUIT")


def replace(command: list[str], env: Mapping[str, str]) -> NoReturn:
    """Replace this process by the command, without a shell (R15.1).

    Raises:
        LaunchError: (127) if there is no such command, (126) if it cannot be executed.
    """
    sys.stdout.flush()
    sys.stderr.flush()
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


def block_signals() -> None:
    """As PID 1: block signals until `supervise` or `ExitOnSignal` handles them; the kernel would drop them."""
    import signal

    signal.pthread_sigmask(signal.SIG_BLOCK, [getattr(signal, name) for name in FORWARDED])


def supervise(command: list[str], env: Mapping[str, str], settings: Settings) -> int:
    """Run the trainer with the duties of PID 1: forward signals, reap orphans, return its status (R15.2).

    The trainer gets a separate process group. As with tini, signals are sent to the trainer only, because torchrun and
    torch_xla's parent process stop their children themselves. With `--signal-group` they are sent to the whole group,
    which a shell script as entry point needs, and the whole group is waited for. LAUNCHER_GRACE seconds after the first
    terminating signal the group is killed.

    Returns:
        the trainer's exit status; 128 + n if signal n killed it.

    Raises:
        LaunchError: (127) or (126) if it cannot be started.
    """
    import signal

    received, sent = os.pipe()  # carries the error of a failed exec; both ends close on exec
    numbers = [getattr(signal, name) for name in FORWARDED]
    # No signal may be lost between the fork and the installation of the handlers.
    signal.pthread_sigmask(signal.SIG_BLOCK, numbers)
    child = os.fork()
    if child == 0:
        _become(command, env, sent, numbers)
    os.close(sent)
    killing = False

    def forward(number: int, frame: object) -> None:
        nonlocal killing
        try:
            if settings.signal_group:
                os.killpg(child, number)
            else:
                os.kill(child, number)
        except ProcessLookupError:
            return
        if number in [getattr(signal, name) for name in ENDING] and not killing:
            killing = True
            signal.setitimer(signal.ITIMER_REAL, max(settings.grace, 0.001))

    def kill(number: int, frame: object) -> None:
        try:
            os.killpg(child, signal.SIGKILL)
        except ProcessLookupError:
            return

    for number in numbers:
        signal.signal(number, forward)
    signal.signal(signal.SIGALRM, kill)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, numbers)
    failure = b""
    while True:
        piece = os.read(received, 4096)  # ends when the exec succeeds or the child exits
        if not piece:
            break
        failure += piece
    os.close(received)
    status = _reap_until(child)
    if settings.signal_group and killing:
        _reap_group(child)
    if failure:
        code, _, message = failure.decode("utf-8", "replace").partition(" ")
        raise LaunchError(message, int(code))
    return status


def _become(command: list[str], env: Mapping[str, str], report: int, numbers: list[int]) -> NoReturn:
    """In the child: new process group, foreground of the terminal, signals unblocked, then the command."""
    import signal

    os.setpgid(0, 0)
    _take_terminal()
    signal.pthread_sigmask(signal.SIG_UNBLOCK, numbers)
    try:
        replace(command, env)
    except LaunchError as error:
        os.write(report, f"{error.status} {error.message}".encode("utf-8", "replace"))
        os._exit(error.status)


def _take_terminal() -> None:
    """Make this group the terminal's foreground group; nothing without a terminal.

    Without it, `docker run -it IMAGE bash` would be stopped at its first read.
    """
    import signal

    if not os.isatty(0):
        return
    signal.signal(signal.SIGTTOU, signal.SIG_IGN)  # tcsetpgrp would stop this process otherwise
    try:
        os.tcsetpgrp(0, os.getpid())
    except OSError:
        return  # the terminal of another session
    finally:
        signal.signal(signal.SIGTTOU, signal.SIG_DFL)


def _reap_until(child: int) -> int:
    """Reap every process, orphans included, until the child has exited; return its status."""
    while True:
        pid, status = os.waitpid(-1, 0)
        if pid == child:
            return 128 + os.WTERMSIG(status) if os.WIFSIGNALED(status) else os.WEXITSTATUS(status)


def _reap_group(group: int) -> None:
    """Wait for the rest of the trainer's group: a shell exits at the signal, but its child may still save."""
    try:
        while True:
            os.killpg(group, 0)  # fails when the group is empty
            os.waitpid(-1, 0)
    except (ProcessLookupError, ChildProcessError):
        return


class ExitOnSignal:
    """In this context, SIGTERM, SIGINT, SIGHUP and SIGQUIT end the process at once with 128 + n (R15.3).

    A thread waits for them with `sigwait`. They therefore take effect as PID 1 too, for which the kernel drops signals
    without a handler, and during a DNS lookup of the main thread, where a Python handler would run only afterwards.

    Args:
        report: called with a message and the exit status before the process ends.
    """

    def __init__(self, report: Callable[[str, int], None]) -> None:
        self._report = report
        self._done = False

    def __enter__(self) -> None:
        import signal
        import threading

        self._numbers = [getattr(signal, name) for name in ENDING]
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


def termination_log(path: str, sysroot: str, status: int, reason: str) -> None:
    """Write the reason to the termination log, as one line of JSON (R15.5). Errors are ignored.

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
    line = json.dumps({"exit_code": status, "exit_reason": plain, "traceback": ""})
    try:
        with open(target, "w" if path else "r+", encoding="utf-8") as file:
            file.write(line + "\n")
            file.truncate()
    except (OSError, ValueError):
        return
