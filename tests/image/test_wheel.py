"""An image built by the installed package is the image that the checkout builds."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from tests import wheels
from tests.engine import ENGINE

pytestmark = pytest.mark.concurrent

BuiltImage = Callable[[str], str]


def layers(reference: str) -> list[str]:
    """Digests of an image's uncompressed layers, lowest first."""
    return list(ENGINE.client.images.get(reference).attrs["RootFS"]["Layers"])


@pytest.mark.slow("test_own_repository.py, whose images the installed package builds")
def test_the_installed_package_builds_the_same_layers(built_image: BuiltImage, tmp_path: Path) -> None:
    """Even if it was installed under a umask that leaves its files to their owner alone."""
    expected = layers(built_image("tf-cpu"))
    wheel = wheels.build(wheels.clone(tmp_path / "clone"), "wheel", tmp_path / "dist")
    command = wheels.install(wheel, tmp_path / "environment", umask=0o077)
    (script,) = tmp_path.glob("environment/lib/*/site-packages/trainyard/_data/scripts/install-engine.sh")
    assert os.access(script, os.X_OK)
    state = str(tmp_path / "state")
    built = json.loads(wheels.run(command, "build", "tf-cpu", "--json", cwd=tmp_path, XDG_STATE_HOME=state))
    assert layers(built["digest"]) == expected
    assert list((tmp_path / "state" / "trainyard").iterdir()), "results are kept in the user's state folder"
