"""What ``init`` and ``check`` say of an import, by what wheels contain: nothing false, and what is really missing."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import yaml
from tests.workspaces import added, lock, repository

from trainyard.workspace import check

Run = Callable[..., tuple[int, str, str]]

PAIRS: list[tuple[str, str]] = [
    (listed, module)
    for listed, module in yaml.safe_load(Path(__file__).with_name("module_pairs.yaml").read_text(encoding="utf-8"))
]

TRAIN = """\
import torch
{more}

if __name__ == "__main__":
    torch.zeros(1, requires_grad=True).sum().backward()
"""


@pytest.fixture
def said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, trainyard: Run) -> Callable[..., str]:
    """``said("import cv2", "opencv-python\\n")``: requirements and system as written, and what init and check say."""
    folder = tmp_path / "mine"
    folder.mkdir()
    monkeypatch.chdir(folder)

    def say(statement: str, listed: str | None) -> str:
        (folder / "train.py").write_text(TRAIN.format(more=statement), encoding="utf-8")
        if listed is not None:
            (folder / "requirements.txt").write_text(listed, encoding="utf-8")
        status, _, proposed = trainyard("init", "--yes", "--target", "cpu")
        assert status == 0, proposed
        text = (folder / "trainyard.yaml").read_text(encoding="utf-8")
        document = yaml.safe_load(text)
        status, _, checked = trainyard("check")
        assert status == 0, checked
        return f"{document['requirements']} {document.get('system', [])}\n{text}\n{proposed}\n{checked}"

    return say


def test_there_are_many_pairs() -> None:
    assert len(PAIRS) >= 67


@pytest.mark.parametrize(("listed", "module"), PAIRS, ids=lambda text: str(text))
def test_nothing_that_is_listed_is_called_missing(listed: str, module: str, said: Callable[..., str]) -> None:
    words = said(f"import {module}", f"torch\n{listed}\n")
    assert words.startswith("requirements.txt ")
    assert not any(one in words for one in ("lists no package", "add the package", "which neither", "which package"))


@pytest.mark.parametrize(
    "listed",
    [
        "opencv-python @ https://files.test/opencv_python-5.0-py3-none-any.whl",
        "-e git+https://host.test/x/opencv@v1#egg=opencv-python",
        "git+https://host.test/x/opencv@v1#egg=opencv-python",
        "opencv-python[all]>=4",
        "OpenCV_Python",
    ],
)
def test_a_name_is_read_in_every_form(listed: str, said: Callable[..., str]) -> None:
    words = said("import cv2", f"torch\n{listed}\n")
    assert words.startswith("requirements.txt ")
    assert "train.py:2" not in words


@pytest.mark.parametrize("listed", ["", "matplotlib-inline\n", "our-own-tools\n", "pypng\ntensorflow-cpu\n"])
@pytest.mark.parametrize(("module", "package"), [("matplotlib", "matplotlib"), ("cv2", "opencv-python-headless")])
def test_what_is_really_missing_is_added(listed: str, module: str, package: str, said: Callable[..., str]) -> None:
    words = said(f"import {module}", f"torch\n{listed}")
    assert words.startswith(f"{{'file': 'requirements.txt', 'packages': ['{package}']}}")
    assert f"train.py:2 imports {module}, for which requirements.txt lists no package: {package} is added" in words


def test_a_module_that_nobody_is_known_to_have_is_asked_for_only_where_the_contents_of_all_packages_are_known(
    said: Callable[..., str], tmp_path: Path
) -> None:
    words = said("import anything_at_all", "torch\ntqdm\n")
    assert "train.py:2 imports anything_at_all: add the package that provides it to 'requirements'" in words
    (tmp_path / "mine" / "trainyard.yaml").unlink()
    assert "anything_at_all" not in said("import anything_at_all", "torch\ntqdm\nour-own-tools\n")


def test_the_package_of_conda_that_has_a_module_is_taken(said: Callable[..., str], tmp_path: Path) -> None:
    environment = "dependencies: [pytorch, faiss-gpu=1.8, py-opencv]\n"
    (tmp_path / "mine" / "environment.yml").write_text(environment, encoding="utf-8")
    words = said("import faiss, cv2", None)
    assert words.startswith("['faiss-gpu==1.8.*', 'opencv-python-headless'] ")


def test_what_a_lock_pins_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text("import torch, cv2, sklearn\n", encoding="utf-8")
    text = "extends: cpu\nname: mine\nrequirements: [needs-others]\nrun: python train.py\n"
    (tmp_path / "trainyard.yaml").write_text(text, encoding="utf-8")
    lock(repository(), added("needs-others"), added("opencv-contrib-python"), added("scikit-learn"))
    (note,) = check.check(repository()).notes
    assert note.startswith("trainyard.yaml: opencv-contrib-python 5.")
    lock(repository(), added("needs-others"), added("opencv-contrib-python-headless"))
    (note,) = check.check(repository()).notes
    assert note.startswith("train.py:1 imports sklearn, which neither")


# Libraries


@pytest.mark.parametrize(
    ("listed", "system", "why"),
    [
        ("opencv-python", "['libgl1', 'libglib2.0-0t64']", "loads libGL.so.1, libglib-2.0.so.0"),
        ("lightgbm", "['libgomp1']", "loads libgomp.so.1"),
        ("lightgbm\nopencv-python", "['libgl1', 'libglib2.0-0t64', 'libgomp1']", "loads libgomp.so.1"),
        ("opencv-python-headless\nsoundfile\npyqt5", "[]", ""),
    ],
)
def test_the_debian_packages_that_wheels_load_are_proposed(
    listed: str, system: str, why: str, said: Callable[..., str]
) -> None:
    words = said("", f"torch\n{listed}\n")
    assert words.startswith(f"requirements.txt {system}\n")
    assert why in words
    assert "which the image lacks" not in words


@pytest.mark.parametrize(
    ("base", "system", "noted"),
    [
        ("debian-13", [], "[libgl1, libglib2.0-0t64]"),
        ("debian-12", ["libgomp1"], "[libgomp1, libgl1, libglib2.0-0]"),
        ("debian-12", ["libgl1"], "[libgl1, libglib2.0-0]"),
        ("debian-12", ["libgl1", "libglib2.0-0"], ""),
        ("debian-12", ["libgtk-3-0"], "[libgtk-3-0, libgl1]"),
        ("debian-12", ["ffmpeg"], ""),
    ],
)
def test_what_system_lacks_is_noted_with_the_line_to_write(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, base: str, system: list[str], noted: str
) -> None:
    """A package brings others: libgl1 has libxcb1 with it; of ffmpeg it is not known what it brings."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text("import cv2\n", encoding="utf-8")
    text = f"extends: cpu\nbase: {base}\nname: mine\nrequirements: [opencv-python]\nrun: python train.py\n"
    (tmp_path / "trainyard.yaml").write_text(f"{text}system: {system}\n", encoding="utf-8")
    notes = [note for note in check.check(repository()).notes if "opencv-python" in note]
    assert [note.rpartition("write ")[2] for note in notes] == ([f"'system: {noted}'"] if noted else [])
