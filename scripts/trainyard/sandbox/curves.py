"""Read losses in the lines that any training prints, and write them as a line, as CSV and for TensorBoard."""

from __future__ import annotations

import csv
import json
import math
import re
import struct
import time
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

_NUMBER = r"[-+]?(?:\d+\.?\d*|\.\d+)(?:e[-+]?\d+)?|nan|inf"
_OF = "train(?:ing)?|val(?:id(?:ation)?)?|eval(?:uation)?|test|total|average|avg|mean|running"

#: `loss 1.23`, `train_loss=1.23`, `val loss: 1.23`, `{"loss": 1.23}`, `'loss': '1.23'`, `loss: tensor(1.23, ...)`.
_LOSS = re.compile(
    rf"(?<![\w.-])((?:(?:{_OF})[ /_-]+)?\w*loss)[\"']?(?:\s*[:=]\s*|\s+)[\"']?(?:tensor\()?({_NUMBER})(?![\w/%]|\.\d)",
    re.IGNORECASE,
)
STEP = re.compile(r"\b(?:global_?)?(?:step|iter(?:ation)?)\b[\"']?\s*[=: ]\s*(\d+)", re.IGNORECASE)

_BARS = "▁▂▃▄▅▆▇█"

#: Columns of a sparkline, and most curves that are shown.
_WIDTH, _SHOWN = 40, 4

#: Files that :meth:`Curves.write` makes; TensorBoard reads those whose name has `tfevents`:
#: https://github.com/tensorflow/tensorboard/blob/master/tensorboard/backend/event_processing/io_wrapper.py
CSV, EVENTS = "curves.csv", "events.out.tfevents.{:010d}.trainyard"


@dataclass
class Curves:
    """Keep the losses of a run.

    Attributes:
        points: name of a loss, such as ``val_loss`` -> (seconds since the start, step, value). Lines that name no step,
            or one that does not follow the last, are counted.
    """

    points: dict[str, list[tuple[float, int, float]]] = field(default_factory=dict)

    def add(self, line: str, seconds: float) -> list[tuple[str, float]]:
        """Read a line that was printed ``seconds`` after the start; the names and values of its losses."""
        step = STEP.search(line)
        found = [(re.sub(r"\W+", "_", name.lower()), float(value)) for name, value in _LOSS.findall(line)]
        for name, value in found:
            curve = self.points.setdefault(name, [])
            following = curve[-1][1] + 1 if curve else 0
            curve.append((seconds, max(following, int(step[1]) if step else 0), value))
        return found

    def lines(self) -> list[str]:
        """Return a line for each loss that has two values or more: a sparkline, its ends and its lowest value."""
        shown = []
        for name, curve in self.points.items():
            values = [value for *_, value in curve]
            if finite := [value for value in values if math.isfinite(value)] if len(values) > 1 else []:
                picked = (
                    [values[at * len(values) // _WIDTH] for at in range(_WIDTH)] if len(values) > _WIDTH else values
                )
                low, span = min(finite), (max(finite) - min(finite)) or 1
                bars = "".join(_BARS[int((one - low) / span * 7)] if math.isfinite(one) else "!" for one in picked)
                shown.append(
                    f"{name} {bars} {values[0]:.4g} to {values[-1]:.4g}, lowest {low:.4g}, {len(values)} values"
                )
        return shown[:_SHOWN]

    def last(self) -> dict[str, float | str]:
        """Return the last value of each loss, as JSON can have it."""
        return {name: curve[-1][2] if math.isfinite(curve[-1][2]) else str(curve[-1][2])
                for name, curve in self.points.items()}  # fmt: skip

    def write(self, folder: Path, begun: float) -> list[str]:
        """Write the losses into ``folder``, and return the names of the files; none without losses.

        Args:
            begun: seconds since 1970 at which the run began.
        """
        if not self.points:
            return []
        with (folder / CSV).open("w", encoding="utf-8", newline="") as file:
            rows = csv.writer(file, lineterminator="\n")
            rows.writerow(("name", "step", "seconds", "value"))
            rows.writerows((name, step, round(at, 3), value)
                           for name, curve in self.points.items() for at, step, value in curve)  # fmt: skip
        events = EVENTS.format(int(begun))
        records = [_event(begun, 0, b"\x1a" + _sized(b"brain.Event:2"))]
        for name, curve in self.points.items():
            tag = b"\x0a" + _sized(name.encode())
            records += [
                _event(begun + at, step, b"\x2a" + _sized(b"\x0a" + _sized(tag + b"\x15" + struct.pack("<f", value))))
                for at, step, value in curve
            ]
        (folder / events).write_bytes(b"".join(map(_record, records)))
        return [CSV, events]


def report(folder: Path, facts: dict[str, object], curves: Curves, begun: float) -> list[str]:
    """Write ``run.json`` with the facts of a run, and its losses, into ``folder``; the names of the files."""
    document = facts | {"begun": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(begun)), "losses": curves.last()}
    (folder / "run.json").write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    return ["run.json", *curves.write(folder, begun)]


# An event file is a list of records, each a message of Protocol Buffers with its length and checksums:
# https://github.com/tensorflow/tensorboard/blob/master/tensorboard/compat/proto/event.proto
# https://github.com/tensorflow/tensorboard/blob/master/tensorboard/summary/writer/record_writer.py


def _varint(number: int) -> bytes:
    return bytes([number & 127 | 128]) + _varint(number >> 7) if number > 127 else bytes([number])


def _sized(text: bytes) -> bytes:
    return _varint(len(text)) + text


def _event(moment: float, step: int, what: bytes) -> bytes:
    return b"\x09" + struct.pack("<d", moment) + b"\x10" + _varint(step) + what


def _record(data: bytes) -> bytes:
    length = struct.pack("<Q", len(data))
    return length + _masked(length) + data + _masked(data)


@cache
def _table() -> tuple[int, ...]:
    """Return the table of CRC-32C: https://www.rfc-editor.org/rfc/rfc3720#appendix-B.4."""
    rows = []
    for row in range(256):
        for _ in range(8):
            row = row >> 1 ^ (0x82F63B78 if row & 1 else 0)
        rows.append(row)
    return tuple(rows)


def _masked(data: bytes) -> bytes:
    crc = 0xFFFFFFFF
    for byte in data:
        crc = _table()[(crc ^ byte) & 255] ^ crc >> 8
    crc ^= 0xFFFFFFFF
    return struct.pack("<I", ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF)
