"""Train in an image before it is published: offline, on a read-only root file system, with a fake TPU_CONFIG.

An image with a user's own command is tested by :mod:`trainyard.image.smoke_command` instead. The test of a target of
the catalogue has three runs in one sandbox:

1. `straight`: the launcher finds TPU_CONFIG and polls the node until it is READY; the trainer learns real digits.
2. `stopped`: the same run receives SIGTERM in its second epoch, saves a checkpoint and exits with 143 within the grace
   period.
3. `resumed`: it resumes from the checkpoint and must end with the same weights as the straight run.
"""

from __future__ import annotations

import contextlib
import json
import re
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from docker.models.containers import Container

from trainyard import state
from trainyard.console import StepFailed, say
from trainyard.datasets import digits
from trainyard.image import smoke_command
from trainyard.image.smoke_sandbox import EMULATED, GRACE, Sandbox, lines_of, wait
from trainyard.oci import docker_engine
from trainyard.spec.model import Spec

#: Seconds a training run may take; the slowest, XLA's CPU backend, took 40 s on 2 cores (2026-11).
RUN_TIMEOUT = 600

#: Flags of a trainer under emulation: small batches learn the digits in fewer passes (98.6 % for tf-cpu).
EMULATED_FLAGS = {"epochs": 2, "batch-size": 16}

#: Warnings and errors of Python and glog, which the log of a good run does not have. The launcher prints its own in
#: another form.
_NOISE = re.compile(
    r"^(?:WARNING|ERROR|CRITICAL|FATAL|Traceback|\S*Warning:|[WEF]\d{4} |.*: (?:User|Deprecation)Warning:)"
)

#: TensorFlow with CUDA logs this error on a host without a driver; the launcher has printed a warning about it before.
_NO_DRIVER = "failed call to cuInit"


@dataclass(frozen=True)
class Finished:
    """A container that exited: its status, log lines, and the trainer's summary (the JSON object of its last line)."""

    status: int
    lines: list[str]
    summary: dict[str, Any]


def summary_of(lines: list[str]) -> dict[str, Any]:
    """The trainer's summary, a JSON object with ``"event": "summary"``; empty if there is none."""
    for line in reversed(lines):
        if line.startswith("{"):
            with contextlib.suppress(json.JSONDecodeError):
                found = json.loads(line)
                if isinstance(found, dict) and found.get("event") == "summary":
                    return found
    return {}


def unexpected_lines(lines: list[str]) -> list[str]:
    """The lines that the log of a good run does not have."""
    return [line for line in lines if _NOISE.match(line) and _NO_DRIVER not in line]


def _digits() -> dict[str, bytes]:
    """The data: scikit-learn's 1,797 real digits as MNIST's four IDX files."""
    with tempfile.TemporaryDirectory() as folder:
        digits.write_idx(Path(folder))
        return {f"data/{path.name}": path.read_bytes() for path in sorted(Path(folder).iterdir())}


def _start(sandbox: Sandbox, *command: str) -> Container:
    return sandbox.start(*command, read_only=True, tmpfs={"/tmp": "mode=1777"})


def _finish(container: Container, what: str, timeout: float = RUN_TIMEOUT) -> Finished:
    """Wait until a container exits.

    Raises:
        StepFailed: it did not exit within ``timeout`` seconds.
    """
    status = wait(container, timeout)
    lines = lines_of(container)
    if status is None:
        last = (lines or ["(none)"])[-1].strip()[:300]
        raise StepFailed(f"{what}: still running after {timeout:.0f} s; last line: {last}")
    return Finished(status, lines, summary_of(lines))


def _refuse(problems: list[str], finished: Finished) -> None:
    if problems:
        for line in finished.lines[-20:]:
            say(f"  | {line}")
        raise StepFailed(f"{problems[0]} (see the last lines of its log above)")


def check_straight(finished: Finished, floor: float) -> list[str]:
    """What is wrong with a run that should have learned the digits; ``floor`` is a fraction of 1."""
    found = finished.summary
    problems = []
    if finished.status:
        problems.append(f"straight run: exit status {finished.status} where 0 was expected")
    elif not found:
        problems.append("straight run: no summary line in the trainer's output")
    else:
        if not found["loss_last"] < found["loss_first"]:
            problems.append(f"straight run: the loss did not fall ({found['loss_first']} -> {found['loss_last']})")
        if not found["accuracy"] >= 100 * floor:
            problems.append(f"straight run: accuracy {found['accuracy']:.2f} % is below the floor of {100 * floor:g} %")
    problems += [f"straight run: unexpected line in the log: {line}" for line in unexpected_lines(finished.lines)]
    return problems


