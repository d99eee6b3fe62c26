"""One reference for the images of several platforms: which image of an index is meant, and what an index may hold."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tests import locks
from tests.claims import CLAIMS
from tests.fakes.engine import FakeEngine
from tests.fakes.registry import Registry, sha256

from trainyard.common.context import Context
from trainyard.common.errors import UserError
from trainyard.common.settings import state_folder
from trainyard.image import recipes
from trainyard.oci import image_index, image_store, registry
from trainyard.oci.registry import Manifest, Repository
from trainyard.recipe import Named
from trainyard.release import claims, platform_index, promotion, sources
from trainyard.spec import architectures, model, naming, state
from trainyard.spec.architectures import AMD64, ARM64, Architecture

Command = Callable[..., tuple[int, str, str]]
OCI = "application/vnd.oci.image"
ATTESTATION = {"digest": "sha256:0", "platform": {"os": "unknown", "architecture": "unknown"}}
#: As a build with provenance makes it, and as Docker's library has it.
BOTH = {
    "manifests": [
        ATTESTATION,
        {"digest": "sha256:a", "platform": {"os": "linux", "architecture": "amd64"}},
        {"digest": "sha256:b", "platform": {"os": "linux", "architecture": "arm64", "variant": "v8"}},
    ]
}
VERSION = f"tf-cpu-{model.load('tf-cpu').version}"
DAYS = {AMD64: "20261121", ARM64: "20261122"}


def manifest_with(config: bytes) -> bytes:
    """A manifest without layers."""
    about = {"mediaType": f"{OCI}.config.v1+json", "digest": sha256(config), "size": len(config)}
    return json.dumps({"schemaVersion": 2, "config": about, "layers": []}).encode()


@pytest.fixture(autouse=True)
def own_state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRAINYARD_BUILD", str(tmp_path / "state"))


@pytest.fixture
def host(monkeypatch: pytest.MonkeyPatch) -> None:
    """A host for amd64."""
    monkeypatch.setattr(architectures.platform, "machine", lambda: "x86_64")


@pytest.mark.parametrize(
    ("document", "arch", "digest"),
    [
        (BOTH, "", "sha256:a"),
        (BOTH, "arm64", "sha256:b"),
        (BOTH, "aarch64", "sha256:b"),
        ({"manifests": BOTH["manifests"][2:]}, "", "sha256:b"),
        ({"manifests": [ATTESTATION]}, "", None),
        ({"config": {}, "layers": []}, "arm64", None),
    ],
)
def test_of_an_index_the_image_of_arch_is_meant_or_of_the_host_or_the_first(
    host: None, monkeypatch: pytest.MonkeyPatch, document: dict[str, Any], arch: str, digest: str | None
) -> None:
    monkeypatch.setenv("TRAINYARD_ARCH", arch)
    assert image_index.chosen(document) == digest


def test_an_index_without_the_platform_that_was_asked_for_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRAINYARD_ARCH", "arm64")
    with pytest.raises(UserError) as error:
        image_index.chosen({"manifests": BOTH["manifests"][:2]})
    assert str(error.value) == "'TRAINYARD_ARCH=arm64': the image index has images for linux/amd64"


def test_an_image_without_a_platform_is_the_only_one_of_its_index() -> None:
    assert image_index.digest_for({"manifests": [{"digest": "sha256:a"}]}, ARM64) == "sha256:a"
    assert image_index.digest_for(BOTH, ARM64) == "sha256:b"
    assert image_index.digest_for({"manifests": BOTH["manifests"][:2]}, ARM64) is None


@pytest.fixture
def stored() -> Iterator[Registry]:
    with Registry() as fake:
        yield fake


@pytest.fixture
def repository(stored: Registry) -> Repository:
    return Repository(f"{stored.host}/ml/trainyard")


def put(stored: Registry, wanted: Architecture, **about: str) -> str:
    """An image of tf-cpu at the registry, as a push leaves it; its digest."""
    labels = {
        "io.trainyard.target": "tf-cpu",
        "io.trainyard.framework": "tensorflow==2.21.0",
        naming.TAG: f"{VERSION}-{DAYS[wanted]}-01234567-{wanted.name}",
    }
    labels |= {name: value for name, value in about.items() if name.startswith(("io.", "org."))}
    arch = about.get("architecture", wanted.name)
    config = json.dumps({"os": "linux", "architecture": arch, "config": {"Labels": labels}}).encode()
    stored.blobs[sha256(config)] = config
    return stored.put_manifest(labels[naming.TAG], f"{OCI}.manifest.v1+json", manifest_with(config))


def test_the_same_images_are_the_same_index_whatever_their_order(stored: Registry, repository: Repository) -> None:
    one, other = put(stored, AMD64), put(stored, ARM64)
    index = platform_index.make(repository, {AMD64: one, ARM64: other})
    assert platform_index.make(repository, {ARM64: other, AMD64: one}) == index
    assert image_index.images(json.loads(index.manifest.body)) == {"linux/amd64": one, "linux/arm64": other}
    assert json.loads(index.manifest.body)["mediaType"] == f"{OCI}.index.v1+json"
    assert index.tag.startswith(f"{VERSION}-20261122-"), "the day of the newest"


def test_an_index_of_other_images_has_another_tag(stored: Registry, repository: Repository) -> None:
    one, other = put(stored, AMD64), put(stored, ARM64)
    tags = {
        platform_index.make(repository, some).tag for some in ({AMD64: one}, {ARM64: other}, {AMD64: one, ARM64: other})
    }
    assert len(tags) == 3


@pytest.mark.parametrize(
    ("about", "says"),
    [
        ({"io.trainyard.target": "cpu"}, "io.trainyard.target is 'tf-cpu', and 'cpu' for linux/arm64"),
        ({"io.trainyard.framework": "tensorflow==2.20.0"}, "'tensorflow==2.20.0' for linux/arm64"),
        ({"architecture": "amd64"}, "is for linux/amd64, and its image index says linux/arm64"),
    ],
)
def test_an_index_never_mixes_targets_versions_or_platforms(
    stored: Registry, repository: Repository, about: dict[str, str], says: str
) -> None:
    digests = {AMD64: put(stored, AMD64), ARM64: put(stored, ARM64, **about)}
    with pytest.raises(UserError) as error:
        platform_index.make(repository, digests)
    assert says in str(error.value)


@pytest.fixture
def named() -> Named:
    return recipes.named(model.load("tf-cpu"))


def passed(name: str, digest: str) -> None:
    state.record(state_folder() / name, "verify", digest, {"passed": True})
    state.record(state_folder() / name, "smoke", digest, {"passed": True})


@pytest.fixture
def pushed(stored: Registry, repository: Repository) -> Manifest:
    """An index at the registry; neither of its images is known to have passed."""
    found = platform_index.make(repository, {AMD64: put(stored, AMD64), ARM64: put(stored, ARM64)})
    repository.put(found.manifest, found.tag)
    return found.manifest


def test_an_index_is_promoted_and_rolled_back_as_a_whole(
    stored: Registry, repository: Repository, pushed: Manifest, named: Named
) -> None:
    first = image_index.images(json.loads(pushed.body))
    passed("tf-cpu", first["linux/amd64"])
    passed("tf-cpu-arm64", first["linux/arm64"])
    made = promotion.promote(named, repository, pushed.digest)
    assert set(made["tags"]) == {"tf-cpu", VERSION}
    assert stored.tags["tf-cpu"] == stored.tags[VERSION] == pushed.digest
    other = platform_index.make(repository, {AMD64: first["linux/amd64"]})
    repository.put(other.manifest, other.tag)
    promotion.promote(named, repository, other.tag)
    assert stored.tags["tf-cpu"] == other.manifest.digest
    assert promotion.rollback(named.name, repository)["tags"]["tf-cpu"] == [pushed.digest, other.manifest.digest]
    assert stored.tags["tf-cpu"] == pushed.digest


def test_an_index_is_not_promoted_if_one_of_its_images_did_not_pass(
    stored: Registry, repository: Repository, pushed: Manifest, named: Named
) -> None:
    passed("tf-cpu", image_index.images(json.loads(pushed.body))["linux/amd64"])
    with pytest.raises(UserError) as error:
        promotion.promote(named, repository, pushed.digest)
    assert "(linux/arm64) never passed verify and smoke" in str(error.value)
    assert "tf-cpu" not in stored.tags


def test_the_index_that_is_promoted_by_default_is_that_of_this_hosts_images(
    stored: Registry, pushed: Manifest, fake_engine: FakeEngine, trainyard: Command
) -> None:
    images = image_index.images(json.loads(pushed.body))
    local = {"trainyard:tf-cpu": images["linux/amd64"], "trainyard:tf-cpu-arm64": images["linux/arm64"]}
    for name, digest in local.items():
        fake_engine.add(name, digest=digest)
        passed(name.partition(":")[2], digest)
    status, _, err = trainyard("promote", "tf-cpu", f"--registry={stored.host}/ml")
    assert status == 0, err
    assert stored.tags["tf-cpu"] == pushed.digest


def test_an_image_that_did_not_pass_is_in_no_index(fake_engine: FakeEngine, named: Named) -> None:
    fake_engine.add("trainyard:tf-cpu", digest="sha256:1")
    fake_engine.add("trainyard:tf-cpu-arm64", digest="sha256:2")
    passed("tf-cpu", "sha256:1")
    state.record(state_folder() / "tf-cpu-arm64", "verify", "sha256:2", {"passed": True})
    assert platform_index.images_of_host(named, Context()) == {AMD64: "sha256:1"}


# --- an index of images that several hosts pushed ---------------------------------------------------------------------


def verified(stored: Registry, digest: str) -> str:
    """Attach claims that an image passed, as a push from another host does; the image's digest."""
    repository = Repository(f"{stored.host}/ml/trainyard")
    claims.attach(
        repository, repository.existing(digest), None, [one for one in CLAIMS if one.kind in ("verify", "smoke")]
    )
    return digest


