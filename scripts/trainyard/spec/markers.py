"""Environment markers of requirements (PEP 508), as they are in an image: Linux and CPython."""

from __future__ import annotations

import re
from collections.abc import Callable

from packaging.markers import InvalidMarker, Marker
from packaging.requirements import InvalidRequirement, Requirement
from packaging.specifiers import SpecifierSet

from trainyard.common.errors import UserError
from trainyard.spec.architectures import AMD64
from trainyard.spec.yaml_source import LONGEST_NUMBER

#: Whether a marker is true in an image; one that is missing is.
Fits = Callable[[Marker | str | None], bool]


def requirement(text: str) -> Requirement:
    """Parse a requirement from a user's file.

    Raises:
        InvalidRequirement: the text is not a requirement, or ``packaging`` cannot handle it.
    """
    try:
        if re.search(rf"\d{{{LONGEST_NUMBER}}}", text):
            raise InvalidRequirement(f"a number of more than {LONGEST_NUMBER} digits")
        return Requirement(text)
    except RecursionError:
        raise InvalidRequirement("its marker is nested too deeply") from None


def environment(python: str, machine: str = AMD64.machine) -> dict[str, str]:
    """The variables of markers in an image.

    Args:
        python: version of its Python, such as ``3.11``.
        machine: of its architecture, as ``uname -m`` says.
    """
    return {
        "implementation_name": "cpython",
        "implementation_version": f"{python}.0",
        "os_name": "posix",
        "platform_machine": machine,
        "platform_python_implementation": "CPython",
        "platform_release": "",
        "platform_system": "Linux",
        "platform_version": "",
        "python_full_version": f"{python}.0",
        "python_version": python,
        "sys_platform": "linux",
        "extra": "",
    }


def allows(versions: str, python: str) -> bool:
    """Return whether a specifier, as of ``requires-python``, allows a minor version of Python: its first or last patch.

    That of an image is not known.
    """
    return any(map(SpecifierSet(versions).contains, (f"{python}.0", f"{python}.99")))


def applies(marker: Marker | str | None, python: str, machine: str = AMD64.machine) -> bool:
    """Return whether a marker is true in an image; arguments as of :func:`environment`.

    Raises:
        UserError: it is no marker.
    """
    if not marker:
        return True
    try:
        found = marker if isinstance(marker, Marker) else Marker(marker)
    except (InvalidMarker, RecursionError):
        raise UserError(
            f"{str(marker)[:200]!r} is not an environment marker (PEP 508), as in \"sys_platform == 'linux'\""
        ) from None
    return found.evaluate(environment(python, machine))
