"""Versions of a target: ``gpu-2.7`` has another lock than ``gpu``, and the same of everything else."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from tests import plans

from trainyard.common.context import Context
from trainyard.common.errors import UserError
from trainyard.spec import model

Result = tuple[int, str, str]


def test_a_version_has_other_packages_and_everything_else_of_its_target() -> None:
    target, version = model.load("gpu", "amd64"), model.load("gpu-2.7", "amd64")
    assert version.packages == ["torch==2.7.1", "torchvision==0.22.1"]
    assert version.locked().versions["torch"] == "2.7.1"
    assert version.lock_file == target.folder / "2.7" / "pylock.toml"
    assert version.dockerfile() == target.folder / "2.7" / "Dockerfile"
    same = ("accelerator", "trainers", "requirements", "smoke", "budget", "system", "environment")
    assert all(getattr(version, name) == getattr(target, name) for name in same)


def test_its_name_is_a_tag_and_the_only_one(tmp_path: Path) -> None:
    version = model.load("gpu-2.7", "amd64", context=Context(state=tmp_path))
    assert (version.target, version.local_name, version.command("lock")) == (
        "gpu-2.7",
        "gpu-2.7",
        "trainyard lock gpu-2.7",
    )
    with pytest.raises(UserError, match=r"unknown target 'gpu@2.7' \(did you mean 'gpu-2.7'\?\)"):
        model.load("gpu@2.7")
    assert "gpu-2.7" in model.targets() and "gpu-2.7" in [spec.target for spec in model.catalogue()]
    made = plans.plan(version)
    assert made.built.tag.startswith("gpu-2.7-2.7.1-") and made.recipe.tags[0] == "gpu-2.7"


def test_a_repository_may_extend_it(tmp_path: Path) -> None:
    (tmp_path / "trainyard.yaml").write_text("extends: gpu-2.7\nrun: python train.py\n", encoding="utf-8")
    spec = model.load(str(tmp_path))
    assert isinstance(spec, model.RepositorySpec) and spec.extends == model.load("gpu-2.7")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("packages: [torch==2.7.1]\nbsae: debian-12\n", ":2: unknown key 'bsae' (did you mean 'base'?); valid here: "),
        ("packages: [torch]\n", ":1: packages.0: 'torch' is not pinned: write 'torch==<version>'"),
        ("packages: []\n", ":1: packages: List should have at least 1 item"),
        (
            "packages: [torch==2.7.1]\nbase: debain-12\n",
            ":2: base: unknown base 'debain-12' (did you mean 'debian-12'?)",
        ),
        ("packages: [einops==1]\n", ":1: packages: none of the packages is torch"),
    ],
)
def test_a_mistake_is_one_line_with_its_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, message: str
) -> None:
    folder = tmp_path / "gpu" / "1.0"
    folder.mkdir(parents=True)
    (tmp_path / "gpu" / "image.yaml").write_text((model.IMAGES / "gpu" / "image.yaml").read_text(), encoding="utf-8")
    (folder / "version.yaml").write_text(text, encoding="utf-8")
    with pytest.raises(UserError) as error:
        model.load(str(folder))
    assert f"gpu/1.0/version.yaml{message}" in str(error.value) and "\n" not in str(error.value)


def test_a_version_of_a_target_that_has_the_framework_of_another_has_its_packages(tmp_path: Path) -> None:
    folder = tmp_path / "mine" / "2.7"
    folder.mkdir(parents=True)
    (tmp_path / "mine" / "image.yaml").write_text("extends: gpu\n", encoding="utf-8")
    (folder / "version.yaml").write_text("packages: [torch==2.7.1]\n", encoding="utf-8")
    assert model.load(str(folder.parent)).framework_of == model.IMAGES / "gpu"
    version = model.load(str(folder))
    assert (version.framework_of, version.declared_packages) == (None, ["torch==2.7.1"])


def test_a_version_that_does_not_exist_is_named_with_the_nearest(trainyard: Callable[..., Result]) -> None:
    status, _, err = trainyard("lock", "gpu@2.8")
    assert status == 2 and err.startswith("lock: unknown target 'gpu@2.8' (did you mean 'gpu-2.7'?); valid targets: ")
