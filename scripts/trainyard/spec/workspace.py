"""The model of ``trainyard.yaml``: what an image adds to a target of the catalogue, in a user's own repository.

:func:`trainyard.spec.model.load` makes a :class:`~trainyard.spec.model.Spec` of it, so that everything that is done
with an image of the catalogue is done with a user's image too.
"""

from __future__ import annotations

import hashlib
import re
import shlex
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal, TypeGuard

from packaging.licenses import canonicalize_license_expression
from packaging.requirements import InvalidRequirement
from pydantic import AfterValidator, BeforeValidator, Field, WithJsonSchema

from trainyard.common.errors import UserError
from trainyard.spec import markers, yaml_source
from trainyard.spec.architectures import AMD64
from trainyard.spec.catalog import DebianPackage, Line, Platforms
from trainyard.spec.naming import COMMAND as COMMAND
from trainyard.spec.naming import GENERATED as GENERATED
from trainyard.spec.naming import SETTINGS
from trainyard.spec.units import in_bytes
from trainyard.spec.yaml_source import Strict

#: Name of the file that describes a user's image.
FILE = SETTINGS

#: Of ``sources`` of ``build``: the project in trainyard.yaml's own folder.
OWN = "."

#: Endings of the files that are a project alone.
ONE_FILE = (".py", ".ipynb")

#: How far an image was tested, the least first: a trainer of the catalogue trained in its ``environment``, which has no
#: command of its own; its command ``started``, ``ran`` to its end, or ``trained``.
Level = Literal["environment", "started", "ran", "trained"]

#: Name of an environment variable, as shells and Dockerfiles know them.
Variable = Annotated[str, Field(pattern=r"^[A-Za-z_][A-Za-z0-9_]*$")]


def _requirement(text: str) -> str:
    """A PEP 508 requirement; versions may be ranges."""
    try:
        markers.requirement(text)
    except InvalidRequirement as error:
        raise ValueError(f"{text[:200]!r} is not a requirement ({str(error).splitlines()[0]})") from None
    return text


def _words(value: object) -> object:
    """A command as a list of words, split as a shell splits them; numbers in a list are words."""
    if isinstance(value, list):
        return [str(word) if isinstance(word, int | float) and not isinstance(word, bool) else word for word in value]
    if not isinstance(value, str):
        return value
    try:
        words = shlex.split(value)
    except ValueError as error:
        raise ValueError(f"{value!r}: {str(error).lower()}") from None
    if not words:
        raise ValueError("the command is empty")
    return words


def _pattern(text: str) -> str:
    try:
        re.compile(text)
    except re.error as error:
        raise ValueError(f"{text!r} is not a regular expression: {error}") from None
    return text


#: JSON schema of a list of words.
_LIST_OF_WORDS: dict[str, Any] = {"type": "array", "items": {"type": ["string", "number"]}}

PackageRequirement = Annotated[str, AfterValidator(_requirement)]
Words = Annotated[
    list[str],
    BeforeValidator(_words),
    Field(min_length=1),
    WithJsonSchema({"anyOf": [{"type": "string"}, _LIST_OF_WORDS | {"minItems": 1}]}),
]
Pattern = Annotated[str, AfterValidator(_pattern)]
Size = Annotated[int, BeforeValidator(lambda text: in_bytes(str(text))), WithJsonSchema({"type": "string"})]


class Requirements(Strict):
    """The packages that the code needs in addition to the target's.

    Attributes:
        file: requirements.txt, pyproject.toml, uv.lock, pylock.toml, setup.py or a script with a header, relative to
            trainyard.yaml; None if ``packages`` lists them.
        extras: of ``[project.optional-dependencies]``, ``groups``: of ``[dependency-groups]``.
        packages: PEP 508 requirements.
    """

    file: Line | None = None
    extras: list[str] = Field(default_factory=list)
    groups: list[str] = Field(default_factory=list)
    packages: list[PackageRequirement] = Field(default_factory=list)


def _requirements(value: object) -> object:
    """``requirements:`` may be the name of a file, a list of packages, or a mapping."""
    if isinstance(value, str):
        return {"file": value}
    if isinstance(value, list):
        return {"packages": value}
    return value


