"""The typed model of ``images/<target>/image.yaml``: what an image is, and the one place that reads it.

Everything else (Dockerfile, bake plan, locks, tags, labels, checks) is derived from a :class:`Spec`. A spec is strict:
an unknown key, a bad version, a missing field is a :class:`~trainyard.common.errors.UserError` that names the file,
the line, the key, and the nearest valid spelling.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, NoReturn, Self, TypeVar

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from pydantic import AfterValidator, BeforeValidator, Field, InstanceOf, SkipValidation
from ruamel.yaml.comments import CommentedMap

from trainyard.common.context import Context
from trainyard.common.errors import UserError, nearest
from trainyard.common.settings import PREFIX, ROOT
from trainyard.spec import architectures, framework, gpus, matrix, pylock, workspace, yaml_source
from trainyard.spec.architectures import ARCHITECTURES, PLATFORMS, Architecture
from trainyard.spec.catalog import DEBIAN_PYTHON, DebianPackage, Line, Platforms, conflict
from trainyard.spec.catalog import IMAGES as IMAGES
from trainyard.spec.catalog import Base as Base
from trainyard.spec.catalog import Index as Index
from trainyard.spec.catalog import bases as bases
from trainyard.spec.catalog import indexes as indexes
from trainyard.spec.framework import BaseContents as BaseContents
from trainyard.spec.framework import Framework as Framework
from trainyard.spec.framework import Package, pin
from trainyard.spec.gpus import DeviceCode
from trainyard.spec.kinds import InBase, Wheels
from trainyard.spec.lock import DEFAULT, Lock, Locked, Unreadable, versions
from trainyard.spec.markers import applies
from trainyard.spec.matrix import End
from trainyard.spec.naming import LABELS
from trainyard.spec.repository_files import check_links, git_root, leads_out
from trainyard.spec.units import in_bytes
from trainyard.spec.workspace import Level, Site, Variable, Workspace, WorkspaceDocument
from trainyard.spec.yaml_source import Strict, validated
from trainyard.spec.yaml_source import relative as relative

#: Name of the file that describes a version of a target, in a folder of the target that is named after the version.
VERSION = "version.yaml"


def _pin_or_set(text: str) -> str:
    """The name of a set under images/requirements/, or a pinned requirement."""
    if re.fullmatch(r"[a-z][a-z0-9-]*", text):
        known = requirement_sets()
        if text not in known:
            raise ValueError(
                f"{text!r} is neither a set ({', '.join(known)}) nor pinned as '{text}==<version>'"
                f"{nearest(text, known)}"
            )
        return text
    return pin(text)


def _trainer_package(name: str) -> str:
    """Return the name of a folder of trainers/ for a framework; raise ValueError if there is none."""
    known = sorted({path.parent.name for path in (ROOT / "trainers").glob("*/__init__.py")} - {"common"})
    if name not in known:
        raise ValueError(f"no trainers {name!r}: {', '.join(known)}{nearest(name, known)}")
    return name


S = TypeVar("S", bound="Spec")
Size = Annotated[int, BeforeValidator(lambda text: in_bytes(str(text)))]
PinOrSet = Annotated[str, AfterValidator(_pin_or_set)]


class Trainers(Strict):
    """The trainers of the image: the files of trainers/<package>/, and those of a folder.

    Attributes:
        folder: relative to the image.yaml that names it; in a :class:`Spec`, the absolute path, which is inherited.
    """

    package: Annotated[str, AfterValidator(_trainer_package)]
    default: str
    folder: Line | None = None

    @property
    def packages(self) -> list[str]:
        """Return the folders of trainers/ that the image has: those of torch_xla import models of torch's."""
        return [self.package, *(["torch"] if self.package == "torch_xla" else [])]


class Budget(Strict):
    """Limits of an image; ``size`` is that of all layers, unpacked, in bytes."""

    size: Size


class Smoke(Strict):
    """The training run that an image must pass before it is published.

    Attributes:
        accuracy: least accuracy, a fraction of 1.
    """

    trainer: str
    accuracy: Annotated[float, Field(gt=0, lt=1)]
    epochs: Annotated[int, Field(ge=3)] = 10


