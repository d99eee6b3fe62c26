"""A private Sigstore instance on 127.0.0.1: Fulcio, a certificate transparency log, Rekor, and OIDC issuers.

They check what real ones check, and answer as their descriptions say. There may be a timestamp authority, by OpenSSL.

- Fulcio: https://github.com/sigstore/fulcio/blob/main/fulcio.proto and
  https://github.com/sigstore/fulcio/blob/main/docs/certificate-specification.md
- Rekor 1: https://github.com/sigstore/rekor/blob/main/openapi.yaml and
  https://github.com/sigstore/rekor/blob/main/pkg/types/dsse/v0.0.1/dsse_v0_0_1_schema.json
- Rekor 2: https://github.com/sigstore/rekor-tiles/blob/main/CLIENTS.md
- logs: https://www.rfc-editor.org/rfc/rfc6962 and https://github.com/transparency-dev/formats/blob/main/log/README.md
- trust configuration: https://github.com/sigstore/protobuf-specs/blob/main/protos/sigstore_trustroot.proto
"""

from __future__ import annotations

import base64
import datetime
import hashlib
import json
import struct
import subprocess
from collections.abc import Mapping, Sequence
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any

import jwt
from cryptography import x509
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec, ed25519
from cryptography.hazmat.primitives.asymmetric.utils import Prehashed
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat, PublicFormat
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from tests.fakes.server import Listener

#: The issuer of GitHub Actions' tokens, and one of tokens for people, whose identity is their address.
GITHUB, GOOGLE = "https://token.actions.githubusercontent.com", "https://accounts.google.com"

#: Extensions of certificates (https://github.com/sigstore/fulcio/blob/main/docs/oid-info.md).
_ISSUER, _ISSUER_V2 = "1.3.6.1.4.1.57264.1.1", "1.3.6.1.4.1.57264.1.8"

#: The list of signed certificate timestamps (https://www.rfc-editor.org/rfc/rfc6962#section-3.3).
_SCT_LIST = "1.3.6.1.4.1.11129.2.4.2"

#: How long certificates of Fulcio are valid.
LIFETIME = datetime.timedelta(minutes=10)


