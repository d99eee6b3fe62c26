"""How images come to be: alike in open and in closed networks, sharing what is the same, leaving nothing half done."""

from __future__ import annotations

import os
import signal
import subprocess
import time
import zipfile
from collections.abc import Callable
from pathlib import Path

import docker.errors
import pytest

from scripts import base, build, engine, indexes, spec
from scripts.cli import ROOT
from tests.image.conftest import Finished
from tests.image.small_images import from_cache, wheel

BuiltImage = Callable[[str], str]
Run = Callable[..., Finished]


def layers(reference: str) -> list[str]:
    """Digests of an image's unpacked layers, bottom first."""
    return list(engine.client().images.get(reference).attrs["RootFS"]["Layers"])


def test_what_images_share_is_the_same_blob_in_each(built_image: BuiltImage) -> None:
    """Base, system packages, what trainers share, and the launcher: in every image, whatever lies below."""
    torch, tensorflow = layers(built_image("xla")), layers(built_image("tf-cpu"))
    shared = [layer for layer in torch if layer in tensorflow]
    assert torch[:2] == tensorflow[:2] == shared[:2], "base and system packages"
    assert torch[-1] == tensorflow[-1], "launcher"
    assert torch[-3] == tensorflow[-3], "what trainers share"


def test_a_second_build_changes_nothing(built_image: BuiltImage) -> None:
    reference = built_image("tf-cpu")
    before = layers(reference)
    _, built = build.build(spec.load("tf-cpu"))
    assert layers(build.plan_for(spec.load("tf-cpu")).candidate) == before
    assert built["digest"] == engine.digest(reference)


