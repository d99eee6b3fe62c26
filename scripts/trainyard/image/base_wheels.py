"""Stand-ins for the packages of a base image that holds the framework, so that uv resolves beside them.

A nightly's versions are on no package index. A wheel without modules has what a resolver reads: name, version and
requirements (https://packaging.python.org/en/latest/specifications/binary-distribution-format/).
"""

from __future__ import annotations

import re
import zipfile
from collections.abc import Iterator
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import InvalidVersion, Version

from trainyard.spec.model import BaseContents

#: Name of the index that the wheels are.
INDEX = "trainyard-base-image"

_WHEEL = "Wheel-Version: 1.0\nGenerator: trainyard\nRoot-Is-Purelib: true\nTag: py3-none-any\n"


def write(folder: Path, contents: BaseContents) -> None:
    """Write a wheel for each package of the base's framework into ``folder``, which is made."""
    folder.mkdir()
    for name, version in framework(contents).items():
        stem = f"{name.replace('-', '_')}-{Version(version)}"
        metadata = ["Metadata-Version: 2.1", f"Name: {name}", f"Version: {version}", *_requirements(contents, name), ""]
        with zipfile.ZipFile(folder / f"{stem}-py3-none-any.whl", "w") as wheel:
            wheel.writestr(f"{stem}.dist-info/METADATA", "\n".join(metadata))
            wheel.writestr(f"{stem}.dist-info/WHEEL", _WHEEL)
            wheel.writestr(f"{stem}.dist-info/RECORD", "")


def framework(contents: BaseContents) -> dict[str, str]:
    """Canonical name -> version of the framework's packages that a resolver can compare (PEP 440)."""
    return {name: version for name, version in contents.framework.items() if _is_version(version)}


def _is_version(text: str) -> bool:
    try:
        Version(text)
    except InvalidVersion:
        return False
    return True


def _requirements(contents: BaseContents, name: str) -> Iterator[str]:
    """The metadata about a package's requirements.

    Those that the framework's packages have on one another are left out: the versions in the base are given.
    """
    given = framework(contents)
    lines = [text for text in contents.requires[name] if canonicalize_name(Requirement(text).name) not in given]
    extras = {extra for text in contents.requires[name] for extra in re.findall(r"extra\s*==\s*['\"]([^'\"]+)", text)}
    yield from (f"Provides-Extra: {extra}" for extra in sorted(extras))
    yield from (f"Requires-Dist: {text}" for text in lines)


def pins(contents: BaseContents) -> str:
    """The packages of :func:`framework` as lines of a requirements file."""
    return "".join(f"{name}=={version}\n" for name, version in framework(contents).items())
