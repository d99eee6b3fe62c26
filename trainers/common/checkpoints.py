"""A folder of checkpoints, written atomically. The newest are kept; a damaged one is skipped when resuming."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from typing import IO, Any

from trainers.common import paths
from trainers.common.exits import USAGE, UserError

State = dict[str, Any]
BEST = "best.ckpt"


class Checkpoints:
    """Checkpoints ``step-<global step>.ckpt`` in ``folder``.

    ``write(state, file)`` and ``read(file)`` are the framework's. States consist of tensors and primitives only, so
    that loading a checkpoint cannot execute code.
    """

    def __init__(
        self, folder: str, keep: int, write: Callable[[State, IO[bytes]], None], read: Callable[[IO[bytes]], State]
    ) -> None:
        self.folder, self.keep, self.write, self.read = folder, keep, write, read

    def steps(self) -> list[int]:
        """The global steps of the existing checkpoints, ascending."""
        found = (re.fullmatch(r"step-(\d+)\.ckpt", name) for name in paths.names(self.folder))
        return sorted(int(match[1]) for match in found if match)

    def path(self, step: int) -> str:
        """The path of the checkpoint of global step ``step``."""
        return paths.join(self.folder, f"step-{step:09d}.ckpt")

    def prepare(self) -> None:
        """Create the folder and remove partial files of processes that were killed."""
        paths.make_folder(self.folder)
        for name in paths.names(self.folder):
            if re.fullmatch(r"\.(step-\d+|best)\.ckpt\.\d+\.tmp", name):
                paths.remove(paths.join(self.folder, name))

    def save(self, state: State, step: int) -> str:
        """Write ``state``; raises :class:`UserError` if that fails, with all earlier checkpoints unchanged."""
        path = self._write(state, self.path(step))
        for old in self.steps()[: -self.keep]:
            paths.remove(self.path(old))
        return path

    def save_best(self, state: State) -> str:
        """Write ``state`` as ``best.ckpt``, which no later :meth:`save` removes; raises like it."""
        return self._write(state, paths.join(self.folder, BEST))

    def _write(self, state: State, path: str) -> str:
        try:
            with paths.atomic_file(path) as file:
                self.write(state, file)
            return path
        # A full disk is a RuntimeError from torch's writer, an OSError from the file system.
        except (OSError, RuntimeError) as error:
            kept = self.steps()
            rest = f"the checkpoint of step {kept[-1]} is intact" if kept else "there is no earlier checkpoint"
            reason = getattr(error, "strerror", None) or str(error).splitlines()[0]
            raise UserError(
                f"{path}: cannot be saved ({reason}); {rest}; free disk space and run the same command again to resume"
            ) from None

    def newest(self) -> State | None:
        """The newest readable checkpoint, or None if the folder has none.

        Raises :class:`UserError` if there are checkpoints but none can be read: a run that started over would
        eventually delete them.
        """
        steps = self.steps()
        for step in reversed(steps):
            try:
                with paths.open_file(self.path(step)) as file:
                    return self.read(file)
            except Exception as error:  # damaged archives raise zlib.error, RuntimeError, KeyError and more
                reason = (str(error).splitlines() or [type(error).__name__])[0]
                print(f"note: {self.path(step)} is damaged ({reason}); trying the one before", file=sys.stderr)
        if steps:
            raise UserError(f"{self.folder}: none of its {len(steps)} checkpoints can be read; use another"
                            " --checkpoint-dir or --no-resume")  # fmt: skip
        return None

    def best(self) -> State | None:
        """The checkpoint that :meth:`save_best` wrote, or None; raises :class:`UserError` if it cannot be read."""
        path = paths.join(self.folder, BEST)
        if BEST not in paths.names(self.folder):
            return None
        try:
            with paths.open_file(path) as file:
                return self.read(file)
        except Exception as error:  # as in newest()
            reason = (str(error).splitlines() or [type(error).__name__])[0]
            raise UserError(
                f"{path}: is damaged ({reason}); remove it to keep the best of the following epochs"
            ) from None


def check_same_run(saved: dict[str, Any], now: dict[str, Any], folder: str) -> None:
    """Raise :class:`UserError` unless the run ``now`` can continue from a checkpoint of the run ``saved``.

    Both describe a run by what decides its result, such as seed and batch size. Checkpoints of earlier versions lack
    some of it.
    """
    for name, value in now.items():
        if saved.get(name, value) != value:
            raise UserError(
                f"{folder}: its checkpoints have {name} {saved[name]}, this run has {value}: use the same value,"
                " another --checkpoint-dir, or --no-resume",
                USAGE,
            )
