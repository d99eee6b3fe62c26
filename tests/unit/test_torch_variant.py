"""Choose the target by the torch that is meant, in every form in which people say it, and name file and line."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from packaging.specifiers import SpecifierSet
from tests import workspaces
from tests.fakes.package_index import PackageIndex, wheel

from trainyard.common.settings import ROOT
from trainyard.image import planning
from trainyard.spec import model
from trainyard.spec.lock import DEFAULT, Lock, Locked
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
    monkeypatch.setattr("trainyard.workspace.init.NVIDIA_DRIVER", tmp_path / "none")
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


def test_libraries_of_cuda_that_a_requirement_brings_into_an_image_for_cpus_are_said() -> None:
    spec = model.load(str(ROOT / "examples" / "keras"), "amd64")
    target, cuda = (model.load(name, "amd64").locked().pins for name in ("tf-cpu", "cpu"))
    of_nvidia = [pin for pin in cuda if pin.name.startswith("nvidia-")][:2]
    plain, with_cuda = (
        spec.with_lock(Lock(spec.python_version, {DEFAULT: {"amd64": Locked(pins)}}))
        for pins in (target, (*target, *of_nvidia))
    )
    assert not planning._for_cuda(plain, DEFAULT)
    (note,) = planning._for_cuda(with_cuda, DEFAULT)
    assert re.search(r"trainyard.yaml: an image for CPUs, with 2 packages of NVIDIA, .+: a requirement is for", note)


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


#: Releases of torch that the forms name, and the torchvision of each (https://github.com/pytorch/vision#installation).
RELEASES = {
    "1.13.1": "0.14.1", "2.0.1": "0.15.2", "2.1.0": "0.16.0", "2.2.2": "0.17.2", "2.3.1": "0.18.1", "2.4.1": "0.19.1",
    "2.5.1": "0.20.1", "2.6.0": "0.21.0", "2.7.1": "0.22.1", "2.8.0": "0.23.0", "2.9.1": "0.24.1", "2.13.0": "0.28.0",
    "2.15.0": "0.29.2",
}  # fmt: skip


@pytest.fixture
def served(resolves: None, root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[PackageIndex]:
    """Serve the frameworks of the targets in the place of every index, PyTorch's own included."""
    with PackageIndex() as index:
        for target in ("cpu", "gpu", "gpu-2.7"):
            locked = model.load(target, "amd64").locked().versions
            index.add(*(wheel(name, version) for name, version in locked.items() if name != "torchvision"))
        for version, vision in RELEASES.items():
            index.add(wheel("torch", version), wheel("torchvision", vision, (f"torch=={version}",)))
        index.add(wheel("torch", "2.13.0+cu130", (), "cp313-cp313-manylinux_2_28_x86_64"))
        monkeypatch.setenv("TRAINYARD_INDEX_PYTORCH_CPU", index.url)
        settings = workspaces.enter(root, monkeypatch)
        settings.write_text(f'[[index]]\nname = "fake"\nurl = "{index.url}"\ndefault = true\n', encoding="utf-8")
        yield index


@pytest.mark.parametrize("form", FORMS, ids=lambda form: form["form"])
def test_the_lock_of_each_form_asks_for_that_torch(
    form: dict[str, Any], root: Path, served: PackageIndex, trainyard: Run
) -> None:
    """In the version without its local part, from the index of the target, and for CPUs without NVIDIA's packages."""
    for path, text in {"train.py": TRAIN, **form["files"]}.items():
        address = re.sub(r"https://[a-z.]+(?=/.*(whl|wheels))", f"http://{served.host}", text)
        (root / path).write_text(address, encoding="utf-8")
    assert trainyard("init", "--yes")[0] == 0
    spec = workspaces.repository()
    wanted = requirements.of_image(spec)
    for line in wanted.lines:
        if line.name not in ("torch", "torchvision"):
            pinned = [one.version for one in line.requirement.specifier if one.operator == "=="]
            served.add(wheel(line.requirement.name, pinned[0] if pinned else "99.0"))
    status, _, err = trainyard("lock")
    if "alone: remove it" in form.get("said", ""):
        assert status == 2 and "alone: remove it" in err
        return
    assert status == 0, err
    spec = workspaces.repository()
    versions = workspaces.versions(spec, "framework") | workspaces.versions(spec)
    allowed = [str(line.requirement.specifier) for line in wanted.lines if line.name == "torch"]
    assert SpecifierSet(re.sub(r"\+[\w.]+", "", ",".join(allowed))).contains(versions["torch"]), versions["torch"]
    assert spec.framework.index == ("pytorch-cpu" if form["target"] == "cpu" else "default")
    if form["target"] == "cpu":
        of_index = workspaces.versions(spec, "framework", index="pytorch-cpu")
        assert "torch" in of_index and not [name for name in of_index if name.startswith("nvidia-")]
