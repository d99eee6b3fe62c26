"""Find what ``trainyard lock`` refuses before it asks an index or an engine; ``trainyard check`` asks for the same."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from packaging.specifiers import SpecifierSet

from trainyard.common.errors import UserError
from trainyard.image import base_contents, framework_choice
from trainyard.image import framework_contradictions as contradictions
from trainyard.image.resolver import check_conflicts
from trainyard.spec.lock import versions
from trainyard.spec.markers import applies
from trainyard.spec.model import RepositorySpec, each_platform
from trainyard.workspace import indexes, requirements, wheels
from trainyard.workspace.lines import Line
from trainyard.workspace.requirements import Wanted


def refusals(spec: RepositorySpec) -> Iterator[UserError]:
    """Yield the mistakes of a repository that neither an index nor an engine has to tell."""
    checks: list[Callable[[], object]] = [
        lambda: contradictions.check_system(spec, requirements.of_image(spec)),
        lambda: list(map(wheels.check, requirements.of_image(spec).sources)),
        lambda: indexes.build_configuration(spec),
        lambda: _check_base(spec) if spec.framework_in_base else _check_framework(spec),
    ]
    for check in checks:
        try:
            check()
        except UserError as error:
            yield error


def _check_base(spec: RepositorySpec) -> None:
    """Compare the requirements with the framework that the base has, as far as it was inspected."""
    held = base_contents.framework(spec.base_contents) if spec.base_contents else {}
    if lines := contradictions.excluding(spec, requirements.of_platform(spec), held):
        raise contradictions.contradiction(spec, lines[0], held)


def _check_framework(spec: RepositorySpec) -> None:
    """Compare the requirements with the Pythons that bases have, with the target's framework, and with each other."""
    framework_choice.check_python(spec)
    home = spec.on_base(spec.workspace.document.base or spec.extends.base)
    reasons = framework_choice.reasons(home, requirements.of_platform(home))
    held = {one.arch: versions(one.extends.on(one.arch).locked().framework) for one in each_platform(home)}
    if not reasons and home.base != spec.extends.base:
        check_conflicts(home, held[home.arch])
    failures = []
    for one in map(home.on_base, framework_choice.possible_bases(home) if reasons else [home.base]):
        wanted = requirements.of_image(one)
        packages = framework_choice.packages(one, wanted, reasons) if reasons else []
        try:
            framework_choice.check_trainers(one, one.framework.version(line.text for line in packages))
            return _check_agreement(one, wanted, packages)
        except UserError as error:
            failures.append(error)
    raise failures[0]


def _check_agreement(spec: RepositorySpec, wanted: Wanted, packages: Sequence[Line]) -> None:
    """Check that no two requirements of a package exclude each other on a platform; uv.lock's are left to uv.

    Args:
        packages: the framework's.
    """
    constraints = [line for line in wanted.constraints if line.file.name != "uv.lock"]
    replaced = {line.name for line in wanted.overrides} | {*wanted.excludes}
    for one in each_platform(spec):
        of: dict[str, list[Line]] = {}
        for line in (*packages, *wanted.lines, *constraints):
            if line.name not in replaced and applies(
                line.requirement.marker, one.python_version, one.architecture.machine
            ):
                of.setdefault(line.name, []).append(line)
        for name in {line.name for line in (*packages, *wanted.lines)} & of.keys():
            first, *others = dict.fromkeys(of[name])
            for other in others:
                both = f"{first.requirement.specifier},{other.requirement.specifier}".strip(",")
                if contradictions.public(SpecifierSet(both)).is_unsatisfiable():
                    raise UserError(
                        f"{first.where}: {first.shown} and {other.shown} of {other.where} exclude each other: relax one"
                    )
