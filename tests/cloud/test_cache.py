"""BuildKit's cache at a registry: what one machine built, another does not build again."""

from __future__ import annotations

import uuid
from collections.abc import Callable
from pathlib import Path

import pytest

from scripts import build, engine, indexes, spec
from tests.image.registry import running
from tests.image.small_images import from_cache, own_index, write_small  # noqa: F401  fixtures


def test_a_build_reads_back_what_another_left_at_the_registry(
    own_index: str,  # noqa: F811
    write_small: Callable[[], str],  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    """The builder forgets what it made; with the cache it does not install the wheels again."""
    monkeypatch.setenv("TRAINYARD_INDEX_PYTORCH_CPU", own_index)
    indexes.reachable.cache_clear()
    folder = write_small()
    with Path(folder, "framework.lock").open("a", encoding="utf-8") as lock:
        lock.write(f"# {uuid.uuid4()}: no other test has installed from this file\n")
    small = spec.load(folder)
    install = "[framework 2/2] RUN"
    known = engine.cached()
    with running.container() as registry:
        cache = f"{running.address(registry)}/team/cache"
        build.build(small, cache=cache)
        first = capfd.readouterr().err
        assert "exporting cache to registry" in first
        made = engine.cached() - known
        assert made, "this spec's own stages are new to the builder"
        engine.drop_cached(made)
        assert not made & engine.cached(), "the builder has forgotten them"
        build.build(small, cache=cache)
    second = capfd.readouterr().err
    assert not from_cache(first, install), "the first build did run it"
    assert from_cache(second, install)
