"""Define the plan of a build: the recipe of the image, and what only the build needs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from pydantic import BaseModel

from trainyard.common.context import Context
from trainyard.oci import builder
from trainyard.recipe import Built, Recipe
from trainyard.spec.architectures import Architecture


class Sources(BaseModel):
    """Name what a host builds an image from besides the files of its spec.

    Attributes:
        index: name of the package index, ``index_url``: its address; empty for the default index.
        base: reference of the base image, ``base_digest``: its digest where a registry gave one.
        build_base: reference of the image in which wheels are installed; the base if empty.
        pythons: name of a Debian base, for whose Python shared layers have byte code -> reference of its image.
        notes: every fallback that was taken, a sentence each.
    """

    index: str
    index_url: str
    base: str
    base_digest: str
    build_base: str
    pythons: dict[str, str]
    notes: list[str]


@dataclass(frozen=True)
class Plan:
    """Describe how one image is built.

    Attributes:
        recipe: with what this host adds; the file ``recipe.json`` in the context ``recipe`` has it.
        dockerfile: its path.
        contexts: name -> folder of the named build contexts.
        arguments: of the Dockerfile.
        secrets: id -> text of the secrets of the Dockerfile, ``index_secrets``: options of BuildKit for those of the
            framework's package index.
        folder: of the spec.
        sets_folder: whether the working directory is set in a copy of the base, not by the Dockerfile.
    """

    recipe: Recipe
    sources: Sources
    dockerfile: Path
    contexts: Mapping[str, str]
    arguments: Mapping[str, str]
    secrets: Mapping[str, str]
    index_secrets: tuple[str, ...]
    folder: Path
    sets_folder: bool
    context: Context

    @property
    def built(self) -> Built:
        """Return what this host adds to the recipe."""
        assert self.recipe.built is not None
        return self.recipe.built

    @property
    def kept(self) -> Path:
        """Return the folder of what this host keeps about the image."""
        return self.recipe.kept(self.context.state)

    def images(self) -> dict[str, Architecture]:
        """Return reference of each image that the build starts from -> its architecture.

        That is the building machine's, and for the base that of the image.
        """
        sources, architecture = self.sources, self.recipe.architecture
        machine = builder.current(self.context).machine(architecture)
        started = {sources.build_base or sources.base, *sources.pythons.values()} - {"tools"}
        return dict.fromkeys(started, machine) | {sources.base: architecture}
