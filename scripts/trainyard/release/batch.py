"""Run `trainyard image` for several targets, several at a time, and report how each ended.

A target that fails does not stop the others. BuildKit runs a stage that several targets share once; smoke tests run one
at a time. The log of each target is <target>/image.log in the state folder.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import subprocess
import sys
import time
from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from trainyard.common import settings, stages
from trainyard.common.context import Context
from trainyard.common.errors import StepFailed, UserError
from trainyard.image import base_image
from trainyard.release import events
from trainyard.spec import architectures
from trainyard.spec.model import Spec, load, recommended
from trainyard.spec.state import own
from trainyard.spec.units import in_units

logger = logging.getLogger(__name__)

#: Seconds that a target gets to exit after an interrupt, including the engine's build; it took under 2 s (2026-11).
_END = 30


@dataclass
class Job:
    """Follow one target.

    Attributes:
        name: the target as it was given.
        stage: waiting, build (with the Dockerfile's stage), verify, smoke, ready or failed.
        started, ended: by the monotonic clock, in seconds.
        reason: why it failed, one line.
        result: what `trainyard image --json` prints.
    """

    spec: Spec
    name: str
    stage: str = "waiting"
    started: float = 0.0
    ended: float = 0.0
    reason: str = ""
    result: dict[str, Any] = field(default_factory=dict)
    process: subprocess.Popen[bytes] | None = None

    @property
    def target(self) -> str:
        """Return the name of the image; ``name`` may be a path."""
        return self.spec.local_name

    @property
    def seconds(self) -> float:
        """Return seconds since it was started, or until it ended."""
        return (self.ended or time.monotonic()) - self.started if self.started else 0.0

    @property
    def log(self) -> Path:
        """Return the file with the output of the child process."""
        return self.spec.kept / "image.log"

    @property
    def done(self) -> bool:
        """Return whether it has ended."""
        return self.stage in ("ready", "failed")

    def update_from_event(self, event: dict[str, Any]) -> None:
        """Apply an event of :mod:`trainyard.release.events`."""
        match event["event"]:
            case "stage":
                self.stage = str(event["stage"])
            case "step":
                self.stage = f"build: {event['stage']} {event['step']}"
            case "failed":
                self.reason = str(event["reason"])
            case "ready":
                self.result = event["result"]


def wanted(names: list[str], context: Context) -> list[Job]:
    """Return the targets to build: those of ``names``, all of the catalogue but fallbacks if it is empty.

    Raises:
        UserError: one does not exist or has a mistake in its spec, or two have the same name.
    """
    wanted_arch = architectures.given()
    chosen = names or [
        one.target for one in recommended(context) if not wanted_arch or wanted_arch.platform in one.platforms
    ]
    jobs = [Job(load(name, context=context), name) for name in dict.fromkeys(chosen)]
    twice = {job.target for job in jobs if sum(other.target == job.target for other in jobs) > 1}
    if twice:
        raise UserError(f"TARGETS: {', '.join(sorted(twice))} would be two images with the same name")
    return jobs


def make(job: Job, arguments: list[str]) -> None:
    """Run `trainyard image` for one target in a child process, with more ``arguments``."""
    job.started = time.monotonic()
    own(job.log.parent)
    job.stage = "build"
    reader, writer = os.pipe()
    command = [sys.executable, "-P", "-m", "trainyard", "image", job.name, f"--events={writer}", *arguments]
    with job.log.open("w", encoding="utf-8") as log, os.fdopen(reader, encoding="utf-8") as lines:
        try:
            process = job.process = subprocess.Popen(
                command,
                env=settings.environment(**job.spec.context.variables()),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                pass_fds=(writer,),
                start_new_session=True,  # Ctrl-C reaches the children from this process alone, once
            )
        finally:
            os.close(writer)
        for event in events.read(lines):
            job.update_from_event(event)
        status = process.wait()
    job.ended = time.monotonic()
    if status == 0:
        job.reason, job.stage = "", "ready"
    else:
        job.reason = job.reason or f"exited with status {status}; see the end of {job.log}"
        job.stage = "failed"


def run(jobs: list[Job], at_once: int, arguments: list[str]) -> None:
    """Build all of ``jobs``, ``at_once`` at a time, and report each that ends in a line.

    Args:
        arguments: more arguments of `trainyard image`.
    Raises:
        KeyboardInterrupt: interrupted; every target has ended by then.
    """
    for spec in {job.spec.base: job.spec for job in jobs}.values():
        with contextlib.suppress(UserError, StepFailed):  # the targets report it themselves
            # Otherwise two targets could bootstrap the same base at the same time.
            base_image.resolve(spec.context, spec.base)
    pool = ThreadPoolExecutor(at_once)
    running = {pool.submit(make, job, arguments): job for job in jobs}
    try:
        while running:
            stages.now(", ".join(f"{job.target} {job.stage}" for job in running.values() if job.stage != "waiting"))
            ended, _ = wait(running, 0.5, FIRST_COMPLETED)
            for future in ended:
                logger.info(line(running.pop(future)))
                future.result()
    except BaseException:
        pool.shutdown(wait=False, cancel_futures=True)
        while not all(future.done() for future in running):  # a child process may be starting
            _end(jobs)
        raise
    pool.shutdown()


def _end(jobs: list[Job]) -> None:
    """Interrupt the running targets with all their child processes, and kill those that do not end in time."""
    running = [job.process for job in jobs if job.process and job.process.poll() is None]
    for number in (signal.SIGINT, signal.SIGKILL):
        for process in running:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, number)
        until = time.monotonic() + _END
        for process in running:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(max(0.1, until - time.monotonic()))
        running = [process for process in running if process.poll() is None]


def line(job: Job) -> str:
    """Return how a target ended, for people."""
    why = in_units(job.result["verify"]["size"]) if job.result else job.reason
    return f"{job.target:<20} {job.stage:<6} {job.seconds:5.0f} s  {why}"


def result(jobs: list[Job]) -> dict[str, Any]:
    """Return target -> ``stage``, ``seconds``, ``reason`` and, if ready, the result of `trainyard image --json`."""
    return {
        job.target: {"stage": job.stage, "seconds": round(job.seconds, 1), "reason": job.reason} | job.result
        for job in jobs
    }


def require_all_ready(jobs: list[Job]) -> None:
    """Raise :class:`StepFailed` if a target failed, with the first reason and the path of its log."""
    failed = [job for job in jobs if job.stage != "ready"]
    if failed:
        more = f" ({len(failed)} of {len(jobs)} targets)" if len(jobs) > 1 else ""
        raise StepFailed(f"{failed[0].target}: {failed[0].reason}{more}; its log is {failed[0].log}")
