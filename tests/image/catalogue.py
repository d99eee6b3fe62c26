"""Which targets a run of the tests builds, in which order, and what is removed in between.

`make test` builds `tf-cpu`, and images with a miniature of a framework (tests/miniature). `make test ALL=1` builds all
targets; it needs 60 GB of disk, since in a network without PyTorch's CPU index `cpu`, `gpu` and `torch-tpu` hold CUDA.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable

import docker.errors
import pytest

from tests.engine import ENGINE
from trainyard.spec.model import targets
from trainyard.spec.naming import NAME
from trainyard.spec.units import in_bytes

#: Built in every run: `xla` and `tf-cpu` are kept for all tests, nightlies have separate tests (ELSEWHERE).
ALWAYS = ("tf-cpu",)
KEPT = ("xla", "tf-cpu")
ELSEWHERE = ("xla-nightly", "xla-nightly-fallback", "tf-nightly")

#: The others, in an order in which neighbours share layers: `cpu` and `gpu` do if only the default index answers.
BIG = ("tf-tpu", "jax", "jax-tpu", "xla", "cpu", "gpu", "gpu-2.7", "torch-tpu", "tf-gpu", "jax-gpu")

#: Build cache records of at least this many bytes are removed with the images that were built from them.
LARGE = 10**8

#: What `docker buildx du --verbose` says of a record.
_ID = re.compile(r"(?m)^ID:\s+(\S+?)\*?$")
_PARENTS = re.compile(r"(?m)^Parents?:\s+(\S+)$")


def group(item: pytest.Item) -> int:
    """The index in BIG of the first image that a test marked ``big`` needs: the marker's arguments or its target.

    -1 for a test that extends a target that is always built by a big image, and for nightlies.
    """
    marker, call = item.get_closest_marker("big"), getattr(item, "callspec", None)
    assert marker is not None
    needed = marker.args or (call.params["target"] if call else "",)
    return min(-1 if name in (*ALWAYS, *ELSEWHERE) else BIG.index(name) for name in needed)


def parameters() -> list[object]:
    """The targets as parameters; the big ones are marked, and left out without `make test ALL=1` (conftest.py)."""
    missing = set(targets()) - {*ALWAYS, *BIG, *ELSEWHERE}
    assert not missing, f"add these to ALWAYS, BIG or ELSEWHERE: {missing}"
    return [*ALWAYS, *(pytest.param(name, marks=pytest.mark.big) for name in BIG)]


def drop(target: str) -> None:
    """Remove a target's images, and the build cache that no other target shares."""
    if target in KEPT:
        return
    for image in ENGINE.images(label=f"io.trainyard.target={target}"):
        for tag in image.tags:
            if tag.startswith(f"{NAME}:"):
                try:
                    ENGINE.client.images.remove(tag, force=True)
                except docker.errors.ImageNotFound:
                    continue
    if os.environ.get("CI") and target != "cpu":  # `gpu` comes next, and is made of the same
        drop_cache(LARGE)


def drop_stages() -> None:
    """Remove the file systems that large stages left in the build cache.

    The image holds the same files as a layer, which is a record too: a later build takes that one from the cache.
    """
    large = {name for name, size in ENGINE.cached().items() if in_bytes(size) >= LARGE}
    blocks = ENGINE.buildx("du", "--verbose").split("\n\n")
    stages = [found[1] for block in blocks if "mount / from exec" in block and (found := _ID.search(block))]
    _prune([name for name in stages if name in large], "--all")


def drop_cache(least: int) -> None:
    """Remove build cache records of ``least`` bytes and more, after the records that depend on them.

    Layers of images are kept: the engine does not count them as cache.
    """
    children: dict[str, list[str]] = {}
    for block in ENGINE.buildx("du", "--verbose").split("\n\n"):
        found, parents = _ID.search(block), _PARENTS.search(block)
        for parent in parents[1].split(",") if found and parents else []:
            children.setdefault(parent, []).append(found[1])  # type: ignore[index]
    records: set[str] = set()
    waiting = [name for name, size in ENGINE.cached().items() if in_bytes(size) >= least]
    while waiting:
        name = waiting.pop()
        if name not in records:
            records.add(name)
            waiting += children.get(name, [])
    _prune(records)


def _prune(names: Iterable[str], *options: str) -> None:
    """Remove build cache records; each only if all that depend on it are among them.

    All in one call: each takes a third of a second. The filter ``id`` is a regular expression:
    https://github.com/docker/buildx/blob/v0.13.1/commands/prune.go
    """
    if expression := "|".join(sorted(names)):
        ENGINE.buildx("prune", "--force", *options, f"--filter=id=/^({expression})$/")
