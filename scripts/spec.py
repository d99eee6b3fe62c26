"""The typed model of ``images/<target>/image.yaml``: what an image is, and the one place that reads it.

Everything else (Dockerfile, bake plan, locks, tags, labels, checks) is derived from a :class:`Spec`. A spec is
strict: an unknown key, a bad version, a missing field is a :class:`~scripts.cli.UserError` that names the file,
the line, the key, and the nearest valid spelling.
"""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

from packaging.requirements import InvalidRequirement, Requirement
from packaging.utils import canonicalize_name
from packaging.version import InvalidVersion, Version
from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, ValidationError
from ruamel.yaml import YAML
from ruamel.yaml.comments import CommentedMap, CommentedSeq
from ruamel.yaml.error import MarkedYAMLError

from scripts.cli import ROOT, UserError, nearest

IMAGES = ROOT / "images"

M = TypeVar("M", bound=BaseModel)

#: bytes in one unit of a size; decimal, as disk and registry sizes are given.
_UNITS = {"B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9}


def _size(text: object) -> object:
    match = re.fullmatch(r"(\d+(?:\.\d+)?) ?(B|KB|MB|GB)", str(text))
    if not match:
        raise ValueError(f"{text!r} is not a size: write a number and a unit of {', '.join(_UNITS)}, as in '1.9 GB'")
    return int(float(match[1]) * _UNITS[match[2]])


def _pin(text: str) -> str:
    """A requirement pinned to one version, ``name[extra]==1.2.3``."""
    try:
        requirement = Requirement(text)
    except InvalidRequirement as error:
        raise ValueError(f"{text!r} is not a requirement ({str(error).splitlines()[0]})") from None
    pins = list(requirement.specifier)
    if len(pins) != 1 or pins[0].operator != "==" or pins[0].version.endswith(".*"):
        raise ValueError(f"{text!r} is not pinned: write '{requirement.name}==<version>'")
    try:
        Version(pins[0].version)
    except InvalidVersion:
        raise ValueError(f"{text!r} has no valid version (PEP 440)") from None
    return text


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
    return _pin(text)


Size = Annotated[int, BeforeValidator(_size)]
Pin = Annotated[str, AfterValidator(_pin)]
PinOrSet = Annotated[str, AfterValidator(_pin_or_set)]
#: Debian's rule for package names (policy 5.6.1)
DebianPackage = Annotated[str, Field(pattern=r"^[a-z0-9][a-z0-9+.-]+$")]


class Strict(BaseModel):
    """No unknown key, no silent conversion, no change after loading."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


class Framework(Strict):
    """The big wheels: their own layer, their own lock."""

    name: Literal["torch", "torch_xla", "torch_tpu", "tensorflow"]
    packages: list[Pin] = Field(min_length=1)
    index: str = "default"

    @property
    def version(self) -> str:
        """Version of the package the image is named after: ``name`` itself, or a variant such as tensorflow-cpu."""
        pins = {canonicalize_name(Requirement(text).name): Requirement(text) for text in self.packages}
        name = canonicalize_name(self.name)
        variant = pins.get(name) or next((pins[pin] for pin in pins if pin.startswith(f"{name}-")), None)
        if variant is None:
            raise ValueError(f"none of the packages is {self.name} or a variant of it ({', '.join(pins)})")
        return next(iter(variant.specifier)).version


class Trainers(Strict):
    """Which trainers the image offers: the files of trainers/<package>/, and those of a folder of its own."""

    package: Literal["torch", "tf"]
    default: str
    folder: str | None = None


class Budget(Strict):
    size: Size


class Smoke(Strict):
    """The training run that decides whether an image is fit to be published."""

    trainer: str
    accuracy: Annotated[float, Field(gt=0, lt=1)]
    epochs: Annotated[int, Field(ge=3)] = 10


class Base(Strict):
    """What an image stands on; see images/bases.yaml."""

    image: str
    bootstrap: str
    python: str
    packages: list[DebianPackage]


class Index(Strict):
    """A package index beside the default one; see images/indexes.yaml."""

    url: str
    packages: list[str]


class _Document(Strict):
    """What one image.yaml may say, after ``extends`` was followed."""

    summary: str
    base: str
    framework: Framework
    requirements: list[PinOrSet] = []
    system: list[DebianPackage] = []
    trainers: Trainers
    budget: Budget
    smoke: Smoke


class Spec(_Document):
    """One image. ``folder`` holds its image.yaml; ``framework_folder`` the folder whose framework lock it uses."""

    target: str
    folder: Path
    framework_folder: Path

    @property
    def where(self) -> str:
        """The spec's file, as messages name it."""
        return relative(self.folder / "image.yaml")

    def base_spec(self) -> Base:
        return bases()[self.base]

    def index_spec(self) -> Index | None:
        """None for the default index."""
        return None if self.framework.index == "default" else indexes()[self.framework.index]

    def trainer_commands(self) -> dict[str, list[str]]:
        """Trainer name -> the command the launcher starts, as image.json holds it."""
        python = "/opt/venv/bin/python"
        commands = {
            path.stem: [python, "-m", f"trainers.{self.trainers.package}.{path.stem}"]
            for path in _trainer_files(ROOT / "trainers" / self.trainers.package)
        }
        if self.trainers.folder:
            for path in _trainer_files(self.folder / self.trainers.folder):
                commands[path.stem] = [python, f"/opt/trainyard/own/{path.name}"]
        return dict(sorted(commands.items()))


def _trainer_files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.glob("*.py") if not path.name.startswith("_"))


