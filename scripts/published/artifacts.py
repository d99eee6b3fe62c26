"""Small things that lie beside an image at a registry, under tags named after its digest: SBOMs and signatures.

They are OCI manifests with the thing as their only kind of layer, which every registry stores, in the form that cosign
reads and writes (sigstore/cosign, specs/SIGNATURE_SPEC.md); ``subject`` makes them referrers where a registry knows of
those (OCI distribution specification 1.1).
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass, field
from urllib.parse import urljoin

from scripts.published.tags import Manifest, Repository

_MANIFEST = "application/vnd.oci.image.manifest.v1+json"
_CONFIG = "application/vnd.oci.image.config.v1+json"


@dataclass(frozen=True)
class Artifact:
    """A document and what is noted about it."""

    data: bytes
    media_type: str
    annotations: dict[str, str] = field(default_factory=dict)

    @property
    def digest(self) -> str:
        return _sha256(self.data)


def tag(digest: str, kind: str) -> str:
    """``sha256-….<kind>``: cosign's names are ``sig`` and ``sbom``."""
    return f"{digest.replace(':', '-')}.{kind}"


def _sha256(data: bytes) -> str:
    return f"sha256:{hashlib.sha256(data).hexdigest()}"


def put_blob(repository: Repository, data: bytes) -> None:
    """Store a blob, unless it is there."""
    digest = _sha256(data)
    if repository.request("HEAD", f"blobs/{digest}", missing_ok=True).ok:
        return
    begun = repository.request("POST", "blobs/uploads/")
    where = urljoin(begun.url, begun.headers["Location"])
    where += ("&" if "?" in where else "?") + f"digest={digest}"
    repository.request("PUT", where, data=data, headers={"Content-Type": "application/octet-stream"})


def put(repository: Repository, subject: Manifest, kind: str, artifacts: list[Artifact]) -> str:
    """Lay ``artifacts`` beside the image ``subject``, in place of those of that kind; the tag they have.

    Raises:
        StepFailed: the registry is out of reach or refuses.
    """
    config = json.dumps(
        {
            "architecture": "",
            "os": "",
            "config": {},
            "rootfs": {"type": "layers", "diff_ids": [artifact.digest for artifact in artifacts]},
        }
    ).encode()
    for data in (config, *(artifact.data for artifact in artifacts)):
        put_blob(repository, data)
    document = {
        "schemaVersion": 2,
        "mediaType": _MANIFEST,
        "config": {"mediaType": _CONFIG, "digest": _sha256(config), "size": len(config)},
        "layers": [
            {
                "mediaType": artifact.media_type,
                "digest": artifact.digest,
                "size": len(artifact.data),
                "annotations": artifact.annotations,
            }
            for artifact in artifacts
        ],
        "subject": {"mediaType": subject.media_type, "digest": subject.digest, "size": len(subject.body)},
    }
    body = json.dumps(document).encode()
    name = tag(subject.digest, kind)
    repository.put(Manifest(_sha256(body), _MANIFEST, body), name)
    return name


def get(repository: Repository, digest: str, kind: str) -> list[Artifact]:
    """What of that kind lies beside the image ``digest``; nothing if nothing does.

    Raises:
        StepFailed: the registry is out of reach, or gives out something else than was stored.
    """
    found = repository.manifest(tag(digest, kind))
    if found is None:
        return []
    artifacts = []
    for layer in json.loads(found.body).get("layers", []):
        data = repository.request("GET", f"blobs/{layer['digest']}").content
        artifacts.append(Artifact(data, str(layer["mediaType"]), dict(layer.get("annotations") or {})))
    return artifacts