@pytest.fixture
def index(trainyard: Command, stored: Registry) -> Command:
    """Run ``trainyard image-index tf-cpu`` with the given images: exit status, stdout and stderr."""

    def run(*images: str) -> tuple[int, str, str]:
        return trainyard("image-index", "tf-cpu", f"--registry={stored.host}/ml", "--json", IMAGES=" ".join(images))

    return run


def test_images_that_several_hosts_pushed_become_one_index(stored: Registry, index: Command) -> None:
    one, other = verified(stored, put(stored, AMD64)), verified(stored, put(stored, ARM64))
    status, out, err = index(one, f"{VERSION}-20261122-01234567-arm64")
    made = json.loads(out)
    assert status == 0 and "has no" not in err
    assert made["platforms"] == ["linux/amd64", "linux/arm64"]
    assert stored.tags[made["tag"].rpartition(":")[2]] == made["digest"]
    assert image_index.images(json.loads(stored.manifests[made["digest"]][1])) == {
        "linux/amd64": one,
        "linux/arm64": other,
    }
    again = json.loads(index(other, one)[1])
    assert (again["digest"], again["already_there"]) == (made["digest"], True)


def test_a_platform_that_failed_elsewhere_is_named_and_not_in_the_index(stored: Registry, index: Command) -> None:
    """A job that failed has no digest: the variable of the next job then has one less."""
    status, out, err = index("", verified(stored, put(stored, AMD64)))
    assert status == 0 and json.loads(out)["platforms"] == ["linux/amd64"]
    assert "the image index has no linux/arm64: no image for it passed" in err
    assert "'TRAINYARD_ARCH=arm64 trainyard image tf-cpu' makes one" in err


