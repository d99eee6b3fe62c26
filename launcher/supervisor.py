"""Processes that the launcher starts and waits for: several per node, torchrun, a process group (R15.2, R15.6, R15.8).

Signals are blocked and received with `sigtimedwait`: none is lost between two steps, and the sender is known.
"""

from __future__ import annotations

import os
import signal
import time

from launcher.errors import LaunchError
from launcher.outputs import ERROR_FILE, Copier, Folders
from launcher.process import ENDING, FORWARDED, flush, replace, unignored

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Callable, Mapping, NoReturn

    from launcher.settings import Settings

# siginfo_t.si_code of a signal that the kernel sent, as a terminal does at Ctrl-C (sigaction(2)). Not in `signal`.
SI_KERNEL = 128


class Member:
    """A process to start.

    Attributes:
        name: for messages and as the prefix of its output: "rank 3"; "" for the only process.
        command: command and arguments.
        env: its whole environment.
        rank: the name of its files; "" if it has none, as torchrun, whose processes have theirs.
    """

    __slots__ = ("command", "env", "name", "rank")

    def __init__(self, name: str, command: list[str], env: Mapping[str, str], rank: str = "") -> None:
        self.name = name
        self.rank = rank
        self.command = command
        self.env = env


def supervise(
    members: list[Member],
    settings: Settings,
    translate: bool = False,
    report: Callable[[str], None] = lambda line: None,
) -> int:
    """Start processes, forward signals to them, and return the exit status of the group.

    As with tini, signals are sent to the members only, because torchrun and torch_xla's parent process stop their
    children themselves. With `--signal-group` the members have a process group, which is also the terminal's foreground
    group; signals are sent to all of it, which a shell script as entry point needs, and all of it is waited for.

    A member that fails ends the others: SIGTERM, and SIGKILL after LAUNCHER_GRACE seconds. After a terminating signal
    the platform's own time limit applies, as for a trainer that was exec'ed. Output is inherited, unless
    LAUNCHER_PREFIX or LAUNCHER_LOG_DIR ask for more. Only the first member reads stdin.

    Args:
        members: the processes, in the order of their ranks.
        settings: `grace`, `signal_group`, `prefix` and `log_dir`.
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
    group = Group(settings, translate, report)
    try:
        group.start(members, before)
        return group.wait([*forwarded, signal.SIGCHLD])
    finally:
        group.close()
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


class Group:
    """The members that run, and what has happened to them. See `supervise` for the parameters."""

    def __init__(self, settings: Settings, translate: bool, report: Callable[[str], None]) -> None:
        self._settings = settings
        self._translate = translate
        self._report = report
        self._running: dict[int, Member] = {}
        self._group = 0  # process group of the members; 0 for the launcher's
        self._status = 0
        self._signal = 0  # the first terminating signal
        self._failed = False  # a member failed before any terminating signal
        self._deadline: float | None = None
        self._copiers: list[Copier] = []
        self._folders: Folders | None = None

    def start(self, members: list[Member], mask: set[signal.Signals] | set[int]) -> None:
        """Start the members with this signal mask."""
        prefix, root = self._settings.prefix and len(members) > 1, self._settings.log_dir
        ranks = [member.rank for member in members if member.rank]
        if ranks:
            self._folders = Folders(root, ranks, members[0].env)
        for number, member in enumerate(members):
            folder = self._folders.of.get(member.rank, "") if self._folders else ""
            streams: dict[int, int] = {}
            for stream, name in ((1, "stdout"), (2, "stderr")) if prefix or (root and folder) else ():
                receive, streams[stream] = os.pipe()
                start, file = f"[{member.name}] " if prefix else "", f"{folder}/{name}.log" if root else ""
                self._copiers.append(Copier(receive, stream, start, file))
            env = {ERROR_FILE: f"{folder}/error.json", **member.env} if folder else member.env
            failure = self._fork(Member(member.name, member.command, env), number > 0, streams, mask)
            for end in streams.values():
                os.close(end)
            if failure:
                self._send(signal.SIGKILL)
                for pid in list(self._running):
                    self._reap(os.waitpid(pid, 0))
                status, _, message = failure.partition(" ")
                raise LaunchError(message, int(status))
        # Threads only now: a fork must not happen with a second thread.
        if self._copiers:
            import threading

            lock = threading.Lock()
            for copier in self._copiers:
                copier.start(lock)

    def close(self) -> None:
        """Remove what is temporary."""
        if self._folders:
            self._folders.close()

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
        if self._settings.signal_group and not self._group:
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
        if self._settings.signal_group:
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
        error = self._folders.first_error() if self._folders and self._failed else ""
        if error:
            self._report(error)
        if self._translate and self._signal and self._status and not self._failed:
            return 128 + self._signal
        return self._status

    def _forward(self, number: int, by_kernel: bool) -> None:
        if number in [getattr(signal, name) for name in ENDING]:
            self._signal = self._signal or number
        # The terminal sends Ctrl-C to its whole foreground group: a second SIGINT would interrupt a trainer that saves.
        if self._group or not by_kernel:
            self._send(number)

    def _send(self, number: int) -> None:
        if self._settings.signal_group and self._group:
            _kill(os.killpg, self._group, number)
            return
        for pid in self._running:
            _kill(os.kill, pid, number)

    def _kill(self) -> None:
        """SIGKILL for the members, and for the processes that they started if they have a group."""
        if self._group:
            _kill(os.killpg, self._group, signal.SIGKILL)
        for pid in self._running:
            _kill(os.kill, pid, signal.SIGKILL)

    def _reap_all(self) -> None:
        """Reap the members that have exited; PID 1, which is tini, reaps orphans."""
        for pid in list(self._running):
            found = os.waitpid(pid, os.WNOHANG)
            if found[0]:
                self._reap(found)

    def _reap(self, found: tuple[int, int]) -> None:
        pid, status = found
        member = self._running.pop(pid)
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
            info = signal.sigtimedwait(numbers, 0.1)  # nothing tells the launcher of the end of an orphan
            if info is not None and info.si_signo != signal.SIGCHLD:
                _kill(os.killpg, self._group, info.si_signo)


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
