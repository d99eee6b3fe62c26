"""Define the recipe of an image: one JSON document with every fact of the image that its files decide.

A recipe follows from a target or a repository, and from its lock, for one platform and one package index. Whoever
reads it needs neither. It stands in the image as :data:`PATH`, and a label of the image has its digest.
"""

from __future__ import annotations

import datetime
import hashlib
from collections.abc import Iterator, Mapping
from functools import cached_property
from pathlib import Path, PurePath
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from trainyard.common.errors import UserError
from trainyard.common.settings import PREFIX
from trainyard.spec import architectures
from trainyard.spec.architectures import AMD64, PLATFORMS, Architecture
from trainyard.spec.naming import GENERATED, LABELS, NAME, TAG, candidate_tag

#: Name of the file, and where it stands in the image.
FILE = "recipe.json"
PATH = f"/opt/trainyard/{FILE}"

#: The label with the SHA-256 of the document, hexadecimal.
DIGEST = f"{LABELS}.recipe"

_OCI = "org.opencontainers.image"

#: Labels whose values the building host adds.
LABELS_OF_BUILDS = (
    f"{_OCI}.created", f"{_OCI}.revision", TAG, f"{_OCI}.base.name", f"{_OCI}.base.digest"
)  # fmt: skip


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


class Built(_Part):
    """Say what the host that builds the image adds.

    Attributes:
        tag: the immutable tag.
        created: time of the commit, as in 2026-11-20T12:00:00Z; ``revision``: the commit, with ``-dirty`` if files
            differ from it, or ``unknown``.
        base: reference of the base image, with a digest where a registry gave one; ``base_digest``: that, or empty.
        notes: every fallback that was taken, a sentence each.
    """

    tag: str
    created: Annotated[str, Field(pattern=r"^\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ$")]
    revision: Annotated[str, Field(pattern=r"^([0-9a-f]{40,64}(-dirty)?|unknown)$")]
    base: str
    base_digest: str
    notes: tuple[str, ...]


class Layer(_Part):
    """Describe a layer above those of the base.

    Attributes:
        stage: of the Dockerfile.
        instruction: what makes it; ``copied``: a COPY of another stage, above the instructions of the stages below it.
        pins: distributions that are installed in it.
        index: whether a wheel may come from the package index of the framework instead of the default one.
        private: whether a wheel may come from an index of the user.
    """

    stage: str
    instruction: Literal["RUN", "COPY", "ADD", "WORKDIR"]
    copied: bool
    pins: tuple[Pin, ...]
    index: bool
    private: bool


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
    """Name the framework.

    Attributes:
        version: that of the tag.
        packages: canonical name -> version of those that make it up.
        index: name of the package index that they should come from; where it is out of reach, ``Recipe.index`` differs.
    """

    name: str
    version: str
    packages: dict[str, str]
    index: str


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
    """Train a trainer of the catalogue, of a folder of trainers/; ``accuracy`` is a fraction of 1."""

    kind: Literal["training"] = "training"
    package: str
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


class Named(_Part):
    """Name the images of a target or of a repository, for all platforms.

    Attributes:
        name: of the target, or of the image of a repository; ``extends``: the target that a repository extends.
        fallback_for: the target in whose place it is built.
        platforms: as in ``linux/amd64``.
        source: path of image.yaml or trainyard.yaml, for messages.
    """

    name: Annotated[str, Field(pattern=r"^[a-z0-9][a-z0-9._-]*$")]
    extends: str
    fallback_for: str
    platforms: tuple[str, ...]
    source: str

    @property
    def is_repository(self) -> bool:
        """Return whether it is of a user's repository."""
        return bool(self.extends)

    @property
    def architectures(self) -> list[Architecture]:
        """Return the architectures that there are images for."""
        return [PLATFORMS[platform] for platform in self.platforms]

    @property
    def usual(self) -> Architecture:
        """Return the architecture that commands are about unless TRAINYARD_ARCH names another one."""
        return architectures.usual(self.platforms)

    def local_name_for(self, architecture: Architecture) -> str:
        """Return the tag of an image, and the folder of its results, on this host: ``cpu``, and ``cpu-arm64``."""
        return self.name if architecture == AMD64 else f"{self.name}-{architecture.name}"

    def kept_for(self, state: Path, architecture: Architecture) -> Path:
        """Return the folder of what a host keeps about an image, in its state folder."""
        return state / self.local_name_for(architecture)

    def command(self, name: str, architecture: Architecture | None = None) -> str:
        """Return a command for an image, for messages: ``trainyard lock cpu``; ``trainyard lock`` in a repository."""
        other = [f"{PREFIX}ARCH={architecture.name}"] if architecture and architecture != self.usual else []
        source = PurePath(self.source)
        argument = source.stem if source.parent.name == GENERATED else "" if self.is_repository else self.name
        return " ".join(filter(None, [*other, "trainyard", name, argument]))


