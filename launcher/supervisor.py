"""Processes that the launcher starts and waits for: several per node, torchrun, and the duties of PID 1 (R15.2, R15.6).

Signals are blocked and received with `sigtimedwait`: none is lost between two steps, and the sender is known.
"""

from __future__ import annotations

import os
import signal
import time

from launcher.errors import LaunchError
from launcher.process import ENDING, FORWARDED, flush, replace, unignored

TYPE_CHECKING = False
if TYPE_CHECKING:
    import threading
    from typing import Callable, Mapping, NoReturn

    from launcher.settings import Settings

# siginfo_t.si_code of a signal that the kernel sent, as a terminal does at Ctrl-C (sigaction(2)). Not in `signal`.
SI_KERNEL = 128
COPIED = 65536  # bytes read at once from a process whose output gets a prefix


class Member:
    """A process to start.

    Attributes:
        name: for messages and as the prefix of its output: "rank 3"; "" for the only process.
        command: command and arguments.
        env: its whole environment.
    """

    __slots__ = ("command", "env", "name")

    def __init__(self, name: str, command: list[str], env: Mapping[str, str]) -> None:
        self.name = name
        self.command = command
        self.env = env


def supervise(
    members: list[Member],
    settings: Settings,
    own_group: bool = True,
    translate: bool = False,
    report: Callable[[str], None] = lambda line: None,
) -> int:
    """Start processes, forward signals to them, and return the exit status of the group.

    As with tini, signals are sent to the members only, because torchrun and torch_xla's parent process stop their
    children themselves. With `--signal-group` they are sent to the whole group, which a shell script as entry point
    needs, and the whole group is waited for.

    A member that fails ends the others: SIGTERM, and SIGKILL after LAUNCHER_GRACE seconds. As PID 1, LAUNCHER_GRACE
    seconds after the first terminating signal the group is killed; otherwise the platform's own time limit applies, as
    for a trainer that was exec'ed. Output is inherited, unless LAUNCHER_PREFIX asks for prefixes. Only the first member
    reads stdin.

    Args:
        members: the processes, in the order of their ranks.
        settings: `grace`, `signal_group` and `prefix`.
        own_group: this is PID 1: the members get a separate process group, which becomes the terminal's foreground
            group. Otherwise they are in the launcher's group, and a signal of the terminal reaches them without it.
        translate: return 128 + n if a terminating signal n was forwarded and a member did not succeed (R15.6). Without
            it, only the member's own status counts.
        report: called with one line about a member that failed.

    Returns:
        0 if all members succeed; the status of the first that fails, 128 + n if signal n killed it.

    Raises:
        LaunchError: (127) or (126) if a member cannot be started; the others have been ended.
    """
    # A parent may have ignored SIGCHLD: the kernel would then discard the statuses.
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    forwarded = unignored(FORWARDED)
    before = signal.pthread_sigmask(signal.SIG_BLOCK, [*forwarded, signal.SIGCHLD])
    # As PID 1 the launcher has blocked its signals since its start, and its members start without blocked signals.
    inherited = before.difference(getattr(signal, name) for name in FORWARDED) if own_group else before
    group = Group(settings, own_group, translate, report)
    try:
        group.start(members, inherited)
        return group.wait([*forwarded, signal.SIGCHLD])
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


