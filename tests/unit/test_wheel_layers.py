"""Wheels are grouped into layers by the locks alone, so that the same wheels are the same layer in every image."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable, Iterable
from pathlib import Path

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from tests import locks
from tests.workspaces import added, lock

from trainyard.image import dockerfile, wheel_layers
from trainyard.image.wheel_layers import ADDED, ALONE, MOST_ALONE, SMALL, WheelLayer
from trainyard.oci import layers
from trainyard.spec import model
from trainyard.spec.lock import Pin, Role

#: Names of the targets that wheels are installed in.
WITH_WHEELS = [name for name in model.targets() if not model.load(name).framework_in_base]

LARGE = 10 * ALONE


def pin(name: str, size: int = 1000, role: Role = "") -> Pin:
    return locks.pin(f"{name}==1", role, size, ["0" * 64])


def newer(old: Pin, version: str) -> Pin:
    return locks.pin(f"{old.name}=={version}", old.role, old.size, ["1" * 64])


def resized(old: Pin, size: int) -> Pin:
    return dataclasses.replace(old, files=tuple(dataclasses.replace(file, size=size) for file in old.files))


PINS = st.lists(
    st.builds(
        pin,
        st.from_regex(r"[a-z][a-z0-9]{0,8}(-[a-z0-9]{1,4})?", fullmatch=True),
        st.one_of(st.integers(0, ALONE - 1), st.integers(ALONE, 10**9), st.sampled_from([0, ALONE - 1, ALONE])),
        st.sampled_from(["", "added"]),
    ),
    unique_by=lambda one: one.name,
    max_size=60,
)


def target_pins(target: str) -> list[Pin]:
    locked = model.load(target).locked()
    return [*locked.framework, *locked.requirements]


def texts(found: Iterable[WheelLayer]) -> dict[str, str]:
    return {one.stage: one.lock for one in found}


def stages(target: str) -> dict[str, str]:
    """Stage -> its instructions in the Dockerfile of a target."""
    text = dockerfile.dockerfile(model.load(target))
    return {one.splitlines()[0].split()[-1]: one for one in text.split("\nFROM ")[1:] if " AS " in one.splitlines()[0]}


@given(PINS, st.randoms(use_true_random=False))
def test_the_order_of_the_pins_does_not_matter(pins: list[Pin], order: random.Random) -> None:
    shuffled = pins.copy()
    order.shuffle(shuffled)
    assert wheel_layers.group(shuffled) == wheel_layers.group(pins)


@given(PINS)
def test_every_wheel_is_in_one_layer_which_is_never_empty(pins: list[Pin]) -> None:
    found = wheel_layers.group(pins)
    assert sorted(one.name for layer in found for one in layer.pins) == sorted(one.name for one in pins)
    assert all(layer.pins for layer in found)
    assert len({layer.stage for layer in found}) == len(found)
    assert all(list(layer.pins) == sorted(layer.pins, key=lambda one: one.name) for layer in found)


@given(PINS)
def test_large_wheels_are_alone_and_small_ones_share_four_layers(pins: list[Pin]) -> None:
    shared = [one for one in pins if not one.added]
    alone = [layer for layer in wheel_layers.group(shared) if layer.stage.startswith("wheel-")]
    together = [layer for layer in wheel_layers.group(shared) if layer.stage.startswith("wheels-")]
    assert all(len(layer.pins) == 1 and layer.pins[0].size >= 7_200_000 for layer in alone)
    assert {layer.stage for layer in together} <= {"wheels-1", "wheels-2", "wheels-3", "wheels-4"}
    if len(alone) < 21:
        assert all(one.size < 7_200_000 for layer in together for one in layer.pins)


def test_the_threshold_is_of_the_packed_wheel() -> None:
    alone, shared = wheel_layers.group([pin("a", 7_200_000), pin("b", 7_199_999)])
    assert (alone.stage, alone.pins[0].name, shared.pins[0].name) == ("wheel-a", "a", "b")
    assert shared.stage.startswith("wheels-")
    (unknown,) = wheel_layers.group([pin("a", 0)])
    assert unknown.stage.startswith("wheels-"), "no index gives its size"


def test_at_most_21_wheels_are_alone_the_largest() -> None:
    pins = [pin(f"a{number:02}", ALONE + number) for number in range(30)]
    alone = [layer.pins[0].name for layer in wheel_layers.group(pins) if layer.stage.startswith("wheel-")]
    assert alone == [f"a{number:02}" for number in range(29, 8, -1)], "the largest are lowest"
    assert (MOST_ALONE, SMALL) == (21, 4)


@given(PINS)
def test_another_version_of_a_small_wheel_changes_one_layer(pins: list[Pin]) -> None:
    small = [one for one in pins if not one.added and one.size < ALONE]
    assume(small)
    before = texts(wheel_layers.group(pins))
    after = texts(wheel_layers.group([newer(one, "2") if one is small[0] else one for one in pins]))
    assert before.keys() == after.keys()
    (changed,) = (stage for stage in before if before[stage] != after[stage])
    assert f"{small[0].name}==1 " in before[changed] and f"{small[0].name}==2 " in after[changed]


@pytest.mark.parametrize("target", WITH_WHEELS)
def test_another_version_of_any_wheel_of_a_target_changes_its_layer_alone(target: str) -> None:
    pins = target_pins(target)
    before = texts(wheel_layers.group(pins))
    for old in pins:
        after = texts(wheel_layers.group([newer(one, f"{one.version}.1") if one is old else one for one in pins]))
        assert sum(before[stage] != after[stage] for stage in before) == 1
        assert before.keys() == after.keys()


@given(PINS, st.integers(0, 10**9))
def test_what_a_repository_adds_changes_no_layer_of_its_target(pins: list[Pin], size: int) -> None:
    shared = [one for one in pins if not one.added]
    of_target = wheel_layers.group(shared)
    more = pin("the-added-one", size, "added")
    assert wheel_layers.group([*shared, more]) == [*of_target, WheelLayer("wheel-the-added-one", (more,), private=True)]


@given(PINS)
def test_what_a_repository_adds_has_at_most_four_layers_above_those_of_its_target(pins: list[Pin]) -> None:
    shared = [one for one in pins if not one.added]
    own = wheel_layers.group(pins)[len(wheel_layers.group(shared)) :]
    assert wheel_layers.group(pins)[: -len(own) or None] == wheel_layers.group(shared)
    assert len(own) == min(4, sum(one.added for one in pins)) and ADDED == 4
    assert all(layer.private for layer in own)
    sizes = [max(one.size for one in layer.pins) for layer in own]
    assert sizes == sorted(sizes, reverse=True), "the largest are alone"
    assert [layer.stage for layer in own if len(layer.pins) > 1] in ([], ["wheels-added"])


def test_only_layers_with_packages_of_an_index_may_use_it() -> None:
    pins = [pin("torch", LARGE), pin("numpy", LARGE), pin("torchvision"), pin("six")]
    found = wheel_layers.group(pins, ["torch", "TorchVision"])
    of_index = {one.name for layer in found if layer.index for one in layer.pins}
    assert {"torch", "torchvision"} <= of_index and "numpy" not in of_index
    assert not any(layer.index for layer in wheel_layers.group(pins))


@given(PINS, st.integers(0, 3))
def test_sizes_are_in_no_layers_lock(pins: list[Pin], more: int) -> None:
    """Another index may give other sizes, or none."""
    assume(all(one.size + more < ALONE or one.size >= ALONE for one in pins))
    before = texts(wheel_layers.group(pins))
    assert not any("bytes" in text or "#" in text for text in before.values())
    shared = [one for one in pins if not one.added]
    grown = [resized(one, one.size + more) for one in shared]
    if sum(one.size >= ALONE for one in shared) <= MOST_ALONE:
        assert texts(wheel_layers.group(grown)) == texts(wheel_layers.group(shared))


def test_sizes_change_no_stages_text(write_locked_spec: Callable[[str], str], spec_text: str) -> None:
    loaded = model.load(write_locked_spec(spec_text))
    pins = loaded.locked().pins
    grown = [resized(one, one.size + 10_000_000) if one.size >= ALONE else one for one in pins]
    before, after = dockerfile.dockerfile(loaded), dockerfile.dockerfile(loaded.with_lock(locks.lock(*grown)))
    assert grown != list(pins)
    assert "wheel-tensorflow-cpu" in before and after == before


@pytest.mark.parametrize("number", [0, 1, 4, 5, 20])
@pytest.mark.parametrize("target", WITH_WHEELS)
def test_an_image_has_at_most_40_layers_with_what_a_repository_adds(
    target: str, number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of the base one, that of Debian's slim image and of a bootstrapped one; of code one, and what is compiled one."""
    monkeypatch.setenv("TRAINYARD_BUILD", str(tmp_path / "state"))
    folder = tmp_path / "repository"
    (folder / ".git").mkdir(parents=True)
    text = f"extends: {target}\nrun: python train.py\nsystem: [ffmpeg]\nbuild: {{packages: [g++], sources: [fast]}}\n"
    (folder / "trainyard.yaml").write_text(text, encoding="utf-8")
    more = [added(f"a{one}", size=LARGE) for one in range(number)]
    lock(model.load(str(folder)), locks.pin("fast==1.0", "compiled"), *more)
    below, copies = layers.stages(dockerfile.dockerfile(model.load(str(folder))))
    assert {"site", "compiled", "code", "launcher"} <= set(copies) and ("libraries", "RUN") in below
    assert 1 + len(below) + len(copies) <= 40


