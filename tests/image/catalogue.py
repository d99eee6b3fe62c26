"""Which targets are built for real by a run of the tests, in which order, and what is dropped in between.

CI builds what shares most and weighs least. `make test ALL=1` builds every target; it needs 60 GB of disk, since in a
network without PyTorch's CPU index `cpu`, `gpu` and `torch-tpu` hold CUDA.
"""

from __future__ import annotations

import os
import re

import docker.errors
import pytest

from scripts import engine
from scripts.plan import NAME
from scripts.spec import targets

#: Built in every run: `xla` and `tf-cpu` stay for all tests, `xla-nightly` has tests of its own on a stand-in.
ALWAYS = ("xla", "tf-cpu", "tf-tpu")
KEPT = ("xla", "tf-cpu")
ELSEWHERE = ("xla-nightly",)

#: The others, in an order in which neighbours share: `cpu` and `gpu` are one framework where only one index answers.
BIG = ("cpu", "gpu", "torch-tpu", "tf-gpu")

#: Build cache of at least this many bytes goes with the images that were made of it.
LARGE = 10**9

#: What `docker buildx du --verbose` says of a record.
_ID = re.compile(r"(?m)^ID:\s+(\S+?)\*?$")
_PARENTS = re.compile(r"(?m)^Parents?:\s+(\S+)$")


def wanted() -> bool:
    """Whether this run builds all targets."""
    return bool(os.environ.get("ALL"))


def group(item: pytest.Item) -> int:
    """The place in BIG of the first image that a test marked ``big`` needs: the marker's arguments or its target."""
    marker, call = item.get_closest_marker("big"), getattr(item, "callspec", None)
    assert marker is not None
    needed = marker.args or (call.params["target"] if call else "",)
    return min(BIG.index(name) for name in needed)


def parameters() -> list[object]:
    """The targets as pytest's parameters; the big ones are marked, and left out unless ALL is set (conftest.py)."""
    missing = set(targets()) - {*ALWAYS, *BIG, *ELSEWHERE}
    assert not missing, f"say when these are tested: {missing}"
    return [*ALWAYS, *(pytest.param(name, marks=pytest.mark.big) for name in BIG)]


def drop(target: str) -> None:
    """Remove a target's images, and the build cache that no other target shares."""
    if target in KEPT:
        return
    for image in engine.client().images.list(filters={"label": [f"io.trainyard.target={target}"]}):
        for tag in image.tags:
            if tag.startswith(f"{NAME}:"):
                try:
                    engine.client().images.remove(tag, force=True)
                except docker.errors.ImageNotFound:
                    continue
    if os.environ.get("CI") and target != "cpu":  # `gpu` comes next, and is made of the same
        drop_cache(LARGE)


def drop_cache(least: int) -> None:
    """Remove build cache records of ``least`` bytes and more; first what is made on top of them, or they would stay.

    An image's own layers stay: the engine does not count them as cache.
    """
    children: dict[str, list[str]] = {}
    for block in engine.buildx("du", "--verbose", quiet=True).split("\n\n"):
        found, parents = _ID.search(block), _PARENTS.search(block)
        for parent in parents[1].split(",") if found and parents else []:
            children.setdefault(parent, []).append(found[1])  # type: ignore[index]
    for record in engine.cached(least=least):
        for name in _leaves_first(record, children):
            engine.buildx("prune", "--force", f"--filter=id={name}", quiet=True)


def _leaves_first(name: str, children: dict[str, list[str]]) -> list[str]:
    """A record and everything that stands on it, each before what it stands on."""
    order: dict[str, None] = {}

    def visit(one: str) -> None:
        for child in children.get(one, []):
            if child not in order:
                visit(child)
        order[one] = None

    visit(name)
    return list(order)
