"""Render what images are built from: the Dockerfile of each spec, and the bake file of the catalogue.

The other generated files, and writing them, are in :mod:`trainyard.project.generated`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trainyard.common import templates
from trainyard.common.errors import one_line
from trainyard.common.installation import check_writable
from trainyard.common.settings import ROOT
from trainyard.image import facts
from trainyard.image.wheel_layers import WheelLayer, group
from trainyard.spec import naming, workspace
from trainyard.spec.architectures import AMD64
from trainyard.spec.catalog import DEBIAN_PYTHON, bases
from trainyard.spec.framework import UNLOCKED
from trainyard.spec.lock import DEFAULT, Locked, Pin
from trainyard.spec.model import IMAGES, RepositorySpec, Spec, catalogue, each_platform

BAKE_FILE = IMAGES / "docker-bake.json"


def _version(spec: Spec, read_in_base: str) -> str:
    """Return the framework's version as a Dockerfile has it, or what stands for that of a base."""
    return read_in_base if spec.framework_in_base else spec.version


#: Variables of images for NVIDIA GPUs. The first two tell the container runtime which libraries of the driver to mount:
#: https://docs.nvidia.com/datacenter/cloud-native/container-toolkit/latest/docker-specialized.html
#: GKE and Vertex AI mount them under /usr/local/nvidia: https://cloud.google.com/kubernetes-engine/docs/how-to/gpus#cuda
_NVIDIA = {
    "NVIDIA_VISIBLE_DEVICES": "all",
    "NVIDIA_DRIVER_CAPABILITIES": "compute,utility",
    "LD_LIBRARY_PATH": "/usr/local/nvidia/lib64",
}


def search_path(spec: Spec) -> str:
    """PATH inside the image. If the base holds the framework and its Python, the base's PATH is part of it."""
    return spec.kind.search_path + (":/usr/local/nvidia/bin" if spec.accelerator == "nvidia" else "")


def environment(spec: Spec) -> dict[str, str]:
    """Every variable that the image sets, except PATH (:func:`search_path`)."""
    # USER: getpass.getuser(), which torch.compile calls, fails without it for a uid that has no name in the image, as
    # some clusters assign: https://docs.python.org/3/library/getpass.html#getpass.getuser
    fixed = {"PYTHONUNBUFFERED": "1", "HOME": "/home/trainer", "USER": "trainer"}
    return fixed | (_NVIDIA if spec.accelerator == "nvidia" else {}) | spec.environment


def _quoted(value: str) -> str:
    """Text of a spec as a quoted word of a Dockerfile, in which nothing is expanded."""
    return '"{}"'.format(re.sub(r'([\\"$])', r"\\\1", value))


def _lines(pairs: Mapping[str, str]) -> str:
    """Return the pairs of an ENV or LABEL instruction."""
    return " \\\n    ".join(f"{name}={value}" for name, value in pairs.items())


def _environment_lines(spec: Spec) -> str:
    pairs = {
        name: value if name not in spec.environment else _quoted(value) for name, value in environment(spec).items()
    }
    return _lines({"PATH": search_path(spec)} | pairs)


def _label_lines(spec: Spec) -> str:
    """The pairs of the LABEL instruction."""
    pairs = {name: _quoted(value) for name, value in facts.labels(spec).items()}
    arguments = facts.labels_from_arguments(spec)
    pairs |= {name: f'"${{{argument}}}"' for name, argument in arguments.items()}
    pairs[f"{naming.LABELS}.framework"] = f'"{spec.framework.name}=={_version(spec, "${FRAMEWORK_VERSION}")}"'
    return _lines(dict(sorted(pairs.items())))


@dataclass(frozen=True)
class Source:
    """Where a Dockerfile copies a folder's files from: the main build context or a named one.

    Attributes:
        folder: the folder.
        copy: text between COPY and a file's name.
        context: name of the build context; empty for the main one.
    """

    folder: Path
    copy: str
    context: str = ""

    @property
    def inside(self) -> bool:
        """Whether the folder is in the main build context."""
        return not self.context


def source(folder: Path, context: str) -> Source:
    """The main build context has images/ alone, so a folder elsewhere is a named context, ``context``."""
    if folder.is_relative_to(IMAGES):
        return Source(folder, f"{from_root(folder)}/")
    return Source(folder, f"--from={context} ", context)


