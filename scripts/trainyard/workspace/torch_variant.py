"""Find out which variant of a framework a repository asks for, in pip's, uv's and conda's words.

PyTorch has a package index for each variant (https://download.pytorch.org/whl/cu130), whose name is also a local
version (``2.13.0+cu130``), an extra of many projects, and uv's ``torch-backend``. Here alone these names are read: PEP
825 would replace them by wheel variants.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import unquote, urlsplit

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import InvalidWheelFilename, canonicalize_name, parse_wheel_filename
from packaging.version import Version

from trainyard.spec import matrix, model
from trainyard.spec.model import Spec
from trainyard.workspace.framework_table import Name, table
from trainyard.workspace.lines import Kind, Line, Source, text_of, without_credentials

if TYPE_CHECKING:
    from trainyard.workspace.requirement_choice import Choice

_NAME = r"(cpu|cu\d{2,3}|rocm\d[\d.]*|xpu)"

#: Where the name of a variant is: https://pytorch.org/get-started/locally/,
#: https://docs.astral.sh/uv/guides/integration/pytorch/
_WORDS = re.compile(
    rf"/(?:whl|pytorch-wheels)/(?:nightly/|test/)?{_NAME}(?![\w.])"  # an index, or a mirror of one
    rf"|(?:\+|%2B){_NAME}\b"  # a local version
    rf"|torch[-_]backend[\s=\"']+{_NAME}\b",
    re.IGNORECASE,
)

#: The same of conda: https://docs.conda.io/projects/conda/en/latest/user-guide/tasks/manage-virtual.html and
#: https://github.com/pytorch/pytorch/issues/138506
_CONDA = re.compile(
    r"^\s*-\s*[\"']?(?:[\w-]+::)?(cpuonly|pytorch-cpu|(?:pytorch-cuda|cudatoolkit|cuda-version)\s*[<>=~]+\s*([\d.]+))"
)

#: Files that installers read, besides that of the requirements; and those that tell people or builds what to install.
_READ = re.compile(
    r"pyproject\.toml|uv\.toml|pixi\.toml|pip\.conf|\.?config/pip/pip\.conf|(environment|conda|env)[\w.-]*\.ya?ml"
)
_TELL = re.compile(
    r"(.*/)?(Dockerfile[^/]*|[^/]*\.dockerfile|README[^/]*|INSTALL[^/]*|cog\.yaml|requirements[^/]*\.(txt|in))"
)

#: The address of an index of PyTorch's, or of a mirror with its folders.
_INDEX = re.compile(rf"/(?:whl|pytorch-wheels)/(?:nightly/|test/)?{_NAME}/?$")

#: A library of CUDA as pip lists it after torch was installed for a GPU.
_LIBRARY = re.compile(r"nvidia-[a-z0-9-]+-cu(1[123])")

_OTHERS = {"rocm": "ROCm", "xpu": "Intel's XPU"}


@dataclass(frozen=True)
class Variant:
    """Say what is asked for.

    Attributes:
        kind: ``cpu`` or ``cuda``; ``rocm`` or ``xpu``, which no target is for.
        version: of CUDA or ROCm, as in 12.6; empty if it is not said.
        place: file and line, ``text``: what is written there.
    """

    kind: str
    version: str
    place: str
    text: str

    @property
    def what(self) -> str:
        name = {"cpu": "CPUs", "cuda": "CUDA"}.get(self.kind) or _OTHERS[self.kind]
        return f"{name} {self.version}".strip()

    @property
    def why(self) -> str:
        """Return ``requirements.txt:1 asks for CUDA 12.6 (cu126)``."""
        return f"{self.place} asks for {self.what} ({self.text})"


def _of_name(name: str, place: str, text: str = "") -> Variant:
    name = name.lower()
    kind = re.match(r"[a-z]+", name)[0]  # type: ignore[index]
    version = name.removeprefix(kind)
    if kind == "cu":
        kind, version = "cuda", f"{version[:-1]}.{version[-1]}"
    return Variant(kind, version, place, text or name)


def is_name(text: str) -> bool:
    """Return whether a text is the name of a variant, as extras of projects have it."""
    return bool(re.fullmatch(_NAME, text, re.IGNORECASE))


def stated(root: Path, names: Sequence[str], wanted: Choice, framework: Name) -> list[Variant]:
    """Return what the files that installers read ask for, each variant once.

    Args:
        framework: the names of PyTorch's variants count for PyTorch alone.
    """
    chosen = {wanted.file, *(place.rpartition(":")[0] for _, place in wanted.lines)} - {""}
    files = [name for name in names if framework == "torch" and (name in chosen or _READ.fullmatch(name))]
    found = [one for name in files for one in _in_file(root / name, name)]
    for name, place in wanted.names.items():
        if library := _LIBRARY.fullmatch(name):
            found.append(Variant("cuda", library[1], place, name))
        elif name in table().gpu:
            found.append(Variant("cuda", "", place, name))
    return _once(found)


def told(root: Path, names: Sequence[str]) -> list[Variant]:
    """Return what files say that tell people or builds what to install, and a setup.py, each variant once."""
    found = [one for name in names if _TELL.fullmatch(name) for one in _in_file(root / name, name)]
    packages = re.compile(rf"""["']({"|".join(map(re.escape, table().gpu))})\b""", re.IGNORECASE)
    for number, line in enumerate(text_of(root / "setup.py").splitlines() if "setup.py" in names else (), 1):
        found += [Variant("cuda", "", f"setup.py:{number}", match[1]) for match in packages.finditer(line)]
    return _once(found)


