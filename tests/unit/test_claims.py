"""Signed claims about an image verify with libraries that are not ours, and do not when a byte changes."""

from __future__ import annotations

import base64
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from cryptography.hazmat.primitives.asymmetric import ec, ed25519, rsa
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat, PublicFormat
from google.protobuf import json_format
from in_toto_attestation.v1 import statement as intoto
from in_toto_attestation.v1 import statement_pb2
from packageurl import PackageURL
from securesystemslib.exceptions import VerificationError
from tests.claims import BUILDKIT, CLAIMS, image_to_promote, pushed_image, put_image, verified
from tests.fakes.engine import FakeEngine
from tests.fakes.registry import Registry, sha256
from tests.published_images import artifacts_of

from trainyard.common.errors import StepFailed
from trainyard.common.settings import state_folder
from trainyard.image import provenance
from trainyard.oci import image_index, referrers, statements
from trainyard.oci.referrers import Artifact
from trainyard.oci.registry import Manifest, Repository
from trainyard.oci.statements import Opened
from trainyard.release import claims, predicates, publish, sources
from trainyard.release.keys import KeySigner, PrivateKey
from trainyard.release.predicates import Claim
from trainyard.spec import model, state
from trainyard.spec.architectures import AMD64, ARM64

SUBJECT = Manifest.of({"schemaVersion": 2}, "application/vnd.oci.image.manifest.v1+json")
DIGEST = SUBJECT.digest
KEYS: dict[str, Callable[[], PrivateKey]] = {
    "p256": lambda: ec.generate_private_key(ec.SECP256R1()),
    "p384": lambda: ec.generate_private_key(ec.SECP384R1()),
    "p521": lambda: ec.generate_private_key(ec.SECP521R1()),
    "rsa": lambda: rsa.generate_private_key(65537, 2048),
    "ed25519": ed25519.Ed25519PrivateKey.generate,
}


@pytest.fixture
def registry(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Registry]:
    monkeypatch.setenv("TRAINYARD_BUILD", str(tmp_path / "state"))
    with Registry() as fake:
        yield fake


@pytest.fixture
def place(registry: Registry) -> Repository:
    return Repository(f"{registry.host}/ml/trainyard")


@pytest.fixture
def signer() -> KeySigner:
    return KeySigner(KEYS["p256"]())


def bundles(place: Repository) -> dict[str, bytes]:
    """Digest of an artifact -> its bundle."""
    return {name: one.data for name, one in artifacts_of(place, DIGEST, [statements.BUNDLE]).items()}


def changed(data: bytes, change: Callable[[dict[str, Any]], None]) -> bytes:
    """A bundle whose statement was changed; its signature is that of the statement before."""
    document = json.loads(data)
    statement = json.loads(base64.b64decode(document["dsseEnvelope"]["payload"]))
    change(statement)
    document["dsseEnvelope"]["payload"] = base64.b64encode(json.dumps(statement).encode()).decode()
    return json.dumps(document).encode()


# --- with libraries that are not ours ------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KEYS)
def test_every_claim_verifies_with_other_libraries(kind: str, place: Repository) -> None:
    signer = KeySigner(KEYS[kind]())
    assert claims.attach(place, SUBJECT, signer, CLAIMS) == [one.kind for one in CLAIMS]
    statements = [verified(data, signer.key.public_key()) for data in bundles(place).values()]
    assert statements == [
        {
            "_type": "https://in-toto.io/Statement/v1",
            "subject": [{"name": place.name, "digest": {"sha256": DIGEST[7:]}}],
            "predicateType": predicates.TYPES[one.kind],
            "predicate": one.predicate,
        }
        for one in CLAIMS
    ]
    found = claims.check(place, DIGEST, signer.trust)
    assert [(one.kind, one.problem) for one in found] == [(one.kind, "") for one in CLAIMS]


def flip_signature(data: bytes) -> bytes:
    document = json.loads(data)
    (signature,) = document["dsseEnvelope"]["signatures"]
    raw = bytearray(base64.b64decode(signature["sig"]))
    raw[-1] ^= 1
    signature["sig"] = base64.b64encode(raw).decode()
    return json.dumps(document).encode()


CHANGES: dict[str, Callable[[bytes], bytes]] = {
    "signature": flip_signature,
    "subject": lambda data: changed(data, lambda one: one["subject"][0]["digest"].update(sha256="00" * 32)),
    "predicate": lambda data: changed(data, lambda one: one["predicate"].update(more=1)),
    "predicate type": lambda data: changed(data, lambda one: one.update(predicateType="https://example.com")),
    "payload type": lambda data: data.replace(b"application/vnd.in-toto+json", b"application/vnd.in-toto+jsom"),
}


