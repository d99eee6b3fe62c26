"""Read the SBOM that is attached to an image at a registry, and the packages that it lists."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from packageurl import PackageURL
from packaging.utils import canonicalize_name

from trainyard.oci import documents, statements
from trainyard.oci.registry import Repository
from trainyard.spec.naming import LABELS

#: Predicate type of a statement with an SBOM: CycloneDX (ECMA-424), as cosign writes it.
PREDICATE = "https://cyclonedx.org/bom"

#: The property of a package in our SBOMs with the diff id of its layer.
LAYER = f"{LABELS}.layer"


@dataclass(frozen=True)
class InstalledPackage:
    """Describe a Python distribution (its dist-info) or a Debian package.

    Attributes:
        architecture: of a Debian package.
        requires: PEP 508 lines (Python only).
        source, source_version: of a Debian package, where they are not its name and version; else empty.
        distribution: of a Debian package, as in ``debian-13``, and
        layer: diff id of the layer that it is in, both as the SBOM at a registry has them; else empty.
    """

    name: str
    version: str
    license: str = ""
    architecture: str = ""
    requires: tuple[str, ...] = ()
    source: str = ""
    source_version: str = ""
    distribution: str = ""
    layer: str = ""

    @property
    def source_package(self) -> tuple[str, str]:
        """Return name and version of the source package that a Debian package is built from."""
        return self.source or self.name, self.source_version or self.version


def listed(
    repository: Repository, digest: str
) -> tuple[dict[str, InstalledPackage], dict[str, InstalledPackage]] | None:
    """Return the Python and Debian packages that the SBOM attached to an image lists; None if there is none."""
    sbom = document(repository, digest)
    return None if sbom is None else packages(sbom)


def document(repository: Repository, digest: str) -> dict[str, Any] | None:
    """Return the CycloneDX document that is attached to an image at a registry; None if there is none.

    It may be signed, by anyone: signatures are not verified.
    """
    sbom = statements.predicate(repository, digest, PREDICATE)
    if sbom is not None:
        documents.check(sbom, documents.SBOM, f"the SBOM of {repository.name}@{digest}")
    return sbom


def layer_names(sbom: Mapping[str, Any]) -> dict[str, str]:
    """Return diff id -> name of the layers that our SBOM of an image lists; empty for SBOMs of other tools."""
    prefix = f"{LAYER}."
    properties = ((sbom.get("metadata") or {}).get("component") or {}).get("properties") or []
    return {
        str(property["value"]).partition(" ")[0]: str(property["name"]).removeprefix(prefix).partition(".")[2]
        for property in properties
        if str(property.get("name")).startswith(prefix)
    }


def packages(sbom: Mapping[str, Any]) -> tuple[dict[str, InstalledPackage], dict[str, InstalledPackage]]:
    """Return the Python and the Debian packages that a CycloneDX document lists, by their package URLs.

    Keys are canonical names of Python packages, and names of Debian packages. Components without a valid URL are left
    out (https://github.com/package-url/purl-spec).
    """
    kinds: dict[str, dict[str, InstalledPackage]] = {"pypi": {}, "deb": {}}
    for component in sbom.get("components") or []:
        try:
            purl = PackageURL.from_string(str(component.get("purl") or ""))
        except ValueError:
            continue
        if purl.type in kinds:
            name = canonicalize_name(purl.name) if purl.type == "pypi" else purl.name
            kinds[purl.type][name] = _package(component, dict(purl.qualifiers))
    return kinds["pypi"], kinds["deb"]


def _package(component: Mapping[str, Any], about: Mapping[str, str]) -> InstalledPackage:
    """Return a component's package; ``about`` are the qualifiers of its package URL."""
    source, _, source_version = about.get("upstream", "").partition("@")
    properties = {named.get("name"): str(named.get("value")) for named in component.get("properties") or []}
    return InstalledPackage(
        str(component["name"]),
        str(component.get("version", "")),
        architecture=about.get("arch", ""),
        source=source,
        source_version=source_version,
        distribution=about.get("distro", ""),
        layer=properties.get(LAYER, ""),
    )