class _Document(Strict):
    """The keys of an image.yaml, after ``extends`` was applied.

    Attributes:
        compiler: whether it has C and C++ compilers, for torch.compile; None: if the framework needs them.
        nightly: whether it is built on the newest framework each night; its packages need no version.
        fallback_for: the target in whose place it is built where the base of that target is out of reach.
    """

    summary: Line
    base: str
    nightly: bool = False
    fallback_for: str | None = None
    platforms: Platforms = Field(default_factory=lambda: [architectures.AMD64.platform])
    framework: Framework
    requirements: list[PinOrSet] = Field(default_factory=list)
    system: list[DebianPackage] = Field(default_factory=list)
    accelerator: Literal["none", "nvidia", "tpu"] = "none"
    environment: dict[Variable, Line] = Field(default_factory=dict)
    tools: list[Literal["gsutil"]] = Field(default_factory=list)
    profile: bool = False
    compiler: bool | None = None
    trainers: Trainers
    budget: Budget
    smoke: Smoke


class _Version(Strict):
    """Describe a version.yaml: a target with other versions of its framework.

    Attributes:
        packages: in the place of the target's ``framework.packages``.
        base, platforms: None: those of the target.
    """

    summary: Line = ""
    packages: Annotated[list[Package], Field(min_length=1)]
    base: str | None = None
    platforms: Platforms | None = None


