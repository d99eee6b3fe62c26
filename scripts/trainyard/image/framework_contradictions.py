"""Compare what a user's repository asks for with the framework and the Python of its target."""

from __future__ import annotations

from collections.abc import Mapping

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name

from trainyard.common.errors import UserError
from trainyard.spec import model
from trainyard.spec.catalog import debian_bases
from trainyard.spec.markers import applies
from trainyard.spec.model import RepositorySpec, Spec
from trainyard.workspace.requirements import Wanted

#: Packages that install the module tensorflow, so that an image has one of them:
#: https://www.tensorflow.org/install/pip#package_location
_TENSORFLOW = frozenset(
    {"tensorflow", "tensorflow-cpu", "tensorflow-cpu-aws", "tensorflow-gpu", "tensorflow-tpu", "tf-nightly",
     "tf-nightly-cpu", "tf-nightly-tpu"}
)  # fmt: skip


def check_python(spec: RepositorySpec, wanted: Wanted) -> None:
    """Compare ``requires-python`` of the code's projects with the target's Python, of which the patch is not known."""
    python = spec.python_version
    for line in wanted.requires_python:
        allowed = SpecifierSet(line.text)
        if not any(allowed.contains(f"{python}.{patch}") for patch in (0, 99)):
            raise UserError(
                f"{line.where}: requires-python '{line.text}' excludes Python {python} of {spec.extends.target}: "
                f"relax it, or {_with_python(allowed)}"
            )


def _with_python(allowed: SpecifierSet) -> str:
    """What else can be done about a Python that a project does not allow."""
    bases = [name for name, base in debian_bases().items() if allowed.contains(f"{base.python}.99")]
    if bases:
        return f"give another base, as in 'base: {bases[0]}'"
    fitting = [one.target for one in model.recommended() if allowed.contains(f"{one.base_spec().python}.99")]
    return f"extend another target ({', '.join(fitting)})" if fitting else "extend another target"


def variants(framework: Mapping[str, str]) -> dict[str, str]:
    """Canonical name -> version of the framework's packages, under all names of TensorFlow if it is that."""
    installed = next((framework[name] for name in sorted(_TENSORFLOW) if name in framework), None)
    return dict(framework) | ({name: installed for name in _TENSORFLOW if name not in framework} if installed else {})


def check(spec: RepositorySpec, wanted: Wanted, framework: Mapping[str, str]) -> None:
    """Check the user's own lines against the versions of the framework.

    The constraints of a uv.lock are compared for the packages that the target names; the versions of what these
    depend on are the target's.

    Raises:
        UserError: one excludes the framework's version; both sides are named.
    """
    named = {canonicalize_name(Requirement(text).name) for text in spec.packages}
    locked = [one for one in wanted.constraints if one.file.name != "uv.lock" or one.name in named]
    versions = variants(framework)
    for line in (*wanted.lines, *locked, *wanted.overrides):
        version = versions.get(line.name)
        wants = line.requirement
        if version is None or not applies(wants.marker, spec.python_version, spec.architecture.machine):
            continue
        if not wants.specifier.contains(version, prereleases=True):
            held = line.name if line.name in framework else next(name for name in _TENSORFLOW if name in framework)
            others = _targets_with(spec, line.name, wants.specifier)
            advice = f"or extend {' or '.join(others)}" if others else "no other target has it"
            raise UserError(
                f"{line.where}: {line.shown} contradicts {held} {version}, which {_owner(spec, framework)}: relax it, "
                f"{advice}"
            )


def _owner(spec: RepositorySpec, framework: Mapping[str, str]) -> str:
    """What has the framework's versions: ``the framework of tf-cpu (tensorflow-cpu 2.21.0) is locked with``."""
    parent = f"{spec.extends.target}{_framework(spec, framework)}"
    return f"the base image of {parent} has" if spec.framework_in_base else f"the framework of {parent} is locked with"


def _framework(spec: Spec, versions: Mapping[str, str]) -> str:
    """`` (tensorflow-cpu 2.21.0)``: the package that the target is named after."""
    variant = spec.framework.named_after(versions)
    return f" ({variant} {versions[variant]})" if variant else ""


def _targets_with(spec: Spec, name: str, allowed: SpecifierSet) -> list[str]:
    """Targets for the platform of ``spec`` whose framework has a package in an allowed version."""
    found = []
    for one in model.recommended():
        if one.framework_in_base or spec.platform not in one.platforms:
            continue
        locked = one.on(spec.arch).locked()
        version = variants({pin.name: pin.version for pin in locked.framework}).get(name)
        if version and allowed.contains(version, prereleases=True):
            found.append(one.target)
    return found
