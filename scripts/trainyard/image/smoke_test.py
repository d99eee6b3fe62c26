"""Train in an image before it is published: offline, on a read-only root file system, with a fake TPU_CONFIG.

An image with a user's own command is tested by :mod:`trainyard.image.smoke_command` instead. The test of a target of
the catalogue has these runs in one sandbox. All but the first are in restricted containers
(:mod:`trainyard.image.smoke_containers`):

1. `straight`: the launcher finds TPU_CONFIG and polls the node until it is READY; the trainer learns real digits.
2. `stopped`: the same run receives SIGTERM in its second epoch, saves a checkpoint and exits with 143 within the grace
   period.
3. `out-of-memory`: it resumes from the checkpoint, and reaches its memory limit while it saves the next one.
4. `resumed`: it resumes from the checkpoint of the stopped run, and must end with the same weights as the straight run.
5. `in two processes`: two processes of a short run connect to each other. Beside it, two worker processes of a data
   loader deliver arrays.

6. `compiled`: in an image with a compiler, a training step that torch.compile compiled ends with the same weights as
   one that it did not. In an image for NVIDIA GPUs, kernels are compiled for each GPU that the image has code for.

Beside these runs, or that command, what its packages have is tried (:mod:`trainyard.image.smoke_packages`).

The third, the fifth, the sixth, and what is tried beside, are left out under emulation, where each takes many times as
long.
"""

from __future__ import annotations

import contextlib
import json
import logging
import re
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from docker.models.containers import Container

from trainyard.common import stages
from trainyard.common.context import Context
from trainyard.common.docker_engine import Engine
from trainyard.common.errors import StepFailed, UserError
from trainyard.image import smoke_command, smoke_containers, smoke_packages, worker_processes
from trainyard.image.smoke_command import Subject
from trainyard.image.smoke_containers import EMULATED, GRACE, SmokeSandbox, check_status
from trainyard.image.smoke_failure import HostFiles
from trainyard.recipe import Command, Recipe, Training
from trainyard.sandbox.containers import lines_of, prints, watch
from trainyard.sandbox.datasets import digits
from trainyard.spec import state

logger = logging.getLogger(__name__)

#: Seconds a training run may take; the slowest, XLA's CPU backend, took 40 s on 2 cores (2026-11).
RUN_TIMEOUT = 600

#: Flags of a trainer under emulation: small batches learn the digits in fewer passes (98.6 % for tf-cpu).
EMULATED_FLAGS = {"epochs": 2, "batch-size": 16}

#: Warnings and errors of Python and glog, which the log of a good run does not have. The launcher prints its own in
#: another form.
_NOISE = re.compile(
    r"^(?:WARNING|ERROR|CRITICAL|FATAL|Traceback|\S*Warning:|[WEF]\d{4} |.*: (?:User|Deprecation)Warning:)"
)

#: What TensorFlow with CUDA logs on a host without a driver: the error, about which the launcher has printed a warning,
#: and the line that Abseil prints before the first line of its log. The lines after it are judged by themselves.
_EXPECTED = ("failed call to cuInit", "WARNING: All log messages before absl::InitializeLog()")

#: What the message about a failed run says about its container, and what to do.
RESTRICTED = f" in a container with {smoke_containers.RESTRICTED}: try docker run {smoke_containers.RESTRICTED_FLAGS}"


@dataclass(frozen=True)
class Finished:
    """Describe a container that exited: status, log lines, and the trainer's summary (its last line, a JSON object)."""

    status: int
    lines: list[str]
    summary: dict[str, Any]


def summary_of(lines: list[str]) -> dict[str, Any]:
    """Return the trainer's summary, a JSON object with ``"event": "summary"``; empty if there is none."""
    for line in reversed(lines):
        if line.startswith("{"):
            with contextlib.suppress(json.JSONDecodeError):
                summary = json.loads(line)
                if isinstance(summary, dict) and summary.get("event") == "summary":
                    return summary
    return {}


def printed(finished: Finished, what: str) -> dict[str, Any]:
    """Return the last JSON object that a container printed, or raise :class:`StepFailed`; warnings may follow it."""
    for line in reversed(finished.lines):
        with contextlib.suppress(json.JSONDecodeError):
            if line.startswith("{"):
                return dict(json.loads(line))
    raise StepFailed(f"{what}: no result in its output")


