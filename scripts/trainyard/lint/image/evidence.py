"""What the rules for images look at."""

from __future__ import annotations

import datetime
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from packaging.utils import canonicalize_name

from trainyard.lint.image.expected import Expected
from trainyard.lint.waivers import Waiver, today
from trainyard.oci.documents import Configured
from trainyard.oci.layers import Layer, Stored
from trainyard.oci.probe_runner import Distribution, ProbeResult
from trainyard.spec import naming
from trainyard.spec.architectures import ARCHITECTURES, Architecture
from trainyard.spec.model import RepositorySpec, Spec
from trainyard.spec.workspace import FOLDER


@dataclass(frozen=True)
class Evidence(Configured):
    """All that is known about an image; rules look at nothing else.

    Attributes:
        reference: how the image was named, for messages.
        tags: the engine's names for the same digest.
        stored: configuration and layers.
        inside: what the image's Python reports.
        spec: what the image must be; None for any other image, for which only the rules about ``image`` apply.
        build: what ``trainyard dev build`` recorded for this digest; None if it was built elsewhere.
        inputs: hash of the files of its spec (:func:`trainyard.image.plan.content_hash`); empty if it is unknown.
        changed: names of those of its files that are not what they were when it was built, as far as that is known.
        expected: what it must hold; None if no build of its spec is known.
        waivers: findings that are accepted until a date, ``day``: the day that they are compared with.
    """

    spec: Spec | None
    reference: str
    tags: tuple[str, ...]
    stored: Stored
    inside: ProbeResult
    build: Mapping[str, Any] | None
    inputs: str = ""
    changed: tuple[str, ...] = ()
    expected: Expected | None = None
    waivers: tuple[Waiver, ...] = ()
    day: datetime.date = field(default_factory=today)

    def _configuration(self) -> dict[str, Any]:
        return self.stored.config

    @property
    def index(self) -> str:
        """Name of the framework's index, by the image's label; the spec's if the label has another value."""
        label = self.labels.get(f"{naming.LABELS}.index", "")
        if self.spec is None:
            return label or "default"
        return label if label in ("default", self.spec.framework.index) else self.spec.framework.index

    @property
    def fell_back(self) -> bool:
        """Whether the framework came from the default index because the spec's was unreachable."""
        return self.spec is not None and self.index != self.spec.framework.index

    @property
    def architecture(self) -> Architecture | None:
        """The architecture that the configuration names; None of one that Trainyard has no name for."""
        return ARCHITECTURES.get(str(self.stored.config.get("architecture")))

    @property
    def target(self) -> str:
        """Name of the target; empty without a spec."""
        return self.spec.target if self.spec else ""

    @property
    def required_spec(self) -> Spec:
        """The spec, for rules about targets: they are not applied to an image without one."""
        assert self.spec is not None
        return self.spec

    @property
    def package_remediation(self) -> str:
        """What to do about packages that are not what they must be."""
        if self.spec is None:
            return "correct the versions that the image is built from"
        commands = f"run '{self.spec.command('lock')}' and '{self.spec.command('dev build')}'"
        return f"correct the pins in {self.spec.where}, then {commands}"

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
        return self.spec.locked(self.index).versions if self.spec else {}

    @cached_property
    def installed(self) -> dict[str, list[Distribution]]:
        """Canonical name -> the distributions of that name: one, unless something is wrong."""
        found: dict[str, list[Distribution]] = {}
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
        contents = self.spec.base_contents if self.spec else None
        return contents is not None and path.startswith(contents.site)

    def of_workspace(self, path: str) -> bool:
        """Whether a path is in the folder of the user's code."""
        return isinstance(self.spec, RepositorySpec) and path.startswith(f"{FOLDER}/")

    @cached_property
    def recorded(self) -> dict[str, str]:
        """Path -> SHA-256 of what the locked wheels brought, as they themselves say; the base's, where it has some."""
        found: dict[str, str] = {}
        in_base = self.spec is None or self.spec.framework_in_base
        for layer in self.stored.layers:
            if layer.kind == "copied" or in_base:
                found |= layer.contents.records
        return found

    def publicly_known(self, path: str, sha256: str) -> bool:
        """Whether a file is, byte for byte, part of a locked wheel, which anyone can download."""
        return self.recorded.get(path) == sha256