def own_source(spec: Spec) -> Source:
    """Return the source of what is built from a user's repository."""
    return source(spec.build_folder, "own-files")


def own_trainers(spec: Spec) -> Source | None:
    """Return the source of an image's own trainers; None if it has none."""
    return source(spec.own_trainers, "own-trainers") if spec.own_trainers else None


def recipe_context(spec: Spec) -> dict[str, str]:
    """Return the build context with the recipe, where `trainyard dev plan` writes it in a checkout."""
    return {"recipe": f"build/{spec.local_name}/recipe"}


def contexts(spec: Spec) -> dict[str, str]:
    """Return name -> folder of the named build contexts that hold what is outside the catalogue."""
    used = [own_source(spec) if spec.build_folder != spec.folder else None, own_trainers(spec)]
    return {each.context: from_root(each.folder) for each in used if each and not each.inside}


def from_root(path: Path, root: Path = ROOT) -> str:
    """A path relative to the project, where builds run, if it is inside; independent of the current folder."""
    return path.relative_to(root).as_posix() if path.is_relative_to(root) else str(path)


def source_of(spec: Spec) -> str:
    """Return the path of the spec's file in its repository; its name if it is in none.

    One file makes the same image as the trainyard.yaml that ``init`` makes of it.
    """
    if spec.workspace.one_file:
        return workspace.FILE
    return from_root(spec.file, spec.root) if spec.file.is_relative_to(spec.root) else spec.file.name


@dataclass(frozen=True)
class OtherPython:
    """A base that an image is not made from, whose Python compiles byte code for what all images share."""

    name: str

    @property
    def stage(self) -> str:
        return f"python-{self.name}"

    @property
    def argument(self) -> str:
        return facts.python_argument(self.name)

    @property
    def image(self) -> str:
        base = bases()[self.name]
        return base.build_base or base.image


def wheels(spec: Spec, index: str = DEFAULT) -> list[WheelLayer]:
    """Return the layers of an image's wheels, lowest first; none if the base holds the framework.

    Args:
        index: see :func:`variables`.
    Raises:
        UserError: there is no lock that can be used.
    """
    if not spec.kind.layered:
        return []
    locked = spec.locked(index)
    index_spec = spec.index_spec() if index != DEFAULT else None
    return group([*locked.framework, *locked.requirements], index_spec.packages if index_spec else ())


def variables(spec: Spec, index: str) -> dict[str, Any]:
    """The variables of templates/Dockerfile.j2.

    Args:
        index: name of the package index that the framework comes from.
    """
    base = spec.base_spec()
    locked = (spec.usable_lock and spec.usable_lock.of(spec.arch, index)) or Locked()
    # Markers may leave nothing to compile.
    own = spec.workspace.compiles_own
    build = spec.workspace.document.build if locked.compiled or own else None
    # Of a step that installs what a user adds: addresses and credentials of private indexes are secrets.
    mounts = "".join(
        f" --mount=type=secret,id={name},target=/run/secrets/{file}" for name, file in spec.secrets.items()
    )
    named = contexts(spec) | recipe_context(spec)
    pythons = [OtherPython(name) for name in facts.other_pythons(spec)]
    shared = pythons[0].stage if spec.framework_in_base else "tools"
    return {
        "spec_file": one_line(source_of(spec)),
        "dockerfile": one_line(from_root(spec.dockerfile(index))),
        "platform_option": "" if spec.arch == AMD64.name else f"--platform {spec.platform} ",
        "contexts": "".join(f"--build-context {name}={one_line(path)} " for name, path in named.items()),
        "own_source": own_source(spec),
        "wheel_layers": wheels(spec, index),
        "trainers_packages": spec.trainers.packages if spec.has_trainers else [],
        "own_trainers": own_trainers(spec),
        "target": spec.target,
        "base": base,
        "base_name": spec.base,
        "framework_in_base": spec.framework_in_base,
        "pythons": pythons,
        "shared_stage": shared,
        "mount_pythons": "".join(
            f"--mount=from={one.stage},target=/pythons/{one.name},rw " for one in pythons if one.stage != shared
        ),
        "platform": spec.wheel_platform,
        "interpreter": spec.kind.build_python,
        "compiled_python": base.interpreter != DEBIAN_PYTHON,
        "headers": " libpython3-dev" if base.interpreter == DEBIAN_PYTHON else "",
        "shebang": spec.site.shebang,
        "path": search_path(spec),
        "environment_lines": _environment_lines(spec),
        "workspace": isinstance(spec, RepositorySpec),
        "code": spec.has_code,
        "build": build,
        "extensions": own,
        "site": spec.site.packages,
        "requirements": _lines_of(locked.requirements),
        "compiled": _lines_of(locked.compiled),
        "build_requires": _lines_of(locked.build_requires),
        "build_environment_lines": _lines({name: _quoted(value) for name, value in build.environment.items()})
        if build
        else "",
        "private_indexes": mounts,
        "tools": spec.tools,
        "profile": spec.profile,
        "system": spec.libraries,
        "compiler": spec.has_compiler,
        "bottom": "libraries" if spec.libraries else "compiler" if spec.has_compiler else "system",
        "epoch": naming.FILE_EPOCH,
        "version": _version(spec, UNLOCKED),
        "label_lines": _label_lines(spec),
    }


