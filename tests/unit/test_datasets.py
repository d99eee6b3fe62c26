"""`trainyard dataset`: data to train on without a network, the same for the same arguments."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

Command = Callable[..., tuple[int, str, str]]


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize(
    ("arguments", "files"),
    [
        (("digits",), {"train-images-idx3-ubyte", "train-labels-idx1-ubyte", "t10k-images-idx3-ubyte",
                       "t10k-labels-idx1-ubyte"}),
        (("digits", "--gz"), {"train-images-idx3-ubyte.gz", "train-labels-idx1-ubyte.gz", "t10k-images-idx3-ubyte.gz",
                              "t10k-labels-idx1-ubyte.gz"}),
        (("flowers", "--train=2", "--test=1"), {"train/daisy/00000.jpg", "train/dandelion/00001.jpg",
                                                "test/daisy/00000.jpg"}),
        (("flowers", "--form=tar", "--train=2", "--test=1"), {"train-00000.tar", "test-00000.tar"}),
        (("flowers", "--form=tfrecord", "--train=201", "--test=1"), {
            "train-00000-of-00002", "train-00001-of-00002", "test-00000-of-00001"}),
        pytest.param(
            ("text",), {"train/topics.jsonl", "train/library.jsonl", "val/topics.jsonl", "val/library.jsonl"},
            marks=pytest.mark.slow("the test of its contents below"),
        ),
    ],
)  # fmt: skip
def test_a_data_set_is_the_same_every_time(
    trainyard: Command, tmp_path: Path, arguments: tuple[str, ...], files: set[str]
) -> None:
    for name in ("one", "two"):
        assert trainyard("dataset", arguments[0], str(tmp_path / name), *arguments[1:]) == (
            0,
            f"{tmp_path / name}\n",
            "",
        )
    assert contents(tmp_path / "one").keys() == files
    assert contents(tmp_path / "one") == contents(tmp_path / "two")


def test_another_seed_gives_other_data(trainyard: Command, tmp_path: Path) -> None:
    for seed in ("0", "1"):
        assert trainyard("dataset", "digits", str(tmp_path / seed), f"--seed={seed}")[0] == 0
    assert contents(tmp_path / "0") != contents(tmp_path / "1")


def test_text_is_documentation_of_which_a_tenth_validates(trainyard: Command, tmp_path: Path) -> None:
    assert trainyard("dataset", "text", str(tmp_path), "--sources")[0] == 0
    files = contents(tmp_path).items()
    documents = {name: [json.loads(line)["text"] for line in lines.splitlines()] for name, lines in files}
    for name in ("topics", "library", "sources"):
        train, val = documents[f"train/{name}.jsonl"], documents[f"val/{name}.jsonl"]
        assert len(val) == -(-(len(train) + len(val)) // 10), name
        trained = {paragraph for text in train for paragraph in text.split("\n\n")}
        assert not trained & {paragraph for text in val for paragraph in text.split("\n\n")}, name
    assert any('The "with" statement' in text for text in documents["train/topics.jsonl"])
    assert not any("\nimport " in text[:200] for text in documents["train/library.jsonl"]), "no sources"


def test_a_missing_library_is_one_line(trainyard: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "PIL", None)
    status, _, err = trainyard("dataset", "flowers", str(tmp_path / "x"))
    assert status == 2 and err == "dataset: flowers need Pillow: install pillow\n"
