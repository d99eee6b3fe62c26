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
            {"train.py": TRAIN, ".trainyard/train.py.yaml": "extends: tf-cpu\nsmoke: {args: [--epochs=1]}\n"},
            {"smoke": {"args": ["--epochs=1"]}},  # what 'trainyard image' has found stays
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
    cells = [
        "!pip install -q einops==0.8.1; pip install tqdm && echo done\n%matplotlib inline\nimport tensorflow as tf",
        "%%capture\n!pip install rich==13.0 git+https://git.test/x",
        "%%bash\npip install 'colorama>=0.4'\n",
        "%%time\nprint('run: pip install black')",
        "!nvidia-smi\ntf.ones(2)",
    ]
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
    assert found["requirements"] == ["einops==0.8.1", "tqdm", "rich==13.0", "colorama>=0.4", "ipython"]
    assert "installs git+https://git.test/x: list it in requirements.txt" in err
    assert (found["run"], found["code"]) == ("ipython --colors=nocolor -- digits.ipynb.py", ["digits.ipynb"])
    text = (folder / ".trainyard" / "digits.ipynb.py").read_text(encoding="utf-8")
    assert (
        "pass  # pip install -q einops==0.8.1" in text and "pass  # get_ipython().run_line_magic('matplotlib'" in text
    )
    write(folder, {"bad.ipynb": "{"})
    status, _, err = trainyard("check", "bad.ipynb")
    assert status == 1 and "check: bad.ipynb: nbconvert does not convert it: " in err and "Traceback" not in err


def test_files_with_names_of_any_kind_have_locks_and_commands_of_their_names(folder: Path, trainyard: Run) -> None:
    names = ["my train.py", "it's.py", "a.b.py", "a-b.py", "trainyard.py", "-x.py"]
    write(folder, dict.fromkeys(names, TRAIN) | {"d.py/trainyard.yaml": "extends: tf-cpu\n"})
    locks = set()
    for name in names:
        status, _, err = trainyard("check", f"./{name}")
        assert status == 0, err
        locks.add(workspaces.repository(f"./{name}").lock_file.name)
    assert len(locks) == len(names) and "pylock.trainyard.toml" not in locks
    assert trainyard("check", "./d.py")[0] == 0


def test_packages_beside_it_are_whole_and_links_out_are_refused(
    folder: Path, trainyard: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = {"train.py": f"from mine.a import b\n{TRAIN}", "mine/__init__.py": "from .c import d\n"}
    write(folder, files | {"mine/a.py": "b = 1\n", "mine/c.py": "d = 1\n", "sub/x": ""})
    monkeypatch.chdir(folder / "sub")
    assert trainyard("check", "../train.py")[0] == 0
    assert described(folder)["code"] == ["train.py", "mine/__init__.py", "mine/a.py", "mine/c.py"]
    (folder.parent / "out.py").write_text(TRAIN, encoding="utf-8")
    (folder / "link.py").symlink_to(folder.parent / "out.py")
    status, _, err = trainyard("check", "../link.py")
    assert status == 2 and "a symbolic link out of the repository" in err


@pytest.mark.parametrize(
    ("table", "said"),
    [
        ("# [tool.trainyard]\n# extends = 5\n", "train.py:4: tool.trainyard.extends: not a value of a trainyard.yaml"),
        ("# [tool.trainyard]\n# environment = {A = 12:00:00}\n", "train.py:4: tool.trainyard.environment: not a value"),
        ("# [tool]\n# trainyard = 5\n", "train.py:4: tool.trainyard: expected a table"),
    ],
)
def test_a_wrong_value_in_the_header_is_one_line(table: str, said: str, folder: Path, trainyard: Run) -> None:
    write(folder, {"train.py": HEADER.format(table) + TRAIN})
    status, _, err = trainyard("check", "train.py")
    assert status == 2 and f"check: {said}" in err, err
