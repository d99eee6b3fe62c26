"""Which base and build base a build uses, with and without a registry."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.fakes.engine import FakeEngine

from trainyard.common.context import Context
from trainyard.common.docker_engine import Engine
from trainyard.common.errors import StepFailed, UserError
from trainyard.image import base_image
from trainyard.spec import model
from trainyard.spec.architectures import AMD64, ARM64, Architecture

IMAGE, BUILD_BASE = (getattr(model.bases()["debian-12"], name) for name in ("image", "build_base"))
LOCAL = "trainyard-base:debian-12"


@pytest.fixture
def engine(fake_engine: FakeEngine, monkeypatch: pytest.MonkeyPatch) -> FakeEngine:
    """The engine of this host; every bootstrap produces another image."""

    def bootstrap(_engine: Engine, name: str, _: model.Base, architecture: Architecture) -> str:
        reference = base_image.local_reference(name, architecture)
        fake_engine.add(reference, architecture=architecture.name)
        return reference

    monkeypatch.setattr(base_image, "bootstrap", bootstrap)
    return fake_engine


@pytest.fixture
def network(fake_engine: FakeEngine) -> Callable[..., None]:
    """``network(debian="sha256:1")``: the references that registries have."""

    def reach(**digests: str) -> None:
        there = {IMAGE: digests.get("base"), BUILD_BASE: digests.get("build_base")}
        fake_engine.digest_at_registry = there.get

    return reach


def test_a_registry_that_answers_gives_both_by_digest(engine: FakeEngine, network: Callable[..., None]) -> None:
    network(base="sha256:1", build_base="sha256:2")
    found = base_image.resolve(Context(), "debian-12")
    assert (found.reference, found.build_base) == (f"{IMAGE}@sha256:1", f"{BUILD_BASE}@sha256:2")
    assert found.note is None and not engine.images


def test_a_build_base_that_was_removed_is_replaced_by_the_base(
    engine: FakeEngine, network: Callable[..., None]
) -> None:
    network(base="sha256:1")
    assert base_image.resolve(Context(), "debian-12").build_base == "docker.io/library/debian@sha256:1"


def test_without_a_registry_the_first_bootstrapped_base_stays_the_build_base(
    engine: FakeEngine, network: Callable[..., None], trainyard: Callable[..., Any]
) -> None:
    """`make base FORCE=1` replaces the base, and not the image in which wheels are installed."""
    network()
    found = base_image.resolve(Context(), "debian-12")
    assert (found.reference, found.build_base) == (LOCAL, f"{LOCAL}-build-base")
    assert found.note is not None and "is unreachable (no such host)" in found.note
    first = engine.tags
    assert first[LOCAL] == first[f"{LOCAL}-build-base"]
    assert base_image.resolve(Context(), "debian-12") == found and engine.tags == first, "it is tagged once"
    code, _, err = trainyard("base", FORCE="1")
    assert code == 0 and "debian-12: bootstrapping it again for linux/amd64" in err
    assert engine.tags[LOCAL] != first[LOCAL]
    assert engine.tags[f"{LOCAL}-build-base"] == first[LOCAL]


def test_a_base_for_another_architecture_has_the_build_base_of_the_engines(
    engine: FakeEngine, network: Callable[..., None]
) -> None:
    """Wheels are installed, and byte code is compiled, on the engine's own machine."""
    network()
    found = base_image.resolve(Context(), "debian-12", architecture=ARM64)
    assert (found.reference, found.build_base) == (f"{LOCAL}-arm64", f"{LOCAL}-build-base")
    assert set(engine.tags) == {LOCAL, f"{LOCAL}-arm64", f"{LOCAL}-build-base"}


