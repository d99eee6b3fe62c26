"""One Python file or notebook is a project: it needs no trainyard.yaml, and `init` makes one of it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests import workspaces
from tests.workspaces import added

from trainyard.spec import yaml_source

Run = Callable[..., tuple[int, str, str]]

TRAIN = "import argparse\nimport tensorflow as tf\nfor step in range(2):\n    print(tf.reduce_sum(tf.ones(2)))\n"
HEADER = '# /// script\n# dependencies = ["einops==0.8.1"]\n{}# ///\n'


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    root = tmp_path / "work"
    root.mkdir()
    workspaces.enter(root, monkeypatch)
    return root


def described(folder: Path, name: str = "train.py") -> dict[str, Any]:
    """Return what Trainyard wrote about a file."""
    found: dict[str, Any] = yaml_source.plain(yaml_source.read(folder / ".trainyard" / f"{name}.yaml"))
    return found


def write(folder: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(text, encoding="utf-8")


@pytest.mark.parametrize(
    ("files", "keys"),
    [
        ({"train.py": HEADER.format("") + TRAIN}, {"requirements": "train.py", "extends": "tf-cpu", "name": "train"}),
        ({"train.py": f"import einops\n{TRAIN}"}, {"requirements": ["einops"], "run": "python train.py"}),
        ({"train.py": TRAIN, "requirements.txt": "einops\n"}, {"requirements": "requirements.txt"}),
        (
            {"train.py": f"import mine.net, beside\n{TRAIN}", "mine/net.py": "", "beside.py": "", "other.py": ""},
            {"code": ["train.py", "beside.py", "mine/net.py"], "extends": "tf-cpu"},
        ),
        (
            {"train.py": HEADER.format('# [tool.trainyard]\n# extends = "tf-gpu"\n# system = ["libgl1"]\n') + TRAIN},
            {"extends": "tf-gpu", "system": ["libgl1"], "requirements": "train.py"},
        ),
        (
            {"train.py": TRAIN + "argparse.ArgumentParser().add_argument('--epochs', type=int)\n"},
            {"smoke": {"args": ["--epochs=1"]}},
        ),
    ],
)  # fmt: skip
def test_a_script_is_described_by_what_it_says(
    files: dict[str, str], keys: dict[str, Any], folder: Path, trainyard: Run
) -> None:
    write(folder, files)
    status, _, err = trainyard("check", "train.py")
    assert status == 0 and "no mistake in code, command and requirements" in err, err
    found = described(folder)
    found["code"] = [found["code"][0], *sorted(found["code"][1:])]
    assert {key: found.get(key) for key in keys} == keys


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("check", "trian.py"), "check: no file 'trian.py' (did you mean 'train.py'?)"),
        (("image", "none.ipynb"), "image: no file 'none.ipynb'"),
        (
            ("lock", "plain.py"),
            "lock: plain.py: neither requirements nor code that imports a framework was found: choose a target, with",
        ),
        (("check", "broken.py"), "check: .trainyard/broken.py.yaml:9: unknown key 'sistem' (did you mean 'system'?)"),
        (("init", "train.py", "--target", "cpu"), "init: train.py: give a folder, or a .py file without --target"),
    ],
)
def test_a_mistake_is_one_line(words: tuple[str, ...], said: str, folder: Path, trainyard: Run) -> None:
    broken = HEADER.format("# [tool.trainyard]\n# sistem = []\n") + TRAIN
    write(folder, {"train.py": TRAIN, "plain.py": "print(1)\n", "broken.py": broken})
    status, _, err = trainyard(*words)
    assert status == 2 and said in err and "Traceback" not in err, err


def test_its_lock_is_beside_it_and_init_keeps_it(folder: Path, trainyard: Run) -> None:
    write(folder, {"fine_tune.py": HEADER.format("") + TRAIN})
    assert trainyard("check", "fine_tune.py")[0] == 0
    spec = workspaces.repository("fine_tune.py")
    assert spec.lock_file == folder / "pylock.fine_tune.toml" and spec.command("lock") == "trainyard lock fine_tune.py"
    workspaces.lock(spec, added("einops", "0.8.1"))
    before = workspaces.repository("fine_tune.py")
    status, out, err = trainyard("init", "fine_tune.py")
    assert status == 0, err
    names = [Path(line).relative_to(folder).as_posix() for line in out.splitlines()]
    assert names == ["trainyard.yaml", ".trainyard/schema.json", "pylock.trainyard.toml"]
    after = workspaces.repository()
    assert (after.lock, after.workspace.config_hash, after.target) == (
        before.lock, before.workspace.config_hash, "fine-tune",
    )  # fmt: skip
    assert not (folder / "pylock.fine_tune.toml").exists()


def test_a_notebook_is_converted_and_its_cells_install_nothing(folder: Path, trainyard: Run) -> None:
    cells = ["!pip install -q einops==0.8.1\n%matplotlib inline\nimport tensorflow as tf", "!nvidia-smi\ntf.ones(2)"]
    document = {
        "cells": [
            {"cell_type": "code", "id": f"c{number}", "metadata": {}, "outputs": [], "source": text}
            | {"execution_count": None}
            for number, text in enumerate(cells)
        ],
        "metadata": {}, "nbformat": 4, "nbformat_minor": 5,
    }  # fmt: skip
    write(folder, {"digits.ipynb": json.dumps(document)})
    status, _, err = trainyard("check", "digits.ipynb")
    assert status == 0, err
    found = described(folder, "digits.ipynb")
    assert found["requirements"] == ["einops==0.8.1", "ipython"]
    assert (found["run"], found["code"]) == ("ipython --colors=nocolor -- digits.py", ["digits.ipynb"])
    text = (folder / ".trainyard" / "digits.py").read_text(encoding="utf-8")
    assert (
        "pass  # pip install -q einops==0.8.1" in text and "pass  # get_ipython().run_line_magic('matplotlib'" in text
    )
    write(folder, {"bad.ipynb": "{"})
    status, _, err = trainyard("check", "bad.ipynb")
    assert status == 1 and "check: bad.ipynb: nbconvert does not convert it: " in err and "Traceback" not in err
