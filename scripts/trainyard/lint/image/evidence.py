"""Describe what the rules for images look at, and what the image must hold."""

from __future__ import annotations

import datetime
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from packaging.utils import canonicalize_name

from trainyard import recipe as recipes
from trainyard.common.rule_engine import Severity
from trainyard.lint.waivers import Waiver, today
from trainyard.oci import layer_contents
from trainyard.oci.documents import Configured
from trainyard.oci.layer_contents import Contents, Item
from trainyard.oci.layers import Layer, Stored
from trainyard.oci.probe_runner import Distribution, ProbeResult
from trainyard.recipe import Recipe
from trainyard.spec import naming, state
from trainyard.spec.architectures import ARCHITECTURES, Architecture
from trainyard.spec.naming import FOLDER
from trainyard.spec.state import BuildResult


@dataclass(frozen=True)
class Expected:
    """Hold the layers of a build, which may be that of the image or another one of the same recipe, made on this host.

    Attributes:
        layers: diff id -> contents, bottom first.
    """

    layers: Mapping[str, Contents]

    def entries(self) -> dict[str, tuple[Item, ...]]:
        """Return path -> what the layers hold there, bottom first."""
        return layer_contents.union(self.layers.values())


def expected(recipe: Recipe, digest: str, folder: Path) -> Expected | None:
    """Return what the image ``digest`` of a recipe must hold; None if this host has not built it or lost its layers.

    Args:
        folder: the state folder.
    """
    kept = recipe.kept(folder)
    record = state.recall(kept, "build", digest)
    if not record or not record.get("layers"):
        record = next((build for build in state.builds(kept) if build.get("layers") and _is_of(recipe, build)), None)
    if record is None:
        return None
    recalled = {diff_id: layer_contents.recall(folder, diff_id) for diff_id in record["layers"]}
    known = {diff_id: contents for diff_id, contents in recalled.items() if contents is not None}
    return Expected(known) if len(known) == len(recalled) else None


def _is_of(recipe: Recipe, build: BuildResult) -> bool:
    """Return whether a build was one of a recipe, maybe on a base with another digest; False if its own is unknown."""
    try:
        made_of = recipes.parse(build["recipe"])
    except (KeyError, ValueError):  # another version of Trainyard recorded it
        return False
    return not any(recipes.differences(made_of, recipe))


@dataclass(frozen=True)
class Evidence(Configured):
    """Hold all that is known about an image; rules look at nothing else.

    Attributes:
        reference: how the image was named, for messages.
        tags: the engine's names for the same digest.
        stored: configuration and layers.
        inside: what the image's Python reports.
        recipe: what the image must be; None for any other image, for which only the rules about ``image`` apply.
        expected: what it must hold; None if no build of its recipe is known.
        waivers: findings that are accepted until a date, ``day``: the day that they are compared with.
    """

    recipe: Recipe | None
    reference: str
    tags: tuple[str, ...]
    stored: Stored
    inside: ProbeResult
    expected: Expected | None = None
    waivers: tuple[Waiver, ...] = ()
    day: datetime.date = field(default_factory=today)

    def _configuration(self) -> dict[str, Any]:
        return self.stored.config

    @property
    def index(self) -> str:
        """Return the name of the framework's index; without a recipe by the image's label."""
        return self.recipe.index if self.recipe else self.labels.get(f"{naming.LABELS}.index") or "default"

    @property
    def fell_back(self) -> bool:
        """Return whether the framework came from the default index because its own was unreachable."""
        return self.recipe is not None and self.index != self.recipe.framework.index

    @property
    def architecture(self) -> Architecture | None:
        """Return the architecture that the configuration names; None of one that Trainyard has no name for."""
        return ARCHITECTURES.get(str(self.stored.config.get("architecture")))

    @property
    def target(self) -> str:
        """Return the name of the target; empty without a recipe."""
        return self.recipe.name if self.recipe else ""

    @property
    def base_is_debian(self) -> bool:
        """Return whether the base is Debian with a Python and nothing else; others may hold anything."""
        return self.recipe is not None and not self.recipe.base.packages

    @property
    def of_several_wheels(self) -> Severity:
        """Return the severity of a file that several wheels bring: a user may choose those, and the last prevails."""
        return Severity.NOTE if self.recipe and self.recipe.is_repository else Severity.REFUSE

    @property
    def required_recipe(self) -> Recipe:
        """Return the recipe, for rules about targets: they are not applied to an image without one."""
        assert self.recipe is not None
        return self.recipe

    @property
    def package_remediation(self) -> str:
        """Return what to do about packages that are not what they must be."""
        if self.recipe is None:
            return "correct the versions that the image is built from"
        commands = f"run '{self.recipe.command('lock')}' and '{self.recipe.command('dev build')}'"
        return f"correct the pins in {self.recipe.source}, then {commands}"

    @property
    def ours(self) -> list[Layer]:
        return [layer for layer in self.stored.layers if layer.ours]

    @property
    def size(self) -> int:
        """Return bytes of all files in all layers: what the image takes on a disk, unpacked."""
        return sum(layer.contents.size for layer in self.stored.layers)

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
        site = self.recipe.base.site if self.recipe else ""
        return bool(site) and path.startswith(site)

    def of_workspace(self, path: str) -> bool:
        """Return whether a path is in the folder of the user's code."""
        return self.recipe is not None and self.recipe.has_code and path.startswith(f"{FOLDER}/")

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
