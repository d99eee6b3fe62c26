"""Read the packages of a base image that holds the framework, and make wheels of them that uv resolves beside.

A nightly's versions are on no package index. A wheel without modules has what a resolver reads: name, version and
requirements (https://packaging.python.org/en/latest/specifications/binary-distribution-format/).
"""

from __future__ import annotations

import contextlib
import datetime
import logging
import re
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from packaging.requirements import InvalidRequirement, Requirement
from packaging.utils import canonicalize_name
from packaging.version import InvalidVersion, Version

from trainyard.common import settings
from trainyard.common.errors import UserError
from trainyard.image import base_image, resolver
from trainyard.oci import probe_runner
from trainyard.spec.markers import applies
from trainyard.spec.model import BaseContents, Spec

logger = logging.getLogger(__name__)

#: Name of the index that the wheels are.
INDEX = "trainyard-base-image"

_WHEEL = "Wheel-Version: 1.0\nGenerator: trainyard\nRoot-Is-Purelib: true\nTag: py3-none-any\n"


def inspect(spec: Spec, known: BaseContents | None = None) -> BaseContents:
    """Return the contents of a base that holds the framework.

    The tag is first resolved to a digest; everything else refers to that digest.

    Args:
        known: returned as it is, and nothing is pulled, if the tag has that digest still.
    Raises:
        UserError: the base is unreachable, or is not as images/bases.yaml describes it.
    """
    wanted = spec.base_spec()
    base = base_image.resolve(spec.context, spec.base)
    if known and base.digest and (known.reference, known.digest) == (base.reference, base.digest):
        return known
    logger.info(f"{spec.target}: inspecting {base.reference}")
    spec.context.engine.pull(base.reference)
    seen = probe_runner.probe(spec.context.engine, base.reference)
    given = settings.variable("BASE")  # whose Python is the one to lock for, whatever its version
    if not given and not seen.python.startswith(f"{wanted.python}."):
        raise UserError(
            f"{base.reference} has Python {seen.python}; images/bases.yaml says {wanted.python} of base {spec.base}"
        )
    packages = {canonicalize_name(package.name): package for package in reversed(seen.packages)}
    missing = [name for name in wanted.framework if canonicalize_name(name) not in packages]
    if missing:
        raise UserError(f"{base.reference} has no {', '.join(missing)}: it cannot be base {spec.base}")
    contents = BaseContents(
        image=base_image.configured_reference(spec.base),
        reference=base.reference,
        digest=base.digest,
        day=datetime.datetime.now(tz=datetime.UTC).strftime("%Y%m%d"),
        python=seen.python,
        interpreter=seen.executable,
        site=seen.site,
        packages={name: package.version for name, package in sorted(packages.items())},
        requires=_required(
            wanted.framework, {name: package.requires for name, package in packages.items()}, seen.python
        ),
    )
    resolver.check_conflicts(spec, contents.packages)
    return contents


def _required(names: Sequence[str], requires: Mapping[str, Sequence[str]], python: str) -> dict[str, list[str]]:
    """Return canonical name -> requirements of packages and of the installed ones that they need, sorted.

    Args:
        names: of the packages.
        requires: name -> requirements of everything that is installed.
        python: version of the Python that it is installed for.
    """
    required: dict[str, list[str]] = {}
    waiting = list(map(canonicalize_name, names))
    while waiting:
        name = waiting.pop()
        if name in required or name not in requires:
            continue
        needed = _readable(requires[name])
        required[name] = list(needed)
        version = ".".join(python.split(".")[:2])
        waiting += [canonicalize_name(item.name) for item in needed.values() if applies(item.marker, version)]
    return dict(sorted(required.items()))


def _readable(texts: Sequence[str]) -> dict[str, Requirement]:
    """Return requirements in the metadata of what is installed, by their text, without those that are not PEP 508."""
    readable = {}
    for text in texts:
        with contextlib.suppress(InvalidRequirement):
            readable[text] = Requirement(text)
    return readable


def write_wheels(folder: Path, contents: BaseContents) -> None:
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
    """Return canonical name -> version of the framework's packages that a resolver can compare (PEP 440)."""
    return {name: version for name, version in contents.framework.items() if is_version(version)}


def is_version(text: str) -> bool:
    """Return whether a resolver can compare a version (PEP 440)."""
    try:
        Version(text)
    except InvalidVersion:
        return False
    return True


def _requirements(contents: BaseContents, name: str) -> Iterator[str]:
    """Yield the metadata about a package's requirements.

    Those that the framework's packages have on one another are left out: the versions in the base are given.
    """
    given = framework(contents)
    lines = [text for text in contents.requires[name] if canonicalize_name(Requirement(text).name) not in given]
    extras = {extra for text in contents.requires[name] for extra in re.findall(r"extra\s*==\s*['\"]([^'\"]+)", text)}
    yield from (f"Provides-Extra: {extra}" for extra in sorted(extras))
    yield from (f"Requires-Dist: {text}" for text in lines)
