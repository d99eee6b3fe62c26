"""BuildKit's cache at a registry: what one machine has built, another does not build again."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from tests.engine import ENGINE
from tests.image.registry import running
from tests.image.small_images import from_cache, own_index, write_small  # noqa: F401  fixtures

from trainyard.image import build, package_index, planning
from trainyard.spec import model


def test_a_build_uses_the_cache_that_another_exported_to_a_registry(
    own_index: str,  # noqa: F811
    write_small: Callable[[], str],  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The builder's own cache is emptied; with the registry's cache the wheels are not installed again."""
    monkeypatch.setenv("TRAINYARD_INDEX_PYTORCH_CPU", own_index)
    package_index.reachable.cache_clear()
    folder = write_small()
    small = model.load(folder)
    install = "[wheels-4 1/1] RUN"
    known = ENGINE.cached().keys()
    with running.container() as registry:
        cache = f"{running.address(registry)}/team/cache"
        with planning.planned(small) as plan:
            build.build(plan, cache=cache)
        first = (small.kept / "build.log").read_text(encoding="utf-8")
        assert "exporting cache to registry" in first
        made = ENGINE.cached().keys() - known
        assert made, "the stages of this spec are new to the builder"
        ENGINE.drop_cached(made)
        assert not made & ENGINE.cached().keys(), "the builder's own cache has none of them"
        with planning.planned(small) as plan:
            build.build(plan, cache=cache)
    second = (small.kept / "build.log").read_text(encoding="utf-8")
    assert not from_cache(first, install), "the first build runs it"
    assert from_cache(second, install)
