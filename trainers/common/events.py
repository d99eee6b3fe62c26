"""The output of a run: pytorch/xla's log lines, JSON lines, TensorBoard events, a progress bar on terminals."""

from __future__ import annotations

import json
import math
import sys
import time
from typing import IO, Any

from trainers.common import paths
from trainers.common.exits import UserError


def clock() -> str:
    """The time of day in the format of pytorch/xla's log."""
    return time.strftime("%H:%M:%S")


def train_line(device: str, epoch: int, step: int, loss: float, rate: float, global_rate: float, now: str) -> str:
    """The line that pytorch/xla's log analyzer parses; ``rate`` and ``global_rate`` in images per second.

    https://github.com/pytorch/xla/blob/master/test/utils/train_mp_result_analyzer.py
    """
    return (
        f"| Training Device={device} Epoch={epoch} Step={step} Loss={loss:.5f} "
        f"Rate={rate:.2f} GlobalRate={global_rate:.2f} Time={now}"
    )


def test_line(device: str, step: int, epoch: int, accuracy: float, now: str) -> str:
    """pytorch/xla's log line for a test; ``accuracy`` in percent."""
    return f"| Test Device={device} Step={step} Epoch={epoch} Accuracy={accuracy:.2f} Time={now}"


def _plain(value: Any) -> Any:
    """``value`` for JSON: floats rounded to six decimals; NaN and infinity, which JSON lacks, as strings."""
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    if isinstance(value, float):
        return round(value, 6) if math.isfinite(value) else str(value)
    return value


class Log:
    """Writes events to stdout, ``metrics_file`` (JSON lines) and ``tensorboard_dir``; silent unless ``chief``."""

    def __init__(self, chief: bool, metrics_file: str = "", tensorboard_dir: str = "") -> None:
        self.chief = chief
        self._bar_shown = False
        self._file: IO[str] | None = None
        self._board: Any = None
        self._mirrors: list[paths.Mirror] = []
        if not chief:
            return
        if metrics_file:
            self._file = self._open(metrics_file)
        if tensorboard_dir:
            self._board = _tensorboard(self._mirror(tensorboard_dir).local)

    def _mirror(self, folder: str) -> paths.Mirror:
        self._mirrors.append(paths.Mirror(folder))
        return self._mirrors[-1]

    def _open(self, path: str) -> IO[str]:
        folder, _, name = path.rpartition("/")
        try:
            mirror = self._mirror(folder or ("/" if path.startswith("/") else "."))
            mirror.fetch(name)  # a resumed run appends to the file
            return open(paths.join(mirror.local, name), "a", encoding="utf-8")
        except OSError as error:
            raise UserError(f"--metrics-file {path}: {error.strerror}") from None

    def say(self, line: str) -> None:
        """Print ``line``."""
        if self.chief:
            self._clear_bar()
            print(line, flush=True)

    def event(self, kind: str, **fields: Any) -> dict[str, Any]:
        """Append ``{"event": kind, "time": seconds since the epoch, ...}`` to the metrics file; returns the object."""
        content: dict[str, Any] = _plain({"event": kind, "time": round(time.time(), 3), **fields})
        if self._file:
            self._file.write(json.dumps(content) + "\n")
            self._file.flush()
        for mirror in self._mirrors:
            mirror.keep_up()
        return content

    def scalars(self, step: int, **values: float) -> None:
        """Write ``values`` at ``step`` to TensorBoard: ``train_loss`` under the tag ``train/loss``."""
        if not self._board:
            return
        from tensorboard.compat.proto.event_pb2 import Event  # type: ignore[import-not-found, unused-ignore]
        from tensorboard.compat.proto.summary_pb2 import Summary  # type: ignore[import-not-found, unused-ignore]

        points = [Summary.Value(tag=name.replace("_", "/", 1), simple_value=value) for name, value in values.items()]
        self._board.add_event(Event(step=step, wall_time=time.time(), summary=Summary(value=points)))

    def progress(self, epoch: int, done: int, total: int) -> None:
        """Redraw the progress bar of this epoch if stderr is a terminal."""
        if self.chief and sys.stderr.isatty():
            filled = 30 * done // total
            print(f"\repoch {epoch} [{'#' * filled}{'.' * (30 - filled)}] {done}/{total}", end="", file=sys.stderr)
            self._bar_shown = True

    def _clear_bar(self) -> None:
        if self._bar_shown:
            print("\r\033[K", end="", file=sys.stderr, flush=True)
            self._bar_shown = False

    def close(self) -> None:
        """Flush and close the files."""
        self._clear_bar()
        if self._file:
            self._file.close()
        if self._board:
            self._board.close()
        while self._mirrors:
            self._mirrors.pop().close()


def _tensorboard(folder: str) -> Any:
    try:
        from tensorboard.summary.writer.event_file_writer import (  # type: ignore[import-not-found, unused-ignore]
            EventFileWriter,
        )
    except ImportError:
        raise UserError("--logdir needs the tensorboard package: pip install tensorboard") from None
    try:
        return EventFileWriter(folder)
    except OSError as error:
        raise UserError(f"--logdir {folder}: {error.strerror}") from None
