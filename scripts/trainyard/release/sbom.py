"""Write the software bill of materials of an image: CycloneDX 1.6, with every package that pip and dpkg installed.

It is read from the image, so it also lists packages that no lock mentions. Packages have their purl, license and
layer, and Python packages the SHA-256 of every file that the lock accepts for them, and the libraries of others that
they contain. The same image gives the same bytes.
"""

from __future__ import annotations

import contextlib
import datetime
import uuid
from collections.abc import Iterable
from typing import Any

from cyclonedx.contrib.license.factories import LicenseFactory
from cyclonedx.model import ExternalReference, ExternalReferenceType, HashAlgorithm, HashType, Property, XsUri
from cyclonedx.model.bom import Bom, BomMetaData
from cyclonedx.model.component import Component, ComponentType
from cyclonedx.model.component_evidence import ComponentEvidence, Occurrence
from cyclonedx.output.json import JsonV1Dot6
from cyclonedx.schema import SchemaVersion
from cyclonedx.validation.json import JsonStrictValidator
from packageurl import PackageURL
from packaging.markers import default_environment
from packaging.requirements import InvalidRequirement, Requirement
from packaging.utils import canonicalize_name

from trainyard.common.errors import StepFailed, UserError
from trainyard.oci.attached_sbom import LAYER, InstalledPackage
from trainyard.oci.inventory import Image
from trainyard.oci.reference import Reference
from trainyard.oci.wheel_libraries import Library
from trainyard.recipe import Recipe
from trainyard.spec.naming import LABELS

#: Serial numbers are derived from the image's digest: the same image has the same serial number.
_NAMESPACE = uuid.uuid5(uuid.NAMESPACE_URL, "https://trainyard.io/sbom")


def locked_hashes(recipe: Recipe | None) -> dict[tuple[str, str], list[str]]:
    """Return (canonical name, version) -> the SHA-256 digests of the wheels that the recipe of an image accepts.

    Those of a source distribution that is compiled for the image are not of what is installed.
    """
    layers = recipe.layers if recipe else ()
    pins = [pin for layer in layers if layer.stage != "compiled" for pin in layer.pins]
    return {(pin.name, pin.version): list(pin.sha256) for pin in pins}


def _component(package: InstalledPackage, purl: PackageURL, layer: str, **more: Any) -> Component:
    """Return a package in the layer with the diff id ``layer``."""
    return Component(
        name=package.name,
        version=package.version,
        type=ComponentType.LIBRARY,
        bom_ref=purl.to_string(),
        purl=purl,
        properties=[Property(name=LAYER, value=layer)],
        **more,
    )


def _inside(wheel: PackageURL, library: Library) -> Component:
    """Return a library in a wheel, with the files that have it."""
    purl = None
    with contextlib.suppress(ValueError):  # there is none, or an SBOM in the wheel states what is none
        purl = PackageURL.from_string(library.purl)
    reference = f"{wheel.to_string()}#{library.purl or f'{library.name}@{library.version}'}"
    # With references, without which their order is not always the same.
    occurrences = [Occurrence(location=f"/{path}", bom_ref=f"{reference}#{path}") for path in library.files]
    return Component(
        name=library.name,
        version=library.version or None,
        bom_ref=reference,
        purl=purl,
        cpe=library.cpe or None,
        evidence=ComponentEvidence(occurrences=occurrences) if occurrences else None,
    )


def _python(package: InstalledPackage, hashes: list[str], layer: str, libraries: Iterable[Library] = ()) -> Component:
    purl = PackageURL("pypi", name=canonicalize_name(package.name), version=package.version)
    accepted = [HashType(alg=HashAlgorithm.SHA_256, content=digest) for digest in hashes]
    # A lock accepts the wheels of every platform: which one was installed is known only if there is a single file.
    files = ExternalReference(
        type=ExternalReferenceType.DISTRIBUTION,
        url=XsUri(purl.to_string()),
        comment="one of these files was installed: the lock accepts no other",
        hashes=accepted,
    )
    return _component(
        package,
        purl,
        layer,
        hashes=accepted if len(accepted) == 1 else None,
        licenses=[LicenseFactory().make_from_string(package.license)] if package.license else None,
        external_references=[files] if accepted else None,
        components=[_inside(purl, library) for library in libraries],
    )