def test_a_base_that_is_set_for_another_architecture_is_not_the_build_base(
    engine: FakeEngine, network: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRAINYARD_BASE", "mine:1")
    network()
    found = base_image.resolve(Context(), "debian-12", architecture=ARM64)
    assert (found.reference, found.build_base) == ("mine:1", f"{LOCAL}-build-base")


@pytest.mark.parametrize(("build_base", "expected"), [("", "mine:1"), ("old:1", "old:1")])
def test_a_base_that_is_set_is_its_own_build_base_unless_one_is_set(
    engine: FakeEngine, monkeypatch: pytest.MonkeyPatch, build_base: str, expected: str
) -> None:
    monkeypatch.setenv("TRAINYARD_BASE", "mine:1")
    monkeypatch.setenv("TRAINYARD_BUILD_BASE", build_base)
    found = base_image.resolve(Context(), "debian-12")
    assert (found.reference, found.build_base) == ("mine:1", expected)
    assert not engine.images, "nothing is bootstrapped"


def test_a_base_that_is_set_by_digest_has_that_digest(engine: FakeEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    """The image's labels name it, as verify expects of a base whose name has one."""
    monkeypatch.setenv("TRAINYARD_BASE", "mirror.example/debian@sha256:1")
    assert base_image.resolve(Context(), "debian-12").digest == "sha256:1"


@pytest.mark.parametrize(
    ("name", "instead"),
    [
        ("python-3.14", ", or give 'base:' one of Debian's archive: debian-14 (Python 3.14)"),
        ("python-3.12", ", or, if another Python will do, give 'base:' one of Debian's archive: debian-12 (Python "
         "3.11), debian-13 (Python 3.13), debian-14 (Python 3.14)"),
        ("xla-nightly", ""),
    ],
)  # fmt: skip
def test_a_base_that_no_archive_has_is_one_line_with_what_can_be_had_in_its_place(
    engine: FakeEngine, network: Callable[..., None], name: str, instead: str
) -> None:
    network()
    with pytest.raises(UserError) as error:
        base_image.resolve(Context(), name)
    assert str(error.value) == (
        f"base {model.bases()[name].image} is unreachable (no such host) and cannot be bootstrapped: set "
        f"'TRAINYARD_BASE=<reference>' to an image with the same contents{instead}"
    )


def test_other_bases_have_the_image_of_their_wheels_whatever_base_was_set(
    engine: FakeEngine, network: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    network(base="sha256:1", build_base="sha256:2")
    monkeypatch.setenv("TRAINYARD_BASE", "mine:1")
    assert base_image.pythons(Context(), ["debian-12"]) == ({"debian-12": f"{BUILD_BASE}@sha256:2"}, [])


def test_without_another_base_the_build_has_a_note_and_no_byte_code_for_it(
    network: Callable[..., None], engine: FakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    def bootstrap(*_: object) -> str:
        raise UserError("cannot bootstrap Debian bookworm: this host has no Debian apt source")

    network()
    monkeypatch.setattr(base_image, "bootstrap", bootstrap)
    note = "the layers with the launcher and the trainers have no byte code for debian-12: cannot bootstrap Debian "
    assert base_image.pythons(Context(), ["debian-12"]) == (
        {"debian-12": "tools"},
        [f"{note}bookworm: this host has no Debian apt source"],
    )


def test_an_archive_that_fails_is_named_without_its_password(
    fake_engine: FakeEngine, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The password is no argument of a process either, which every user of the machine can read."""
    program = tmp_path / "mmdebstrap"
    program.write_text(
        f'#!/bin/sh\necho "$@" >{tmp_path}/arguments\ncat >{tmp_path}/sources\n'
        "echo 'E: no https://me:hunter2@mirror.example/dists' >&2\nexit 1\n",
        encoding="utf-8",
    )
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    monkeypatch.setenv("TRAINYARD_DEBIAN_MIRROR", "https://me:hunter2@mirror.example")
    monkeypatch.setattr(base_image.architectures, "of_host", lambda: AMD64)
    with pytest.raises(StepFailed) as error:
        base_image.bootstrap(Engine(), "debian-12", model.bases()["debian-12"], AMD64)
    assert str(error.value).endswith(
        "from 'deb https://mirror.example bookworm main': E: no https://mirror.example/dists"
    )
    assert (tmp_path / "sources").read_text() == "deb https://me:hunter2@mirror.example bookworm main"
    assert "hunter2" not in (tmp_path / "arguments").read_text()
