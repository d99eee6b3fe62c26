"""report.json and report.png: loss and test accuracy of a run."""

from __future__ import annotations

import io
import json
from collections.abc import Sequence
from typing import Any

from trainers.common import paths

_WIDTH, _HEIGHT, _MARGIN, _TOP = 480, 300, 56, 40
_AXIS, _GRID = (110, 110, 110), (225, 225, 225)
Points = Sequence[tuple[float, float]]


def write(folder: str, summary: dict[str, Any], losses: Points, accuracies: Points) -> None:
    """Write report.json (``summary`` and both curves) and report.png (the curves side by side) into ``folder``.

    ``losses`` are (step, training loss), ``accuracies`` (step, test accuracy in percent).
    """
    paths.make_folder(folder)
    content = {"summary": summary, "loss": list(losses), "accuracy": list(accuracies)}
    with paths.atomic_file(paths.join(folder, "report.json")) as file:
        file.write(json.dumps(content, indent=1).encode() + b"\n")
    with paths.atomic_file(paths.join(folder, "report.png")) as file:
        file.write(_picture(str(summary.get("trainer", "")), losses, accuracies))


def _picture(title: str, losses: Points, accuracies: Points) -> bytes:
    from PIL import Image, ImageDraw

    image = Image.new("RGB", (2 * _WIDTH, _HEIGHT), "white")
    draw = ImageDraw.Draw(image)
    _plot(draw, 0, f"{title}: training loss", losses, (31, 119, 180))
    _plot(draw, _WIDTH, "test accuracy, %", accuracies, (214, 39, 40))
    buffer = io.BytesIO()
    image.save(buffer, "PNG", optimize=True)
    return buffer.getvalue()


def _plot(draw: Any, left: int, title: str, points: Points, colour: tuple[int, int, int]) -> None:
    x0, x1, y0, y1 = left + _MARGIN, left + _WIDTH - 16, _HEIGHT - 36, _TOP
    draw.text((x0, 14), title, fill="black")
    if points:
        least_x, most_x = min(x for x, _ in points), max(x for x, _ in points)
        least_y, most_y = min(y for _, y in points), max(y for _, y in points)
        wide, high = (most_x - least_x) or 1, (most_y - least_y) or 1

        def place(x: float, y: float) -> tuple[float, float]:
            return x0 + (x1 - x0) * (x - least_x) / wide, y0 - (y0 - y1) * (y - least_y) / high

        for part in range(5):
            value = least_y + high * part / 4
            y = place(least_x, value)[1]
            draw.line([(x0, y), (x1, y)], fill=_GRID)
            draw.text((left + 4, y - 6), f"{value:.4g}", fill=_AXIS)
        draw.text((x0, y0 + 8), f"step {least_x:g}", fill=_AXIS)
        draw.text((x1 - 60, y0 + 8), f"{most_x:g}".rjust(9), fill=_AXIS)
        line = [place(x, y) for x, y in points]
        if len(line) > 1:
            draw.line(line, fill=colour, width=2)
        for x, y in line if len(line) < 60 else ():
            draw.ellipse([x - 2, y - 2, x + 2, y + 2], fill=colour)
    draw.line([(x0, y1), (x0, y0), (x1, y0)], fill=_AXIS)
