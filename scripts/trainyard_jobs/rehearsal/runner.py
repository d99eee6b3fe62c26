"""Starts the replicas of a rehearsal, follows them, injects the requested faults, and applies the restart policy.

A thread per replica follows its output; the thread that calls :meth:`Runner.run` makes all decisions.
"""

from __future__ import annotations

import contextlib
import logging
import queue
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

import docker.errors
from docker.models.containers import Container
from rich.text import Text

from trainyard.common import errors
from trainyard.sandbox import containers
from trainyard.sandbox.containers import NoFile
from trainyard_jobs.rehearsal.faults import Fault
from trainyard_jobs.rehearsal.images import LocalImage
from trainyard_jobs.rehearsal.model import End, Rehearsal, Replica, Verdict
from trainyard_jobs.rehearsal.progress import Progress
from trainyard_jobs.rehearsal.sandbox import Limits, RehearsalSandbox, of_replica

logger = logging.getLogger(__name__)

#: Seconds between two checks of faults and time limits.
_TICK = 0.2

#: Seconds that the other replicas have to end by themselves once the job has succeeded.
_LINGER = 3.0

_COLOURS = ("cyan", "green", "magenta", "yellow", "blue", "bright_cyan", "bright_green", "bright_magenta")


@dataclass
class Attempt:
    """One start of a replica: times in seconds since the job's start, exit status (None while it runs), and cause.

    ``cause`` is "exit", "preempted", "killed", "stopped" (with the job), "memory" or "timeout".
    """

    started: float
    ended: float | None = None
    status: int | None = None
    cause: str = ""


@dataclass
class Member:
    """A replica and its state."""

    replica: Replica
    image: LocalImage
    container: Container | None = None
    generation: int = 0
    status: int | None = None
    cause: str = ""
    kill_at: float = 0.0
    restarts: int = 0
    address: str = ""
    last_line: str = ""
    attempts: list[Attempt] = field(default_factory=list)


@dataclass
class Outcome:
    """How a rehearsal ended.

    Attributes:
        succeeded: by the platform's rules.
        why: the rule that applied, or the error.
        advice: how to avoid it; "" without advice.
        injected: each fault that was injected, with the seconds since the start.
        metrics: contents of the trial's metric file; "" without one.
    """

    succeeded: bool
    why: str
    advice: str
    seconds: float
    job_restarts: int
    members: list[Member]
    progress: Progress
    injected: list[tuple[Fault, float]]
    metrics: str = ""


@dataclass(frozen=True)
class _Line:
    name: str
    generation: int
    text: str


@dataclass(frozen=True)
class _Ended:
    name: str
    generation: int
    status: int
    out_of_memory: bool