def relative(path: Path) -> str:
    """A path as messages and generated files name it: from the project's top where it lies below that."""
    try:
        return path.resolve().relative_to(ROOT).as_posix()
    except ValueError:
        return str(path)


def targets() -> list[str]:
    """Names of the catalogue's images, sorted."""
    return sorted(path.parent.name for path in IMAGES.glob("*/image.yaml"))


def requirement_sets() -> list[str]:
    """Names of the shared requirement sets, sorted."""
    return sorted(path.stem for path in (IMAGES / "requirements").glob("*.in"))


def _read_yaml(path: Path) -> CommentedMap:
    try:
        data = YAML(typ="rt").load(path.read_text(encoding="utf-8"))
    except MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        line = f":{mark.line + 1}" if mark else ""
        raise UserError(f"{relative(path)}{line}: not valid YAML: {error.problem or error.context}") from None
    except UnicodeDecodeError:
        raise UserError(f"{relative(path)}: not UTF-8 text") from None
    if not isinstance(data, CommentedMap):
        raise UserError(f"{relative(path)}: expected 'key: value' pairs at the top")
    return data


def _line_of(data: Any, location: tuple[int | str, ...]) -> int | None:
    """1-based line of the value at ``location``; of the nearest enclosing one if it is missing."""
    line: int | None = None
    for step in location:
        if isinstance(data, CommentedMap) and step in data:
            line = data.lc.key(step)[0] + 1
        elif isinstance(data, CommentedSeq) and isinstance(step, int) and step < len(data):
            line = data.lc.item(step)[0] + 1
        else:
            return line
        data = data[step]
    return line


def _keys_at(model: type[BaseModel], location: tuple[int | str, ...]) -> list[str]:
    """The keys ``model`` allows at ``location``."""
    for step in location:
        field = model.model_fields.get(str(step))
        kind = field.annotation if field else None
        if not (isinstance(kind, type) and issubclass(kind, BaseModel)):
            return []
        model = kind
    return list(model.model_fields)


def _explain(path: Path, data: CommentedMap, model: type[BaseModel], error: ValidationError) -> UserError:
    """The first thing wrong with a document, in one line."""
    # A misspelt key is both unknown and missing: the line is about the spelling.
    first = min(error.errors(), key=lambda one: one["type"] != "extra_forbidden")
    location = first["loc"]
    line = _line_of(data, location)
    where = f"{relative(path)}:{line}" if line else relative(path)
    key = ".".join(str(step) for step in location)
    more = f" (and {error.error_count() - 1} more)" if error.error_count() > 1 else ""
    if first["type"] == "extra_forbidden":
        valid = _keys_at(model, location[:-1])
        return UserError(
            f"{where}: unknown key '{key}'{nearest(str(location[-1]), valid)}; valid here: {', '.join(valid)}{more}"
        )
    if first["type"] == "missing":
        return UserError(f"{where}: '{key}' is missing{more}")
    return UserError(f"{where}: {key}: {first['msg'].removeprefix('Value error, ')}{more}")


def _validated(path: Path, model: type[M], data: CommentedMap, plain: dict[str, Any]) -> M:
    try:
        return model.model_validate(plain)
    except ValidationError as error:
        raise _explain(path, data, model, error) from None


