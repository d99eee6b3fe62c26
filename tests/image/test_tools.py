"""The tools around images against a real engine and a real registry: diff, SBOM, provenance, signatures."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec
from testcontainers.community.registry import DockerRegistryContainer

from tests.claims import verified
from tests.engine import ENGINE
from tests.image.registry import running
from tests.published_images import artifacts_of
from trainyard.common.errors import StepFailed
from trainyard.common.settings import ROOT, state_folder
from trainyard.image import provenance
from trainyard.oci import attached_sbom, inventory, registry, statements
from trainyard.oci.registry import Manifest, Repository
from trainyard.release import claims, diff, image_packages, keys, predicates, publish, sbom, sources
from trainyard.spec import state
from trainyard.spec.model import Spec, load

BuiltImage = Callable[[str], str]


@pytest.fixture(scope="module")
def server() -> Iterator[DockerRegistryContainer]:
    with running.container() as started:
        yield started


@pytest.fixture
def repository(server: DockerRegistryContainer, request: pytest.FixtureRequest) -> Repository:
    """A repository for one test."""
    return Repository(f"{running.address(server)}/{request.node.name.replace('_', '-')[:60]}/trainyard")


def trainyard(*words: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """``trainyard("diff", A="one")``: run a command with the variable TRAINYARD_A."""
    command = [sys.executable, "-m", "trainyard", *words]
    environment = os.environ | {f"TRAINYARD_{name}": value for name, value in variables.items()}
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str, str], str]]:
    """Make an image of three layers, the upper with a Python package of the given version; its reference."""
    made: list[str] = []
    big = os.urandom(2_000_000)

    def image(name: str, version: str) -> str:
        folder = tmp_path_factory.mktemp(name)
        (folder / "big").write_bytes(big)
        info = folder / "site" / f"word-{version}.dist-info"
        info.mkdir(parents=True)
        (info / "METADATA").write_text(f"Metadata-Version: 2.4\nName: word\nVersion: {version}\n", encoding="utf-8")
        (folder / "status").write_text(
            f"Package: tini\nStatus: install ok installed\nArchitecture: amd64\nVersion: {version}-1\n",
            encoding="utf-8",
        )
        (folder / "Dockerfile").write_text(
            "FROM scratch\nCOPY big /big\nCOPY status /var/lib/dpkg/status\n"
            f"COPY site /opt/site\nENV WORD={version}\nLABEL io.trainyard.target=tf-cpu\n",
            encoding="utf-8",
        )
        reference = f"trainyard-tools:{name}"
        command = ["build", "--quiet", "--load", "--provenance=false", f"--tag={reference}", str(folder)]
        ENGINE.buildx(*command, environment={"SOURCE_DATE_EPOCH": "1"})
        made.append(reference)
        return reference

    yield image
    for reference in made:
        ENGINE.untag(reference)


def pushed(reference: str, repository: Repository, tag: str) -> Manifest:
    """The manifest of a local image after it was pushed as ``tag``."""
    ENGINE.image(reference, made_by="test").tag(repository.name, tag)
    try:
        for _ in registry.push(ENGINE, f"{repository.name}:{tag}"):
            pass
    finally:
        ENGINE.client.api.remove_image(f"{repository.name}:{tag}", noprune=True)
    found = repository.manifest(tag)
    assert found is not None
    return found


def test_a_diff_is_the_same_of_local_images_and_of_those_at_a_registry(
    small: Callable[[str, str], str], repository: Repository
) -> None:
    """And the download that it reports is what the registry stores of the new image."""
    one, two = small("one", "1.0"), small("two", "2.0")
    local = diff.diff(inventory.find(ENGINE, one), inventory.find(ENGINE, two))
    assert local["python"]["changed"] == {"word": ["1.0", "2.0"]}
    assert local["debian"]["changed"] == {"tini": ["1.0-1", "2.0-1"]}
    assert local["environment"]["changed"] == {"WORD": ["1.0", "2.0"]}
    assert [row["same"] for row in local["layers"]] == [True, False, False]
    manifest = json.loads(pushed(one, repository, "one").body)
    new = pushed(two, repository, "two")
    document = json.loads(new.body)
    theirs = {layer["digest"] for layer in manifest["layers"]}
    missing = [layer["size"] for layer in document["layers"] if layer["digest"] not in theirs]
    assert local["download"] == sum(missing) + document["config"]["size"] + len(new.body) < 10_000
    far = diff.diff(inventory.remote(f"{repository.name}:one"), inventory.remote(f"{repository.name}:two"))
    for part in ("python", "debian", "environment", "labels", "download"):
        assert far[part] == local[part], part
    claims.attach(repository, new, None, [predicates.sbom(sbom.make(inventory.local(ENGINE, two)))])
    listed = inventory.remote(f"{repository.name}:two").listed
    assert listed is not None and listed[0]["word"].version == "2.0" and listed[1]["tini"].version == "2.0-1"


def test_the_packages_of_a_local_image_are_read_without_its_layers(small: Callable[[str, str], str]) -> None:
    """The image has no Python."""
    found = image_packages.find(ENGINE, small("one", "1.0"))
    assert (found.target, found.python) == ("tf-cpu", {})


def test_diff_reads_a_local_image_and_one_at_a_registry(
    small: Callable[[str, str], str], repository: Repository
) -> None:
    one, two = small("here", "1.0"), small("there", "3.0")
    pushed(two, repository, "x")
    done = trainyard("diff", "--json", A=one, B=f"{repository.name}:x")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["python"]["changed"] == {"word": ["1.0", "3.0"]}
    assert "a host that has A downloads" in done.stderr
    missing = trainyard("diff", A=one, B=f"{repository.name}:nothing")
    assert missing.returncode == 2 and f"{repository.name} has no nothing" in missing.stderr


@pytest.fixture
def key(tmp_path: Path) -> tuple[Path, Path]:
    """A private and a public key, as openssl makes them."""
    private = ec.generate_private_key(ec.SECP256R1())
    paths = tmp_path / "private.pem", tmp_path / "public.pem"
    paths[0].write_bytes(
        private.private_bytes(
            serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        )
    )
    paths[1].write_bytes(
        private.public_key().public_bytes(serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo)
    )
    return paths


def test_a_signature_is_made_and_checked_at_a_registry(
    small: Callable[[str, str], str], repository: Repository, key: tuple[Path, Path]
) -> None:
    private, public = key
    subject = pushed(small("signed", "1.0"), repository, "x")
    image = f"{repository.name}:x"
    unsigned = trainyard("sign", IMAGE=image, COSIGN_PUB=str(public))
    assert unsigned.returncode == 1 and "has no signature with this key" in unsigned.stderr
    done = trainyard("sign", "--json", IMAGE=image, COSIGN_KEY=str(private), COSIGN_PUB=str(public))
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    listed = found.pop("claims")
    assert [(one["kind"], one["valid"]) for one in listed] == [("signature", True)]
    assert found == {"image": f"{repository.name}@{subject.digest}", "attached": ["signature"], "valid": 1}
    assert repository.manifest("x") == subject, "the image is what it was"
    assert repository.tags() == [subject.digest.replace(":", "-"), "x"]


def test_push_attaches_signed_claims(built_image: BuiltImage, repository: Repository, key: tuple[Path, Path]) -> None:
    """And the image's digest is still what passed."""
    digest = ENGINE.digest(built_image("tf-cpu"))
    address = repository.name.rpartition("/")[0]
    done = trainyard("push", "tf-cpu", "--json", REGISTRY=address, COSIGN_KEY=str(key[0]))
    assert done.returncode == 0, done.stderr
    index_of_images = json.loads(done.stdout)
    found = index_of_images["images"][load("tf-cpu").platform]
    assert found["digest"] == digest
    assert found["attached"] == ["signature", "sbom", "provenance", "verify", "smoke"]
    assert index_of_images["attached"] == ["signature"]
    public = keys.public_key(key[1])
    for signed in (digest, index_of_images["digest"]):
        assert claims.signatures(repository, signed, keys.TrustedKey(public)) == 1
        for artifact in artifacts_of(repository, signed, [statements.BUNDLE]).values():
            assert verified(artifact.data, public)["subject"][0]["digest"] == {"sha256": signed[7:]}
    version = found["tag"].rpartition(":")[2]
    document = attached_sbom.document(repository, digest)
    assert document and sbom.violation(json.dumps(document)) is None
    assert document["metadata"]["component"]["version"] == version
    inside = {one["name"]: {part["name"]: part.get("version") for part in one.get("components", ())}
              for one in document["components"]}  # fmt: skip
    assert inside["tensorflow_cpu"]["zlib"] and inside["tensorflow_cpu"].items() >= {("sqlite", None)}
    assert {"openssl", "libc"} <= inside["cryptography"].keys(), "from the SBOM in the wheel"
    predicate = statements.predicate(repository, digest, predicates.TYPES["provenance"])
    assert predicate
    request = predicate["buildDefinition"]["externalParameters"]["request"]
    assert request["args"]["build-arg:VERSION"] == version
    assert predicate["runDetails"]["metadata"]["buildkit_completeness"]["request"] is True


