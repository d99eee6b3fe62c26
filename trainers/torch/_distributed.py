"""The processes of a run with torch.distributed: device, process group, and checkpoints.

Each process saves its part of a checkpoint, and any number of processes loads it, with DDP or FSDP2.
"""

from __future__ import annotations

import argparse
import json
import os
import time
import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict

from trainers.common import exits, paths
from trainers.common.run import check_same_run


def find_device(args: argparse.Namespace) -> torch.device:
    """Return this process's device, and set its threads; raises :class:`UserError` if there is none of the kind."""
    if args.device == "auto" and os.environ.get("PJRT_DEVICE", "").startswith("TPU"):
        raise exits.UserError("--device auto: this trainer has no TPUs: give --device cpu, or see examples/gpt",
                              exits.USAGE)  # fmt: skip
    if args.device == "cuda" and not torch.cuda.is_available():
        raise exits.UserError("--device cuda: not available here; available: cpu", exits.USAGE)
    if args.device == "cpu" or not torch.cuda.is_available():
        local = int(os.environ.get("LOCAL_WORLD_SIZE") or 1)
        if local > 1 and not os.environ.get("OMP_NUM_THREADS"):
            torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // local))
        return torch.device("cpu")
    index = int(os.environ.get("LOCAL_RANK") or 0)
    if index >= torch.cuda.device_count():
        raise exits.UserError(f"LOCAL_RANK={index}, but this machine has {torch.cuda.device_count()} GPUs", exits.USAGE)
    torch.cuda.set_device(index)
    return torch.device("cuda", index)


def join(device: torch.device) -> tuple[int, int]:
    """Join the process group, which checkpoints need even of one process; returns rank and world size."""
    rank, world = int(os.environ.get("RANK") or 0), int(os.environ.get("WORLD_SIZE") or 1)
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"  # gloo for tensors on the CPU
    try:
        if world > 1:
            dist.init_process_group(backend)
        else:
            dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    except (RuntimeError, ValueError) as error:
        reason = str(error).splitlines()[0]
        raise exits.UserError(f"rank {rank} of {world} cannot join the others: {reason}") from None
    return rank, world


def reduced(values: list[float], op: Any = dist.ReduceOp.SUM) -> list[float]:
    """Return ``values``, element-wise summed (or another ``op``) over all processes."""
    numbers = torch.tensor(values, dtype=torch.float64)
    dist.all_reduce(numbers, op)
    return numbers.tolist()  # type: ignore[no-any-return]


def from_chief(value: Any) -> Any:
    """Return the ``value`` that rank 0 passes."""
    box = [value]
    dist.broadcast_object_list(box)
    return box[0]