class Runner:
    """One run of a rehearsal in its sandbox.

    Args:
        images: name of each replica -> local image.
        timeout: seconds after which running replicas are stopped, and the rehearsal has failed.
        logs: folder for the output of the replicas, one file each.
        extra: additional variables for every replica.
    """

    def __init__(
        self,
        rehearsal: Rehearsal,
        sandbox: RehearsalSandbox,
        images: Mapping[str, LocalImage],
        share: Limits,
        faults: Sequence[Fault],
        timeout: float,
        logs: Path,
        extra: Mapping[str, str],
        show: Callable[[object], None],
    ) -> None:
        self._rehearsal, self._sandbox, self._share = rehearsal, sandbox, share
        self._faults, self._timeout, self._logs, self._extra = list(faults), timeout, logs, dict(extra)
        self._print = show
        self._members = {one.name: Member(one, images[one.name]) for one in rehearsal.replicas}
        self._events: queue.Queue[_Line | _Ended] = queue.Queue()
        self._progress = Progress(fault.text for fault in faults if fault.text)
        self._injected: list[tuple[Fault, float]] = []
        self._job_restarts = 0
        self._files: dict[str, IO[str]] = {}
        self._begun = time.monotonic()

    @property
    def _now(self) -> float:
        return time.monotonic() - self._begun

    def run(self) -> Outcome:
        """Run the job to its end.

        Raises:
            StepFailed: a container could not be started.
        """
        self._logs.mkdir(parents=True, exist_ok=True)
        with contextlib.ExitStack() as files:
            for name in self._members:
                self._files[name] = files.enter_context((self._logs / f"{name}.log").open("w", encoding="utf-8"))
            self._start_all()
            verdict = self._follow()
            metrics = self._metrics() if self._rehearsal.metric_file else ""
            self._stop_others(_LINGER if verdict.action == "succeeded" else 0.0)
        return Outcome(
            succeeded=verdict.action == "succeeded",
            why=verdict.why,
            advice=verdict.advice,
            seconds=self._now,
            job_restarts=self._job_restarts,
            members=list(self._members.values()),
            progress=self._progress,
            injected=self._injected,
            metrics=metrics,
        )

    # --- the loop ------------------------------------------------------------------------------------------

    def _follow(self) -> Verdict:
        while True:
            event: _Line | _Ended | None = None
            with contextlib.suppress(queue.Empty):
                event = self._events.get(timeout=_TICK)
            if isinstance(event, _Line):
                self._show(event)
            elif event:
                verdict = self._ended(event)
                if verdict and verdict.action in ("succeeded", "failed"):
                    return verdict
            self._inject_faults()
            if self._now > min(self._timeout, self._rehearsal.deadline or self._timeout):
                return self._timed_out()

    def _ended(self, event: _Ended) -> Verdict | None:
        member = self._members[event.name]
        if event.generation != member.generation:
            return None  # of a container that has been replaced since
        member.status, member.kill_at = event.status, 0.0
        cause = member.cause or ("memory" if event.out_of_memory and event.status else "exit")
        member.cause = ""
        self._record(member, event.status, cause)
        if cause == "memory":
            limit = of_replica(self._share, member.replica).memory
            own = "that is the limit of the job, which would end like this, too"
            return Verdict(
                "failed",
                f"{event.name} ran out of memory: its limit was {limit / 2**20:.0f} MB",
                own
                if limit == member.replica.memory
                else "give each replica more with '--memory 4g', or use fewer or smaller replicas",
            )
        end = End(
            replica=member.replica,
            status=event.status,
            cause=cause,
            restarts=member.restarts,
            job_restarts=self._job_restarts,
            others={name: one.status for name, one in self._members.items() if one is not member},
        )
        verdict = self._rehearsal.policy.after(end)
        if verdict.why:
            logger.info(f"rehearse: {verdict.why}")
        if verdict.action == "restart":
            member.restarts += 1
            self._start(member)
        elif verdict.action == "restart-job":
            self._stop_others()
            self._job_restarts += 1
            for one in self._members.values():
                one.restarts = 0
            self._start_all()
        return verdict

    def _record(self, member: Member, status: int, cause: str) -> None:
        attempt = member.attempts[-1]
        attempt.ended, attempt.status, attempt.cause = self._now, status, cause

    def _timed_out(self) -> Verdict:
        running = [name for name, one in self._members.items() if one.status is None]
        last = {name: self._members[name].last_line for name in running}
        for name in running:
            self._members[name].cause = "timeout"
        lines = "; ".join(f"{name}: {line[:100] or '(none)'}" for name, line in last.items())
        own = 0 < self._rehearsal.deadline <= self._timeout
        more = "the job itself allows no more" if own else "give it more time with '--timeout ...'"
        return Verdict(
            "failed",
            f"still running after {self._rehearsal.deadline if own else self._timeout:g} s: {', '.join(running)}",
            f"{more}; the last lines are: {lines}",
        )

    # --- faults -----------------------------------------------------------------------------------

    def _inject_faults(self) -> None:
        for fault in list(self._faults):
            if not fault.due(self._progress, self._now):
                continue
            self._faults.remove(fault)
            self._injected.append((fault, self._now))
            logger.info(f"rehearse: {fault}")
            for name in fault.targets:
                self._inject(self._members[name], fault.action)
        for member in self._members.values():
            if member.kill_at and self._now > member.kill_at:
                member.kill_at = 0.0
                grace = self._rehearsal.grace
                logger.info(f"rehearse: {member.replica.name} is still running {grace:g} s after SIGTERM: SIGKILL")
                self._signal(member, "SIGKILL")

    def _inject(self, member: Member, action: str) -> None:
        if member.status is not None:
            return
        if action == "preempt":
            member.cause, member.kill_at = "preempted", self._now + self._rehearsal.grace
            self._signal(member, "SIGTERM")
        else:
            member.cause = "killed"
            self._signal(member, "SIGKILL")

    @staticmethod
    def _signal(member: Member, name: str) -> None:
        if member.container:
            containers.signal(member.container, name)

    # --- containers ----------------------------------------------------------------------------------------

    def _start_all(self) -> None:
        for member in self._members.values():
            self._start(member)

    def _start(self, member: Member) -> None:
        if member.container:
            containers.remove(member.container)
        attempts = {name: str(self._job_restarts) for name in member.replica.attempt_variables}
        member.container = self._sandbox.create_replica(
            member.replica, member.image, self._share, attempts | self._extra
        )
        try:
            member.container.start()
        except docker.errors.APIError as error:
            raise errors.StepFailed(f"{member.replica.name} cannot be started: {error.explanation}") from None
        member.container.reload()
        networks = member.container.attrs["NetworkSettings"]["Networks"]
        member.address = networks[self._sandbox.name]["IPAddress"] or member.address or "-"
        member.status, member.cause, member.kill_at = None, "", 0.0
        member.generation += 1
        member.attempts.append(Attempt(self._now))
        thread = threading.Thread(
            target=self._watch, args=(member.replica.name, member.generation, str(member.container.id)), daemon=True
        )
        thread.start()

    def _watch(self, name: str, generation: int, container_id: str) -> None:
        """Queue a container's lines and its end; runs in a thread."""
        with contextlib.suppress(docker.errors.DockerException, OSError):  # removed, by this rehearsal or the user
            container = self._sandbox.container(container_id)
            errors = threading.Thread(target=self._read, args=(container, name, generation, False), daemon=True)
            errors.start()
            self._read(container, name, generation, True)
            errors.join()
            status = int(container.wait()["StatusCode"])
            container.reload()
            self._events.put(_Ended(name, generation, status, bool(container.attrs["State"].get("OOMKilled"))))

    def _read(self, container: Container, name: str, generation: int, stdout: bool) -> None:
        """Queue the lines of a container's stdout or stderr."""
        with contextlib.suppress(docker.errors.DockerException, OSError):
            for line in containers.lines(container, stdout=stdout, stderr=not stdout):
                self._events.put(_Line(name, generation, line.rstrip("\r")))

    def _stop_others(self, linger: float = 0.0) -> None:
        """Stop running replicas as platforms do: SIGTERM to all at once, the grace period, SIGKILL."""
        for signal, seconds, cause in (
            ("", linger, "exit"),
            ("SIGTERM", self._rehearsal.grace, "stopped"),
            ("SIGKILL", 30.0, "stopped"),
        ):
            running = [one for one in self._members.values() if one.status is None and one.container]
            for member in running:
                if signal:
                    self._signal(member, signal)
            deadline = time.monotonic() + seconds
            for member in running:
                assert member.container
                member.status = containers.wait(member.container, deadline - time.monotonic())
                if member.status is not None:
                    self._record(member, member.status, member.cause or cause)
        self._show_remaining_lines()

    # --- output -----------------------------------------------------------------------------

    def _show(self, line: _Line) -> None:
        """Print a replica's line, write it to the log, and evaluate it."""
        member = self._members[line.name]
        member.last_line = line.text or member.last_line
        self._files[line.name].write(line.text + "\n")
        self._progress.add(line.text, self._now)
        self._print(prefixed(line.text, member))

    def _show_remaining_lines(self) -> None:
        """Print the last lines of containers before they are removed."""
        end = time.monotonic() + 2 * _TICK
        while time.monotonic() < end:
            with contextlib.suppress(queue.Empty):
                event = self._events.get(timeout=_TICK)
                if isinstance(event, _Line):
                    self._show(event)

    def _metrics(self) -> str:
        """The contents of a trial's metric file, which one replica has: cloudml-hypertune runs on the chief."""
        for member in self._members.values():
            if not member.container:
                continue
            with contextlib.suppress(NoFile):
                return containers.read_file(member.container, self._rehearsal.metric_file).decode(errors="replace")
        return ""


def prefixed(line: str, member: Member, moment: float | None = None) -> Text:
    """A line in xla_dist's format, ``2026-11-21 09:30:00 172.18.0.4 [1] line``, in the replica's colour.

    ``%(asctime)-12s %(clientip)s [%(ordinal)s] %(message)s``:
    https://github.com/pytorch/xla/blob/v1.13.0/torch_xla/distributed/xla_dist.py
    """
    stamp = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(moment))
    ordinal = member.replica.ordinal
    text = Text(f"{stamp} {member.address} [{ordinal}] ", style=_COLOURS[ordinal % len(_COLOURS)])
    return text.append_text(Text.from_ansi(line)) if "\x1b" in line else text.append(line, style="default")