class Recipe(Named):
    """Describe an image for one platform and one package index.

    Attributes:
        schema: number of the form of this document.
        tags: those that move: with every image, and with every image of the framework's version.
        day: when the versions of a nightly were chosen, as in 20261121; else empty.
        index: name of the package index that the framework comes from.
        layers: lowest first, without those of the base.
        system: Debian packages, ``tools``: programs that are no packages.
        environment: variables, with PATH.
        commands: name -> the words that the launcher starts, ``default``: the name that is started without arguments.
        labels: those that files decide; see :meth:`image_labels`.
        level: how far the test tests the image: trained, ran, started or environment.
        listed: canonical names of the distributions that the target's requirements name; of a repository, its own.
        tried: names of the distributions whose scripts and entry points are tried: all of a target; of a repository,
            those that its target does not have, and all if it has others in other versions.
        inputs: name -> SHA-256 of each file that the image is made from.
        site: folder of its packages, without a leading slash.
    """

    schema_: Annotated[Literal[1], Field(alias="schema")] = 1
    summary: str
    tags: tuple[str, ...]
    day: str
    platform: str
    index: str
    base: Base
    framework: Framework
    layers: tuple[Layer, ...]
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
    listed: tuple[str, ...] = ()
    tried: tuple[str, ...] = ()
    budget: Budget
    ends: tuple[End, ...]
    inputs: dict[str, str]
    site: str
    built: Built | None = None

    def text(self) -> str:
        """Return the document in its canonical form."""
        return self.model_dump_json(by_alias=True, indent=2) + "\n"

    @property
    def architecture(self) -> Architecture:
        """Return the architecture that it is for."""
        return PLATFORMS[self.platform]

    @property
    def local_name(self) -> str:
        """Return the tag of its image, and the folder of its results, on this host: ``cpu``, and ``cpu-arm64``."""
        return self.local_name_for(self.architecture)

    @property
    def bake_name(self) -> str:
        """Return the name of its target for ``docker buildx bake``, which may have no dots: ``gpu-2_7``."""
        return self.local_name.replace(".", "_")

    @property
    def candidate(self) -> str:
        """Return the local reference of an image that was built but not yet verified and trained in."""
        return candidate_tag(self.local_name)

    @property
    def local(self) -> str:
        """Return the local reference of the last image that passed everything."""
        return f"{NAME}:{self.local_name}"

    @property
    def has_code(self) -> bool:
        """Return whether the image has a layer with a user's code."""
        return f"{LABELS}.code" in self.labels

    @property
    def version(self) -> str:
        """Return the version of the framework."""
        return self.framework.version

    @property
    def version_tag(self) -> str:
        """Return the tag that moves with every image of the framework's version."""
        return version_tag(self.name, self.version)

    @cached_property
    def versions(self) -> dict[str, str]:
        """Return canonical name -> version of every package of the image."""
        return self.base.packages | {pin.name: pin.version for layer in self.layers for pin in layer.pins}

    @property
    def compiled(self) -> tuple[Pin, ...]:
        """Return the source distributions that are compiled for the image."""
        return next((layer.pins for layer in self.layers if layer.stage == "compiled"), ())

    def kept(self, state: Path) -> Path:
        """Return the folder of what a host keeps about the image, in its state folder."""
        return state / self.local_name

    def command(self, name: str, architecture: Architecture | None = None) -> str:
        """Return a command for this image, for messages."""
        return super().command(name, architecture or self.architecture)

    def content_hash(self, base: str) -> str:
        """Return 8 hexadecimal digits that change whenever anything that goes into the image changes.

        Two builds with one hash are the same image, so a tag that has it never needs to move.

        Args:
            base: digest of the base image, or its reference if it has none.
        """
        files = self.model_copy(update={"built": None}).text()
        return hashlib.sha256(f"{base}\n{files}".encode()).hexdigest()[:8]

    def image_labels(self) -> dict[str, str]:
        """Return the labels of the image, without that of the document itself."""
        if not self.built:
            return self.labels
        built = self.built
        values = (built.created, built.revision, built.tag, built.base, built.base_digest)
        return self.labels | dict(zip(LABELS_OF_BUILDS, values, strict=True))


def version_tag(name: str, version: str) -> str:
    """Return the tag of a version of the framework; a tag cannot contain the ``+`` before a local version."""
    return f"{name}-{version.replace('+', '_')}"


def digest(text: str) -> str:
    """Return the SHA-256 of a document, hexadecimal."""
    return hashlib.sha256(text.encode()).hexdigest()


def parse(text: str) -> Recipe:
    """Return the recipe in a document.

    Raises:
        ValueError: it is none; the message names the first field that is wrong.
    """
    try:
        return Recipe.model_validate_json(text)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        raise ValueError(f"{'.'.join(map(str, first['loc'])) or 'it'}: {first['msg']}") from None


def read(path: Path) -> Recipe:
    """Return the recipe of a file.

    Raises:
        UserError: there is no such file, or it holds no recipe.
    """
    try:
        return parse(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(f"{path}: no recipe ({getattr(error, 'strerror', '') or error})") from None


def differences(recipe: Recipe, other: Recipe) -> Iterator[tuple[str, Any, Any]]:
    """Yield each field in which recipes differ, as in ``framework.version``, and its values.

    Neither what a host adds counts, nor ``source``: a copy of a target is that target.
    """
    documents = [each.model_dump(mode="json", by_alias=True, exclude={"built", "source"}) for each in (recipe, other)]
    yield from _differences(documents[0], documents[1], "")


def _differences(value: Any, other: Any, where: str) -> Iterator[tuple[str, Any, Any]]:
    if isinstance(value, Mapping) and isinstance(other, Mapping):
        for key in {**value, **other}:
            yield from _differences(value.get(key), other.get(key), f"{where}.{key}" if where else key)
    elif isinstance(value, list) and isinstance(other, list) and where == "layers":
        yield from _differences({each["stage"]: each for each in value}, {each["stage"]: each for each in other}, where)
    elif isinstance(value, list) and isinstance(other, list) and where.endswith(".pins"):
        yield from _differences({each["name"]: each for each in value}, {each["name"]: each for each in other}, where)
    elif value != other:
        yield where, value, other
