"""Write an image's software bill of materials: CycloneDX 1.6, with everything that pip and dpkg installed.

    make sbom TARGET=tf-cpu                   build/tf-cpu/sbom.cdx.json, of trainyard:tf-cpu
    make sbom IMAGE=localhost:5000/ml/trainyard:tf-cpu OUTPUT=sbom.cdx.json
    make sbom TARGET=tf-cpu JSON=1            on standard output

It is read from the image itself, so it also holds what no lock knows of. Packages carry their purl and license, and
Python's the SHA-256 of every file that the lock accepts for them. The same image gives the same bytes. `make push`
leaves it beside the image.
"""

from __future__ import annotations

import datetime
import json
import os
import uuid
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from cyclonedx.contrib.license.factories import LicenseFactory
from cyclonedx.model import ExternalReference, ExternalReferenceType, HashAlgorithm, HashType, Property, XsUri
from cyclonedx.model.bom import Bom, BomMetaData
from cyclonedx.model.component import Component, ComponentType
from cyclonedx.output.json import JsonV1Dot6
from cyclonedx.schema import SchemaVersion
from cyclonedx.validation.json import JsonStrictValidator
from packageurl import PackageURL
from packaging.markers import default_environment
from packaging.requirements import InvalidRequirement, Requirement
from packaging.utils import canonicalize_name

from scripts import cli, engine, locks
from scripts.cli import STATE, StepFailed, UserError, say
from scripts.plan import LABELS, NAME
from scripts.published import artifacts
from scripts.published.tags import Manifest, Repository
from scripts.spec import Spec, load, targets
from scripts.stored import contents
from scripts.stored.contents import Image, Package

#: Media type of CycloneDX documents (ECMA-424, and what cosign calls them).
MEDIA_TYPE = "application/vnd.cyclonedx+json"

#: Serial numbers are made from an image's digest, so that the same image has the same.
_NAMESPACE = uuid.uuid5(uuid.NAMESPACE_URL, "https://trainyard.io/sbom")


def _spec_of(image: Image) -> Spec | None:
    """The catalogue's spec of an image, by its label."""
    target = image.labels.get(f"{LABELS}.target", "")
    return load(target) if target in targets() else None


def locked_hashes(spec: Spec | None, index: str) -> dict[tuple[str, str], list[str]]:
    """(canonical name, version) -> the SHA-256 sums that the locks of ``spec`` for ``index`` accept; empty without."""
    if spec is None:
        return {}
    found: dict[tuple[str, str], list[str]] = {}
    for path in (locks.framework_lock(spec, index), locks.requirements_lock(spec, index)):
        if path.is_file():
            found |= locks.hashes(path)
    return found


def _python(package: Package, hashes: list[str]) -> Component:
    purl = PackageURL("pypi", name=canonicalize_name(package.name), version=package.version)
    accepted = [HashType(alg=HashAlgorithm.SHA_256, content=one) for one in hashes]
    # A lock accepts a release's wheels of every platform: only where that is one file is it sure which was installed.
    files = ExternalReference(
        type=ExternalReferenceType.DISTRIBUTION,
        url=XsUri(purl.to_string()),
        comment="one of these files was installed: the lock accepts no other",
        hashes=accepted,
    )
    return Component(
        name=package.name,
        version=package.version,
        type=ComponentType.LIBRARY,
        bom_ref=purl.to_string(),
        purl=purl,
        hashes=accepted if len(accepted) == 1 else None,
        licenses=[LicenseFactory().make_from_string(package.license)] if package.license else None,
        external_references=[files] if accepted else None,
    )


def _debian(package: Package, release: dict[str, str]) -> Component:
    distribution = release.get("ID", "debian")
    qualifiers = {"arch": package.architecture}
    if release.get("VERSION_ID"):
        qualifiers["distro"] = f"{distribution}-{release['VERSION_ID']}"
    purl = PackageURL("deb", distribution, package.name, package.version, qualifiers=qualifiers)
    return Component(
        name=package.name,
        version=package.version,
        type=ComponentType.LIBRARY,
        bom_ref=purl.to_string(),
        purl=purl,
    )


def _needed(package: Package, installed: dict[str, Component]) -> list[Component]:
    """The installed packages that a package asks for by itself, without extras."""
    environment = {str(key): str(value) for key, value in default_environment().items()} | {"extra": ""}
    found = []
    for line in package.requires:
        try:
            requirement = Requirement(line)
        except InvalidRequirement:  # what old metadata may hold; pip ignores it too
            continue
        needed = installed.get(canonicalize_name(requirement.name))
        if needed is not None and (requirement.marker is None or requirement.marker.evaluate(environment)):
            found.append(needed)
    return found


