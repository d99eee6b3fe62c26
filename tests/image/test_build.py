"""How images are built: with and without package indexes, with shared layers, without leftovers of a failed build."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import time
import zipfile
from collections.abc import Callable
from pathlib import Path

import docker.errors
import pytest

from tests import plans
from tests.engine import CONTEXT, ENGINE
from tests.image.conftest import Finished
from tests.image.small_images import from_cache, wheel
from tests.workspaces import versions
from trainyard.common import settings
from trainyard.common.settings import ROOT, state_folder
from trainyard.image import base_image, dockerfile, package_index, planning, recipes, target_lock
from trainyard.oci import layers as oci_layers
from trainyard.recipe import Recipe
from trainyard.spec import model, pylock

BuiltImage = Callable[[str], str]
Run = Callable[..., Finished]


def layers(reference: str) -> list[str]:
    """Digests of an image's uncompressed layers, lowest first."""
    return list(ENGINE.client.images.get(reference).attrs["RootFS"]["Layers"])


def stages(reference: str, recipe: Recipe) -> dict[str, list[str]]:
    """Stage of the Dockerfile -> digests of the uncompressed layers that it made."""
    found: dict[str, list[str]] = {}
    for layer in oci_layers.read(ENGINE, reference, recipe.layers).layers:
        found.setdefault(layer.stage, []).append(layer.diff_id)
    return found


@pytest.mark.big("xla")
def test_what_images_share_is_the_same_layer_in_each(built_image: BuiltImage) -> None:
    """The common part of trainers and the launcher, although the bases and their Python differ."""
    torch, tensorflow = (stages(built_image(name), recipes.make(model.load(name))) for name in ("xla", "tf-cpu"))
    assert torch["base"] != tensorflow["base"]
    for stage in ("common", "launcher"):
        assert torch[stage] == tensorflow[stage], stage


def test_a_second_build_changes_nothing(built_image: BuiltImage) -> None:
    reference = built_image("tf-cpu")
    before = layers(reference)
    plan, built = plans.built(model.load("tf-cpu"))
    assert layers(plan.recipe.candidate) == before
    assert built["digest"] == ENGINE.digest(reference)


