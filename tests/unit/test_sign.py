"""Keys are read or refused before anything is signed; tests/unit/test_claims.py has what is signed."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec, rsa

from trainyard.common import installation
from trainyard.common.errors import UserError
from trainyard.release import keys


def write(path: Path, key: Any, password: bytes | None = None) -> Path:
    encryption = serialization.BestAvailableEncryption(password) if password else serialization.NoEncryption()
    path.write_bytes(key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, encryption))
    return path


def test_a_key_is_read_or_refused_in_one_line(tmp_path: Path) -> None:
    locked = write(tmp_path / "locked", ec.generate_private_key(ec.SECP256R1()), b"secret")
    assert keys.private_key(locked, "secret")
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
            keys.private_key(path, password)
        assert "\n" not in str(refused.value)
    with pytest.raises(UserError, match="not a public key"):
        keys.public_key(locked)
    other = write(tmp_path / "other", ec.generate_private_key(ec.SECP256K1()))
    with pytest.raises(UserError, match=r"cosign takes EC keys on secp256r1, .*, not on secp256k1"):
        keys.private_key(other, None)


def test_an_rsa_key_that_can_be_broken_neither_signs_nor_is_trusted(tmp_path: Path) -> None:
    key = rsa.generate_private_key(public_exponent=65537, key_size=1024)
    public = tmp_path / "public"
    public.write_bytes(
        key.public_key().public_bytes(serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo)
    )
    private = write(tmp_path / "private", key)
    with pytest.raises(UserError, match=r"^COSIGN_KEY=.*private: an RSA key of 1024 bits .* of 2048 or more"):
        keys.private_key(private, None)
    with pytest.raises(UserError, match=r"^COSIGN_PUB=.*public: an RSA key of 1024 bits .* of 2048 or more"):
        keys.public_key(public)


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
        (("sign", "tf-cpu", "--key=signing.pem"), "securesystemslib", "sign"),
        (("sign", "tf-cpu", "--public-key=signing.pub"), "securesystemslib", "sign"),
        (("push", "tf-cpu", "--registry=localhost:1/a", "--key=signing.pem"), "securesystemslib", "sign"),
        (("sign", "tf-cpu", "--keyless"), "sigstore", "keyless"),
        (("push", "tf-cpu", "--registry=localhost:1/a", "--keyless"), "sigstore", "keyless"),
        (("audit", "tf-cpu"), "pip_audit", "audit"),
    ],
)
def test_a_missing_optional_dependency_is_one_line(
    arguments: tuple[str, ...], module: str, extra: str, trainyard: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    status, out, err = trainyard(*arguments)
    line = f"'trainyard {arguments[0]}' needs {module}: run {installation.again(extra)}"
    assert (status, out, err) == (2, "", f"{arguments[0]}: {line}\n")