def _in_file(path: Path, name: str) -> Iterable[Variant]:
    for number, line in enumerate(text_of(path).splitlines(), 1):
        text = line.partition(" #")[0]
        if text.lstrip().startswith(("#", "//")) and not name.endswith(".md"):
            continue
        for match in _WORDS.finditer(text):
            yield _of_name(next(filter(None, match.groups())), f"{name}:{number}")
        if name.endswith(("yml", "yaml")) and (conda := _CONDA.match(text)):
            version = conda[2] or ""
            yield Variant("cuda" if version else "cpu", version, f"{name}:{number}", re.sub(r"\s", "", conda[1]))


def _once(found: Iterable[Variant]) -> list[Variant]:
    first: dict[tuple[str, str], Variant] = {}
    for one in found:
        first.setdefault((one.kind, one.version), one)
    return list(first.values())


def target_for(name: Name, asked: Variant, wanted: Choice) -> tuple[str, str]:
    """Return the target for GPUs whose CUDA is the nearest to one that is asked for, and a note; empty if it has that.

    The same major release runs on the same drivers.
    """
    targets = [one for one in model.recommended() if one.accelerator == "nvidia"]
    targets = [one for one in targets if table().of_target(one.framework.name) == name]
    specifier, usual = _specifier(wanted), table().frameworks[name].targets["gpu"]
    targets.sort(key=lambda one: (not specifier.contains(Version(one.version).public), one.target != usual))
    have = [(one, _cuda(one, specifier)) for one in targets]
    major = asked.version.partition(".")[0]
    first, cuda = next((pair for pair in have if not major or pair[1].partition(".")[0] == major), have[0])
    if not major or cuda.partition(".")[0] == major:
        return first.target, ""
    driver = first.device_code.driver if first.device_code else ""
    minor = ".".join(cuda.split(".")[:2])
    return first.target, (
        f"{asked.why}, and {first.target} has CUDA {minor}, which needs driver {driver} or later; no target has "
        f"CUDA {major} for these requirements"
    )


def _specifier(wanted: Choice) -> SpecifierSet:
    """Return the versions of torch that requirements allow, without local versions."""
    texts = [str(Requirement(text).specifier) for text, _ in wanted.lines if Requirement(text).name == "torch"]
    return SpecifierSet(re.sub(r"\+[\w.]+", "", ",".join(filter(None, texts))))


def _cuda(spec: Spec, specifier: SpecifierSet) -> str:
    """Return the CUDA of a target's wheels, or of those of the newest release that requirements allow."""
    if spec.framework.name != "torch" or specifier.contains(Version(spec.version).public):
        return min(spec.cuda, default="")
    releases = matrix.matrix().frameworks["torch"].versions
    for minor in sorted(releases, key=Version, reverse=True):
        if any(specifier.contains(f"{minor}.{patch}") for patch in range(10)) and releases[minor].cuda:
            return min(releases[minor].cuda)
    return min(spec.cuda, default="")


def without_indexes(spec: Spec, addresses: Sequence[tuple[Kind, Line]]) -> list[tuple[Kind, Line]]:
    """Return the indexes of a requirements file without PyTorch's, if the target has PyTorch.

    The variant is the target's, and an index that holds nothing else hides the others, or is asked for every package.
    """
    others = [(kind, line) for kind, line in addresses if not _INDEX.search(without_credentials(line.text))]
    # The table is read only where there is something to leave out: every command that reads requirements comes here.
    leaves = len(others) < len(addresses) and table().of_target(spec.framework.name) == "torch"
    return others if leaves else list(addresses)


def of_addresses(spec: Spec, sources: Sequence[Source]) -> tuple[list[Line], list[Source]]:
    """Return what wheels of the framework, by their addresses, ask of its version, and the other sources.

    An image has the framework's packages once, from the index of its target.
    """
    packages = {canonicalize_name(Requirement(text).name) for text in spec.framework.packages}
    lines, others = [], []
    for one in sources:
        name = Path(unquote(urlsplit(one.location).path)).name
        if one.is_path or one.name not in packages or not name.endswith(".whl"):
            others.append(one)
            continue
        try:
            lines.append(replace(one.line, text=f"{one.name}=={parse_wheel_filename(name)[1].public}"))
        except InvalidWheelFilename:
            others.append(one)
    return lines, others
