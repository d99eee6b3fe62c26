"""Numbered mutants of an image: a seed and a number give the same mutant again."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Literal, TypeVar

from tests.mutations import configuration, files, instructions, locks
from tests.mutations.files import FileFault
from tests.mutations.layout import Draft, SavedImage
from tests.mutations.locks import LockFault
from trainyard.common.errors import StepFailed
from trainyard.spec.lock import Lock

T = TypeVar("T")
F = TypeVar("F")

Family = Literal["configuration", "layer", "squashed", "instruction", "lock"]

_FAMILIES: dict[str, Family] = {
    "C": "configuration", "L": "layer", "S": "squashed", "I": "instruction", "K": "lock"
}  # fmt: skip

#: The families of twenty mutants that follow each other. Of two layer mutants, one is made in a squashed image, too.
CYCLE = "CLLSCLLSICLLSCLLSICK"

#: Bytes of the largest layer that is made anew, unpacked. Changes of larger ones are in a layer on top.
REWRITTEN = 300_000_000

#: How many layer mutants there are before each squashed one in CYCLE.
_BEFORE = 2


@dataclass(frozen=True)
class Mutant:
    """An image, or a target, with one fault.

    Attributes:
        what: one line about the fault, and how it was made.
        places: words, of which a finding that concerns it has one.
        draft: the image; None if the image is the original.
        lock: what differs in a copy of the target's folder; None if it is the original.
    """

    number: int
    family: Family
    kind: str
    what: str
    places: tuple[str, ...]
    draft: Draft | None = None
    lock: LockFault | None = None


@dataclass(frozen=True)
class Source:
    """What mutants are made of.

    Attributes:
        folder: of the target.
        lock: of the target, ``part``: what of it the image was made from.
    """

    image: SavedImage
    folder: Path
    lock: Lock
    part: locks.Part


def family(number: int) -> Family:
    """The family of a mutant by its number, from 1."""
    return _FAMILIES[CYCLE[(number - 1) % len(CYCLE)]]


def make(source: Source, seed: int, number: int) -> Mutant:
    """A mutant.

    Raises:
        StepFailed: the image has nothing that a fault of its family needs.
    """
    return _MAKERS[family(number)](source, seed, number)


def _first_possible(seed: int, number: int, operators: Sequence[F], attempt: Callable[[Random, F], T]) -> T:
    """What the operator of a mutant makes; if the image has nothing that it needs, the next one.

    The mutants of a family use all operators, in a random order, before they use one again.
    """
    kind = family(number)
    before = sum(family(one) == kind for one in range(1, number))
    order = Random(f"{seed} {kind} {before // len(operators)}").sample(operators, len(operators))
    at = before % len(operators)
    problem = StepFailed(f"no fault of the family {kind} can be made")
    for operator in (*order[at:], *order[:at]):
        try:
            return attempt(Random(f"{seed} {number}"), operator)
        except StepFailed as error:
            problem = error
    raise problem


def _configuration(source: Source, seed: int, number: int) -> Mutant:
    fault = _first_possible(
        seed, number, configuration.OPERATORS, lambda rng, operator: operator(rng, source.image.config)
    )
    assert fault.config != source.image.config, fault.what
    draft = source.image.configured(fault.config)
    return Mutant(number, "configuration", fault.kind, fault.what, fault.places, draft)


def _file_fault(source: Source, seed: int, number: int) -> FileFault:
    fault = _first_possible(seed, number, files.OPERATORS, lambda rng, operator: operator(rng, source.image))
    assert source.image.differs(fault.change), fault.what
    return fault


def _layer(source: Source, seed: int, number: int) -> Mutant:
    image, fault = source.image, _file_fault(source, seed, number)
    others = (entry for layer in image.layers for entry in layer.entries if entry.layer != fault.layer)
    elsewhere = any(fault.change.drops(entry.path) for entry in others)
    small = image.layers[fault.layer].size <= REWRITTEN
    if small and not elsewhere and Random(f"{seed} {number} where").random() < 0.6:
        draft, where = image.rewritten(fault.layer, fault.change), f"in layer {fault.layer + 1}"
    else:
        created_by = "COPY . / # buildkit"
        draft, where = image.inserted(len(image.layers), fault.change, created_by), "in a layer on top"
    return Mutant(number, "layer", fault.kind, f"{fault.what}, {where}", fault.places, draft)


def _squashed(source: Source, seed: int, number: int) -> Mutant:
    """The fault of one of the layer mutants before, in an image of one layer."""
    before = [one for one in range(number - 1, 0, -1) if family(one) == "layer"][:_BEFORE]
    fault = _file_fault(source, seed, Random(f"{seed} {number}").choice(before))
    draft = source.image.squashed(fault.change)
    return Mutant(number, "squashed", fault.kind, f"{fault.what}, squashed", fault.places, draft)


def _instruction(source: Source, seed: int, number: int) -> Mutant:
    image = source.image
    found = _first_possible(seed, number, instructions.OPERATORS, lambda rng, operator: operator(rng, image))
    if found.change is None:
        assert found.config not in (None, image.config), found.created_by
        return Mutant(
            number, "instruction", found.kind, found.created_by, found.places, image.configured(found.config or {})
        )
    assert image.differs(found.change), found.created_by
    position = Random(f"{seed} {number} where").randint(found.above + 1, len(image.layers))
    draft = image.inserted(position, found.change, found.created_by)
    what = f"{found.created_by.removesuffix(' # buildkit')}, above layer {position}"
    return Mutant(number, "instruction", found.kind, what, found.places, draft)


def _lock(source: Source, seed: int, number: int) -> Mutant:
    kinds = tuple(locks.OPERATORS)
    fault = _first_possible(
        seed, number, kinds, lambda rng, kind: locks.lock_fault(rng, source.lock, source.part, kind)
    )
    return Mutant(number, "lock", fault.kind, fault.what, fault.places, lock=fault)


_MAKERS: dict[Family, Callable[[Source, int, int], Mutant]] = {
    "configuration": _configuration, "layer": _layer, "squashed": _squashed, "instruction": _instruction, "lock": _lock
}  # fmt: skip