def test_a_plain_docker_build_works_too(built_image: BuiltImage) -> None:
    """Without bake, without make: what the committed Dockerfile alone gives is the same layers."""
    reference, plain = built_image("tf-cpu"), "trainyard-plain:test"
    command = ["docker", "build", "--quiet", "--file=images/tf-cpu/Dockerfile", f"--tag={plain}"]
    command += [f"--build-arg=BASE={base.resolve('debian-12').reference}", "--provenance=false"]
    if engine.ca_bundle():
        command.append(f"--secret=id=ca,src={engine.ca_bundle()}")
    done = subprocess.run([*command, "."], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    try:
        assert layers(plain) == layers(reference)
    finally:
        engine.client().images.remove(plain)


def test_an_image_of_ones_own_shares_the_framework_and_trains(built_image: BuiltImage, docker_run: Run) -> None:
    parent, mine = layers(built_image("xla")), layers(built_image("examples/patches"))
    assert len(set(parent) & set(mine)) >= len(parent) - 2, "all but its own requirements and description"
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


def test_an_interrupted_build_leaves_nothing_tagged(write_small: Callable[[], str]) -> None:
    target = write_small()
    # With good hashes there, what is going on when the signal comes is the download of torch: 900 MB.
    good = (ROOT / "examples" / "patches" / "requirements.lock").read_text(encoding="utf-8")
    (Path(target) / "requirements.lock").write_text(good, encoding="utf-8")
    command = ["make", "image", f"TARGET={target}"]
    process = subprocess.Popen(
        command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
    )
    assert process.stdout is not None
    seen = ""
    for line in process.stdout:
        seen += line
        if "[framework 2/2] RUN" in line:
            break
    os.killpg(process.pid, signal.SIGINT)
    rest, _ = process.communicate(timeout=60)
    assert process.returncode != 0
    assert "interrupted; nothing was tagged or published" in seen + rest
    assert "Traceback" not in seen + rest
    for tag in ("small", "small-candidate"):
        with pytest.raises(docker.errors.ImageNotFound):
            engine.client().images.get(f"trainyard:{tag}")


# --- both worlds of package indexes, with wheels of a few hundred bytes ------------------------------------------


def test_an_index_that_answers_is_used_locked_and_named(
    own_index: str, write_small: Callable[[], str], monkeypatch: pytest.MonkeyPatch, docker_run: Run
) -> None:
    """The open world: no lock for that index yet, so one is made, by hash, and the build installs from it alone."""
    monkeypatch.setenv("TRAINYARD_INDEX_PYTORCH_CPU", own_index)
    indexes.reachable.cache_clear()
    loaded = spec.load(write_small())
    plan, built = build.build(loaded)
    try:
        lock = (loaded.folder / "framework.pytorch-cpu.lock").read_text(encoding="utf-8")
        assert "torch==2.9.1+cpu" in lock
        assert own_index not in lock
        assert built["index"] == "pytorch-cpu"
        assert not any("come from the default index" in note for note in built["notes"])
        found = docker_run("--entrypoint=python", plan.candidate, "-c", "import torch; print(torch.__version__)")
        assert found.stdout == "2.9.1+cpu\n", found.stderr
        labels = engine.client().images.get(plan.candidate).labels
        assert labels["io.trainyard.index"] == "pytorch-cpu"
    finally:
        engine.client().images.remove(plan.candidate, force=True)


def test_an_updated_base_installs_no_wheel_again(
    own_index: str,
    write_small: Callable[[], str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    """Wheels are installed in the workshop, which stays: all above the system's packages is the same blob again."""
    monkeypatch.setenv("TRAINYARD_INDEX_PYTORCH_CPU", own_index)
    indexes.reachable.cache_clear()
    small = spec.load(write_small())
    plan, _ = build.build(small)
    before = layers(plan.candidate)
    reference, updated = base.resolve(small.base), "trainyard-base:test-updated"
    (tmp_path / "Dockerfile").write_text(f"FROM {reference.reference}\nRUN echo news >/etc/news\n", encoding="utf-8")
    engine.buildx("build", "--quiet", "--load", "--provenance=false", f"--tag={updated}", str(tmp_path), quiet=True)
    monkeypatch.setenv("BASE", updated)
    monkeypatch.setenv("WORKSHOP", reference.workshop)
    capfd.readouterr()
    try:
        build.build(small)
        log = capfd.readouterr().err
        after = layers(plan.candidate)
    finally:
        engine.forget(updated)
    assert after != before, "the base has moved"
    assert after[-6:] == before[-6:], "framework, requirements, and what is ours"
    assert from_cache(log, "[framework 2/2] RUN") and from_cache(log, "[requirements 2/2] RUN")


def test_an_index_out_of_reach_is_said_aloud(write_small: Callable[[], str], monkeypatch: pytest.MonkeyPatch) -> None:
    """The closed world: the plan goes on with the default index's locks and a note that names both."""
    monkeypatch.setenv("TRAINYARD_INDEX_PYTORCH_CPU", "http://127.0.0.1:9/whl")
    indexes.reachable.cache_clear()
    started = time.monotonic()
    plan = build.plan_for(spec.load(write_small()))
    assert plan.index == "default"
    assert plan.build_args()["LOCK"] == ""
    assert "index pytorch-cpu is out of reach (http://127.0.0.1:9/whl does not answer" in plan.notes[0]
    assert time.monotonic() - started < 30


def test_a_wheel_that_is_not_the_locked_one_is_refused(
    own_index: str, write_small: Callable[[], str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Hashes are what is trusted, not the index: a wheel changed after it was locked never gets into an image."""
    monkeypatch.setenv("TRAINYARD_INDEX_PYTORCH_CPU", own_index)
    indexes.reachable.cache_clear()
    target = write_small()
    loaded = spec.load(target)
    build.lock.lock_target(loaded, "pytorch-cpu")
    wheel(tmp_path / "index" / "torch", "torch", "2.9.1+cpu")  # zip files hold times: the same content, another hash
    path = next((tmp_path / "index" / "torch").glob("*.whl"))
    with zipfile.ZipFile(path, "a") as archive:
        archive.writestr("torch/backdoor.py", "")
    found = subprocess.run(["make", "build", f"TARGET={target}"], cwd=ROOT, capture_output=True, text=True, check=False)
    assert found.returncode == 2
    assert "Hash mismatch" in found.stderr
    with pytest.raises(docker.errors.ImageNotFound):
        engine.client().images.get("trainyard:small-candidate")
