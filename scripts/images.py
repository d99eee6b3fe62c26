"""Build, verify and train in several targets at once, in one view; one that fails does not stop the others.

make images                             every target
make images TARGETS="cpu tf-cpu"        some; a path of a folder with an image.yaml works too
make images JOBS=1                      one build at a time (2 by default: one loads while another unpacks)

Each target goes through all of `make image`. Builds run side by side, and BuildKit runs a stage that several of them
share only once; images are trained in one after the other. What each said is in build/<target>/image.log.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.live import Live
from rich.table import Column, Table
from rich.text import Text

from scripts import base, cli, engine, image
from scripts.cli import ROOT, STATE, StepFailed, UserError, log, say
from scripts.spec import Spec, load, targets
from scripts.units import in_units

#: Builds at a time unless JOBS says otherwise.
JOBS = 2

#: Seconds a target gets to end after an interrupt, engine included; it took under 2 s (2026-11).
_END = 30

#: A step of BuildKit's plain progress: "#12 [framework 3/3] RUN ...".
_STEP = re.compile(r"#\d+ \[([a-z][\w-]*) +(\d+/\d+)\]")


@dataclass
class Job:
    """One target on its way. Times are of the monotonic clock; ``result`` is what ``make image`` gives as JSON."""

    spec: Spec
    name: str
    stage: str = "waiting"
    started: float = 0.0
    ended: float = 0.0
    reason: str = ""
    result: dict[str, Any] = field(default_factory=dict)
    process: subprocess.Popen[str] | None = None

    @property
    def target(self) -> str:
        return self.spec.target

    @property
    def seconds(self) -> float:
        """Seconds since it was begun, or until it ended."""
        return (self.ended or time.monotonic()) - self.started if self.started else 0.0

    @property
    def log(self) -> Path:
        return STATE / self.target / "image.log"

    @property
    def done(self) -> bool:
        return self.stage in ("ready", "failed")

    def hear(self, line: str) -> None:
        """Take a line of the target's log as a sign of how far it is."""
        step = _STEP.match(line)
        if step:
            self.stage = f"build: {step[1]} {step[2]}"
        elif line.startswith(("#", " ")):
            return
        elif line.startswith(image.VERIFYING):
            self.stage = "verify"
        elif line.startswith(image.TRAINING):
            self.stage = "smoke"
        elif line.startswith("image: "):
            self.reason = line.removeprefix("image: ").strip()


def wanted(names: str | None) -> list[Job]:
    """The targets to make: TARGETS, separated by spaces or commas; all of them without it.

    Raises:
        UserError: one does not exist or has a mistake in its spec, or two have the same name.
    """
    chosen = (names or "").replace(",", " ").split() or targets()
    jobs = [Job(load(name), name) for name in dict.fromkeys(chosen)]
    twice = {job.target for job in jobs if sum(other.target == job.target for other in jobs) > 1}
    if twice:
        raise UserError(f"TARGETS: {', '.join(sorted(twice))} would be two images of one name")
    return jobs


def make(job: Job) -> None:
    """Run ``make image`` for one target, in a process of its own that takes nobody down with it."""
    job.started = time.monotonic()
    job.log.parent.mkdir(parents=True, exist_ok=True)
    job.stage = "build"
    command = [sys.executable, "-m", "scripts.image", job.name, "--json"]
    with job.log.open("w", encoding="utf-8") as kept:
        # A session of its own: an interrupt reaches it once, from us.
        job.process = subprocess.Popen(
            command,
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            start_new_session=True,
        )
        assert job.process.stdout is not None and job.process.stderr is not None
        out: list[str] = []
        reader = threading.Thread(target=lambda stream: out.append(stream.read()), args=(job.process.stdout,))
        reader.start()
        for line in job.process.stderr:
            kept.write(line)
            job.hear(line)
        reader.join()
        status = job.process.wait()
    job.ended = time.monotonic()
    if status == 0:
        job.result = json.loads(out[0])
        job.reason, job.stage = "", "ready"
    else:
        job.reason = job.reason or f"ended with status {status}; its last words are in {job.log}"
        job.stage = "failed"


