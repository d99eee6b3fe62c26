"""`trainyard find`: the images at a registry that have a package, by their SBOMs; those without one are named."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from tests.fakes.registry import Registry
from tests.published_images import OCI, publish

from trainyard.common.errors import UserError
from trainyard.oci import attached_sbom, image_index, referrers, statements
from trainyard.oci.documents import hashed as sha256
from trainyard.oci.registry import Manifest, Repository
from trainyard.oci.transport import MAX_CONNECTIONS
from trainyard.release import package_search
from trainyard.release.package_search import Answer, Query
from trainyard.spec.architectures import AMD64, ARM64

IMMUTABLE = "cpu-2.9.1-20261120-0123abcd"
DEBIAN = {"openssl": "3.5.4-1~deb13u1", "libstdc++6": "14.2.0-19"}

Command = Callable[..., tuple[int, str, str]]


@pytest.fixture(autouse=True)
def own_state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRAINYARD_BUILD", str(tmp_path / "state"))


@pytest.fixture
def registry() -> Iterator[Registry]:
    with Registry() as fake:
        yield fake


@pytest.fixture
def repository(registry: Registry) -> Repository:
    return Repository(f"{registry.host}/ml/trainyard")


def find(repository: Repository, text: str) -> Answer:
    return package_search.search(repository, Query.parse(text))


# --- what is looked for ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("query", "takes", "refuses"),
    [
        ("torch", ["2.9.1", "2.10.0.dev20260101+cpu", "no version"], []),
        ("torch==2.9.1", ["2.9.1", "2.9.1+cpu"], ["2.9.0", "no version"]),
        ("torch == 2.9.1+cpu", ["2.9.1+cpu"], ["2.9.1", "2.9.1+cu130"]),
        ("torch<2.10", ["2.9.1+cpu", "2.9.0rc1"], ["2.10.0", "2.10.0.dev20260101"]),
        ("torch>=2.9,<3,!=2.9.1", ["2.9.0", "2.10.0.dev20260101"], ["2.9.1", "3.0"]),
        ("torch===odd", ["odd"], ["2.9.1"]),
        ("torch==3.0.17-1~deb12u2", [], ["3.0.17"]),
    ],
)
def test_versions_of_python_packages_are_pep_440_specifiers(query: str, takes: list[str], refuses: list[str]) -> None:
    parsed = Query.parse(query)
    assert [version for version in takes + refuses if parsed.takes_python(version)] == takes


@pytest.mark.parametrize(
    ("query", "takes", "refuses"),
    [
        ("openssl", ["3.0.17-1~deb12u2", "1:1"], []),
        ("openssl==3.0.17-1~deb12u2", ["3.0.17-1~deb12u2"], ["3.0.17-1~deb12u3", "3.0.17-1"]),
        ("openssl==1:3.0", ["1:3.0"], ["3.0"]),
        ("openssl<4", [], ["3.0.17-1~deb12u2", "5"]),
    ],
)
def test_the_version_of_a_debian_package_is_exact(query: str, takes: list[str], refuses: list[str]) -> None:
    parsed = Query.parse(query)
    assert [version for version in takes + refuses if parsed.takes_debian(version)] == takes


@pytest.mark.parametrize("text", ["", "==2", "torch 2.9", "torch==", "torch<deb12", "torch[tpu]", "-e torch"])
def test_what_is_no_package_is_refused_in_one_line(text: str) -> None:
    with pytest.raises(UserError, match="is not a package") as refused:
        Query.parse(text)
    assert "\n" not in str(refused.value)


# --- what is found --------------------------------------------------------------------------------------------------


def test_an_image_is_found_with_its_tags_platform_version_and_layer(repository: Repository) -> None:
    manifest = publish(repository, IMMUTABLE, python={"typing-extensions": "4.15.0"}, debian=DEBIAN)
    repository.put(manifest, "cpu")
    publish(repository, "cpu-2.8.0-20251120-0123abcd", python={"numpy": "2.4.6"}, debian={"openssl": "3.5.4-1"})
    answer = find(repository, "Typing_Extensions")
    (match,) = answer.matches
    assert (match.kind, match.package, match.version) == ("python", "typing-extensions", "4.15.0")
    assert (match.image.immutable, match.image.floating) == ([IMMUTABLE], ["cpu"])
    assert (match.image.digest, match.image.platform) == (manifest.digest, "linux/amd64")
    layer = json.loads(manifest.body)["layers"][1]
    assert match.layer and (match.layer.name, match.layer.digest) == ("wheels", layer["digest"])
    assert (answer.images, answer.not_covered) == (2, [])
    (match,) = find(repository, "openssl==3.5.4-1~deb13u1").matches
    assert match.kind == "debian" and match.layer and match.layer.name == "base"
    assert len(find(repository, "openssl").matches) == 2 and find(repository, "libstdc++6").matches
    assert find(repository, "torch").matches == []


def test_an_index_is_resolved_to_the_images_that_have_the_package(repository: Repository) -> None:
    one = publish(repository, f"{IMMUTABLE}-amd64", python={"torch": "2.9.1"})
    other = publish(repository, f"{IMMUTABLE}-arm64", python={"torch": "2.9.0"}, architecture="arm64")
    index = image_index.make({AMD64: one, ARM64: other}, {})
    for tag in (IMMUTABLE, "cpu"):
        repository.put(index, tag)
    answer = find(repository, "torch==2.9.0")
    (match,) = answer.matches
    assert (match.image.digest, match.image.platform, match.image.indexes) == (
        other.digest, "linux/arm64", [index.digest],
    )  # fmt: skip
    assert (sorted(match.image.immutable), match.image.floating) == ([IMMUTABLE, f"{IMMUTABLE}-arm64"], ["cpu"])
    assert answer.images == 2, "an index is no image"


def test_images_without_a_tag_are_found_by_the_tag_of_their_referrers(
    registry: Registry, repository: Repository
) -> None:
    """Where a registry has the referrers API there is no such tag."""
    registry.referrers_api = False
    publish(repository, "cpu", python={"numpy": "2"})
    manifest = publish(repository, "old", python={"torch": "2.9.1"})
    del registry.tags["old"]
    (match,) = find(repository, "torch").matches
    assert (match.image.digest, match.image.immutable, match.image.floating) == (manifest.digest, [], [])
    del registry.manifests[manifest.digest]
    assert find(repository, "torch").matches == [], "it was deleted"


def test_images_without_an_sbom_are_not_covered_and_do_not_hide(registry: Registry, repository: Repository) -> None:
    bare = publish(repository, "bare", python={"torch": "2.9.1"}, listed=False)
    broken = publish(repository, "broken", listed=False)
    referrers.attach(repository, broken, [statements.artifact(b"no JSON", statements.PLAIN, attached_sbom.PREDICATE)])
    other = publish(repository, "other", listed=False)
    referrers.attach(repository, other, [statements.artifact(b"{}", statements.PLAIN, "https://spdx.dev/Document")])
    gone = publish(repository, "gone", listed=False)
    repository.put(image_index.make({AMD64: gone}, {}), "gone")
    del registry.manifests[gone.digest]
    answer = find(repository, "torch")
    assert (answer.images, answer.matches) == (4, [])
    reasons = {image.digest: reason for image, reason in answer.not_covered}
    assert reasons[bare.digest] == reasons[other.digest] == "it has no SBOM"
    assert "is not a JSON document" in reasons[broken.digest]
    assert reasons[gone.digest] == "it is in an index, but no longer at the registry"


def test_other_artifacts_and_referrers_are_no_images(repository: Repository) -> None:
    image = publish(repository, "cpu", python={"torch": "2.9.1"})
    referrers.put_blob(repository, b"{}")
    config = {"mediaType": "application/vnd.cncf.helm.config.v1+json", "digest": sha256(b"{}"), "size": 2}
    chart = Manifest.of({"schemaVersion": 2, "config": config, "layers": []}, f"{OCI}.manifest.v1+json")
    repository.put(chart, "chart")
    answer = find(repository, "torch")
    assert (answer.images, answer.digests, answer.not_covered) == (1, [image.digest], [])


def test_a_range_does_not_pass_over_debian_packages(repository: Repository) -> None:
    publish(repository, "cpu", debian=DEBIAN)
    with pytest.raises(UserError, match="openssl is a Debian package in 1 images: version ranges are for Python"):
        find(repository, "openssl<4")
    publish(repository, "odd", python={"openssl": "3"}, debian=DEBIAN)
    answer = find(repository, "openssl<4")
    assert len(answer.matches) == 1 and len(answer.not_compared) == 2


def test_a_repository_without_images_is_no_answer(repository: Repository) -> None:
    with pytest.raises(UserError, match="has no image: check '--registry'"):
        find(repository, "torch")


# --- how it is found ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("api", [True, False])
def test_one_hundred_images_take_four_or_five_requests_each_that_overlap(
    api: bool, registry: Registry, repository: Repository
) -> None:
    """For an image: its manifest, its referrers, the manifest of its SBOM, and the SBOM.

    And the configuration if it has the package. Each connection asks a registry without the referrers API for it once.
    """
    registry.referrers_api = api
    for number in range(100):
        publish(repository, f"cpu-{number}", python={"torch": "2.9.1" if number % 2 else "2.10.0"})
    registry.requests.clear()
    registry.most_at_once, registry.delay = 0, 0.02
    answer = find(Repository(repository.name), "torch<2.10")
    assert (answer.images, len(answer.digests)) == (100, 50)
    asked = sum("/referrers/" in one for one in registry.requests)
    assert len(registry.requests) == 1 + 3 * 100 + 50 + (100 if api else 100 + asked)
    assert asked == 100 if api else asked <= MAX_CONNECTIONS
    assert MAX_CONNECTIONS / 2 < registry.most_at_once <= MAX_CONNECTIONS


def test_the_command_prints_the_digests_and_what_is_not_covered(
    trainyard: Command, registry: Registry, repository: Repository
) -> None:
    manifest = publish(repository, IMMUTABLE, python={"torch": "2.9.1"})
    publish(repository, "bare", listed=False)
    address = f"{registry.host}/ml"
    status, out, err = trainyard("find", "torch<2.10", "--registry", address)
    assert (status, out) == (0, "") and "cpu-2.9.1" in err and "1 of 2 images at" in err
    assert "not covered: sha256:" in err and "(bare): it has no SBOM" in err
    status, out, _ = trainyard("find", "torch", "--registry", address, "--quiet")
    assert (status, out) == (0, f"{repository.name}@{manifest.digest}\n")
    status, out, _ = trainyard("find", PACKAGE="torch", REGISTRY=address, JSON="1")
    found = json.loads(out)
    assert found["matches"][0]["image"]["immutable"] == [IMMUTABLE]
    assert (found["images"], len(found["not_covered"])) == (2, 1)


def test_no_image_with_the_package_is_an_answer(trainyard: Command, registry: Registry, repository: Repository) -> None:
    publish(repository, IMMUTABLE, python={"torch": "2.9.1"})
    status, out, err = trainyard("find", "numpy", "--registry", f"{registry.host}/ml", "--quiet")
    assert (status, out) == (0, "") and err == ""
    status, out, err = trainyard("find", "numpy", "--registry", f"{registry.host}/ml")
    assert (status, out) == (0, "") and "0 of 1 images at" in err


def test_a_package_must_be_given(trainyard: Command) -> None:
    status, _, err = trainyard("find", REGISTRY="localhost:5000/ml")
    assert status == 2 and "as in 'trainyard find torch==2.9.1 --registry localhost:5000/team'" in err
