"""The engine of this machine does what the fake of the unit tests does: the statements of tests/engine_contract.py."""

from __future__ import annotations

import pytest

from tests.engine import CONTEXT
from tests.engine_contract import *  # noqa: F403
from trainyard.image import base_image

pytestmark = pytest.mark.concurrent


@pytest.fixture(scope="module")
def small() -> str:
    return base_image.resolve(CONTEXT, "debian-12").reference
