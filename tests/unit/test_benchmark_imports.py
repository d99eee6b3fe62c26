"""benchmarks/imports.py: the committed table is what the code writes from the committed figures."""

from __future__ import annotations

import json

from benchmarks import imports


def test_the_committed_table_is_what_the_code_writes() -> None:
    file = imports.RESULTS / "imports.json"
    found = json.loads(file.read_text(encoding="utf-8"))
    assert found, "something was measured"
    text = file.with_suffix(".md").read_text(encoding="utf-8")
    assert text == "\n".join(imports.report(found)) + "\n"
