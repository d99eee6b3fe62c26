"""Sigstore bundles: signed in-toto statements, each in one document.

A bundle has a DSSE envelope with the statement and one signature, and says which public key verifies it, or has the
certificate of an identity and an entry of a transparency log (:mod:`trainyard.release.identities`).

https://github.com/sigstore/protobuf-specs/blob/main/protos/sigstore_bundle.proto
https://github.com/secure-systems-lab/dsse/blob/master/protocol.md
"""

from __future__ import annotations

import base64
import hashlib
import json
from dataclasses import dataclass
from typing import Annotated

from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError
from pydantic.alias_generators import to_camel

from trainyard.oci.referrers_api import BUNDLE
from trainyard.release import signature
from trainyard.release.signature import PrivateKey, PublicKey
from trainyard.release.signers import Opened

#: Media type of an in-toto statement (https://github.com/in-toto/attestation/blob/main/spec/v1/envelope.md).
STATEMENT = "application/vnd.in-toto+json"


def _decoded(text: object) -> bytes:
    """The bytes of a text in base64, of which there is one text only.

    Raises:
        ValueError: it is another text.
    """
    data = base64.b64decode(str(text), validate=True)
    if base64.b64encode(data).decode() != text:
        raise ValueError("not base64 in its only form")
    return data


_Base64 = Annotated[bytes, BeforeValidator(_decoded)]


class _Part(BaseModel):
    """A message in JSON's form of protocol buffers; fields that are not read here are ignored."""

    model_config = ConfigDict(alias_generator=to_camel)


class _Signature(_Part):
    sig: _Base64
    keyid: str = ""


class _Envelope(_Part):
    payload: _Base64
    payload_type: str
    signatures: list[_Signature] = Field(min_length=1, max_length=1)


class _PublicKey(_Part):
    hint: str = ""


class _Certificate(_Part):
    raw_bytes: _Base64


class _Material(_Part):
    public_key: _PublicKey | None = None
    certificate: _Certificate | None = None


class _Bundle(_Part):
    media_type: str
    verification_material: _Material
    dsse_envelope: _Envelope


@dataclass(frozen=True)
class Contents:
    """What a bundle holds, of which nothing is verified.

    Attributes:
        payload: the statement.
        signature: of the statement.
        key_hint: the name of the public key that verifies it; None if there is a certificate.
        certificate: of the identity that signed, in DER form; None if there is a public key.
    """

    payload: bytes
    signature: bytes
    key_hint: str | None
    certificate: bytes | None


def read(data: bytes) -> Contents | Opened:
    """The contents of a bundle, or what is wrong with its form."""
    try:
        found = _Bundle.model_validate_json(data)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        return Opened(b"", f"no bundle with a signed statement: {where}: {first['msg']}")
    envelope, material = found.dsse_envelope, found.verification_material
    (made,) = envelope.signatures
    hint = material.public_key.hint if material.public_key else None
    if (found.media_type, envelope.payload_type) != (BUNDLE, STATEMENT):
        return Opened(envelope.payload, f"its types are {found.media_type} and {envelope.payload_type}")
    if (hint is None) == (material.certificate is None):
        return Opened(envelope.payload, "it must have a public key or a certificate")
    if hint is not None and made.keyid != hint:
        return Opened(envelope.payload, "its envelope and its bundle name different keys")
    certificate = material.certificate.raw_bytes if material.certificate else None
    return Contents(envelope.payload, made.sig, hint, certificate)


def key_hint(key: PublicKey) -> str:
    """The name of a public key in bundles, as cosign writes it: the SHA-256 of its DER form, in base64."""
    der = key.public_bytes(serialization.Encoding.DER, serialization.PublicFormat.SubjectPublicKeyInfo)
    return base64.b64encode(hashlib.sha256(der).digest()).decode()


def signed_bytes(payload_type: str, payload: bytes) -> bytes:
    """What the signature of an envelope signs: DSSE's pre-authentication encoding."""
    kind = payload_type.encode()
    return b"DSSEv1 %d %b %d %b" % (len(kind), kind, len(payload), payload)


def _digest(key: PrivateKey | PublicKey) -> hashes.HashAlgorithm | None:
    """The digest that an EC key signs; None for other keys."""
    if isinstance(key, ec.EllipticCurvePrivateKey | ec.EllipticCurvePublicKey):
        return signature.CURVES[key.curve.name]
    return None


def seal(key: PrivateKey, payload: bytes) -> bytes:
    """The bundle of a statement."""
    made = signature.signature(key, signed_bytes(STATEMENT, payload), _digest(key))
    hint = key_hint(key.public_key())
    document = {
        "mediaType": BUNDLE,
        "verificationMaterial": {"publicKey": {"hint": hint}, "tlogEntries": []},
        "dsseEnvelope": {
            "payload": base64.b64encode(payload).decode(),
            "payloadType": STATEMENT,
            "signatures": [{"sig": base64.b64encode(made).decode(), "keyid": hint}],
        },
    }
    return json.dumps(document, separators=(",", ":")).encode()


def open_with(key: PublicKey, data: bytes) -> Opened:
    """The statement of a bundle, and whether it is signed with the private key of ``key``."""
    found = read(data)
    if isinstance(found, Opened):
        return found
    if found.key_hint is None:
        return Opened(found.payload, "signed by an identity, not with a key", foreign=True)
    if found.key_hint != key_hint(key):
        return Opened(found.payload, "signed with another key", foreign=True)
    if not signature.signed(key, found.signature, signed_bytes(STATEMENT, found.payload), _digest(key)):
        return Opened(found.payload, "its signature does not match its content: one of them was changed")
    return Opened(found.payload)
