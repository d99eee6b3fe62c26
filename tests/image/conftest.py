"""Fixtures for tests of images: run a container, run make, and small images that are cheap to build."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable, Iterator

import pytest

from tests.engine import ENGINE
from tests.image import catalogue
from tests.image.small_images import own_index, write_small  # noqa: F401  fixtures
from trainyard.common.docker_engine import resource_labels
from trainyard.common.settings import ROOT
from trainyard.project import clean

Finished = subprocess.CompletedProcess[str]


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out the tests of big images unless `make test ALL=1` asks for them; pytest counts them as deselected.

    They run after all others, grouped by image, so that no two of those images need to be kept at a time.
    """
    big = {item: catalogue.group(item) for item in items if item.get_closest_marker("big")}
    items[:] = [item for item in items if item not in big]
    if config.getoption("--big"):
        items += sorted(big, key=big.__getitem__)
    elif big:
        config.hook.pytest_deselected(items=list(big))


@pytest.fixture
def docker_run() -> Callable[..., Finished]:
    """``docker_run("--read-only", image, "mnist")``: ``docker run --rm`` with these arguments."""

    def run(*words: str, timeout: float = 300) -> Finished:
        ENGINE.existing_client()
        labels = [f"--label={name}={value}" for name, value in resource_labels("test").items()]
        command = ["docker", "run", "--rm", *labels, *words]
        return subprocess.run(command, capture_output=True, text=True, timeout=timeout, check=False)

    return run


@pytest.fixture
def make() -> Callable[..., Finished]:
    """``make("image", TARGET="xla")``: as a user types it."""

    def run(*words: str, timeout: float = 1500, **variables: str) -> Finished:
        command = ["make", *words, *(f"{name}={value}" for name, value in variables.items())]
        return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=timeout, check=False)

    return run


@pytest.fixture(scope="package", autouse=True)
def nothing_left_behind(request: pytest.FixtureRequest) -> Iterator[None]:
    """Remove containers, networks and volumes of tests, also after a failure."""
    yield
    if not hasattr(request.config, "workerinput"):
        remove_leftovers()


def pytest_sessionfinish(session: pytest.Session) -> None:
    # One worker of pytest-xdist ends while tests of another still run.
    if session.config.pluginmanager.hasplugin("dsession"):
        remove_leftovers()


def remove_leftovers() -> None:
    clean.leftovers(ENGINE)
    if os.environ.get("CI"):
        # CI has 40 GB of disk; the files of stages are in the images' layers too.
        catalogue.drop_stages()
