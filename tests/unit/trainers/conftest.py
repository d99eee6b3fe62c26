"""Give fixtures to the tests of trainers."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
from far_storage import FarStorage


@pytest.fixture
def mount(monkeypatch: pytest.MonkeyPatch) -> Callable[[Path], FarStorage]:
    """Make a folder the storage of all URLs: fsspec, which the images have, is a stand-in that knows no other one."""

    def storage(folder: Path) -> FarStorage:
        made = FarStorage(folder)
        monkeypatch.setitem(sys.modules, "fsspec", SimpleNamespace(filesystem=lambda scheme: made))
        return made

    return storage
