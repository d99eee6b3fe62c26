"""The fake engine of the unit tests does what a real one does: the statements are those of tests/engine_contract.py."""

from __future__ import annotations

import pytest
from tests.engine_contract import *  # noqa: F403
from tests.fakes.engine import FakeEngine, on_this_host


@pytest.fixture
def small(fake_engine: FakeEngine) -> str:
    fake_engine.add("small:1", program=on_this_host)
    return "small:1"


@pytest.fixture(autouse=True)
def cached(fake_engine: FakeEngine) -> None:
    fake_engine.cache["a" * 25] = "1.9kB"