def _plain(node: Any) -> Any:
    """YAML nodes as plain Python values."""
    if isinstance(node, dict):
        return {str(key): _plain(value) for key, value in node.items()}
    if isinstance(node, list):
        return [_plain(value) for value in node]
    if isinstance(node, bool) or node is None:
        return node
    if isinstance(node, float):
        return float(node)
    if isinstance(node, int):
        return int(node)
    return str(node)


def _table(path: Path, model: type[M]) -> dict[str, M]:
    table = {}
    for name, node in _read_yaml(path).items():
        if not isinstance(node, CommentedMap):
            raise UserError(f"{relative(path)}: {name}: expected 'key: value' pairs")
        table[str(name)] = _validated(path, model, node, _plain(node))
    return table


@cache
def bases() -> dict[str, Base]:
    return _table(IMAGES / "bases.yaml", Base)


@cache
def indexes() -> dict[str, Index]:
    return _table(IMAGES / "indexes.yaml", Index)


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
    """The folder of a target given by name or by path.

    Raises:
        UserError: no target was given, or there is none of that name; the valid ones are listed.
    """
    valid = f"valid targets: {', '.join(targets())}"
    if not target:
        raise UserError(f"no target given, as in 'make image TARGET=tf-cpu'; {valid}")
    if re.fullmatch(r"[A-Za-z0-9._-]+", target) and (IMAGES / target / "image.yaml").is_file():
        return IMAGES / target
    if "/" in target and (ROOT / target / "image.yaml").is_file():
        return (ROOT / target).resolve()
    raise UserError(f"unknown target '{target}'{nearest(target, targets())}; {valid}")


def load(target: str | None) -> Spec:
    """The checked spec of a target, ``extends`` followed.

    Args:
        target: a name under images/, or the path of a folder that holds an image.yaml.
    Raises:
        UserError: anything wrong with the name or the file, in one line.
    """
    return _load(folder_of(target), ())


def _load(folder: Path, below: tuple[Path, ...]) -> Spec:
    path = folder / "image.yaml"
    data = _read_yaml(path)
    plain = _plain(data)
    framework_folder = folder
    parent_name = plain.pop("extends", None)
    if parent_name is not None:
        if folder in below:
            raise UserError(f"{relative(path)}: 'extends' goes in a circle")
        try:
            parent = _load(folder_of(str(parent_name)), (*below, folder))
        except UserError as error:
            raise UserError(f"{relative(path)}:{_line_of(data, ('extends',))}: extends: {error}") from None
        if "framework" not in plain:
            framework_folder = parent.framework_folder
        above = parent.model_dump(include=set(_Document.model_fields))
        above["budget"] = {"size": f"{parent.budget.size} B"}
        plain = _merge(above, plain)
    document = _validated(path, _Document, data, plain)
    spec = Spec(
        **{name: getattr(document, name) for name in _Document.model_fields},
        target=folder.name,
        folder=folder,
        framework_folder=framework_folder,
    )
    _check_references(spec, data)
    return spec


def _check_references(spec: Spec, data: CommentedMap) -> None:
    """What a spec names must exist."""

    def refuse(location: tuple[str, ...], message: str) -> None:
        line = _line_of(data, location)
        raise UserError(f"{spec.where}{f':{line}' if line else ''}: {'.'.join(location)}: {message}")

    if not re.fullmatch(r"[a-z0-9]+(-[a-z0-9]+)*", spec.target):
        raise UserError(f"{spec.where}: the folder's name is the image's tag: use a-z, 0-9 and single dashes")
    if spec.base not in bases():
        refuse(("base",), f"unknown base '{spec.base}'{nearest(spec.base, bases())}; valid: {', '.join(bases())}")
    if spec.framework.index not in ("default", *indexes()):
        known = ["default", *indexes()]
        refuse(
            ("framework", "index"),
            f"unknown index '{spec.framework.index}'{nearest(spec.framework.index, known)}; valid: {', '.join(known)}",
        )
    try:
        _ = spec.framework.version
    except ValueError as error:
        refuse(("framework", "packages"), str(error))
    if spec.trainers.folder and not (spec.folder / spec.trainers.folder).is_dir():
        refuse(("trainers", "folder"), f"no folder {relative(spec.folder / spec.trainers.folder)}")
    trainers = spec.trainer_commands()
    for location, name in (
        (("trainers", "default"), spec.trainers.default),
        (("smoke", "trainer"), spec.smoke.trainer),
    ):
        if name not in trainers:
            refuse(location, f"no trainer '{name}'{nearest(name, trainers)}; there are: {', '.join(trainers)}")
