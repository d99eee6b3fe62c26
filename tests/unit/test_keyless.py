"""Claims that an identity signs: the library `sigstore` against fakes of Sigstore's services, end to end."""

from __future__ import annotations

import base64
import datetime
import http
import json
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from cryptography.hazmat.primitives.asymmetric import ec
from sigstore.errors import TUFError
from sigstore.models import Bundle, ClientTrustConfig
from sigstore.verify import Verifier, policy
from tests.claims import CLAIMS, image_to_promote, pushed_image, put_image
from tests.fakes.engine import FakeEngine
from tests.fakes.registry import Registry
from tests.fakes.sigstore import GITHUB, GOOGLE, Rekor2, Sigstore, inclusion_path, root_hash
from tests.published_images import artifacts_of

from trainyard.common.context import Context
from trainyard.common.errors import StepFailed, UserError
from trainyard.oci import referrers, statements
from trainyard.oci.referrers import Artifact
from trainyard.oci.registry import Manifest, Repository
from trainyard.oci.statements import Opened
from trainyard.release import claims, identities, predicates, publish, sources
from trainyard.release.identities import Identity, IdentitySigner, TrustedIdentity
from trainyard.release.keys import KeySigner
from trainyard.spec import model

Command = Callable[..., tuple[int, str, str]]

SUBJECT = Manifest.of({"schemaVersion": 2}, "application/vnd.oci.image.manifest.v1+json")
WORKFLOW = "https://github.com/ml/images/.github/workflows/images.yml@refs/heads/main"
TRUSTED = {"CERTIFICATE_IDENTITY": WORKFLOW, "CERTIFICATE_OIDC_ISSUER": GITHUB}

#: Variables by which CI systems are recognized (https://github.com/di/id).
AMBIENT = ("GITHUB_ACTIONS", "GITLAB_CI", "CIRCLECI", "BUILDKITE", "GOOGLE_SERVICE_ACCOUNT_NAME", "SIGSTORE_ID_TOKEN")


