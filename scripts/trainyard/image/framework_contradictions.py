"""Compare what a user's repository asks for with the framework and the Python of its target."""

from __future__ import annotations

from collections.abc import Mapping

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name
from packaging.version import Version

from trainyard.common.errors import UserError
from trainyard.spec import model
from trainyard.spec.catalog import plain_bases, pythons_of
from trainyard.spec.framework import TENSORFLOW
from trainyard.spec.markers import allows, applies
from trainyard.spec.model import RepositorySpec, Spec
from trainyard.workspace.framework_table import table
from trainyard.workspace.lines import Line
from trainyard.workspace.requirements import Wanted


def excluding_python(wanted: Wanted, python: str) -> Line | None:
    """Return the first ``requires-python`` of the code's projects that excludes a minor version of Python."""
    return next((line for line in wanted.requires_python if not allows(line.text, python)), None)


def check_python(spec: RepositorySpec, wanted: Wanted) -> None:
    """Compare ``requires-python`` of the code's projects with the Python of the image.

    Raises:
        UserError: it is excluded.
    """
    if line := excluding_python(wanted, spec.python_version):
        raise UserError(
            f"{line.where}: requires-python '{line.text}' excludes Python {spec.python_version} of "
            f"{spec.extends.target}: relax it, or {_with_python(spec, line.text)}"
        )


def check_system(spec: RepositorySpec, wanted: Wanted) -> None:
    """Raise a UserError about the first package that is for another operating system or GPU alone."""
    replaced = {*wanted.excludes, *(line.name for line in wanted.overrides)}
    for line in (line for line in wanted.lines if line.name not in replaced):
        images = ((one.python_version, one.architecture.machine) for one in model.each_platform(spec))
        what = table().foreign.get(line.name)
        if what and any(applies(line.requirement.marker, *image) for image in images):
            also = ", or add '; sys_platform == \"darwin\"'" if what == "macOS" else ""
            raise UserError(f"{line.where}: {line.shown} is for {what} alone: remove it{also}")


def _with_python(spec: RepositorySpec, allowed: str) -> str:
    """Return what else can be done about a Python that a project does not allow."""
    known = plain_bases()
    fitting = [name for name, base in known.items() if allows(allowed, base.python)]
    if not fitting:
        return f"allow the Python of a base: {pythons_of(known)}"
    if spec.base not in known:
        return (
            f"extend a target that takes 'base: {fitting[0]}', as {spec.extends.target} has its framework in its base"
        )
    return f"give another base, as in 'base: {fitting[0]}'"


def variants(framework: Mapping[str, str]) -> dict[str, str]:
    """Return canonical name -> version of the framework's packages, under all names of TensorFlow if it is that."""
    installed = next((framework[name] for name in sorted(TENSORFLOW) if name in framework), None)
    return dict(framework) | ({name: installed for name in TENSORFLOW if name not in framework} if installed else {})


def public(specifiers: SpecifierSet) -> SpecifierSet:
    """Return specifiers without local versions, as of ``torch==2.6.0+cpu``, which the default index does not have."""
    return SpecifierSet(
        ",".join(
            f"=={Version(item.version).public}" if item.operator == "==" and "+" in item.version else str(item)
            for item in specifiers
        )
    )


def excluding(spec: RepositorySpec, wanted: Wanted, framework: Mapping[str, str]) -> list[Line]:
    """Return the user's lines that exclude a version of the framework.

    The constraints of a uv.lock are compared for the packages that the target names; the versions of what these
    depend on are the target's.
    """
    named = {canonicalize_name(Requirement(text).name) for text in spec.extends.packages}
    locked = [line for line in wanted.constraints if line.file.name != "uv.lock" or line.name in named]
    versions = variants(framework)
    return [
        line
        for line in (*wanted.lines, *locked, *wanted.overrides)
        if line.name in versions
        and applies(line.requirement.marker, spec.python_version, spec.architecture.machine)
        and not public(line.requirement.specifier).contains(versions[line.name], prereleases=True)
    ]


def contradiction(spec: RepositorySpec, line: Line, framework: Mapping[str, str]) -> UserError:
    """Return the error about a line of :func:`excluding`, which names both sides."""
    version = variants(framework)[line.name]
    held = line.name if line.name in framework else next(name for name in TENSORFLOW if name in framework)
    others = _targets_with(spec, line.name, line.requirement.specifier)
    advice = f"or extend {' or '.join(others)}" if others else "no other target has it"
    return UserError(
        f"{line.where}: {line.shown} contradicts {held} {version}, which {_owner(spec, framework)}: relax it, {advice}"
    )


def _owner(spec: RepositorySpec, framework: Mapping[str, str]) -> str:
    """Return what has the framework's versions: ``the framework of tf-cpu (tensorflow-cpu 2.21.0) is locked with``."""
    parent = f"{spec.extends.target}{_framework(spec, framework)}"
    return f"the base image of {parent} has" if spec.framework_in_base else f"the framework of {parent} is locked with"


def _framework(spec: Spec, versions: Mapping[str, str]) -> str:
    """Return `` (tensorflow-cpu 2.21.0)``: the package that the target is named after."""
    variant = spec.framework.named_after(versions)
    return f" ({variant} {versions[variant]})" if variant else ""


def _targets_with(spec: Spec, name: str, allowed: SpecifierSet) -> list[str]:
    """Return the targets for the platform of ``spec`` whose framework has a package in an allowed version."""
    found = []
    for one in model.recommended():
        if one.framework_in_base or spec.platform not in one.platforms:
            continue
        locked = one.on(spec.arch).locked()
        version = variants({pin.name: pin.version for pin in locked.framework}).get(name)
        if version and allowed.contains(version, prereleases=True):
            found.append(one.target)
    return found
