"""A host that has a recipe and an image judges the image without the catalogue, the templates and git."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.miniature import Miniature
from trainyard import recipe as recipes

pytestmark = pytest.mark.concurrent


class Elsewhere:
    """Run ``trainyard`` in a folder that has its modules, the launcher, a recipe, and nothing else.

    Attributes:
        recipe: the file of the recipe that ``image`` was built from.
    """

    def __init__(self, folder: Path, miniature: Miniature) -> None:
        self.image = miniature.built("mini")
        self.folder = folder
        self.recipe = folder / recipes.FILE
        shutil.copy(miniature.folder / "build" / "mini" / "recipe" / recipes.FILE, self.recipe)
        for part in ("scripts/trainyard", "launcher"):
            shutil.copytree(miniature.folder / part, folder / part)
        programs = folder / "programs"
        programs.mkdir()
        (programs / "docker").symlink_to(str(shutil.which("docker")))
        inherited = {name: value for name, value in os.environ.items() if not name.startswith("TRAINYARD_")}
        self._environment = inherited | {
            "PATH": str(programs),
            "PYTHONPATH": str(folder / "scripts"),
            "TRAINYARD_BUILD": str(folder / "state"),
        }

    def call(self, *words: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "trainyard", *words]
        return subprocess.run(
            command, cwd=self.folder, env=self._environment, capture_output=True, text=True, check=False
        )


@pytest.fixture(scope="module")
def elsewhere(miniature: Miniature, tmp_path_factory: pytest.TempPathFactory) -> Elsewhere:
    return Elsewhere(tmp_path_factory.mktemp("elsewhere"), miniature)


def test_an_image_is_compared_with_a_recipe_that_another_host_has_written(elsewhere: Elsewhere) -> None:
    done = elsewhere.call("verify", "--recipe", elsewhere.recipe.name, elsewhere.image)
    assert done.returncode == 0, done.stderr
    assert done.stderr.splitlines()[-1].endswith("matches its recipe")


def test_an_image_is_tested_as_the_recipe_of_another_host_says(elsewhere: Elsewhere) -> None:
    done = elsewhere.call("dev", "smoke", "--recipe", elsewhere.recipe.name, elsewhere.image)
    assert done.returncode == 0, done.stderr
    assert done.stderr.splitlines()[-1] == "mini: trained"


def test_an_image_of_another_recipe_is_refused_with_the_field(elsewhere: Elsewhere) -> None:
    recipe = recipes.read(elsewhere.recipe)
    framework = recipe.framework.model_copy(update={"packages": {"torch": "2.9.0"}})
    other = elsewhere.folder / "other.json"
    other.write_text(recipe.model_copy(update={"framework": framework}).text(), encoding="utf-8")
    done = elsewhere.call("verify", "--recipe", other.name, elsewhere.image)
    assert done.returncode == 1, done.stderr
    assert "/opt/trainyard/recipe.json: framework.packages" in done.stderr