def plain_build(context: Path) -> list[str]:
    """Layers of tf-cpu built from the files in ``context`` with `docker build`, without bake and without make.

    The recipe is that of its last build here.
    """
    tag = "trainyard-plain:test"
    command = ["docker", "build", "--quiet", "--file=images/tf-cpu/Dockerfile", f"--tag={tag}", "--provenance=false"]
    command += [f"--build-context=recipe={state_folder() / 'tf-cpu' / 'recipe'}"]
    command += [f"--build-arg=BASE={base_image.resolve(CONTEXT, 'debian-13').reference}"]
    command += [f"--build-arg=PYTHON_DEBIAN_12={base_image.resolve(CONTEXT, 'debian-12').build_base}"]
    if bundle := settings.ca_bundle():
        command.append(f"--secret=id=ca,src={bundle}")
    done = subprocess.run([*command, "."], cwd=context, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    try:
        return layers(tag)
    finally:
        ENGINE.client.images.remove(tag)


def test_a_plain_docker_build_gives_the_same_layers(built_image: BuiltImage) -> None:
    made = layers(built_image("tf-cpu"))
    assert plain_build(ROOT) == made


@pytest.mark.parametrize("umask", [0o077, 0o002], ids=oct)
def test_the_umask_of_a_checkout_does_not_change_the_layers(
    umask: int, built_image: BuiltImage, tmp_path: Path
) -> None:
    """As git writes files, and pip those of a wheel: modes 600 and 700 under umask 077, 664 and 775 under 002."""
    made = layers(built_image("tf-cpu"))
    folders = ("images", "templates", "trainers", "launcher")
    for name in (*folders, ".dockerignore"):
        source = ROOT / name
        if source.is_dir():
            shutil.copytree(source, tmp_path / name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(source, tmp_path / name)
    for path in (path for name in folders for path in (tmp_path / name, *(tmp_path / name).rglob("*"))):
        path.chmod((0o777 if path.is_dir() or path.stat().st_mode & 0o100 else 0o666) & ~umask)
    assert plain_build(tmp_path) == made


@pytest.mark.big("xla")
def test_an_image_outside_the_catalogue_shares_all_wheels_of_its_target_and_trains(
    built_image: BuiltImage, docker_run: Run
) -> None:
    parent, mine = (stages(built_image(name), recipes.make(model.load(name))) for name in ("xla", "examples/patches"))
    assert {stage for stage in parent if parent[stage] != mine.get(stage)} == {"about"}
    assert mine.keys() - parent.keys() == {"own", "wheel-einops"}
    found = docker_run(built_image("examples/patches"), "patches", "--fake-data", "--fake-images=2000", "--epochs=1")
    assert found.returncode == 0, found.stderr
    script = "from importlib.metadata import version; print(version('einops'))"
    found = docker_run(built_image("examples/patches"), "--", "python", "-c", script)
    assert found.stdout == "0.8.2\n"


def test_a_misspelt_trainer_lists_the_images_own(built_image: BuiltImage, docker_run: Run) -> None:
    found = docker_run(built_image("tf-cpu"), "minst")
    assert found.returncode == 2
    assert "mnist" in found.stderr
    assert "Traceback" not in found.stderr


@pytest.mark.slow("test_images_verb.py")
def test_an_interrupted_build_leaves_nothing_tagged(write_small: Callable[[], str]) -> None:
    target = write_small()
    # With good hashes there, what is going on when the signal comes is the download of torch: 900 MB.
    shutil.copy(ROOT / "examples" / "patches" / pylock.FILE, Path(target) / pylock.FILE)
    dockerfile.write(dockerfile.rendered(model.load(target)))
    command = ["make", "image", f"TARGET={target}", "VERBOSE=1"]
    process = subprocess.Popen(
        command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
    )
    assert process.stdout is not None
    seen = ""
    for line in process.stdout:
        seen += line
        if "[wheels-4 1/1] RUN" in line:
            break
    os.killpg(process.pid, signal.SIGINT)
    rest, _ = process.communicate(timeout=60)
    assert process.returncode != 0
    assert "image: interrupted" in seen + rest
    assert "Traceback" not in seen + rest
    for tag in ("small", "small-candidate"):
        with pytest.raises(docker.errors.ImageNotFound):
            ENGINE.client.images.get(f"trainyard:{tag}")


# --- package indexes that answer and that do not, with wheels of a few hundred bytes ------------------------------


def test_an_index_that_answers_is_used_locked_and_named(
    own_index: str, write_small: Callable[[], str], monkeypatch: pytest.MonkeyPatch, docker_run: Run
) -> None:
    """There is no lock for that index yet, so one is resolved, with hashes, and the build installs from it alone."""
    monkeypatch.setenv("TRAINYARD_INDEX_PYTORCH_CPU", own_index)
    package_index.reachable.cache_clear()
    loaded = model.load(write_small())
    plan, _ = plans.built(loaded)
    try:
        assert versions(model.load(str(loaded.folder)), "framework", index="pytorch-cpu")["torch"] == "2.9.1+cpu"
        assert own_index not in (loaded.folder / "pylock.pytorch-cpu.toml").read_text(encoding="utf-8")
        assert plan.recipe.index == "pytorch-cpu"
        assert not any("come from the default index" in note for note in plan.built.notes)
        found = docker_run("--entrypoint=python", plan.recipe.candidate, "-c", "import torch; print(torch.__version__)")
        assert found.stdout == "2.9.1+cpu\n", found.stderr
        labels = ENGINE.client.images.get(plan.recipe.candidate).labels
        assert labels["io.trainyard.index"] == "pytorch-cpu"
    finally:
        ENGINE.client.images.remove(plan.recipe.candidate, force=True)


def test_an_updated_base_installs_no_wheel_again(
    own_index: str,
    write_small: Callable[[], str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Wheels are installed in the build base, which stays: all layers above the system packages are the same again."""
    monkeypatch.setenv("TRAINYARD_INDEX_PYTORCH_CPU", own_index)
    package_index.reachable.cache_clear()
    small = model.load(write_small())
    plan, _ = plans.built(small)
    before = stages(plan.recipe.candidate, plan.recipe)
    reference, updated = base_image.resolve(CONTEXT, small.base), "trainyard-base:test-updated"
    (tmp_path / "Dockerfile").write_text(f"FROM {reference.reference}\nRUN echo news >/etc/news\n", encoding="utf-8")
    ENGINE.buildx("build", "--quiet", "--load", "--provenance=false", f"--tag={updated}", str(tmp_path))
    monkeypatch.setenv("TRAINYARD_BASE", updated)
    monkeypatch.setenv("TRAINYARD_BUILD_BASE", reference.build_base)
    try:
        plan, _ = plans.built(small)
        log = (plan.kept / "build.log").read_text(encoding="utf-8")
        after = stages(plan.recipe.candidate, plan.recipe)
    finally:
        ENGINE.untag(updated)
    changed = {stage for stage in after if after[stage] != before[stage]}
    assert changed and changed <= {"base", "system", "about"}, "the recipe names the base"
    assert from_cache(log, "[wheels-4 1/1] RUN") and from_cache(log, "[wheels-1 1/1] RUN")


def test_an_unreachable_index_is_a_fallback_with_a_note(
    write_small: Callable[[], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The plan uses the locks of the default index, and a note names both."""
    monkeypatch.setenv("TRAINYARD_INDEX_PYTORCH_CPU", "http://127.0.0.1:9/whl")
    package_index.reachable.cache_clear()
    started = time.monotonic()
    plan = planning.plan_for(model.load(write_small()))
    assert plan.recipe.index == "default"
    assert "INDEX_URL" not in plan.arguments
    assert "index pytorch-cpu is unreachable (http://127.0.0.1:9/whl does not answer" in plan.built.notes[0]
    assert time.monotonic() - started < 30


def test_a_wheel_that_is_not_the_locked_one_is_refused(
    own_index: str, write_small: Callable[[], str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Hashes are trusted, not the index: a wheel that was changed after it was locked is not installed."""
    monkeypatch.setenv("TRAINYARD_INDEX_PYTORCH_CPU", own_index)
    package_index.reachable.cache_clear()
    target = write_small()
    loaded = model.load(target)
    target_lock.lock_index(loaded, "pytorch-cpu")
    wheel(
        tmp_path / "index" / "torch", "torch", "2.9.1+cpu"
    )  # zip files contain times: the same content has another hash
    path = next((tmp_path / "index" / "torch").glob("*.whl"))
    with zipfile.ZipFile(path, "a") as archive:
        archive.writestr("torch/backdoor.py", "")
    found = subprocess.run(["make", "build", f"TARGET={target}"], cwd=ROOT, capture_output=True, text=True, check=False)
    assert found.returncode == 2
    assert "Hash mismatch" in found.stderr
    with pytest.raises(docker.errors.ImageNotFound):
        ENGINE.client.images.get("trainyard:small-candidate")
