"""Report the losses of a trainer of language models, its tokens per second, and the part of the peak that it uses."""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import platform
import time
from collections.abc import Iterator
from typing import Any

from trainers.common import exits, paths
from trainers.common.log import Output, reporter

_POINTS = 2000  # of the curve of losses, thinned by half when reached, so that reports and checkpoints stay small


class TokenLog:
    """Log lines, metrics.jsonl, TensorBoard's events, reports to hyperparameter tuning, and the summary, of the chief.

    On a :class:`UserError`, the summary is written before the error is passed on.
    """

    def __init__(
        self, trainer: str, args: argparse.Namespace, device: str, rank: int, world: int, versions: dict[str, str]
    ) -> None:
        self.trainer, self.args, self.device, self.rank, self.world = trainer, args, device, rank, world
        self.versions = {"python": platform.python_version(), **versions}
        if rank == 0 and args.export_dir:
            paths.check_writable(args.export_dir)  # rather than after hours of training
        folder = args.output_dir or args.logdir
        metrics = args.metrics_file or (folder and paths.join(folder, "metrics.jsonl"))
        self.output = Output(rank == 0, metrics, args.logdir)
        self.hypertune = reporter(args.hypertune_tag) if rank == 0 else None
        self.say = self.output.say
        self.tokens_per_step, self.flops_per_token = 0, 0.0  # set once they are known
        self.peak: float | None = None  # operations per second of all devices
        self.losses: list[tuple[int, float]] = []
        self.val_losses: list[tuple[int, float]] = []
        self.step = 0  # steps done
        self.resumed_from: int | None = None
        self.saved: int | None = None  # the step of the newest checkpoint
        self.started = self.mark = time.perf_counter()
        self.seconds, self.trained = 0.0, 0  # of training, and the steps in it
        self._logged = (0.0, 0)  # both, when the last line was logged

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """A context whose time does not count as training: compilation, validation, saving."""
        self.seconds += time.perf_counter() - self.mark
        try:
            yield
        finally:
            self.mark = time.perf_counter()

    def _mfu(self, tokens_per_second: float) -> dict[str, float]:
        """Return the model FLOPs utilization in percent, nothing if the devices' peak is not known."""
        if not self.peak:
            return {}
        return {"mfu": 100 * tokens_per_second * self.flops_per_token / self.peak}

    def pause(self) -> None:
        """Count no more time as training."""
        self.seconds += time.perf_counter() - self.mark
        self.mark = time.perf_counter()

    # --- in the order in which a loop calls them --------------------------------------------------------

    def resume(self, step: int, state: dict[str, Any]) -> None:
        """Continue the log of a run that saved ``state``, the result of :meth:`state`, at ``step``."""
        self.step = self.resumed_from = self.saved = step
        self.losses, self.val_losses = [[*map(tuple, state[name])] for name in ("loss", "val_loss")]
        self.say(f"Resumed from step {step} in {self.args.checkpoint_dir}")

    def state(self) -> dict[str, Any]:
        """Return the losses so far, for a checkpoint."""
        return {"loss": self.losses, "val_loss": self.val_losses}

    def start(self, **what: Any) -> None:
        """Log the beginning of the run, which ``what`` describes; from now on, time counts as training."""
        self.output.event("start", **what, trainer_flags=vars(self.args), processes=self.world,
                          resumed_from=self.resumed_from, versions=self.versions)  # fmt: skip
        self.mark = time.perf_counter()

    def count(self, step: int) -> None:
        """Count a step, after which ``step`` steps are done."""
        self.step, self.trained = step, self.trained + 1

    def check_finite(self, loss: float) -> None:
        """Raise :class:`Diverged` if ``loss``, the same in all processes, is not finite."""
        if not math.isfinite(loss):
            raise exits.Diverged(f"the loss is not finite by step {self.step}: lower --lr, or try --precision fp32")

    def train(self, loss: float, rate: float, norm: float) -> None:
        """Log the ``loss`` of the last step, the same in all processes, its learning rate and norm of gradients."""
        step = self.step
        with self.paused():
            seconds, trained = self.seconds - self._logged[0], self.trained - self._logged[1]
            self._logged = (self.seconds, self.trained)
            speed = trained * self.tokens_per_step / max(seconds, 1e-9)
            self.losses.append((step, loss))
            if len(self.losses) > _POINTS:
                self.losses = self.losses[::2]
            mfu = self._mfu(speed)
            self.say(f"step {step}/{self.args.max_steps}: loss {loss:.4f}, lr {rate:.3g}, norm {norm:.3f},"
                     f" {speed:,.0f} tokens/s" + (f", MFU {mfu['mfu']:.1f} %" if mfu else ""))  # fmt: skip
            self.output.event("train", global_step=step, loss=loss, learning_rate=rate, norm=norm,
                              tokens_per_second=speed, **mfu)  # fmt: skip
            self.output.scalars(step, train_loss=loss, train_tokens_per_second=speed)

    def checkpoint(self, path: str) -> None:
        """Log that the checkpoint ``path`` was written."""
        self.saved = self.step
        self.output.event("checkpoint", global_step=self.step, path=path)

    def validation(self, loss: float, count: int) -> None:
        """Log the validation ``loss`` of ``count`` tokens; raises :class:`Diverged` if it is not finite."""
        step = self.step
        self.check_finite(loss)
        self.val_losses.append((step, loss))
        self.say(f"step {step}: val loss {loss:.4f}, {self.seconds:.1f} s of training")
        self.output.event("test", global_step=step, loss=loss, count=count, train_seconds=self.seconds)
        self.output.scalars(step, val_loss=loss)
        if self.hypertune:
            self.hypertune.report_hyperparameter_tuning_metric(self.args.hypertune_tag, loss, step)

    def exported(self, folder: str, names: list[str]) -> None:
        """Log that the files ``names`` were exported into ``folder``."""
        self.say(f"Exported {', '.join(names)} to {folder}")
        self.output.event("export", folder=folder, names=names)

    def finish(self, status: str, code: int, **more: Any) -> None:
        """Write the summary, as the last line. ``status`` says how the run ended, as in the other trainers."""
        if status in ("stopped", "preempted"):
            where = "nothing is saved without --checkpoint-dir"
            if self.saved is not None:
                where = f"step {self.saved} is saved, run {exits.again(self.args.resume)} to resume"
            self.say(f"Ended after step {self.step} ({status}); {where}")
        speed = self.trained * self.tokens_per_step / max(self.seconds, 1e-9)
        summary = self.output.event(
            "summary", trainer=self.trainer, status=status, exit_code=code,
            val_loss=self.val_losses[-1][1] if self.val_losses else None,
            min_val_loss=min((loss for _, loss in self.val_losses), default=None),
            loss_first=self.losses[0][1] if self.losses else None,
            loss_last=self.losses[-1][1] if self.losses else None,
            tokens_per_second=speed, **self._mfu(speed), train_seconds=self.seconds,
            wall_seconds=time.perf_counter() - self.started, global_step=self.step, resumed_from=self.resumed_from,
            device=f"{self.device}/{self.rank}", processes=self.world, seed=self.args.seed,
            versions=self.versions, **more,
        )  # fmt: skip
        if self.rank == 0 and self.args.output_dir:
            paths.make_folder(self.args.output_dir)
            with paths.atomic_file(paths.join(self.args.output_dir, "report.json")) as file:
                report = {"summary": summary, "loss": self.losses, "val_loss": self.val_losses}
                file.write(json.dumps(report, indent=1).encode() + b"\n")
        self.say(json.dumps(summary))

    def __enter__(self) -> TokenLog:
        return self

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        if isinstance(error, exits.UserError):
            status = "diverged" if isinstance(error, exits.Diverged) else "failed"
            self.finish(status, error.code, error=str(error))
        self.output.close()