@pytest.mark.parametrize("claim", CLAIMS, ids=lambda one: one.kind)
@pytest.mark.parametrize("change", CHANGES)
def test_a_change_is_refused_by_other_libraries_and_by_us_in_one_line(
    change: str, claim: Claim, place: Repository, signer: KeySigner
) -> None:
    data = CHANGES[change](signer.seal(claims.statement(place, DIGEST, claim)))
    with pytest.raises(VerificationError, match="Accepted signatures do not match threshold"):
        verified(data, signer.key.public_key())
    referrers.attach(place, SUBJECT, [Artifact(data, statements.BUNDLE)])
    (found,) = claims.check(place, DIGEST, signer.trust)
    assert not found.valid and not found.foreign and "\n" not in str(found)
    with pytest.raises(StepFailed, match=f"has no claim '{claim.kind}' that is signed with this key") as refused:
        claims.require(place, DIGEST, signer.trust, [claim.kind])
    assert "\n" not in str(refused.value)


def test_no_change_of_one_byte_gives_another_statement(signer: KeySigner) -> None:
    payload = b'{"_type": "https://in-toto.io/Statement/v1"}'
    data = signer.seal(payload)
    assert signer.trust.open(data) == Opened(payload)
    start = data.index(b"dsseEnvelope")
    for position in range(start, len(data)):
        other = bytearray(data)
        other[position] ^= 1
        opened = signer.trust.open(bytes(other))
        assert opened.problem or opened.payload == payload, f"{bytes(other[start:])!r} is taken"


# --- at a registry -------------------------------------------------------------------------------------------------


def test_claims_are_stored_where_cosign_looks_for_them(
    registry: Registry, place: Repository, signer: KeySigner
) -> None:
    """https://github.com/sigstore/cosign/blob/main/specs/BUNDLE_SPEC.md"""
    claims.attach(place, SUBJECT, signer, [CLAIMS[1]])
    (one,) = registry.referrers(DIGEST)
    assert one["artifactType"] == "application/vnd.dev.sigstore.bundle.v0.3+json"
    created = one["annotations"].pop("org.opencontainers.image.created")
    assert created.endswith("Z")
    assert one["annotations"] == {
        "dev.sigstore.bundle.content": "dsse-envelope",
        "dev.sigstore.bundle.predicateType": "https://cyclonedx.org/bom",
    }
    manifest = json.loads(registry.manifests[one["digest"]][1])
    data = registry.blobs[manifest["layers"][0]["digest"]]
    document = json.loads(data)
    assert document["mediaType"] == manifest["layers"][0]["mediaType"] == manifest["artifactType"]
    hint = document["verificationMaterial"]["publicKey"]["hint"]
    assert document["dsseEnvelope"]["signatures"][0]["keyid"] == hint


def test_a_claim_is_attached_once_and_a_new_document_in_addition(place: Repository, signer: KeySigner) -> None:
    newer = predicates.sbom('{"bomFormat": "CycloneDX", "specVersion": "1.6", "version": 2}')
    claims.attach(place, SUBJECT, signer, CLAIMS)
    assert claims.attach(place, SUBJECT, signer, [*CLAIMS, newer]) == ["sbom"]
    assert claims.attach(place, SUBJECT, signer, [*CLAIMS, newer]) == []
    assert claims.attach(place, SUBJECT, KeySigner(KEYS["ed25519"]()), [newer]) == ["sbom"], "another claim"


def test_a_claim_about_another_image_is_not_one_about_this_image(place: Repository, signer: KeySigner) -> None:
    theirs = claims.statement(place, sha256(b"another image"), CLAIMS[1])
    referrers.attach(place, SUBJECT, [Artifact(signer.seal(theirs), statements.BUNDLE)])
    (found,) = claims.check(place, DIGEST, signer.trust)
    assert str(found) == f"sbom: about {sha256(b'another image')[:19]}, not about this image"
    with pytest.raises(StepFailed, match=r"about sha256:.*, not about this image"):
        claims.require(place, DIGEST, signer.trust, ["sbom"])


