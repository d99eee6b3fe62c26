"""What tests of images share: running something in one, and making small ones that are cheap to build."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable, Iterator

import pytest

from scripts import clean, engine
from scripts.cli import ROOT
from tests.image import catalogue
from tests.image.small_images import own_index, write_small  # noqa: F401  fixtures

Finished = subprocess.CompletedProcess[str]


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out the tests of big images unless `make test ALL=1` asks for them; pytest counts them as deselected.

    They come after all others, one image's together, so that no two of those need to be kept at a time.
    """
    big = {item: catalogue.group(item) for item in items if item.get_closest_marker("big")}
    items[:] = [item for item in items if item not in big]
    if catalogue.wanted():
        items += sorted(big, key=big.__getitem__)
    elif big:
        config.hook.pytest_deselected(items=list(big))


@pytest.fixture
def docker_run() -> Callable[..., Finished]:
    """``docker_run("--read-only", image, "mnist")``: what ``docker run --rm`` does with these words."""

    def run(*words: str, timeout: float = 300) -> Finished:
        engine.client()
        labels = [f"--label={name}={value}" for name, value in engine.owned("test").items()]
        command = ["docker", "run", "--rm", *labels, *words]
        return subprocess.run(command, capture_output=True, text=True, timeout=timeout, check=False)

    return run


@pytest.fixture
def make() -> Callable[..., Finished]:
    """``make("image", TARGET="xla")``: what a user types."""

    def run(*words: str, timeout: float = 1500, **variables: str) -> Finished:
        command = ["make", *words, *(f"{name}={value}" for name, value in variables.items())]
        return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=timeout, check=False)

    return run


@pytest.fixture(scope="package", autouse=True)
def nothing_left_behind() -> Iterator[None]:
    """Tests leave no container, network or volume of ours, whatever happened."""
    yield
    clean.leftovers()
    if os.environ.get("CI"):
        # CI has 40 GB of disk: 40.6 GB were used at the peak before this, of which 8 GB are one stage's files.
        catalogue.drop_cache(4 * 10**9)