def _debian(package: InstalledPackage, release: dict[str, str], layer: str) -> Component:
    distribution = release.get("ID", "debian")
    qualifiers = {"arch": package.architecture}
    if release.get("VERSION_ID"):
        qualifiers["distro"] = f"{distribution}-{release['VERSION_ID']}"
    source, version = package.source_package
    if (source, version) != (package.name, package.version):
        # As syft writes it: security trackers know source packages.
        qualifiers["upstream"] = source if version == package.version else f"{source}@{version}"
    purl = PackageURL("deb", distribution, package.name, package.version, qualifiers=qualifiers)
    return _component(package, purl, layer)


def _interpreter(version: str, layer: str) -> list[Component]:
    """Return a Python that was compiled, as syft describes one that it finds, and scanners read it by its CPE.

    https://github.com/anchore/syft/blob/main/syft/pkg/cataloger/binary/classifiers.go
    """
    component = _component(
        InstalledPackage("python", version), PackageURL("generic", name="python", version=version), layer
    )
    component.type, component.cpe = ComponentType.APPLICATION, f"cpe:2.3:a:python:python:{version}:*:*:*:*:*:*:*"
    return [component] if version else []


def _needed(package: InstalledPackage, installed: dict[str, Component]) -> list[Component]:
    """Return the installed packages that a package requires without extras."""
    environment = {str(key): str(value) for key, value in default_environment().items()} | {"extra": ""}
    components = []
    for line in package.requires:
        try:
            requirement = Requirement(line)
        except InvalidRequirement:  # in old metadata; pip ignores it too
            continue
        needed = installed.get(canonicalize_name(requirement.name))
        if needed is not None and (requirement.marker is None or requirement.marker.evaluate(environment)):
            components.append(needed)
    return components


def _root(image: Image) -> Component:
    labels = image.labels
    name = labels.get("org.opencontainers.image.title") or _name(image.reference)
    purl = PackageURL("oci", name=name.rsplit("/", 1)[-1], version=image.digest)
    sizes = [
        Property(name=f"{LABELS}.layer.{number}.{layer.name}", value=f"{layer.diff_id} {layer.size or 0}")
        for number, layer in enumerate(image.layers)
    ]
    return Component(
        name=name,
        version=labels.get("org.opencontainers.image.version", image.digest),
        type=ComponentType.CONTAINER,
        bom_ref=purl.to_string(),
        purl=purl,
        description=labels.get("org.opencontainers.image.description"),
        hashes=[HashType(alg=HashAlgorithm.SHA_256, content=image.digest.removeprefix("sha256:"))],
        properties=[*(Property(name=key, value=value) for key, value in sorted(labels.items()) if value), *sizes],
    )


def _name(reference: str) -> str:
    """Return the repository of a reference; an image ID is no reference, and is its own name."""
    try:
        return Reference.parse(reference).familiar_name
    except UserError:
        return reference


def bill(image: Image, hashes: dict[tuple[str, str], list[str]]) -> str:
    """Return the SBOM of an image whose layers were read, with ``hashes`` of :func:`locked_hashes`, as text."""
    root = _root(image)
    layers, libraries = image.python_layers(), image.libraries()
    python = {
        name: _python(package, hashes.get((name, package.version), []), layers[name], libraries[name])
        for name, package in image.python().items()
    }
    layers = image.debian_layers()
    debian = [_debian(package, image.release(), layers[name]) for name, package in image.debian().items()]
    system = [*_interpreter(*image.interpreter()), *debian]
    # The image's creation time; if it has none, a fixed time.
    created = str(image.config.get("created") or "1970-01-01T00:00:00Z").replace("Z", "+00:00")
    bom = Bom(
        components=[*python.values(), *system],
        serial_number=uuid.uuid5(_NAMESPACE, image.digest),
        metadata=BomMetaData(component=root, timestamp=datetime.datetime.fromisoformat(created)),
    )
    bom.register_dependency(root, [*python.values(), *system])
    for name, package in image.python().items():
        bom.register_dependency(python[name], _needed(package, python))
    return JsonV1Dot6(bom).output_as_string(indent=2) + "\n"


def violation(text: str) -> str | None:
    """Return the first violation of the schema of CycloneDX 1.6; None if there is none."""
    error = JsonStrictValidator(SchemaVersion.V1_6).validate_str(text)
    return str(error) if error else None


def make(image: Image) -> str:
    """Return the SBOM of an image whose layers were read; hashes of packages are those of the recipe in it.

    Raises:
        StepFailed: the document violates the schema.
    """
    text = bill(image, locked_hashes(image.recipe))
    if wrong := violation(text):
        raise StepFailed(f"the SBOM of {image.reference} violates CycloneDX 1.6: {' '.join(wrong.split())[:300]}")
    return text
