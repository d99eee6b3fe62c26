"""Starting the trainer: exec, the duties of PID 1 where no init is there, and the last words (a.7)."""

from __future__ import annotations

import os
import sys

from launcher.errors import NOT_EXECUTABLE, NOT_FOUND, LaunchError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Callable, Mapping, NoReturn

    from launcher.settings import Settings

TERMINATION_LOG = "/dev/termination-log"  # Kubernetes' default; read back as the pod's termination message
LONGEST_REASON = 3500  # bytes with escapes; Kubernetes keeps 4096
FORWARDED = ("SIGTERM", "SIGINT", "SIGHUP", "SIGQUIT", "SIGUSR1", "SIGUSR2", "SIGWINCH", "SIGCONT")
ENDING = ("SIGTERM", "SIGINT", "SIGHUP", "SIGQUIT")


def replace(command: list[str], env: Mapping[str, str]) -> NoReturn:
    """Become the command: no shell, nothing left resident.

    Raises:
        LaunchError: 127 when there is no such command, 126 when it cannot be executed.
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
        hint = "; is it a script without a #! line, or for another CPU?" if "format" in reason else ""
        raise LaunchError(f"cannot execute {command[0][:200]!r}: {reason}{hint}", NOT_EXECUTABLE) from None


def hold_signals() -> None:
    """As PID 1: keep signals until `supervise` or `ExitOnSignal` deals with them; the kernel would drop them."""
    import signal

    signal.pthread_sigmask(signal.SIG_BLOCK, [getattr(signal, name) for name in FORWARDED])


def supervise(command: list[str], env: Mapping[str, str], settings: Settings) -> int:
    """PID 1's duties where no init does them: forward signals, reap orphans, report the trainer's status.

    The trainer is in a process group of its own. Signals go to it alone, as with tini, because torchrun and xmp
    parents orchestrate their children themselves; with `--signal-group` they go to the whole group, which a shell
    entry point needs, and the whole group may finish. LAUNCHER_GRACE seconds after the first signal that asks it to
    end, the group is killed.

    Returns:
        the trainer's exit status, 128 + n when signal n killed it.

    Raises:
        LaunchError: 127 or 126 when it cannot be started.
    """
    import signal

    received, sent = os.pipe()  # carries the error of a failed exec; both ends close on exec
    numbers = [getattr(signal, name) for name in FORWARDED]
    # Nothing may be lost between the fork and the handlers.
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
        piece = os.read(received, 4096)  # ends when the exec succeeds or the child is gone
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
    """In the child: own group, the terminal with it, signals as they were, then the command."""
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
    """Make this group the terminal's foreground group, or `docker run -it IMAGE bash` would be stopped at its first
    read. Nothing happens without a terminal."""
    import signal

    if not os.isatty(0):
        return
    signal.signal(signal.SIGTTOU, signal.SIG_IGN)  # or taking the terminal would stop this process
    try:
        os.tcsetpgrp(0, os.getpid())
    except OSError:
        return  # a terminal, but not this session's
    finally:
        signal.signal(signal.SIGTTOU, signal.SIG_DFL)


def _reap_until(child: int) -> int:
    """Wait for whatever dies, orphans included, until the child does."""
    while True:
        pid, status = os.waitpid(-1, 0)
        if pid == child:
            return 128 + os.WTERMSIG(status) if os.WIFSIGNALED(status) else os.WEXITSTATUS(status)


def _reap_group(group: int) -> None:
    """Wait for the rest of the trainer's group: a shell dies of the signal at once, its child may be saving."""
    try:
        while True:
            os.killpg(group, 0)  # fails once nobody is left
            os.waitpid(-1, 0)
    except (ProcessLookupError, ChildProcessError):
        return


class ExitOnSignal:
    """While this is entered, SIGTERM, SIGINT, SIGHUP and SIGQUIT end the process at once with 128 + n.

    A thread waits for them with `sigwait`, so they act even as PID 1 (for which the kernel drops signals without a
    handler) and even while the main thread is inside a name look-up, where a Python handler would have to wait.

    Args:
        last_words: called with a message and the exit status before the end.
    """

    def __init__(self, last_words: Callable[[str, int], None]) -> None:
        self._last_words = last_words
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
            number = signal.sigwait([*self._numbers, self._stop])  # somebody else's
        if not self._done:
            self._last_words(f"{signal.Signals(number).name} while waiting", 128 + number)
            os._exit(128 + number)

    def __exit__(self, *_: object) -> None:
        import signal

        # The mask is inherited by exec, and a fork must not find a second thread: undo both.
        self._done = True
        ident = self._thread.ident
        if ident is not None and self._thread.is_alive():
            signal.pthread_kill(ident, self._stop)
        self._thread.join()
        signal.pthread_sigmask(signal.SIG_SETMASK, self._before)


def wait_for_name(name: str, bound: float, sleep: Callable[[float], None], clock: Callable[[], float]) -> bool:
    """Wait until a host name resolves: workers start in parallel with node 0 (S12).

    Args:
        name: host name or address.
        bound: seconds; the name is looked up at least once.
        sleep, clock: `time.sleep` and `time.monotonic`.
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
            sleep(min(5.0, left))  # JAX's step


def termination_log(path: str, sysroot: str, status: int, reason: str) -> None:
    """Leave the reason where the platform looks for it, as one line of JSON; silently nothing where it cannot.

    Args:
        path: TERMINATION_LOG; "" for Kubernetes' default, which is written only if it exists.
        sysroot: prefix of the default.
        status: exit status.
        reason: one line.
    """
    import json

    target = path or sysroot + TERMINATION_LOG
    # ASCII, so that escapes cannot make the line longer than twice the reason.
    plain = reason.encode("ascii", "replace").decode("ascii")[: LONGEST_REASON // 2]
    line = json.dumps({"exit_code": status, "exit_reason": plain, "traceback": ""})
    try:
        with open(target, "w" if path else "r+", encoding="utf-8") as file:
            file.write(line + "\n")
            file.truncate()
    except (OSError, ValueError):
        return
