"""The results of the benchmarks of trainers: what the code writes, on a machine that they name."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from benchmarks import own_repository, sections, trainers
from benchmarks.sections import Row

RESULTS = sorted(trainers.RESULTS.glob("trainers-*.json"))
MACHINE = {"cpu": "Some CPU", "cores": "2", "date": "2026-01-01"}


def test_benchmarks_import_nothing_of_the_product() -> None:
    modules = [path for path in (trainers.ROOT / "benchmarks").rglob("*.py") if path.name != "__init__.py"]
    imported = re.compile(r"^\s*(?:from|import) (?:trainyard|trainyard_jobs|launcher|trainers)\b", re.MULTILINE)
    assert len(modules) > 10
    assert not [path.name for path in modules if imported.search(path.read_text(encoding="utf-8"))]


def section(name: str, *rows: Row) -> dict[str, Any]:
    return {"section": name, "rows": [vars(row) for row in rows], "detail": {}, "machine": MACHINE}


@pytest.mark.parametrize("path", RESULTS, ids=lambda path: path.stem)
def test_committed_tables_are_what_the_code_writes(path: Path) -> None:
    found = json.loads(path.read_text(encoding="utf-8"))
    device = path.stem.removeprefix("trainers-")
    assert path.with_suffix(".md").read_text(encoding="utf-8") == trainers.document(found, device)


@pytest.mark.parametrize("path", RESULTS, ids=lambda path: path.stem)
def test_committed_targets_are_those_of_the_sections(path: Path) -> None:
    for found in json.loads(path.read_text(encoding="utf-8")):
        declared = {value for value in vars(sections.load(found["section"])).values() if isinstance(value, float)}
        assert {row["target"] for row in found["rows"]} <= {0.0, 1.0, *declared}, found["section"]


@pytest.mark.parametrize("path", RESULTS, ids=lambda path: path.stem)
def test_committed_results_name_the_machine_and_a_tuned_peer(path: Path) -> None:
    for found in json.loads(path.read_text(encoding="utf-8")):
        assert found["machine"]["cpu"], found["section"]
        assert any(row["against"].startswith("tuned") for row in found["rows"]), found["section"]
        assert len(found["detail"]["grid"]) > 1, found["section"]


def test_saving_a_section_keeps_the_others(tmp_path: Path) -> None:
    trainers.save([section("mnist", Row("a", 1, 2, "s", 2.0, 1.5))], "cpu", tmp_path)
    trainers.save([section("flowers", Row("b", 2, 1, "s", 0.5, 1.5))], "cpu", tmp_path)
    trainers.save([section("mnist", Row("c", 1, 3, "s", 3.0))], "cpu", tmp_path)
    written = json.loads((tmp_path / "trainers-cpu.json").read_text(encoding="utf-8"))
    assert [found["section"] for found in written] == ["flowers", "mnist"]
    table = (tmp_path / "trainers-cpu.md").read_text(encoding="utf-8")
    assert "| flowers | b | 2 s | peer: 1 s | 0.50 | >= 1.5 MISSED |" in table
    assert "| mnist | c | 1 s | peer: 3 s | 3.00 | - |" in table


@pytest.mark.parametrize(("ratio", "target", "verdict"), [(1.5, 1.5, "met"), (1.49, 1.5, "MISSED"), (0.1, 0.0, "")])
def test_a_row_says_whether_its_target_is_met(ratio: float, target: float, verdict: str) -> None:
    assert Row("a", 1, 1, "s", ratio, target).verdict == verdict


def test_the_machine_has_a_name() -> None:
    found = trainers.machine("cpu")
    assert found["cpu"] and int(found["cores"]) >= 1


@pytest.mark.parametrize(("seconds", "met"), [([9.0, 4.0, 5.0], True), ([5.1], False)])
def test_an_edit_may_take_five_seconds_beside_the_smoke_test(seconds: list[float], met: bool) -> None:
    ways = {own_repository.OURS: [{"seconds": 0.5, "requests": 6, "sent": 10, "code": 5}]}
    words, _, fulfilled = own_repository.verdicts({"ways": ways, "beside_smoke": seconds})[-1]
    assert "beside the smoke test" in words and fulfilled is met
