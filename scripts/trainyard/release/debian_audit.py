"""Known vulnerabilities of the Debian packages of images, by the stored snapshot of Debian's security tracker.

A vulnerability fails if the image's suite has a fixed version and the image an older one: a newer base or a build
without cache has it. What Debian has not fixed, or calls unimportant, is a note: who builds the image cannot correct
it, and Debian fixes minor issues in point releases. See docs/supply-chain.md.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from trainyard.common.installation import require_extra
from trainyard.release.debian_advisories import SUITES, DebianAdvisory, DebianSnapshot
from trainyard.release.image_packages import ImagePackages
from trainyard.release.vulnerabilities import Pins, Vulnerability

#: The urgency of what Debian does not see as a security issue of its packages.
_UNIMPORTANT = "unimportant"


def suite_of(image: ImagePackages) -> str | None:
    """The Debian suite of an image; None if its packages are not Debian's."""
    if image.release.get("ID") != "debian":
        return None
    return SUITES.get(image.release.get("VERSION_ID", ""))


def sources(image: ImagePackages) -> Pins:
    """Source package -> versions, of the image's Debian packages."""
    found: Pins = {}
    for package in image.debian.values():
        name, version = package.source_package
        found.setdefault(name, set()).add(version)
    return found


def is_older(version: str, other: str) -> bool:
    """Whether a Debian version is less than another, in the order of ``dpkg --compare-versions``.

    A version that dpkg would refuse counts as less: a vulnerability is rather reported than passed over.

    Raises:
        UserError: what compares them is not installed.
    """
    require_extra("debian_inspector", "audit")
    try:
        return bool(_version(version) < _version(other))
    except (TypeError, ValueError):
        return True


def _version(text: str) -> Any:
    """``[epoch:]upstream[-revision]`` as an object that can be compared.

    The library's own parser refuses versions that dpkg accepts, such as 1.0~ (debian-inspector 31.1.1).
    """
    from debian_inspector.version import Version  # type: ignore[import-untyped]

    epoch, _, rest = text.partition(":") if ":" in text else ("0", "", text)
    upstream, dash, revision = rest.rpartition("-")
    return Version(epoch=int(epoch), upstream=upstream if dash else rest, revision=revision if dash else "0")


def vulnerabilities(image: ImagePackages, snapshot: DebianSnapshot) -> list[Vulnerability]:
    """The vulnerabilities of an image's Debian packages that a snapshot has; what Debian has not fixed are notes."""
    suite = suite_of(image)
    if suite is None:
        return []
    return [
        _vulnerability(advisory, version)
        for name, versions in sorted(sources(image).items())
        for advisory in snapshot.about(name, suite)
        for version in sorted(versions)
        if not advisory.fixed or is_older(version, advisory.fixed)
    ]


def _vulnerability(advisory: DebianAdvisory, version: str) -> Vulnerability:
    return Vulnerability(
        package=advisory.package,
        version=version,
        names=(advisory.id,),
        summary=advisory.summary,
        fixed=(advisory.fixed,) if advisory.fixed else (),
        kind="debian",
        note=_note(advisory),
    )


def _note(advisory: DebianAdvisory) -> str:
    """Why an advisory does not fail; empty if it does."""
    if advisory.urgency == _UNIMPORTANT:
        return f"Debian: {_UNIMPORTANT}"
    if advisory.fixed:
        return ""
    why = advisory.nodsa or ("not known whether affected" if advisory.status == "undetermined" else advisory.urgency)
    return f"not fixed in {advisory.suite}: {why}"


def uncovered(images: Iterable[ImagePackages], snapshot: DebianSnapshot | None) -> list[str]:
    """What of the images' Debian packages is not audited, a line each."""
    lines = []
    names: set[str] = set()
    for image in images:
        suite = suite_of(image)
        if not image.debian:
            lines.append(f"{image.reference}: no list of Debian packages, so none is audited")
        elif suite is None or (snapshot and suite not in snapshot.suites):
            name = f"{image.release.get('ID', 'unknown')} {image.release.get('VERSION_ID', '')}".strip()
            lines.append(f"{image.reference}: the snapshot does not cover {name}, so no Debian package is audited")
        else:
            names |= sources(image).keys()
    missing = sorted(names - set(snapshot.covers if snapshot else ()))
    if missing:
        few = ", ".join(missing[:5])
        lines.append(
            f"the snapshot covers {len(names) - len(missing)} of {len(names)} source packages of Debian; not {few}"
            + (" and others" if len(missing) > 5 else "")
        )
    return lines