def test_claims_of_another_key_do_not_count_and_do_not_harm(place: Repository, signer: KeySigner) -> None:
    other = KeySigner(KEYS["p256"]())
    claims.attach(place, SUBJECT, other, CLAIMS)
    found = claims.check(place, DIGEST, signer.trust)
    assert {(one.problem, one.foreign) for one in found} == {("signed with another key", True)}
    with pytest.raises(StepFailed, match="has no claim 'smoke' that is signed with this key: signed with another key"):
        claims.require(place, DIGEST, signer.trust, ["smoke"])
    claims.attach(place, SUBJECT, signer, CLAIMS)
    kinds = list(predicates.ABOUT_IMAGES)
    assert [one.kind for one in claims.require(place, DIGEST, signer.trust, kinds)] == kinds


def test_a_claim_that_a_test_failed_is_no_claim_that_it_passed(place: Repository, signer: KeySigner) -> None:
    passed = CLAIMS[4]
    failed = Claim("smoke", {**passed.predicate, "result": "FAILED"})
    claims.attach(place, SUBJECT, signer, [passed, failed])
    with pytest.raises(StepFailed, match="the claim 'smoke' says that the test failed"):
        claims.require(place, DIGEST, signer.trust, ["smoke"])


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"no JSON", "the bundle is not a JSON document"),
        (
            b'{"mediaType": "x", "messageSignature": {}}',
            "the bundle is malformed: verificationMaterial: Field required",
        ),
        (b"[]", "the bundle is malformed"),
    ],
)
def test_what_is_no_bundle_is_one_line(data: bytes, words: str, place: Repository, signer: KeySigner) -> None:
    referrers.attach(place, SUBJECT, [Artifact(data, statements.BUNDLE)])
    (found,) = claims.check(place, DIGEST, signer.trust)
    assert words in str(found) and "\n" not in str(found)


def test_a_signed_text_that_is_no_statement_is_one_line(place: Repository, signer: KeySigner) -> None:
    data = [signer.seal(b"no statement"), signer.seal(b'{"_type": "x", "subject": [], "predicateType": "y"}')]
    referrers.attach(place, SUBJECT, [Artifact(one, statements.BUNDLE) for one in data])
    found = claims.check(place, DIGEST, signer.trust)
    assert [one.problem.partition(" (")[0] for one in found] == [
        "the statement is not a JSON document",
        "a statement of type x, not https://in-toto.io/Statement/v1",
    ]


# --- what claims say -----------------------------------------------------------------------------------------------


def test_provenance_of_an_older_buildkit_becomes_that_of_slsa_1() -> None:
    """As BuildKit converts it: https://github.com/moby/buildkit/blob/master/solver/llbsolver/provenance/types/types.go"""
    old = BUILDKIT["predicate"]
    assert predicates.provenance(BUILDKIT).predicate == {
        "buildDefinition": {
            "buildType": "https://github.com/moby/buildkit/blob/master/docs/attestations/slsa-definitions.md",
            "externalParameters": {
                "configSource": {"path": "Dockerfile"},
                "request": old["invocation"]["parameters"],
            },
            "internalParameters": {"builderPlatform": "linux/amd64", "buildConfig": old["buildConfig"]},
            "resolvedDependencies": old["materials"],
        },
        "runDetails": {
            "builder": {"id": predicates.BUILDER},
            "metadata": {
                "invocationId": "r68q",
                "startedOn": "2026-11-23T04:47:58.216820274Z",
                "finishedOn": "2026-11-23T04:47:58.384100362Z",
                "buildkit_metadata": {"vcs": {"revision": "2476aa0"}},
                "buildkit_reproducible": False,
                "buildkit_completeness": {"request": True, "resolvedDependencies": False},
            },
        },
    }


def test_provenance_of_slsa_1_stays_as_it_is() -> None:
    made = predicates.provenance(BUILDKIT).predicate
    details = made["runDetails"] | {"builder": {"id": "https://example.com/theirs"}}
    newer = {"predicateType": "https://slsa.dev/provenance/v1", "predicate": made | {"runDetails": details}}
    assert predicates.provenance(newer).predicate == newer["predicate"]


def record_provenance(digest: str) -> None:
    """Keep what BuildKit writes, as a build does."""
    subject = [{"name": "pkg:docker/trainyard", "digest": {"sha256": digest[7:]}}]
    state.record(
        state_folder() / "tf-cpu", "provenance", digest, {"passed": True, "statement": BUILDKIT | {"subject": subject}}
    )