@pytest.fixture(autouse=True)
def no_identity_from_outside(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (*AMBIENT, "COSIGN_KEY", "COSIGN_PUB"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("id._internal.oidc.ambient._GCP_PRODUCT_NAME_FILE", "/nonexistent")


@pytest.fixture
def sigstore(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Sigstore]:
    """A Sigstore instance, and this process as a workflow that it has an identity for."""
    with Sigstore() as fake:
        use(fake, tmp_path / "trust.json", monkeypatch)
        yield fake


def use(fake: Sigstore, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path.write_text(json.dumps(fake.trust_config()))
    monkeypatch.setenv("TRAINYARD_TRUST_CONFIG", str(path))
    monkeypatch.setenv("SIGSTORE_ID_TOKEN", fake.token())


@pytest.fixture
def registry(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Registry]:
    monkeypatch.setenv("TRAINYARD_BUILD", str(tmp_path / "state"))
    with Registry() as fake:
        yield fake


@pytest.fixture
def place(registry: Registry) -> Repository:
    return Repository(f"{registry.host}/ml/trainyard")


def trusted(name: str = WORKFLOW, issuer: str = GITHUB) -> TrustedIdentity:
    return TrustedIdentity(Identity(name, issuer), identities.trust_config(Context()), Context())


STATEMENT = claims.statement(Repository("localhost:1/ml/trainyard"), SUBJECT.digest, CLAIMS[1])


# --- a claim -------------------------------------------------------------------------------------------------------


def test_every_claim_verifies_with_the_library_of_sigstore(sigstore: Sigstore, place: Repository) -> None:
    assert claims.attach(place, SUBJECT, IdentitySigner(Context()), CLAIMS) == [one.kind for one in CLAIMS]
    config = ClientTrustConfig.from_json(json.dumps(sigstore.trust_config()))
    verifier, demanded = Verifier(trusted_root=config.trusted_root), policy.Identity(identity=WORKFLOW, issuer=GITHUB)
    artifacts = artifacts_of(place, SUBJECT.digest, [statements.BUNDLE]).values()
    for artifact, claim in zip(artifacts, CLAIMS, strict=True):
        kind, payload = verifier.verify_dsse(Bundle.from_json(artifact.data), demanded)
        assert kind == "application/vnd.in-toto+json"
        assert payload == claims.statement(place, SUBJECT.digest, claim)
    assert len(sigstore.rekor.leaves) == len(CLAIMS), "each claim is in the log"
    assert len(sigstore.issued) == 1, "one certificate signs all claims of a command"
    found = claims.check(place, SUBJECT.digest, trusted())
    assert [str(one) for one in found] == [f"{one.kind}: signed by {WORKFLOW} ({GITHUB})" for one in CLAIMS]


@pytest.mark.needs("openssl")
def test_a_claim_has_a_timestamp_where_the_instance_has_a_timestamp_authority(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "tsa"
    folder.mkdir()
    with Sigstore(folder) as fake:
        use(fake, tmp_path / "trust.json", monkeypatch)
        data = IdentitySigner(Context()).seal(STATEMENT)
        assert trusted().open(data) == Opened(STATEMENT)
    material = json.loads(data)["verificationMaterial"]
    assert len(material["timestampVerificationData"]["rfc3161Timestamps"]) == 1
    del material["tlogEntries"][0]["inclusionPromise"], material["tlogEntries"][0]["integratedTime"]
    document = json.dumps(json.loads(data) | {"verificationMaterial": material}).encode()
    assert trusted().open(document) == Opened(STATEMENT), "the timestamp alone says when it was signed"


@pytest.mark.needs("openssl")
def test_a_log_of_version_2_proves_a_claim_with_a_timestamp(
    tmp_path: Path, place: Repository, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "tsa"
    folder.mkdir()
    with Sigstore(folder, Rekor2()) as fake:
        use(fake, tmp_path / "trust.json", monkeypatch)
        claims.attach(place, SUBJECT, IdentitySigner(Context()), CLAIMS)
        found = claims.check(place, SUBJECT.digest, trusted())
        assert [(one.kind, one.problem) for one in found] == [(one.kind, "") for one in CLAIMS]
        document = json.loads(IdentitySigner(Context()).seal(STATEMENT))
        other = json.loads(IdentitySigner(Context()).seal(STATEMENT.replace(b"1.6", b"1.7")))
        entry(document)["canonicalizedBody"] = entry(other)["canonicalizedBody"]
        assert "invalid log entry" in trusted().open(json.dumps(document).encode()).problem
        document["verificationMaterial"]["timestampVerificationData"] = {"rfc3161Timestamps": []}
        assert "must contain an inclusion promise or signed" in trusted().open(json.dumps(document).encode()).problem


def test_a_claim_is_that_of_one_identity_of_one_issuer(sigstore: Sigstore) -> None:
    data = IdentitySigner(Context()).seal(STATEMENT)
    assert trusted().open(data) == Opened(STATEMENT)
    for name, issuer in ((WORKFLOW.replace("main", "other"), GITHUB), (WORKFLOW, GOOGLE)):
        opened = trusted(name, issuer).open(data)
        assert opened == Opened(STATEMENT, f"signed by {WORKFLOW} ({GITHUB})", foreign=True)


def test_a_person_is_an_identity_too(sigstore: Sigstore, monkeypatch: pytest.MonkeyPatch) -> None:
    token = sigstore.token(GOOGLE, sub="1234", email="ada@example.com")
    monkeypatch.setenv("SIGSTORE_ID_TOKEN", token)
    signer = IdentitySigner(Context())
    assert signer.trust.how == f"by ada@example.com ({GOOGLE})"
    assert trusted("ada@example.com", GOOGLE).open(signer.seal(STATEMENT)) == Opened(STATEMENT)


def test_a_claim_of_another_instance_is_not_valid(
    sigstore: Sigstore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = IdentitySigner(Context()).seal(STATEMENT)
    with Sigstore() as other:
        use(other, tmp_path / "other.json", monkeypatch)
        opened = trusted().open(data)
    assert opened.problem.startswith("its signature is not valid: ") and not opened.foreign


def changed_payload(document: dict[str, Any]) -> None:
    statement = json.loads(base64.b64decode(document["dsseEnvelope"]["payload"]))
    statement["predicate"]["more"] = 1
    document["dsseEnvelope"]["payload"] = base64.b64encode(json.dumps(statement).encode()).decode()


def entry(document: dict[str, Any]) -> Any:
    return document["verificationMaterial"]["tlogEntries"][0]


CHANGES: dict[str, tuple[Callable[[dict[str, Any]], object], str]] = {
    "payload": (changed_payload, "DSSE: invalid signature"),
    "time of the entry": (
        lambda one: entry(one).update(integratedTime=str(int(entry(one)["integratedTime"]) + 1)),
        "invalid inclusion promise",
    ),
    "time after the certificate": (
        lambda one: entry(one).update(integratedTime=str(int(entry(one)["integratedTime"]) + 3600)),
        "failed to build timestamp certificate chain",
    ),
    "root of the tree": (
        lambda one: entry(one)["inclusionProof"].update(rootHash=base64.b64encode(b"0" * 32).decode()),
        "invalid root hash",
    ),
    "no promise": (
        lambda one: entry(one).pop("inclusionPromise"),
        "must contain an inclusion promise or signed timestamp",
    ),
    "no entry": (lambda one: one["verificationMaterial"].update(tlogEntries=[]), "exactly one log entry"),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_change_of_a_claim_or_of_its_proofs_is_one_line(change: str, sigstore: Sigstore) -> None:
    document = json.loads(IdentitySigner(Context()).seal(STATEMENT))
    function, words = CHANGES[change]
    function(document)
    opened = trusted().open(json.dumps(document).encode())
    assert words in opened.problem and "\n" not in opened.problem and not opened.foreign


def test_an_entry_about_another_claim_is_no_proof(sigstore: Sigstore) -> None:
    signer = IdentitySigner(Context())
    document, other = json.loads(signer.seal(STATEMENT)), json.loads(signer.seal(STATEMENT.replace(b"1.6", b"1.7")))
    document["verificationMaterial"] = other["verificationMaterial"]
    assert "log entry payload hash does not match" in trusted().open(json.dumps(document).encode()).problem


def test_no_change_of_one_byte_gives_another_statement(sigstore: Sigstore) -> None:
    data, trust = IdentitySigner(Context()).seal(STATEMENT), trusted()
    assert trust.open(data) == Opened(STATEMENT)
    accepted = {}
    for position in range(len(data)):
        other = bytearray(data)
        other[position] ^= 1
        opened = trust.open(bytes(other))
        if not opened.problem:
            accepted[position] = opened
    # Fields that nothing depends on, and bits that base64 ignores: some signatures end with a character that has such.
    assert set(accepted.values()) <= {Opened(STATEMENT)}
    signature = json.loads(data)["dsseEnvelope"]["signatures"][0]["sig"].rstrip("=").encode()
    last = data.index(signature) + len(signature) - 1
    assert all(position < data.index(b"dsseEnvelope") or position == last for position in accepted)


def test_proofs_of_the_fake_are_those_of_rfc_6962() -> None:
    """The tree of seven leaves and its paths in https://www.rfc-editor.org/rfc/rfc6962#section-2.1.3"""
    leaves = [bytes([index]) for index in range(7)]
    _, b, c, _, _, f, j = (root_hash([one]) for one in leaves)
    g, h, i = root_hash(leaves[0:2]), root_hash(leaves[2:4]), root_hash(leaves[4:6])
    k, right = root_hash(leaves[0:4]), root_hash(leaves[4:7])
    assert inclusion_path(0, leaves) == [b, h, right]
    assert inclusion_path(3, leaves) == [c, g, right]
    assert inclusion_path(4, leaves) == [f, j, k]
    assert inclusion_path(6, leaves) == [i, k]


# --- keys and identities at one image ------------------------------------------------------------------------------


def test_a_key_and_an_identity_do_not_harm_each_other(sigstore: Sigstore, place: Repository) -> None:
    key = KeySigner(ec.generate_private_key(ec.SECP256R1()))
    claims.attach(place, SUBJECT, key, [CLAIMS[1]])
    claims.attach(place, SUBJECT, IdentitySigner(Context()), [CLAIMS[1]])
    by_key, by_identity = (claims.check(place, SUBJECT.digest, one) for one in (key.trust, trusted()))
    assert [(one.problem, one.foreign) for one in by_key] == [
        ("", False),
        ("signed by an identity, not with a key", True),
    ]
    assert [(one.problem, one.foreign) for one in by_identity] == [
        ("signed with a key, not by an identity", True),
        ("", False),
    ]


def test_a_claim_is_attached_once_and_again_by_another_identity(
    sigstore: Sigstore, place: Repository, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert claims.attach(place, SUBJECT, IdentitySigner(Context()), CLAIMS[:2]) == ["signature", "sbom"]
    assert claims.attach(place, SUBJECT, IdentitySigner(Context()), CLAIMS[:3]) == ["provenance"]
    monkeypatch.setenv("SIGSTORE_ID_TOKEN", sigstore.token(GOOGLE, sub="1234", email="ada@example.com"))
    assert claims.attach(place, SUBJECT, IdentitySigner(Context()), CLAIMS[:1]) == ["signature"]


def test_the_claim_of_an_identity_that_it_signed_is_its_signature(
    sigstore: Sigstore, registry: Registry, place: Repository
) -> None:
    image = put_image(registry)
    signer = IdentitySigner(Context())
    with pytest.raises(StepFailed, match=f"has no signature by {WORKFLOW}"):
        claims.signatures(place, image.digest, signer.trust)
    claims.attach(place, image, signer, [predicates.signature()])
    assert claims.signatures(place, image.digest, signer.trust) == 1


# --- who this process is -------------------------------------------------------------------------------------------


def test_the_identity_is_that_of_the_job_of_github_actions(sigstore: Sigstore, monkeypatch: pytest.MonkeyPatch) -> None:
    """https://docs.github.com/actions/reference/security/oidc#methods-for-requesting-the-oidc-token"""
    asked: list[tuple[str, str | None]] = []

    class Tokens(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            asked.append((self.path, self.headers["Authorization"]))
            body = json.dumps({"value": sigstore.token()}).encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

    monkeypatch.delenv("SIGSTORE_ID_TOKEN")
    monkeypatch.setenv("GITHUB_ACTIONS", "true")
    monkeypatch.setenv("ACTIONS_ID_TOKEN_REQUEST_TOKEN", "secret")
    with http.server.HTTPServer(("127.0.0.1", 0), Tokens) as server:
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        monkeypatch.setenv("ACTIONS_ID_TOKEN_REQUEST_URL", f"http://127.0.0.1:{server.server_port}/token")
        assert IdentitySigner(Context()).trust.identity == Identity(WORKFLOW, GITHUB)
        server.shutdown()
    assert asked == [("/token?audience=sigstore", "bearer secret")]


def test_a_job_without_the_permission_is_one_line(sigstore: Sigstore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SIGSTORE_ID_TOKEN")
    monkeypatch.setenv("GITHUB_ACTIONS", "true")
    monkeypatch.delenv("ACTIONS_ID_TOKEN_REQUEST_TOKEN", raising=False)
    with pytest.raises(UserError, match="missing or insufficient OIDC token permissions") as refused:
        IdentitySigner(Context())
    assert "\n" not in str(refused.value) and "id-token: write" in str(refused.value)


def test_without_an_identity_the_line_says_how_to_have_one_and_no_browser_is_opened(
    sigstore: Sigstore, trainyard: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("SIGSTORE_ID_TOKEN")
    monkeypatch.setattr("webbrowser.open", pytest.fail)
    for name in ("push", "sign"):
        status, out, err = trainyard(name, "tf-cpu", REGISTRY="localhost:1/a", KEYLESS="1")
        assert (status, out) == (2, "") and err.count("\n") == 1
        assert "finds no identity here" in err and "'id-token: write'" in err and "SIGSTORE_ID_TOKEN" in err


@pytest.mark.parametrize(
    ("token", "words"),
    [
        (lambda _: "no token", "SIGSTORE_ID_TOKEN cannot be used: Identity token is malformed"),
        (lambda one: one.token(lifetime=-60), "Signature has expired"),
        (lambda one: one.token(aud="other"), "Audience doesn't match"),
    ],
    ids=["no token", "expired", "for another audience"],
)
def test_a_token_that_is_not_valid_is_one_line(
    token: Callable[[Sigstore], str], words: str, sigstore: Sigstore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SIGSTORE_ID_TOKEN", token(sigstore))
    with pytest.raises(UserError, match=words) as refused:
        IdentitySigner(Context())
    assert "\n" not in str(refused.value)


def test_a_certificate_that_expires_is_renewed_before_the_next_claim(sigstore: Sigstore) -> None:
    signer = IdentitySigner(Context())
    signer.seal(STATEMENT)
    assert len(sigstore.issued) == 1
    sigstore.lifetime = datetime.timedelta(seconds=30)
    short = IdentitySigner(Context())
    sigstore.lifetime = datetime.timedelta(minutes=10)
    assert short.trust.open(short.seal(STATEMENT)) == Opened(STATEMENT)
    assert len(sigstore.issued) == 3


# --- services that refuse ------------------------------------------------------------------------------------------


def test_a_certificate_that_is_refused_is_one_line(sigstore: Sigstore) -> None:
    sigstore.issuers = [GOOGLE]
    with pytest.raises(StepFailed, match=r"no certificate for repo:ml/images:ref:refs/heads/main .*401") as failed:
        IdentitySigner(Context())
    assert "\n" not in str(failed.value)


def test_a_certificate_that_is_in_no_log_is_refused(sigstore: Sigstore) -> None:
    sigstore.ct_key = ec.generate_private_key(ec.SECP256R1())
    with pytest.raises(StepFailed, match=r"no certificate for .*SCT verify failed"):
        IdentitySigner(Context())


def test_a_log_that_is_out_of_reach_is_one_line(sigstore: Sigstore) -> None:
    signer = IdentitySigner(Context())
    sigstore.__exit__()
    with pytest.raises(StepFailed, match="a claim cannot be signed by ") as failed:
        signer.seal(STATEMENT)
    assert "\n" not in str(failed.value)


# --- the trust configuration ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (None, "No such file or directory"),
        ("{}", "not a trust configuration that sigstore can use"),
        ("no JSON", "not a trust configuration that sigstore can use"),
    ],
)
def test_a_file_that_is_no_trust_configuration_is_one_line(
    text: str | None, words: str, tmp_path: Path, trainyard: Command
) -> None:
    path = tmp_path / "trust.json"
    if text is not None:
        path.write_text(text)
    status, _, err = trainyard("sign", "tf-cpu", REGISTRY="localhost:1/a", TRUST_CONFIG=str(path), **TRUSTED)
    assert status == 2 and f"'--trust-config {path}': {words}" in err and err.count("\n") == 1


def test_a_trust_configuration_without_services_to_sign_with_is_one_line(
    sigstore: Sigstore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    document = sigstore.trust_config()
    document["signingConfig"]["caUrls"] = []
    (tmp_path / "verify-only.json").write_text(json.dumps(document))
    monkeypatch.setenv("TRAINYARD_TRUST_CONFIG", str(tmp_path / "verify-only.json"))
    with pytest.raises(UserError, match="No valid Fulcio CA found in signing config"):
        IdentitySigner(Context())


def test_the_public_instance_is_the_default(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Offline, the library reads what it brings along or has fetched before."""
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("TRAINYARD_OFFLINE", "1")
    config = identities.trust_config(Context())
    assert config.signing_config.get_fulcio().url == "https://fulcio.sigstore.dev"


def test_a_public_instance_that_is_out_of_reach_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def refresh(*, offline: bool) -> ClientTrustConfig:
        raise TUFError("Failed to refresh TUF metadata") from OSError("connection refused")

    monkeypatch.setattr(identities.ClientTrustConfig, "production", refresh)
    with pytest.raises(
        StepFailed, match=r"cannot be fetched: Failed to refresh TUF metadata: .*'--trust-config <file>'"
    ):
        identities.trust_config(Context())


# --- the commands --------------------------------------------------------------------------------------------------


def test_sign_signs_and_checks(sigstore: Sigstore, registry: Registry, place: Repository, trainyard: Command) -> None:
    image = put_image(registry)
    reference, by = f"{place.name}@{image.digest}", f"by {WORKFLOW} ({GITHUB})"
    status, out, err = trainyard("sign", "--json", IMAGE=reference, KEYLESS="1")
    assert (status, err) == (0, f"{reference} is signed {by}\n")
    assert json.loads(out) == {"image": reference, "attached": ["signature"]}
    assert trainyard("sign", IMAGE=reference, KEYLESS="1")[2] == f"{reference} is already signed {by}\n"
    status, out, err = trainyard("sign", "--json", IMAGE=reference, **TRUSTED)
    assert (status, err.splitlines()) == (0, [f"  signature: signed {by}", f"{reference}: 1 valid signature"])
    other = TRUSTED | {"CERTIFICATE_IDENTITY": "someone@example.com"}
    status, _, err = trainyard("sign", IMAGE=reference, **other)
    assert status == 1
    assert err.splitlines() == [
        f"  signature: signed {by}",
        f"sign: {reference} has no signature by someone@example.com ({GITHUB})",
    ]


def test_a_changed_claim_fails_sign_in_one_line(
    sigstore: Sigstore, registry: Registry, place: Repository, trainyard: Command
) -> None:
    image, signer = put_image(registry), IdentitySigner(Context())
    claims.attach(place, image, signer, [predicates.signature()])
    document = json.loads(signer.seal(claims.statement(place, image.digest, CLAIMS[1])))
    changed_payload(document)
    referrers.attach(place, image, [Artifact(json.dumps(document).encode(), statements.BUNDLE)])
    status, _, err = trainyard("sign", IMAGE=f"{place.name}@{image.digest}", **TRUSTED)
    problem = "sbom: its signature is not valid: DSSE: invalid signature"
    assert (status, err.splitlines()[-1]) == (1, f"sign: not a valid claim: {problem}")


def test_push_attaches_claims_that_the_identity_signs(
    sigstore: Sigstore, registry: Registry, fake_engine: FakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    image, source = pushed_image(registry, fake_engine, monkeypatch), sources.of(model.load("tf-cpu"))
    address = f"{registry.host}/ml"
    attached = publish.attach_claims(source, address, image.digest, IdentitySigner(Context()))
    assert attached == ["signature", "sbom", "verify", "smoke"] and registry.tags == {}
    assert publish.attach_claims(source, address, image.digest, IdentitySigner(Context())) == []


def test_promote_takes_the_claims_of_the_identity_and_signs_a_summary(
    sigstore: Sigstore, registry: Registry, place: Repository, trainyard: Command
) -> None:
    image = image_to_promote(registry)
    demanded = {"REGISTRY": place.name.rpartition("/")[0], "IMAGE": image.digest, "REQUIRE_SIGNED": "1"}
    status, _, err = trainyard("promote", "tf-cpu", **demanded, **TRUSTED)
    assert (status, registry.tags) == (1, {})
    assert f"has no claim 'sbom' that is signed by {WORKFLOW} ({GITHUB})" in err
    claims.attach(place, image, IdentitySigner(Context()), CLAIMS)
    other = TRUSTED | {"CERTIFICATE_OIDC_ISSUER": GOOGLE}
    status, _, err = trainyard("promote", "tf-cpu", **demanded, **other)
    assert (status, registry.tags) == (1, {})
    assert f"is signed by {WORKFLOW} ({GOOGLE}): signed by {WORKFLOW} ({GITHUB})" in err
    assert trainyard("promote", "tf-cpu", KEYLESS="1", **demanded, **TRUSTED)[0] == 0
    assert registry.tags["tf-cpu"] == image.digest
    assert claims.require(place, image.digest, trusted(), ["summary"])


def test_promote_by_an_identity_trusts_that_identity(
    sigstore: Sigstore, registry: Registry, place: Repository, trainyard: Command
) -> None:
    image = image_to_promote(registry)
    claims.attach(place, image, IdentitySigner(Context()), CLAIMS)
    variables = {"REGISTRY": place.name.rpartition("/")[0], "IMAGE": image.digest, "KEYLESS": "1"}
    status, _, err = trainyard("promote", "tf-cpu", **variables)
    assert status == 2 and "--keyless requires --require-signed" in err
    assert trainyard("promote", "tf-cpu", REQUIRE_SIGNED="1", **variables)[0] == 0


def test_check_job_takes_an_image_that_the_identity_signed(
    sigstore: Sigstore,
    registry: Registry,
    place: Repository,
    tmp_path: Path,
    trainyard: Command,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    image = put_image(registry)
    reference = f"{place.name}@{image.digest}"
    job = tmp_path / "job.yaml"
    job.write_text(
        "apiVersion: batch/v1\nkind: Job\nmetadata: {name: train}\nspec:\n  template:\n    spec:\n"
        f"      restartPolicy: Never\n      containers: [{{name: train, image: {reference}}}]\n"
    )
    demanded = {"REQUIRE_SIGNED": "1", **TRUSTED}
    status, out, _ = trainyard("check-job", "--json", str(job), **demanded)
    (finding,) = json.loads(out)["files"][0]["findings"]
    why = f"{reference} has no signature by {WORKFLOW} ({GITHUB})"
    assert (status, finding["what"]) == (1, f"{reference} is not signed as demanded: {why}")
    claims.attach(place, image, IdentitySigner(Context()), [predicates.signature()])
    assert trainyard("check-job", str(job), **demanded)[0] == 0


@pytest.mark.parametrize(
    ("command", "variables", "words"),
    [
        ("sign", {"KEYLESS": "1", "COSIGN_KEY": "signing.pem"}, "'--keyless' and COSIGN_KEY=signing.pem: images are"),
        ("push", {"KEYLESS": "1", "COSIGN_KEY": "signing.pem"}, "'--keyless' and COSIGN_KEY=signing.pem: images are"),
        ("sign", {"COSIGN_PUB": "signing.pub", **TRUSTED}, "COSIGN_PUB=signing.pub and '--certificate-identity': "),
        (
            "sign",
            {"CERTIFICATE_IDENTITY": "a"},
            "'--certificate-identity' and '--certificate-oidc-issuer' must be given",
        ),
        ("promote", {"CERTIFICATE_OIDC_ISSUER": "a", "REQUIRE_SIGNED": "1"}, "must be given together"),
        ("push", {"KEYLESS": "1", "CODE_ONLY": "1"}, "--keyless and --code-only exclude each other"),
    ],
)
def test_who_signs_and_whom_to_trust_is_said_once(
    command: str, variables: dict[str, str], words: str, trainyard: Command
) -> None:
    status, out, err = trainyard(command, "tf-cpu", REGISTRY="localhost:1/a", **variables)
    assert (status, out) == (2, "") and words in err and err.count("\n") == 1


def test_what_cannot_be_read_fails_before_a_certificate_is_issued(
    sigstore: Sigstore, tmp_path: Path, trainyard: Command
) -> None:
    variables = {"REGISTRY": "localhost:1/a", "KEYLESS": "1"}
    assert trainyard("promote", "tf-cpu", REQUIRE_SIGNED="1", CLAIMS="smok", **variables)[0] == 2
    assert sigstore.issued == []


@pytest.mark.parametrize("arguments", [["--help"], ["sign", "--help"], ["sign", "tf-cpu", "--key=/nonexistent"]])
def test_the_library_of_sigstore_is_imported_only_where_it_is_needed(arguments: list[str]) -> None:
    program = (
        "import sys\nfrom trainyard import cli\ncli.run(sys.argv[1:])\n"
        "assert 'sigstore' not in sys.modules\nprint('not imported')"
    )
    command = [sys.executable, "-c", program, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout.endswith("not imported\n")
