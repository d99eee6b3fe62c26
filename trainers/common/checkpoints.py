"""A folder of checkpoints, written atomically. The newest are kept; a damaged one is skipped when resuming."""

from __future__ import annotations

import argparse
import re
import sys
import time
from collections.abc import Callable
from typing import IO, Any

from trainers.common import flags, paths
from trainers.common.exits import USAGE, UserError, again

State = dict[str, Any]
BEST = "best.ckpt"


class Checkpoints:
    """Checkpoints ``step-<global step>.ckpt`` in ``folder``.

    ``write(state, file)`` and ``read(file)`` are the framework's. States consist of tensors and primitives only, so
    that loading a checkpoint cannot execute code. ``not_finite(state)`` returns the name of a weight with NaN or
    infinity, "" if there is none: every run that resumed from such a checkpoint would fail.
    """

    def __init__(
        self, folder: str, keep: int, write: Callable[[State, IO[bytes]], None], read: Callable[[IO[bytes]], State],
        not_finite: Callable[[State], str],
    ) -> None:  # fmt: skip
        self.folder, self.keep, self.write, self.read, self.not_finite = folder, keep, write, read, not_finite
        self._again = again(True)

    def steps(self) -> list[int]:
        """The global steps of the existing checkpoints, ascending."""
        found = (re.fullmatch(r"step-(\d+)\.ckpt", name) for name in paths.names(self.folder))
        return sorted(int(match[1]) for match in found if match)

    def path(self, step: int) -> str:
        """The path of the checkpoint of global step ``step``."""
        return paths.join(self.folder, f"step-{step:09d}.ckpt")

    def prepare(self, resume: bool) -> None:
        """Create the folder and remove partial files of processes that were killed.

        Unless this run can ``resume``, move the checkpoints there to a new folder ``old-<UTC>`` in it: among them those
        of this run would be the oldest, and later runs would resume the earlier one. Raises :class:`UserError`.
        """
        self._again = again(resume)
        paths.make_folder(self.folder)
        names = paths.names(self.folder)
        for name in names:
            if re.fullmatch(r"\.(step-\d+|best)\.ckpt\.\d+\.tmp", name):
                paths.remove(paths.join(self.folder, name))
        others = [name for name in names if re.fullmatch(r"(step-\d+|best)\.ckpt", name)]
        if others and not (resume and self.steps()):
            began = time.strftime("old-%Y%m%dT%H%M%SZ", time.gmtime())
            unused = (began, *(f"{began}-{number}" for number in range(2, len(names) + 3)))
            place = paths.join(self.folder, next(name for name in unused if name not in names))
            for name in others:
                paths.move(paths.join(self.folder, name), paths.join(place, name))
            print(f"note: the checkpoints of an earlier run are in {place} now", file=sys.stderr)

    def save(self, state: State, step: int) -> str:
        """Write ``state``; raises :class:`UserError` if that fails, with all earlier checkpoints unchanged."""
        path = self._write(state, self.path(step))
        # Later ones cannot be used, or this run would have resumed from them: the newest are those up to this step.
        for old in [kept for kept in self.steps() if kept <= step][: -self.keep]:
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
            raise UserError(f"{path}: cannot be saved ({reason}); {rest}; free disk space and run the same command"
                            f" {self._again} to resume") from None  # fmt: skip

    def newest(self) -> State | None:
        """Return the newest checkpoint that is readable and whose weights are finite, or None if the folder has none.

        Raises :class:`UserError` if there are checkpoints but none can be used: a run that started over would
        eventually replace them.
        """
        steps = self.steps()
        for step in reversed(steps):
            try:
                return self._load(self.path(step))
            except UserError as error:
                print(f"note: {error}; trying the one before", file=sys.stderr)
        if steps:
            raise UserError(f"{self.folder}: none of its {len(steps)} checkpoints can be used; use another"
                            " --checkpoint-dir")  # fmt: skip
        return None

    def best(self) -> State | None:
        """Return the checkpoint of :meth:`save_best`, or None; raise :class:`UserError` if it cannot be used."""
        if BEST not in paths.names(self.folder):
            return None
        try:
            return self._load(paths.join(self.folder, BEST))
        except UserError as error:
            raise UserError(f"{error}; move it away to keep the best of the following epochs") from None

    def _load(self, path: str) -> State:
        try:
            with paths.open_file(path) as file:
                state = self.read(file)
            if lacking := {"run", "log", "step"} - state.keys():
                raise ValueError(f"it has no {min(lacking)}")
            if name := self.not_finite(state):
                raise ValueError(f"its weight {name} is not finite")
            return state
        except Exception as error:  # damaged archives raise zlib.error, RuntimeError, KeyError and more
            reason = (str(error).splitlines() or [type(error).__name__])[0]
            raise UserError(f"{path} cannot be used ({reason})") from None


def check_same_run(
    saved: dict[str, Any], now: dict[str, Any], args: argparse.Namespace, say: Callable[[str], None]
) -> None:
    """Raise :class:`UserError` unless the run ``now`` can continue from a checkpoint of the run ``saved``.

    Both describe a run by what decides its result, such as seed and batch size, the fingerprints of its ``data``, and
    other ``flags``. ``say`` is called with those flags that have changed, and with data that is accepted.
    """
    for name, value in now.items():
        if name not in ("data", "flags") and saved.get(name, value) != value:
            raise UserError(
                f"{args.checkpoint_dir}: its checkpoints have {name} {saved[name]}, this run has {value}: use the same"
                " value, or another --checkpoint-dir", USAGE)  # fmt: skip
    before, had = saved.get("data", {}), saved.get("flags", {})
    differing = ", ".join(what for what, fingerprint in now["data"].items() if before.get(what) != fingerprint)
    other = f"other data (other {differing})" if before else "data that they do not name"
    if differing and not args.accept_other_data:
        raise UserError(
            f"{args.checkpoint_dir}: its checkpoints are of {other}: use the same data, another --checkpoint-dir, or"
            " --accept-other-data to train them further on this data", USAGE)  # fmt: skip
    if had.get("ema") and not now["flags"].get("ema"):
        raise UserError(
            f"{args.checkpoint_dir}: its checkpoints have averaged weights, which are tested and exported: give --ema"
            f" {had['ema']}, too, or another --checkpoint-dir", USAGE)  # fmt: skip
    changed = [f"{flags.words(name, value)}, was {flags.words(name, had[name]).removeprefix(f'--{name} ')}"
               for name, value in now["flags"].items() if had.get(name, value) != value]  # fmt: skip
    if differing or changed:
        say(f"Resuming with {'; '.join([other] * bool(differing) + changed)}")
