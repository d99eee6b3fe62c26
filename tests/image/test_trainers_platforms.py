"""Every trainer of every framework starts with the output folder that a platform's job gives it, a folder of a bucket.

It is started with --eval-only: it parses its arguments, makes its model and looks for checkpoints, and finds none.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.image.trainer_box import box, serve_storage
from trainyard_jobs.model.request import output_variables, with_output

pytestmark = pytest.mark.concurrent

OUTPUT = "gs://bucket/run"
FAST = {"gpt": ("--layers=1", "--width=32", "--heads=2", "--block-size=32"), "mnist": ("--fake-images=600",)}


@pytest.mark.slow("the tests of each framework's checkpoints in a bucket")
@pytest.mark.parametrize("target", ["cpu", "tf-cpu", pytest.param("jax", marks=pytest.mark.big("jax"))])
def test_every_trainer_starts_with_the_output_folder_of_a_job(
    target: str, built_image: Callable[[str], str], tmp_path: Path
) -> None:
    with box(built_image(target)) as here:
        cloud = serve_storage(here, tmp_path)
        recipe = json.loads(here.run("cat", "/opt/trainyard/recipe.json").output)
        for number, (name, command) in enumerate(sorted(recipe["commands"].items())):
            # Vertex AI sets variables; on other platforms the job has the folder as an argument.
            forms = [((), output_variables(OUTPUT))]
            if not number:
                forms.append((with_output(None, (), OUTPUT)[0], {}))
            for words, variables in forms:
                quick = FAST.get(name, ())
                ended = here.run(*command, "--fake-data", "--eval-only", *quick, *words, **cloud, **variables)
                says = f"{name}: --eval-only: {OUTPUT}/checkpoints"
                assert ended.code == 2 and says in ended.lines[-1], f"{target} {name} {words}: {ended.output}"
                assert "has no checkpoint" in ended.lines[-1] and "Traceback" not in ended.output, ended.output
