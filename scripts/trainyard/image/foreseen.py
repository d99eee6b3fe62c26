"""Find what ``trainyard lock`` refuses before it asks an index or an engine; ``trainyard check`` asks for the same."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from trainyard.common.errors import UserError
from trainyard.image import base_contents, framework_choice
from trainyard.image import framework_contradictions as contradictions
from trainyard.image.explanation import explained
from trainyard.image.resolution import Request
from trainyard.image.resolver import check_conflicts
from trainyard.spec.lock import versions
from trainyard.spec.model import RepositorySpec, each_platform
from trainyard.workspace import indexes, requirements, wheels


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
        request = Request(each_platform(one), wanted, {} if reasons else held)
        try:
            framework_choice.check_trainers(one, one.framework.version(line.text for line in packages))
            with explained(request, [*reasons, *wanted.lines]):
                return framework_choice.check_agreement(request, packages)
        except UserError as error:
            failures.append(error)
    raise failures[0]
