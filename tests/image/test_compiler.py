"""torch.compile in images with PyTorch: in the conditions of clusters, and in the trainer that uses it."""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest

from tests.image.conftest import Finished

BuiltImage = Callable[[str], str]
Run = Callable[..., Finished]

#: Prints 8.18...: the sum of sin(2) nine times.
COMPILE = "import torch; print(torch.compile(lambda x: (x*2).sin().sum())(torch.ones(9)))"
CLOSED = ("--read-only", "--network=none", "--cap-drop=ALL", "--user=54321:0")

targets = pytest.mark.parametrize(
    "target", [pytest.param(name, marks=pytest.mark.big) for name in ("xla", "cpu", "gpu-2.7", "torch-tpu")]
)


@targets
def test_it_works_for_any_user_offline_on_a_read_only_root(
    target: str, built_image: BuiltImage, docker_run: Run
) -> None:
    image = built_image(target)
    compiled = docker_run(*CLOSED, "--tmpfs=/tmp:exec,mode=1777", image, "--", "python", "-c", COMPILE)
    assert (compiled.returncode, compiled.stdout) == (0, "tensor(8.1837)\n"), compiled.stderr


@pytest.mark.big("cpu")
def test_the_launcher_finds_a_folder_where_tmp_is_not_executable(built_image: BuiltImage, docker_run: Run) -> None:
    tmp, cache = "--tmpfs=/tmp:noexec,mode=1777", "--tmpfs=/home/trainer/.cache:exec,mode=1777"
    image = built_image("cpu")
    compiled = docker_run(*CLOSED, tmp, cache, image, "--", "python", "-c", COMPILE)
    assert (compiled.returncode, compiled.stdout) == (0, "tensor(8.1837)\n"), compiled.stderr
    failed = docker_run(*CLOSED, tmp, image, "--", "python", "-c", COMPILE)
    assert failed.returncode == 1 and "torch.compile will fail: /tmp, " in failed.stderr


@pytest.mark.big("cpu")
def test_imagenet_trains_compiled(built_image: BuiltImage, docker_run: Run) -> None:
    words = ("imagenet", "--model=resnet18", "--fake-data", "--fake-images=64", "--batch-size=8", "--epochs=1")
    trained = docker_run(built_image("cpu"), *words, "--image-size=64", "--compile=on", timeout=600)
    assert trained.returncode == 0, trained.stderr
    assert json.loads(trained.stdout.splitlines()[-1])["status"] == "completed"
