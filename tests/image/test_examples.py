"""The repositories in examples/ as users have them: a copy of each, and the installed package."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from ruamel.yaml import YAML

from tests import wheels
from tests.engine import ENGINE
from trainyard.common.settings import ROOT

GPT, KERAS, LORA, MAXTEXT = (ROOT / "examples" / name for name in ("gpt", "keras", "lora", "maxtext"))
BuiltImage = Callable[[str], str]


@pytest.fixture(scope="module")
def command(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """``trainyard``, installed from its wheel."""
    folder = tmp_path_factory.mktemp("installed")
    wheel = wheels.build(wheels.clone(folder / "clone"), "wheel", folder / "dist")
    return wheels.install(wheel, folder / "environment")


def copy(example: Path, folder: Path) -> Path:
    """A copy of an example, in a new git repository."""
    shutil.copytree(example, folder, ignore=shutil.ignore_patterns("__pycache__", "checkpoints", "output"))
    wheels.run("git", "init", "--quiet", cwd=folder)
    return folder


def labels(reference: str) -> dict[str, str]:
    return dict(ENGINE.client.images.get(reference).labels)


@pytest.fixture(scope="module")
def images() -> Iterator[list[str]]:
    """Names of images that are removed after the tests."""
    made: list[str] = []
    yield made
    for name in made:
        for image in ENGINE.images(label=f"io.trainyard.target={name}"):
            for tag in image.tags:
                ENGINE.client.images.remove(tag, force=True)


def made(command: Path, folder: Path, images: list[str]) -> dict[str, str]:
    """The labels of the image that ``trainyard image`` makes of the repository in ``folder``."""
    images.append(folder.name)
    state = {"XDG_STATE_HOME": f"{folder}-state"}
    wheels.run(command, "lock", "--upgrade", cwd=folder, **state)
    built = json.loads(wheels.run(command, "image", "--json", cwd=folder, **state))
    return labels(built["digest"])


@pytest.mark.slow("test_own_repository.py, on tf-cpu too")
def test_keras_becomes_an_image_that_has_trained(
    built_image: BuiltImage, command: Path, images: list[str], tmp_path: Path
) -> None:
    built_image("tf-cpu")  # so that its layers are there
    found = made(command, copy(KERAS, tmp_path / "example-keras"), images)
    assert (found["io.trainyard.extends"], found["io.trainyard.tested"]) == ("tf-cpu", "trained")


@pytest.mark.big("cpu")
@pytest.mark.slow("test_own_repository.py, which has a trainyard.yaml of init")
def test_lora_becomes_an_image_that_has_trained(
    built_image: BuiltImage, command: Path, images: list[str], tmp_path: Path
) -> None:
    built_image("cpu")
    found = made(command, copy(LORA, tmp_path / "example-lora"), images)
    assert (found["io.trainyard.extends"], found["io.trainyard.tested"]) == ("cpu", "trained")


@pytest.mark.big("xla")
def test_gpt_becomes_an_image_that_has_trained(
    built_image: BuiltImage, command: Path, images: list[str], tmp_path: Path
) -> None:
    """With PyTorch/XLA, as its trainyard.yaml proposes for TPUs."""
    built_image("xla")
    folder = copy(GPT, tmp_path / "example-gpt")
    text = (folder / "trainyard.yaml").read_text()
    changed = text.replace("extends: cpu ", "extends: xla ").replace("[--model", "[--device=cpu, --model")
    assert changed.count("xla ") == 1 and changed.count("--device=cpu") == 1
    (folder / "trainyard.yaml").write_text(changed)
    found = made(command, folder, images)
    assert (found["io.trainyard.extends"], found["io.trainyard.tested"]) == ("xla", "trained")


@pytest.mark.big("jax-tpu")
def test_maxtext_trains_on_both_hosts_of_a_rehearsed_slice(
    built_image: BuiltImage, command: Path, images: list[str], tmp_path: Path
) -> None:
    built_image("jax-tpu")
    folder = copy(MAXTEXT, tmp_path / "example-maxtext")
    found = made(command, folder, images)
    assert (found["io.trainyard.extends"], found["io.trainyard.tested"]) == ("jax-tpu", "trained")
    words = YAML(typ="safe").load((folder / "trainyard.yaml").read_text())["smoke"]["args"]
    slice_of_two = ("--platform=gke", "--accelerator=v5litepod-8", "--machine=ct5lp-hightpu-4t")
    job = wheels.run(command, "job", "--image=trainyard:example-maxtext", "--trainer=run", *slice_of_two,
                     f"--args={' '.join(words)}", cwd=folder)  # fmt: skip
    (tmp_path / "job.yaml").write_text(job)
    wheels.run(command, "rehearse", str(tmp_path / "job.yaml"), f"--output={tmp_path / 'rehearsed'}", cwd=folder)
    logs = [path.read_text() for path in sorted((tmp_path / "rehearsed" / "logs").glob("*.log"))]
    assert len(logs) == 2
    for log in logs:
        assert "total_weights: 128" in log, "64 tokens of each host"
        assert "completed step: 3" in log
