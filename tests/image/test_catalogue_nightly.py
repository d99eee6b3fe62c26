"""xla-nightly: resolve, look inside, lock, build, verify, train, and only then move the name.

Upstream's image cannot be had everywhere, so the same path is walked on a stand-in that holds the framework in other
versions than our own specs ask for; it stands in by BASE, as it would for any user.
"""

from __future__ import annotations

import json
import secrets
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import docker.errors
import pytest

from scripts import engine, image, locks, render, spec, state
from scripts.cli import StepFailed

#: What the stand-in has otherwise than our own image: releases that go with the same torch, without their byte code.
OTHER = {"torchvision": "0.24.0", "fsspec": "2025.3.0"}

STAND_IN = r"""
FROM {xla}
USER 0
RUN rm -rf /opt/requirements /opt/trainyard /usr/local/bin/launch
WORKDIR /opt/venv/lib/python3.11/site-packages
RUN rm -rf _trainyard.pth torchvision* fsspec*
COPY other .
LABEL io.trainyard.target=stand-in
ENTRYPOINT []
CMD ["bash"]
"""

#: A later nightly of which somebody forgot half: pytorch/xla issue 9614 was one with another libtpu than torch_xla's.
WRONG = r"""
FROM {stand_in}
RUN sed -i 's/^Version: .*/Version: 0.0.17/' libtpu-*.dist-info/METADATA
"""


def built(folder: Path, dockerfile: str) -> str:
    """The reference of an image made of ``dockerfile`` in the context ``folder``."""
    reference = f"trainyard-test:stand-in-{secrets.token_hex(4)}"
    (folder / "Dockerfile").write_text(dockerfile, encoding="utf-8")
    engine.buildx("build", "--quiet", "--load", "--provenance=false", f"--tag={reference}", str(folder), quiet=True)
    return reference


@pytest.fixture(scope="module")
def stand_in(built_image: Callable[[str], str], tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A base that holds the framework: our own xla with other versions, and with nothing else of ours."""
    folder = tmp_path_factory.mktemp("stand-in")
    pins = [f"{name}=={version}" for name, version in OTHER.items()]
    command = [sys.executable, "-m", "uv", "pip", "install", "--quiet", "--no-deps", "--target", str(folder / "other")]
    command += ["--python-version=3.11", "--python-platform=x86_64-manylinux_2_36", *pins]
    subprocess.run(command, check=True)
    reference = built(folder, STAND_IN.replace("{xla}", built_image("xla")))
    yield reference
    engine.client().images.remove(reference, force=True)


def unlocked_copy(folder: Path) -> spec.Spec:
    """The target as the project has it, in ``folder``, its base not looked into yet."""
    shutil.copytree(spec.load("xla-nightly").folder, folder, ignore=shutil.ignore_patterns("*.lock", "base.json"))
    found = spec.load(str(folder))
    (folder / "Dockerfile").write_text(render.dockerfile(found), encoding="utf-8")
    return found


@pytest.fixture(scope="module")
def nightly(stand_in: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[spec.Spec]:
    """The target as the project has it, in a folder of its own, since what is found in a base is written beside it."""
    folder = tmp_path_factory.mktemp("nightly") / "xla-nightly"
    found = unlocked_copy(folder)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("BASE", stand_in)
        yield found
    engine.client().images.prune(filters={"label": ["io.trainyard.target=xla-nightly"]})


@pytest.fixture(scope="module")
def made(nightly: spec.Spec) -> Iterator[dict[str, object]]:
    facts = image.make(nightly)
    yield facts
    for tag in engine.client().images.get(str(facts["image"])).tags:
        engine.client().images.remove(tag, force=True)


def test_it_is_locked_with_what_its_base_holds(made: dict[str, object], nightly: spec.Spec, stand_in: str) -> None:
    held = spec.load(str(nightly.folder)).held
    assert held is not None and held.image == stand_in
    assert {name: held.packages[name] for name in OTHER} == OTHER
    assert held.packages["torch"] == "2.9.1" and held.packages["torch-xla"] == "2.9.0"
    ours = locks.read(nightly.folder / "requirements.lock")
    assert not {"torch", "torchvision", "torch-xla", "libtpu", "numpy"} & ours.keys(), "what is there is not locked"
    assert ours["fsspec"] > OTHER["fsspec"], "our pin comes before the base's own"


def test_it_passed_everything_before_it_got_its_name(made: dict[str, object], nightly: spec.Spec) -> None:
    digest = engine.digest(str(made["image"]))
    passed = state.require("xla-nightly", digest, "build", "verify", "smoke")
    assert passed["smoke"]["accuracy"] >= 97
    tags = engine.client().images.get(str(made["image"])).tags
    day = spec.load(str(nightly.folder)).held.day  # type: ignore[union-attr]
    assert any(tag.startswith(f"trainyard:xla-nightly-2.9.0-{day}-") for tag in tags), "a dated tag stays"


def test_it_says_which_versions_it_holds(made: dict[str, object], docker_run: Callable[..., object]) -> None:
    script = (
        "import json, torchvision, fsspec; about = json.load(open('/opt/trainyard/image.json')); "
        "print(json.dumps([about['versions'], torchvision.__version__.split('+')[0], fsspec.__file__]))"
    )
    found = docker_run("-e", "PJRT_DEVICE=CPU", str(made["image"]), "--", "python3", "-c", script)
    versions, vision, fsspec = json.loads(found.stdout)  # type: ignore[attr-defined]
    assert versions["torchvision"] == vision == OTHER["torchvision"]
    assert versions["torch_xla"] == "2.9.0" and "libtpu" in versions
    assert fsspec.startswith("/opt/requirements/"), "what was locked is imported, not the base's own"
    labels = engine.client().images.get(str(made["image"])).labels
    assert labels["io.trainyard.framework"] == "torch_xla==2.9.0"


def test_nothing_of_the_base_is_stored_again(made: dict[str, object], stand_in: str) -> None:
    below = engine.client().images.get(stand_in).attrs["RootFS"]["Layers"]
    assert engine.client().images.get(str(made["image"])).attrs["RootFS"]["Layers"][: len(below)] == below


def test_a_nightly_that_contradicts_itself_never_gets_the_name(
    made: dict[str, object], nightly: spec.Spec, stand_in: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next day's base has another libtpu than its torch_xla asks for: the name stays where it was."""
    before = engine.digest(str(made["image"]))
    folder = tmp_path / "xla-nightly"
    unlocked_copy(folder)
    wrong = built(tmp_path, WRONG.replace("{stand_in}", stand_in))
    monkeypatch.setenv("BASE", wrong)
    try:
        with pytest.raises((StepFailed, spec.UserError), match=r"libtpu"):
            image.make(spec.load(str(folder)))
        assert engine.digest(str(made["image"])) == before
        with pytest.raises(docker.errors.ImageNotFound):
            engine.client().images.get("trainyard:xla-nightly-candidate")
    finally:
        engine.client().images.remove(wrong, force=True)


def test_a_base_that_is_no_nightly_is_refused_before_anything_is_built(
    built_image: Callable[[str], str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "xla-nightly"
    monkeypatch.setenv("BASE", built_image("xla"))
    wanted = spec.bases()["xla-nightly"].model_copy(update={"framework": ["torch", "torch-xla", "jax"]})
    monkeypatch.setitem(spec.bases(), "xla-nightly", wanted)
    broken = unlocked_copy(folder)
    with pytest.raises(spec.UserError, match=r"trainyard:xla has no jax: it is no base xla-nightly"):
        image.make(broken)
    assert not (folder / "base.json").exists()
