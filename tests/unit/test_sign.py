"""Signatures are what `cosign verify --key` reads; the registry is a fake in memory (tests/image uses a real one)."""

from __future__ import annotations

import base64
import hashlib
import importlib.util
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec, ed25519, padding, rsa

from trainyard.common.console import StepFailed, UserError
from trainyard.oci import referrers
from trainyard.oci.registry import Manifest
from trainyard.release import signature

IMAGE = b'{"schemaVersion": 2}'
SUBJECT = Manifest(f"sha256:{hashlib.sha256(IMAGE).hexdigest()}", "application/vnd.oci.image.manifest.v1+json", IMAGE)


class Registry:
    """The part of the distribution API that signing uses."""

    name = "registry:5000/ml/trainyard"

    def __init__(self) -> None:
        self.blobs: dict[str, bytes] = {}
        self.tags: dict[str, Manifest] = {}

    def has_blob(self, digest: str) -> bool:
        return digest in self.blobs

    def blob(self, digest: str) -> bytes:
        return self.blobs[digest]

    def upload(self, data: bytes, digest: str) -> None:
        assert digest == f"sha256:{hashlib.sha256(data).hexdigest()}"
        self.blobs[digest] = data

    def manifest(self, reference: str) -> Manifest | None:
        return self.tags.get(reference)

    def tag(self, manifest: Manifest, tag: str) -> None:
        self.tags[tag] = manifest


def write(path: Path, key: Any, password: bytes | None = None) -> Path:
    encryption = serialization.BestAvailableEncryption(password) if password else serialization.NoEncryption()
    path.write_bytes(key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, encryption))
    return path


KEYS = {
    "ec": lambda: ec.generate_private_key(ec.SECP256R1()),
    "rsa": lambda: rsa.generate_private_key(65537, 2048),
    "ed25519": ed25519.Ed25519PrivateKey.generate,
}


@pytest.mark.parametrize("kind", KEYS)
def test_a_signature_is_what_cosign_reads(kind: str, tmp_path: Path) -> None:
    """https://github.com/sigstore/cosign/blob/main/specs/SIGNATURE_SPEC.md, checked with `cryptography` alone."""
    key = KEYS[kind]()
    registry: Any = Registry()
    tag = signature.sign(registry, SUBJECT, signature.private_key(write(tmp_path / "key", key), None))
    assert tag == f"sha256-{SUBJECT.digest.removeprefix('sha256:')}.sig"
    manifest = json.loads(registry.tags[tag].body)
    (layer,) = manifest["layers"]
    assert layer["mediaType"] == "application/vnd.dev.cosign.simplesigning.v1+json"
    payload = registry.blobs[layer["digest"]]
    assert json.loads(payload) == {
        "critical": {
            "identity": {"docker-reference": "registry:5000/ml/trainyard"},
            "image": {"docker-manifest-digest": SUBJECT.digest},
            "type": "cosign container image signature",
        },
        "optional": None,
    }
    found = base64.b64decode(layer["annotations"]["dev.cosignproject.cosign/signature"])
    public = key.public_key()
    if kind == "ec":
        public.verify(found, payload, ec.ECDSA(hashes.SHA256()))
    elif kind == "rsa":
        public.verify(found, payload, padding.PKCS1v15(), hashes.SHA256())
    else:
        public.verify(found, payload)
    assert manifest["subject"]["digest"] == SUBJECT.digest
    assert json.loads(registry.blobs[manifest["config"]["digest"]])["rootfs"]["diff_ids"] == [layer["digest"]]


def test_a_second_key_adds_a_signature_and_the_same_key_does_not() -> None:
    registry: Any = Registry()
    one, other = KEYS["ec"](), KEYS["ed25519"]()
    assert signature.sign(registry, SUBJECT, one) and signature.sign(registry, SUBJECT, other)
    assert signature.sign(registry, SUBJECT, one) is None
    assert len(referrers.get(registry, SUBJECT.digest, "sig")) == 2
    assert signature.verified(registry, SUBJECT.digest, one.public_key()) == 1
    assert signature.verified(registry, SUBJECT.digest, other.public_key()) == 1


