"""Define the recipe of an image: one JSON document with every fact of the image that its files decide.

A recipe follows from a target or a repository, and from its lock, for one platform and one package index. It needs
neither to be read. What a host adds when it builds the image, such as the digest of the base and the commit, is in
:class:`trainyard.image.plan.Plan`.
"""

from __future__ import annotations

import datetime
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field


class _Part(BaseModel):
    """Refuse unknown keys and conversions, and do not change."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, populate_by_name=True)


class Pin(_Part):
    """Name a distribution that is installed.

    Attributes:
        name: canonical.
        sha256: of the files that are accepted, hexadecimal.
        size: bytes of the file, packed; 0 if its index does not say.
    """

    name: str
    version: str
    sha256: tuple[str, ...]
    size: int


class Layer(_Part):
    """Describe a layer of wheels.

    Attributes:
        stage: of the Dockerfile.
        index: whether a wheel may come from the package index of the framework instead of the default one.
        private: whether a wheel may come from an index of the user.
    """

    stage: str
    index: bool
    private: bool
    pins: tuple[Pin, ...]


class Base(_Part):
    """Describe the base image.

    Attributes:
        name: in images/bases.yaml.
        reference: without the digest that a registry gives it, unless the lock has one.
        python: minor version of its Python, as in ``3.13``.
        packages: canonical name -> version of the Python packages of a base that holds the framework; else empty.
        interpreter: path of its Python, ``site``: of its packages; empty unless it holds the framework.
    """

    name: str
    reference: str
    python: str
    packages: dict[str, str]
    interpreter: str
    site: str


class Framework(_Part):
    """Name the framework; ``version`` is that of the tag, ``packages`` maps its packages to their versions."""

    name: str
    version: str
    packages: dict[str, str]


class Accelerator(_Part):
    """Say what the image computes on.

    Attributes:
        kind: as in image.yaml.
        cuda: version of CUDA, ``driver``: least version of the driver, ``gpus``: capabilities with code, as
            TORCH_CUDA_ARCH_LIST has them. Empty where they are not known.
    """

    kind: Literal["none", "nvidia", "tpu"]
    cuda: str
    driver: str
    gpus: str


class Training(_Part):
    """Train a trainer of the catalogue; ``accuracy`` is a fraction of 1."""

    kind: Literal["training"] = "training"
    trainer: str
    accuracy: float
    epochs: int


class Command(_Part):
    """Run the user's command.

    Attributes:
        args: added to it; None: there is no ``smoke``, and it is only started.
        data: whether it has a folder of the repository at /data.
        expect: regular expression that a line of the output matches.
        seconds: a run that is alive after this time passes; None: it has to end with status 0.
        resume: it saves on SIGTERM and continues.
        timeout: seconds that a run may take.
    """

    kind: Literal["command"] = "command"
    args: tuple[str, ...] | None
    data: bool
    expect: str | None
    seconds: int | None
    resume: bool
    timeout: int


class Budget(_Part):
    """Limit the size of all layers, unpacked, in bytes; ``enforced``: whether a larger image is refused."""

    size: int
    enforced: bool


class End(_Part):
    """Name the last day on which a part of the image is supported."""

    what: str
    day: datetime.date


class Recipe(_Part):
    """Describe an image for one platform and one package index.

    Attributes:
        schema: number of the form of this document.
        name: of the target, or of the image of a repository; ``extends``: the target that a repository extends.
        tags: those that move: with every image, and with every image of the framework's version.
        day: when the versions of a nightly were chosen, as in 20261121; else empty.
        index: name of the package index that the framework comes from.
        fallback_for: the target in whose place it is built.
        layers: of wheels, lowest first; ``compiled``: source distributions that are compiled for the image.
        system: Debian packages, ``tools``: programs that are no packages.
        environment: variables, with PATH.
        commands: name -> the words that the launcher starts, ``default``: the name that is started without arguments.
        labels: those that files decide; the plan of a build adds the others.
        level: how far the test tests the image: trained, ran, started or environment.
        inputs: name -> SHA-256 of each file that the image is made from.
    """

    schema_: Annotated[Literal[1], Field(alias="schema")] = 1
    name: str
    extends: str
    fallback_for: str
    summary: str
    tags: tuple[str, ...]
    day: str
    platform: str
    platforms: tuple[str, ...]
    index: str
    base: Base
    framework: Framework
    layers: tuple[Layer, ...]
    compiled: tuple[Pin, ...]
    system: tuple[str, ...]
    compiler: bool
    tools: tuple[str, ...]
    environment: dict[str, str]
    commands: dict[str, tuple[str, ...]]
    default: str
    labels: dict[str, str]
    accelerator: Accelerator
    level: str
    test: Annotated[Training | Command, Field(discriminator="kind")]
    budget: Budget
    ends: tuple[End, ...]
    inputs: dict[str, str]

    def text(self) -> str:
        """Return the document in its canonical form."""
        return self.model_dump_json(by_alias=True, indent=2) + "\n"