def test_the_statement_of_the_provenance_is_found_among_the_documents_of_the_second_build() -> None:
    layer = json.dumps(BUILDKIT).encode()
    index = json.dumps({"mediaType": image_index.INDEX, "manifests": []}).encode()
    other = json.dumps(BUILDKIT | {"predicateType": "https://spdx.dev/Document"}).encode()
    assert provenance.statement_about(f"sha256:{'0' * 64}", [index, b"no JSON", other, layer]) == BUILDKIT
    assert provenance.statement_about(DIGEST, [index, layer]) is None, "the second build made another image"


def test_a_rule_with_a_note_is_a_warning() -> None:
    note = {"rule": "sizes", "what": "too big"}
    found = predicates.verify({"digest": DIGEST, "passed": True, "rules": ["labels", "sizes"], "notes": [note]})
    assert (found.predicate["result"], found.predicate["passedTests"]) == ("WARNED", ["labels"])
    assert found.predicate["warnedTests"] == ["sizes"]


@pytest.mark.parametrize(
    ("result", "tests"),
    [
        ({"level": "started", "writes_output": False, "seconds_to_stop": 0.0}, ["started", "stop"]),
        ({"level": "ran", "writes_output": True}, ["output", "ran", "started"]),
        ({"level": "environment", "accuracy": 98.9}, ["accuracy", "environment"]),
        (
            {"level": "trained", "accuracy": 98.9, "resumed_from": 43, "seconds_to_stop": 0.3},
            ["accuracy", "ran", "resume", "started", "stop", "trained"],
        ),
        (
            {"restricted": True, "killed_while_saving": True, "processes": 2, "worker_processes": 2},
            ["memory-limit", "restricted-container", "two-processes", "worker-processes"],
        ),
    ],
)
def test_the_claim_of_the_smoke_test_says_how_far_the_image_was_tested(result: Any, tests: list[str]) -> None:
    found = predicates.smoke({"digest": DIGEST, "passed": True, **result})
    assert (found.predicate["result"], found.predicate["passedTests"]) == ("PASSED", tests)


def test_test_results_of_others_keep_their_type() -> None:
    kind = predicates.kind_of(predicates.TYPES["smoke"], {"configuration": [{"name": "theirs"}]})
    assert kind == predicates.TYPES["smoke"]


# --- sign and push -------------------------------------------------------------------------------------------------

Command = Callable[..., tuple[int, str, str]]


@pytest.fixture
def files(signer: KeySigner, tmp_path: Path) -> dict[str, str]:
    """The variables that name the key's files."""
    private = signer.key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    public = signer.key.public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)
    (tmp_path / "signing.pem").write_bytes(private)
    (tmp_path / "signing.pub").write_bytes(public)
    return {"COSIGN_KEY": str(tmp_path / "signing.pem"), "COSIGN_PUB": str(tmp_path / "signing.pub")}


def test_sign_makes_a_claim_and_lists_what_there_is(
    registry: Registry, place: Repository, files: dict[str, str], signer: KeySigner, trainyard: Command
) -> None:
    image = put_image(registry)
    reference = f"{place.name}@{image.digest}"
    _, out, err = trainyard("sign", "--json", IMAGE=reference, COSIGN_KEY=files["COSIGN_KEY"])
    assert err == f"{reference} is signed with this key\n"
    assert json.loads(out) == {"image": reference, "attached": ["signature"]}
    claims.attach(place, image, KeySigner(KEYS["p256"]()), [CLAIMS[1]])
    status, out, err = trainyard("sign", "--json", IMAGE=reference, COSIGN_PUB=files["COSIGN_PUB"])
    assert (status, err.splitlines()) == (
        0,
        ["  signature: signed with this key", "  sbom: signed with another key", f"{reference}: 1 valid signature"],
    )
    made = [(one["platform"], one["kind"], one["valid"]) for one in json.loads(out)["claims"]]
    assert made == [(None, "signature", True), (None, "sbom", False)]
    again = trainyard("sign", IMAGE=reference, COSIGN_KEY=files["COSIGN_KEY"])
    assert again[2] == f"{reference} is already signed with this key\n"


def test_a_second_key_adds_a_signature_and_the_same_key_does_not(
    registry: Registry, place: Repository, signer: KeySigner
) -> None:
    image, other = put_image(registry), KeySigner(KEYS["ed25519"]())
    with pytest.raises(StepFailed, match="has no signature with this key"):
        claims.signatures(place, image.digest, signer.trust)
    for one in (other, signer, signer):
        claims.attach(place, image, one, [predicates.signature()])
    assert len(claims.check(place, image.digest, signer.trust)) == 2
    assert claims.signatures(place, image.digest, signer.trust) == 1
    assert claims.signatures(place, image.digest, other.trust) == 1


