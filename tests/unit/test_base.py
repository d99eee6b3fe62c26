"""What a build stands on, and what its wheels are installed in, in open networks and in closed ones."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import docker.errors
import pytest

from scripts import base, spec

IMAGE, WORKSHOP = (getattr(spec.bases()["debian-12"], name) for name in ("image", "workshop"))
LOCAL = "trainyard-base:debian-12"


class Engine:
    """An engine that has ``images``: reference -> identity."""

    def __init__(self) -> None:
        self.images: dict[str, str] = {}

    def get(self, reference: str) -> Any:
        if reference not in self.images:
            raise docker.errors.ImageNotFound(reference)
        return SimpleNamespace(tag=lambda name: self.images.update({name: self.images[reference]}))


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> Engine:
    """The engine of this host; every bootstrap makes another image."""
    found = Engine()
    monkeypatch.setattr(base.engine, "client", lambda: SimpleNamespace(images=found))

    def bootstrap(name: str, _: spec.Base) -> str:
        found.images[base.local_reference(name)] = f"bootstrapped {len(found.images)}"
        return base.local_reference(name)

    monkeypatch.setattr(base, "bootstrap", bootstrap)
    return found


@pytest.fixture
def network(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """``network(debian="sha256:1")``: the references that registries have."""

    def reach(**digests: str) -> None:
        there = {IMAGE: digests.get("base"), WORKSHOP: digests.get("workshop")}
        monkeypatch.setattr(base, "_registry_digest", lambda reference: (there[reference], "no such host"))

    return reach


def test_an_open_network_gives_both_by_digest(engine: Engine, network: Callable[..., None]) -> None:
    network(base="sha256:1", workshop="sha256:2")
    found = base.resolve("debian-12")
    assert (found.reference, found.workshop) == (f"{IMAGE}@sha256:1", f"{WORKSHOP}@sha256:2")
    assert found.note is None and not engine.images


def test_a_workshop_that_is_gone_is_the_base_itself(engine: Engine, network: Callable[..., None]) -> None:
    network(base="sha256:1")
    assert base.resolve("debian-12").workshop == f"{IMAGE}@sha256:1"


def test_a_closed_network_keeps_the_first_base_as_workshop(
    engine: Engine, network: Callable[..., None], verb: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """`make base FORCE=1` moves the base, and not what wheels are installed in."""
    network()
    found = base.resolve("debian-12")
    assert (found.reference, found.workshop) == (LOCAL, f"{LOCAL}-workshop")
    assert found.note is not None and "is out of reach (no such host)" in found.note
    first = dict(engine.images)
    assert first[LOCAL] == first[f"{LOCAL}-workshop"]
    assert base.resolve("debian-12") == found and engine.images == first, "and once only"
    monkeypatch.setenv("FORCE", "1")
    code, _, err = verb(base)
    assert code == 0 and "debian-12: bootstrapping it again" in err
    assert engine.images[LOCAL] != first[LOCAL]
    assert engine.images[f"{LOCAL}-workshop"] == first[LOCAL]


@pytest.mark.parametrize(("workshop", "expected"), [("", "mine:1"), ("old:1", "old:1")])
def test_a_base_by_hand_is_its_own_workshop_unless_one_is_given(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, workshop: str, expected: str
) -> None:
    monkeypatch.setenv("BASE", "mine:1")
    monkeypatch.setenv("WORKSHOP", workshop)
    found = base.resolve("debian-12")
    assert (found.reference, found.workshop) == ("mine:1", expected)
    assert not engine.images, "nothing is bootstrapped"
