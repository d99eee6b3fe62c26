"""The verdicts of image x GPU x driver are those that follow from published tables."""

from __future__ import annotations

import pytest
from benchmarks import chips

from trainyard.spec import gpus


def test_every_verdict_is_that_of_the_published_tables(capsys: pytest.CaptureFixture[str]) -> None:
    assert chips.main() == 0, capsys.readouterr().out
    rows = list(chips.combinations())
    assert len(rows) >= 650
    assert {row.expected for row in rows} == {"runs", "ptx", "no"}
    assert len({(row.image, row.gpu, row.driver) for row in rows}) == len(rows)


def test_the_tables_have_every_model_that_the_product_knows() -> None:
    models = {name: architecture for architecture, names in chips.MODELS.items() for name in names}
    assert set(models) == set(gpus.gpus())
    assert {name for name, gpu in gpus.gpus().items() if gpu.arm64} == chips.SUPERCHIPS
    assert {name: f"sm_{gpu.capability.replace('.', '')}" for name, gpu in gpus.gpus().items()} == models