class Spec(_Document):
    """One image of the catalogue, or of an image.yaml elsewhere, for one of its platforms.

    Attributes:
        arch: name of its architecture.
        folder: holds its image.yaml, or a repository's trainyard.yaml.
        workspace: the user's repository; of another image its folder, where nothing is added to the target.
        framework_of: the folder of the target that it extends, if it has the framework of that one.
        lock: the content of its lock, or why that cannot be used.
        context: of the command that it was loaded for.
        root: the folder whose commit the image has.
        own_labels: those that images of the catalogue lack, or have with another value; the image has no empty one.
        lock_labels: label with the SHA-256 of the lock -> the build argument that has it.
        secrets: of the build: id -> name of the file.
    """

    target: str
    arch: str = architectures.AMD64.name
    folder: Path
    framework_of: Path | None = None
    lock: Annotated[Lock | Unreadable, SkipValidation] = Field(exclude=True, repr=False)
    workspace: SkipValidation[Workspace] = Field(exclude=True, repr=False)
    context: InstanceOf[Context] = Field(default_factory=Context, exclude=True, repr=False)
    root: Path = Field(default=ROOT, exclude=True, repr=False)
    own_labels: dict[str, str] = Field(default_factory=dict, exclude=True, repr=False)
    lock_labels: ClassVar[Mapping[str, str]] = {}
    secrets: ClassVar[Mapping[str, str]] = {}

    @property
    def architecture(self) -> Architecture:
        return ARCHITECTURES[self.arch]

    @property
    def platform(self) -> str:
        """``linux/amd64``."""
        return self.architecture.platform

    @property
    def local_name(self) -> str:
        """The tag of its image, and the folder of its results, on this host: ``cpu``, and ``cpu-arm64``."""
        return self.target if self.arch == architectures.AMD64.name else f"{self.target}-{self.arch}"

    @property
    def bake_name(self) -> str:
        """Return the name of its target in docker-bake.json, which may have no dots: ``gpu-2_7``."""
        return self.local_name.replace(".", "_")

    @property
    def file(self) -> Path:
        """The file that describes it."""
        return self.workspace.file

    @property
    def where(self) -> str:
        """The path of the spec's file in messages."""
        return relative(self.file)

    @property
    def lock_file(self) -> Path:
        """Return the path of its lock of the default package index, which may not exist."""
        return self.folder / pylock.FILE

    @property
    def kept(self) -> Path:
        """The folder of what this host keeps about its image: results, and the locks of a user's repository."""
        return self.context.state / self.local_name

    @property
    def build_folder(self) -> Path:
        """The folder of the Dockerfile: that of image.yaml, or one in the state folder for a user's repository."""
        return self.folder

    def dockerfile(self, index: str = DEFAULT) -> Path:
        """Return the path of the Dockerfile of the image when its framework comes from ``index``."""
        parts = ["" if index == DEFAULT else index, "" if self.arch == architectures.AMD64.name else self.arch]
        return self.build_folder / "".join(["Dockerfile", *(f".{part}" for part in parts if part)])

    def command(self, name: str) -> str:
        """Return a command for this image, for messages: ``trainyard lock cpu``; ``trainyard lock`` in a repository."""
        other = [] if self.arch == architectures.usual(self.platforms).name else [f"{PREFIX}ARCH={self.arch}"]
        return " ".join([*other, "trainyard", name, *self._argument])

    @property
    def _argument(self) -> list[str]:
        """The argument of commands for this image."""
        return [self.target]

    def repository(self, refusal: str) -> RepositorySpec:
        """Return the spec of a user's repository.

        Raises:
            UserError: it is of a target of the catalogue; ``refusal`` is the message.
        """
        raise UserError(refusal)

    @property
    def target_below(self) -> Spec | None:
        """Return the target that a repository extends, for its platform; None of a target."""
        return None

    @property
    def has_code(self) -> bool:
        """Whether the image has a layer with a user's code: not if trainyard.yaml adds packages alone."""
        return bool(self.workspace.document.code)

    @property
    def run(self) -> list[str] | None:
        """The command of a user's repository; None if trainers of the catalogue are all that it can run."""
        return self.workspace.document.run

    @property
    def limited(self) -> bool:
        """Whether the image may not exceed ``budget``; without one in trainyard.yaml it is that of the parent alone."""
        return True

    @property
    def level(self) -> Level:
        """How far the smoke test tests the image: a trainer of the catalogue has to learn."""
        return self.workspace.level if self.workspace.document.extends else "trained"

    def on(self, arch: str) -> Self:
        """Return the spec for another of its platforms."""
        return self.model_copy(update={"arch": arch})

    def with_lock(self, content: Lock) -> Self:
        """Return the spec with another lock."""
        return self.model_copy(update={"lock": content})

    @property
    def usable_lock(self) -> Lock | None:
        """The lock; None if there is none that can be used."""
        return self.lock if isinstance(self.lock, Lock) else None

    @property
    def provided(self) -> tuple[Mapping[str, str], Mapping[str, str]]:
        """Return canonical name -> version of the framework, and of all else that it has; empty if not locked.

        tensorflow-cpu and tensorflow-tpu are tensorflow, too: one of them is what code imports under that name.
        """
        content = self.usable_lock
        known = (content.of(self.arch, index) for index in (self.framework.index, DEFAULT)) if content else ()
        locked = next(filter(None, known), Locked())
        framework = dict(locked.base.packages) if locked.base else versions(locked.framework)
        others = versions(locked.requirements)
        return framework and {self.framework.name.replace("_", "-"): self.version, **framework}, others

    def locked(self, index: str = DEFAULT) -> Locked:
        """Return what its lock has for its platform and a package index.

        Raises:
            UserError: it was not locked for them, or the lock cannot be used; the message says what to do.
        """
        if isinstance(self.lock, Unreadable):
            raise UserError(self.lock.reason)
        if locked := self.lock.of(self.arch, index):
            return locked
        for_index = "" if index == DEFAULT else f" and index {index}"
        again = self.command("lock")
        raise UserError(f"{relative(self.lock_file)}: nothing for {self.platform}{for_index}: run '{again}'")

    @property
    def _own_lock(self) -> Lock | None:
        """The lock, if it can be used and is of what the image is now made from."""
        return self.usable_lock

    @property
    def base_contents(self) -> BaseContents | None:
        """Packages of a base that holds the framework; None if it holds none or was never inspected."""
        names = {*map(canonicalize_name, self.base_spec().framework)}
        locked = self._own_lock.of(self.arch) if self._own_lock and names else None
        contents = locked.base if locked else None
        return contents if contents and names <= contents.packages.keys() else None

    @property
    def packages(self) -> list[str]:
        """The framework's packages that its platform has, without markers.

        Those that a nightly names without a version, and those of a base, have the version in the lock, if there is
        one.
        """
        if contents := self.base_contents:
            return [f"{name}=={contents.packages[canonicalize_name(name)]}" for name in self.base_spec().framework]
        texts = self.declared_packages
        locked = self._own_lock.of(self.arch) if self._own_lock and framework.unpinned(texts) else None
        known = versions(locked.framework) if locked else {}
        return [framework.pinned(text, known) for text in texts]

    @property
    def declared_packages(self) -> list[str]:
        """The framework's packages that its platform has, without markers, as image.yaml has them."""
        pins = [Requirement(text) for text in self.framework.packages]
        machine = self.architecture.machine
        return [_without_marker(pin) for pin in pins if applies(pin.marker, self.base_spec().python, machine)]

    @property
    def version(self) -> str:
        """Version of the framework; ``unlocked`` if ``trainyard lock`` chooses it and has not."""
        return self.framework.version(self.packages)

    @property
    def version_known(self) -> bool:
        """Tell if the framework has a version: not if ``trainyard lock`` chooses it and never did."""
        return self.version != framework.UNLOCKED

    def version_tag(self, version: str | None = None) -> str:
        """Return the tag of a version of the framework, by default the current one.

        A tag cannot contain the ``+`` before a local version: it becomes ``_``.
        """
        return f"{self.target}-{(self.version if version is None else version).replace('+', '_')}"

    @property
    def has_trainers(self) -> bool:
        """Return whether the trainers of the catalogue support the framework's version; if not, it has none of them."""
        return matrix.has_trainers(self.framework.name, self.version)

    @property
    def has_compiler(self) -> bool:
        """Return whether the image gets C and C++ compilers: a base that holds the framework has what it has."""
        if self.framework_in_base:
            return False
        return self.framework.compiles if self.compiler is None else self.compiler

    @property
    def ends(self) -> list[End]:
        """Return the last days of what the image consists of, the first that ends first; none of a nightly."""
        return matrix.ends(
            self.framework.name,
            self.version if not self.nightly else "",
            base=self.base,
            python=self.python_version,
            nvidia=self.accelerator == "nvidia",
        )

    @property
    def device_code(self) -> DeviceCode | None:
        """Return what an image for NVIDIA GPUs needs of a GPU; None if images/matrix.yaml does not know it."""
        if self.accelerator != "nvidia":
            return None
        cuda, cudnn = (min(has, default="") for has in (self.cuda, self._locked_versions("nvidia-cudnn-")))
        return gpus.device_code(self.framework.name, self.version, self.arch, cuda, cudnn)

    @property
    def cuda(self) -> set[str]:
        """Return the versions of CUDA's runtime that its lock has."""
        return self._locked_versions("nvidia-cuda-runtime")

    def _locked_versions(self, prefix: str) -> set[str]:
        locked = self._own_lock.of(self.arch) if self._own_lock else None
        return {version for name, version in (locked.versions if locked else {}).items() if name.startswith(prefix)}

    @property
    def day(self) -> str:
        """When ``trainyard lock`` chose the framework's version, as in 20261121; empty if the spec has it."""
        if contents := self.base_contents:
            return contents.day
        return self._own_lock.day if self._own_lock else ""

    @property
    def tag_day(self) -> str:
        """Return the day that the immutable tag has in place of the commit's; empty if it has the commit's."""
        return self.day

    def base_spec(self) -> Base:
        """The entry of images/bases.yaml that the image is built on."""
        return bases()[self.base]

    @property
    def framework_in_base(self) -> bool:
        """Whether the framework is in the base instead of a separate layer."""
        return bool(self.base_spec().framework)

    @property
    def libraries(self) -> list[str]:
        """Return ``system`` with the library of the base's Python; a compiled Python has it, and Debian no package."""
        base = self.base_spec()
        own = [f"libpython{base.python}"] if base.interpreter == DEBIAN_PYTHON else []
        return [name for one in self.system for name in (own if re.fullmatch(r"libpython3\.\d+", one) else [one])]

    @property
    def kind(self) -> Wheels | InBase:
        """Return how the image has its framework."""
        base = self.base_spec()
        return InBase(self.base_contents) if base.framework else Wheels(self.python_version, base.interpreter)

    @property
    def python_version(self) -> str:
        """Version of the image's Python without the patch level: that in the base if it was inspected."""
        return self.base_contents.python_version if self.base_contents else self.base_spec().python

    @property
    def wheel_platform(self) -> str:
        """uv's name of the platform whose wheels run in the image."""
        return self.architecture.wheel_platform(self.base_spec().glibc)

    @property
    def site(self) -> Site:
        """Where the image has the packages that are installed in it."""
        return self.kind.site

    def index_spec(self) -> Index | None:
        """The entry of images/indexes.yaml that the framework comes from; None for the default index."""
        return None if self.framework.index == "default" else indexes()[self.framework.index]

    @property
    def own_trainers(self) -> Path | None:
        """Return the folder of the trainers that it has in addition to the reference trainers; None if it has none."""
        return Path(self.trainers.folder) if self.trainers.folder else None

    def trainer_commands(self) -> dict[str, list[str]]:
        """Trainer name -> the command the launcher starts, as the launcher finds it in the recipe."""
        files = _trainer_files(ROOT / "trainers" / self.trainers.package) if self.has_trainers else []
        commands = {
            path.stem: [self.kind.python, "-m", f"trainers.{self.trainers.package}.{path.stem}"] for path in files
        }
        if self.own_trainers:
            for path in _trainer_files(self.own_trainers):
                commands[path.stem] = [self.kind.python, f"/opt/trainyard/own/{path.name}"]
        commands |= {workspace.COMMAND: self.run} if self.run else {}
        return dict(sorted(commands.items()))