def test_a_claim_whose_envelope_does_not_repeat_the_name_of_the_key_is_valid(
    place: Repository, signer: KeySigner
) -> None:
    """As cosign writes it (https://github.com/sigstore/sigstore-go/blob/main/pkg/sign/content.go)."""
    document = json.loads(signer.seal(claims.statement(place, DIGEST, CLAIMS[1])))
    del document["dsseEnvelope"]["signatures"][0]["keyid"]
    referrers.attach(place, SUBJECT, [Artifact(json.dumps(document).encode(), statements.BUNDLE)])
    (found,) = claims.check(place, DIGEST, signer.trust)
    assert str(found) == "sbom: signed with this key"


def test_a_changed_claim_fails_sign_in_one_line(
    registry: Registry, place: Repository, files: dict[str, str], signer: KeySigner, trainyard: Command
) -> None:
    image = put_image(registry)
    claims.attach(place, image, signer, [predicates.signature()])
    data = CHANGES["predicate"](signer.seal(claims.statement(place, image.digest, CLAIMS[1])))
    referrers.attach(place, image, [Artifact(data, statements.BUNDLE)])
    status, out, err = trainyard("sign", IMAGE=f"{place.name}@{image.digest}", COSIGN_PUB=files["COSIGN_PUB"])
    assert (status, out) == (1, "")
    problem = "sbom: its signature does not match its content: one of them was changed"
    assert err.splitlines()[1:] == [f"  {problem}", f"sign: not a valid claim: {problem}"]


def test_of_an_image_index_the_claims_of_its_images_are_listed(
    registry: Registry, place: Repository, files: dict[str, str], signer: KeySigner, trainyard: Command
) -> None:
    images = {AMD64: put_image(registry, "amd64"), ARM64: put_image(registry, "arm64")}
    index = image_index.make(images, {})
    registry.put_manifest("both", index.media_type, index.body)
    claims.attach(place, index, signer, [predicates.signature()])
    claims.attach(place, images[ARM64], signer, [CLAIMS[1]])
    status, _, err = trainyard("sign", IMAGE=f"{place.name}:both", COSIGN_PUB=files["COSIGN_PUB"])
    assert status == 0
    assert err.splitlines()[:2] == ["  signature: signed with this key", "  linux/arm64 sbom: signed with this key"]


@pytest.fixture
def pushed(registry: Registry, fake_engine: FakeEngine, monkeypatch: pytest.MonkeyPatch) -> Manifest:
    return pushed_image(registry, fake_engine, monkeypatch)


def attach(registry: Registry, image: Manifest, signer: KeySigner | None) -> list[str]:
    return publish.attach_claims(sources.of(model.load("tf-cpu")), f"{registry.host}/ml", image.digest, signer)


def test_push_attaches_a_claim_of_every_kind(
    registry: Registry, place: Repository, signer: KeySigner, pushed: Manifest
) -> None:
    record_provenance(pushed.digest)
    attached = attach(registry, pushed, signer)
    kinds = ["signature", *predicates.ABOUT_IMAGES]
    assert attached == kinds
    artifacts = artifacts_of(place, pushed.digest, [statements.BUNDLE]).values()
    made = [verified(one.data, signer.key.public_key()) for one in artifacts]
    assert [one["predicateType"] for one in made] == [predicates.TYPES[one] for one in kinds]
    assert {one["subject"][0]["digest"]["sha256"] for one in made} == {pushed.digest[7:]}
    assert attach(registry, pushed, signer) == [], "a second push adds nothing"