class Group:
    """The members that run, and what has happened to them. See `supervise` for the parameters."""

    def __init__(self, settings: Settings, own_group: bool, translate: bool, report: Callable[[str], None]) -> None:
        self._settings = settings
        self._own_group = own_group
        self._translate = translate
        self._report = report
        self._running: dict[int, Member] = {}
        self._group = 0  # process group of the members; 0 for the launcher's
        self._status = 0
        self._signal = 0  # the first terminating signal
        self._failed = False  # a member failed before any terminating signal
        self._deadline: float | None = None
        self._copiers: list[Copier] = []

    def start(self, members: list[Member], mask: set[signal.Signals] | set[int]) -> None:
        """Start the members with this signal mask."""
        prefix = self._settings.prefix and len(members) > 1
        pipes: list[tuple[int, int, str]] = []  # read end, the launcher's stream, prefix
        for number, member in enumerate(members):
            streams: dict[int, int] = {}
            for stream in (1, 2) if prefix else ():
                receive, streams[stream] = os.pipe()
                pipes.append((receive, stream, f"[{member.name}] "))
            failure = self._fork(member, number > 0, streams, mask)
            for end in streams.values():
                os.close(end)
            if failure:
                self._send(signal.SIGKILL)
                while self._running:
                    self._reap(os.waitpid(-1, 0))
                status, _, message = failure.partition(" ")
                raise LaunchError(message, int(status))
        # Threads only now: a fork must not happen with a second thread.
        if pipes:
            import threading

            lock = threading.Lock()
            self._copiers = [Copier(*pipe, lock) for pipe in pipes]

    def _fork(self, member: Member, more: bool, streams: dict[int, int], mask: set[signal.Signals] | set[int]) -> str:
        """Start one member. Returns "STATUS MESSAGE" if its exec failed, else ""."""
        received, sent = os.pipe()  # both ends close on exec
        flush()
        pid = os.fork()
        if pid == 0:
            try:
                self._become(member, more, streams, sent, mask)
            finally:
                os._exit(1)  # unreachable: a child never returns into the launcher's code
        os.close(sent)
        if self._own_group and not self._group:
            self._group = pid
        self._running[pid] = member
        failure = b""
        while True:
            piece = os.read(received, 4096)  # ends when the exec succeeds or the child exits
            if not piece:
                break
            failure += piece
        os.close(received)
        return failure.decode("utf-8", "replace")

    def _become(
        self, member: Member, more: bool, streams: dict[int, int], report: int, mask: set[signal.Signals] | set[int]
    ) -> NoReturn:
        """In the child: process group, terminal, streams, signals, then the command."""
        if self._own_group:
            os.setpgid(0, self._group)
            if not more:
                _take_terminal()
        if more:
            null = os.open(os.devnull, os.O_RDONLY)
            os.dup2(null, 0)
        for stream, end in streams.items():
            os.dup2(end, stream)
        if signal.getsignal(signal.SIGINT) == signal.default_int_handler:
            signal.signal(signal.SIGINT, signal.SIG_DFL)  # as after exec: Ctrl-C now must not raise in this code
        env = dict(member.env)
        if streams:
            env.setdefault("PYTHONUNBUFFERED", "1")  # a pipe would delay lines by kilobytes
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        try:
            replace(member.command, env)
        except LaunchError as error:
            os.write(report, f"{error.status} {error.message}".encode("utf-8", "replace"))
            os._exit(error.status)

    def wait(self, numbers: list[int]) -> int:
        """Forward signals and reap processes until all members have exited."""
        self._reap_all()
        while self._running:
            if self._deadline is None:
                info = signal.sigwaitinfo(numbers)
            else:
                left = signal.sigtimedwait(numbers, max(0.0, self._deadline - time.monotonic()))
                if left is None:
                    self._deadline = None
                    self._kill()
                    continue
                info = left
            if info.si_signo == signal.SIGCHLD:
                self._reap_all()
            else:
                self._forward(info.si_signo, info.si_code == SI_KERNEL)
        if self._settings.signal_group and self._signal and self._group:
            self._wait_for_group(numbers)
        for copier in self._copiers:
            copier.join()
        if self._translate and self._signal and self._status and not self._failed:
            return 128 + self._signal
        return self._status

    def _forward(self, number: int, by_kernel: bool) -> None:
        if number in [getattr(signal, name) for name in ENDING]:
            if self._own_group and not self._signal:
                self._deadline = time.monotonic() + self._settings.grace
            self._signal = self._signal or number
        # The terminal sends Ctrl-C to its whole foreground group: a second SIGINT would interrupt a trainer that saves.
        if self._own_group or not by_kernel:
            self._send(number)

    def _send(self, number: int) -> None:
        if self._settings.signal_group and self._group:
            _kill(os.killpg, self._group, number)
            return
        for pid in self._running:
            _kill(os.kill, pid, number)

    def _kill(self) -> None:
        """SIGKILL for the members, and as PID 1 for the processes that they started."""
        if self._group:
            _kill(os.killpg, self._group, signal.SIGKILL)
        for pid in self._running:
            _kill(os.kill, pid, signal.SIGKILL)

    def _reap_all(self) -> None:
        """Reap every process that has exited, orphans included."""
        while True:
            try:
                found = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if found[0] == 0:
                return
            self._reap(found)

    def _reap(self, found: tuple[int, int]) -> None:
        pid, status = found
        member = self._running.pop(pid, None)
        if member is None:
            return  # an orphan
        code = 128 + os.WTERMSIG(status) if os.WIFSIGNALED(status) else os.WEXITSTATUS(status)
        if not code or self._status:
            return
        self._status = code
        self._failed = not self._signal
        if self._running and self._failed:
            what = f"was killed by {_name(os.WTERMSIG(status))}" if os.WIFSIGNALED(status) else f"exited with {code}"
            others = f"the other {len(self._running)} processes" if len(self._running) > 1 else "the other process"
            self._report(f"{member.name} {what}; ending {others} of this node")
            self._deadline = time.monotonic() + self._settings.grace
            self._send(signal.SIGTERM)

    def _wait_for_group(self, numbers: list[int]) -> None:
        """Wait for the rest of the group: a shell exits at the signal, but its child may still save."""
        while _kill(os.killpg, self._group, 0):
            left = None if self._deadline is None else max(0.0, self._deadline - time.monotonic())
            # An orphan of the group is the launcher's child only as PID 1: ask again after a while.
            info = signal.sigtimedwait(numbers, 0.1 if left is None else min(0.1, left))
            if info is not None and info.si_signo != signal.SIGCHLD:
                _kill(os.killpg, self._group, info.si_signo)
            self._reap_all()
            if left == 0.0:
                self._deadline = None
                _kill(os.killpg, self._group, signal.SIGKILL)


