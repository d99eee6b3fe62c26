"""Choose the target by the torch that is meant, in every form in which people say it, and name file and line."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from tests import workspaces

from trainyard.image import planning
from trainyard.spec import model
from trainyard.workspace import indexes, requirements

Run = Callable[..., tuple[int, str, str]]

PYTORCH = "https://download.pytorch.org/whl"
TRAIN = (
    "import torch\nfor epoch in range(2):\n    loss = torch.zeros(1, requires_grad=True).sum()\n    loss.backward()\n"
)
FORMS = yaml.safe_load(Path(__file__).with_name("torch_forms.yaml").read_text(encoding="utf-8"))


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "mine"
    folder.mkdir()
    monkeypatch.chdir(folder)
    monkeypatch.setattr("trainyard.workspace.init._DRIVER", tmp_path / "none")
    return folder


@pytest.mark.parametrize("form", FORMS, ids=lambda form: form["form"])
def test_each_form_chooses_the_target_and_is_said_with_its_place(
    form: dict[str, Any], root: Path, trainyard: Run
) -> None:
    said = form.get("said", "")
    for path, text in {"train.py": TRAIN, **form["files"]}.items():
        (root / path).write_text(text, encoding="utf-8")
    status, _, err = trainyard("init", "--yes")
    assert status == 0, err
    assert yaml.safe_load((root / "trainyard.yaml").read_text())["extends"] == form["target"], err
    assert said in err, err
    assert said or not re.search("asks for|no target", err), err


def test_a_variant_of_torch_says_nothing_of_another_framework(root: Path, trainyard: Run) -> None:
    """A TensorFlow program on TPUs may have torch for CPUs beside it; and a pipe in the repository is not read."""
    (root / "train.py").write_text(
        "import tensorflow as tf\nstrategy = tf.distribute.TPUStrategy()\n", encoding="utf-8"
    )
    (root / "requirements.txt").write_text("tensorflow\ntorch==2.9.1+cpu\n", encoding="utf-8")
    os.mkfifo(root / "README.md")
    os.mkfifo(root / "Dockerfile")
    status, _, err = trainyard("init", "--yes")
    assert status == 0 and yaml.safe_load((root / "trainyard.yaml").read_text())["extends"] == "tf-tpu", err


def test_what_builds_for_cuda_cost_is_said_of_an_image_for_cpus() -> None:
    note = planning._of_nvidia(model.load("cpu", "amd64"))
    assert re.fullmatch(r", with \d+ packages of NVIDIA, \d\.\d+ GB to download", note)
    assert not planning._of_nvidia(model.load("tf-cpu", "amd64"))


@pytest.mark.parametrize(("target", "asked"), [("gpu", []), ("cpu", []), ("tf-cpu", [f"{PYTORCH}/cu130"])])
def test_pytorchs_index_is_not_asked_for_the_packages_of_an_image_that_has_torch(
    root: Path, target: str, asked: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would hide all other packages; an image with another framework may have torch from there."""
    monkeypatch.setenv("UV_CONFIG_FILE", str(root / "none"))
    (root / "trainyard.yaml").write_text(f"extends: {target}\nrun: python train.py\nrequirements: requirements.txt\n")
    (root / "requirements.txt").write_text(f"--index-url {PYTORCH}/cu130\ntorch\neinops\n", encoding="utf-8")
    spec = workspaces.repository()
    wanted = requirements.of_image(spec)
    assert [line.text for _, line in wanted.addresses] == asked
    assert [one.where for one in wanted.unasked] == ([] if asked else ["requirements.txt:1"])
    assert (PYTORCH in indexes.build_configuration(spec)[0]) == bool(asked)
