"""Choose who signs images, and whose signatures count: a key, or an identity that Sigstore has a certificate for.

:mod:`trainyard.release.keys` has the first, :mod:`trainyard.release.identities` the second. They need optional
dependencies, so they are imported only where the options of a command say so.
"""

from __future__ import annotations

from pathlib import Path

from trainyard.common import installation, settings
from trainyard.common.context import Context
from trainyard.common.errors import UserError
from trainyard.oci.statements import Signer, Trust


def signer(key: Path | None, command: str, *, context: Context, keyless: bool = False) -> Signer | None:
    """Return who signs: a private key, which ``COSIGN_PASSWORD`` decrypts, or the identity of this process, or None.

    It is made before anything is uploaded, so that a key that cannot be read leaves nothing unsigned at the registry.

    Args:
        key: the file of the key.
        command: the command that needs it, for messages.
        keyless: whether the identity signs.
    Raises:
        UserError: what signs is not installed, both are given, the key cannot be read, or there is no identity.
        StepFailed: a service that signing needs cannot be reached or refuses.
    """
    if key and keyless:
        raise UserError(
            f"'--keyless' and COSIGN_KEY={key}: images are signed by an identity or with a key: give one of them"
        )
    if keyless:
        installation.require_extra("sigstore", "keyless", command)
        from trainyard.release import identities

        return identities.IdentitySigner(context)
    if key:
        installation.require_extra("securesystemslib", "sign", command)
        from trainyard.release import keys

        return keys.KeySigner(keys.private_key(key, settings.standard_variable("COSIGN_PASSWORD")))
    return None


def trust(
    key: Path | None, identity: str | None, issuer: str | None, command: str, *, context: Context
) -> Trust | None:
    """Return whose signatures count: those of a public key or of an identity; None without both.

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
        installation.require_extra("securesystemslib", "sign", command)
        from trainyard.release import keys

        return keys.TrustedKey(keys.public_key(key))
    if not identity and not issuer:
        return None
    if not identity or not issuer:
        raise UserError(f"{names[0]} and {names[1]} must be given together: an identity is one of an issuer")
    installation.require_extra("sigstore", "keyless", command)
    from trainyard.release import identities

    return identities.TrustedIdentity(identities.Identity(identity, issuer), identities.trust_config(context), context)


def ways_to_sign() -> str:
    """Return the options that say who signs, for messages."""
    return "COSIGN_KEY=<private key> or '--keyless'"


def ways_to_check() -> str:
    """Return the options that say whose signatures count, for messages."""
    return "COSIGN_PUB=<public key> or '--certificate-identity <name>' '--certificate-oidc-issuer <URL>'"