def unexpected_lines(lines: list[str]) -> list[str]:
    """Return the lines that the log of a good run does not have."""
    return [line for line in lines if _NOISE.match(line) and not any(known in line for known in _EXPECTED)]


def _digits() -> dict[str, bytes]:
    """Return the data: scikit-learn's 1,797 real digits as MNIST's four IDX files."""
    with tempfile.TemporaryDirectory() as folder:
        digits.write_idx(Path(folder))
        return {f"data/{path.name}": path.read_bytes() for path in sorted(Path(folder).iterdir())}


def _finish(container: Container, what: str, timeout: float = RUN_TIMEOUT) -> Finished:
    """Wait until a container exits, for ``timeout`` seconds, or raise :class:`StepFailed`."""
    status = watch(container, timeout, what)
    lines = lines_of(container)
    if status is None:
        last = (lines or ["(none)"])[-1].strip()[:300]
        raise StepFailed(f"{what}: still running after {timeout:.0f} s; last line: {last}")
    return Finished(status, lines, summary_of(lines))


def _refuse(problems: list[str], finished: Finished, where: str = "") -> None:
    if problems:
        for line in smoke_containers.last_lines(finished.lines):
            logger.info(f"  | {line}")
        raise StepFailed(f"{problems[0]}{where} (see the last lines of its log above)")


def check_straight(finished: Finished, floor: float) -> list[str]:
    """Return what is wrong with a run that should have learned the digits; ``floor`` is a fraction of 1."""
    summary, problems = finished.summary, check_status("straight run", finished.status)
    if not problems and not summary:
        problems.append("straight run: no summary line in the trainer's output")
    elif not problems:
        if not summary["loss_last"] < summary["loss_first"]:
            problems.append(f"straight run: the loss did not fall ({summary['loss_first']} -> {summary['loss_last']})")
        if not summary["accuracy"] >= 100 * floor:
            accuracy = f"accuracy {summary['accuracy']:.2f} % is below the floor of {100 * floor:g} %"
            problems.append(f"straight run: {accuracy}")
    problems += [f"straight run: unexpected line in the log: {line}" for line in unexpected_lines(finished.lines)]
    return problems


def check_stopped(finished: Finished, seconds: float, grace: float = GRACE) -> list[str]:
    """Return what is wrong with a run that got SIGTERM ``seconds`` before its end, and may take ``grace``."""
    problems = check_status("stopped run", finished.status, 143, " after SIGTERM")
    if not problems and seconds > grace:
        return [f"stopped run: took {seconds:.1f} s to end after SIGTERM; platforms give {grace} s"]
    return problems


def check_resumed(finished: Finished, straight: Finished) -> list[str]:
    """Return what is wrong with a run that should have resumed the stopped one and ended like the straight one."""
    if problems := check_status("resumed run", finished.status):
        return problems
    summary, expected = finished.summary, straight.summary
    if not summary.get("resumed_from"):
        return ["resumed run: started over instead of resuming: the stopped run left no usable checkpoint"]
    if summary["weights_sha256"] != expected["weights_sha256"] or summary["accuracy"] != expected["accuracy"]:
        return [
            f"resumed run: ended with different weights than the straight run (accuracy {summary['accuracy']} "
            f"against {expected['accuracy']})"
        ]
    return []


def described(facts: Mapping[str, Any]) -> str:
    """Return how far an image was tested, in words: ``trained, accuracy 98.33 %, stopped and resumed``."""
    accuracy = [f"accuracy {facts['accuracy']:.2f} %"] if "accuracy" in facts else []
    resumed = ["stopped and resumed"] if "seconds_to_stop" in facts else []
    tried = [f"tried {numbers}"] if (numbers := smoke_packages.described(facts.get("beside", {}))) else []
    return ", ".join([facts["level"], *accuracy, *resumed, *tried])


def network_of(name: str, files: HostFiles | None, context: Context) -> bool:
    """Return whether the smoke test has a network: the last option given on this host for this folder decides.

    Args:
        name: of the image, ``files``: the repository whose command is tested; None if it is of no repository.
    """
    given = context.smoke_network
    if files is None:
        if given:
            raise UserError(f"--smoke-network is for the command of a repository, and {name} has none: leave it out")
        return False
    path, folder = context.state / name / "smoke-network", str(files.root.resolve())
    if given is not None:
        state.own(path.parent)
        path.write_text(folder if given else "", encoding="utf-8")
    return not context.offline and path.is_file() and path.read_text(encoding="utf-8") == folder