class RepositorySpec(Spec):
    """The image of a user's repository, for one of its platforms.

    Attributes:
        extends: the target that it extends, on that one's base.
    """

    extends: SkipValidation[Spec]
    lock_labels: ClassVar[Mapping[str, str]] = {f"{LABELS}.lock": "LOCKED"}  # `push --code-only` compares it
    secrets: ClassVar[Mapping[str, str]] = {"uv": "uv.toml", "netrc": "netrc"}

    def repository(self, refusal: str) -> RepositorySpec:
        return self

    @property
    def target_below(self) -> Spec:
        return self.extends.on(self.arch)

    @property
    def lock_file(self) -> Path:
        """Return the path of its lock for the default index, which may not exist."""
        return _lock_file(self.workspace)

    @property
    def build_folder(self) -> Path:
        return self.kept / "build"

    @property
    def _argument(self) -> list[str]:
        return [relative(self.root / self.workspace.one_file)] if self.workspace.one_file else []

    @property
    def tag_day(self) -> str:
        return ""

    @property
    def limited(self) -> bool:
        return self.workspace.document.budget is not None

    @property
    def device_code(self) -> DeviceCode | None:
        """Return what the framework needs of a GPU, for those that its extensions are compiled for."""
        code, build = super().device_code, self.workspace.document.build
        compiled = gpus.for_arch_list(build.environment.get("TORCH_CUDA_ARCH_LIST", "")) if build else None
        return code.within(compiled) if code and compiled else code

    @property
    def _own_lock(self) -> Lock | None:
        content = self.usable_lock
        return content if content and content.origin and content.origin.target == self.extends.target else None

    @property
    def parent(self) -> Spec:
        """The target that it extends, for its platform and on its base."""
        return self.extends.model_copy(update={"arch": self.arch, "base": self.base})

    def on_base(self, name: str) -> Self:
        """Return the spec on another base."""
        return self.model_copy(update={"base": name})

    def with_lock(self, content: Lock) -> Self:
        """Return the spec with another lock, and the base and framework that it was resolved for."""
        return self.model_copy(update={"lock": content, **_chosen(self.extends, self.workspace.document, content)})