class Build(Strict):
    """What is compiled for the image, in a separate build stage.

    Attributes:
        packages: Debian packages of that stage, such as ``g++``; they are not in the image.
        sources: requirements that are compiled from their source distributions, such as ``flash-attn==2.8.3``, and
            :data:`OWN`, the extension modules of the project in trainyard.yaml's folder.
        requires: what their setup.py needs and their pyproject.toml does not declare, such as ``ninja``.
        environment: variables of that stage, such as ``TORCH_CUDA_ARCH_LIST``.
    """

    packages: list[DebianPackage] = Field(default_factory=list)
    sources: list[Literal["."] | PackageRequirement] = Field(min_length=1)
    requires: list[PackageRequirement] = Field(default_factory=list)
    environment: dict[Variable, Line] = Field(default_factory=dict)

    @property
    def packages_compiled(self) -> list[str]:
        """Return ``sources`` without :data:`OWN`."""
        return [one for one in self.sources if one != OWN]


class SmokeRun(Strict):
    """How the code is run before its image gets its name.

    Attributes:
        args: arguments of ``run``, such as ``--epochs=1``.
        data: folder of the repository that is mounted read-only at /data.
        expect: regular expression that a line of the output must match.
        seconds: a run that is alive after this time passes; None: it must end with status 0.
        resume: the command saves a checkpoint and ends with 143 on SIGTERM, and continues when it is started again.
        timeout: seconds that a run may take.
    """

    args: Annotated[
        list[str],
        BeforeValidator(_words),
        WithJsonSchema({"anyOf": [{"type": "string"}, _LIST_OF_WORDS]}),
    ] = Field(default_factory=list)
    data: Line | None = None
    expect: Pattern | None = None
    seconds: Annotated[int, Field(gt=0)] | None = Field(default=None, alias="for")
    resume: bool = False
    timeout: Annotated[int, Field(gt=0)] = 600


class Limit(Strict):
    """``size``: of all layers, unpacked, in bytes."""

    size: Size


def _one_or_more(value: object) -> object:
    """Return a list of a value that may be a single text."""
    return [value] if isinstance(value, str) else value