def test_an_index_of_one_host_and_an_image_of_another_become_one_index(
    stored: Registry, repository: Repository, index: Command
) -> None:
    """Both ran `make push`, one of them without ARCH."""
    first = platform_index.make(repository, {AMD64: verified(stored, put(stored, AMD64))})
    repository.put(first.manifest, first.tag)
    status, out, _ = index(first.tag, verified(stored, put(stored, ARM64)))
    assert status == 0 and json.loads(out)["platforms"] == ["linux/amd64", "linux/arm64"]


@pytest.mark.parametrize(
    ("images", "says"),
    [
        (lambda stored: [put(stored, AMD64)], "(linux/amd64) never passed verify and smoke"),
        (lambda stored: [verified(stored, put(stored, AMD64, **{"io.trainyard.target": "cpu"}))], "target 'cpu', not"),
        (lambda stored: [verified(stored, put(stored, AMD64, **{"io.trainyard.tested": "none"}))], "--code-only"),
        (lambda stored: [verified(stored, put(stored, AMD64, architecture="riscv64"))], "is for linux/riscv64, and"),
        (
            lambda stored: [verified(stored, put(stored, AMD64, **{"org.label": label})) for label in "ab"],
            "are both for linux/amd64: give one of them",
        ),
        (
            lambda stored: [
                verified(stored, put(stored, AMD64)),
                verified(stored, put(stored, ARM64, **{"io.trainyard.framework": "tensorflow==2.20.0"})),
            ],
            "the images of the image index differ: io.trainyard.framework",
        ),
        (lambda stored: ["nothing"], "has no nothing: run 'trainyard push tf-cpu' where it was built"),
        (lambda stored: [], "no image of tf-cpu to make an index of"),
    ],
)
def test_images_that_cannot_share_an_index_are_one_line(
    stored: Registry, index: Command, images: Callable[[Registry], list[str]], says: str
) -> None:
    given = images(stored)
    before = dict(stored.tags)
    status, out, err = index(*given)
    assert (status, out) == (2, "") and says in err and len(err.splitlines()) == 1
    assert stored.tags == before, "nothing is pushed"