@pytest.mark.parametrize("others", [("cpu", "gpu"), ("cpu", "torch-tpu"), ("gpu", "torch-tpu"), ("tf-cpu", "tf-gpu")])
def test_large_wheels_in_common_have_the_same_stage(others: tuple[str, str]) -> None:
    """BuildKit builds stages with the same text once, and the same lock is the same layer."""
    one, other = (stages(target) for target in others)
    pins = [{pin.requirement(): pin.name for pin in target_pins(target) if pin.size >= ALONE} for target in others]
    common = {f"wheel-{name}" for text, name in pins[0].items() if text in pins[1]}
    assert len(common) >= 3
    for stage in common:
        assert one[stage] == other[stage], stage


def test_every_large_wheel_of_the_catalogue_has_one_stage_text() -> None:
    """Also where another version of it is in another target: the text follows from the pin and the base alone."""
    texts: dict[tuple[str, str], str] = {}
    for target in WITH_WHEELS:
        built, base = stages(target), model.load(target).base
        for one in target_pins(target):
            if one.size >= ALONE:
                text = built[f"wheel-{one.name}"]
                assert texts.setdefault((base, one.requirement()), text) == text


def test_an_image_whose_base_holds_the_framework_has_no_wheel_layers() -> None:
    spec = model.load("xla-nightly")
    assert spec.framework_in_base and dockerfile.wheels(spec) == []
