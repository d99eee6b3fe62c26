"""Tags at a real registry, moved by digest; and Artifact Registry, with the real gcloud against a fake service."""

from __future__ import annotations

import contextlib
import http.server
import io
import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import requests
from cryptography.hazmat.primitives.asymmetric import ec
from tests.claims import CLAIMS
from tests.engine import ENGINE
from tests.fakes.cloud_build import CloudBuild
from tests.image.registry import running
from tests.published_images import artifacts_of

from trainyard.common.errors import StepFailed, UserError
from trainyard.common.settings import ROOT, state_folder
from trainyard.image import recipes
from trainyard.oci import referrers, registry, statements
from trainyard.oci.registry import Manifest, Repository
from trainyard.recipe import Named
from trainyard.release import artifact_registry, claims, predicates, promotion
from trainyard.release import cloud_build_steps as cloud_step
from trainyard.release.cloud_build_steps import Substitutions
from trainyard.release.keys import KeySigner
from trainyard.release.promotion import Demanded
from trainyard.spec import state
from trainyard.spec.model import load

pytestmark = pytest.mark.concurrent


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    """host:port of a real registry."""
    with running.container() as started:
        yield running.address(started)


@pytest.fixture
def address(server: str, request: pytest.FixtureRequest) -> str:
    return f"{server}/{request.node.name.replace('_', '-')[:50]}"


@pytest.fixture
def named() -> Named:
    return recipes.named(load("tf-cpu"))