def _trainer_files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.glob("*.py") if not path.name.startswith("_"))


def _folders() -> dict[str, Path]:
    """Return name of a target -> its folder: images/gpu of ``gpu``, and images/gpu/2.7 of its version ``gpu-2.7``."""
    versions = {f"{path.parts[-3]}-{path.parts[-2]}": path.parent for path in IMAGES.glob(f"*/*/{VERSION}")}
    return {path.parent.name: path.parent for path in IMAGES.glob("*/image.yaml")} | versions


def targets() -> list[str]:
    """Names of the catalogue's images, sorted."""
    return sorted(_folders())


def requirement_sets() -> list[str]:
    """Names of the shared requirement sets, sorted."""
    return sorted(path.stem for path in (IMAGES / "requirements").glob("*.in"))


def requirements_of(spec: Spec) -> list[str]:
    """The spec's requirements with named sets replaced by their lines."""
    found: list[str] = []
    for entry in spec.requirements if spec.has_trainers else ():
        if "==" in entry:
            found.append(entry)
            continue
        for line in (IMAGES / "requirements" / f"{entry}.in").read_text(encoding="utf-8").splitlines():
            pin = line.split("#")[0].strip()
            if pin:
                found.append(str(Requirement(pin)))
    return found


def _merge(parent: dict[str, Any], child: dict[str, Any]) -> dict[str, Any]:
    """``extends``: mappings are merged key by key, lists appended to the parent's, other values replaced."""
    merged = dict(parent)
    for key, value in child.items():
        above = merged.get(key)
        if isinstance(above, dict) and isinstance(value, dict):
            merged[key] = _merge(above, value)
        elif isinstance(above, list) and isinstance(value, list):
            merged[key] = above + [item for item in value if item not in above]
        else:
            merged[key] = value
    return merged


def folder_of(target: str | None) -> Path:
    """The folder of a target given by name, or by path from the current folder or the checkout.

    Raises:
        UserError: no target was given, or there is none of that name; the valid ones are listed.
    """
    valid = f"valid targets: {', '.join(targets())}"
    if not target:
        raise UserError(
            f"no target given, and no {workspace.FILE} in this folder or above it in its git repository: 'trainyard "
            f"init' writes one, or give a target, as in 'trainyard image tf-cpu'; {valid}"
        )
    if folder := _folders().get(target):
        return folder
    files = ("image.yaml", VERSION, workspace.FILE)
    if "/" in target or target == ".":
        for folder in (Path(target), ROOT / target):
            if any((folder / file).is_file() for file in files):
                return folder.resolve()
        raise UserError(f"no image.yaml or {workspace.FILE} in the folder '{target}'; {valid}")
    if any((Path(target) / file).is_file() for file in files):
        raise UserError(f"unknown target '{target}': write './{target}' for the folder; {valid}")
    raise UserError(f"unknown target '{target}'{nearest(target, targets())}; {valid}")