def test_a_missing_a_foreign_and_a_forged_signature_are_refused() -> None:
    registry: Any = Registry()
    key = KEYS["ec"]()
    with pytest.raises(StepFailed, match="no signature"):
        signature.verified(registry, SUBJECT.digest, key.public_key())
    signature.sign(registry, SUBJECT, key)
    with pytest.raises(StepFailed, match="1 signatures, none by this key"):
        signature.verified(registry, SUBJECT.digest, KEYS["ec"]().public_key())
    stolen = referrers.get(registry, SUBJECT.digest, "sig")[0]
    assert not signature.valid(key.public_key(), stolen, f"sha256:{'0' * 64}"), "a signature is about one image"
    changed = referrers.Referrer(stolen.data + b" ", stolen.media_type, stolen.annotations)
    assert not signature.valid(key.public_key(), changed, SUBJECT.digest)
    assert not signature.valid(key.public_key(), referrers.Referrer(stolen.data, stolen.media_type, {}), SUBJECT.digest)


def test_a_key_is_read_or_refused_in_one_line(tmp_path: Path) -> None:
    locked = write(tmp_path / "locked", KEYS["ec"](), b"secret")
    assert signature.private_key(locked, "secret")
    cosigns = tmp_path / "cosign.key"
    cosigns.write_text(
        "-----BEGIN ENCRYPTED SIGSTORE PRIVATE KEY-----\nAAAA\n-----END ENCRYPTED SIGSTORE PRIVATE KEY-----\n"
    )
    (tmp_path / "none").write_text("no key")
    for path, password, words in (
        (locked, None, "COSIGN_PASSWORD must be given"),
        (locked, "wrong", "not decrypted by COSIGN_PASSWORD"),
        (tmp_path / "none", None, "not a private key in PEM form"),
        (tmp_path / "missing", None, "No such file"),
        (cosigns, None, "cosign sign --key"),
    ):
        with pytest.raises(UserError, match=words) as refused:
            signature.private_key(path, password)
        assert "\n" not in str(refused.value)
    with pytest.raises(UserError, match="not a public key"):
        signature.public_key(locked)
    other = write(tmp_path / "other", ec.generate_private_key(ec.SECP256K1()))
    with pytest.raises(UserError, match=r"cosign takes EC keys on secp256r1, .*, not on secp256k1"):
        signature.private_key(other, None)


def test_an_rsa_key_that_can_be_broken_neither_signs_nor_is_trusted(tmp_path: Path) -> None:
    key = rsa.generate_private_key(public_exponent=65537, key_size=1024)
    public = tmp_path / "public"
    public.write_bytes(
        key.public_key().public_bytes(serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo)
    )
    private = write(tmp_path / "private", key)
    with pytest.raises(UserError, match=r"^COSIGN_KEY=.*private: an RSA key of 1024 bits .* of 2048 or more"):
        signature.private_key(private, None)
    with pytest.raises(UserError, match=r"^COSIGN_PUB=.*public: an RSA key of 1024 bits .* of 2048 or more"):
        signature.public_key(public)


# --- the command ---------------------------------------------------------------------------------------------------

Command = Callable[..., tuple[int, str, str]]


def test_signing_needs_a_key(trainyard: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("COSIGN_KEY", "COSIGN_PUB"):
        monkeypatch.delenv(name, raising=False)
    status, out, err = trainyard("sign", "tf-cpu", REGISTRY="localhost:1/a")
    assert (status, out) == (2, "")
    assert (
        "COSIGN_KEY=<private key> or '--keyless' signs, COSIGN_PUB=<public key> or '--certificate-identity <name>"
        in err
    )


@pytest.mark.parametrize("variable", ["COSIGN_KEY", "TRAINYARD_COSIGN_KEY"])
def test_a_key_that_cannot_be_read_fails_before_anything_is_pushed(
    variable: str, trainyard: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(variable, "/nonexistent/signing.pem")
    status, out, err = trainyard("push", "tf-cpu", REGISTRY="localhost:1/a")
    assert (status, out) == (2, "") and "COSIGN_KEY=/nonexistent/signing.pem: No such file" in err


@pytest.mark.parametrize(
    ("arguments", "module", "extra"),
    [
        (("sign", "tf-cpu"), "cryptography", "sign"),
        (("push", "tf-cpu", "--registry=localhost:1/a", "--key=signing.pem"), "cryptography", "sign"),
        (("sign", "tf-cpu", "--keyless"), "sigstore", "keyless"),
        (("push", "tf-cpu", "--registry=localhost:1/a", "--keyless"), "sigstore", "keyless"),
        (("audit", "tf-cpu"), "pip_audit", "audit"),
    ],
)
def test_a_missing_optional_dependency_is_one_line(
    arguments: tuple[str, ...], module: str, extra: str, trainyard: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *rest: None if name == module else find(name, *rest))
    status, out, err = trainyard(*arguments)
    line = f"'trainyard {arguments[0]}' needs {module}: install 'trainyard-images[{extra}]'"
    assert (status, out, err) == (2, "", f"{arguments[0]}: {line}\n")
