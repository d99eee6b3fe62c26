"""Show the layers of an image on a terminal: their sizes as bars, and the wheels that are in each."""

from __future__ import annotations

from typing import Any

from rich.table import Column, Table

from trainyard.common.context import Context
from trainyard.oci import layers
from trainyard.spec.units import in_units

#: Characters of the longest bar.
_WIDTH = 20


def rows(context: Context, reference: str) -> list[dict[str, Any]]:
    """Return the layers of a local image, bottom first: ``stage``, ``size`` and ``packed`` in bytes, ``contents``.

    Raises:
        UserError: there is no such image.
        StepFailed: its layers cannot be read.
    """
    stored = layers.read(context.engine, reference, state=context.state)
    return [
        {
            "stage": layers.copied_stage(layer.created_by) or layer.created_by.partition(" ")[0].lower() or "base",
            "size": layer.contents.size,
            "packed": layer.stored,
            "contents": layers.distributions(layer.contents),
        }
        for layer in stored.layers
    ]


def drawn(found: list[dict[str, Any]]) -> Table:
    """Return a table with a bar for each layer, the top one first, as ``docker history`` has them."""
    fixed = [Column(no_wrap=True), Column(justify="right", no_wrap=True), Column(no_wrap=True)]
    table = Table(*fixed, Column(no_wrap=True, ratio=1), box=None, expand=True, show_header=False)
    largest = max((row["size"] for row in found), default=0) or 1
    for row in reversed(found):
        bar = "█" * round(_WIDTH * row["size"] / largest)
        table.add_row(row["stage"], in_units(row["size"]), bar.ljust(_WIDTH), ", ".join(row["contents"]))
    size, packed = (in_units(sum(row[key] for row in found)) for key in ("size", "packed"))
    table.add_row("in all", size, "", f"{packed} compressed")
    return table