def test_the_provenance_of_a_build_is_kept_and_its_second_image_is_not(built_image: BuiltImage) -> None:
    digest = ENGINE.digest(built_image("tf-cpu"))
    statement = provenance.statement(state_folder() / "tf-cpu", digest)
    assert statement is not None and statement["predicateType"].startswith("https://slsa.dev/provenance/")
    assert [one["digest"]["sha256"] for one in statement["subject"]] == [digest.removeprefix("sha256:")]
    names = [tag for image in ENGINE.images() for tag in image.tags]
    assert not any(name.endswith("-provenance") for name in names)


def test_a_vulnerable_image_is_not_pushed(
    built_image: BuiltImage, repository: Repository, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The gate of `make audit`, with an advisory that the test plants."""
    from trainyard.release import advisories

    spec: Spec = load("tf-cpu")
    built_image("tf-cpu")
    (version,) = sources.pins(spec)["numpy"]
    planted = advisories.Advisory("PYSEC-0000-1", (), "numpy", "planted", "2026-11-01", ((("introduced", version),),))
    snapshot = advisories.Snapshot("a test", "2026-11-20", ("numpy",), (planted,))
    monkeypatch.setattr(advisories, "load", lambda: snapshot)
    with pytest.raises(StepFailed, match=f"numpy {version}: PYSEC-0000-1"):
        publish.push(sources.of(spec), repository.name.rpartition("/")[0])
    assert repository.tags() == []
    assert state.last(state_folder() / "tf-cpu", "verify"), "it had passed everything else"
