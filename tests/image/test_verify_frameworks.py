"""Faults of frameworks planted in images: small layers with a fault on `tf-cpu`, `xla` and miniature images."""

from __future__ import annotations

import json
import secrets
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests import plans
from tests.engine import ENGINE
from tests.miniature import Miniature
from trainyard.spec import pylock
from trainyard.spec.model import load

pytestmark = pytest.mark.concurrent

BuiltImage = Callable[[str], str]
Plant = Callable[[str, str], str]

SITE = "/opt/venv/lib/python3.11/site-packages"


@pytest.fixture(scope="module")
def plant(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Plant]:
    """``plant(reference, "RUN ...")``: the reference of that image with another layer."""
    made: list[str] = []

    def planted(image: str, instructions: str) -> str:
        reference = f"planted.example/trainyard:planted-{secrets.token_hex(4)}"
        folder = tmp_path_factory.mktemp("planted")
        text = f"FROM {image}\nUSER 0\n{instructions}\nUSER 1000\n"
        (folder / "Dockerfile").write_text(text, encoding="utf-8")
        options = ["--quiet", "--load", "--provenance=false", f"--tag={reference}"]
        ENGINE.buildx("build", *options, str(folder))
        made.append(reference)
        return reference

    yield planted
    for reference in made:
        ENGINE.client.images.remove(reference, force=True)


@pytest.fixture(scope="module")
def in_xla(plant: Plant, miniature: Miniature) -> list[dict[str, Any]]:
    """Findings about an image of PyTorch/XLA with another torch and another libtpu, under another target's tag."""
    reference = plant(
        miniature.built("mini-xla"),
        f"""\
RUN sed -i 's/^Version: .*/Version: 2.8.0/' {SITE}/torch-2.9*.dist-info/METADATA \\
 && sed -i "s/^__version__ = .*/__version__ = '2.8.0+cu99'/" {SITE}/torch/version.py \\
 && sed -i 's/^Version: .*/Version: 0.0.51/' {SITE}/libtpu-*.dist-info/METADATA""",
    )
    done = miniature.call("verify", "mini-xla", f"--image={reference}", "--json")
    assert done.returncode == 1, done.stderr
    return list(json.loads(done.stdout)["findings"])


@pytest.mark.parametrize(
    ("rule", "words"),
    [
        ("installed_matches_locks", "package torch: is 2.8.0; the lock has 2.9.1"),
        ("torch_xla_has_its_libtpu", "package torch: is 2.8.0; torch_xla is 2.9.0"),
        ("torch_xla_has_its_libtpu", "package libtpu: is 0.0.51; torch_xla 2.9.0 needs libtpu==0.0.21"),
        ("nothing_known_to_conflict", "torch-xla 2.9.0 and libtpu 0.0.51 cannot share an image"),
        ("torch_is_the_build_of_its_index", "torch.version.cuda is"),
        ("image_is_its_recipe", "tag planted.example/trainyard:planted-"),
    ],
)
def test_a_wrong_framework_is_found_and_named(in_xla: list[dict[str, Any]], rule: str, words: str) -> None:
    reported = [f"{one['where']}: {one['what']}" for one in in_xla if one["rule"] == rule]
    assert any(words in one for one in reported), in_xla


@pytest.mark.big("xla")
def test_cuda_in_an_image_that_claims_to_be_slim_is_found(
    built_image: BuiltImage, plant: Plant, tmp_path: Path
) -> None:
    """The label says PyTorch's CPU index, which has no CUDA build; its locks are those of another network's build."""
    folder = tmp_path / "xla"
    shutil.copytree(load("xla").folder, folder)
    shutil.copy(folder / pylock.FILE, pylock.file_of(folder / pylock.FILE, "pytorch-cpu"))
    shutil.copy(folder / "Dockerfile", folder / "Dockerfile.pytorch-cpu")
    text = f"""\
RUN sed -i "s/^__version__ = .*/__version__ = '2.9.1+cu128'/" {SITE}/torch/version.py
LABEL io.trainyard.index=pytorch-cpu"""
    _, found = plans.examined(load(str(folder)), plant(built_image("xla"), text))
    reported = [str(one) for one in found["torch_is_the_build_of_its_index"] if one.fails]
    assert any("is 2.9.1+cu128; index pytorch-cpu has +cpu" in one for one in reported), reported


def test_torch_without_cuda_is_no_image_for_gpus(miniature: Miniature) -> None:
    """The CUDA nightly that held CPU torch (https://github.com/pytorch/pytorch/issues/125879)."""
    _, found = plans.examined(load("gpu"), miniature.built("mini"))
    reported = [str(one) for one in found["framework_is_built_for_the_accelerator"]]
    assert any("is built without CUDA" in one for one in reported), reported


def test_tensorflow_with_another_cudnn_is_found(built_image: BuiltImage, plant: Plant) -> None:
    """TensorFlow's images that held the wrong cuDNN (https://github.com/tensorflow/build/issues/221)."""
    site = f"/{load('tf-cpu').site.packages}"
    info = f"{site}/nvidia_cudnn_cu12-8.9.7.29.dist-info"
    text = f"""\
RUN sed -i "s/'is_cuda_build', False/'is_cuda_build', True/" {site}/tensorflow/python/platform/build_info.py \\
 && printf "build_info['cudnn_version'] = '9'\\n" >>{site}/tensorflow/python/platform/build_info.py \\
 && mkdir {info} && printf 'Metadata-Version: 2.1\\nName: nvidia-cudnn-cu12\\nVersion: 8.9.7.29\\n' >{info}/METADATA"""
    _, found = plans.examined(load("tf-cpu"), plant(built_image("tf-cpu"), text))
    reported = [str(one) for some in found.values() for one in some]
    assert any("is a CUDA build under the name tensorflow-cpu" in one for one in reported), reported
    assert any("package nvidia-cudnn-cu12 8.9.7.29" in one and "is in no lock" in one for one in reported), reported
