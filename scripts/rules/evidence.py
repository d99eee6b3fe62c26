"""What is known about an image when it is held against the rules of `make verify`."""

from __future__ import annotations

import datetime
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from packaging.utils import canonicalize_name

from scripts import locks, plan
from scripts.spec import Spec
from scripts.stored.layers import Layer, Stored
from scripts.stored.settings import Configured
from scripts.waivers import Waiver, today


@dataclass(frozen=True)
class Package:
    """A distribution that Python finds inside the image; ``bytes`` on disk with its byte code."""

    name: str
    version: str
    folder: str
    requires: tuple[str, ...]
    bytes: int


@dataclass(frozen=True)
class Inside:
    """What scripts/stored/probe.py saw inside: ``texts`` maps a file's name to its content, where it exists."""

    python: str
    packages: tuple[Package, ...]
    sources: int
    missing: tuple[str, ...]
    stale: tuple[str, ...]
    texts: dict[str, str]


@dataclass(frozen=True)
class Evidence(Configured):
    """All that is known about an image; rules look at nothing else.

    Attributes:
        reference: how the image was named, for messages.
        tags: the engine's names for the same digest.
        stored: configuration and layers.
        spec: what it must be; None for an image of somebody's own, which is held against general rules only.
        build: facts that `make build` recorded for this digest, or None if it was built elsewhere.
        waivers: findings that somebody answers for; ``day``: the day that they are held against.
    """

    spec: Spec | None
    reference: str
    tags: tuple[str, ...]
    stored: Stored
    inside: Inside
    build: dict[str, Any] | None
    waivers: tuple[Waiver, ...] = ()
    day: datetime.date = field(default_factory=today)

    def _configuration(self) -> dict[str, Any]:
        return self.stored.config

    @property
    def index(self) -> str:
        """Name of the index the framework came from, by the image's label; the spec's if the label says nonsense."""
        label = self.labels.get(f"{plan.LABELS}.index", "")
        if self.spec is None:
            return label or "default"
        return label if label in ("default", self.spec.framework.index) else self.spec.framework.index

    @property
    def fell_back(self) -> bool:
        """Whether the framework came from the default index because the spec's did not answer."""
        return self.spec is not None and self.index != self.spec.framework.index

    @property
    def target(self) -> str:
        """Name of the target; empty without a spec."""
        return self.spec.target if self.spec else ""

    @property
    def mend(self) -> str:
        """What to do about packages that are not what they must be."""
        if self.spec is None:
            return "correct the versions that the image is built from"
        return f"correct the pins in {self.spec.where}, then make lock and make build"

    @property
    def ours(self) -> list[Layer]:
        return [layer for layer in self.stored.layers if layer.ours]

    @property
    def size(self) -> int:
        """Bytes of all files in all layers: what the image takes on a disk, unpacked."""
        return sum(layer.contents.size for layer in self.stored.layers)

    @cached_property
    def locked(self) -> dict[str, str]:
        """Canonical name -> version of what the locks say; nothing without a spec."""
        return locks.installed(self.spec, self.index) if self.spec else {}

    @cached_property
    def installed(self) -> dict[str, list[Package]]:
        """Canonical name -> the distributions of that name: one, unless something is wrong."""
        found: dict[str, list[Package]] = {}
        for package in self.inside.packages:
            found.setdefault(canonicalize_name(package.name), []).append(package)
        return found

    @cached_property
    def versions(self) -> dict[str, str]:
        """Canonical name -> version of what an import finds."""
        return {name: packages[0].version for name, packages in self.installed.items()}

    def version(self, name: str) -> str | None:
        """Version of an installed distribution, or None."""
        return self.versions.get(canonicalize_name(name))

    def of_base(self, path: str) -> bool:
        """Whether a path is where a base that holds the framework keeps its packages."""
        held = self.spec.held if self.spec else None
        return held is not None and path.startswith(held.site)

    @cached_property
    def recorded(self) -> dict[str, str]:
        """Path -> SHA-256 of what the locked wheels brought, as they themselves say; the base's, where it has some."""
        found: dict[str, str] = {}
        in_base = self.spec is None or self.spec.on_framework
        for layer in self.stored.layers:
            if layer.kind == "copied" or in_base:
                found |= layer.contents.records
        return found

    def publicly_known(self, path: str, sha256: str) -> bool:
        """Whether a file is, byte for byte, part of a locked wheel: what anyone can download is nobody's secret."""
        return self.recorded.get(path) == sha256
