"""Push without a registry: addresses, the account of bytes, and what errors mean."""

from __future__ import annotations

import http.server
import threading
from collections.abc import Callable
from typing import Any

import pytest

from scripts import push
from scripts.cli import UserError
from scripts.published import registry
from scripts.published.tags import Manifest, Repository

VERIFIED = {
    "layers": [
        {
            "stage": "framework",
            "digest": "sha256:aaaa1111",
            "diff_id": "sha256:bbbb2222",
            "compressed": 5000,
            "size": 9000,
        },
        {"stage": "trainers", "digest": "sha256:cccc3333", "diff_id": "sha256:dddd4444", "compressed": 70, "size": 100},
    ],
    "config": {"digest": "sha256:eeee5555", "size": 7},
}


@pytest.mark.parametrize(
    "address", ["localhost:5000/team", "localhost/team", "us-docker.pkg.dev/project/repo", "ghcr.io/a_b/c.d"]
)
def test_good_addresses(address: str) -> None:
    assert registry.check_address(address) == registry.check_address(f"{address}/") == address


@pytest.mark.parametrize(
    ("address", "words"),
    [
        (None, "no registry to push to"),
        ("", "no registry to push to"),
        ("https://ghcr.io/me", "leave out 'https://'"),
        ("ghcr.io/Me", "not host[:port]/path in lower case"),
        ("team/images", "not host[:port]/path"),
        ("ghcr.io/me:tag", "not host[:port]/path"),
        ("ghcr.io/a b", "not host[:port]/path"),
    ],
)
def test_bad_addresses_are_refused_with_an_example(address: str | None, words: str) -> None:
    with pytest.raises(UserError) as refused:
        registry.check_address(address)
    assert words in str(refused.value) and "as in REGISTRY=" in str(refused.value)


@pytest.mark.parametrize(
    ("words", "meaning"),
    [
        ('Get "http://localhost:1/v2/": dial tcp 127.0.0.1:1: connect: connection refused', "is out of reach"),
        ('Get "https://r.example/v2/": dial tcp: lookup r.example: no such host', "is out of reach"),
        (
            'Head "http://r.example/v2/a/manifests/t": no basic auth credentials',
            "refuses the credentials: run 'docker login r.example'",
        ),
        (
            "push access denied, repository does not exist or may require authorization: no basic auth credentials",
            "docker login",
        ),
        ("unauthorized: authentication required", "refuses the credentials"),
        ("denied: Permission 'artifactregistry.repositories.uploadArtifacts' denied", "does not let this account push"),
        ('failed to copy: PUT "…/blobs/uploads/1": write: no space left on device', "no space left"),
        ("unexpected status from PUT request: 500 Internal Server Error", "its disk may be full"),
        (
            'Get "https://r.example/v2/": tls: failed to verify certificate: x509: unknown authority',
            "certificate that the engine trusts",
        ),
        ('Get "https://r.example/v2/": http: server gave HTTP response to HTTPS client', "speaks plain HTTP"),
        ("name unknown: Repository 'x' not found", "has no such repository"),
        ("manifest invalid: unknown media type of a layer", "build with 'COMPRESSION=gzip make image'"),
        ("something new", "r.example refused: something new"),
    ],
)
def test_errors_are_told_by_what_they_mean(words: str, meaning: str) -> None:
    told = registry.meaning(words, "r.example/team/trainyard:tag")
    assert meaning in told and told.startswith("r.example") and "\n" not in told


def test_the_state_in_upload_addresses_is_not_repeated() -> None:
    told = registry.meaning(
        f'PUT "http://h/v2/uploads/1?_state={"x" * 500}&digest=sha256%3Aabc": 500 Internal', "h:1/a:t"
    )
    assert "_state" not in told and len(told) < 300 and "500 Internal" in told


def test_every_blob_is_accounted_for() -> None:
    parts = push.blobs(VERIFIED)
    assert [part.name for part in parts] == ["framework", "trainers", "configuration"]
    told = push.account(parts, {"aaaa": "there", "dddd4444": "uploaded"})
    assert [(blob["name"], blob["uploaded"]) for blob in told] == [
        ("framework", False),
        ("trainers", True),
        ("configuration", True),
    ]
    assert sum(blob["size"] for blob in told if blob["uploaded"]) == 77


def test_layers_are_also_known_by_their_uncompressed_digest() -> None:
    told = push.account(push.blobs(VERIFIED), {"bbbb2222": "there", "dddd4444": "there"})
    assert [blob["uploaded"] for blob in told] == [False, False, True]


class Named:
    """An image as the engine's client describes it."""

    def __init__(self, identity: str, *names: str) -> None:
        self.id, self.attrs = identity, {"RepoDigests": list(names)}


def test_digests_of_other_repositories_do_not_count() -> None:
    image: Any = Named("sha256:1", "host/a/trainyard@sha256:2", "host/b/trainyard@sha256:3")
    assert push.known_as(image, "host/a/trainyard") == {"sha256:1", "sha256:2"}


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("tf-cpux", "--registry=localhost:1/a"), "unknown target 'tf-cpux' (did you mean 'tf-cpu'?)"),
        (("tf-cpu",), "no registry to push to"),
        (("tf-cpu", "--registry=HTTP://x"), "leave out 'HTTP://'"),
    ],
)
def test_mistakes_are_one_line(
    verb: Callable[..., tuple[int, str, str]], monkeypatch: pytest.MonkeyPatch, arguments: tuple[str, ...], words: str
) -> None:
    monkeypatch.delenv("REGISTRY", raising=False)
    status, out, err = verb(push, *arguments)
    assert (status, out) == (2, "") and words in err and len(err.splitlines()) == 1


def test_a_registry_that_stumbles_is_asked_again() -> None:
    """Writes of tags may be repeated: a 500 or a 503 in between does not end a promote."""
    answers = iter([500, 503, 201])
    bodies: list[bytes] = []

    class Stumbling(http.server.BaseHTTPRequestHandler):
        def do_PUT(self) -> None:
            bodies.append(self.rfile.read(int(self.headers["Content-Length"])))
            self.send_response(next(answers))
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    with http.server.HTTPServer(("127.0.0.1", 0), Stumbling) as server:
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        repository = Repository(f"127.0.0.1:{server.server_port}/team")
        repository.put(Manifest("sha256:0", "application/vnd.oci.image.manifest.v1+json", b"{}"), "tag")
        server.shutdown()
    assert bodies == [b"{}"] * 3
