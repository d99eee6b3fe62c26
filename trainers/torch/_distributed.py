"""Save and load checkpoints of which each process writes its part, and which any number of processes loads, with DDP or
FSDP2."""

from __future__ import annotations

import argparse
import json
import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict

from trainers.common import exits, paths
from trainers.common.run import StepFolders, cannot_save, check_same_run, check_usable
from trainers.torch._device import Device


class Checkpoints(StepFolders):
    """Checkpoints of torch.distributed.checkpoint, one folder ``step-<step>`` each, for any number of processes.

    A checkpoint is complete once it has .metadata, which is written last.
    """

    marker = ".metadata"

    def __init__(
        self, args: argparse.Namespace, device: Device, model: nn.Module, optimizers: list[torch.optim.Optimizer],
        run: dict[str, Any],
    ) -> None:  # fmt: skip
        super().__init__(args, run)
        self.device, self.model, self.optimizers = device, model, optimizers

    def _state(self) -> dict[str, Any]:
        model, optimizer = get_state_dict(self.model, self.optimizers, options=StateDictOptions(cpu_offload=True))
        return {"model": model, "optimizer": optimizer}

    def save(self, step: int, log: str) -> str:
        """Write a checkpoint and remove old ones; all processes call it.

        Returns its folder; raises :class:`UserError` if it cannot be written, :class:`Diverged` if a weight is not
        finite.
        """
        if not self.is_finite():
            raise exits.Diverged(f"a weight is not finite by step {step}: lower --lr, or try --precision fp32")
        reason, path = "", self.path(step)
        try:
            if self.device.chief:
                paths.make_folder(path)
                with paths.atomic_file(paths.join(path, "run.json")) as file:
                    file.write(json.dumps({"run": self.run, "log": log, "step": step}).encode())
        except (exits.UserError, OSError) as error:
            reason = getattr(error, "strerror", None) or str(error)
        if not (reason := self.device.broadcast(reason)):
            try:
                with warnings.catch_warnings():
                    warnings.filterwarnings("ignore", "fsync not supported")  # by objects, which need none
                    dcp.save(self._state(), checkpoint_id=path)
            except (dcp.CheckpointException, OSError, RuntimeError) as error:  # the first is no Exception
                reason = (str(error).strip().splitlines() or ["?"])[-1].strip()[:200]
        kept = self.device.broadcast(self.steps() if self.device.chief else None)
        if reason:
            raise cannot_save(path, reason, kept, exits.again(self.args.resume))
        if self.device.chief:
            for old in [other for other in kept if other <= step][: -self.keep]:
                paths.remove(self.path(old))
        return path

    def resume(self, say: Callable[[str], None]) -> dict[str, Any] | None:
        """Load the newest checkpoint that is readable and finite; returns what its run.json says, None without one.

        With ``--no-resume``, earlier checkpoints are moved away. Raises :class:`UserError` if there are checkpoints but
        none can be used, or if they are of another run.
        """
        if not self.folder:
            return None
        if self.device.chief and not self.args.eval_only:
            self.prepare()
        if not self.args.resume:
            return None
        steps = self.device.broadcast(self.steps() if self.device.chief else None)
        for step in reversed(steps):
            about, reason = self.device.broadcast(self.about(step) if self.device.chief else None)
            if not reason:
                check_same_run(about["run"], self.run, self.args, say)
                state = self._state()
                try:
                    dcp.load(state, checkpoint_id=self.path(step))
                    set_state_dict(self.model, self.optimizers, model_state_dict=state["model"],
                                   optim_state_dict=state["optimizer"])  # fmt: skip
                    reason = "" if self.is_finite() else "a weight is not finite"
                except (dcp.CheckpointException, OSError, RuntimeError, ValueError, KeyError) as error:
                    reason = (str(error).strip().splitlines() or [type(error).__name__])[-1].strip()[:200]
                if not reason:
                    return about
            say(f"{self.path(step)} cannot be used ({reason}); trying the one before")
        check_usable(self.folder, steps)
        return None

    def is_finite(self) -> bool:
        """Return whether all weights are finite, in all processes."""
        weights = [getattr(weight.detach(), "to_local", weight.detach)() for weight in self.model.parameters()]
        return not self.device.maximum([not all(bool(weight.isfinite().all()) for weight in weights)])[0]