@pytest.mark.parametrize("api", [True, False])
def test_without_a_key_push_attaches_plain_statements(
    api: bool, registry: Registry, place: Repository, signer: KeySigner, pushed: Manifest
) -> None:
    registry.referrers_api = api
    record_provenance(pushed.digest)
    assert attach(registry, pushed, None) == ["sbom", "provenance", "verify", "smoke"]
    assert attach(registry, pushed, None) == [], "a second push adds nothing"
    artifacts = artifacts_of(place, pushed.digest, [statements.PLAIN]).values()
    made = [statements.decode(one.data) for one in artifacts]
    assert [one["predicateType"] for one in made] == [predicates.TYPES[one] for one in predicates.ABOUT_IMAGES]
    assert [one.annotations for one in artifacts] == [
        {"in-toto.io/predicate-type": one["predicateType"]} for one in made
    ]
    assert {one["subject"][0]["digest"]["sha256"] for one in made} == {pushed.digest[7:]}
    for one in artifacts:
        intoto.Statement.copy_from_pb(json_format.Parse(one.data, statement_pb2.Statement())).validate()
    assert claims.passed(place, pushed.digest)
    assert {str(one) for one in claims.check(place, pushed.digest, signer.trust)} == {
        f"{kind}: not signed" for kind in predicates.ABOUT_IMAGES
    }
    with pytest.raises(StepFailed, match="has no claim 'sbom' that is signed with this key: not signed"):
        claims.require(place, pushed.digest, signer.trust, ["sbom"])
    assert attach(registry, pushed, signer) == ["signature", *predicates.ABOUT_IMAGES], "what is not signed is signed"
    assert attach(registry, pushed, None) == [], "what is signed need not be said again"


# --- promote -------------------------------------------------------------------------------------------------------


def test_an_image_has_passed_if_verify_and_smoke_say_so_about_it_and_nothing_says_that_it_failed(
    place: Repository, signer: KeySigner
) -> None:
    """Signed by anyone or not; as after Cloud Build, when the host that promotes has no results."""
    verify, smoke = CLAIMS[3:5]
    assert not claims.passed(place, DIGEST)
    about_another = claims.statement(place, sha256(b"another image"), verify)
    odd = [about_another, b"no statement"]
    made = [statements.artifact(one, statements.PLAIN, predicates.TYPES["verify"]) for one in odd]
    referrers.attach(place, SUBJECT, made)
    claims.attach(place, SUBJECT, signer, [smoke])
    assert not claims.passed(place, DIGEST)
    claims.attach(place, SUBJECT, None, [verify])
    assert claims.passed(place, DIGEST)
    claims.attach(place, SUBJECT, None, [Claim("verify", {**verify.predicate, "result": "FAILED"})])
    assert not claims.passed(place, DIGEST)


def test_only_claims_of_the_kinds_that_are_looked_for_are_read(
    registry: Registry, place: Repository, signer: KeySigner
) -> None:
    claims.attach(place, SUBJECT, signer, CLAIMS)
    registry.requests.clear()
    assert claims.signatures(place, DIGEST, signer.trust) == 1
    assert len(registry.requests) == 3, "the list, the manifest and the bundle"


ABOUT_IMAGE = CLAIMS[1:]


@pytest.fixture
def promoted(registry: Registry) -> Manifest:
    return image_to_promote(registry)


def promote(trainyard: Command, image: Manifest, place: Repository, **variables: str) -> tuple[int, str, str]:
    address = place.name.rpartition("/")[0]
    return trainyard("promote", "tf-cpu", "--json", IMAGE=image.digest, REGISTRY=address, **variables)


def test_promote_refuses_an_image_without_the_claims_that_are_demanded(
    registry: Registry,
    place: Repository,
    promoted: Manifest,
    files: dict[str, str],
    signer: KeySigner,
    trainyard: Command,
) -> None:
    demanded = {"REQUIRE_SIGNED": "1", "COSIGN_PUB": files["COSIGN_PUB"]}
    for missing, claim in zip(predicates.ABOUT_IMAGES, ABOUT_IMAGE, strict=True):
        status, out, err = promote(trainyard, promoted, place, **demanded)
        assert (status, out) == (1, "")
        line = f"promote: {place.name}@{promoted.digest} has no claim '{missing}' that is signed with this key\n"
        assert err == line and registry.tags == {}
        claims.attach(place, promoted, signer, [claim])
    status, out, _ = promote(trainyard, promoted, place, **demanded)
    assert status == 0 and json.loads(out)["claims"] == list(predicates.ABOUT_IMAGES)
    assert registry.tags["tf-cpu"] == promoted.digest


@pytest.mark.parametrize("change", CHANGES)
def test_promote_refuses_a_claim_that_was_changed(
    change: str,
    registry: Registry,
    place: Repository,
    promoted: Manifest,
    files: dict[str, str],
    signer: KeySigner,
    trainyard: Command,
) -> None:
    claims.attach(place, promoted, signer, [one for one in ABOUT_IMAGE if one.kind != "smoke"])
    data = CHANGES[change](signer.seal(claims.statement(place, promoted.digest, CLAIMS[4])))
    referrers.attach(place, promoted, [Artifact(data, statements.BUNDLE)])
    status, _, err = promote(trainyard, promoted, place, REQUIRE_SIGNED="1", COSIGN_PUB=files["COSIGN_PUB"])
    assert status == 1 and "has no claim 'smoke' that is signed with this key" in err and err.count("\n") == 1
    assert registry.tags == {}


