"""Sign images by an identity, without a key that is kept: keyless signing, as Sigstore calls it.

The identity is an OIDC token of the machine that this process runs on. For it, Fulcio issues a certificate that is
valid for minutes, and the signature is entered into the transparency log Rekor, which proves when it was made. Both are
public where Sigstore's public instance is used. The library ``sigstore`` does this; no browser is opened.

https://docs.sigstore.dev/about/security/
"""

from __future__ import annotations

import contextlib
import datetime
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from cryptography import x509
from id import GitHubOidcPermissionCredentialError
from sigstore.dsse import Statement
from sigstore.errors import Error
from sigstore.models import Bundle as SigstoreBundle
from sigstore.models import ClientTrustConfig
from sigstore.oidc import IdentityError, IdentityToken, detect_credential
from sigstore.sign import Signer, SigningContext
from sigstore.verify import Verifier, policy

from trainyard.common import settings
from trainyard.common.context import Context
from trainyard.common.errors import StepFailed, UserError
from trainyard.oci.statements import PLAIN, Bundle, Opened, Trust

#: The extension of a certificate with the URL of the issuer
#: (https://github.com/sigstore/fulcio/blob/main/docs/oid-info.md).
_ISSUER = x509.ObjectIdentifier("1.3.6.1.4.1.57264.1.1")

#: A certificate is renewed this long before it expires: signing and logging must end before it does.
_MARGIN = datetime.timedelta(minutes=1)


@dataclass(frozen=True)
class Identity:
    """Identify who signs by a name that is unique among its issuer's, such as the URL of a workflow, or an address."""

    name: str
    issuer: str

    def __str__(self) -> str:
        return f"{self.name} ({self.issuer})"


def identity_of(certificate: x509.Certificate) -> Identity:
    """Return the identity that a certificate of Fulcio names, or raise ValueError; nothing is verified."""
    try:
        (name,) = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
        extension = certificate.extensions.get_extension_for_oid(_ISSUER).value
    except (x509.ExtensionNotFound, x509.DuplicateExtension, x509.UnsupportedGeneralNameType) as error:
        raise ValueError(str(error)) from None
    assert isinstance(extension, x509.UnrecognizedExtension)
    value = name.value.decode() if isinstance(name, x509.OtherName) else str(name.value)
    issuer = extension.value.decode()
    if not (value + issuer).isprintable():
        raise ValueError("it names an identity with control characters")
    return Identity(value, issuer)


def trust_config(context: Context) -> ClientTrustConfig:
    """Return the services and keys of a Sigstore instance: of ``--trust-config``, else of the public instance.

    Raises:
        UserError: the file is no trust configuration.
        StepFailed: that of the public instance cannot be fetched.
    """
    if not context.trust_config:
        try:
            return ClientTrustConfig.production(offline=context.offline)
        except Error as error:
            raise StepFailed(
                f"the trust configuration of Sigstore's public instance cannot be fetched: {_line(error)}; "
                "'--trust-config <file>' names that of another instance"
            ) from error
    with _usable_config(context):
        return ClientTrustConfig.from_json(Path(context.trust_config).read_text(encoding="utf-8"))


@contextlib.contextmanager
def _usable_config(context: Context) -> Iterator[None]:
    """Raise a :class:`UserError` if what runs in this context cannot use the trust configuration."""
    given = f"'--trust-config {context.trust_config}'" if context.trust_config else "Sigstore's public instance"
    try:
        yield
    except OSError as error:
        raise UserError(f"{given}: {error.strerror}") from None
    except (Error, ValueError) as error:
        raise UserError(f"{given}: not a trust configuration that sigstore can use: {_line(error)}") from None


def _line(error: BaseException) -> str:
    """Return what an error and its cause say, in one line: some errors of the library leave it to the cause."""
    said = [" ".join(str(said).split()) for said in (error, error.__cause__) if said is not None]
    return ": ".join(dict.fromkeys(filter(None, said))) or type(error).__name__