def load(target: str | None, arch: str | None = None, context: Context | None = None) -> Spec:
    """Return the checked spec of a target, with ``extends`` applied, for one of its platforms.

    Args:
        target: a name under images/, or the path of a folder that holds an image.yaml or a trainyard.yaml. None: the
            trainyard.yaml of the current folder or of the nearest one above it.
        arch: name of the architecture; None: :func:`trainyard.spec.architectures.choose`.
        context: of the command that loads it; None: that of the environment.
    Raises:
        UserError: the name or the file has a mistake, and the message says where; or ``TRAINYARD_ARCH`` has one.
    """
    if workspace.is_one_file(target):
        one = _load_repository(workspace.description(Path(os.path.abspath(target))), context)
        return one.on(arch or architectures.choose(one.platforms).name)
    file = workspace.find() if not target else None
    folder = file.parent if file else folder_of(target)
    is_image = file is None and any((folder / name).is_file() for name in ("image.yaml", VERSION))
    spec = _load(folder, (), context) if is_image else _load_repository(folder / workspace.FILE, context)
    return spec.on(arch or architectures.choose(spec.platforms).name)


def catalogue(context: Context | None = None) -> list[Spec]:
    """Return the specs of all targets, sorted by name, each for the first of its platforms."""
    specs = [_load(folder, (), context) for _, folder in sorted(_folders().items())]
    return [spec.on(PLATFORMS[spec.platforms[0]].name) for spec in specs]


def recommended(context: Context | None = None) -> list[Spec]:
    """Return the specs of the targets that messages recommend and that are built together: all but fallbacks."""
    return [spec for spec in catalogue(context) if not spec.fallback_for]


def each_platform(spec: S) -> list[S]:
    """Return the spec for each of its platforms, in their order."""
    return [spec.on(PLATFORMS[platform].name) for platform in spec.platforms]


def _load_repository(path: Path, context: Context | None = None) -> RepositorySpec:
    """Return the spec of a user's repository: its parent's, with what trainyard.yaml adds."""
    data = yaml_source.read(path)
    document = validated(path, WorkspaceDocument, data, yaml_source.plain(data))
    root = Workspace(path, document).root
    check_links(root)

    def refuse(location: tuple[str, ...], message: str) -> NoReturn:
        line = yaml_source.line_of(data, location)
        raise UserError(f"{relative(path)}{f':{line}' if line else ''}: {'.'.join(location)}: {message}")

    valid = f"valid targets: {', '.join(targets())}"
    extended = _folders().get(document.extends)
    if extended is None:
        refuse(("extends",), f"unknown target '{document.extends}'{nearest(document.extends, targets())}; {valid}")
    parent = _load(extended, (), context)
    if lacking := next((platform for platform in document.platforms if platform not in parent.platforms), None):
        refuse(("platforms",), f"'{parent.target}' is not made for {lacking}: it is for {', '.join(parent.platforms)}")
    base = document.base or parent.base
    if base != parent.base:
        _check_base(parent, base, refuse)
    name = document.name or workspace.default_name(root)
    if name in targets():
        refuse(("name",), f"'{name}' is a target of the catalogue: give the image another one, as in 'name: my-{name}'")
    if document.framework:
        _check_versions(parent, document.framework, refuse)
    if not document.run and "code" in document.model_fields_set:
        refuse(("code",), "there is no 'run', the command that shows that it works: give one, or remove 'code'")
    if document.smoke and not document.run:
        refuse(("smoke",), "there is no 'run', the command that it would run")
    if parent.framework_in_base and document.build:
        refuse(
            ("build",),
            f"nothing can be compiled for '{document.extends}', whose framework is in its base image: remove 'build', "
            "or extend another target",
        )
    if not document.run:  # without a command, the image is the target with more packages
        document = document.model_copy(update={"code": []})
    trainers = parent.trainers.model_copy(update={"default": workspace.COMMAND}) if document.run else parent.trainers
    inherited = {name: getattr(parent, name) for name in _Document.model_fields}
    described = Workspace(path, document, parent.context.data)
    command = " ".join(["trainyard lock", *([described.one_file] if described.one_file else [])])
    content = pylock.read(_lock_file(described), command)
    if parent.context.data and not Path(parent.context.data).is_dir():
        raise UserError(f"--data: no folder '{parent.context.data}'")
    own = replace(described, given_data="").data
    out = own and leads_out(own, git_root(root))
    if document.smoke and own and (out or not own.is_dir()):
        more = (
            ": remove it, and give one from outside of the repository with 'trainyard image --data <folder>'"
            if out
            else ""
        )
        refuse(("smoke", "data"), f"no folder '{document.smoke.data}' in {relative(root)}{more}")
    return RepositorySpec.model_construct(
        **inherited
        | {
            "summary": document.summary or f"{name}, on {parent.target}: {parent.summary}",
            "platforms": document.platforms,
            "system": [*parent.system, *(package for package in document.system if package not in parent.system)],
            "environment": parent.environment | document.environment,
            "trainers": trainers,
            "compiler": parent.compiler if document.compiler is None else document.compiler,
            "budget": Budget.model_construct(size=document.budget.size) if document.budget else parent.budget,
        }
        | _chosen(parent, document, content),
        target=name,
        folder=root,
        lock=content,
        workspace=described,
        root=root,
        own_labels={
            f"{LABELS}.extends": parent.target,
            f"{LABELS}.config": described.config_hash,
            "org.opencontainers.image.licenses": described.licence,
        },
        extends=parent,
        context=parent.context,
    )