class WorkspaceDocument(Strict):
    """Describe a trainyard.yaml.

    Attributes:
        framework: requirements of packages of the target's framework, whose versions replace the target's.
        compiler: whether the image has the compilers of torch.compile; None: if the target has them.
    """

    extends: str
    framework: Annotated[
        list[PackageRequirement],
        BeforeValidator(_one_or_more),
        WithJsonSchema({"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "string"}}]}),
    ] = Field(default_factory=list)
    base: str | None = None
    platforms: Platforms = Field(default_factory=lambda: [AMD64.platform])
    name: Annotated[str, Field(pattern=r"^[a-z0-9]+(-[a-z0-9]+)*$")] | None = None
    summary: Line = ""
    requirements: Annotated[
        Requirements,
        BeforeValidator(_requirements),
    ] = Field(default_factory=Requirements)
    system: list[DebianPackage] = Field(default_factory=list)
    compiler: bool | None = None
    build: Build | None = None
    environment: dict[Variable, Line] = Field(default_factory=dict)
    code: list[Line] = Field(default_factory=lambda: ["."])
    run: Words | None = None
    smoke: SmokeRun | None = None
    budget: Limit | None = None


@dataclass(frozen=True)
class Site:
    """Where an image has its Python packages; paths have no leading slash.

    Attributes:
        packages: the site directory.
        commands: the folder of the packages' scripts, ``shebang``: the interpreter in their first line, without ``#!``.
    """

    packages: str
    commands: str
    shebang: str


@dataclass(frozen=True)
class Told:
    """What the build backend of a project tells about it (PEP 517, PEP 660).

    Attributes:
        metadata: text of METADATA, ``entry_points``: of entry_points.txt; empty without one.
        roots: folders below the project's that its modules are imported from; None if the backend does not tell.
        failure: why something is missing, a few words; empty if nothing is.
    """

    metadata: str = ""
    entry_points: str = ""
    roots: tuple[str, ...] | None = None
    failure: str = ""


@dataclass(frozen=True)
class Workspace:
    """A user's repository with a trainyard.yaml.

    Attributes:
        file: the trainyard.yaml.
        document: its content.
        given_data: folder that its containers have at /data in place of ``smoke.data``; empty: that.
        told: folder of a project -> what its build backend tells, of those that were asked.
    """

    file: Path
    document: WorkspaceDocument
    given_data: str = ""
    told: Mapping[Path, Told] = field(default_factory=dict, hash=False)

    @property
    def one_file(self) -> str:
        """Return the name of the file that is the project alone; empty for a repository."""
        return self.file.stem if self.file.parent.name == GENERATED else ""

    @property
    def root(self) -> Path:
        """The folder of trainyard.yaml, or of the one file, which becomes /workspace."""
        return self.file.parent.parent if self.one_file else self.file.parent

    @property
    def converted(self) -> Path | None:
        """Return the program that a notebook was converted to, which is at the top of /workspace; None of others."""
        path = self.file.with_name(f"{self.one_file}.py")
        return path if self.one_file.endswith(".ipynb") else None

    @property
    def data(self) -> Path | None:
        """The folder that its containers have at /data; None: none."""
        name = self.given_data or (self.document.smoke and self.document.smoke.data)
        return self.root / name if name else None

    @property
    def compiles_own(self) -> bool:
        """Return whether the image has the extension modules of the code's project."""
        return self.document.build is not None and OWN in self.document.build.sources

    @property
    def config_hash(self) -> str:
        """SHA-256 of what the document says about an image, whatever its layout and comments: hexadecimal.

        The platforms are not part of it: pylock.trainyard.toml, which is compared too, has those.
        """
        text = self.document.model_dump_json(by_alias=True, exclude={"platforms"})
        return hashlib.sha256(text.encode()).hexdigest()

    @property
    def licence(self) -> str:
        """The SPDX expression of pyproject.toml (PEP 639); empty without: which one a text is would be a guess."""
        try:
            document = tomllib.loads(yaml_source.text(self.root / "pyproject.toml"))
            return str(canonicalize_license_expression(document["project"]["license"]))
        except (UserError, ValueError, LookupError, TypeError, AttributeError, RecursionError):
            return ""

    @property
    def level(self) -> Level:
        """How far the smoke test tests the code.

        A command without ``smoke`` is only started; one with ``expect`` or ``resume`` has shown that it trains.
        """
        smoke = self.document.smoke
        if smoke is None or not self.document.run:
            return "started" if self.document.run else "environment"
        return "trained" if smoke.expect or smoke.resume else "ran"


def folders_upwards(start: Path) -> Iterator[Path]:
    """``start`` and the folders above it, up to the top of its git repository."""
    for folder in (start, *start.parents):
        yield folder
        if (folder / ".git").exists():
            return


def find(start: Path | None = None) -> Path | None:
    """The trainyard.yaml of ``start`` (the current folder) or of the nearest folder above it in its git repository."""
    for folder in folders_upwards((start or Path.cwd()).resolve()):
        if (folder / FILE).is_file():
            return folder / FILE
    return None


def is_one_file(target: str | None) -> TypeGuard[str]:
    """Return whether a command is given one Python file or notebook, and no folder."""
    return bool(target) and Path(str(target)).suffix in ONE_FILE and not Path(str(target)).is_dir()


def description(path: Path) -> Path:
    """Return the file that takes the place of a trainyard.yaml for one Python file or notebook."""
    return path.parent / GENERATED / f"{path.name}.yaml"


def lock_of(path: Path) -> Path:
    """Return the lock of one file, beside it: ``pylock.train.toml`` of train.py; a name has no other dots (PEP 751)."""
    stem = path.name.removesuffix(".py")
    name = re.sub(
        r"[^A-Za-z0-9_-]", lambda match: f"_{ord(match[0]):x}_", "_trainyard" if stem == "trainyard" else stem
    )
    return path.with_name(f"pylock.{name}.toml")


def default_name(folder: Path) -> str:
    """The name of the image of a repository in ``folder`` unless trainyard.yaml gives one."""
    return re.sub(r"[^a-z0-9]+", "-", folder.name.lower()).strip("-") or "image"


def schema() -> dict[str, Any]:
    """The JSON schema of trainyard.yaml, for editors."""
    found = WorkspaceDocument.model_json_schema(by_alias=True)
    requirements = found["properties"]["requirements"]
    found["properties"]["requirements"] = {
        "anyOf": [
            {
                "type": "string",
                "description": "requirements.txt, pyproject.toml, uv.lock, pylock.toml, setup.py, or a PEP 723 script",
            },
            {"type": "array", "items": {"type": "string"}},
            {key: value for key, value in requirements.items() if key == "$ref"},
        ]
    }
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": FILE,
        "description": "What an image adds to a target of Trainyard, in a user's repository",
    } | {key: value for key, value in found.items() if key not in ("title", "description")}
