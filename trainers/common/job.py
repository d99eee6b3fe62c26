"""Run a training: all that is not learning. :class:`Job` is the whole of it for those who read a trainer."""

from __future__ import annotations

import argparse
import contextlib
import errno
import json
import math
import os
import platform
import shutil
import signal
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any, ClassVar, NoReturn, Protocol, cast

from trainers.common import files
from trainers.common.files import FAILED, USAGE, UserError

TARGET_MISSED, DIVERGED = 21, 22  # the first as pytorch/xla's test trainers; after a signal, 128 + its number
# Preemption and docker stop; Ctrl-C; a terminal that is closed; Slurm's --signal=USR1@60. SIGQUIT ends at once.
SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1)
Maximum = Callable[[list[float]], list[float]]  # element by element, over all processes


class Diverged(UserError):
    """End a run whose loss or weights stopped being finite numbers."""

    def __init__(self, message: str) -> None:
        super().__init__(message, DIVERGED)


class Peers(Protocol):
    """Describe the processes of a run, which a framework has joined, and their devices; all make the same calls."""

    rank: int
    size: int
    label: str  # of the device
    maximum: Maximum
    gather: Callable[[Any], list[Any]]  # what each process passes, by rank
    broadcast: Callable[[Any], Any]  # what rank 0 passes
    wait: Callable[[], None]  # until the device has done its work
    not_finite: Callable[[Any], str]  # the name of a weight in this process's part of the model, or ""
    digest: Callable[[Any], str]  # SHA-256 of the weights of the model
    profile: Callable[[str], Callable[[], None]]  # begins to trace into a folder, and returns what ends it
    versions: Callable[[], dict[str, str]]


class Lines:
    """Write lines to a stream; drop and count those that it does not take: a full disk, a reader that has gone."""

    lost: ClassVar[list[str]] = []  # why, for each

    def __init__(self, stream: Any) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        """Write and flush ``text``."""
        try:
            self._stream.write(text)
            self._stream.flush()
        except (OSError, ValueError) as error:  # ValueError: it is closed
            Lines.lost.extend([getattr(error, "strerror", None) or str(error)] * text.count("\n"))
        return len(text)

    def flush(self) -> None:
        """Do nothing: each write does."""

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def run(main: Callable[[Any], int], args: Any, name: str, leave: Callable[[int], NoReturn] = os._exit) -> NoReturn:
    """Run ``main(args)`` and end the process with the status that it returns; errors of the user are one line.

    Frameworks are not shut down: their threads can hang or print in the middle of a distributed run.
    """
    sys.stdout, sys.stderr = (stream and cast(Any, Lines(stream)) for stream in (sys.stdout, sys.stderr))
    try:
        end_idle_replica()
        code, reason = main(args), ""
    except UserError as error:
        code, reason = error.code, str(error)
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES):
            raise
        code, reason = FAILED, f"{error.filename or 'writing'}: {error.strerror}"
    except KeyboardInterrupt:
        code, reason = 128 + signal.SIGINT, "interrupted"
    if Lines.lost:
        reason += (
            f"\n{name}: " * bool(reason) + f"{len(Lines.lost)} lines of the log were not written ({Lines.lost[-1]})"
        )
    if reason:
        print(f"{name}: {reason}", file=sys.stderr)
    leave(code)


def end_idle_replica() -> None:
    """Raise :class:`UserError` with status 0 in a parameter server or evaluator, which has no rank to train as.

    The launcher sets LAUNCHER_ROLE; without it, TF_CONFIG says. A platform restarts a job for another status:
    https://cloud.google.com/vertex-ai/docs/training/understanding-training-service
    """
    role: Any = os.environ.get("LAUNCHER_ROLE")
    with contextlib.suppress(ValueError, KeyError, TypeError):
        role = role or json.loads(os.environ["TF_CONFIG"])["task"]["type"]
    if role in ("server", "ps", "evaluator"):
        raise UserError(f"this replica is {'an evaluator' if role == 'evaluator' else 'a parameter server'}, which this"
                        " trainer does not need: it ends with status 0 and the others train; leave it out of the job",
                        0)  # fmt: skip