def _lock_file(repository: Workspace) -> Path:
    one = repository.one_file
    return workspace.lock_of(repository.root / one) if one else repository.root / pylock.REPOSITORY_FILE


def _chosen(parent: Spec, document: WorkspaceDocument, content: Lock | Unreadable) -> dict[str, Any]:
    """Return the base and the framework of a repository.

    They are those of its target, unless the lock was resolved for other versions of the framework: then the lock
    has them.
    """
    base, origin = document.base or parent.base, content.origin if isinstance(content, Lock) else None
    own = origin.framework if origin and origin.target == parent.target else ""
    if not own and not document.framework:
        return {"base": base, "framework": parent.framework}
    if origin and own and not document.base:
        image = origin.base.partition("@")[0]
        base = next((name for name, known in bases().items() if known.image == image), base)
    packages = [framework.without_version(text) for text in parent.framework.packages]
    return {"base": base, "framework": parent.framework.model_copy(update={"packages": packages})}


def _check_base(parent: Spec, base: str, refuse: Callable[[tuple[str, ...], str], NoReturn]) -> None:
    """Check that a target can be made on another base.

    Args:
        refuse: raises a :class:`UserError` about a key.
    """
    if base not in bases():
        refuse(("base",), f"unknown base '{base}'{nearest(base, bases())}; valid: {', '.join(bases())}")
    if held := next((name for name in (base, parent.base) if bases()[name].framework), None):
        refuse(("base",), f"{held} holds a framework: only the target that is made for it can use it")


def _check_versions(parent: Spec, requirements: list[str], refuse: Callable[[tuple[str, ...], str], NoReturn]) -> None:
    """Check that a target has a package for each requirement of its framework.

    Args:
        refuse: raises a :class:`UserError` about a key.
    """
    if held := parent.base_spec().framework:
        refuse(("framework",), f"base {parent.base} of '{parent.target}' has {', '.join(held)}: remove 'framework'")
    packages = [Requirement(text).name for text in parent.framework.packages]
    for text in requirements:
        if not framework.installs_as(Requirement(text).name, packages):
            refuse(("framework",), f"'{text}' is not in the framework of '{parent.target}': {', '.join(packages)}")


def _pinned(spec: Spec) -> dict[str, str]:
    """Return canonical name -> version of what a spec pins, for any of its platforms."""
    pins = [Requirement(text) for text in [*spec.framework.packages, *requirements_of(spec)]]
    return {canonicalize_name(pin.name): next(iter(pin.specifier)).version for pin in pins if framework.is_pinned(pin)}


def _without_marker(pin: Requirement) -> str:
    return str(pin).partition(";")[0].strip()


def _load(folder: Path, below: tuple[Path, ...], context: Context | None = None) -> Spec:
    """Return the spec of an image.yaml.

    Args:
        below: folders of the specs that extend it.
    """
    if (folder / VERSION).is_file():
        return _load_version(folder, context)
    path = folder / "image.yaml"
    data = yaml_source.read(path)
    plain = yaml_source.plain(data)
    framework_of = None
    parent_name = plain.pop("extends", None)
    if parent_name is not None:
        if folder in below:
            raise UserError(f"{relative(path)}: 'extends' refers back to itself")
        try:
            parent = _load(folder_of(str(parent_name)), (*below, folder))
        except UserError as error:
            raise UserError(f"{relative(path)}:{yaml_source.line_of(data, ('extends',))}: extends: {error}") from None
        if "framework" not in plain and plain.get("base", parent.base) == parent.base:
            framework_of = parent.framework_of or parent.folder
        above = parent.model_dump(include=set(_Document.model_fields) - {"fallback_for"})
        above["budget"] = {"size": f"{parent.budget.size} B"}
        plain = _merge(above, plain) | {key: plain[key] for key in ("platforms",) if key in plain}
    document = validated(path, _Document, data, plain)
    values = {name: getattr(document, name) for name in _Document.model_fields}
    if document.trainers.folder:
        values["trainers"] = document.trainers.model_copy(update={"folder": str(folder / document.trainers.folder)})
    spec = Spec(
        **values,
        target=folder.name,
        folder=folder,
        framework_of=framework_of,
        lock=pylock.read(folder / pylock.FILE, f"trainyard lock {folder.name}"),
        workspace=Workspace(path, WorkspaceDocument(extends="", code=[])),
        context=context or Context(),
    )
    _check_references(spec, data)
    return spec