@pytest.fixture(autouse=True)
def own_records(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRAINYARD_BUILD", str(tmp_path / "state"))


@pytest.fixture
def place(address: str, own_records: None) -> Repository:
    return Repository(f"{address}/trainyard")


def pushed(address: str, tag: str, *, target: str = "tf-cpu", version: str = "2.21.0") -> str:
    """Push an image of a few bytes with the label of ``target``; its digest at the registry."""
    archive = io.BytesIO()
    with tarfile.open(fileobj=archive, mode="w") as tar:
        tar.addfile(tarfile.TarInfo(tag))
    labels = [f"LABEL io.trainyard.target={target}", f"LABEL io.trainyard.framework=tensorflow=={version}"]
    api = ENGINE.client.api
    api.import_image_from_data(archive.getvalue(), f"{address}/trainyard", tag, labels)
    for _ in registry.push(ENGINE, f"{address}/trainyard:{tag}"):
        pass
    api.remove_image(f"{address}/trainyard:{tag}")
    found = registry.digest_of(ENGINE, f"{address}/trainyard:{tag}")
    assert found
    return found


def passed(digest: str) -> None:
    for step in ("verify", "smoke"):
        state.record(state_folder() / "tf-cpu", step, digest, {"passed": True})


def attach_results(place: Repository, digest: str) -> None:
    """Attach claims that an image passed, as a push does."""
    results = [one for one in CLAIMS if one.kind in ("verify", "smoke")]
    claims.attach(place, place.existing(digest), None, results)


def test_promote_moves_both_tags_by_digest_and_rollback_returns(address: str, place: Repository, named: Named) -> None:
    first, second = pushed(address, "one"), pushed(address, "two")
    passed(first)
    made = promotion.promote(named, place, "one")
    assert made["tags"] == {"tf-cpu-2.21.0": None, "tf-cpu": None}
    passed(second)
    made = promotion.promote(named, place, second)
    assert made["tags"] == {"tf-cpu-2.21.0": first, "tf-cpu": first}
    for tag in made["tags"]:
        assert registry.digest_of(ENGINE, f"{address}/trainyard:{tag}") == second
    assert promotion.promote(named, place, "two")["tags"] == {}, "a second time there is nothing to do"
    promotion.rollback(named.name, place)
    for tag in ("tf-cpu", "tf-cpu-2.21.0"):
        assert registry.digest_of(ENGINE, f"{address}/trainyard:{tag}") == first
    assert registry.digest_of(ENGINE, f"{address}/trainyard:two") == second, "immutable tags stay"
    promotion.rollback(named.name, place)
    assert registry.digest_of(ENGINE, f"{address}/trainyard:tf-cpu") == second, "a second rollback undoes the first"


def test_a_digest_that_never_passed_is_refused(address: str, place: Repository, named: Named) -> None:
    pushed(address, "untested")
    with pytest.raises(UserError, match="never passed verify and smoke"):
        promotion.promote(named, place, "untested")
    assert Repository(f"{address}/trainyard").tags() == ["untested"]


def test_claims_at_the_registry_are_enough_and_are_about_one_digest(
    address: str, place: Repository, named: Named
) -> None:
    """As after Cloud Build: this host has no results."""
    tested, untested = pushed(address, "tested"), pushed(address, "untested")
    attach_results(place, tested)
    assert promotion.promote(named, place, "tested")["digest"] == tested
    of_another = artifacts_of(place, tested, [statements.PLAIN]).values()
    referrers.attach(place, place.existing(untested), list(of_another))
    with pytest.raises(UserError, match="never passed verify and smoke"):
        promotion.promote(named, place, "untested")


def test_demanded_claims_follow_the_image_to_the_floating_tags(address: str, place: Repository, named: Named) -> None:
    """At a registry without the referrers API."""
    digest = pushed(address, "one")
    passed(digest)
    signer = KeySigner(ec.generate_private_key(ec.SECP256R1()))
    demanded = Demanded(signer.trust, ["sbom", "smoke"], signer)
    floating = Repository(f"{address}-floating/trainyard")
    claims.attach(place, place.existing(digest), signer, [one for one in CLAIMS if one.kind == "sbom"])
    with pytest.raises(StepFailed, match=f"{digest} has no claim 'smoke' that is signed with this key"):
        promotion.promote(named, place, "one", to=f"{address}-floating", demanded=demanded)
    assert floating.tags() == []
    claims.attach(place, place.existing(digest), signer, CLAIMS)
    promotion.promote(named, place, "one", to=f"{address}-floating", demanded=demanded)
    assert registry.digest_of(ENGINE, f"{floating.name}:tf-cpu") == digest
    found = claims.require(floating, digest, signer.trust, [*predicates.ABOUT_IMAGES, "summary"])
    assert len(found) == len(predicates.ABOUT_IMAGES) + 1


def test_another_targets_image_is_refused(address: str, place: Repository, named: Named) -> None:
    passed(pushed(address, "other", target="xla"))
    with pytest.raises(UserError, match="is an image of target 'xla', not 'tf-cpu'"):
        promotion.promote(named, place, "other")


def test_a_missing_image_says_what_to_do(address: str, place: Repository, named: Named) -> None:
    with pytest.raises(UserError, match="run 'trainyard push tf-cpu' first"):
        promotion.promote(named, place, "nothing")
    with pytest.raises(UserError, match="there is no previous image"):
        promotion.rollback(named.name, place)


def test_floating_tags_may_be_in_another_repository(address: str, place: Repository, named: Named) -> None:
    """If the first one's tags are immutable; blobs are mounted, not transferred."""
    digest = pushed(address, "one")
    passed(digest)
    promotion.promote(named, place, "one", to=f"{address}-floating")
    assert registry.digest_of(ENGINE, f"{address}-floating/trainyard:tf-cpu") == digest
    assert Repository(f"{address}/trainyard").tags() == ["one"]
    assert ENGINE.images(f"{address}-floating/trainyard") == []


@pytest.mark.parametrize("hosts", ["one host", "two hosts"])
def test_two_simultaneous_promotes_leave_one_image_under_both_tags(
    address: str, place: Repository, named: Named, hosts: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On one host a lock keeps them apart; of two hosts, both have written a tag before either writes the next one."""
    digests = [pushed(address, "one"), pushed(address, "two")]
    for digest in digests:
        passed(digest)
        attach_results(place, digest)
    put, both_wrote, waited = Repository.put, threading.Barrier(2), set[int]()

    def put_together(self: Repository, manifest: Manifest, version: str) -> str:
        answer = put(self, manifest, version)
        if version == "tf-cpu-2.21.0" and threading.get_ident() not in waited:
            waited.add(threading.get_ident())
            both_wrote.wait(timeout=60)
        return answer

    if hosts == "two hosts":
        monkeypatch.setattr(promotion, "_locked", lambda _: contextlib.nullcontext())
        monkeypatch.setattr(Repository, "put", put_together)
    ended: dict[str, str] = {}

    def go(digest: str) -> None:
        try:
            promotion.promote(named, place, digest)
            ended[digest] = "promoted"
        except StepFailed as error:
            ended[digest] = str(error)

    threads = [threading.Thread(target=go, args=[digest]) for digest in digests]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    now = {registry.digest_of(ENGINE, f"{address}/trainyard:{tag}") for tag in ("tf-cpu", "tf-cpu-2.21.0")}
    assert len(now) == 1 and now <= set(digests), ended
    assert ended[str(now.pop())] == "promoted"
    assert all(text == "promoted" or "another process moved them at the same time" in text for text in ended.values())


def test_immutable_tags_are_reported_with_the_way_out(server: str, address: str, named: Named) -> None:
    """The real registry has no immutable tags: a proxy in front of it refuses as Artifact Registry does."""
    digest = pushed(address, "one")
    passed(digest)

    class Proxy(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            answer = requests.get(f"http://{server}{self.path}", headers=dict(self.headers), timeout=10)
            self.reply(answer.status_code, answer.content, answer.headers["Content-Type"])

        def do_PUT(self) -> None:
            message = f"Cannot update tag {self.path.rpartition('/')[2]}. The repository has enabled tag immutability"
            errors = {"errors": [{"code": "MANIFEST_INVALID", "message": message}]}
            self.reply(400, json.dumps(errors).encode(), "application/json")

        def reply(self, status: int, body: bytes, kind: str) -> None:
            self.send_response(status)
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Proxy) as proxy:
        threading.Thread(target=proxy.serve_forever, daemon=True).start()
        place = Repository(f"127.0.0.1:{proxy.server_address[1]}/{address.partition('/')[2]}/trainyard")
        with pytest.raises(UserError, match=r"its tags are immutable, so 'tf-cpu-2.21.0' cannot be moved: .* '--to'$"):
            promotion.promote(named, place, "one")
        proxy.shutdown()
    assert Repository(f"{address}/trainyard").tags() == ["one"]


def test_the_last_step_of_a_cloud_build_promotes_if_promote_is_set(
    address: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    digest = pushed(address, "one")
    passed(digest)
    Substitutions().published.parent.mkdir(exist_ok=True)
    Substitutions().published.write_text(json.dumps({"tf-cpu": {"digest": digest}}), encoding="utf-8")
    cloud_step.promote(Substitutions(registry=address))
    assert Repository(f"{address}/trainyard").tags() == ["one"]
    cloud_step.promote(Substitutions(registry=address, promote="yes"))
    assert Repository(f"{address}/trainyard").tags() == ["one", "tf-cpu", "tf-cpu-2.21.0"]


def test_a_registry_with_credentials(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, named: Named) -> None:
    with running.container(username="someone", password="right") as started:
        where = running.address(started)
        monkeypatch.setenv("DOCKER_CONFIG", str(tmp_path))
        with pytest.raises(StepFailed, match="refuses the credentials: run 'docker login"):
            promotion.promote(named, Repository(f"{where}/team/trainyard"), "x")
        words = ["docker", "login", "--username=someone", "--password-stdin", where]
        subprocess.run(words, input="right", text=True, check=True, capture_output=True)
        with pytest.raises(UserError, match="has no x"):
            promotion.promote(named, Repository(f"{where}/team/trainyard"), "x")


def test_an_unreachable_registry_is_one_line(named: Named) -> None:
    with pytest.raises(StepFailed, match="cannot be reached") as refused:
        promotion.promote(named, Repository("127.0.0.1:9/team/trainyard"), "x")
    assert "\n" not in str(refused.value)


# --- Artifact Registry, with the real gcloud -------------------------------------------------------------------------


@pytest.fixture
def cloud(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[CloudBuild]:
    """The fake, in an environment that points gcloud to it."""
    with CloudBuild() as started:
        for name, value in started.environment(tmp_path).items():
            monkeypatch.setenv(name, value)
        monkeypatch.delenv("DOCKER_CONFIG", raising=False)
        yield started


PLACE = "us-central1-docker.pkg.dev/my-project/ml"
NAME = "projects/my-project/locations/us-central1/repositories/ml"


@pytest.mark.needs("gcloud")
def test_a_repository_is_created_once_with_its_cleanup_policy(cloud: CloudBuild) -> None:
    assert artifact_registry.create(PLACE, immutable=True) is True
    made = cloud.repositories[NAME]
    assert made["format"] == "DOCKER"
    assert made["dockerConfig"] == {"immutableTags": True}
    condition = made["cleanupPolicies"]["delete-untagged"]["condition"]
    assert (condition["tagState"], float(condition["olderThan"].removesuffix("s"))) == ("UNTAGGED", 30 * 86400)
    assert made["cleanupPolicies"]["keep-newest"]["mostRecentVersions"] == {"keepCount": 20}
    assert made["cleanupPolicyDryRun"] is False
    assert artifact_registry.create(PLACE, immutable=True) is False, "a second run changes nothing"
    with pytest.raises(UserError, match="exists, and its tags are immutable"):
        artifact_registry.create(PLACE, immutable=False)


@pytest.mark.needs("gcloud")
def test_a_refused_repository_is_one_line(cloud: CloudBuild) -> None:
    cloud.denied.add(".*/repositories")
    with pytest.raises(StepFailed, match=r"PERMISSION_DENIED|Permission denied") as refused:
        artifact_registry.create(PLACE, immutable=False)
    assert "\n" not in str(refused.value)
    assert not cloud.repositories


@pytest.mark.parametrize("address", ["localhost:5000/ml", "us-central1-docker.pkg.dev/my-project", "gcr.io/p/r"])
def test_an_address_of_another_registry_is_refused(address: str) -> None:
    with pytest.raises(UserError, match=r"is not <location>-docker\.pkg\.dev/<project>/<repository>"):
        artifact_registry.create(address, immutable=False)


@pytest.mark.needs("gcloud")
def test_login_sets_gcloud_as_credential_helper(cloud: CloudBuild, tmp_path: Path) -> None:
    """Promote uses the credentials that it returns."""
    environment = os.environ | {"TRAINYARD_REGISTRY": PLACE}
    command = [sys.executable, "-m", "trainyard", "login"]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    config = json.loads((tmp_path / ".docker" / "config.json").read_text())
    assert config["credHelpers"] == {"us-central1-docker.pkg.dev": "gcloud"}
    helper = shutil.which("docker-credential-gcloud")
    assert helper
    found = subprocess.run(
        [helper, "get"], input="us-central1-docker.pkg.dev", capture_output=True, text=True, check=True
    )
    assert json.loads(found.stdout)["Secret"] == "fake-token"
    assert Repository(f"{PLACE}/trainyard")._credentials() == ("_dcgcloud_token", "fake-token")


def test_login_elsewhere_says_docker_login(server: str) -> None:
    environment = os.environ | {"TRAINYARD_REGISTRY": f"{server}/team"}
    command = [sys.executable, "-m", "trainyard", "login"]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert re.fullmatch(
        rf"login: {server} is not a host of Artifact Registry: run 'docker login {server}'\n", done.stderr
    )


def test_the_registry_of_these_tests_is_a_real_one(server: str) -> None:
    assert requests.get(f"http://{server}/v2/", timeout=10).headers["Docker-Distribution-Api-Version"] == "registry/2.0"