def test_promote_demands_the_kinds_that_are_named(
    registry: Registry,
    place: Repository,
    promoted: Manifest,
    files: dict[str, str],
    signer: KeySigner,
    trainyard: Command,
) -> None:
    claims.attach(place, promoted, signer, [CLAIMS[1], CLAIMS[4]])
    demanded = {"REQUIRE_SIGNED": "1", "COSIGN_PUB": files["COSIGN_PUB"]}
    status, _, err = promote(trainyard, promoted, place, CLAIMS="sbom,smok", **demanded)
    assert status == 2 and "'--claims sbom,smok'" in err and "sbom,provenance,verify,smoke" in err
    assert promote(trainyard, promoted, place, CLAIMS="sbom, smoke", **demanded)[0] == 0


def test_require_signed_needs_a_key_and_claims_need_require_signed(
    place: Repository, promoted: Manifest, trainyard: Command
) -> None:
    status, _, err = promote(trainyard, promoted, place, REQUIRE_SIGNED="1")
    assert status == 2 and "--require-signed needs COSIGN_PUB=<public key>" in err
    status, _, err = promote(trainyard, promoted, place, CLAIMS="sbom")
    assert status == 2 and "--claims requires --require-signed" in err


def test_promote_writes_a_verification_summary(
    registry: Registry,
    place: Repository,
    promoted: Manifest,
    files: dict[str, str],
    signer: KeySigner,
    trainyard: Command,
) -> None:
    """https://slsa.dev/spec/v1.0/verification_summary"""
    claims.attach(place, promoted, signer, ABOUT_IMAGE)
    inputs = [one["digest"] for one in registry.referrers(promoted.digest)]
    variables = {"REQUIRE_SIGNED": "1", "COSIGN_KEY": files["COSIGN_KEY"]}
    assert promote(trainyard, promoted, place, CLAIMS="sbom,provenance,verify,smoke", **variables)[0] == 0
    *_, last = artifacts_of(place, promoted.digest, [statements.BUNDLE]).values()
    predicate = verified(last.data, signer.key.public_key())["predicate"]
    assert predicate.pop("timeVerified").endswith("Z")
    assert predicate.pop("verifier")["id"] == predicates.VERIFIER
    assert PackageURL.from_string(predicate.pop("resourceUri")) == PackageURL(
        "oci", name="trainyard", version=promoted.digest, qualifiers={"repository_url": place.name}
    )
    assert predicate == {
        "policy": {"uri": f"{predicates.POLICY}?claims=sbom,provenance,verify,smoke"},
        "inputAttestations": [{"digest": {"sha256": one[7:]}} for one in inputs],
        "verificationResult": "PASSED",
        "verifiedLevels": ["SLSA_BUILD_LEVEL_1"],
        "slsaVersion": "1.0",
    }
    before = len(registry.referrers(promoted.digest))
    assert promote(trainyard, promoted, place, **variables)[0] == 0
    assert len(registry.referrers(promoted.digest)) == before, "no tag was moved"


def test_of_an_image_index_each_image_needs_claims_and_the_index_a_signature(
    registry: Registry, place: Repository, signer: KeySigner
) -> None:
    images = {AMD64: put_image(registry, "amd64"), ARM64: put_image(registry, "arm64")}
    index = image_index.make(images, {})
    with pytest.raises(StepFailed, match=f"{index.digest} has no signature"):
        claims.require_all(place, index, signer.trust, ["sbom"])
    claims.attach(place, index, signer, [predicates.signature()])
    claims.attach(place, images[AMD64], signer, [CLAIMS[1]])
    with pytest.raises(StepFailed, match=f"{images[ARM64].digest} has no claim 'sbom'"):
        claims.require_all(place, index, signer.trust, ["sbom"])
    claims.attach(place, images[ARM64], signer, [CLAIMS[1]])
    assert len(claims.require_all(place, index, signer.trust, ["sbom"])) == 2