def _load_version(folder: Path, context: Context | None) -> Spec:
    """Return the spec of a version of a target: that of the folder above, with the packages of its version.yaml."""
    path = folder / VERSION
    data = yaml_source.read(path)
    document = validated(path, _Version, data, yaml_source.plain(data))
    target = _load(folder.parent, (), context)
    name = f"{target.target}-{folder.name}"
    spec = target.model_copy(
        update={
            "target": name,
            "folder": folder,
            "framework_of": None,
            "summary": document.summary or f"{target.summary}; {', '.join(document.packages)}",
            "framework": target.framework.model_copy(update={"packages": document.packages}),
            "base": document.base or target.base,
            "platforms": document.platforms or target.platforms,
            "lock": pylock.read(folder / pylock.FILE, f"trainyard lock {name}"),
            "workspace": replace(target.workspace, file=path),
        }
    )
    _check_references(spec, data)
    return spec


#: Raises a :class:`UserError` about the value at a location of a spec's file.
_Refuse = Callable[[yaml_source.Location, str], None]


def _check_references(spec: Spec, data: CommentedMap) -> None:
    """Check that everything that a spec names exists.

    Raises:
        UserError: the first that does not.
    """

    def refuse(location: yaml_source.Location, message: str) -> None:
        if location[0] == "framework" and "packages" in data:  # a version.yaml
            location = location[1:]
        line = yaml_source.line_of(data, location)
        raise UserError(f"{spec.where}{f':{line}' if line else ''}: {'.'.join(map(str, location))}: {message}")

    if not re.fullmatch(r"[a-z0-9]+(-[a-z0-9]+)*(-\d+(\.\d+)*)?", spec.target):
        raise UserError(f"{spec.where}: the folder's name is the image's tag: use a-z, 0-9 and single dashes")
    if spec.base not in bases():
        refuse(("base",), f"unknown base '{spec.base}'{nearest(spec.base, bases())}; valid: {', '.join(bases())}")
    if spec.fallback_for and spec.fallback_for not in (known := targets()):
        refuse(
            ("fallback_for",),
            f"unknown target '{spec.fallback_for}'{nearest(spec.fallback_for, known)}; valid: {', '.join(known)}",
        )
    _check_framework(spec, refuse)
    if spec.own_trainers and not spec.own_trainers.is_dir():
        refuse(("trainers", "folder"), f"no folder {relative(spec.own_trainers)}")
    trainers = spec.trainer_commands()
    for location, name in (
        (("trainers", "default"), spec.trainers.default),
        (("smoke", "trainer"), spec.smoke.trainer),
    ):
        if name not in trainers:
            refuse(location, f"no trainer '{name}'{nearest(name, trainers)}; there are: {', '.join(trainers)}")


def _check_framework(spec: Spec, refuse: _Refuse) -> None:
    """Check that the packages of the framework are what an image can have."""
    if spec.framework.index not in ("default", *indexes()):
        known = ["default", *indexes()]
        refuse(
            ("framework", "index"),
            f"unknown index '{spec.framework.index}'{nearest(spec.framework.index, known)}; valid: {', '.join(known)}",
        )
    if spec.framework_in_base == bool(spec.framework.packages):
        mistake = f"base {spec.base} holds the framework: remove the packages" if spec.framework.packages else ""
        refuse(("framework", "packages"), mistake or "none given, as in [torch==2.15.0]")
    for position, text in enumerate([] if spec.nightly else spec.framework.packages):
        try:
            pin(text)
        except ValueError as error:
            refuse(
                ("framework", "packages", position), f"{error}, or give 'nightly: true' for the newest of every night"
            )
    try:
        spec.framework.version(spec.framework.packages)
    except ValueError as error:
        refuse(("framework", "packages"), str(error))
    if refused := conflict(_pinned(spec), spec.python_version):
        refuse(("framework", "packages"), refused)
