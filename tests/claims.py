"""Signed claims read and verified with libraries that are not ours: securesystemslib, in-toto-attestation, sigstore."""

from __future__ import annotations

import json
from typing import Any

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

#: Predicate type -> its message in in-toto-attestation. Verification summaries are left out: in the last release, 0.9.3,
#: their verifiedLevels is one text, not a list (corrected since:
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
