"""Pushes that are cut off, and pushes that meet, at a real registry."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator

import pytest

from scripts import engine
from scripts.cli import ROOT
from scripts.published import registry
from scripts.published.tags import Repository
from tests.image.registry import running

PUSH = "import sys; from scripts.published.registry import push; [print(*b, flush=True) for b in push(sys.argv[1])]"


@pytest.fixture
def place() -> Iterator[str]:
    with running.container() as started:
        yield f"{running.address(started)}/team/trainyard"


@pytest.fixture
def tagged(place: str, built_image: Callable[[str], str]) -> Iterator[str]:
    """tf-cpu's image, of 400 MB in six blobs, under a tag of the registry's."""
    engine.client().images.get(built_image("tf-cpu")).tag(place, "big")
    yield f"{place}:big"
    engine.client().api.remove_image(f"{place}:big", noprune=True)


def test_a_push_that_is_cut_off_publishes_nothing_and_goes_on_where_it_was(place: str, tagged: str) -> None:
    process = subprocess.Popen([sys.executable, "-c", PUSH, tagged], cwd=ROOT, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    arrived, fate = process.stdout.readline().split()
    process.kill()
    process.wait()
    assert fate == "uploaded"
    assert Repository(place).manifest("big") is None
    assert Repository(place).tags() == []
    again = dict(registry.push(tagged))
    assert again[arrived] == "there", "what arrived is not sent twice"
    assert "uploaded" in again.values(), "it was cut off before its end"
    assert registry.digest_of(tagged) == engine.digest(tagged)


def test_two_pushes_at_once_leave_the_image_whole(place: str, tagged: str) -> None:
    failures: list[Exception] = []

    def push() -> None:
        try:
            list(registry.push(tagged))
        except Exception as error:
            failures.append(error)

    threads = [threading.Thread(target=push) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    assert registry.digest_of(tagged) == engine.digest(tagged)
    found = Repository(place).manifest("big")
    assert found
    for layer in json.loads(found.body)["layers"]:
        assert Repository(place).request("HEAD", f"blobs/{layer['digest']}").ok
