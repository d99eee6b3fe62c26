"""Check what tf-cpu's packages have beside a training, and with a release of setuptools that breaks TensorBoard."""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.engine import CONTEXT, ENGINE
from trainyard.common import settings
from trainyard.common.errors import StepFailed
from trainyard.image import recipes, smoke_packages
from trainyard.recipe import Recipe
from trainyard.spec import model

pytestmark = pytest.mark.concurrent

#: The first without pkg_resources is 82 (https://setuptools.pypa.io/en/latest/history.html#v82-0-0).
SETUPTOOLS = "84.2.1"


@pytest.fixture
def recipe() -> Recipe:
    return recipes.make(model.load("tf-cpu"))


@pytest.fixture
def updated(built_image: Callable[[str], str], recipe: Recipe, tmp_path: Path) -> Iterator[str]:
    """tf-cpu's image with another setuptools."""
    words = ["pip", "install", "--quiet", "--no-deps", "--target", str(tmp_path / "new"), f"setuptools=={SETUPTOOLS}"]
    subprocess.run([*settings.UV, *words], env=settings.environment(), check=True)
    site = f"/{recipe.site}"
    lines = ["FROM " + built_image("tf-cpu"), "USER 0"]
    lines += [f"RUN cd {site} && rm -rf setuptools* pkg_resources _distutils_hack", f"COPY new {site}/", "USER 1000"]
    (tmp_path / "Dockerfile").write_text("\n".join(lines))
    image = f"trainyard-test:{tmp_path.name.replace('_', '-')[-40:]}"
    subprocess.run(["docker", "build", "--quiet", "--provenance=false", "--tag", image, str(tmp_path)], check=True)
    yield image
    ENGINE.client.images.remove(image, force=True)


def with_setuptools(recipe: Recipe, version: str) -> Recipe:
    """Return a recipe that says that an image has this version."""
    layers = [
        layer.model_copy(
            update={
                "pins": tuple(
                    pin.model_copy(update={"version": version}) if pin.name == "setuptools" else pin
                    for pin in layer.pins
                )
            }
        )
        for layer in recipe.layers
    ]
    return recipe.model_copy(update={"layers": tuple(layers)})


def test_everything_beside_the_training_of_an_image_works(recipe: Recipe, built_image: Callable[[str], str]) -> None:
    with smoke_packages.beside(recipe, built_image("tf-cpu"), CONTEXT) as beside:
        facts, notes = beside.result()
    assert (facts["beside"]["findings"], notes) == ([], [])
    assert facts["beside"]["scripts"] >= 14 and facts["beside"]["extension_modules"] > 0
    assert facts["beside"]["modules"] >= 8, "each package that its files name"


def test_a_console_script_that_an_update_breaks_ends_the_test_with_a_remedy_that_works(
    recipe: Recipe, updated: str
) -> None:
    with (
        smoke_packages.beside(with_setuptools(recipe, SETUPTOOLS), updated, CONTEXT) as beside,
        pytest.raises(StepFailed) as refusal,
    ):
        beside.result()
    assert str(refusal.value) == (
        "tensorboard 2.20.0: tensorboard does not start: ModuleNotFoundError: No module named 'pkg_resources': "
        "add 'setuptools<82' to the requirements of images/tf-cpu/image.yaml: with setuptools 81.0.0 it works"
    )


def test_in_the_image_of_a_repository_it_is_a_note_unless_the_repository_lists_the_package(
    recipe: Recipe, updated: str
) -> None:
    own = with_setuptools(recipe, SETUPTOOLS).model_copy(update={"extends": "tf-cpu", "listed": ()})
    with smoke_packages.beside(own, updated, CONTEXT) as beside:
        facts, notes = beside.result()
    why = "ModuleNotFoundError: No module named 'pkg_resources'"
    assert facts["beside"]["findings"] == [f"tensorboard: tensorboard: {why}"]
    assert [note.partition(": ")[0] for note in notes] == ["tensorboard 2.20.0"]