class Refused(Exception):
    """An error response: HTTP status and message."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


def _base64(data: bytes) -> str:
    return base64.b64encode(data).decode()


def _spki(key: ec.EllipticCurvePrivateKey) -> bytes:
    return key.public_key().public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo)


def _key_id(key: ec.EllipticCurvePrivateKey) -> bytes:
    return hashlib.sha256(_spki(key)).digest()


def _sign(key: ec.EllipticCurvePrivateKey, data: bytes) -> bytes:
    return key.sign(data, ec.ECDSA(hashes.SHA256()))


def _canonical(document: Any) -> bytes:
    """JSON in its canonical form (RFC 8785), for documents of ASCII texts and whole numbers."""
    return json.dumps(document, sort_keys=True, separators=(",", ":")).encode()


def _node(left: bytes, right: bytes) -> bytes:
    return hashlib.sha256(b"\x01" + left + right).digest()


def _split(count: int) -> int:
    """The largest power of two below ``count``."""
    return 1 << ((count - 1).bit_length() - 1)


def root_hash(leaves: Sequence[bytes]) -> bytes:
    """The hash of a Merkle tree (RFC 6962, 2.1)."""
    if len(leaves) == 1:
        return hashlib.sha256(b"\x00" + leaves[0]).digest()
    at = _split(len(leaves))
    return _node(root_hash(leaves[:at]), root_hash(leaves[at:]))


def inclusion_path(index: int, leaves: Sequence[bytes]) -> list[bytes]:
    """The hashes that prove that a leaf is in a Merkle tree (RFC 6962, 2.1.1)."""
    if len(leaves) == 1:
        return []
    at = _split(len(leaves))
    if index < at:
        return [*inclusion_path(index, leaves[:at]), root_hash(leaves[at:])]
    return [*inclusion_path(index - at, leaves[at:]), root_hash(leaves[:at])]


class Log:
    """A transparency log.

    Attributes:
        version: of the API.
        origin: its name in checkpoints.
        public, details, log_id: its public key in DER form, the kind of that key, and its id.
        leaves: the entries in canonical form.
    """

    version: int
    origin: str

    def __init__(self, public: bytes, details: str, log_id: bytes) -> None:
        self.public, self.details, self.log_id = public, details, log_id
        self.leaves: list[bytes] = []

    def sign(self, data: bytes) -> bytes:
        """A signature by the log."""
        raise NotImplementedError

    def add(self, body: Mapping[str, Any]) -> dict[str, Any]:
        """Add an entry; the response of the log.

        Raises:
            Refused: what is to be added is not signed with the key of its certificate.
        """
        raise NotImplementedError

    def append(self, leaf: bytes) -> tuple[int, list[bytes]]:
        """Add an entry; its index, and the proof that it is in the log."""
        self.leaves.append(leaf)
        index = len(self.leaves) - 1
        return index, inclusion_path(index, self.leaves)

    def checkpoint(self) -> str:
        """The size and the hash of the log, signed."""
        note = f"{self.origin}\n{len(self.leaves)}\n{_base64(root_hash(self.leaves))}\n"
        made = _base64(self.log_id[:4] + self.sign(note.encode()))
        return f"{note}\n\N{EM DASH} {self.origin.split()[0]} {made}\n"


class Rekor1(Log):
    """A log of version 1: entries are DSSE envelopes without their payload, and have a time."""

    version = 1
    origin = "rekor.test - 1"

    def __init__(self) -> None:
        self.key = ec.generate_private_key(ec.SECP256R1())
        super().__init__(_spki(self.key), "PKIX_ECDSA_P256_SHA_256", _key_id(self.key))

    def sign(self, data: bytes) -> bytes:
        """A signature by the log."""
        return _sign(self.key, data)

    def add(self, body: Mapping[str, Any]) -> dict[str, Any]:
        """Add a DSSE envelope; the entry, with its proof and its signed timestamp."""
        if (body["kind"], body["apiVersion"]) != ("dsse", "0.0.1"):
            raise Refused(400, f"no such type of entry: {body['kind']}")
        proposed = body["spec"]["proposedContent"]
        leaf = _canonical({"apiVersion": "0.0.1", "kind": "dsse", "spec": _dsse(**proposed)})
        index, path = self.append(leaf)
        entry = {
            "body": _base64(leaf),
            "integratedTime": int(datetime.datetime.now(datetime.UTC).timestamp()),
            "logID": self.log_id.hex(),
            "logIndex": index,
        }
        proof = {
            "checkpoint": self.checkpoint(),
            "hashes": [one.hex() for one in path],
            "logIndex": index,
            "rootHash": root_hash(self.leaves).hex(),
            "treeSize": len(self.leaves),
        }
        promise = _base64(self.sign(_canonical(entry)))
        name = hashlib.sha256(b"\x00" + leaf).hexdigest()
        return {name: entry | {"verification": {"inclusionProof": proof, "signedEntryTimestamp": promise}}}


class Rekor2(Log):
    """A log of version 2: entries are hashes with signatures, and have no time."""

    version = 2
    origin = "rekor.test"

    def __init__(self) -> None:
        self.key = ed25519.Ed25519PrivateKey.generate()
        public = self.key.public_key()
        # The id of a key in signed notes: https://github.com/C2SP/C2SP/blob/main/signed-note.md
        raw = public.public_bytes(Encoding.Raw, PublicFormat.Raw)
        log_id = hashlib.sha256(self.origin.encode() + b"\n\x01" + raw).digest()
        super().__init__(public.public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo), "PKIX_ED25519", log_id)

    def sign(self, data: bytes) -> bytes:
        """A signature by the log."""
        return self.key.sign(data)

    def add(self, body: Mapping[str, Any]) -> dict[str, Any]:
        """Add the hash and the signature of an envelope; the entry with its proof."""
        given = body["hashedRekordRequestV002"]
        verifier, digest = given["signature"]["verifier"], base64.b64decode(given["digest"])
        certificate = x509.load_der_x509_certificate(base64.b64decode(verifier["x509Certificate"]["rawBytes"]))
        _check(certificate, given["signature"]["content"], digest, Prehashed(hashes.SHA256()))
        data = {"algorithm": "SHA2_256", "digest": given["digest"]}
        spec = {"hashedRekordV002": {"data": data, "signature": given["signature"]}}
        leaf = _canonical({"apiVersion": "0.0.2", "kind": "hashedrekord", "spec": spec})
        index, path = self.append(leaf)
        return {
            "logIndex": str(index),
            "logId": {"keyId": _base64(self.log_id)},
            "kindVersion": {"kind": "hashedrekord", "version": "0.0.2"},
            "inclusionProof": {
                "logIndex": str(index),
                "rootHash": _base64(root_hash(self.leaves)),
                "treeSize": str(len(self.leaves)),
                "hashes": [_base64(one) for one in path],
                "checkpoint": {"envelope": self.checkpoint()},
            },
            "canonicalizedBody": _base64(leaf),
        }


class Authority:
    """A root certificate, and what it signs."""

    def __init__(self, name: str) -> None:
        self.name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
        self.key = ec.generate_private_key(ec.SECP256R1())
        self.root = self.builder(self.name, self.key.public_key(), datetime.timedelta(days=1), ca=True).sign(
            self.key, hashes.SHA256()
        )

    def builder(
        self, subject: x509.Name, key: ec.EllipticCurvePublicKey, lifetime: datetime.timedelta, *, ca: bool = False
    ) -> x509.CertificateBuilder:
        """The parts that every certificate of this authority has."""
        now = datetime.datetime.now(datetime.UTC).replace(microsecond=0)
        usage = dict.fromkeys(
            ["content_commitment", "key_encipherment", "data_encipherment", "key_agreement", "crl_sign",
             "encipher_only", "decipher_only"], False
        )  # fmt: skip
        made = (
            x509.CertificateBuilder()
            .subject_name(subject)
            .issuer_name(self.name)
            .public_key(key)
            .serial_number(x509.random_serial_number())
            .not_valid_before(now)
            .not_valid_after(now + lifetime)
            .add_extension(x509.KeyUsage(digital_signature=not ca, key_cert_sign=ca, **usage), critical=True)
            .add_extension(x509.SubjectKeyIdentifier.from_public_key(key), critical=False)
            .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(self.key.public_key()), critical=False)
        )
        return made.add_extension(x509.BasicConstraints(True, 0), critical=True) if ca else made


class Sigstore(Listener):
    """A Sigstore instance as a context manager.

    Attributes:
        issuers: URLs of the issuers whose tokens Fulcio accepts.
        rekor: the transparency log.
        issued: the certificates of Fulcio.
        lifetime: of these certificates.
        tsa: folder with the timestamp authority's files; there is no such authority if None.
    """

    def __init__(self, tsa: Path | None = None, rekor: Log | None = None) -> None:
        self.authority = Authority("fulcio.test")
        self.issuers = [GITHUB, GOOGLE]
        self.issuer_key, self.ct_key = (ec.generate_private_key(ec.SECP256R1()) for _ in range(2))
        self.rekor = rekor or Rekor1()
        self.issued: list[x509.Certificate] = []
        self.lifetime = LIFETIME
        self.tsa = tsa
        if tsa:
            self.timestamping = Authority("tsa.test")
            self.tsa_certificate = _write_tsa(tsa, self.timestamping)

    def handler(self) -> type[BaseHTTPRequestHandler]:
        """The class that answers a request."""
        fake = self

        class Handler(_Handler):
            sigstore = fake

        return Handler

    def answer(self, path: str, body: bytes, authorization: str) -> tuple[int, bytes]:
        """The status and the body of the response to a POST.

        Raises:
            Refused: it has another status.
        """
        if path == "/api/v2/signingCert":
            return 200, json.dumps(self.certify(json.loads(body), authorization.removeprefix("Bearer "))).encode()
        if path == f"/api/v{self.rekor.version}/log/entries":
            return 201, json.dumps(self.rekor.add(json.loads(body))).encode()
        if path == "/api/v1/timestamp" and self.tsa:
            return 201, _timestamp(self.tsa, body)
        raise Refused(404, f"POST {path} is not part of this fake")

    # --- OIDC ------------------------------------------------------------------------------------------------------

    def token(self, issuer: str = GITHUB, *, lifetime: int = 300, **claims: str) -> str:
        """A token of an issuer; ``lifetime`` in seconds.

        That of GitHub Actions is one of a workflow
        (https://docs.github.com/actions/reference/security/oidc#oidc-token-claims).
        """
        now = int(datetime.datetime.now(datetime.UTC).timestamp())
        workflow = {
            "sub": "repo:ml/images:ref:refs/heads/main",
            "job_workflow_ref": "ml/images/.github/workflows/images.yml@refs/heads/main",
        }
        every = {"iss": issuer, "aud": "sigstore", "iat": now, "nbf": now, "exp": now + lifetime}
        return jwt.encode(every | (workflow if issuer == GITHUB else {}) | claims, self.issuer_key, algorithm="ES256")

    # --- Fulcio ----------------------------------------------------------------------------------------------------

    def certify(self, body: Mapping[str, str], token: str) -> dict[str, Any]:
        """A certificate for the identity of a token, with a timestamp of the transparency log.

        Raises:
            Refused: the token is not valid, or the request does not prove that its sender has the private key.
        """
        try:
            claims = jwt.decode(
                token, self.issuer_key.public_key(), ["ES256"], audience="sigstore", issuer=self.issuers
            )
        except jwt.InvalidTokenError as error:
            raise Refused(401, f"There was an error processing the identity token: {error}") from None
        request = x509.load_pem_x509_csr(base64.b64decode(body["certificateSigningRequest"]))
        key = request.public_key()
        if not request.is_signature_valid or not isinstance(key, ec.EllipticCurvePublicKey):
            raise Refused(400, "The signature supplied in the request could not be verified")
        builder = (
            self.authority.builder(x509.Name([]), key, self.lifetime)
            .add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.CODE_SIGNING]), critical=False)
            .add_extension(x509.SubjectAlternativeName([_subject(claims)]), critical=True)
            .add_extension(_extension(_ISSUER, claims["iss"].encode()), critical=False)
            .add_extension(_extension(_ISSUER_V2, _utf8_string(claims["iss"])), critical=False)
        )
        without = builder.sign(self.authority.key, hashes.SHA256())
        listed = _octet_string(self._timestamp_list(without.tbs_certificate_bytes))
        certificate = builder.add_extension(_extension(_SCT_LIST, listed), critical=False).sign(
            self.authority.key, hashes.SHA256()
        )
        self.issued.append(certificate)
        chain = [one.public_bytes(Encoding.PEM).decode() for one in (certificate, self.authority.root)]
        return {"signedCertificateEmbeddedSct": {"chain": {"certificates": chain}}}

    def _timestamp_list(self, precertificate: bytes) -> bytes:
        """The list with the signed timestamp of a certificate (RFC 6962, 3.2 and 3.3)."""
        time = int(datetime.datetime.now(datetime.UTC).timestamp() * 1000)
        length = struct.pack("!I", len(precertificate))[1:]
        entry = _key_id(self.authority.key) + length + precertificate
        made = _sign(self.ct_key, struct.pack("!BBQH", 0, 0, time, 1) + entry + struct.pack("!H", 0))
        # Version 1, no extensions, SHA-256 with ECDSA.
        timestamp = struct.pack("!B32sQHBBH", 0, _key_id(self.ct_key), time, 0, 4, 3, len(made)) + made
        return struct.pack("!HH", len(timestamp) + 2, len(timestamp)) + timestamp

    # --- trust -----------------------------------------------------------------------------------------------------

    @property
    def url(self) -> str:
        """http://127.0.0.1:port."""
        return f"http://{self.host}"

    def trust_config(self) -> dict[str, Any]:
        """The trust configuration of clients of this instance."""
        always = {"start": "2020-01-01T00:00:00Z"}
        services = {
            "caUrls": self.url,
            "oidcUrls": self.url,
            "rekorTlogUrls": self.url,
            **({"tsaUrls": f"{self.url}/api/v1/timestamp"} if self.tsa else {}),
        }
        root = {
            "mediaType": "application/vnd.dev.sigstore.trustedroot+json;version=0.1",
            "tlogs": [self._log(self.rekor.public, self.rekor.details, self.rekor.log_id)],
            "ctlogs": [self._log(_spki(self.ct_key), "PKIX_ECDSA_P256_SHA_256", _key_id(self.ct_key))],
            "certificateAuthorities": [_authority([self.authority.root])],
            "timestampAuthorities": ([_authority([self.tsa_certificate, self.timestamping.root])] if self.tsa else []),
        }
        signing: dict[str, Any] = {
            name: [{"url": url, "majorApiVersion": 1, "validFor": always, "operator": "test"}]
            for name, url in services.items()
        }
        signing["rekorTlogUrls"][0]["majorApiVersion"] = self.rekor.version
        signing["mediaType"] = "application/vnd.dev.sigstore.signingconfig.v0.2+json"
        signing["rekorTlogConfig"] = signing["tsaConfig"] = {"selector": "ANY"}
        return {
            "mediaType": "application/vnd.dev.sigstore.clienttrustconfig.v0.1+json",
            "trustedRoot": root,
            "signingConfig": signing,
        }

    def _log(self, key: bytes, details: str, log_id: bytes) -> dict[str, Any]:
        return {
            "baseUrl": self.url,
            "hashAlgorithm": "SHA2_256",
            "publicKey": {
                "rawBytes": _base64(key),
                "keyDetails": details,
                "validFor": {"start": "2020-01-01T00:00:00Z"},
            },
            "logId": {"keyId": _base64(log_id)},
        }


def _authority(chain: Sequence[x509.Certificate]) -> dict[str, Any]:
    return {
        "subject": {"organization": "test", "commonName": "test"},
        "uri": "https://test",
        "certChain": {"certificates": [{"rawBytes": _base64(one.public_bytes(Encoding.DER))} for one in chain]},
        "validFor": {"start": "2020-01-01T00:00:00Z"},
    }


def _subject(claims: Mapping[str, str]) -> x509.GeneralName:
    """The identity in a certificate: of a workflow of GitHub Actions its file, of a person the address."""
    if claims["iss"] == GITHUB:
        return x509.UniformResourceIdentifier(f"https://github.com/{claims['job_workflow_ref']}")
    return x509.RFC822Name(claims["email"])


def _extension(oid: str, value: bytes) -> x509.UnrecognizedExtension:
    return x509.UnrecognizedExtension(x509.ObjectIdentifier(oid), value)


def _der(tag: int, value: bytes) -> bytes:
    length = len(value)
    if length < 128:
        return bytes([tag, length]) + value
    size = (length.bit_length() + 7) // 8
    return bytes([tag, 0x80 | size]) + length.to_bytes(size, "big") + value


def _utf8_string(text: str) -> bytes:
    return _der(0x0C, text.encode())


def _octet_string(data: bytes) -> bytes:
    return _der(0x04, data)


def _dsse(envelope: str, verifiers: Sequence[str]) -> dict[str, Any]:
    """What Rekor keeps of an envelope.

    Raises:
        Refused: it is not signed with the key of its certificate.
    """
    found = json.loads(envelope)
    payload, kind = base64.b64decode(found["payload"]), found["payloadType"].encode()
    signed = b"DSSEv1 %d %b %d %b" % (len(kind), kind, len(payload), payload)
    (made,), (verifier,) = found["signatures"], verifiers
    _check(x509.load_pem_x509_certificate(base64.b64decode(verifier)), made["sig"], signed, hashes.SHA256())
    return {
        "envelopeHash": {"algorithm": "sha256", "value": hashlib.sha256(envelope.encode()).hexdigest()},
        "payloadHash": {"algorithm": "sha256", "value": hashlib.sha256(payload).hexdigest()},
        "signatures": [{"signature": made["sig"], "verifier": verifier}],
    }


def _check(
    certificate: x509.Certificate, signature: str, data: bytes, algorithm: hashes.HashAlgorithm | Prehashed
) -> None:
    """Check a signature with the key of a certificate.

    Raises:
        Refused: it is not valid.
    """
    key = certificate.public_key()
    assert isinstance(key, ec.EllipticCurvePublicKey)
    try:
        key.verify(base64.b64decode(signature), data, ec.ECDSA(algorithm))
    except InvalidSignature:
        raise Refused(400, "the signature could not be verified") from None


def _write_tsa(folder: Path, root: Authority) -> x509.Certificate:
    """Write the files of a timestamp authority; its certificate."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "tsa")])
    usage = x509.ExtendedKeyUsage([ExtendedKeyUsageOID.TIME_STAMPING])
    builder = root.builder(name, key.public_key(), datetime.timedelta(days=1)).add_extension(usage, critical=True)
    certificate = builder.sign(root.key, hashes.SHA256())
    (folder / "key.pem").write_bytes(key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()))
    (folder / "certificate.pem").write_bytes(certificate.public_bytes(Encoding.PEM))
    (folder / "serial").write_text("01\n")
    (folder / "tsa.cnf").write_text(
        "[tsa]\ndefault_tsa = one\n[one]\nserial = serial\nsigner_digest = sha256\ndefault_policy = 1.2.3\n"
        "digests = sha256\ness_cert_id_alg = sha256\n"
    )
    return certificate


def _timestamp(folder: Path, query: bytes) -> bytes:
    """The response to a query (RFC 3161), by OpenSSL."""
    (folder / "query").write_bytes(query)
    command = "openssl ts -reply -config tsa.cnf -queryfile query -signer certificate.pem -inkey key.pem"
    return subprocess.run(command.split(), cwd=folder, check=True, capture_output=True).stdout


class _Handler(BaseHTTPRequestHandler):
    sigstore: Sigstore
    protocol_version = "HTTP/1.1"

    def log_message(self, *_: object) -> None:
        """Log nothing."""

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        try:
            status, data = self.sigstore.answer(self.path, body, self.headers.get("Authorization", ""))
        except Refused as error:
            status, data = error.status, json.dumps({"code": error.status, "message": str(error)}).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)