def smoke(recipe: Recipe, reference: str, context: Context, files: HostFiles | None = None) -> dict[str, Any]:
    """Run the user's command in the image ``reference``, or train in it, and record the facts for its digest.

    Args:
        files: the repository that a user's image is from; None: only the image is known.
    Raises:
        UserError: a run needs data of the repository, which is not known.
        StepFailed: a run failed; the message gives the first reason.
    """
    if files is None and isinstance(recipe.test, Command):
        if recipe.test.data:
            raise UserError(
                f"{recipe.name} is tested with a folder of its repository: run '{recipe.command('dev smoke')}' there"
            )
        network = bool(context.smoke_network) and not context.offline
    else:
        network = network_of(recipe.local_name, files, context)
    digest = context.engine.digest(reference, made_by=recipe.command("dev build"))
    kept, test = recipe.kept(context.state), recipe.test
    with stages.stage("smoke", state.seconds(kept, "smoke")) as stage:
        with smoke_packages.beside(recipe, digest, context) as beside:
            if isinstance(test, Training):
                facts = _train(context.engine, recipe, test, digest)
            else:
                command = recipe.commands[recipe.default]
                facts = smoke_command.check(context.engine, Subject(digest, command, (), test, recipe, files, network))
            packages, notes = beside.result()
        facts |= {**packages, "notes": [*facts["notes"], *notes]}
        stage.done = described(facts)
    state.record(kept, "smoke", digest, facts)
    return {"digest": digest} | facts


def _train(engine: Engine, recipe: Recipe, test: Training, digest: str) -> dict[str, Any]:
    """Test a target of the catalogue; see :class:`trainyard.spec.state.SmokeResult`."""
    started = time.monotonic()
    emulated = engine.emulated_environment(recipe.architecture.name)
    files = _digits() | smoke_containers.files()
    with SmokeSandbox(engine, digest, files, ("out",), environment=emulated) as sandbox:
        training = _Training(recipe, test, sandbox, emulated=bool(emulated))
        training.check_learning()
        training.check_stopping()
        if emulated:
            training.notes.append(
                f"trained under emulation of {recipe.platform}, in one process and without a memory limit"
            )
        else:
            training.check_memory_limit()
        training.check_resuming()
        if not emulated and test.package != "torch_xla":  # one process a host: XLA's CPUs have no collectives
            training.check_processes()
        if not emulated and recipe.compiler:
            training.check_compiling()
    return {
        "passed": True,
        "level": recipe.level,
        "notes": training.notes,
        "seconds": round(time.monotonic() - started, 1),
        **training.facts,
    }