def _lines_of(pins: Iterable[Pin]) -> str:
    """Return pins as a requirements file."""
    return "".join(f"{pin.requirement()}\n" for pin in pins)


def dockerfile(spec: Spec, index: str = DEFAULT) -> str:
    """The text of a target's Dockerfile.

    Args:
        index: see :func:`variables`.
    """
    return templates.environment().get_template("Dockerfile.j2").render(variables(spec, index)).rstrip("\n") + "\n"


def bake(specs: list[Spec]) -> str:
    """The text of images/docker-bake.json: one target per image.

    Those for the architecture of most are the group ``default``, the others a group named after their architecture.
    """
    groups: dict[str, list[str]] = {}
    for spec in specs:
        groups.setdefault("default" if spec.arch == AMD64.name else spec.arch, []).append(spec.bake_name)
    plan_of_targets = {
        "//": "Generated from images/*/image.yaml by `make render`. Do not edit.",
        "group": {name: {"targets": targets} for name, targets in groups.items()},
        "target": {
            spec.bake_name: {
                "context": ".",
                "contexts": contexts(spec) | recipe_context(spec),
                "dockerfile": from_root(spec.dockerfile()),
                "tags": [naming.candidate_tag(spec.local_name)],
                "platforms": [spec.platform],
            }
            for spec in specs
        },
    }
    return json.dumps(plan_of_targets, indent=2) + "\n"


def rendered(only: Spec | None = None) -> dict[Path, str]:
    """Path -> text of the files that images are built from: of all images, or of one."""
    if only is not None and only.folder.parent != IMAGES:
        return _dockerfiles(_locked_platforms(only))
    specs = [one for spec in catalogue() for one in each_platform(spec)]
    return _dockerfiles(specs if only is None else _locked_platforms(only)) | {BAKE_FILE: bake(specs)}


def _locked_platforms(spec: Spec) -> list[Spec]:
    """Return the spec, and for each of its other platforms that it is locked for."""
    others = [one for one in each_platform(spec) if one.arch != spec.arch]
    return [spec, *(one for one in others if one.usable_lock and one.usable_lock.of(one.arch))]


def _dockerfiles(specs: list[Spec]) -> dict[Path, str]:
    return {spec.dockerfile(index): dockerfile(spec, index) for spec in specs for index in locked_indexes(spec)}


def locked_indexes(spec: Spec) -> list[str]:
    """Return the names of the package indexes that an image is locked for; the default one, if it never was."""
    return (spec.usable_lock.names(spec.arch) if spec.usable_lock else []) or [DEFAULT]


def drift(only: Spec | None = None) -> list[Path]:
    """Files of :func:`rendered` that are missing or out of date."""
    return differing(rendered(only))


def differing(files: dict[Path, str]) -> list[Path]:
    """Paths whose file is missing or has another text."""
    return [path for path, text in files.items() if not path.is_file() or path.read_text(encoding="utf-8") != text]


def write(files: dict[Path, str]) -> list[Path]:
    """Bring files up to date; the paths of those that were written.

    Raises:
        UserError: one of them is part of the installed package.
    """
    changed = differing(files)
    for path in changed:
        check_writable(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(files[path], encoding="utf-8")
    return changed