class TrustedIdentity(Trust):
    """Accept the signatures of an identity that has a certificate of a Sigstore instance."""

    def __init__(self, identity: Identity, config: ClientTrustConfig, context: Context) -> None:
        """Trust ``identity``, or raise a :class:`UserError` if the configuration cannot be used."""
        self.identity = identity
        self.how = f"by {identity}"
        with _usable_config(context):
            self._verifier = Verifier(trusted_root=config.trusted_root)

    def _opened(self, bundle: Bundle, data: bytes) -> Opened:
        if bundle.certificate is None:
            return Opened(bundle.payload, "signed with a key, not by an identity", foreign=True)
        try:
            signer = identity_of(x509.load_der_x509_certificate(bundle.certificate))
        except (ValueError, x509.InvalidVersion) as error:
            return Opened(bundle.payload, f"its certificate cannot be read: {_line(error)}")
        if signer != self.identity:
            return Opened(bundle.payload, f"signed by {signer}", foreign=True)
        demanded = policy.Identity(identity=self.identity.name, issuer=self.identity.issuer)
        try:
            kind, payload = self._verifier.verify_dsse(SigstoreBundle.from_json(data), demanded)
        except Exception as error:  # besides its own errors, those of the parsers that the library calls
            return Opened(bundle.payload, f"its signature is not valid: {_line(error)}")
        return Opened(payload, "" if kind == PLAIN else f"its type is {kind}")


class IdentitySigner:
    """Sign by the identity of this process."""

    def __init__(self, context: Context) -> None:
        """Obtain a certificate.

        Raises:
            UserError: there is no identity, or see :func:`trust_config`.
            StepFailed: a service cannot be reached or refuses.
        """
        token = _token()
        config = trust_config(context)
        with _usable_config(context):
            self._context = SigningContext.from_trust_config(config)
        self._signer, self._certificate = self._certified(token)
        self.trust = TrustedIdentity(identity_of(self._certificate), config, context)

    def _certified(self, token: IdentityToken) -> tuple[Signer, x509.Certificate]:
        """Return a signer of the library, and its certificate."""
        try:
            made = Signer(token, self._context)
            # The only way to learn the identity before signing: which part of a token it is depends on the issuer.
            return made, made._signing_cert()
        except Exception as error:  # the library has no common class for errors of the services
            raise StepFailed(f"no certificate for {token.identity} ({token.issuer}): {_line(error)}") from error

    def seal(self, payload: bytes) -> bytes:
        """Return the bundle of a statement, with its certificate and its entry of the log.

        Raises:
            UserError: the certificate has expired, and there is no identity any more to get another one for.
            StepFailed: a service cannot be reached or refuses.
        """
        if datetime.datetime.now(datetime.UTC) + _MARGIN > self._certificate.not_valid_after_utc:
            self._signer, self._certificate = self._certified(_token())
        try:
            return self._signer.sign_dsse(Statement(payload)).to_json().encode()
        except Exception as error:  # as above
            raise StepFailed(f"a claim cannot be signed by {self.trust.identity}: {_line(error)}") from error


def _token() -> IdentityToken:
    """Return the OIDC token of this process: of ``SIGSTORE_ID_TOKEN``, else of the machine that it runs on.

    Raises:
        UserError: there is none, or it is not valid.
    """
    given = settings.standard_variable("SIGSTORE_ID_TOKEN")
    try:
        raw = given or detect_credential()
        token = IdentityToken(raw) if raw else None
    except IdentityError as error:
        where = "SIGSTORE_ID_TOKEN" if given else "the identity of this machine"
        denied = isinstance(error.__cause__, GitHubOidcPermissionCredentialError)
        remedy = ": give the job the permission 'id-token: write'" if denied else ""
        raise UserError(f"{where} cannot be used: {_line(error)}{remedy}") from None
    if token is None:
        raise UserError(
            "'--keyless' finds no identity here: run it in GitHub Actions with the "
            "permission 'id-token: write' or on Google Cloud, set SIGSTORE_ID_TOKEN to an OIDC token for 'sigstore', "
            "or sign with COSIGN_KEY=<private key>"
        )
    return token
