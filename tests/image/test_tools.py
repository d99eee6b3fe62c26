"""The tools around images against a real engine and a real registry: diff, SBOM, provenance, signatures."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec
from testcontainers.community.registry import DockerRegistryContainer

from scripts import diff, engine, push, sbom, sign, state
from scripts.cli import ROOT
from scripts.published import artifacts, provenance, registry, tags
from scripts.published.tags import Repository
from scripts.spec import Spec, load
from scripts.stored import contents
from tests.image.registry import running

BuiltImage = Callable[[str], str]


@pytest.fixture(scope="module")
def server() -> Iterator[DockerRegistryContainer]:
    with running.container() as started:
        yield started


@pytest.fixture
def repository(server: DockerRegistryContainer, request: pytest.FixtureRequest) -> Repository:
    """A repository of the test's own."""
    return Repository(f"{running.address(server)}/{request.node.name.replace('_', '-')[:60]}/trainyard")


def verb(name: str, *words: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """``python -m scripts.<name>`` with make's variables."""
    command = [sys.executable, "-m", f"scripts.{name}", *words]
    return subprocess.run(command, cwd=ROOT, env=os.environ | variables, capture_output=True, text=True, check=False)


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
        engine.buildx(*command, quiet=True, environment={"SOURCE_DATE_EPOCH": "1"})
        made.append(reference)
        return reference

    yield image
    for reference in made:
        engine.forget(reference)


def pushed(reference: str, repository: Repository, tag: str) -> tags.Manifest:
    """The manifest of a local image after it was pushed as ``tag``."""
    engine.image(reference, made_by="test").tag(repository.name, tag)
    try:
        for _ in registry.push(f"{repository.name}:{tag}"):
            pass
    finally:
        engine.client().api.remove_image(f"{repository.name}:{tag}", noprune=True)
    found = repository.manifest(tag)
    assert found is not None
    return found


def test_a_diff_is_the_same_of_local_images_and_of_those_at_a_registry(
    small: Callable[[str, str], str], repository: Repository
) -> None:
    """And what it says has to be loaded is what the registry stores of the new image."""
    one, two = small("one", "1.0"), small("two", "2.0")
    local = diff.diff(contents.find(one), contents.find(two))
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
    far = diff.diff(contents.remote(f"{repository.name}:one"), contents.remote(f"{repository.name}:two"))
    for part in ("python", "debian", "environment", "labels", "download"):
        assert far[part] == local[part], part
    sbom.attach(repository, new, sbom.make(contents.local(two)))
    listed = contents.remote(f"{repository.name}:two").listed
    assert listed is not None and listed[0]["word"].version == "2.0" and listed[1]["tini"].version == "2.0-1"


def test_the_verb_reads_an_image_here_and_one_at_a_registry(
    small: Callable[[str, str], str], repository: Repository
) -> None:
    one, two = small("here", "1.0"), small("there", "3.0")
    pushed(two, repository, "x")
    done = verb("diff", "--json", A=one, B=f"{repository.name}:x")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["python"]["changed"] == {"word": ["1.0", "3.0"]}
    assert "who has A loads" in done.stderr
    missing = verb("diff", A=one, B=f"{repository.name}:nothing")
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
    unsigned = verb("sign", IMAGE=image, COSIGN_PUB=str(public))
    assert unsigned.returncode == 1 and "has no signature" in unsigned.stderr
    done = verb("sign", "--json", IMAGE=image, COSIGN_KEY=str(private), COSIGN_PUB=str(public))
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == {
        "image": f"{repository.name}@{subject.digest}",
        "tag": f"{subject.digest.replace(':', '-')}.sig",
        "valid": 1,
    }
    assert repository.manifest("x") == subject, "the image is what it was"
    other = ec.generate_private_key(ec.SECP256R1())
    assert sign.sign(repository, subject, other) is not None
    assert sign.verified(repository, subject.digest, sign.public_key(public)) == 1


def test_what_make_push_lays_beside_an_image(
    built_image: BuiltImage, repository: Repository, key: tuple[Path, Path]
) -> None:
    """Provenance that BuildKit's own tool reads, an SBOM, a signature; and the image's digest is still what passed."""
    digest = engine.digest(built_image("tf-cpu"))
    address = repository.name.rpartition("/")[0]
    done = verb("push", "tf-cpu", "--json", REGISTRY=address, COSIGN_KEY=str(key[0]))
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    assert found["digest"] == digest and set(found["beside"]) == {"provenance", "sbom", "signature"}
    assert sign.verified(repository, digest, sign.public_key(key[1])) == 1
    text = artifacts.get(repository, digest, "sbom")[0].data.decode()
    assert (
        sbom.problems(text) is None
        and json.loads(text)["metadata"]["component"]["version"] == found["tag"].rpartition(":")[2]
    )
    command = [
        "imagetools",
        "inspect",
        "--format={{json .Provenance.SLSA}}",
        f"{repository.name}:{provenance.tag(digest)}",
    ]
    predicate = json.loads(engine.buildx(*command, quiet=True))
    arguments = predicate["invocation"]["parameters"]["args"]
    assert arguments["build-arg:VERSION"] == found["tag"].rpartition(":")[2]
    assert predicate["metadata"]["completeness"]["parameters"] is True
    index = repository.manifest(provenance.tag(digest))
    assert index is not None and provenance.subjects(index.body) == [digest]


def test_the_provenance_of_a_build_is_kept_and_its_second_image_is_not(built_image: BuiltImage) -> None:
    digest = engine.digest(built_image("tf-cpu"))
    documents = provenance.recall("tf-cpu", digest)
    assert documents is not None
    statement = next(json.loads(text) for text in documents.values() if b"https://in-toto.io/Statement" in text)
    assert statement["predicateType"].startswith("https://slsa.dev/provenance/")
    assert [one["digest"]["sha256"] for one in statement["subject"]] == [digest.removeprefix("sha256:")]
    names = [tag for image in engine.client().images.list() for tag in image.tags]
    assert not any(name.endswith("-provenance") for name in names)


def test_a_vulnerable_image_is_not_pushed(
    built_image: BuiltImage, repository: Repository, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The gate of `make audit`, with an advisory that the test plants."""
    from scripts import advisories, audit

    spec: Spec = load("tf-cpu")
    built_image("tf-cpu")
    (version,) = audit.pinned(spec)["numpy"]
    planted = advisories.Advisory("PYSEC-0000-1", (), "numpy", "planted", "2026-11-01", ((("introduced", version),),))
    snapshot = advisories.Snapshot("a test", "2026-11-20", ("numpy",), (planted,))
    monkeypatch.setattr(advisories, "load", lambda: snapshot)
    with pytest.raises(push.StepFailed, match=f"numpy {version}: PYSEC-0000-1"):
        push.main(["tf-cpu", "--registry", repository.name.rpartition("/")[0]])
    assert repository.tags() == []
    assert state.last("tf-cpu", "verify"), "it had passed everything else"
