"""A trainer's file is what people read: its loop fits on a screen, and few files stand behind it."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest
from trainers.common import job

TRAINERS = Path(job.__file__).parents[1]
FILES = [path for path in TRAINERS.glob("*/[a-z]*.py") if path.parent.name != "common"]
CONVERTED = sorted(str(path.relative_to(TRAINERS)) for path in FILES if "Job(" in path.read_text())


def closure(path: Path) -> set[Path]:
    """Return the file and all files of the project that it imports, but those of packages, which hold a docstring."""
    found, rest = {path}, [path]
    while rest:
        for node in ast.walk(ast.parse(rest.pop().read_text())):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("trainers"):
                place = TRAINERS.parent.joinpath(*str(node.module).split("."))
                named = [place.with_suffix(".py"), *(place / f"{alias.name}.py" for alias in node.names)]
                new = {one for one in named if one.is_file()} - found
                found |= new
                rest += new
    return found


@pytest.mark.parametrize("trainer", [name for name in CONVERTED if not name.startswith("tf/")])
def test_the_loop_shows_where_it_tests_and_saves_in_at_most_25_lines(trainer: str) -> None:
    tree = ast.parse((TRAINERS / trainer).read_text())
    main = next(part for part in tree.body if isinstance(part, ast.FunctionDef) and part.name == "main")
    (loop,) = [node for node in ast.walk(main) if isinstance(node, ast.While)]
    called = {node.func.attr for node in ast.walk(loop) if isinstance(node, ast.Call)
              and isinstance(node.func, ast.Attribute)}  # fmt: skip
    assert {"due", "log", "save", "stop"} <= called
    assert (loop.end_lineno or 0) - loop.lineno < 25


def test_keras_fit_has_one_callback_and_a_loop_for_several_workers_in_at_most_60_lines_each() -> None:
    tree = ast.parse((TRAINERS / "tf/_fit.py").read_text())
    parts = {part.name: (part.end_lineno or 0) - part.lineno + 1 for part in tree.body
             if isinstance(part, (ast.ClassDef, ast.FunctionDef))}  # fmt: skip
    assert parts["Running"] <= 60 and parts["train_workers"] <= 60


def names(path: Path) -> set[str]:
    """Return what a file imports from the project, by name."""
    return {alias.name for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.ImportFrom)
            and (node.module or "").startswith("trainers") for alias in node.names}  # fmt: skip


@pytest.mark.parametrize("trainer", [name for name in CONVERTED if name.startswith("tf/")])
def test_a_keras_trainer_has_at_most_15_names_of_the_project(trainer: str) -> None:
    assert len(names(TRAINERS / trainer)) <= 15, names(TRAINERS / trainer)


def test_few_files_stand_behind_a_trainer() -> None:
    found = {name: len(closure(TRAINERS / name)) for name in CONVERTED}
    assert found["torch/mnist.py"] <= 6, closure(TRAINERS / "torch/mnist.py")
    assert found["tf/mnist.py"] <= 8, closure(TRAINERS / "tf/mnist.py")


def test_what_runs_a_training_knows_no_framework() -> None:
    for name in ("job", "arguments", "files"):
        tree = ast.parse((TRAINERS / f"common/{name}.py").read_text())
        imported = {alias.name.partition(".")[0] for node in ast.walk(tree) if isinstance(node, ast.Import)
                    for alias in node.names}  # fmt: skip
        assert not imported & {"torch", "jax", "tensorflow", "keras", "numpy"}
