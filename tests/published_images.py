"""Images at a registry with the packages that a test names, and their SBOMs as `trainyard push` attaches them."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping

from trainyard.oci import referrers
from trainyard.oci.attached_sbom import InstalledPackage
from trainyard.oci.documents import hashed as sha256
from trainyard.oci.inventory import Image, LayerPackages, LayerSummary
from trainyard.oci.registry import Manifest, Repository
from trainyard.release import claims, predicates, sbom

OCI = "application/vnd.oci.image"

#: os-release of the images.
RELEASE = {"ID": "debian", "VERSION_ID": "13"}


def artifacts_of(repository: Repository, digest: str, media_types: Collection[str]) -> dict[str, referrers.Artifact]:
    """The artifacts of some types that refer to the image ``digest``, by the digests of their manifests."""
    entries = referrers.listed(repository, digest, media_types)
    found = {str(entry["digest"]): referrers.fetch(repository, entry) for entry in entries}
    return {name: artifact for name, artifact in found.items() if artifact}


def layer_blobs(name: str) -> dict[str, bytes]:
    """Name -> blob of the layers of an image."""
    return {"base": f"the base below {name}".encode(), "wheels": f"the wheels of {name}".encode()}


def image(
    name: str, *, python: Mapping[str, str], debian: Mapping[str, str | InstalledPackage], architecture: str = "amd64"
) -> tuple[Image, Manifest]:
    """An image with a layer of Debian packages, and a layer of Python packages above it, and its manifest.

    Args:
        name: makes the image different from others with the same packages.
        python, debian: name -> version.
    """
    blobs = layer_blobs(name)
    labels = {"org.opencontainers.image.title": "trainyard/test"}
    config = {
        "os": "linux",
        "architecture": architecture,
        "created": "2026-11-20T10:00:00Z",
        "config": {"Labels": labels},
        "rootfs": {"type": "layers", "diff_ids": [sha256(b"diff of " + blob) for blob in blobs.values()]},
    }
    text = json.dumps(config).encode()
    document = {
        "schemaVersion": 2,
        "mediaType": f"{OCI}.manifest.v1+json",
        "config": {"mediaType": f"{OCI}.config.v1+json", "digest": sha256(text), "size": len(text)},
        "layers": [
            {"mediaType": f"{OCI}.layer.v1.tar", "digest": sha256(blob), "size": len(blob)} for blob in blobs.values()
        ],
    }
    manifest = Manifest.of(document, f"{OCI}.manifest.v1+json")
    contents = {
        "base": LayerPackages(
            debian=tuple(
                one if isinstance(one, InstalledPackage) else InstalledPackage(package, one, architecture=architecture)
                for package, one in debian.items()
            ),
            release=RELEASE,
        ),
        "wheels": LayerPackages(python={package: InstalledPackage(package, one) for package, one in python.items()}),
    }
    layers = tuple(
        LayerSummary(layer, sha256(blob), sha256(b"diff of " + blob), len(blob), len(blob))
        for layer, blob in blobs.items()
    )
    found = Image(
        reference=name,
        digest=manifest.digest,
        config=config,
        documents={},
        layers=layers,
        layer_contents={layer.diff_id: contents[layer.name] for layer in layers},
    )
    return found, manifest


def publish(
    repository: Repository,
    tag: str,
    *,
    python: Mapping[str, str] = {},
    debian: Mapping[str, str | InstalledPackage] = {},
    architecture: str = "amd64",
    listed: bool = True,
) -> Manifest:
    """Store an image of :func:`image` under a tag.

    Args:
        listed: attach its SBOM.
    """
    made, manifest = image(tag, python=python, debian=debian, architecture=architecture)
    for blob in (json.dumps(made.config).encode(), *layer_blobs(tag).values()):
        referrers.put_blob(repository, blob)
    repository.put(manifest, tag)
    if listed:
        claims.attach(repository, manifest, None, [predicates.sbom(sbom.bill(made, {}))])
    return manifest
