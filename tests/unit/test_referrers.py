"""Artifacts are listed with their image by registries with the referrers API of OCI 1.1, and by those without."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import requests
from tests.fakes.registry import Answer, Registry, RegistryError, sha256
from tests.published_images import artifacts_of

from trainyard.common.errors import StepFailed
from trainyard.oci import referrers
from trainyard.oci.documents import InvalidAnswer
from trainyard.oci.referrers import Artifact
from trainyard.oci.registry import Manifest, Repository

INDEX = "application/vnd.oci.image.index.v1+json"
SBOM, OTHER = "application/vnd.example.sbom+json", "application/vnd.example.other"
SUBJECT = Manifest.of({"schemaVersion": 2}, "application/vnd.oci.image.manifest.v1+json")
LIST = SUBJECT.digest.replace(":", "-")
EMPTY = {"mediaType": "application/vnd.oci.empty.v1+json", "digest": sha256(b"{}"), "size": 2}
SOMETHING_ELSE = json.dumps({"config": EMPTY, "layers": []}).encode()


@pytest.fixture(params=[True, False], ids=["api", "tag"])
def registry(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Registry]:
    """A registry, with the referrers API and without."""
    monkeypatch.setenv("TRAINYARD_BUILD", str(tmp_path / "state"))
    with Registry() as fake:
        fake.referrers_api = request.param
        yield fake


@pytest.fixture
def old(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Registry]:
    """A registry without the referrers API."""
    monkeypatch.setenv("TRAINYARD_BUILD", str(tmp_path / "state"))
    with Registry() as fake:
        fake.referrers_api = False
        yield fake


def place(registry: Registry) -> Repository:
    return Repository(f"{registry.host}/ml/trainyard")


def test_what_is_attached_is_found_with_its_annotations_and_without_artifacts_of_other_types(
    registry: Registry,
) -> None:
    first, second = Artifact(b"one", SBOM, {"a": "1"}), Artifact(b"two", SBOM, {"a": "2"})
    digests = referrers.attach(place(registry), SUBJECT, [first, Artifact(b"three", OTHER)])
    digests += referrers.attach(place(registry), SUBJECT, [second])
    found = artifacts_of(place(registry), SUBJECT.digest, [SBOM])
    assert found == {digests[0]: first, digests[2]: second}
    assert set(registry.tags) == (set() if registry.referrers_api else {LIST})


def test_an_artifact_is_stored_as_the_specification_says(registry: Registry) -> None:
    """https://github.com/opencontainers/image-spec/blob/main/manifest.md#guidelines-for-artifact-usage"""
    (digest,) = referrers.attach(place(registry), SUBJECT, [Artifact(b"one", SBOM, {"a": "1"})])
    media_type, body = registry.manifests[digest]
    assert media_type == "application/vnd.oci.image.manifest.v1+json"
    assert json.loads(body) == {
        "schemaVersion": 2,
        "mediaType": media_type,
        "artifactType": SBOM,
        "config": {"mediaType": "application/vnd.oci.empty.v1+json", "digest": sha256(b"{}"), "size": 2},
        "layers": [{"mediaType": SBOM, "digest": sha256(b"one"), "size": 3}],
        "subject": {"mediaType": media_type, "digest": SUBJECT.digest, "size": len(SUBJECT.body)},
        "annotations": {"a": "1"},
    }


def test_an_image_without_artifacts_has_none(registry: Registry) -> None:
    assert artifacts_of(place(registry), SUBJECT.digest, [SBOM]) == {}
    assert referrers.attach(place(registry), SUBJECT, []) == []
    assert not registry.manifests


def test_every_page_of_the_api_is_read(registry: Registry) -> None:
    registry.referrers_per_page = 2
    made = referrers.attach(place(registry), SUBJECT, [Artifact(bytes([one]), SBOM) for one in range(5)])
    assert list(artifacts_of(place(registry), SUBJECT.digest, [SBOM])) == made


