"""Describe what the rules for images look at, and what the image must hold."""

from __future__ import annotations

import datetime
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from packaging.utils import canonicalize_name

from trainyard.common.rule_engine import Severity
from trainyard.image import plan
from trainyard.lint.waivers import Waiver, today
from trainyard.oci import layer_contents
from trainyard.oci.documents import Configured
from trainyard.oci.layer_contents import Contents, Item
from trainyard.oci.layers import Layer, Stored
from trainyard.oci.probe_runner import Distribution, ProbeResult
from trainyard.spec import naming, state
from trainyard.spec.architectures import ARCHITECTURES, Architecture
from trainyard.spec.catalog import debian_bases
from trainyard.spec.model import RepositorySpec, Spec
from trainyard.spec.state import BuildResult
from trainyard.spec.workspace import FOLDER


@dataclass(frozen=True)
class Expected:
    """Hold the layers of a build, which may be that of the image or another one of the same spec, made on this host.

    Attributes:
        layers: diff id -> contents, bottom first.
    """

    layers: Mapping[str, Contents]

    def entries(self) -> dict[str, tuple[Item, ...]]:
        """Return path -> what the layers hold there, bottom first."""
        return layer_contents.union(self.layers.values())


def expected(spec: Spec, digest: str) -> Expected | None:
    """Return what the image ``digest`` of a spec must hold.

    None if this host has no build of the spec as it is now, with its locks and code, or could not read its layers.
    """
    record = state.recall(spec.kept, "build", digest)
    if not record or not record.get("layers"):
        record = next((build for build in state.builds(spec.kept) if _of_same_inputs(spec, build)), None)
    if record is None:
        return None
    recalled = {diff_id: layer_contents.recall(spec.context.state, diff_id) for diff_id in record["layers"]}
    known = {diff_id: contents for diff_id, contents in recalled.items() if contents is not None}
    return Expected(known) if len(known) == len(recalled) else None


def _of_same_inputs(spec: Spec, build: BuildResult) -> bool:
    made_of = plan.content_hash(spec, build["index"], build["base"].partition("@")[2] or build["base"])
    return bool(build.get("layers")) and naming.day_and_hash(build["tag"])[1] == made_of


@dataclass(frozen=True)
class Evidence(Configured):
    """Hold all that is known about an image; rules look at nothing else.

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
        """Return the name of the framework's index, by the image's label; the spec's if the label has another value."""
        label = self.labels.get(f"{naming.LABELS}.index", "")
        if self.spec is None:
            return label or "default"
        return label if label in ("default", self.spec.framework.index) else self.spec.framework.index

    @property
    def fell_back(self) -> bool:
        """Return whether the framework came from the default index because the spec's was unreachable."""
        return self.spec is not None and self.index != self.spec.framework.index

    @property
    def architecture(self) -> Architecture | None:
        """Return the architecture that the configuration names; None of one that Trainyard has no name for."""
        return ARCHITECTURES.get(str(self.stored.config.get("architecture")))

    @property
    def target(self) -> str:
        """Return the name of the target; empty without a spec."""
        return self.spec.target if self.spec else ""

    @property
    def base_is_debian(self) -> bool:
        """Return whether the base has Debian's Python and nothing else; others may hold anything."""
        return self.spec is not None and self.spec.base in debian_bases()

    @property
    def of_several_wheels(self) -> Severity:
        """Return the severity of a file that several wheels bring: a user may choose those, and the last prevails."""
        return Severity.NOTE if isinstance(self.spec, RepositorySpec) else Severity.REFUSE

    @property
    def required_spec(self) -> Spec:
        """Return the spec, for rules about targets: they are not applied to an image without one."""
        assert self.spec is not None
        return self.spec

    @property
    def package_remediation(self) -> str:
        """Return what to do about packages that are not what they must be."""
        if self.spec is None:
            return "correct the versions that the image is built from"
        commands = f"run '{self.spec.command('lock')}' and '{self.spec.command('dev build')}'"
        return f"correct the pins in {self.spec.where}, then {commands}"

    @property
    def ours(self) -> list[Layer]:
        return [layer for layer in self.stored.layers if layer.ours]

    @property
    def size(self) -> int:
        """Return bytes of all files in all layers: what the image takes on a disk, unpacked."""
        return sum(layer.contents.size for layer in self.stored.layers)

    @cached_property
    def locked(self) -> dict[str, str]:
        """Return canonical name -> version of what the locks say; nothing without a spec."""
        return self.spec.locked(self.index).versions if self.spec else {}

    @cached_property
    def installed(self) -> dict[str, list[Distribution]]:
        """Return canonical name -> the distributions of that name: one, unless something is wrong."""
        packages: dict[str, list[Distribution]] = {}
        for package in self.inside.packages:
            packages.setdefault(canonicalize_name(package.name), []).append(package)
        return packages

    @cached_property
    def versions(self) -> dict[str, str]:
        """Return canonical name -> version of what an import finds."""
        return {name: packages[0].version for name, packages in self.installed.items()}

    def version(self, name: str) -> str | None:
        """Return the version of an installed distribution, or None."""
        return self.versions.get(canonicalize_name(name))

    def of_base(self, path: str) -> bool:
        """Return whether a path is where a base that holds the framework keeps its packages."""
        contents = self.spec.base_contents if self.spec else None
        return contents is not None and path.startswith(contents.site)

    def of_workspace(self, path: str) -> bool:
        """Return whether a path is in the folder of the user's code."""
        return self.spec is not None and self.spec.has_code and path.startswith(f"{FOLDER}/")

    @cached_property
    def recorded(self) -> dict[str, set[str]]:
        """Return path -> SHA-256 of what the locked wheels, or those of the base, brought, as they themselves say."""
        records: dict[str, set[str]] = {}
        for layer in self.stored.layers:
            if layer.kind == "copied" or not self.base_is_debian:
                for path, listed in layer.contents.records.items():
                    records.setdefault(path, set()).update(listed)
        return records

    def publicly_known(self, path: str, sha256: str) -> bool:
        """Return whether a file is, byte for byte, part of a locked wheel, which anyone can download."""
        return sha256 in self.recorded.get(path, ())
