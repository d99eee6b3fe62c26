"""Provide the code of a repository, as ``push --code-only`` puts it into an image that is at a registry."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from trainyard.common.errors import UserError
from trainyard.image import build_backends, facts, recipes
from trainyard.recipe import Named
from trainyard.release.code_push import Commit, Layer
from trainyard.spec import pylock
from trainyard.spec.architectures import Architecture
from trainyard.spec.model import RepositorySpec, Spec
from trainyard.spec.naming import SETTINGS
from trainyard.workspace import check, code_layer


@dataclass(frozen=True)
class RepositoryCode:
    """Implement :class:`trainyard.release.code_push.Code` for a repository on this host."""

    spec: RepositorySpec

    @cached_property
    def named(self) -> Named:
        return recipes.named(self.spec)

    @property
    def architecture(self) -> Architecture:
        return self.spec.architecture

    @property
    def folder(self) -> Path:
        return self.spec.folder

    @property
    def kept(self) -> Path:
        return self.spec.context.state / self.spec.target

    @property
    def lock(self) -> str:
        if not self.spec.lock_file.is_file():
            raise UserError(
                f"no {self.spec.lock_file.name} beside {self.spec.where}: run 'trainyard image' and 'trainyard push'"
            )
        return pylock.digest(self.spec.lock_file)

    @property
    def config(self) -> str:
        return code_layer.configuration(self.spec.workspace)

    @property
    def configured(self) -> str:
        own = self.spec.workspace.compiles_own
        return f"{SETTINGS} or a source of the extension modules" if own else SETTINGS

    def write(self, path: Path) -> Layer:
        return code_layer.write(self.spec.workspace, path, self.spec.site, check.require(self.spec))

    def check_lock(self) -> None:
        # It takes about as long as the uploads, and is imported while the registry answers.
        from trainyard.image import lock_origin

        if not lock_origin.is_current(self.spec):
            changed = f"the requirements of {self.spec.where} changed since {self.spec.lock_file.name} was written"
            raise UserError(f"{changed}: run 'trainyard image' and 'trainyard push'")

    def commit(self) -> Commit:
        root = self.spec.workspace.root
        return Commit(facts.revision(root), facts.source_date_epoch(root))


def of(spec: Spec) -> RepositoryCode:
    """Return the code of a repository; raise a UserError if ``spec`` is of a target of the catalogue."""
    refusal = f"{spec.target} is a target of the catalogue: --code-only is for a folder with a trainyard.yaml"
    return RepositoryCode(build_backends.asked(spec.repository(refusal)))
