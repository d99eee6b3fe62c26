"""Signed claims at a real registry without the referrers API: docker-registry 2.8."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest
import requests
from cryptography.hazmat.primitives.asymmetric import ec

from tests.claims import CLAIMS, verified
from tests.image.registry import running
from tests.published_images import artifacts_of
from trainyard.oci import image_index, referrers, statements
from trainyard.oci.documents import hashed as sha256
from trainyard.oci.registry import Manifest, Repository
from trainyard.release import claims
from trainyard.release.keys import KeySigner

pytestmark = pytest.mark.concurrent


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    """host:port of a real registry."""
    with running.container() as started:
        yield running.address(started)


@pytest.fixture
def repository(server: str, request: pytest.FixtureRequest) -> Repository:
    return Repository(f"{server}/{request.node.name.replace('_', '-')[:50]}")


@pytest.fixture
def image(repository: Repository) -> Manifest:
    """An image without layers."""
    config = b'{"architecture": "amd64", "os": "linux", "rootfs": {"type": "layers", "diff_ids": []}}'
    referrers.put_blob(repository, config)
    kind = "application/vnd.oci.image.manifest.v1+json"
    entry = {"mediaType": "application/vnd.oci.image.config.v1+json", "digest": sha256(config), "size": len(config)}
    made = Manifest.of({"schemaVersion": 2, "mediaType": kind, "config": entry, "layers": []}, kind)
    repository.put(made, "one")
    return made


def test_claims_are_listed_under_the_tag_and_verify(repository: Repository, image: Manifest) -> None:
    signer = KeySigner(ec.generate_private_key(ec.SECP256R1()))
    answer = requests.get(f"http://{repository.host}/v2/{repository.path}/referrers/{image.digest}", timeout=10)
    assert answer.status_code == 404, "this registry has no referrers API"
    claims.attach(repository, image, signer, CLAIMS[:1])
    claims.attach(repository, image, signer, CLAIMS)
    assert [str(one) for one in claims.check(repository, image.digest, signer.trust)] == [
        f"{one.kind}: signed with this key" for one in CLAIMS
    ]
    for artifact in artifacts_of(repository, image.digest, [statements.BUNDLE]).values():
        assert verified(artifact.data, signer.key.public_key())["subject"][0]["digest"] == {"sha256": image.digest[7:]}
    listed = repository.existing(image.digest.replace(":", "-"))
    assert listed.media_type == image_index.INDEX
    assert repository.tags() == ["one", image.digest.replace(":", "-")]


def test_threads_that_attach_to_one_image_lose_no_claim(repository: Repository, image: Manifest) -> None:
    signer = KeySigner(ec.generate_private_key(ec.SECP256R1()))
    threads = [threading.Thread(target=claims.attach, args=[repository, image, signer, [one]]) for one in CLAIMS]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    kinds = {one.kind for one in claims.check(repository, image.digest, signer.trust)}
    assert kinds == {one.kind for one in CLAIMS}