def test_thousands_of_artifacts_are_not_fetched(registry: Registry) -> None:
    entry = {"mediaType": SUBJECT.media_type, "size": 1, "artifactType": SBOM}
    made = [entry | {"digest": sha256(str(number).encode())} for number in range(600)]
    index = json.dumps({"schemaVersion": 2, "mediaType": INDEX, "manifests": made}).encode()

    def answer(method: str, path: str, given: Answer) -> Answer:
        given.body, given.status = index, 200
        return given

    registry.after = answer
    with pytest.raises(InvalidAnswer, match="has 600 referrers: delete those that are not needed"):
        artifacts_of(place(registry), SUBJECT.digest, [SBOM])
    assert len(registry.requests) == 1


def test_the_list_under_the_tag_is_what_the_api_would_answer_and_is_written_once(old: Registry) -> None:
    artifacts = [Artifact(b"one", SBOM, {"a": "1"}), Artifact(b"two", OTHER)]
    referrers.attach(place(old), SUBJECT, artifacts)
    media_type, body = old.manifests[old.tags[LIST]]
    assert media_type == INDEX
    listed = [{"annotations": {}} | one for one in old.referrers(SUBJECT.digest)]
    assert json.loads(body) == {"schemaVersion": 2, "mediaType": INDEX, "manifests": listed}
    assert [one for one in old.requests if one.startswith("PUT") and one.endswith(LIST)] == [
        f"PUT /v2/ml/trainyard/manifests/{LIST}"
    ]


def test_what_others_listed_stays(old: Registry) -> None:
    theirs = old.put_manifest("tag", "application/vnd.oci.image.manifest.v1+json", b'{"artifactType": "theirs"}')
    entry = {"mediaType": "application/vnd.oci.image.manifest.v1+json", "digest": theirs, "size": 26, "extra": [1]}
    old.put_manifest(LIST, INDEX, json.dumps({"schemaVersion": 2, "manifests": [entry]}).encode())
    (ours,) = referrers.attach(place(old), SUBJECT, [Artifact(b"one", SBOM)])
    listed = json.loads(old.manifests[old.tags[LIST]][1])["manifests"]
    assert listed[0] == entry and [one["digest"] for one in listed] == [theirs, ours]
    referrers.attach(place(old), SUBJECT, [Artifact(b"one", SBOM)])
    assert json.loads(old.manifests[old.tags[LIST]][1])["manifests"] == listed, "nothing is listed twice"


def test_an_entry_that_another_host_overwrites_is_added_again(old: Registry) -> None:
    """Another host reads the list before this one writes it, and writes it afterwards."""
    theirs = old.put_manifest("tag", "application/vnd.oci.image.manifest.v1+json", b'{"artifactType": "theirs"}')
    overwritten = []

    def interfere(method: str, path: str) -> None:
        if method == "GET" and path.endswith(LIST) and LIST in old.tags and not overwritten:
            overwritten.append(old.tags[LIST])
            entry = {"mediaType": "application/vnd.oci.image.manifest.v1+json", "digest": theirs, "size": 26}
            old.put_manifest(LIST, INDEX, json.dumps({"schemaVersion": 2, "manifests": [entry]}).encode())

    old.before = interfere
    (ours,) = referrers.attach(place(old), SUBJECT, [Artifact(b"one", SBOM)])
    listed = json.loads(old.manifests[old.tags[LIST]][1])["manifests"]
    assert overwritten and [one["digest"] for one in listed] == [theirs, ours]


