"""The results of `python -m benchmarks.data`: what the code writes, section by section."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from benchmarks import data

MACHINE = {"cpu": "Some CPU", "cores": "2", "date": "2026-01-01"}


def found(name: str, what: str, **details: Any) -> dict[str, Any]:
    row = data.Row(what, 3.0, 2.0, "images/s", 1.5, "a peer", ">= 1.5", True)
    section = {"rows": [vars(row)], "details": details, "machine": MACHINE}
    return {"delay_seconds": data.DELAY, "sections": {name: section}}


def test_the_committed_table_is_what_the_code_writes() -> None:
    committed = json.loads((data.RESULTS / "data.json").read_text(encoding="utf-8"))
    assert (data.RESULTS / "data.md").read_text(encoding="utf-8") == data.document(committed)
    assert set(committed["sections"]) <= set(data.SECTIONS)


def test_saving_a_section_keeps_the_others(tmp_path: Path) -> None:
    for one in (found("making", "index"), found("encoded", "old"), found("encoded", "new", best={"peer": "5 MB"})):
        data.save(one, tmp_path)
    written = json.loads((tmp_path / "data.json").read_text(encoding="utf-8"))
    assert list(written["sections"]) == ["encoded", "making"], "in the order of the table"
    table = (tmp_path / "data.md").read_text(encoding="utf-8")
    assert "| new | 3 images/s | a peer: 2 images/s | 1.50 | >= 1.5 met |" in table
    assert "| old |" not in table
    assert "- Measured on cpu Some CPU, cores 2, date 2026-01-01: encoded, making." in table
    assert "- Best of the grids of encoded: peer: 5 MB." in table


def test_a_row_compares_rounds_with_each_other() -> None:
    """Alternating rounds: a machine that becomes slower halfway changes both figures, not their ratio."""
    row = data._row("a", {"ours": [30.0, 15.0, 14.0], "peer": [20.0, 10.0, 10.0]}, "ours", "peer", "b", 1.5)
    assert (row.ratio, row.ours, row.peer, row.met) == (1.5, 15.0, 10.0, True)
    assert not data._row("a", {"ours": [29.0], "peer": [20.0]}, "ours", "peer", "b", 1.5).met
