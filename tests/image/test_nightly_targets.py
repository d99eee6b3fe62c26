"""Nightlies of a package index: the day that is locked passes, is promoted and rolled back, and so is the newest."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from testcontainers.community.registry import DockerRegistryContainer

from tests.engine import ENGINE
from tests.image import catalogue
from tests.image.conftest import Finished
from tests.image.registry import running
from trainyard.common.docker_engine import Engine
from trainyard.common.errors import UserError
from trainyard.image import fallback, planning, recipes, target_lock
from trainyard.oci.registry import Repository
from trainyard.recipe import PATH, parse
from trainyard.release import candidate, promotion, publish, sources
from trainyard.spec import model
from trainyard.spec.model import Spec

TARGET = "tf-nightly"

pytestmark = pytest.mark.big(TARGET)


@pytest.fixture(scope="module", autouse=True)
def dropped_after() -> Iterator[None]:
    yield
    catalogue.drop(TARGET)


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    server: DockerRegistryContainer
    with running.container() as server:
        yield running.address(server)


def copied(folder: Path) -> Path:
    """The target's folder, so that a test may lock it for another day."""
    return shutil.copytree(model.load(TARGET).folder, folder / TARGET)


def at_registry(spec: Spec, address: str) -> str:
    """Push and promote an image that has passed; its digest."""
    pushed = publish.push_attached(sources.of(spec), address, None)
    promotion.promote(recipes.named(spec), Repository(f"{address}/trainyard"), pushed["digest"])
    return str(pushed["digest"])


def build(spec: Spec) -> dict[str, Any]:
    """Build and test an image; see :func:`candidate.make`."""
    with planning.planned(spec) as plan:
        return candidate.make(plan)


def digest_of(address: str, tag: str) -> str | None:
    found = Repository(f"{address}/trainyard").manifest(tag)
    return found.digest if found else None


def test_the_day_that_is_locked_passes_and_the_next_is_promoted_and_rolled_back(
    built_image: Callable[[str], str], address: str, tmp_path: Path
) -> None:
    spec = model.load(TARGET)
    labels = ENGINE.image(built_image(TARGET), made_by="build").labels
    assert labels["io.trainyard.framework"] == f"tensorflow=={spec.version}"
    assert f"-{spec.version}-{spec.day}-" in labels["org.opencontainers.image.version"]
    first = at_registry(spec, address)

    folder = copied(tmp_path)
    today = model.load(str(folder))
    assert today.usable_lock
    next_day, _ = target_lock.write(today, replace(today.usable_lock, day="20991231"))
    build(next_day)
    second = at_registry(next_day, address)
    assert second != first and digest_of(address, TARGET) == second
    promotion.rollback(TARGET, Repository(f"{address}/trainyard"))
    assert digest_of(address, TARGET) == first == digest_of(address, f"{TARGET}-{spec.version}")


def test_the_image_says_which_nightly_it_is(
    built_image: Callable[[str], str], docker_run: Callable[..., Finished]
) -> None:
    script = f"import json; print(json.load(open('{PATH}'))['framework']['packages']['tf-nightly'])"
    installed = "import tensorflow; print(tensorflow.version.VERSION)"
    found = docker_run(built_image(TARGET), "--", "python3", "-c", f"{script}\n{installed}")
    said, imported = found.stdout.splitlines()[-2:]
    # TensorFlow calls the nightly 2.23.0.dev20261026 "2.23.0-dev20261026".
    assert said == model.load(TARGET).version == imported.replace("-dev", ".dev"), found.stderr


@pytest.mark.big("tf-cpu")
def test_the_newest_is_locked_passes_and_is_promoted(address: str, tmp_path: Path) -> None:
    folder = copied(tmp_path)
    target_lock.lock(model.load(str(folder)))
    newest = model.load(str(folder))
    assert newest.version >= model.load(TARGET).version
    build(newest)
    assert at_registry(newest, address) == digest_of(address, TARGET)


@pytest.mark.big("xla")
def test_the_fallback_of_a_nightly_passes_is_pushed_and_never_promoted(
    address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Engine, "digest_at_registry", lambda *_: (None, "no such host"))
    spec, reason = fallback.choose(model.load("xla-nightly"))
    assert reason
    made = build(spec)
    try:
        assert made["image"] == "trainyard:xla-nightly-fallback"
        built = parse(made["build"]["recipe"]).built
        assert built and built.notes[0].startswith("this is not xla-nightly: ")
        assert not ENGINE.images(label="io.trainyard.target=xla-nightly")
        pushed = publish.push_attached(sources.of(spec), address, None)
        assert f"/trainyard:xla-nightly-fallback-{spec.version}-" in pushed["tag"]
        for target in (spec, model.load("xla-nightly")):
            with pytest.raises(UserError, match=r"is a fallback|is an image of target 'xla-nightly-fallback'"):
                promotion.promote(recipes.named(target), Repository(f"{address}/trainyard"), pushed["digest"])
        assert digest_of(address, "xla-nightly") is None and digest_of(address, "xla-nightly-fallback") is None
    finally:
        catalogue.drop("xla-nightly-fallback")
