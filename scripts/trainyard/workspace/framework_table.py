"""Read frameworks.yaml: which framework a package needs, and which targets have it."""

from __future__ import annotations

from functools import cache, cached_property
from pathlib import Path
from typing import Literal

from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name
from packaging.version import Version
from pydantic import Field, model_validator

from trainyard.spec import yaml_source
from trainyard.spec.yaml_source import Strict

TABLE = Path(__file__).with_name("frameworks.yaml")

Name = Literal["torch", "tensorflow", "jax"]
Device = Literal["cpu", "gpu", "tpu"]


class Framework(Strict):
    """Describe a framework; frameworks.yaml describes the fields."""

    packages: list[str]
    targets: dict[Device, str]
    deciding: dict[str, str] = Field(default_factory=dict)


class Needs(Strict):
    """Say why a package needs a framework."""

    requires: str = ""
    says: str = ""
    source: str

    @model_validator(mode="after")
    def _one_reason(self) -> Needs:
        if bool(self.requires) == bool(self.says):
            raise ValueError("give 'requires' or 'says'")
        return self


class Several(Strict):
    """Describe a package that goes with several frameworks."""

    default: Name | None = None
    since: str = ""
    parts: dict[str, Name] = Field(default_factory=dict)
    source: str

    def excludes_since(self, specifier: SpecifierSet) -> bool:
        """Return whether a requirement allows only versions before :attr:`since`."""
        bounds = ((one.operator, Version(one.version.removesuffix(".*"))) for one in specifier)
        first = Version(self.since)
        return any(
            (version < first and operator in ("<", "<=", "==", "~=")) or (version == first and operator == "<")
            for operator, version in bounds
        )


class Table(Strict):
    """Hold the contents of frameworks.yaml."""

    frameworks: dict[Name, Framework]
    gpu: dict[str, str]
    elsewhere: dict[str, dict[str, str]]
    needs: dict[Name, dict[str, Needs]]
    several: dict[str, Several]

    @cached_property
    def packages(self) -> set[str]:
        """Return the canonical names of the packages that need a framework or go with several."""
        return {*self.several, *(package for packages in self.needs.values() for package in packages)}

    @cached_property
    def foreign(self) -> dict[str, str]:
        """Return canonical name -> what a package is for, which no target is."""
        return {name: what for what, of in self.elsewhere.items() for name in of}

    def needed(self, package: str) -> Name | None:
        """Return the framework that a package is, or always needs; None if there is none."""
        for name, framework in self.frameworks.items():
            if package in framework.packages or package in self.needs[name]:
                return name
        return None

    def of_target(self, framework: str) -> Name:
        """Return the framework of a target from the name in its spec, such as ``torch_xla``."""
        return next(name for name, one in self.frameworks.items() if canonicalize_name(framework) in one.packages)


@cache
def table() -> Table:
    """Return the contents of frameworks.yaml."""
    return Table.model_validate(yaml_source.plain(yaml_source.read(TABLE)))
