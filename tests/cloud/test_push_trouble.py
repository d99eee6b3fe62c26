"""Interrupted and simultaneous pushes to a real registry."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Callable, Iterator

import pytest
from tests.engine import ENGINE
from tests.image.registry import running

from trainyard.common.settings import ROOT
from trainyard.oci import registry
from trainyard.oci.registry import Repository

pytestmark = pytest.mark.concurrent

PUSH = """
import sys
from trainyard.common.docker_engine import Engine
from trainyard.oci.registry import push
for blob in push(Engine(), sys.argv[1]):
    print(*blob, flush=True)
"""


@pytest.fixture
def place() -> Iterator[str]:
    with running.container() as started:
        yield f"{running.address(started)}/team/trainyard"


@pytest.fixture
def tagged(place: str, built_image: Callable[[str], str]) -> Iterator[str]:
    """tf-cpu's image, of 400 MB in six blobs, under a tag for the registry."""
    ENGINE.client.images.get(built_image("tf-cpu")).tag(place, "big")
    yield f"{place}:big"
    ENGINE.client.api.remove_image(f"{place}:big", noprune=True)


def test_an_interrupted_push_publishes_nothing_and_is_resumed(place: str, tagged: str) -> None:
    process = subprocess.Popen([sys.executable, "-c", PUSH, tagged], cwd=ROOT, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    arrived, status = process.stdout.readline().split()
    process.kill()
    process.wait()
    assert status == "uploaded"
    assert Repository(place).manifest("big") is None
    assert Repository(place).tags() == []
    again = dict(registry.push(ENGINE, tagged))
    assert again[arrived] == "exists", "blobs that arrived are not resent"
    assert "uploaded" in again.values(), "it was interrupted before its end"
    assert registry.digest_of(ENGINE, tagged) == ENGINE.digest(tagged)


def test_two_simultaneous_pushes_leave_the_image_complete(place: str, tagged: str) -> None:
    failures: list[Exception] = []

    def push() -> None:
        try:
            list(registry.push(ENGINE, tagged))
        except Exception as error:
            failures.append(error)

    threads = [threading.Thread(target=push) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    assert registry.digest_of(ENGINE, tagged) == ENGINE.digest(tagged)
    found = Repository(place).manifest("big")
    assert found
    for layer in found.document["layers"]:
        assert Repository(place).has_blob(layer["digest"])
