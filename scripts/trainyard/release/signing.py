"""Who signs images, and whose signatures count, by the options of a command.

What signs and checks needs optional dependencies, so it is imported only where it is needed.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from trainyard.common import installation, settings
from trainyard.common.console import UserError

if TYPE_CHECKING:
    from trainyard.release.signers import Signer, Trust


def signer(key: Path | None, command: str, *, keyless: bool = False) -> Signer | None:
    """Who signs: a private key, decrypted with ``COSIGN_PASSWORD``, or the identity of this process; None without both.

    It is made before anything is uploaded, so that a key that cannot be read leaves nothing unsigned at the registry.

    Args:
        key: the file of the key.
        command: the command that needs it, for messages.
        keyless: whether the identity signs (:mod:`trainyard.release.identities`).
    Raises:
        UserError: what signs is not installed, both are given, the key cannot be read, or there is no identity.
        StepFailed: a service that signing needs cannot be reached or refuses.
    """
    if key and keyless:
        raise UserError(
            f"'--keyless' and COSIGN_KEY={key}: images are signed by an identity or with a key: give one of them"
        )
    if keyless:
        _require_sigstore(command)
        from trainyard.release import identities

        return identities.IdentitySigner()
    if key:
        installation.require_extra("cryptography", "sign", command)
        from trainyard.release import keys, signature

        return keys.KeySigner(signature.private_key(key, settings.standard_variable("COSIGN_PASSWORD")))
    return None


def trust(key: Path | None, identity: str | None, issuer: str | None, command: str) -> Trust | None:
    """Whose signatures count: those of a public key or of an identity; None without both.

    Args:
        key: the file of the key.
        identity: as in a certificate: the URL of a workflow, or an address.
        issuer: the URL of who vouches for the identity.
        command: the command that needs it, for messages.
    Raises:
        UserError: what checks is not installed, both are given, a part of the identity is missing, or a file cannot
            be read.
        StepFailed: the trust configuration of Sigstore cannot be fetched.
    """
    names = "'--certificate-identity'", "'--certificate-oidc-issuer'"
    if key and (identity or issuer):
        raise UserError(f"COSIGN_PUB={key} and {names[0]}: signatures are checked with one of them: give one")
    if key:
        installation.require_extra("cryptography", "sign", command)
        from trainyard.release import keys, signature

        return keys.TrustedKey(signature.public_key(key))
    if not identity and not issuer:
        return None
    if not identity or not issuer:
        raise UserError(f"{names[0]} and {names[1]} must be given together: an identity is one of an issuer")
    _require_sigstore(command)
    from trainyard.release import identities

    return identities.TrustedIdentity(identities.Identity(identity, issuer), identities.trust_config())


def ways_to_sign() -> str:
    """The options that say who signs, for messages."""
    return "COSIGN_KEY=<private key> or '--keyless'"


def ways_to_check() -> str:
    """The options that say whose signatures count, for messages."""
    identity = "'--certificate-identity <name>'"
    return f"COSIGN_PUB=<public key> or {identity} '--certificate-oidc-issuer <URL>'"


def _require_sigstore(command: str) -> None:
    installation.require_extra("sigstore", "keyless", command)
