"""No list of requirements is lost in silence: what ``init`` does not read, it names, with what to do."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from tests.workspaces import repository

from trainyard.spec import yaml_source
from trainyard.workspace import requirements

Run = Callable[..., tuple[int, str, str]]

TRAIN = "import tensorflow as tf\nfor step in range(2):\n    print(tf.reduce_sum(tf.ones(2)))\n"
PROJECT = '[project]\nname = "mine"\nversion = "1"\ndependencies = ["tensorflow"]\n'
POETRY = '[tool.poetry]\npackage-mode = false\n[tool.poetry.dependencies]\npython = "^3.10"\neinops = "~0.8.1"\n'


@pytest.mark.parametrize(
    ("files", "said"),
    [
        (
            {"requirements.txt": "", "Pipfile": '[packages]\neinops = "*"\n'},
            "Pipfile: lists einops, which no list that is read has: list what it has in requirements.txt",
        ),
        ({"Pipfile": "", "Pipfile.lock": "{}"}, "Pipfile.lock: lists requirements and is not read: 'pipenv"),
        ({"poetry.lock": ""}, "poetry.lock: lists requirements and is not read: 'poetry export"),
        ({"pdm.lock": ""}, "pdm.lock: lists requirements and is not read: 'pdm export"),
        ({"conda-lock.yml": ""}, "conda-lock.yml: lists requirements and is not read: it is for conda"),
        (
            {"requirements.txt": "", "cog.yaml": "build: {python_packages: [einops==0.8.1]}\n"},
            "cog.yaml: lists einops==0.8.1, which no list that is read has",
        ),
        (
            {"requirements.txt": "", "pylock.toml": ""},
            "pylock.toml: lists requirements and is not read: 'requirements: pylock.toml' of trainyard.yaml takes it",
        ),
        (
            {"requirements.txt": "", "requirements.in": "einops\n"},
            "requirements.in: lists requirements and is not read: 'requirements: requirements.in' of trainyard.yaml",
        ),
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
        (
            {"pyproject.toml": POETRY + '[tool.poetry.group.more.dependencies]\nmako = "1.2.4"\n'},
            "of [dependency-groups], more is not read: 'requirements: {file: pyproject.toml, groups: [more]}' takes it",
        ),
        ({"setup.cfg": "[options]\ninstall_requires = einops\n"}, "setup.cfg: is not read without a setup.py"),
        (
            {"pyproject.toml": PROJECT, "train.py": '# /// script\n# dependencies = ["tqdm"]\n# ///\n' + TRAIN},
            "train.py: its header is not read: 'requirements: train.py' of trainyard.yaml takes it instead",
        ),
        (
            {
                "requirements.txt": "",
                "Dockerfile": "RUN pip install -r a.txt \\\n    'einops==0.8.1' tensorflow && uv pip install tqdm\n",
            },
            "Dockerfile: lists einops==0.8.1, tqdm, which no list that is read has",
        ),
        ({"apt.txt": "# of OpenCV\nlibgl1\n"}, "system: libgl1 (apt.txt lists libgl1)"),
        ({"cog.yaml": "build: {system_packages: [ffmpeg]}\n"}, "system: ffmpeg (cog.yaml lists ffmpeg)"),
        ({"postBuild": "#!/bin/sh\n"}, "postBuild: is not read: nothing of it is run"),
        (
            {"requirements.txt": "", "kaggle-requirements.txt": "einops\n", "requirements-dev.txt": "ruff\n"},
            "kaggle-requirements.txt: lists requirements and is not read: 'requirements: kaggle-requirements.txt' in",
        ),
        (
            {"requirements.txt": "", "conda_env_gpu.yml": "dependencies: [einops]\n"},
            "conda_env_gpu.yml: lists requirements and is not read",
        ),
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
        {
            "requirements.txt": "einops==0.8.1\n",
            "Dockerfile": """RUN uv pip install --prefix "$(python -c 'import sys; print(sys.prefix)')" einops\n""",
        },
        {"pyproject.toml": PROJECT + '[project.optional-dependencies]\ndev = []\n[dependency-groups]\ndocs = []\n'},
        {"pyproject.toml": PROJECT + '[project.optional-dependencies]\ncpu = ["torch"]\ncu130 = ["torch"]\n'},
        {"train.py": "# /// script\n# dependencies = []\n# ///\n" + TRAIN},
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


def test_what_is_missing_is_added_as_another_list_or_extra_has_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, trainyard: Run
) -> None:
    monkeypatch.chdir(tmp_path)
    files = {
        "train.py": "import einops, gym_aloha\n" + TRAIN,
        "requirements.txt": "tensorflow\n",
        "environment.yml": "dependencies:\n- pip:\n  - einops==0.8.1\n  - gym-aloha==0.1.3\n",
    }
    for name, text in files.items():
        (tmp_path / name).write_text(text, encoding="utf-8")
    status, _, err = trainyard("init", "--yes", "--run", "python train.py")
    assert status == 0 and "einops==0.8.1 is added, as environment.yml lists it" in err, err
    written = yaml_source.plain(yaml_source.read(tmp_path / "trainyard.yaml"))["requirements"]
    assert written == {"file": "requirements.txt", "packages": ["einops==0.8.1", "gym-aloha==0.1.3"]}


def test_what_a_uv_lock_has_for_another_package_is_not_added(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, trainyard: Run
) -> None:
    monkeypatch.chdir(tmp_path)
    lock = 'version = 1\n[[package]]\nname = "joblib"\nversion = "1.0"\nsource = {registry = "https://x.test"}\n'
    for name, text in {"train.py": "import joblib\n" + TRAIN, "pyproject.toml": PROJECT, "uv.lock": lock}.items():
        (tmp_path / name).write_text(text, encoding="utf-8")
    status, _, err = trainyard("init", "--yes", "--run", "python train.py")
    assert (
        status == 0 and "joblib" not in err and "requirements: uv.lock\n" in (tmp_path / "trainyard.yaml").read_text()
    )


PYLOCK = """lock-version = "1.0"
created-by = "a test"
requires-python = ">=3.10"
[[packages]]
name = "einops"
version = "0.8.1"
sdist = {name = "einops-0.8.1.tar.gz", url = "https://files.test/einops-0.8.1.tar.gz", hashes = {sha256 = "a"}}
[[packages]]
name = "colorama"
version = "0.4.6"
marker = "sys_platform == 'win32'"
sdist = {name = "colorama-0.4.6.tar.gz", url = "https://files.test/colorama-0.4.6.tar.gz", hashes = {sha256 = "b"}}
[[packages]]
name = "netlib"
vcs = {type = "git", url = "https://git.test/netlib", commit-id = "c0ffee"}
"""
HEADER = '# /// script\n# requires-python = ">=3.10"\n# dependencies = [\n#   "einops==0.8.1",\n# ]\n# ///\n'


@pytest.mark.parametrize(
    ("files", "yaml", "read"),
    [
        ({"train.py": HEADER + TRAIN}, {"requirements": "train.py"}, ["einops==0.8.1 train.py:4"]),
        (
            {"pylock.toml": PYLOCK},
            {"requirements": "pylock.toml"},
            ["einops==0.8.1 pylock.toml:5", "netlib@git+https://git.test/netlib@c0ffee pylock.toml:14"],
        ),
        (
            {"requirements.in": "einops==0.8.1\n"},
            {"requirements": "requirements.in"},
            ["einops==0.8.1 requirements.in:1"],
        ),
        (
            {
                "pyproject.toml": '[dependency-groups]\ntrain = ["einops==0.8.1"]\n',
                "train.py": f"import einops\n{TRAIN}",
            },
            {"requirements": {"file": "pyproject.toml", "groups": ["train"]}},
            ["einops==0.8.1 pyproject.toml:2"],
        ),
        (
            {
                "pyproject.toml": '[project]\nname = "x"\nversion = "1"\n[project.optional-dependencies]\n'
                'train = ["einops==0.8.1"]\n',
                "train.py": f"import einops\n{TRAIN}",
            },
            {"requirements": {"file": "pyproject.toml", "extras": ["train"]}},
            ["einops==0.8.1 pyproject.toml:5"],
        ),
        (
            {"pyproject.toml": POETRY},
            {"requirements": "pyproject.toml"},
            ["einops (>=0.8.1,<0.9.0) pyproject.toml:5"],
        ),
        ({"Pipfile": '[packages]\neinops = "==0.8.1"\nbig = {git = "x"}\n'}, {"requirements": ["einops==0.8.1"]}, []),
        (
            {"Pipfile": '[packages]\na = {version = "1", extras = ["b"], markers = "os_name == \'posix\'"}\n'},
            {"requirements": ["a[b]==1 ; os_name == 'posix'"]},
            [],
        ),
        (
            {
                "pixi.toml": '[dependencies]\npython = "3.11.*"\n[pypi-dependencies]\neinops = "==0.8.1"\n',
                "train.py": f"import numpy\n{TRAIN}",
            },
            {"requirements": ["einops==0.8.1"], "base": "debian-12"},
            [],
        ),
        ({"cog.yaml": "build:\n  python_packages:\n  - einops==0.8.1\n"}, {"requirements": ["einops==0.8.1"]}, []),
        (
            {
                "Dockerfile": "RUN pip install -U \\\n  # a comment\n  einops==0.8.1  # really\n"
                "RUN pip install --upgrade-strategy eager --proxy p tqdm x-1.0-py3-none-any.whl\n"
            },
            {"requirements": ["einops==0.8.1", "tqdm"]},
            [],
        ),
    ],
)  # fmt: skip
def test_a_form_of_requirements_is_read(
    files: dict[str, str],
    yaml: dict[str, object],
    read: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    trainyard: Run,
) -> None:
    monkeypatch.chdir(tmp_path)
    for name, text in {"train.py": TRAIN, **files}.items():
        (tmp_path / name).write_text(text, encoding="utf-8")
    status, _, err = trainyard("init", "--yes", "--target", "tf-cpu", "--run", "python train.py")
    assert status == 0, err
    written = yaml_source.plain(yaml_source.read(tmp_path / "trainyard.yaml"))
    assert {key: written[key] for key in yaml} == yaml
    wanted = requirements.of_image(repository())
    lines = [f"{line.text} {line.where}" for line in wanted.lines if read]
    sources = [f"{one.name}@{one.location} {one.line.where}" for one in wanted.sources]
    assert lines + sources == read


@pytest.mark.parametrize(
    "content",
    [
        "tensorflow\r\neinops==0.8.1\r\n".encode("utf-16"),  # of PowerShell
        b"tensorflow\neinops==0.8.1 --index-url https://mirror.test/whl/cu118\n",
        b"tensorflow\neinops==0.8.1  -i https://mirror.test/simple --trusted-host mirror.test\n",
    ],
)
def test_a_list_that_pip_takes_is_taken(
    content: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, trainyard: Run
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text(TRAIN, encoding="utf-8")
    (tmp_path / "requirements.txt").write_bytes(content)
    assert trainyard("init", "--yes", "--target", "tf-cpu", "--run", "python train.py")[0] == 0
    wanted = requirements.of_image(repository())
    assert [f"{line.text} {line.where}" for line in wanted.lines] == [
        "tensorflow requirements.txt:1", "einops==0.8.1 requirements.txt:2",
    ]  # fmt: skip
    assert not wanted.addresses


def test_condas_explicit_list_is_named_and_stops_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, trainyard: Run
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text(TRAIN, encoding="utf-8")
    (tmp_path / "environment.yml").write_text("# conda list\n@EXPLICIT\nhttps://conda.test/x.conda\n", encoding="utf-8")
    status, _, err = trainyard("init", "--yes", "--target", "tf-cpu", "--run", "python train.py")
    assert status == 0 and "environment.yml: lists requirements and is not read: list what it has" in err, err


@pytest.mark.parametrize(
    ("files", "said"),
    [
        ({"train.py": "# /// script\n# dependencies = [\n# ///\n"}, "train.py: its '# /// script' header is not valid"),
        ({"train.py": f"{HEADER}import os\n{HEADER}"}, "train.py:8: a second '# /// script': a script has one header"),
        ({"train.py": "# /// script\n# dependencies = 1\n# ///\n"}, "train.py:2: script.dependencies: expected a list"),
        ({"pylock.toml": "lock-version = '1.0'\n"}, "pylock.toml: Missing required value in 'created-by'"),
    ],
)  # fmt: skip
def test_a_mistake_in_a_header_or_lock_is_one_line(
    files: dict[str, str], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, trainyard: Run
) -> None:
    monkeypatch.chdir(tmp_path)
    for name, text in {"train.py": TRAIN, **files}.items():
        (tmp_path / name).write_text(text, encoding="utf-8")
    status, _, err = trainyard("init", "--yes", "--target", "tf-cpu", "--run", "python train.py")
    assert status == 2 and f"init: {said}" in err, err


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