class Copier:
    """Copies the lines of a pipe to a stream of the launcher, each with a prefix.

    Args:
        source: the pipe's read end.
        stream: 1 or 2.
        prefix: start of every line.
        lock: shared by the copiers, so that lines are not mixed: a pipe takes more than 4096 bytes in parts (pipe(7)).
    """

    def __init__(self, source: int, stream: int, prefix: str, lock: threading.Lock) -> None:
        import threading

        self._source = source
        self._stream = stream
        self._prefix = prefix.encode()
        self._lock = lock
        self._thread = threading.Thread(target=self._copy, daemon=True)
        self._thread.start()

    def _copy(self) -> None:
        rest = b""
        while True:
            piece = os.read(self._source, COPIED)
            # A progress bar ends its lines with a carriage return.
            *lines, rest = (rest + piece).replace(b"\r\n", b"\n").replace(b"\r", b"\n").split(b"\n")
            if not piece and rest:
                lines.append(rest)
            with self._lock:
                self._write(b"".join(self._prefix + line + b"\n" for line in lines))
            if not piece:
                return

    def _write(self, text: bytes) -> None:
        try:
            while text:
                text = text[os.write(self._stream, text) :]
        except OSError:
            return  # the reader is gone; the process must not stop at a full pipe

    def join(self) -> None:
        """Wait for the last line, but not for a process left behind that holds the pipe open."""
        self._thread.join(1.0)


def _kill(send: Callable[[int, int], None], target: int, number: int) -> bool:
    """Send a signal. Returns whether the target exists."""
    try:
        send(target, number)
    except ProcessLookupError:
        return False
    return True


def _name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"  # real-time signals


def _take_terminal() -> None:
    """Make this group the terminal's foreground group; nothing without a terminal.

    Without it, `docker run -it IMAGE bash` would be stopped at its first read.
    """
    if not os.isatty(0):
        return
    signal.signal(signal.SIGTTOU, signal.SIG_IGN)  # tcsetpgrp would stop this process otherwise
    try:
        os.tcsetpgrp(0, os.getpid())
    except OSError:
        return  # the terminal of another session
    finally:
        signal.signal(signal.SIGTTOU, signal.SIG_DFL)