def check_stopped(finished: Finished, seconds: float, grace: float = GRACE) -> list[str]:
    """What is wrong with a run that got SIGTERM ``seconds`` before its end, and may take ``grace``."""
    if finished.status != 143:
        return [f"stopped run: exit status {finished.status} after SIGTERM where 143 was expected"]
    if seconds > grace:
        return [f"stopped run: took {seconds:.1f} s to end after SIGTERM; platforms give {grace} s"]
    return []


def check_resumed(finished: Finished, straight: Finished) -> list[str]:
    """What is wrong with a run that should have resumed the stopped one and ended like the straight one."""
    if finished.status:
        return [f"resumed run: exit status {finished.status} where 0 was expected"]
    found, expected = finished.summary, straight.summary
    if not found.get("resumed_from"):
        return ["resumed run: started over instead of resuming: the stopped run left no usable checkpoint"]
    if found["weights_sha256"] != expected["weights_sha256"] or found["accuracy"] != expected["accuracy"]:
        return [
            f"resumed run: ended with different weights than the straight run (accuracy {found['accuracy']} "
            f"against {expected['accuracy']})"
        ]
    return []


def _until(container: Container, text: str) -> Iterator[bool]:
    """Yield whether ``text`` was seen, line by line, until the log ends."""
    for line in container.logs(stream=True, follow=True):
        yield text in line.decode(errors="replace")


def smoke(spec: Spec, reference: str) -> dict[str, Any]:
    """Run the user's command in the image ``reference``, or train in it; the facts recorded for its digest.

    Raises:
        StepFailed: a run failed; the message gives the first reason.
    """
    digest = docker_engine.digest(reference, made_by=spec.command("build"))
    workspace = spec.workspace
    facts = smoke_command.smoke(spec, digest) if workspace and workspace.document.run else _train(spec, digest)
    state.record(spec.local_name, "smoke", digest, facts)
    return {"digest": digest} | facts


def _train(spec: Spec, digest: str) -> dict[str, Any]:
    """The smoke test of a target of the catalogue; see :class:`trainyard.state.SmokeResult`."""
    started = time.monotonic()
    floor = spec.smoke.accuracy
    emulated = docker_engine.emulated_environment(spec.architecture)
    longer = EMULATED if emulated else 1
    grace, timeout = GRACE * longer, RUN_TIMEOUT * longer

    def command(run: str) -> list[str]:
        flags = {"datadir": "/smoke/data", "epochs": spec.smoke.epochs, "seed": 1, "output-dir": f"/smoke/out/{run}"}
        flags["checkpoint-dir"] = f"/smoke/out/{run}/checkpoints"
        flags |= EMULATED_FLAGS if emulated else {}
        return [spec.smoke.trainer, *(f"--{name}={value}" for name, value in flags.items())]

    with Sandbox(digest, _digits(), ("out",), environment=emulated) as sandbox:
        straight = _finish(_start(sandbox, *command("straight")), "straight run", timeout)
        _refuse(check_straight(straight, floor), straight)
        states = sandbox.polled_states()
        if "CREATING" not in states or states[-1] != "READY":
            _refuse([f"the launcher did not wait for the TPU node: the API reported {states or 'nothing'}"], straight)
        say(f"straight run: accuracy {straight.summary['accuracy']:.2f} %, node was {' -> '.join(states)}")

        container = _start(sandbox, *command("stopped"))
        if not any(_until(container, "Epoch=2 ")):
            _refuse(["stopped run: ended before its second epoch"], _finish(container, "stopped run"))
        stopping = time.monotonic()
        container.kill("SIGTERM")
        stopped = _finish(container, "stopped run", grace + 5)
        seconds_to_stop = time.monotonic() - stopping
        _refuse(check_stopped(stopped, seconds_to_stop, grace), stopped)

        resumed = _finish(_start(sandbox, *command("stopped")), "resumed run", timeout)
        _refuse(check_resumed(resumed, straight), resumed)
        say(f"stopped in {seconds_to_stop:.1f} s, resumed from step {resumed.summary['resumed_from']}, same weights")

    return {
        "passed": True,
        "level": spec.level,
        "notes": [f"trained under emulation of {spec.platform}"] if emulated else [],
        "seconds": round(time.monotonic() - started, 1),
        "accuracy": straight.summary["accuracy"],
        "images_per_second": straight.summary["images_per_second"],
        "seconds_to_stop": round(seconds_to_stop, 2),
        "resumed_from": resumed.summary["resumed_from"],
        "tpu_states": states,
    }