def test_processes_of_one_host_lose_no_entry(old: Registry) -> None:
    old.delay = 0.005  # long enough for every thread to read the list before the first one writes it
    threads = [
        threading.Thread(target=referrers.attach, args=[place(old), SUBJECT, [Artifact(bytes([one]), SBOM)]])
        for one in range(6)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(artifacts_of(place(old), SUBJECT.digest, [SBOM])) == 6


def test_a_list_that_is_overwritten_all_the_time_is_one_line(old: Registry) -> None:
    empty = json.dumps({"schemaVersion": 2, "manifests": []}).encode()

    def interfere(method: str, path: str) -> None:
        if method == "GET" and path.endswith(LIST):
            old.put_manifest(LIST, INDEX, empty)

    old.before = interfere
    with pytest.raises(StepFailed, match="is overwritten by other processes: try again") as failed:
        referrers.attach(place(old), SUBJECT, [Artifact(b"one", SBOM)])
    assert "\n" not in str(failed.value)


def test_a_tag_with_something_else_is_not_overwritten(old: Registry) -> None:
    old.blobs[sha256(b"{}")] = b"{}"
    digest = old.put_manifest(LIST, "application/vnd.oci.image.manifest.v1+json", SOMETHING_ELSE)
    with pytest.raises(StepFailed, match=f"{LIST} is not a list of referrers: delete that tag"):
        referrers.attach(place(old), SUBJECT, [Artifact(b"one", SBOM)])
    assert old.tags[LIST] == digest
    assert artifacts_of(place(old), SUBJECT.digest, [SBOM]) == {}


def test_an_artifact_that_was_deleted_is_left_out(registry: Registry) -> None:
    gone, kept = referrers.attach(place(registry), SUBJECT, [Artifact(b"one", SBOM), Artifact(b"two", SBOM)])
    api = registry.referrers(SUBJECT.digest)
    registry.referrers = lambda _: api  # type: ignore[method-assign]
    del registry.manifests[gone]
    assert list(artifacts_of(place(registry), SUBJECT.digest, [SBOM])) == [kept]


def test_a_registry_that_refuses_is_not_one_without_referrers(registry: Registry) -> None:
    def refuse(method: str, path: str) -> None:
        raise RegistryError("UNAUTHORIZED")

    registry.before = refuse
    with pytest.raises(StepFailed, match="refuses the credentials"):
        artifacts_of(place(registry), SUBJECT.digest, [SBOM])


def test_the_tag_of_a_long_digest_is_cut_as_the_specification_says() -> None:
    assert referrers.list_tag(f"sha512:{'a' * 128}") == f"sha512-{'a' * 64}"


# --- the fake, by the specification ----------------------------------------------------------------------------------


def stored(registry: Registry, **about: object) -> str:
    """A manifest at the registry that refers to the subject; its digest."""
    document = {"schemaVersion": 2, "subject": {"digest": SUBJECT.digest}, **about}
    url = f"http://{registry.host}/v2/ml/manifests/{sha256(json.dumps(document).encode())}"
    headers = {"Content-Type": "application/vnd.oci.image.manifest.v1+json"}
    answer = requests.put(url, data=json.dumps(document), headers=headers, timeout=10)
    assert answer.headers["OCI-Subject"] == SUBJECT.digest, "it is taken although there is no such subject"
    return answer.headers["Docker-Content-Digest"]


def ask(registry: Registry, digest: str, **query: str) -> requests.Response:
    return requests.get(f"http://{registry.host}/v2/ml/referrers/{digest}", params=query, timeout=10)


def test_the_fake_lists_referrers_as_the_specification_says() -> None:
    """https://github.com/opencontainers/distribution-spec/blob/main/spec.md#listing-referrers"""
    with Registry() as fake:
        fake.blobs[sha256(b"{}")] = b"{}"
        config = {"mediaType": OTHER, "digest": sha256(b"{}")}
        typed = stored(fake, artifactType=SBOM, config=config, annotations={"a": "1"})
        untyped = stored(fake, config=config)
        answer = ask(fake, SUBJECT.digest)
        assert (answer.status_code, answer.headers["Content-Type"]) == (200, INDEX)
        assert "OCI-Filters-Applied" not in answer.headers
        first, second = answer.json()["manifests"]
        assert (first["digest"], first["artifactType"], first["annotations"]) == (typed, SBOM, {"a": "1"})
        assert (second["digest"], second["artifactType"]) == (untyped, OTHER), "the type of the configuration"
        filtered = ask(fake, SUBJECT.digest, artifactType=SBOM)
        assert filtered.headers["OCI-Filters-Applied"] == "artifactType"
        assert filtered.json()["manifests"] == [first]
        nothing = ask(fake, sha256(b"nothing"))
        assert (nothing.status_code, nothing.json()["manifests"]) == (200, [])
        assert ask(fake, "sha256:short").status_code == 400


def test_the_fake_without_the_api_answers_as_docker_registry_2_8(old: Registry) -> None:
    assert ask(old, SUBJECT.digest).status_code == 404
    document = json.dumps({"schemaVersion": 2, "subject": {"digest": SUBJECT.digest}})
    url = f"http://{old.host}/v2/ml/manifests/one"
    answer = requests.put(url, data=document, headers={"Content-Type": SUBJECT.media_type}, timeout=10)
    assert answer.status_code == 201 and "OCI-Subject" not in answer.headers