class Stop:
    """Take a signal as a request to stop after the current step, and know when the next checkpoint is due.

    All processes call :meth:`poll` after each step. About once in ``EVERY`` seconds they agree: they exchange what each
    has received, and the slowest one's time per call decides after how many calls they do so again. The number doubles
    at most, so that a step that takes longer than those before it delays them little.
    """

    EVERY = 1.0  # seconds: GKE's notice is 15 seconds for a Spot VM, in which a checkpoint must be written, too

    def __init__(
        self, maximum: Maximum | None = None, minutes: float = 0.0, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """Count from now: ``minutes`` between checkpoints, 0 for none; ``maximum`` is None for a single process."""
        self.received = self.code = 0  # statuses for signals: what this process got, and what all know of
        self.save_due = False  # whether ``minutes`` have passed, on any process, as of the last agreement
        self._maximum, self._minutes, self._clock = maximum, minutes, clock
        self._saved_at = clock()
        self.restart()

    def install(self) -> None:
        """Catch SIGNALS, but one that is ignored, as SIGHUP below nohup; a second SIGINT interrupts."""
        for number in SIGNALS:
            if signal.getsignal(number) != signal.SIG_IGN:
                signal.signal(number, self._record)

    def _record(self, number: int, frame: object) -> None:
        self.received = self.received or 128 + number
        if number == signal.SIGINT:
            signal.signal(signal.SIGINT, signal.default_int_handler)

    def restart(self) -> None:
        """Agree at the next call: between calls there will be another kind of work, such as a test."""
        self._calls, self._interval, self._since = 0, 1, self._clock()

    def saved(self) -> None:
        """Count ``minutes`` from now."""
        self._saved_at, self.save_due = self._clock(), False

    def poll(self) -> int:
        """Return the exit status for a signal that any process has received, 0 while there is none."""
        now = self._clock()
        due = bool(self._minutes) and now - self._saved_at >= 60 * self._minutes
        self._calls += 1
        if self._maximum is None:
            self.code, self.save_due = self.received, due
        elif self._calls >= self._interval and not self.code:
            code, saves, seconds = self._maximum([self.received, due, (now - self._since) / self._calls])
            self.code, self.save_due = int(code), bool(saves)
            self._interval = max(1, min(2 * self._interval, int(self.EVERY / max(seconds, 1e-9))))
            self._calls, self._since = 0, self._clock()
        return self.code


class Job:
    """Run a training, and continue the one in --checkpoint-dir: signals, log, checkpoints, folders, exit statuses.

    All that a trainer does with it; steps count from 0, and every process makes the same calls::

        with Job("torch.gpt", args, peers, about, model, total=args.max_steps, every=args.eval_steps, ...) as job:
            step = job.resume(load)              # load(folder); 0 without a checkpoint
            if job.due("test", step):            # --eval-only, or a run that was stopped during this test
                job.log(step, **evaluate())
            while not job.stop(step):            # until the last step, a signal, or the target
                loss = train_step(step)
                step += 1
                if job.due("log", step):
                    job.log(step, loss=loss, lr=rate)
                if job.due("test", step):
                    job.log(step, **evaluate())  # numbers with ``metric``; {} if job.stop() meanwhile
                if job.due("save", step):
                    job.save(step, save)         # save(folder) writes this process's part
            return job.finish(step, save, export)  # export(folder) returns names of files; "" on other ranks than 0

    - A checkpoint is a folder ``step-<step>``, complete with run.json, which is written last. If it is damaged (what
      ``load`` raises), not finite or incomplete, the one before is used. ``save`` may return a Future and go on.
    - ``about`` is what a run must have in common with one that it continues; ``about["data"]`` are fingerprints of the
      data. Changes of the options in ``args.learning`` are said.
    - ``metric`` compares tests: the greatest accuracy (in percent), or the least of anything else.
    - Rates are in ``unit``, of which all devices train on ``count`` in a step; at the rate ``full``, MFU is 100 %.
    - Exit statuses: 21, --target-accuracy or --target-loss missed; 22, a number or weight is not finite, and nothing
      more is saved; 128 + the number of a signal, at the same step everywhere. A UserError is one line.
    """

    def __init__(
        self, name: str, args: argparse.Namespace, peers: Peers, about: dict[str, Any], model: Any = None, *,
        total: int, every: int, count: int, unit: str = "images", metric: str = "accuracy", full: float = 0.0,
    ) -> None:  # fmt: skip
        self.name, self.args, self.peers, self.model, self.total, self.every = name, args, peers, model, total, every
        self.count, self.unit, self.metric, self.full, self.more = count, unit, metric, full, cast(dict[str, Any], {})
        self.about = {"trainer": name, "seed": args.seed, "data": {}, **about,
                      "flags": {option: getattr(args, option) for option in args.learning}}  # fmt: skip
        self.last = min(args.num_steps or total, total)
        self.target = getattr(args, "target_accuracy", 0) or getattr(args, "target_loss", 0)
        self.sign = 1 if metric == "accuracy" else -1
        # Hosts of a rehearsed TPU slice train alone: XLA's CPU backend has no collectives between hosts.
        idle = os.environ.get("LAUNCHER_REHEARSE") == "1" and os.environ.get("NODE_RANK") not in (None, "", "0")
        self.chief = peers.rank == 0 and not idle  # whether this process logs and writes
        self._tests: list[dict[str, float]] = []
        self._curve: list[tuple[int, float]] = []
        self._first = self._step = 0  # the step that this process began with, and that it has reached
        self._saved: int | None = None
        self._resumed: int | None = None
        self._pending: tuple[int, str, Any] | None = None  # a save that goes on: its step, run.json and Future
        self._began, self._mark, self._seconds, self._logged = time.monotonic(), 0.0, 0.0, (0, 0.0)
        self._signal = Stop(peers.maximum if peers.size > 1 else None, args.checkpoint_minutes)
        self._leases: list[files.Lease] = []
        self._opened, self._trace = contextlib.ExitStack(), contextlib.ExitStack()
        self._sinks: list[Callable[[dict[str, Any]], Any]] = []

    def __enter__(self) -> Job:
        args, written = self.args, [self.args.output_dir, "" if self.args.eval_only else self.args.checkpoint_dir]
        if self.chief:
            with contextlib.ExitStack() as opened:
                if args.export_dir:
                    files.check_writable(args.export_dir)  # rather than after hours of training
                for path in sorted(
                    {p.rstrip("/") if files.is_remote(p) else os.path.realpath(p) for p in written if p}
                ):
                    self._leases.append(files.Lease(path))
                    opened.callback(self._leases[-1].release)
                self._sinks = list(_sinks(args, self.name, self.metric, opened))
                self._opened = opened.pop_all()
        self._signal.install()
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        self._trace.close()
        if isinstance(error, UserError):
            status = "diverged" if isinstance(error, Diverged) else "failed"
            self.say(json.dumps(self._summary(status, error.code, error=str(error))))
        try:
            self._opened.close()
        except (OSError, UserError) as last:  # of the log
            Lines.lost.append(getattr(last, "strerror", None) or str(last))

    def say(self, line: str) -> None:
        """Print ``line``, on rank 0 only."""
        if self.chief:
            print(line, flush=True)

    def resume(self, load: Callable[[str], Any]) -> int:
        """Load the newest usable checkpoint, or the best with --eval-only and --keep-best; returns its step, or 0.

        Raises :class:`UserError` if none can be used, if they are of another run, or if processes have other data.
        """
        args, self._load = self.args, load
        known = [{**about.pop("data"), **about} for about in self.peers.gather(dict(self.about))]
        for other, about in enumerate(known):
            if differs := [name for name, value in about.items() if known[0].get(name) != value]:
                one, two = ({name: what.get(name) for name in differs} for what in (known[0], about))
                raise UserError(f"the processes see different data: rank 0 has {one}, rank {other} {two};"
                                " --datadir must hold the same for all")  # fmt: skip
        if args.checkpoint_dir and self.chief and not args.eval_only:
            self._prepare()
        found, steps = 0, self.peers.broadcast(self._steps() if args.checkpoint_dir and args.resume else [])
        if args.eval_only and args.keep_best and steps:
            tests = self.peers.broadcast(_attempt(self._read, steps[-1])[0] or {}).get("tests", [])
            steps += [best for best in [self._best(tests)] if best in steps]
        while steps and not found:
            if not (reason := self._take(step := steps.pop())):
                self._first = self._step = found = step
                self._saved = self._resumed = step
                self.say(f"Resumed from step {step} in {args.checkpoint_dir}")
            elif not steps:
                raise UserError(f"{args.checkpoint_dir}: none of its checkpoints can be used (the last: {reason}); use"
                                " another --checkpoint-dir")  # fmt: skip
            else:
                self.say(f"note: {self._path(step)} cannot be used ({reason}); trying the one before")
        if args.eval_only and not found:
            raise UserError(f"--eval-only: {args.checkpoint_dir} has no checkpoint", USAGE)
        self._tests = [test for test in self._tests if not (args.eval_only and test["step"] == found)]
        self._event("start", None, **self.about, total_steps=self.total, options=vars(args), resumed_from=self._resumed,
                    tests=self._tests, device=self.peers.label, processes=self.peers.size)  # fmt: skip
        self._logged = (found, 0.0)
        return found

    def stop(self, step: int | None = None) -> bool:
        """Return whether the run ends after ``step`` steps; without it, whether a signal ends a test."""
        self._signal.poll()
        if step is None:
            return bool(self._signal.code)
        self._step, traced = step, step - self._first - 2  # not the first two steps, which compile and allocate
        if self._signal.code or step >= self.last or self.args.eval_only or self._reached():
            self._pause()
            return True
        if self.args.profile and traced == 0:
            place = self.args.output_dir or self.args.logdir or "."
            folder = self._trace.enter_context(files.local_folder(place))
            self._trace.callback(self.say, f"Trace written to {place}")
            self._trace.callback(self.peers.profile(folder))
        elif traced == self.args.profile:
            self._trace.close()
        self._mark = self._mark or time.monotonic()
        return False

    def due(self, what: str, step: int) -> bool:
        """Return whether to "log", "test" or "save" after ``step`` steps; tests and saves do not count as training."""
        args, regular = self.args, step > 0 and (step % self.every == 0 or step == self.total)
        if what == "log":
            self._settle(wait=False)
            return step % args.log_steps == 0 or step == self._first + 1
        if what == "test":
            due = (regular or args.eval_only) and not any(test["step"] == step for test in self._tests)
        else:
            best = args.keep_best and self._tests and self._best(self._tests) == step
            regular = step % args.checkpoint_steps == 0 if args.checkpoint_steps else regular
            due = bool(regular or best or step == self.last or self._signal.save_due) and bool(args.checkpoint_dir)
        if due:
            self._pause()
            self._signal.restart()
        return due

    def log(self, step: int, **values: Any) -> None:
        """Log numbers, the same in all processes: of a test if ``metric`` is among them, else of training.

        Raises :class:`Diverged` if one of them, or in a test a weight, is not finite.
        """
        self._step, numbers = step, {name: float(value) for name, value in values.items()}
        bad, kind = next((name for name, value in numbers.items() if not math.isfinite(value)), ""), "train"
        if self.metric in numbers:
            kind = "test"
            self._check_weights()
            final = self.args.eval_only or step == self.total
            if bad and not (bad != self.metric and (not final or (self.args.keep_best and self._best(self._tests)))):
                self._diverged(f"the {bad.replace('_', ' ')}")  # early averages of batch norm may not fit the weights
            self._tests.append({"step": step, **numbers})
        elif bad:
            self._diverged(f"the {bad}")
        elif numbers:
            seconds = self._seconds + (time.monotonic() - self._mark if self._mark else 0.0)
            rate = (step - self._logged[0]) * self.count / max(seconds - self._logged[1], 1e-9)
            self._logged = (step, seconds)
            self._curve = [*(self._curve if len(self._curve) < 2000 else self._curve[::2]), (step, numbers["loss"])]
            numbers |= {f"{self.unit}_per_second": rate, **({"mfu": 100 * rate / self.full} if self.full else {})}
        if numbers:
            self.say(self.line(kind, step, numbers) + ", which does not count" * bool(bad))
            self._event(kind, step, **numbers)

    def line(self, kind: str, step: int, numbers: dict[str, float]) -> str:
        """Return the line of the log about a test or about training."""
        words = (f"{value:,.0f} {name.replace('_per_second', '/s')}" if name.endswith("_per_second") else
                 f"{name.replace('_', ' ')} {value:.5g}" for name, value in numbers.items())  # fmt: skip
        return f"step {step}/{self.total}: {', '.join(words)}"

    def save(self, step: int, save: Callable[[str], Any]) -> None:
        """Write a checkpoint with ``save(folder)``; raises :class:`UserError` with the earlier ones unchanged."""
        self._settle()
        if not self.args.checkpoint_dir or self.args.eval_only or self._saved == step:
            return
        self._step = step
        self._pause()
        lost = [reason for lease in self._leases if (reason := _attempt(files.Lease.check, lease)[1])]
        if reason := self.peers.broadcast("".join(lost[:1])):  # another run has taken a folder of this one
            raise UserError(reason)
        self._check_weights()
        about = {"run": self.about, "step": step, "tests": self._tests, "curve": self._curve}
        reason = self.peers.broadcast(_attempt(files.make_folder, self._path(step))[1] if self.chief else "")
        future, reason = (None, reason) if reason else _attempt(save, self._path(step))
        self._pending = (step, json.dumps(about), future)
        self._settle(wait=not hasattr(future, "done"), reason=reason)
        self._signal.saved()

    def finish(self, step: int, save: Callable[[str], Any], export: Callable[[str], list[str]] | None = None) -> int:
        """Save, export unless the run was stopped, and write the summary; returns the exit status."""
        args, code = self.args, self._signal.code
        self._trace.close()
        self.save(step, save)
        self._settle()
        status = "preempted" if code else "reached" if self._reached() else "missed" if self.target else "completed"
        if not code and status != "reached" and step < self.total and not args.eval_only:
            status = "stopped"
        code = TARGET_MISSED if status == "missed" else code
        complete, best = status not in ("preempted", "stopped"), self._best(self._tests)
        if not complete:
            saved = f"step {self._saved} is saved, run {self._again()} to resume"
            self.say(f"Ended after step {step} ({status}); "
                     + (saved if self._saved else "nothing is saved without --checkpoint-dir"))  # fmt: skip
        elif args.keep_best and best and best != step and not args.eval_only:
            known = self._tests, self._curve
            if reason := self._take(best):
                raise UserError(f"{self._path(best)} cannot be used ({reason})")
            self._tests, self._curve = known
            self.say(f"Best checkpoint: step {best}")
        if status != "preempted":  # not in the seconds that a platform leaves
            self.more["weights_sha256"] = self.peers.digest(self.model)
        if complete and args.export_dir and export:
            names = export(args.export_dir if self.chief else "")
            self.say(f"Exported {', '.join(names)} to {args.export_dir}")
            self._event("export", step, folder=args.export_dir, names=names)
        summary = self._summary(status, code)
        if self.chief and args.output_dir:
            tests = [(test["step"], test[self.metric]) for test in self._tests]
            content = {"summary": summary, "loss": self._curve, self.metric: tests}
            _write(files.join(args.output_dir, "report.json"), json.dumps(content, indent=1) + "\n")
        self.say(json.dumps(summary))
        return code

    # --- checkpoints -------------------------------------------------------------------------------------------------

    def _path(self, step: int) -> str:
        folder = self.args.checkpoint_dir
        if not files.is_remote(folder):
            folder = os.path.abspath(folder)  # Orbax takes no other
        return files.join(folder, f"step-{step:09d}")

    def _steps(self, complete: bool = True) -> list[int]:
        """Return the steps of the checkpoints in the folder, ascending; or of those that are not ``complete``."""
        names = (name.removeprefix("step-") for name in files.names(self.args.checkpoint_dir))
        steps = [int(name) for name in names if name.isdigit()]
        return sorted(step for step in steps if ("run.json" in files.names(self._path(step))) == complete)

    def _prepare(self) -> None:
        """Remove incomplete checkpoints; with --no-resume, move the others to a folder old-<UTC>."""
        folder, names = self.args.checkpoint_dir, files.names(self.args.checkpoint_dir)
        for step in self._steps(complete=False):
            files.remove(self._path(step))
        steps, old = [] if self.args.resume else self._steps(), time.strftime("old-%Y%m%dT%H%M%SZ", time.gmtime())
        while old in names:
            old += "-2"
        for step in steps:
            files.move(self._path(step), files.join(folder, old, f"step-{step:09d}"))
        if steps:
            self.say(f"note: the checkpoints of an earlier run are in {files.join(folder, old)} now")

    def _read(self, step: int) -> dict[str, Any]:
        with files.open_file(files.join(self._path(step), "run.json")) as file:
            return {"run": {}, "tests": [], "curve": [], **json.load(file)}

    def _take(self, step: int) -> str:
        """Load a checkpoint; returns why it cannot be used. Raises :class:`UserError` if it is of another run."""
        about, reason = self.peers.broadcast(_attempt(self._read, step) if self.peers.rank == 0 else None)
        if not reason:
            self._check_same(about["run"])
            reason = _attempt(self._load, self._path(step))[1]
            name = "" if reason else self.peers.not_finite(self.model)
            found = self.peers.gather(f"its weight {name} is not finite" if name else reason)
            reason = next(filter(None, found), "")
            self._tests, self._curve = about["tests"], about["curve"]
        return str(reason)

    def _check_same(self, saved: dict[str, Any]) -> None:
        """Raise :class:`UserError` unless this run can continue from a checkpoint of the run ``saved``."""
        place, now = self.args.checkpoint_dir, self.about
        for name in now.keys() - {"data", "flags"}:
            if saved.get(name, now[name]) != now[name]:
                raise UserError(f"{place}: its checkpoints have {name} {saved[name]}, this run has {now[name]}: use the"
                                " same value, or another --checkpoint-dir", USAGE)  # fmt: skip
        before, had = saved.get("data", {}), saved.get("flags", {})
        differing = ", ".join(what for what, digest in now["data"].items() if before.get(what) != digest)
        other = f"other data (other {differing})" if before else "data that they do not name"
        if differing and not self.args.accept_other_data:
            raise UserError(f"{place}: its checkpoints are of {other}: use the same data, another --checkpoint-dir, or"
                            " --accept-other-data to train them further on this data", USAGE)  # fmt: skip
        changed = [f"--{name.replace('_', '-')} {value}, was {had[name]}" for name, value in now["flags"].items()
                   if had.get(name, value) != value]  # fmt: skip
        if differing or changed:
            self.say(f"Resuming with {'; '.join([other] * bool(differing) + changed)}")

    def _settle(self, wait: bool = True, reason: str = "") -> None:
        """Complete the checkpoint that all processes have written, and remove old ones; ``wait`` until that is so."""
        if self._pending is None:
            return
        step, about, future = self._pending
        if not wait and self.peers.maximum([not future.done() if not reason else 0])[0]:
            return
        self._pending = None
        if hasattr(future, "done"):
            reason = reason or _attempt(lambda _: future.result(), 0)[1]
        reason = next(filter(None, self.peers.gather(reason)), "")
        if self.chief and not reason:
            reason = _attempt(lambda path: _write(files.join(path, "run.json"), about), self._path(step))[1]
        reason, kept = self.peers.broadcast((reason, self._steps() if self.chief else []))
        if reason:
            if self.chief:
                files.remove(self._path(step))
            rest = f"the checkpoint of step {kept[-1]} is intact" if kept else "there is no earlier checkpoint"
            raise UserError(f"{self._path(step)}: cannot be saved ({reason}); {rest}; free disk space and run the same"
                            f" command {self._again()} to resume")  # fmt: skip
        self._saved = step
        self._event("checkpoint", step, path=self._path(step))
        best = self._best(self._tests) if self.args.keep_best else None
        # Later ones cannot be used, or this run would have resumed from them.
        old = [other for other in kept if other <= step][: -self.args.keep_checkpoints] if self.chief else []
        for other in (other for other in old if other != best):
            files.remove(files.join(self._path(other), "run.json"))
            files.remove(self._path(other))

    # --- the rest ----------------------------------------------------------------------------------------------------

    def _pause(self) -> None:
        if self._mark:
            self.peers.wait()
            self._seconds, self._mark = self._seconds + time.monotonic() - self._mark, 0.0

    def _again(self) -> str:
        return "again" if self.args.resume else "again without --no-resume"

    def _best(self, tests: list[dict[str, float]]) -> int | None:
        """Return the step of the best test whose numbers are all finite; None without one."""
        sound = [test for test in tests if all(map(math.isfinite, test.values()))]
        return int(max(sound, key=lambda test: self.sign * test[self.metric])["step"]) if sound else None

    def _reached(self) -> bool:
        last = self._tests[-1] if self._tests else {}
        return bool(self.target) and self.sign * last.get(self.metric, math.nan) >= self.sign * self.target

    def _diverged(self, what: str) -> NoReturn:
        more = f"; if that fails after step {self._saved}, move its checkpoint out of {self.args.checkpoint_dir}"
        raise Diverged(f"{what} is not finite by step {self._step}: lower --lr, or try --precision fp32"
                       + more * bool(self._saved))  # fmt: skip

    def _check_weights(self) -> None:
        name = self.peers.not_finite(self.model)
        if self.peers.maximum([bool(name)])[0]:
            self._diverged(f"the weight {name}" if name else "a weight of another process")

    def _event(self, kind: str, step: int | None, **fields: Any) -> dict[str, Any]:
        """Give an event to what takes it: floats with six decimals; NaN and infinity, which JSON lacks, as strings."""
        text = json.dumps({"event": kind, "time": time.time(), "global_step": step, **fields})
        event = cast(
            dict[str, Any], json.loads(text, parse_float=lambda text: round(float(text), 6), parse_constant=str)
        )
        for sink in self._sinks:
            try:
                sink(event)
            except (OSError, ValueError, UserError) as error:
                Lines.lost.append(getattr(error, "strerror", None) or str(error))
        return event

    def _summary(self, status: str, code: int, **more: Any) -> dict[str, Any]:
        last, best = self._tests[-1] if self._tests else {self.metric: None}, self._best(self._tests)
        kept = next((test[self.metric] for test in self._tests if test["step"] == best), None)
        rate = (self._step - self._first) * self.count / max(self._seconds, 1e-9)
        return self._event(
            "summary", self._step, trainer=self.name, status=status, exit_code=code, seed=self.args.seed,
            **{name: value for name, value in last.items() if name != "step"},
            **{f"{'max' if self.sign > 0 else 'min'}_{self.metric}": kept, f"{self.unit}_per_second": rate},
            loss_first=self._curve[0][1] if self._curve else None,
            loss_last=self._curve[-1][1] if self._curve else None,
            train_seconds=self._seconds, wall_seconds=time.monotonic() - self._began, resumed_from=self._resumed,
            device=self.peers.label, processes=self.peers.size, global_batch=self.about.get("global_batch"),
            versions={"python": platform.python_version(), **self.peers.versions()}, **self.more, **more,
        )  # fmt: skip


def _attempt(action: Callable[[Any], Any], value: Any) -> tuple[Any, str]:
    """Return what ``action(value)`` returns, and why it failed, in one line; "" if it did not."""
    try:
        return action(value), ""
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # PyTorch's CheckpointException is no Exception
        with contextlib.suppress(OSError, TypeError):  # PyTorch does not say that a disk is full
            if shutil.disk_usage(os.path.dirname(value)).free < 1 << 16:
                return None, "No space left on device"
        if (full := os.strerror(errno.ENOSPC)) in str(error):  # TensorStore says it among much else
            return None, full
        lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
        return None, getattr(error, "strerror", None) or lines[-1][:200]


def _write(path: str, text: str) -> None:
    with files.atomic_file(path) as file:
        file.write(text.encode())


# --- where events go --------------------------------------------------------------------------------------------------

Sink = Callable[[dict[str, Any]], Any]


def _sinks(args: argparse.Namespace, name: str, metric: str, opened: contextlib.ExitStack) -> Iterator[Sink]:
    """Yield what takes events: metrics.jsonl, TensorBoard, hyperparameter tuning, and the service of --track."""
    folder, env = args.output_dir or args.logdir, os.environ
    place = env.get("CLOUD_ML_HP_METRIC_FILE")
    try:
        if path := args.metrics_file or (folder and files.join(folder, "metrics.jsonl")):
            folder, _, file = path.rpartition("/")
            local, upload = opened.enter_context(files.growing_folder(folder or ("/" if path[0] == "/" else "."), file))
            lines = Lines(opened.enter_context(open(os.path.join(local, file), "a", encoding="utf-8")))  # noqa: SIM115
            yield lambda event: (lines.write(json.dumps(event) + "\n"), upload())
        if args.logdir:
            from tensorboard.summary import Writer  # type: ignore[import-not-found, unused-ignore]

            board, upload_board = opened.enter_context(files.growing_folder(args.logdir))
            writer = Writer(board)
            opened.callback(writer.close)

            def to_board(event: dict[str, Any]) -> None:
                for name, value in _numbers(event).items():
                    writer.add_scalar(f"{event['event']}/{name}", value, event["global_step"])
                writer.flush()
                upload_board()

            yield to_board
        if args.hypertune_tag or env.get("CLOUD_ML_TRIAL_ID") or place:
            import hypertune  # type: ignore[import-not-found, unused-ignore]

            env["CLOUD_ML_HP_METRIC_FILE"] = os.path.abspath(place or "/tmp/hypertune/output.metrics")  # else it fails
            report, unit = hypertune.HyperTune().report_hyperparameter_tuning_metric, 100 if metric == "accuracy" else 1

            def to_tuning(event: dict[str, Any]) -> None:  # earlier tests, too: the service reads a new file
                for test in event.get("tests", [event] * (event["event"] == "test")):
                    if not any(isinstance(value, str) for name, value in test.items() if name != "event"):
                        step = test.get("step", event["global_step"])
                        report(args.hypertune_tag or None, test[metric] / unit, int(step))

            yield to_tuning
        if args.track == "wandb":
            import wandb  # type: ignore[import-not-found, unused-ignore]

            wandb.init(project=name, config=vars(args))
            yield lambda event: wandb.log(_numbers(event), step=event["global_step"])
        elif args.track == "mlflow":
            import mlflow  # type: ignore[import-not-found, unused-ignore]

            mlflow.log_params(vars(args))
            yield lambda event: mlflow.log_metrics(_numbers(event), step=event["global_step"])
    except ImportError as error:
        raise UserError(
            f"{error.name} is not in this image, but an option needs it: pip install {error.name}"
        ) from None
    except OSError as error:
        raise UserError(f"{error.filename}: {error.strerror}") from None


def _numbers(event: dict[str, Any]) -> dict[str, float]:
    """Return the numbers of a test or of training, by their names; nothing of other events."""
    given = event.items() if event["event"] in ("train", "test") else ()
    return {
        name: value for name, value in given if isinstance(value, (int, float)) and name not in ("time", "global_step")
    }
