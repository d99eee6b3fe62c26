"""Choose the builder that images are built on: that of the engine, or another one of ``docker buildx``.

``--builder`` names it; else it is the one that buildx itself uses (``BUILDX_BUILDER``, ``docker buildx use``).
A builder has nodes, possibly on several machines, and buildx chooses the node that runs programs of the image's
platform (https://docs.docker.com/build/building/multi-platform/#multiple-native-nodes). BuildKit outside of the engine
has neither the images nor the build cache of the engine: base images that are at no registry are sent to it, and the
images that it builds are loaded into the engine.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from trainyard.common import settings
from trainyard.common.context import Context
from trainyard.common.docker_engine import Engine
from trainyard.common.errors import StepFailed, UserError, nearest
from trainyard.spec import architectures
from trainyard.spec.architectures import PLATFORMS, Architecture


@dataclass(frozen=True)
class Node:
    """Describe a BuildKit daemon of a builder.

    Attributes:
        platforms: that it runs programs for, those of ``given`` first; empty if it does not say.
        given: those that ``docker buildx create --platform`` gave it.
        error: why it cannot be used; empty if it can.
    """

    name: str
    platforms: tuple[str, ...] = ()
    given: tuple[str, ...] = ()
    error: str = ""


@dataclass(frozen=True)
class Builder:
    """Describe a builder of ``docker buildx``, by which images come into ``engine``."""

    name: str
    driver: str
    nodes: tuple[Node, ...]
    engine: Engine = field(default_factory=Engine, repr=False, compare=False)

    @property
    def in_engine(self) -> bool:
        """Return whether it is the engine's BuildKit, which has the engine's images."""
        return self.driver == "docker"

    @property
    def option(self) -> str:
        """Return the option of ``docker buildx`` that selects it."""
        return f"--builder={self.name}"

    def node(self, wanted: Architecture) -> Node | None:
        """Return the node that builds for an architecture; None if none of them runs its programs.

        buildx prefers nodes that were given the platform:
        https://github.com/docker/buildx/blob/v0.13.1/build/driver.go
        """
        usable = [node for node in self.nodes if not node.error]
        given = [node for node in usable if wanted.platform in node.given]
        able = [node for node in usable if wanted.platform in node.platforms or not node.platforms]
        return next(iter(given + able), None)

    def machine(self, wanted: Architecture) -> Architecture:
        """Return the architecture of the machine that builds for another: what ``BUILDPLATFORM`` is there."""
        if self.in_engine:
            return architectures.of_engine(self.engine)
        node = self.node(wanted)
        native = next((name for name in (node.platforms if node else ()) if name in PLATFORMS), None)
        return PLATFORMS[native] if native else architectures.of_engine(self.engine)

    def require(self, wanted: Architecture) -> None:
        """Raise a :class:`UserError` if it does not run programs for an architecture."""
        if self.in_engine:
            self.engine.require_emulation(wanted.platform)
        elif self.node(wanted) is None:
            errors = "".join(f" (node {node.name}: {node.error})" for node in self.nodes if node.error)
            append = f"docker buildx create --append --name {self.name} --platform {wanted.platform} <endpoint>"
            raise UserError(
                f"builder {self.name} runs no programs for {wanted.platform}{errors}: run '{append}' to add a machine "
                "that does"
            )


def current(context: Context) -> Builder:
    """Return the builder that images are built on. It is started if it is not running.

    Raises:
        UserError: there is no such builder, or it is that of another engine.
        StepFailed: it cannot be started.
    """
    engine, name = context.engine, context.builder
    try:
        chosen = _inspect(engine, name)
    except StepFailed as error:
        if "Podman" in str(engine.client.version().get("Components")):
            raise UserError(
                f"the engine is Podman, which has no BuildKit: use Docker Engine 24 or later ({error})"
            ) from None
        raise StepFailed(f"{error}; to build in the engine, give '--builder {engine.docker_context}'") from None
    if chosen.in_engine and chosen.name != (own := engine.docker_context):
        raise UserError(f"{_given(chosen.name, name)}: it builds in another Docker context: give '--builder {own}'")
    return chosen


def _inspect(engine: Engine, name: str) -> Builder:
    """Return the builder of a name; without one, the one that buildx uses. It raises what :func:`current` does."""
    try:
        return parse(engine.inspect_builder(name), engine)
    except StepFailed as error:
        unknown = re.search(r'no builder "(.*)" found', str(error))
        if not unknown:
            raise
    # Lines of nodes are indented, the first line is the heading.
    names = [line.removesuffix("*") for line in re.findall(r"(?m)^(\S+)", engine.buildx("ls"))][1:]
    raise UserError(
        f"{_given(unknown[1], name)}: there is no such builder; 'docker buildx ls' lists {', '.join(names)}"
        f"{nearest(unknown[1], names)}"
    )


def _given(name: str, option: str) -> str:
    """Return how the user gave the name of a builder; ``option``: what ``--builder`` gives."""
    if option:
        return f"'--builder {name}'"
    return f"BUILDX_BUILDER={name}" if settings.standard_variable("BUILDX_BUILDER") else f"builder {name}"


def parse(inspected: str, engine: Engine) -> Builder:
    """Return the builder in what ``docker buildx inspect`` prints, or raise :class:`StepFailed` with its error."""
    about, _, nodes = inspected.partition("\nNodes:\n")
    described = Builder(
        name=_value(about, "Name"),
        driver=_value(about, "Driver"),
        nodes=tuple(_node(text) for text in re.split(r"(?m)^(?=Name:)", nodes) if text.strip()),
        engine=engine,
    )
    if error := _value(about, "Error"):
        raise StepFailed(f"builder {described.name} cannot be used: {error}")
    return described


def _node(text: str) -> Node:
    platforms = re.findall(r"[^\s,]+", _value(text, "Platforms"))
    return Node(
        name=_value(text, "Name"),
        platforms=tuple(platform.removesuffix("*") for platform in platforms),
        given=tuple(platform.removesuffix("*") for platform in platforms if platform.endswith("*")),
        error=_value(text, "Error"),
    )


def _value(text: str, name: str) -> str:
    value = re.search(rf"(?m)^{name}:[ \t]+(.*)$", text)
    return value[1].strip() if value else ""
