"""Save and load checkpoints of Orbax: each process writes its part, and any number of devices loads it."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
from collections.abc import Callable
from typing import Any

import jax
import orbax.checkpoint as ocp
from flax import nnx

from trainers.common import exits, paths
from trainers.common.run import StepFolders, cannot_save, check_same_run, check_usable
from trainers.jax._devices import Devices


class Checkpoints(StepFolders):
    """Keep checkpoints of Orbax, one folder ``step-<step>`` each, also in a bucket: TensorStore and gcsfs write there.

    ``state`` in it is Orbax's. Arrays are loaded to where those of the current run are.
    """

    def __init__(
        self, args: argparse.Namespace, device: Devices, run: dict[str, Any], finite: Callable[[Any], jax.Array]
    ) -> None:
        """Keep checkpoints of a ``run``, which it describes; ``finite(state)`` returns whether all weights are."""
        super().__init__(args, run)
        self.device, self.finite = device, finite
        if self.folder and not paths.is_remote(self.folder):
            self.folder = os.path.abspath(self.folder)
        self._orbax = ocp.StandardCheckpointer()

    def _agreed(self, ask: Callable[[], Any]) -> Any:
        """Return what ``ask()``, of values that JSON has, returns in the chief, in all processes."""
        return json.loads(self.device.broadcast(json.dumps(ask() if self.device.chief else None).encode()))

    def save(self, step: int, state: Any, log: str) -> str:
        """Write a checkpoint and remove old ones; all processes call it.

        Returns its folder; raises :class:`UserError` if it cannot be written, :class:`Diverged` if a weight is not
        finite.
        """
        if not self.finite(state):
            raise exits.Diverged(f"a weight is not finite by step {step}: lower --lr, or try --precision fp32")
        path, reason = self.path(step), ""
        try:
            self._orbax.save(paths.join(path, "state"), nnx.to_pure_dict(state), force=True)
            self._orbax.wait_until_finished()
            if self.device.chief:
                with paths.atomic_file(paths.join(path, "run.json")) as file:
                    file.write(json.dumps({"run": self.run, "log": log, "step": step}).encode())
        except Exception as error:  # TensorStore raises ValueError, gcsfs its own
            reason = _reason(error)
        kept = self._agreed(self.steps)
        if self.device.maximum([float(bool(reason))])[0]:
            if self.device.chief:
                with contextlib.suppress(exits.UserError, OSError):  # the reason is worth more
                    paths.remove(path)
            raise cannot_save(path, reason or "another process failed", [one for one in kept if one != step],
                              exits.again(self.args.resume))  # fmt: skip
        if self.device.chief:
            for old in [other for other in kept if other <= step][: -self.keep]:
                paths.remove(self.path(old))
        return path

    def resume(self, state: Any, say: Callable[[str], None]) -> tuple[dict[str, Any] | None, Any]:
        """Return what the newest checkpoint that is readable and finite says about its run, and its state.

        Without a checkpoint, that is None and ``state``. With ``--no-resume``, earlier checkpoints are moved away.
        Raises :class:`UserError` if there are checkpoints but none can be used, or if they are of another run.
        """
        if not self.folder:
            return None, state
        if self.device.chief and not self.args.eval_only:
            self.prepare()
        steps = self._agreed(self.steps) if self.args.resume else []
        for step in reversed(steps):
            about, reason = self._agreed(lambda step=step: self.about(step))
            if not reason:
                check_same_run(about["run"], self.run, self.args, say)
                shapes = jax.tree.map(ocp.utils.to_shape_dtype_struct, nnx.to_pure_dict(state))
                try:
                    loaded = self._orbax.restore(paths.join(self.path(step), "state"), shapes)
                    nnx.replace_by_pure_dict(state, loaded)
                    reason = "" if self.finite(state) else "a weight is not finite"
                except Exception as error:
                    reason = _reason(error)
                if not reason:
                    return about, state
            say(f"{self.path(step)} cannot be used ({reason}); trying the one before")
        check_usable(self.folder, steps)
        return None, state


def _reason(error: Exception) -> str:
    lines = str(getattr(error, "strerror", None) or error).strip().splitlines()
    return (lines or [type(error).__name__])[0][:200]
