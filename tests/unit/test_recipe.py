"""A recipe is one document, and what knows it needs neither the catalogue nor a repository."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from trainyard import recipe as recipes
from trainyard.common.errors import UserError
from trainyard.image import recipes as made
from trainyard.spec.model import load
from trainyard_jobs.rules import image

#: What builds, checks, tests, publishes and compares images.
BACK = (
    "image.build", "image.buildx", "image.offline", "image.plan", "image.provenance", "image.smoke_command",
    "image.smoke_test", "lint.image.core", "lint.image.verify", "oci.inventory", "release.audit", "release.candidate",
    "release.claims", "release.code_push", "release.diff", "release.image_packages", "release.package_search",
    "release.platform_index", "release.predicates", "release.promotion", "release.publish", "release.pushed_code",
    "release.reproduce", "release.sbom", "sandbox.containers",
)  # fmt: skip

#: What jobs import of the builder.
BELOW_JOBS = (
    "common", "oci", "recipe", "sandbox.containers", "sandbox.curves", "image.trainer_flags", "release.pushed_code",
    "release.pushes", "spec.architectures", "spec.gpus", "spec.matrix", "spec.naming", "spec.state", "spec.units",
    "spec.yaml_source",
)  # fmt: skip

#: What reads the catalogue, a repository or its lock, and what makes locks.
FRONT = (
    "spec.framework", "spec.kinds", "spec.lock", "spec.model", "spec.workspace", "image.dockerfile", "image.facts",
    "image.planning", "image.recipes", "image.repository_lock", "image.resolution", "image.resolver",
    "image.target_lock", "image.workspace_files", "workspace.check", "workspace.code_files", "workspace.code_layer",
    "workspace.requirements",
)  # fmt: skip


def test_what_knows_a_recipe_imports_nothing_that_reads_a_catalogue_or_a_repository() -> None:
    """Also not by way of others."""
    script = (
        "import importlib, json, sys\n"
        f"for name in {BACK!r}: importlib.import_module(f'trainyard.{{name}}')\n"
        f"print(json.dumps([name for name in {FRONT!r} if f'trainyard.{{name}}' in sys.modules]))"
    )
    assert json.loads(subprocess.check_output([sys.executable, "-c", script], text=True)) == []


#: Platform -> target and accelerator of a job.
JOBS = {
    "vertex": ("gpu", "8xH100"), "gke": ("xla", "v5litepod-16"), "kubeflow": ("jax-gpu", "2xT4"),
    "slurm": ("gpu", "8xH100"), "skypilot": ("tf-gpu", "T4"), "tpu-vm": ("xla", "v5litepod-16"),
    "ai-platform": ("gpu-2.7", "V100"),
}  # fmt: skip

WITHOUT_THE_BUILDER = f"""\
import functools, importlib, json, pkgutil, sys
from pathlib import Path

class Refuse:
    def find_spec(name, path, target=None):
        if name.startswith("trainyard.") and not any(
            f"{{name}}.".startswith(f"trainyard.{{one}}.") or f"trainyard.{{one}}.".startswith(f"{{name}}.")
            for one in {BELOW_JOBS!r}
        ):
            raise ImportError(name)

sys.meta_path.insert(0, Refuse)
import trainyard_jobs
for module in pkgutil.walk_packages(trainyard_jobs.__path__, "trainyard_jobs."):
    if ".commands" not in module.name:
        importlib.import_module(module.name)

from trainyard import recipe
from trainyard_jobs import platforms
from trainyard_jobs.check import files
from trainyard_jobs.model import request

for name, given in json.loads(sys.argv[1]).items():
    platform, known = platforms.by_name(name), recipe.read(Path(f"{{name}}.json"))
    wanted = request.parse_request(given, [known], lambda _: None, tpu_machine=platform.tpu_machine)
    platforms.check_options(platform, wanted)
    file = Path(f"{{name}}-job.yaml")
    file.write_text(platform.write(wanted).text)
    (checked,), _ = files.check_files([file], functools.partial(files.check_file, offline=True))
    print(json.dumps([name, file.read_text(), checked.as_dict()]))
