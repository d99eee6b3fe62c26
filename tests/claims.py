"""Claims about an image, their verification by libraries that are not ours, and images that they are about.

The libraries are securesystemslib, in-toto-attestation, sigstore and sigstore-models.
"""

from __future__ import annotations

import json
from typing import Any

import pytest
from cryptography.hazmat.primitives.asymmetric import rsa
from google.protobuf import json_format
from in_toto_attestation.predicates.provenance.v1 import provenance_pb2
from in_toto_attestation.predicates.test_result.v0 import test_result_pb2
from in_toto_attestation.v1 import statement as intoto
from in_toto_attestation.v1 import statement_pb2
from securesystemslib.dsse import Envelope
from securesystemslib.signer import SSlibKey
from sigstore.dsse import Statement
from sigstore_models.bundle.v1 import Bundle

from tests.fakes.engine import FakeEngine
from tests.fakes.registry import Registry, sha256
from trainyard.common.settings import state_folder
from trainyard.oci.inventory import Image
from trainyard.oci.registry import Manifest
from trainyard.release import predicates, publish
from trainyard.spec import state

DIGEST = f"sha256:{'0' * 64}"

#: What BuildKit 0.13 writes, with a part of each field (`docker buildx build --provenance=mode=max`).
BUILDKIT: dict[str, Any] = {
    "_type": "https://in-toto.io/Statement/v0.1",
    "predicateType": "https://slsa.dev/provenance/v0.2",
    "subject": [{"name": "pkg:docker/trainyard", "digest": {"sha256": DIGEST[7:]}}],
    "predicate": {
        "builder": {"id": ""},
        "buildType": "https://mobyproject.org/buildkit@v1",
        "materials": [{"uri": "pkg:docker/debian@12", "digest": {"sha256": "40" * 32}}],
        "invocation": {
            "configSource": {"entryPoint": "Dockerfile"},
            "parameters": {"frontend": "dockerfile.v0", "args": {"build-arg:VERSION": "x"}},
            "environment": {"platform": "linux/amd64"},
        },
        "buildConfig": {"llbDefinition": [{"id": "step0"}]},
        "metadata": {
            "buildInvocationID": "r68q",
            "buildStartedOn": "2026-11-23T04:47:58.216820274Z",
            "buildFinishedOn": "2026-11-23T04:47:58.384100362Z",
            "completeness": {"parameters": True, "environment": True, "materials": False},
            "reproducible": False,
            "https://mobyproject.org/buildkit@v1#metadata": {"vcs": {"revision": "2476aa0"}},
        },
    },
}
#: A claim of every kind about an image.
CLAIMS = [
    predicates.signature(),
    predicates.sbom('{"bomFormat": "CycloneDX", "specVersion": "1.6"}'),
    predicates.provenance(BUILDKIT),
    predicates.verify({"digest": DIGEST, "passed": True, "rules": ["labels", "sizes"], "notes": []}),
    predicates.smoke({"digest": DIGEST, "passed": True, "level": "trained", "accuracy": 98.9, "resumed_from": 43}),
]

#: Predicate type -> its message in in-toto-attestation. Verification summaries are left out: in the last release,
#: 0.9.3, their verifiedLevels is one text, not a list (corrected since:
#: https://github.com/in-toto/attestation/blob/main/protos/in_toto_attestation/predicates/vsa/v1/vsa.proto).
MESSAGES = {
    "https://slsa.dev/provenance/v1": provenance_pb2.Provenance,
    "https://in-toto.io/attestation/test-result/v0.1": test_result_pb2.TestResult,
}


def verified(data: bytes, key: Any) -> dict[str, Any]:
    """The statement of a bundle whose signature is one by ``key``, a public key of cryptography.

    Raises:
        Exception: one of the libraries refuses it.
    """
    bundle = Bundle.from_json(data)
    assert bundle.verification_material.public_key and bundle.dsse_envelope
    hint = bundle.verification_material.public_key.hint
    assert hint
    envelope = Envelope.from_dict(json.loads(data)["dsseEnvelope"])
    scheme = "rsa-pkcs1v15-sha256" if isinstance(key, rsa.RSAPublicKey) else None
    envelope.verify([SSlibKey.from_crypto(key, keyid=hint, scheme=scheme)], threshold=1)
    assert envelope.payload_type == "application/vnd.in-toto+json"
    Statement(envelope.payload)
    parsed = json_format.Parse(envelope.payload, statement_pb2.Statement())
    statement: dict[str, Any] = json.loads(envelope.payload)
    if statement["predicate"]:  # in-toto requires one with fields; that of 'cosign sign' has none
        intoto.Statement.copy_from_pb(parsed).validate()
    if statement["predicateType"] in MESSAGES:
        # SLSA's readers ignore the fields that BuildKit adds: https://slsa.dev/spec/v1.0/provenance#parsing-rules
        message = MESSAGES[statement["predicateType"]]()
        json_format.ParseDict(statement["predicate"], message, ignore_unknown_fields=True)
    return statement


def put_image(registry: Registry, architecture: str = "amd64", labels: dict[str, str] | None = None) -> Manifest:
    """An image without layers at the registry."""
    about = {"os": "linux", "architecture": architecture, "config": {"Labels": labels}}
    config = json.dumps(about).encode()
    registry.blobs[sha256(config)] = config
    entry = {"mediaType": "application/vnd.oci.image.config.v1+json", "digest": sha256(config), "size": len(config)}
    document = {"schemaVersion": 2, "config": entry, "layers": []}
    image = Manifest.of(document, "application/vnd.oci.image.manifest.v1+json")
    registry.put_manifest(image.digest, image.media_type, image.body)
    return image


def pushed_image(registry: Registry, engine: FakeEngine, monkeypatch: pytest.MonkeyPatch) -> Manifest:
    """An image of tf-cpu that passed on this host and was pushed; its SBOM is that of an image without packages."""
    image = put_image(registry)
    state.record(state_folder() / "tf-cpu", "verify", image.digest, {"passed": True, "rules": ["labels"], "notes": []})
    state.record(state_folder() / "tf-cpu", "smoke", image.digest, {"passed": True, "level": "trained"})
    found = Image("trainyard:tf-cpu", image.digest, {}, {}, (), {})
    engine.add("trainyard:tf-cpu", digest=image.digest)
    monkeypatch.setattr(publish.inventory, "local", lambda *_, **__: found)
    return image


def image_to_promote(registry: Registry) -> Manifest:
    """An image of tf-cpu at the registry that passed on this host, without claims."""
    labels = {"io.trainyard.target": "tf-cpu", "io.trainyard.framework": "tensorflow==2.21.0"}
    image = put_image(registry, labels=labels)
    for step in ("verify", "smoke"):
        state.record(state_folder() / "tf-cpu", step, image.digest, {"passed": True})  # type: ignore[arg-type]
    return image
