"""No list of requirements is lost in silence: what ``init`` does not read, it names, with what to do."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

Run = Callable[..., tuple[int, str, str]]

TRAIN = "import tensorflow as tf\nfor step in range(2):\n    print(tf.reduce_sum(tf.ones(2)))\n"
PROJECT = '[project]\nname = "mine"\nversion = "1"\ndependencies = ["tensorflow"]\n'


@pytest.mark.parametrize(
    ("files", "said"),
    [
        ({"Pipfile": "[packages]\n"}, "Pipfile: lists requirements and is not read: 'pipenv lock', then"),
        ({"Pipfile": "", "Pipfile.lock": "{}"}, "Pipfile.lock: lists requirements and is not read: 'pipenv"),
        ({"poetry.lock": ""}, "poetry.lock: lists requirements and is not read: 'poetry export"),
        ({"pdm.lock": ""}, "pdm.lock: lists requirements and is not read: 'pdm export"),
        ({"pixi.toml": ""}, "pixi.toml: lists requirements and is not read: 'pixi workspace export"),
        ({"conda-lock.yml": ""}, "conda-lock.yml: lists requirements and is not read: it is for conda"),
        ({"cog.yaml": ""}, "cog.yaml: lists requirements and is not read: list what it has in requirements.txt"),
        ({"pylock.toml": ""}, "pylock.toml: lists requirements and is not read"),
        ({"requirements.in": "einops\n"}, "requirements.in: lists requirements and is not read: 'uv pip compile"),
        ({"requirements.txt": "einops\n", "environment.yaml": "dependencies: [einops]\n"}, "environment.yaml: lists"),
        ({"pyproject.toml": PROJECT, "requirements.txt": "einops==0.8.1\n"}, "requirements.txt: lists requirements"),
        (
            {"pyproject.toml": PROJECT + '[project.optional-dependencies]\ntrain = ["einops"]\ndev = ["ruff"]\n'},
            "of [project.optional-dependencies], train is not read: 'requirements: {file: pyproject.toml, extras:",
        ),
        (
            {"pyproject.toml": PROJECT + '[dependency-groups]\ntrain = ["einops"]\ntests = ["pytest"]\n'},
            "of [dependency-groups], train is not read: 'requirements: {file: pyproject.toml, groups: [train]}'",
        ),
        (
            {"requirements.txt": "", "pyproject.toml": "[dependency-groups]\nfit = []\n"},
            "groups: [fit]}' takes it instead",
        ),
        ({"pyproject.toml": '[tool.poetry]\npackage-mode = false\n'}, "what Poetry requires is not read without"),
        ({"setup.cfg": "[options]\ninstall_requires = einops\n"}, "setup.cfg: is not read without a setup.py"),
        (
            {"train.py": '# /// script\n# dependencies = ["einops==0.8.1", "tqdm"]\n# ///\n' + TRAIN},
            "train.py: its header lists einops==0.8.1, tqdm and is not read",
        ),
        (
            {"Dockerfile": "RUN pip install -r a.txt \\\n    'einops==0.8.1' tensorflow && uv pip install tqdm\n"},
            "Dockerfile: installs einops==0.8.1, tqdm, which no list that is read has",
        ),
        ({"apt.txt": "libgl1\n"}, "apt.txt: is not read: name its packages under 'system'"),
        ({"postBuild": "#!/bin/sh\n"}, "postBuild: is not read: nothing of it is run"),
    ],
)  # fmt: skip
def test_a_list_that_is_not_read_is_named_with_what_to_do(
    files: dict[str, str], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, trainyard: Run
) -> None:
    monkeypatch.chdir(tmp_path)
    for name, text in {"train.py": TRAIN, **files}.items():
        (tmp_path / name).write_text(text, encoding="utf-8")
    status, _, err = trainyard("init", "--yes", "--target", "tf-cpu")
    assert status == 0 and said in err, err


@pytest.mark.parametrize(
    "files",
    [
        {},
        {"requirements.txt": "einops==0.8.1\n", "Dockerfile": "RUN pip install -U pip && uv pip install einops\n"},
        {"pyproject.toml": PROJECT + '[project.optional-dependencies]\ndev = []\n[dependency-groups]\ndocs = []\n'},
        {"pyproject.toml": PROJECT + '[project.optional-dependencies]\ncpu = ["torch"]\ncu130 = ["torch"]\n'},
        {"train.py": "# /// script\n# dependencies = [\n# ///\n" + TRAIN},
    ],
)  # fmt: skip
def test_nothing_is_said_of_what_is_read_or_has_nothing(
    files: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, trainyard: Run
) -> None:
    monkeypatch.chdir(tmp_path)
    for name, text in {"train.py": TRAIN, **files}.items():
        (tmp_path / name).write_text(text, encoding="utf-8")
    status, _, err = trainyard("init", "--yes", "--target", "tf-cpu")
    assert status == 0 and "read" not in err, err


CONDA = "dependencies:\n  - numpy=1.26\n  - pip:\n    - tqdm==4.0\n    - einops==0.7.0\n    - scipy==1.0\n    - a==2\n"


@pytest.mark.parametrize(
    ("files", "said"),
    [
        (
            {"requirements.txt": "numpy==2.1.0\ntqdm>=3\neinops==0.8.1\nscipy==1.0.0\n", "environment.yml": CONDA},
            "requirements.txt is taken; environment.yml pins einops==0.7.0 (requirements.txt: einops==0.8.1), "
            "numpy==1.26.* (requirements.txt: numpy==2.1.0)\n",
        ),
        (
            {"requirements.txt": "numpy==2\ntqdm==1\neinops==1\na==1\n", "environment.yml": CONDA},
            "numpy==1.26.* (requirements.txt: numpy==2) and 1 more\n",
        ),
        (
            {"pyproject.toml": PROJECT.replace('w"]', 'w", "a==1"]'), "requirements.txt": "a==2+cpu\n"},
            "pyproject.toml is taken; requirements.txt pins a==2 (pyproject.toml: a==1)\n",
        ),
        ({"requirements.txt": "numpy==1.26.4+x\nscipy\na==2.0\n", "environment.yml": CONDA}, ""),
        ({"requirements.txt": "a==1\n", "environment.yml": "dependencies: [}\n"}, ""),
    ],
)  # fmt: skip
def test_another_list_that_pins_other_versions_is_named_with_the_one_that_is_taken(
    files: dict[str, str], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, trainyard: Run
) -> None:
    monkeypatch.chdir(tmp_path)
    for name, text in {"train.py": TRAIN, **files}.items():
        (tmp_path / name).write_text(text, encoding="utf-8")
    status, _, err = trainyard("init", "--yes")
    assert status == 0 and said in err
    assert (" is taken; " in err) == bool(said)
