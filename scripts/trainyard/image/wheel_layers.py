"""Group the wheels of an image into layers: a pure function of its locks.

A layer is a set of wheels, so that the same wheels are the same blob in every image that has the same Python. A large
wheel has a separate layer; the small ones share a few, chosen by their names alone, so that an update of one wheel
changes little else. What a user's repository adds is in separate layers above those that the image shares with its
target.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from trainyard.spec.lock import Pin

#: Bytes of a wheel, packed, from which it has a layer of its own, and how many layers there are of such wheels at most:
#: the largest then. 21 wheels of xla and of torch-tpu are as large (2026-11).
ALONE = 7_200_000
MOST_ALONE = 21

#: Layers of the small wheels: 30 to 40 MB together in the catalogue (2026-11).
SMALL = 4

#: Layers of what a user's repository adds. With 25 of its target and 11 of other things, an image has 40 layers: many
#: engines unpack one after the other, and each takes some time.
ADDED = 4


#: What the names of stages begin with: of one wheel, and of several.
ONE, SEVERAL = "wheel-", "wheels-"


@dataclass(frozen=True)
class WheelLayer:
    """The wheels of one layer.

    Attributes:
        stage: of the Dockerfile: ``wheel-`` and the name of the only wheel, or ``wheels-`` and the name of a group.
        pins: sorted by name.
        index: whether a wheel may come from the index of the spec.
        private: whether a wheel may come from an index of the user or be built from a source of the user.
    """

    stage: str
    pins: tuple[Pin, ...]
    index: bool = False
    private: bool = False

    @property
    def mixed(self) -> bool:
        """Return whether packages without a wheel are built from source; a target's large packages must have wheels."""
        return self.private or self.stage.startswith(SEVERAL)

    @property
    def lock(self) -> str:
        """What the layer is installed from. It has no sizes: the layer depends on names, versions and hashes alone."""
        return "".join(f"{pin.requirement()}\n" for pin in self.pins)


def group(pins: Iterable[Pin], of_index: Iterable[str] = ()) -> list[WheelLayer]:
    """Group pins into layers, lowest first.

    The largest are lowest: images whose frameworks have them in common then have a common stack, which an engine stores
    once.

    Args:
        of_index: names of the packages that may come from another index than the default one.
    """
    every = sorted(pins, key=lambda pin: (-pin.size, pin.name))
    shared = [pin for pin in every if not pin.added]
    added = [pin for pin in every if pin.added]
    alone = [pin for pin in shared if pin.size >= ALONE][:MOST_ALONE]
    small = [pin for pin in shared if pin not in alone]
    own = added if len(added) <= ADDED else added[: ADDED - 1]
    names = {canonicalize_name(Requirement(text).name) for text in of_index}

    def layer(stage: str, members: Sequence[Pin], *, private: bool = False) -> WheelLayer:
        in_order = tuple(sorted(members, key=lambda pin: pin.name))
        return WheelLayer(stage, in_order, any(pin.name in names for pin in members), private)

    found = [layer(f"{ONE}{pin.name}", [pin]) for pin in alone]
    for number in range(SMALL):
        if members := [pin for pin in small if _bucket(pin.name) == number]:
            found.append(layer(f"{SEVERAL}{number + 1}", members))
    found += [layer(f"{ONE}{pin.name}", [pin], private=True) for pin in own]
    if rest := added[len(own) :]:
        found.append(layer(f"{SEVERAL}added", rest, private=True))
    return found


def _bucket(name: str) -> int:
    return hashlib.sha256(name.encode()).digest()[0] % SMALL
