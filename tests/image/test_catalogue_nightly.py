"""xla-nightly: resolve the base, inspect it, lock, build, verify, smoke-test, and only then move the tag.

Upstream's image is not reachable everywhere, so the test uses a substitute that holds the framework in other versions
than the specs of the catalogue, set with BASE as any user can.
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

from tests.engine import ENGINE
from tests.workspaces import versions
from trainyard.common.errors import StepFailed, UserError
from trainyard.common.settings import state_folder
from trainyard.image import dockerfile as render
from trainyard.image import planning
from trainyard.release import candidate
from trainyard.spec import model, pylock, state

pytestmark = pytest.mark.big("xla")

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

#: A later nightly with incompatible versions: https://github.com/pytorch/xla/issues/9614 was one with
#: another libtpu than torch_xla's.
WRONG = r"""
FROM {stand_in}
RUN sed -i 's/^Version: .*/Version: 0.0.17/' libtpu-*.dist-info/METADATA
"""


def built(folder: Path, dockerfile: str) -> str:
    """The reference of an image made of ``dockerfile`` in the context ``folder``."""
    reference = f"trainyard-test:stand-in-{secrets.token_hex(4)}"
    (folder / "Dockerfile").write_text(dockerfile, encoding="utf-8")
    ENGINE.buildx("build", "--quiet", "--load", "--provenance=false", f"--tag={reference}", str(folder))
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
    ENGINE.client.images.remove(reference, force=True)


def unlocked_copy(folder: Path) -> model.Spec:
    """The target as the project has it, in ``folder``, with a base that was not inspected yet."""
    shutil.copytree(model.load("xla-nightly").folder, folder, ignore=shutil.ignore_patterns(pylock.FILE))
    found = model.load(str(folder))
    (folder / "Dockerfile").write_text(render.dockerfile(found), encoding="utf-8")
    return found


@pytest.fixture(scope="module")
def nightly(stand_in: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[model.Spec]:
    """A copy of the target, since the contents of its base are recorded in its folder."""
    folder = tmp_path_factory.mktemp("nightly") / "xla-nightly"
    found = unlocked_copy(folder)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRAINYARD_BASE", stand_in)
        yield found
    ENGINE.client.images.prune(filters={"label": ["io.trainyard.target=xla-nightly"]})


@pytest.fixture(scope="module")
def made(nightly: model.Spec) -> Iterator[dict[str, object]]:
    with planning.planned(nightly) as plan:
        facts = candidate.make(plan)
    yield facts
    for tag in ENGINE.client.images.get(str(facts["image"])).tags:
        ENGINE.client.images.remove(tag, force=True)


def test_it_is_locked_with_the_packages_of_its_base(
    made: dict[str, object], nightly: model.Spec, stand_in: str
) -> None:
    contents = model.load(str(nightly.folder)).base_contents
    assert contents is not None and contents.image == stand_in
    assert {name: contents.packages[name] for name in OTHER} == OTHER
    assert contents.packages["torch"] == "2.9.1" and contents.packages["torch-xla"] == "2.9.0"
    ours = versions(model.load(str(nightly.folder)))
    assert not {"torch", "torchvision", "torch-xla", "libtpu", "numpy"} & ours.keys(), (
        "packages of the base are not locked"
    )
    assert ours["fsspec"] > OTHER["fsspec"], "the locked version precedes that of the base"


def test_it_passed_everything_before_it_was_tagged(made: dict[str, object], nightly: model.Spec) -> None:
    digest = ENGINE.digest(str(made["image"]))
    passed = state.require(state_folder() / "xla-nightly", digest, "build", "verify", "smoke")
    assert passed["smoke"]["accuracy"] >= 97
    tags = ENGINE.client.images.get(str(made["image"])).tags
    day = model.load(str(nightly.folder)).base_contents.day  # type: ignore[union-attr]
    assert any(tag.startswith(f"trainyard:xla-nightly-2.9.0-{day}-") for tag in tags), "a dated tag stays"


def test_its_description_has_the_versions_of_the_base(
    made: dict[str, object], docker_run: Callable[..., object]
) -> None:
    script = (
        "import json, torchvision, fsspec; recipe = json.load(open('/opt/trainyard/recipe.json')); "
        "print(json.dumps([recipe['framework']['packages'], torchvision.__version__.split('+')[0], fsspec.__file__]))"
    )
    found = docker_run("-e", "PJRT_DEVICE=CPU", str(made["image"]), "--", "python3", "-c", script)
    versions, vision, fsspec = json.loads(found.stdout)  # type: ignore[attr-defined]
    assert versions["torchvision"] == vision == OTHER["torchvision"]
    assert versions["torch-xla"] == "2.9.0" and "libtpu" in versions
    assert fsspec.startswith("/opt/requirements/"), "what was locked is imported, not the base's own"
    labels = ENGINE.client.images.get(str(made["image"])).labels
    assert labels["io.trainyard.framework"] == "torch_xla==2.9.0"


def test_nothing_of_the_base_is_stored_again(made: dict[str, object], stand_in: str) -> None:
    below = ENGINE.client.images.get(stand_in).attrs["RootFS"]["Layers"]
    assert ENGINE.client.images.get(str(made["image"])).attrs["RootFS"]["Layers"][: len(below)] == below


def test_a_nightly_with_incompatible_versions_is_not_tagged(
    made: dict[str, object], nightly: model.Spec, stand_in: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next day's base has another libtpu than its torch_xla needs: the tag does not move."""
    before = ENGINE.digest(str(made["image"]))
    folder = tmp_path / "xla-nightly"
    unlocked_copy(folder)
    wrong = built(tmp_path, WRONG.replace("{stand_in}", stand_in))
    monkeypatch.setenv("TRAINYARD_BASE", wrong)
    try:
        spec = model.load(str(folder))
        with pytest.raises((StepFailed, UserError), match=r"libtpu"), planning.planned(spec) as plan:
            candidate.make(plan)
        assert ENGINE.digest(str(made["image"])) == before
        with pytest.raises(docker.errors.ImageNotFound):
            ENGINE.client.images.get("trainyard:xla-nightly-candidate")
    finally:
        ENGINE.client.images.remove(wrong, force=True)


def test_a_base_without_the_framework_is_refused_before_anything_is_built(
    built_image: Callable[[str], str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "xla-nightly"
    monkeypatch.setenv("TRAINYARD_BASE", built_image("xla"))
    wanted = model.bases()["xla-nightly"].model_copy(update={"framework": ["torch", "torch-xla", "jax"]})
    monkeypatch.setitem(model.bases(), "xla-nightly", wanted)
    broken = unlocked_copy(folder)
    with pytest.raises(UserError, match=r"trainyard:xla has no jax: it cannot be base xla-nightly"):
        planning.plan_for(broken)
    assert not broken.lock_file.exists()