def test_the_index_of_a_promotion_to_another_repository_brings_its_images(
    stored: Registry, repository: Repository, pushed: Manifest
) -> None:
    other = Repository(f"{stored.host}/prod/trainyard")
    other.mount(pushed, repository)
    paths = [line for line in stored.requests if line.startswith("PUT /v2/prod/trainyard/manifests/")]
    assert sorted(path.rpartition("/")[2] for path in paths) == sorted(
        image_index.images(json.loads(pushed.body)).values()
    )


def test_a_registry_that_lost_an_image_is_one_line(repository: Repository) -> None:
    with pytest.raises(registry.StepFailed, match="has no sha256:0, which it must have: push it again"):
        repository.existing("sha256:0")


def test_the_only_image_of_a_local_index_is_read_whatever_its_architecture() -> None:
    """An index with attestations, as `docker build` makes it on a machine that Trainyard has no name for."""
    entry = {"digest": "sha256:c", "platform": {"os": "linux", "architecture": "riscv64"}}
    assert image_store._image_of({"manifests": [entry, ATTESTATION]}, AMD64) == "sha256:c"
    assert image_store._image_of(BOTH, ARM64) == "sha256:b"
    assert image_store._image_of({"config": {}, "layers": []}, AMD64) is None


def test_a_target_without_the_lock_of_another_platform_is_audited(write_spec: Callable[..., str]) -> None:
    """A spec that extends a target that got another platform since."""
    spec = model.load(write_spec("summary: x\nextends: tf-cpu\n"), "amd64")
    pins_of_amd64 = locks.pins(framework="tensorflow-cpu==2.21.0", requirements="einops==0.8.2")
    spec = spec.with_lock(locks.lock(*pins_of_amd64, python=spec.python_version))
    pins = sources.pins(spec)
    assert pins["einops"] == {"0.8.2"} and "tensorflow-cpu" in pins
