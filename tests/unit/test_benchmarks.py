"""The results of the benchmarks of trainers: what the code writes, on a machine that they name."""

from __future__ import annotations

import json
import re
import subprocess
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from benchmarks import own_repository, repositories, second_count, sections, trainers
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
    assert "| flowers | b | 2 s | peer: 1 s | - | 0.50 | >= 1.5 MISSED |" in table
    assert "| mnist | c | 1 s | peer: 3 s | - | 3.00 | - |" in table


@pytest.mark.parametrize(
    ("ratio", "target", "spread", "verdict"),
    [
        (1.5, 1.5, 0.0, "met"),
        (1.49, 1.5, 0.0, "MISSED"),
        (0.1, 0.0, 0.5, ""),
        (0.97, 1.0, 0.07, "no verdict"),
        (1.05, 1.0, 0.07, "no verdict"),
        (0.9, 1.0, 0.07, "MISSED"),
        (1.1, 1.0, 0.07, "met"),
    ],
)
def test_a_row_says_whether_its_target_is_met(ratio: float, target: float, spread: float, verdict: str) -> None:
    assert Row("a", 1, 1, "s", ratio, target, spread=spread).verdict == verdict


def test_the_spread_is_that_of_the_extremes() -> None:
    assert sections.relative_range([9.0, 10.0, 12.0]) == pytest.approx(0.3)


def test_the_machine_has_a_name() -> None:
    found = trainers.machine("cpu")
    assert found["cpu"] and int(found["cores"]) >= 1


@pytest.mark.parametrize(("seconds", "met"), [([9.0, 4.0, 5.0], True), ([5.1], False)])
def test_an_edit_may_take_five_seconds_beside_the_smoke_test(seconds: list[float], met: bool) -> None:
    ways = {own_repository.OURS: [{"seconds": 0.5, "requests": 6, "sent": 10, "code": 5}]}
    words, _, fulfilled = own_repository.verdicts({"ways": ways, "beside_smoke": seconds})[-1]
    assert "beside the smoke test" in words and fulfilled is met


PINNED = {
    "requirements.txt": "einops==0.8.1  # a comment\n",
    "requirements/train.in": "einops==0.8.1 --hash=sha256:00\n",
    "pyproject.toml": '[project]\nname = "a"\ndependencies = ["einops==0.8.1"]\n',
    "Pipfile": '[packages]\neinops = "==0.8.1"\n',
    "pixi.toml": '[pypi-dependencies]\neinops = "==0.8.1"\n',
    "environment.yaml": "dependencies: [python=3.11, {pip: [einops==0.8.1]}]\n",
    "cog.yaml": "build: {python_packages: [einops==0.8.1]}\n",
    "setup.py": "from setuptools import setup\nsetup(install_requires=['einops==0.8.1'])\n",
    "setup.cfg": "[options]\ninstall_requires =\n    einops==0.8.1\n",
    "Dockerfile": "FROM python\nRUN apt-get update && \\\n    pip install \\\n    einops==0.8.1 && ls\n",
    "train.py": '# /// script\n# dependencies = ["einops==0.8.1"]\n# ///\n',
}


@pytest.mark.parametrize("name", PINNED)
def test_the_second_count_reads_a_pin_in_each_form_of_list(name: str, tmp_path: Path) -> None:
    path = (tmp_path / name).resolve()
    path.parent.mkdir(exist_ok=True)
    path.write_text(PINNED[name], encoding="utf-8")
    subprocess.run("git init -q . && git add .", shell=True, check=True, cwd=tmp_path)
    pins, texts = second_count.read(tmp_path, "python train.py")
    assert [(one.name, one.versions) for one in pins] == [("einops", "==0.8.1")]
    silent = second_count.lost(pins, {"requirements": ["numpy"]}, texts, "requirements: numpy", {})
    assert len(silent) == 1
    named = f"WARNING: {pins[0].file}: lists requirements and is not read"
    assert not second_count.lost(pins, {"requirements": ["numpy"]}, texts, named, {})


def test_a_taken_pin_is_lost_if_the_lock_has_another_version() -> None:
    pins, config = [second_count.Pin("a.txt", "", "einops", "==0.8.1")], {"requirements": "a.txt"}
    assert not second_count.lost(pins, config, {}, "", {"einops": "0.8.1"})
    assert second_count.lost(pins, config, {}, "", {"einops": "0.8.2"}) == ["a.txt: einops==0.8.1, and 0.8.2 is locked"]


def test_a_wish_of_cuda_is_unsaid_if_a_target_for_cpus_is_chosen_in_silence() -> None:
    texts = {"a.txt": "torch==2.8.0+cu126\n# flash-attn\n"}
    assert second_count.unsaid(texts, "cpu", "") == ["a.txt: +cu126"]
    assert not second_count.unsaid(texts, "gpu", "")
    assert not second_count.unsaid(texts, "cpu", "WARNING: a.txt:1 asks for CUDA 12.6")


def test_a_line_about_an_import_is_false_if_the_package_is_listed_or_the_module_is_there(tmp_path: Path) -> None:
    said = "WARNING: train.py:1 imports dash: add the package that provides it to 'requirements'"
    added = "WARNING: train.py:1 imports dash, for which a.txt lists no package: dash is added"
    assert not second_count.untrue([tmp_path], {"a.txt": {"numpy"}, "b.txt": {"dash"}}, {"dash"}, added)
    assert second_count.untrue([tmp_path], {"a.txt": {"dash"}}, set(), added) == [added.removeprefix("WARNING: ")]
    assert second_count.untrue([tmp_path], {"a.txt": {"dash"}}, set(), said) == [said.removeprefix("WARNING: ")]
    assert not second_count.untrue([tmp_path], {"a.txt": {"numpy"}}, set(), said)
    (tmp_path / "dash").mkdir()
    assert second_count.untrue([tmp_path], {}, set(), said)


def test_a_hundred_repositories_are_listed_by_commit_and_are_those_of_the_page() -> None:
    rows = repositories.chosen()
    assert Counter(row["kind"] for row in rows) == dict.fromkeys(("research", "library", "framework", "lock"), 25)
    assert all(re.fullmatch("[0-9a-f]{40}", row["commit"]) for row in rows)
    page = repositories.PAGE.read_text(encoding="utf-8").partition("## Each repository")[2].partition("\n## ")[0]
    assert [row["repository"] for row in rows] == re.findall(r"^\| \[(\S+)\]", page, re.MULTILINE)