class Checkpoints:
    """Checkpoints of torch.distributed.checkpoint, one folder ``step-<step>`` each, for any number of processes.

    A checkpoint is complete once it has .metadata, which is written last. ``run.json`` in it describes the run.
    """

    def __init__(
        self, args: argparse.Namespace, model: nn.Module, optimizers: list[torch.optim.Optimizer], run: dict[str, Any]
    ) -> None:
        self.folder, self.keep, self.args, self.run = args.checkpoint_dir, args.keep_checkpoints, args, run
        self.model, self.optimizers = model, optimizers
        self.chief = dist.get_rank() == 0

    def path(self, step: int) -> str:
        """Return the folder of the checkpoint after ``step`` steps."""
        return paths.join(self.folder, f"step-{step:09d}")

    def steps(self, complete: bool = True) -> list[int]:
        """Return the steps of the checkpoints in the folder, ascending; or of those that are not ``complete``."""
        steps = [int(name[5:]) for name in paths.names(self.folder) if name.startswith("step-") and name[5:].isdigit()]
        return sorted(step for step in steps if (".metadata" in paths.names(self.path(step))) == complete)

    def _prepare(self) -> None:
        """Remove incomplete checkpoints; with --no-resume, move the others to a folder old-<UTC>."""
        paths.make_folder(self.folder)
        for step in self.steps(complete=False):
            self._clear(step)
        if steps := [] if self.args.resume else self.steps():
            names, old = paths.names(self.folder), time.strftime("old-%Y%m%dT%H%M%SZ", time.gmtime())
            old = next(name for name in (old, *(f"{old}-{n}" for n in range(2, len(names) + 3))) if name not in names)
            for step in steps:
                self._clear(step, paths.join(self.folder, old, f"step-{step:09d}"))
            print(f"The checkpoints of an earlier run are in {paths.join(self.folder, old)} now", flush=True)

    def _clear(self, step: int, target: str = "") -> None:
        """Remove a checkpoint, or move it to the folder ``target``; .metadata is sorted first."""
        for name in paths.names(self.path(step)):
            file = paths.join(self.path(step), name)
            paths.move(file, paths.join(target, name)) if target else paths.remove(file)
        if not paths.is_remote(self.folder):
            os.rmdir(self.path(step))

    def _state(self) -> dict[str, Any]:
        model, optimizer = get_state_dict(self.model, self.optimizers, options=StateDictOptions(cpu_offload=True))
        return {"model": model, "optimizer": optimizer}

    def save(self, step: int, log: dict[str, Any]) -> str:
        """Write a checkpoint and remove old ones; all processes call it.

        Returns its folder; raises :class:`UserError` if it cannot be written.
        """
        reason, path = "", self.path(step)
        try:
            if self.chief:
                paths.make_folder(path)
                with paths.atomic_file(paths.join(path, "run.json")) as file:
                    file.write(json.dumps({"run": self.run, "log": log, "step": step}).encode())
        except (exits.UserError, OSError) as error:
            reason = getattr(error, "strerror", None) or str(error)
        if not (reason := from_chief(reason)):
            try:
                with warnings.catch_warnings():
                    warnings.filterwarnings("ignore", "fsync not supported")  # by objects, which need none
                    dcp.save(self._state(), checkpoint_id=path)
            except (dcp.CheckpointException, OSError, RuntimeError) as error:  # the first is no Exception
                reason = (str(error).strip().splitlines() or ["?"])[-1].strip()[:200]
        kept = from_chief(self.steps() if self.chief else None)
        if reason:
            rest = f"the checkpoint of step {kept[-1]} is intact" if kept else "there is no earlier checkpoint"
            again = exits.again(self.args.resume)
            raise exits.UserError(f"{path}: cannot be saved ({reason}); {rest}; free disk space and run the same"
                                  f" command {again} to resume")  # fmt: skip
        if self.chief:
            for old in [other for other in kept if other <= step][: -self.keep]:
                self._clear(old)
        return path

    def resume(self, say: Callable[[str], None]) -> dict[str, Any] | None:
        """Load the newest checkpoint that is readable and finite; returns what its run.json says, None without one.

        With ``--no-resume``, earlier checkpoints are moved away. Raises :class:`UserError` if there are checkpoints but
        none can be used, or if they are of another run.
        """
        if not self.folder:
            return None
        if self.chief and not self.args.eval_only:
            self._prepare()
        dist.barrier()
        if not self.args.resume:
            return None
        steps = from_chief(self.steps() if self.chief else None)
        for step in reversed(steps):
            about, reason = from_chief(self._about(step) if self.chief else None)
            if not reason:
                check_same_run(about["run"], self.run, self.args, say)
                state = self._state()
                try:
                    dcp.load(state, checkpoint_id=self.path(step))
                    set_state_dict(self.model, self.optimizers, model_state_dict=state["model"],
                                   optim_state_dict=state["optimizer"])  # fmt: skip
                    reason = "" if is_finite(self.model) else "a weight is not finite"
                except (dcp.CheckpointException, OSError, RuntimeError, ValueError, KeyError) as error:
                    reason = (str(error).strip().splitlines() or [type(error).__name__])[-1].strip()[:200]
                if not reason:
                    return about
            say(f"{self.path(step)} cannot be used ({reason}); trying the one before")
        if steps:
            raise exits.UserError(f"{self.folder}: none of its {len(steps)} checkpoints can be used; use another"
                                  " --checkpoint-dir")  # fmt: skip
        return None

    def _about(self, step: int) -> tuple[dict[str, Any], str]:
        try:
            return json.loads(paths.read_file(paths.join(self.path(step), "run.json"))), ""
        except (OSError, ValueError) as error:
            return {}, f"run.json: {error}"


def is_finite(model: nn.Module) -> bool:
    """Return whether all weights are finite, in all processes."""
    local = [getattr(parameter.detach(), "to_local", parameter.detach)() for parameter in model.parameters()]
    return not reduced([not all(bool(weights.isfinite().all()) for weights in local)], dist.ReduceOp.MAX)[0]