"""


def test_jobs_are_written_and_checked_by_a_recipe_alone_as_by_its_target(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, trainyard: Callable[..., tuple[int, str, str]]
) -> None:
    monkeypatch.chdir(tmp_path)
    jobs = {}
    for platform, (target, accelerator) in JOBS.items():
        Path(f"{platform}.json").write_text(made.make(load(target, "amd64")).text(), encoding="utf-8")
        jobs[platform] = {"accelerator": accelerator, "registry": "us-docker.pkg.dev/p/r", "output": "gs://bucket/run"}
    out = subprocess.check_output([sys.executable, "-c", WITHOUT_THE_BUILDER, json.dumps(jobs)], text=True)
    written = {name: (text, checked) for name, text, checked in map(json.loads, out.splitlines())}
    assert written.keys() == JOBS.keys()
    for platform, given in jobs.items():
        options = [f"--{name}={value}" for name, value in given.items()]
        text, checked = written[platform]
        assert text == trainyard("job", JOBS[platform][0], "--platform", platform, *options)[1]
        assert text == trainyard("job", "--recipe", f"{platform}.json", "--platform", platform, *options)[1]
        found = json.loads(trainyard("job", "check", f"{platform}-job.yaml", "--offline", "--json")[1])
        assert [checked] == found["files"]


def test_a_job_of_a_recipe_runs_the_image_that_is_named(
    tmp_path: Path, trainyard: Callable[..., tuple[int, str, str]]
) -> None:
    file = tmp_path / "recipe.json"
    file.write_text(made.make(load("tf-cpu", "amd64")).text(), encoding="utf-8")
    words = ["--platform", "vertex", "--recipe", str(file), "registry.example/team/image:1"]
    status, out, _ = trainyard("job", *words)
    assert status == 0 and out.startswith("# tf-cpu-mnist: registry.example/team/image:1; tensorflow 2.21.0\n")
    status, _, error = trainyard("job", *words, "--accelerator", "T4")
    assert status == 2 and "a GPU job with an image for CPUs: tensorflow_cpu 2.21.0" in error


def test_where_no_targets_are_known_a_job_is_told_what_its_image_is_for() -> None:
    assert image.fitting(tuple, "tensorflow_cpu 2.21.0", "gpu") == "use an image for GPUs"


def test_a_recipe_is_read_as_it_was_written(tmp_path: Path) -> None:
    recipe = made.make(load("gpu", "amd64"))
    file = tmp_path / "recipe.json"
    file.write_text(recipe.text(), encoding="utf-8")
    assert recipes.read(file) == recipe
    assert recipes.read(file).text() == recipe.text()


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda text: text[:100], "it: Invalid JSON"),
        (lambda _: "{}", "name: Field required"),
        (lambda text: text.replace('"schema": 1', '"schema": 2'), "schema: Input should be 1"),
        (lambda text: text.replace('"name": "cpu"', '"name": "../cpu"'), "name: String should match pattern"),
        (lambda text: text.replace('"kind": "none"', '"kind": "abacus"'), r"accelerator\.kind: Input should be"),
    ],
)
def test_what_is_no_recipe_is_refused_in_a_line(tmp_path: Path, change: Callable[[str], str], reason: str) -> None:
    file = tmp_path / "recipe.json"
    file.write_text(change(made.make(load("cpu")).text()), encoding="utf-8")
    with pytest.raises(UserError, match=reason) as error:
        recipes.read(file)
    assert str(error.value).startswith(f"{file}: no recipe (") and len(str(error.value).splitlines()) == 1


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"gone.json: no recipe \(No such file"):
        recipes.read(tmp_path / "gone.json")


def test_differences_name_the_field() -> None:
    recipe = made.make(load("tf-cpu", "amd64"))

    def changed(pin: recipes.Pin) -> recipes.Pin:
        return pin.model_copy(update={"version": "0"}) if pin.name == "keras" else pin

    layers = tuple(layer.model_copy(update={"pins": tuple(map(changed, layer.pins))}) for layer in recipe.layers)
    other = recipe.model_copy(update={"layers": layers, "environment": recipe.environment | {"A": "1"}})
    fields = {field: (one, two) for field, one, two in recipes.differences(recipe, other)}
    (pin,) = (name for name in fields if name.endswith(".pins.keras.version"))
    assert pin.startswith("layers.wheel") and fields[pin][1] == "0"
    assert fields["environment.A"] == (None, "1") and len(fields) == 2


def test_the_content_hash_covers_the_recipe_and_the_base_and_not_what_a_host_adds() -> None:
    recipe = made.make(load("cpu"))
    built = recipes.Built(
        tag="t", created="2026-11-20T12:00:00Z", revision="unknown", base="b", base_digest="", notes=()
    )
    assert recipe.model_copy(update={"built": built}).content_hash("b") == recipe.content_hash("b")
    assert recipe.content_hash("b") != recipe.content_hash("other")
    assert recipe.model_copy(update={"summary": "x"}).content_hash("b") != recipe.content_hash("b")


def test_a_command_for_another_architecture_than_the_usual_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = made.make(load("cpu", "arm64"))
    monkeypatch.setattr("platform.machine", lambda: "x86_64")
    assert recipe.command("lock") == "TRAINYARD_ARCH=arm64 trainyard lock cpu"
    assert (recipe.local_name, recipe.candidate) == ("cpu-arm64", "trainyard:cpu-arm64-candidate")
