"""Write OpenVEX documents: what waivers of advisories say about images, for programs that scan them.

https://github.com/openvex/spec/blob/main/OPENVEX-SPEC.md. A waiver accepts a vulnerability until a date, so its status
is ``affected``, with its reason as the action statement; with a justification it is ``not_affected``. The same images,
waivers and commit give the same bytes.
"""

from __future__ import annotations

import datetime
import itertools
import json
import uuid
from collections.abc import Iterable
from typing import Any

from packageurl import PackageURL

from trainyard import __version__
from trainyard.lint.waivers import Waiver
from trainyard.oci.statements import rfc_3339
from trainyard.release.image_packages import ImagePackages
from trainyard.release.vulnerabilities import Vulnerability, public_version, waiver_of
from trainyard.spec.naming import NAME

#: https://github.com/openvex/spec/tree/main/ns
CONTEXT = "https://openvex.dev/ns/v0.2.0"

#: The id of a document is derived from its contents.
_NAMESPACE = uuid.uuid5(uuid.NAMESPACE_URL, CONTEXT)


def _component(purl: str) -> dict[str, Any]:
    return {"@id": purl, "identifiers": {"purl": purl}}


def _product(image: ImagePackages, packages: Iterable[PackageURL]) -> dict[str, Any]:
    """Return an image, and the packages in it that have the vulnerability."""
    purl = PackageURL("oci", name=NAME.rsplit("/", 1)[-1], version=image.digest).to_string()
    return _component(purl) | {
        "hashes": {"sha-256": image.digest.removeprefix("sha256:")},
        "subcomponents": [_component(package.to_string()) for package in packages],
    }


def _status(waiver: Waiver) -> dict[str, str]:
    notes = {"status_notes": f"waived until {waiver.expires} by {waiver.owner}"}
    if waiver.justification:
        more = {"justification": waiver.justification, "impact_statement": waiver.reason}
        return {"status": "not_affected"} | notes | more
    return {"status": "affected"} | notes | {"action_statement": waiver.reason}


def _vulnerability(found: Vulnerability) -> dict[str, Any]:
    """Return a vulnerability by its CVE, which scanners look for first; its other ids are aliases."""
    name = next((name for name in found.names if name.startswith("CVE-")), found.names[0])
    aliases = sorted(set(found.names) - {name})
    return {"name": name} | ({"aliases": aliases} if aliases else {})


def _packages(image: ImagePackages, found: Vulnerability) -> list[PackageURL]:
    """Return the packages of an image that have a vulnerability; none if the image has another version."""
    if found.kind == "debian":
        return [
            PackageURL("deb", "debian", package.name, package.version, {"arch": package.architecture})
            for package in image.debian.values()
            if package.source_package == (found.package, found.version)
        ]
    version = image.python.get(found.package)
    if version is None or public_version(version) != found.version:
        return []
    return [PackageURL("pypi", name=found.package, version=version)]


def document(
    found: Iterable[Vulnerability],
    images: Iterable[ImagePackages],
    known: Iterable[Waiver],
    *,
    issued: datetime.datetime,
    today: datetime.date,
) -> str | None:
    """Return the document about the waived vulnerabilities of images; None if no valid waiver is about one of them.

    Args:
        known: all waivers; expired ones are left out.
        issued: when the statements were made; not the time of the call, so that the bytes are the same.
        today: the day that waivers are compared with.
    """
    valid = [waiver for waiver in known if not waiver.expired(today)]
    statements = []
    owners = set()
    for image, one in itertools.product(images, list(found)):
        packages, waiver = _packages(image, one), waiver_of(one, image.name, valid)
        if packages and waiver:
            owners.add(waiver.owner)
            products = {"products": [_product(image, packages)]}
            statements.append({"vulnerability": _vulnerability(one)} | products | _status(waiver))
    if not statements:
        return None
    statements.sort(key=lambda statement: json.dumps(statement, sort_keys=True))
    contents = {
        "author": ", ".join(sorted(owners)),
        "timestamp": rfc_3339(issued),
        "version": 1,
        "tooling": f"trainyard {__version__}",
        "statements": statements,
    }
    identifier = uuid.uuid5(_NAMESPACE, json.dumps(contents, sort_keys=True)).urn
    return json.dumps({"@context": CONTEXT, "@id": identifier} | contents, indent=2) + "\n"
