"""References of images are read as Docker reads them (https://github.com/distribution/reference)."""

from __future__ import annotations

import pytest

from trainyard.common.errors import UserError
from trainyard.oci import inventory
from trainyard.oci.reference import Reference, why_unusable
from trainyard.oci.registry import check_address

DIGEST = f"sha256:{'0a' * 32}"


@pytest.mark.parametrize(
    ("text", "registry", "repository", "tag", "digest"),
    [
        ("debian", "docker.io", "library/debian", "", ""),
        ("debian:12", "docker.io", "library/debian", "12", ""),
        ("team/image", "docker.io", "team/image", "", ""),
        ("docker.io/debian:12", "docker.io", "library/debian", "12", ""),
        ("docker.io/library/debian", "docker.io", "library/debian", "", ""),
        ("index.docker.io/debian", "docker.io", "library/debian", "", ""),
        ("localhost/image", "localhost", "image", "", ""),
        ("localhost:5000", "docker.io", "library/localhost", "5000", ""),
        ("localhost:5000/a/b", "localhost:5000", "a/b", "", ""),
        ("localhost:5000/a/b:c", "localhost:5000", "a/b", "c", ""),
        ("127.0.0.1:5000/a", "127.0.0.1:5000", "a", "", ""),
        ("[::1]:5000/a:t", "[::1]:5000", "a", "t", ""),
        ("Registry/image", "Registry", "image", "", ""),
        ("ghcr.io/a_b/c.d__e---f:V1.0_x-y", "ghcr.io", "a_b/c.d__e---f", "V1.0_x-y", ""),
        (f"gcr.io/p/i@{DIGEST}", "gcr.io", "p/i", "", DIGEST),
        (f"us-docker.pkg.dev/p/r/i:t@{DIGEST}", "us-docker.pkg.dev", "p/r/i", "t", DIGEST),
        (f"debian@sha512:{'0' * 128}", "docker.io", "library/debian", "", f"sha512:{'0' * 128}"),
        (f"a:{'t' * 128}", "docker.io", "library/a", "t" * 128, ""),
        (f"r.io/{'a' * 255}", "r.io", "a" * 255, "", ""),
    ],
)
def test_a_reference_has_registry_repository_tag_and_digest(
    text: str, registry: str, repository: str, tag: str, digest: str
) -> None:
    parsed = Reference.parse(text)
    assert parsed == Reference(registry, repository, tag, digest)
    assert Reference.parse(str(parsed)) == parsed
    assert Reference.parse(str(parsed).replace(parsed.name, parsed.familiar_name)) == parsed


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "expected [HOST[:PORT]/]PATH"),
        (" debian", "expected [HOST[:PORT]/]PATH"),
        ("a b", "expected [HOST[:PORT]/]PATH"),
        ("https://ghcr.io/a", "leave out 'https://'"),
        ("Debian", "must be lowercase"),
        ("ghcr.io/Team/image", "must be lowercase"),
        ("ghcr.io/", "expected [HOST[:PORT]/]PATH"),
        ("ghcr.io//a", "expected [HOST[:PORT]/]PATH"),
        ("a/-b", "expected [HOST[:PORT]/]PATH"),
        ("a/b_", "expected [HOST[:PORT]/]PATH"),
        ("a..b/c/d", "is not a registry"),
        ("-r.io/a", "is not a registry"),
        ("r.io:port/a", "is not a registry"),
        ("a:", "the tag ''"),
        ("a:.t", "the tag '.t'"),
        ("a:tä", "the tag 'tä'"),
        (f"a:{'t' * 129}", "at most 128"),
        ("a@", "must start with one of sha256:"),
        ("a@md5:00", "must start with one of sha256:"),
        ("a@sha256:00", "64 lowercase hexadecimal digits"),
        (f"a@sha256:{'0A' * 32}", "64 lowercase hexadecimal digits"),
        (f"a@sha512:{'0' * 64}", "128 lowercase hexadecimal digits"),
        ("0a" * 32, "are an image ID"),
        (f"r.io/{'a' * 256}", "more than 255 characters"),
    ],
)
def test_an_invalid_reference_is_refused_in_one_line(text: str, words: str) -> None:
    with pytest.raises(UserError) as refused:
        Reference.parse(text)
    assert words in str(refused.value) and "is not an image reference" in str(refused.value)
    assert "\n" not in str(refused.value) and len(str(refused.value)) < 400