def _root(image: Image) -> Component:
    labels = image.labels
    name = labels.get("org.opencontainers.image.title", image.reference.split("@")[0].rpartition(":")[0])
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


def bill(image: Image, hashes: dict[tuple[str, str], list[str]]) -> str:
    """The SBOM of an image whose layers were read, as the text of a CycloneDX 1.6 document.

    Args:
        hashes: of :func:`locked_hashes`.
    """
    root = _root(image)
    python = {
        name: _python(package, hashes.get((name, package.version), [])) for name, package in image.python().items()
    }
    debian = [_debian(package, image.release()) for package in image.debian().values()]
    # The image's own time; without one, the same fixed time in every run.
    created = str(image.config.get("created") or "1970-01-01T00:00:00Z").replace("Z", "+00:00")
    bom = Bom(
        components=[*python.values(), *debian],
        serial_number=uuid.uuid5(_NAMESPACE, image.digest),
        metadata=BomMetaData(component=root, timestamp=datetime.datetime.fromisoformat(created)),
    )
    bom.register_dependency(root, [*python.values(), *debian])
    for name, package in image.python().items():
        bom.register_dependency(python[name], _needed(package, python))
    return JsonV1Dot6(bom).output_as_string(indent=2) + "\n"


def problems(text: str) -> str | None:
    """What of a document breaks CycloneDX 1.6's schema; None if nothing does."""
    error = JsonStrictValidator(SchemaVersion.V1_6).validate_str(text)
    return str(error) if error else None


def make(image: Image, spec: Spec | None = None) -> str:
    """The SBOM of an image whose layers were read, checked against the schema.

    Args:
        spec: whose locks it was built from; by its label one of the catalogue if None.
    Raises:
        StepFailed: it does not hold to it.
    """
    index = image.labels.get(f"{LABELS}.index") or "default"
    text = bill(image, locked_hashes(spec or _spec_of(image), index))
    broken = problems(text)
    if broken:
        raise StepFailed(f"the SBOM of {image.reference} breaks CycloneDX 1.6: {' '.join(broken.split())[:300]}")
    return text


def attach(repository: Repository, subject: Manifest, text: str) -> str:
    """Lay an SBOM beside an image at a registry; its tag there."""
    return artifacts.put(repository, subject, "sbom", [artifacts.Artifact(text.encode(), MEDIA_TYPE)])


def listed(repository: Repository, digest: str) -> tuple[dict[str, Package], dict[str, Package]] | None:
    """Python and Debian packages by the SBOM beside an image at a registry; None if there is none."""
    found = [one for one in artifacts.get(repository, digest, "sbom") if one.media_type == MEDIA_TYPE]
    return _packages(json.loads(found[0].data).get("components") or []) if found else None


def _packages(components: Iterable[dict[str, Any]]) -> tuple[dict[str, Package], dict[str, Package]]:
    kinds: dict[str, dict[str, Package]] = {"pypi": {}, "deb": {}}
    for component in components:
        purl = PackageURL.from_string(component.get("purl") or "pkg:generic/unknown")
        if purl.type in kinds:
            kinds[purl.type][purl.name] = Package(str(component["name"]), str(component.get("version", "")))
    return kinds["pypi"], kinds["deb"]


def main(arguments: list[str]) -> int:
    parser = cli.parser(__doc__)
    parser.add_argument("--image", default=os.environ.get("IMAGE") or None, help="a reference; or IMAGE")
    parser.add_argument("--output", default=os.environ.get("OUTPUT") or None, help="the file to write; or OUTPUT")
    options = parser.parse_args(arguments)
    spec = None if options.image else load(options.target)
    if spec is None and not options.output and not options.json:
        raise UserError("OUTPUT= says where to write the SBOM of an IMAGE, or JSON=1 prints it")
    if spec is not None:
        engine.image(f"{NAME}:{spec.target}", made_by=f"make image TARGET={spec.target}")
    image = contents.find(options.image or f"{NAME}:{spec.target if spec else ''}")
    if image.repository is not None:
        contents.fetch(image, image.layers)
    text = make(image, spec)
    if options.json:
        print(text, end="")
    else:
        path = Path(options.output) if options.output else STATE / str(spec and spec.target) / "sbom.cdx.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
        say(f"{path}: {len(image.python())} Python packages, {len(image.debian())} Debian packages")
    return 0


if __name__ == "__main__":
    cli.run(main)
