"""Read and make image indexes: one reference for the images of several platforms.

https://github.com/opencontainers/image-spec/blob/main/image-index.md
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from trainyard.common.errors import StepFailed, UserError
from trainyard.oci.registry import Manifest, Repository
from trainyard.spec.architectures import Architecture, given, of_host

#: Media type of an index.
INDEX = "application/vnd.oci.image.index.v1+json"

#: Variants that say no more than their architecture
#: (https://github.com/containerd/platforms/blob/main/database.go, normalizeArch).
_DEFAULT_VARIANTS = {"amd64": "v1", "arm64": "v8"}


def images(document: Mapping[str, Any]) -> dict[str, str]:
    """Return platform, as in ``linux/amd64``, -> digest of its image, of an index; nothing for one image.

    Attestations, whose platform is ``unknown/unknown``, are left out. Of several images for one architecture, the first
    without a variant, else the first, has the name alone; the others have their variant or version in their names.

    Raises:
        StepFailed: two images have the same platform: which of them is pulled is up to the engine.
    """
    digests: dict[tuple[str, str, str], str] = {}
    for entry in document.get("manifests") or []:
        platform = entry.get("platform") or {}
        architecture = platform.get("architecture") or ""
        variant = platform.get("variant") or ""
        if variant == _DEFAULT_VARIANTS.get(architecture):
            variant = ""
        name = f"{platform.get('os') or 'linux'}/{architecture}"
        rest = "/".join(filter(None, (variant, str(platform.get("os.version") or ""))))
        features = str(platform.get("os.features") or "")
        if name.startswith("unknown/"):
            continue
        other = digests.setdefault((name, rest, features), str(entry["digest"]))
        if other != entry["digest"]:
            raise StepFailed(
                f"the image index has two images for {name}, {other[:19]} and {entry['digest'][:19]}: make one with "
                "one image for each platform"
            )
    names: dict[str, str] = {}
    for (name, rest, features), digest in sorted(digests.items(), key=lambda item: bool(item[0][1])):
        names[name if name not in names else "/".join(filter(None, (name, rest, features)))] = digest
    return names


def is_index(document: Mapping[str, Any]) -> bool:
    """Return whether a document is an index, not the manifest of an image."""
    return "manifests" in document


def digest_for(document: Mapping[str, Any], architecture: Architecture) -> str | None:
    """Return the digest of the image for an architecture in an index; None if it has none.

    The only image is taken for any, as it may have no platform.
    """
    digests = images(document)
    return digests.get(architecture.platform) or (digests.get("linux/") if len(digests) == 1 else None)


def chosen(document: Mapping[str, Any]) -> str | None:
    """Return the digest of the image in an index that a command is about; None for the manifest of one image.

    It is the one of ``TRAINYARD_ARCH``, else of this host's architecture, else the first.

    Raises:
        UserError: ``TRAINYARD_ARCH`` is no architecture, or the index has no image for it.
    """
    digests = images(document)
    if not digests:
        return None
    wanted = given()
    if wanted and wanted.platform not in digests:
        raise UserError(f"'TRAINYARD_ARCH={wanted.name}': the image index has images for {', '.join(digests)}")
    return digests.get((wanted or of_host()).platform) or next(iter(digests.values()))


def members(repository: Repository, manifest: Manifest) -> dict[str, Manifest]:
    """Return platform -> manifest of the images of an index at a registry; of one image, by its configuration.

    Raises:
        StepFailed: the registry lacks one of them, or refuses.
    """
    document = manifest.document
    if is_index(document):
        return {name: repository.existing(digest) for name, digest in images(document).items()}
    config = repository.config(manifest)
    return {f"{config.get('os')}/{config.get('architecture')}": manifest}


def make(manifests: Mapping[Architecture, Manifest], annotations: Mapping[str, str]) -> Manifest:
    """Return an index of images, by the names of their architectures: the same images give the same bytes."""
    entries = [
        manifest.descriptor | {"platform": {"architecture": architecture.name, "os": "linux"}}
        for architecture, manifest in sorted(manifests.items(), key=lambda item: item[0].name)
    ]
    document = {"schemaVersion": 2, "mediaType": INDEX, "manifests": entries, "annotations": dict(annotations)}
    return Manifest.of(document, INDEX)