def run(jobs: list[Job], at_once: int, show: Callable[[list[Job]], None]) -> None:
    """Make all of ``jobs``, ``at_once`` at a time, and show them twice a second.

    Raises:
        KeyboardInterrupt: interrupted; every target has ended before that goes on.
    """
    for name in dict.fromkeys(job.spec.base for job in jobs):
        with contextlib.suppress(UserError, StepFailed):  # which its targets will meet themselves, and tell of
            base.resolve(name)  # or two targets would bootstrap the same base at once
    waiting, lock, stopping = list(jobs), threading.Lock(), threading.Event()

    def work() -> None:
        while not stopping.is_set():
            with lock:
                job = waiting.pop(0) if waiting else None
            if job is None:
                return
            make(job)

    workers = [threading.Thread(target=work, daemon=True) for _ in range(min(at_once, len(jobs)))]
    try:
        for worker in workers:
            worker.start()
        while any(worker.is_alive() for worker in workers):
            show(jobs)
            time.sleep(0.5)
        show(jobs)
    except BaseException:
        stopping.set()
        _end(jobs)
        for worker in workers:
            worker.join(_END)
        raise


def _end(jobs: list[Job]) -> None:
    """Interrupt what runs, with all its children, and see to it that it ends."""
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


def view(jobs: list[Job]) -> Table:
    """How far every target is."""
    table = Table("target", "", "seconds", box=None)
    for job in jobs:
        style = {"ready": "green", "failed": "bold red", "waiting": "dim"}.get(job.stage, "")
        table.add_row(job.target, Text(job.stage, style=style), f"{job.seconds:.0f}" if job.seconds else "")
    return table


class Lines:
    """The same for a log: a line whenever a target begins another part of its way."""

    def __init__(self) -> None:
        self._said: dict[str, str] = {}

    def __call__(self, jobs: list[Job]) -> None:
        for job in jobs:
            part = job.stage.split(":")[0]
            if part != "waiting" and self._said.get(job.target) != part:
                self._said[job.target] = part
                say(f"{job.target}: {part}{f': {job.reason}' if job.reason and job.done else ''}")


def summary(jobs: list[Job]) -> Table:
    """The result for people: what is ready and how large, what failed and why."""
    table = Table("target", "", "size", "seconds", Column("why", overflow="fold"))
    for job in jobs:
        size = in_units(job.result["verify"]["size"]) if job.result else ""
        style = "green" if job.stage == "ready" else "bold red"
        table.add_row(job.target, Text(job.stage, style=style), size, f"{job.seconds:.0f}", Text(job.reason))
    return table


def main(arguments: list[str]) -> int:
    parser = cli.parser(__doc__, target=False)
    parser.add_argument("targets", nargs="*", help="or TARGETS; all if none is given")
    parser.add_argument("--jobs", default=os.environ.get("JOBS") or str(JOBS), help="builds at a time; or JOBS")
    options = parser.parse_args(arguments)
    if not options.jobs.isdigit() or not int(options.jobs):
        raise UserError(f"JOBS={options.jobs!r} is not a number of builds")
    jobs = wanted(" ".join(options.targets) or os.environ.get("TARGETS"))
    engine.client()
    if log.is_terminal:
        with Live(view(jobs), console=log, refresh_per_second=4, transient=True) as live:
            run(jobs, int(options.jobs), lambda some: live.update(view(some)))
    else:
        run(jobs, int(options.jobs), Lines())
    log.print(summary(jobs))
    failed = [job for job in jobs if job.stage != "ready"]
    found = {
        job.target: {"stage": job.stage, "seconds": round(job.seconds, 1), "reason": job.reason} | job.result
        for job in jobs
    }
    cli.result(found, as_json=options.json)
    if failed:
        more = f" ({len(failed)} of {len(jobs)} targets)" if len(jobs) > 1 else ""
        raise StepFailed(f"{failed[0].target}: {failed[0].reason}{more}; the whole log is {failed[0].log}")
    return 0


if __name__ == "__main__":
    cli.run(main)
