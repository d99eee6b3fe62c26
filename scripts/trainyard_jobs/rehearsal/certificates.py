"""A certificate authority for one rehearsal: TensorFlow reaches Cloud Storage by its public names, over HTTPS only."""

from __future__ import annotations

import datetime

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

#: Validity of the certificates; longer than any rehearsal.
_VALID = datetime.timedelta(days=7)


def _name(text: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, text)])


def _builder(
    subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePublicKey, authority: bool
) -> x509.CertificateBuilder:
    now = datetime.datetime.now(datetime.UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(days=1))
        .not_valid_after(now + _VALID)
        .add_extension(x509.BasicConstraints(ca=authority, path_length=None), critical=True)
    )


def make(names: list[str]) -> tuple[bytes, bytes]:
    """A certificate for host ``names``, issued by a new authority whose key is discarded.

    Returns:
        the authority's certificate, and the server's key and certificate, both PEM.
    """
    authority_key, server_key = (ec.generate_private_key(ec.SECP256R1()) for _ in range(2))
    authority = _builder(
        _name("Trainyard rehearsal"), _name("Trainyard rehearsal"), authority_key.public_key(), True
    ).sign(authority_key, hashes.SHA256())
    server = (
        _builder(_name(names[0]), authority.subject, server_key.public_key(), False)
        .add_extension(x509.SubjectAlternativeName([x509.DNSName(name) for name in names]), critical=False)
        .sign(authority_key, hashes.SHA256())
    )
    pem = serialization.Encoding.PEM
    private = server_key.private_bytes(pem, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    return authority.public_bytes(pem), private + server.public_bytes(pem)