@pytest.mark.parametrize(
    ("text", "full", "familiar"),
    [
        ("debian:12", "docker.io/library/debian:12", "debian"),
        ("docker.io/team/image", "docker.io/team/image", "team/image"),
        ("docker.io/library/a/b", "docker.io/library/a/b", "library/a/b"),
        ("localhost:5000/a:t", "localhost:5000/a:t", "localhost:5000/a"),
        (f"a:t@{DIGEST}", f"docker.io/library/a:t@{DIGEST}", "a"),
    ],
)
def test_a_reference_is_written_in_full_and_as_docker_lists_it(text: str, full: str, familiar: str) -> None:
    assert (str(Reference.parse(text)), Reference.parse(text).familiar_name) == (full, familiar)


@pytest.mark.parametrize(
    ("text", "pushed", "words"),
    [
        ("us-docker.pkg.dev/p/r/i", True, ""),
        ("us-docker.pkg.dev/p/i:1", True, "the path at us-docker.pkg.dev is not PROJECT/REPOSITORY/IMAGE"),
        ("us-docker.pkg.dev/p/i:1", False, ""),
        ("gcr.io/p/i", True, ""),
        ("https://gcr.io/p/i", False, "leave out 'https://'"),
    ],
)
def test_why_a_text_names_no_image(text: str, pushed: bool, words: str) -> None:
    """https://cloud.google.com/artifact-registry/docs/docker/names"""
    found = why_unusable(text, pushed=pushed)
    assert words in found and bool(found) == bool(words)


@pytest.mark.parametrize(("text", "version"), [("a", "latest"), ("a:t", "t"), (f"a:t@{DIGEST}", DIGEST)])
def test_a_digest_takes_precedence_over_a_tag(text: str, version: str) -> None:
    assert Reference.parse(text).version == version


@pytest.mark.parametrize(
    ("reference", "name", "version"),
    [
        ("localhost:5000/ml/trainyard:xla", "localhost:5000/ml/trainyard", "xla"),
        ("gcr.io/p/x", "gcr.io/p/x", "latest"),
        (f"gcr.io/p/x:t@{DIGEST}", "gcr.io/p/x", DIGEST),
    ],
)
def test_an_image_at_a_registry_has_a_repository_and_a_version(reference: str, name: str, version: str) -> None:
    repository, found = inventory.at_registry(reference)
    assert (repository.name, found) == (name, version)


@pytest.mark.parametrize("reference", ["trainyard:xla", "library/debian", "a b", ""])
def test_a_reference_without_a_registry_is_not_at_one(reference: str) -> None:
    with pytest.raises(UserError, match="neither an image of this host nor"):
        inventory.at_registry(reference)


@pytest.mark.parametrize(
    "address",
    ["localhost:5000/team", "localhost/team", "localhost:5000", "us-docker.pkg.dev/project/repo", "ghcr.io/a_b/c.d"],
)
def test_a_registry_is_given_as_host_and_path(address: str) -> None:
    assert check_address(address) == check_address(f"{address}/") == address


@pytest.mark.parametrize(
    ("address", "words"),
    [
        (None, "no registry to push to"),
        ("", "no registry to push to"),
        ("https://ghcr.io/me", "leave out 'https://'"),
        ("ghcr.io/Me", "is not HOST[:PORT]/PATH in lowercase letters"),
        ("team/images", "is not HOST[:PORT]/PATH"),
        ("ghcr.io/me:tag", "is not HOST[:PORT]/PATH"),
        ("ghcr.io/a b", "is not HOST[:PORT]/PATH"),
    ],
)
def test_an_invalid_registry_is_refused_with_an_example(address: str | None, words: str) -> None:
    with pytest.raises(UserError) as refused:
        check_address(address)
    assert words in str(refused.value) and "as in '--registry us-docker" in str(refused.value)