class _Training:
    """Hold the runs of one smoke test, in this order; each raises ``StepFailed`` with the first reason it fails for."""

    def __init__(self, recipe: Recipe, test: Training, sandbox: SmokeSandbox, *, emulated: bool) -> None:
        self.facts: dict[str, Any] = {}
        self.notes: list[str] = []
        self._recipe, self._test, self._sandbox, self._emulated = recipe, test, sandbox, emulated
        longer = EMULATED if emulated else 1
        self._grace, self._timeout = GRACE * longer, RUN_TIMEOUT * longer

    def _command(self, run: str, **more: object) -> list[str]:
        flags = {"datadir": "/smoke/data", "epochs": self._test.epochs, "seed": 1}
        flags |= {"output-dir": f"/smoke/out/{run}", "checkpoint-dir": f"/smoke/out/{run}/checkpoints"}
        flags |= (EMULATED_FLAGS if self._emulated else {}) | more
        return [self._test.trainer, *(f"--{name}={value}" for name, value in flags.items())]

    def _start(self, words: Sequence[str], **options: Any) -> Container:
        return self._sandbox.start(*words, read_only=True, tmpfs={"/tmp": "mode=1777"}, **options)

    def _start_restricted(self, words: Sequence[str], environment: Mapping[str, str] | None = None) -> Container:
        return self._start(words, environment=environment, **smoke_containers.restricted(self._sandbox))

    def check_learning(self) -> None:
        """Check that the launcher finds the TPU node, and the trainer learns."""
        self._straight = straight = _finish(self._start(self._command("straight")), "straight run", self._timeout)
        _refuse(check_straight(straight, self._test.accuracy), straight)
        _refuse(smoke_containers.check_warning(straight.lines, self._recipe.framework.name), straight)
        states = self._sandbox.polled_states()
        if "CREATING" not in states or states[-1] != "READY":
            _refuse([f"the launcher did not wait for the TPU node: the API reported {states or 'nothing'}"], straight)
        self.facts |= {name: straight.summary[name] for name in ("accuracy", "images_per_second")}
        self.facts["tpu_states"] = states

    def check_stopping(self) -> None:
        """Check that SIGTERM in the second epoch ends the run, which saves a checkpoint, in a restricted container."""
        container = self._start_restricted(self._command("stopped"))
        stages.now("stopped run: until its second epoch")
        if not prints(container, "Epoch=2 ", ": accuracy "):  # or the test of the first one
            finished = _finish(container, "stopped run")
            _refuse([f"stopped run: exit status {finished.status} before its second epoch"], finished, RESTRICTED)
        stopping = time.monotonic()
        container.kill("SIGTERM")
        self._stopped = _finish(container, "stopped run", self._grace + 5)
        seconds = time.monotonic() - stopping
        _refuse(check_stopped(self._stopped, seconds, self._grace), self._stopped, RESTRICTED)
        self.facts |= {"seconds_to_stop": round(seconds, 2), "restricted": True}

    def check_memory_limit(self) -> None:
        """Continue the stopped run, which reaches its memory limit while it saves."""
        environment = smoke_containers.fill_memory(self._sandbox, "/smoke/out/stopped/checkpoints")
        container = self._start_restricted(self._command("stopped"), environment)
        stages.now("out-of-memory run: until it saves")
        limited = smoke_containers.limit_memory(self._sandbox, container)
        killed = _finish(container, "out-of-memory run", self._timeout)
        if not limited and not killed.status:
            self.notes.append("whether a checkpoint survives a memory limit is unknown: the trainer renames no file")
            return
        _refuse(check_status("out-of-memory run", killed.status, 137, " at its memory limit"), killed, RESTRICTED)
        self.facts["killed_while_saving"] = True
        if not smoke_containers.out_of_memory(container):
            self.notes.append("the engine did not limit memory: SIGKILL ended the trainer while it saved")

    def check_resuming(self) -> None:
        """Check that the run resumes from the stopped one's checkpoint and ends with the straight one's weights."""
        resumed = _finish(self._start_restricted(self._command("stopped")), "resumed run", self._timeout)
        problems = check_resumed(resumed, self._straight)
        if self.facts.get("killed_while_saving") and not resumed.status:
            saved = self._stopped.summary.get("global_step")
            problems = smoke_containers.check_survived(resumed.summary, saved) + problems
        _refuse(problems, resumed, RESTRICTED)
        self.facts["resumed_from"] = resumed.summary["resumed_from"]

    def check_processes(self) -> None:
        """Run two processes of a training, and two workers of a data loader at the same time."""
        words, environment = smoke_containers.two_processes(self._test.package, self._command("processes", epochs=1))
        pair = self._start_restricted(words, environment)
        workers = self._start_restricted(smoke_containers.worker_processes())
        trained = _finish(pair, "run in two processes", self._timeout)
        _refuse(smoke_containers.check_two_processes(trained.status, trained.summary), trained, RESTRICTED)
        loaded = _finish(workers, what := "two worker processes of a data loader", self._timeout)
        _refuse(check_status(what, loaded.status), loaded, RESTRICTED)
        self.facts |= {"processes": 2, "worker_processes": worker_processes.WORKERS}

    def check_compiling(self) -> None:
        """Compile a training step on the CPU, and kernels for the GPUs that the image has code for."""
        options = {"read_only": True, **smoke_containers.COMPILER_CACHE, **smoke_containers.restricted(self._sandbox)}
        step = self._sandbox.start(*smoke_containers.compiled_step(), **options)
        compiled = _finish(step, what := "compiled training step", self._timeout)
        _refuse(check_status(what, compiled.status), compiled, RESTRICTED)
        self.facts["compile_seconds"] = printed(compiled, what)["compile_seconds"]
        if gpus := self._recipe.accelerator.gpus:
            capabilities = [word.removesuffix("+PTX") for word in gpus.split()]
            kernels = self._sandbox.start(*smoke_containers.gpu_kernels(capabilities), **options)
            compiled = _finish(kernels, what := "kernels for GPUs", self._timeout)
            _refuse(check_status(what, compiled.status), compiled, RESTRICTED)
            self.facts["gpu_kernels"] = printed(compiled, what)