def test_claims_follow_an_image_to_the_repository_of_the_floating_tags(
    registry: Registry, place: Repository, promoted: Manifest, signer: KeySigner, trainyard: Command
) -> None:
    claims.attach(place, promoted, signer, ABOUT_IMAGE)
    other = place.name.replace("/ml/", "/floating/")
    assert promote(trainyard, promoted, place, TO=other.rpartition("/")[0])[0] == 0
    puts = [line for line in registry.requests if line.startswith("PUT /v2/floating/trainyard/manifests/sha256:")]
    assert len(puts) == len(ABOUT_IMAGE)


# --- check-job -----------------------------------------------------------------------------------------------------


def test_check_job_reports_an_image_without_a_valid_signature(
    registry: Registry,
    place: Repository,
    tmp_path: Path,
    files: dict[str, str],
    signer: KeySigner,
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
    variables = {"REQUIRE_SIGNED": "1", "COSIGN_PUB": files["COSIGN_PUB"]}
    assert trainyard("check-job", str(job))[0] == 0, "signatures are not demanded by default"
    claims.attach(place, image, KeySigner(KEYS["p256"]()), [predicates.signature()])
    status, out, _ = trainyard("check-job", "--json", str(job), **variables)
    (finding,) = json.loads(out)["files"][0]["findings"]
    assert (status, finding["rule"], finding["severity"]) == (1, "images_are_signed", "refuse")
    assert finding["what"] == f"{reference} is not signed as demanded: {reference} has no signature with this key"
    claims.attach(place, image, signer, [predicates.signature()])
    assert trainyard("check-job", str(job), **variables)[0] == 0


def test_check_job_reports_every_unsigned_image_of_a_kubernetes_file(
    registry: Registry,
    place: Repository,
    tmp_path: Path,
    files: dict[str, str],
    signer: KeySigner,
    trainyard: Command,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """An init container, an image volume, and a Pod beside the Job, whose own container is signed."""
    signed, *others = (put_image(registry, labels={"is": name}) for name in ("train", "init", "volume", "pod"))
    claims.attach(place, signed, signer, [predicates.signature()])
    references = [f"{place.name}@{one.digest}" for one in others]
    job = tmp_path / "job.yaml"
    job.write_text(
        "apiVersion: batch/v1\nkind: Job\nmetadata: {name: j}\nspec:\n  template:\n    spec:\n"
        "      restartPolicy: Never\n"
        f"      containers: [{{name: t, image: {place.name}@{signed.digest}}}]\n"
        f"      initContainers: [{{name: i, image: {references[0]}}}]\n"
        f"      volumes: [{{name: v, image: {{reference: {references[1]}}}}}]\n"
        "---\napiVersion: v1\nkind: Pod\nmetadata: {name: p}\n"
        f"spec: {{containers: [{{name: c, image: {references[2]}}}]}}\n"
    )
    variables = {"REQUIRE_SIGNED": "1", "COSIGN_PUB": files["COSIGN_PUB"]}
    status, out, _ = trainyard("check-job", "--json", str(job), **variables)
    findings = [one for one in json.loads(out)["files"][0]["findings"] if one["rule"] == "images_are_signed"]
    assert status == 1
    assert [one["what"] for one in findings] == [
        f"{one} is not signed as demanded: {one} has no signature with this key" for one in references
    ]
    for one in others:
        claims.attach(place, one, signer, [predicates.signature()])
    assert trainyard("check-job", str(job), **variables)[0] == 0


@pytest.mark.parametrize(
    ("reference", "why"),
    [
        ("debian:12", "it names no registry"),
        ("localhost:1/a/b:c", "cannot be reached"),
        ("Not A Reference", "is not"),
    ],
)
def test_an_image_whose_signature_cannot_be_checked_is_not_signed(reference: str, why: str, signer: KeySigner) -> None:
    assert why in claims.unsigned(reference, signer.trust)


def test_an_image_that_is_not_there_is_not_signed(place: Repository, signer: KeySigner) -> None:
    assert claims.unsigned(f"{place.name}:gone", signer.trust) == "there is no such image"


@pytest.mark.parametrize(
    ("variables", "words"),
    [
        ({"OFFLINE": "1"}, "--require-signed and --offline exclude each other"),
        ({}, "--require-signed needs COSIGN_PUB=<public key>"),
    ],
)
def test_check_job_needs_a_key_and_the_registry(variables: dict[str, str], words: str, trainyard: Command) -> None:
    status, out, err = trainyard("check-job", "job.yaml", REQUIRE_SIGNED="1", **variables)
    assert (status, out) == (2, "") and words in err
