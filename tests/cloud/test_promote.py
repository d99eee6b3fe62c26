"""Tags at a real registry, moved by digest; and Artifact Registry's repositories, by the real gcloud against a fake."""

from __future__ import annotations

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

from scripts import engine, promote, repository, rollback, state
from scripts.cli import ROOT, StepFailed, UserError
from scripts.cloud import config as cloud_config
from scripts.cloud import step as cloud_step
from scripts.fakes.cloud_build import CloudBuild
from scripts.published import registry, tags
from scripts.published.tags import Repository
from scripts.spec import Spec, load
from tests.image.registry import running


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    """host:port of a real registry."""
    with running.container() as started:
        yield running.address(started)


@pytest.fixture
def address(server: str, request: pytest.FixtureRequest) -> str:
    return f"{server}/{request.node.name.replace('_', '-')[:50]}"


@pytest.fixture
def spec() -> Spec:
    return load("tf-cpu")


@pytest.fixture(autouse=True)
def own_records(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(state, "STATE", tmp_path / "state")


def pushed(address: str, tag: str, *, target: str = "tf-cpu", version: str = "2.21.0") -> str:
    """Push an image of a few bytes that says it is of ``target``; its digest at the registry."""
    archive = io.BytesIO()
    with tarfile.open(fileobj=archive, mode="w") as tar:
        tar.addfile(tarfile.TarInfo(tag))
    labels = [f"LABEL io.trainyard.target={target}", f"LABEL io.trainyard.framework=tensorflow=={version}"]
    api = engine.client().api
    api.import_image_from_data(archive.getvalue(), f"{address}/trainyard", tag, labels)
    for _ in registry.push(f"{address}/trainyard:{tag}"):
        pass
    api.remove_image(f"{address}/trainyard:{tag}")
    found = registry.digest_of(f"{address}/trainyard:{tag}")
    assert found
    return found


def passed(digest: str) -> None:
    for step in ("verify", "smoke"):
        state.record("tf-cpu", step, digest, {"passed": True})


def test_promote_moves_both_tags_by_digest_and_rollback_returns(address: str, spec: Spec) -> None:
    first, second = pushed(address, "one"), pushed(address, "two")
    passed(first)
    made = promote.promote(spec, address, image="one")
    assert made["tags"] == {"tf-cpu-2.21.0": None, "tf-cpu": None}
    passed(second)
    made = promote.promote(spec, address, image=second)
    assert made["tags"] == {"tf-cpu-2.21.0": first, "tf-cpu": first}
    for tag in made["tags"]:
        assert registry.digest_of(f"{address}/trainyard:{tag}") == second
    assert promote.promote(spec, address, image="two")["tags"] == {}, "a second time there is nothing to do"
    rollback.rollback(spec, address)
    for tag in ("tf-cpu", "tf-cpu-2.21.0"):
        assert registry.digest_of(f"{address}/trainyard:{tag}") == first
    assert registry.digest_of(f"{address}/trainyard:two") == second, "immutable tags stay"
    rollback.rollback(spec, address)
    assert registry.digest_of(f"{address}/trainyard:tf-cpu") == second, "a second rollback undoes the first"


def test_a_digest_that_never_passed_is_refused(address: str, spec: Spec) -> None:
    pushed(address, "untested")
    with pytest.raises(UserError, match="never passed verify and smoke"):
        promote.promote(spec, address, image="untested")
    assert Repository(f"{address}/trainyard").tags() == ["untested"]


def test_a_record_beside_the_image_is_enough_and_is_about_one_digest(address: str, spec: Spec) -> None:
    """As after Cloud Build: this host has no record of its own."""
    tested, untested = pushed(address, "tested"), pushed(address, "untested")
    tags.attest(f"{address}/trainyard", tested)
    assert promote.promote(spec, address, image="tested")["digest"] == tested
    place = Repository(f"{address}/trainyard")
    forged = place.manifest(tags.record_tag(tested))
    assert forged
    place.put(forged, tags.record_tag(untested))
    with pytest.raises(UserError, match="never passed verify and smoke"):
        promote.promote(spec, address, image="untested")


def test_another_targets_image_is_refused(address: str, spec: Spec) -> None:
    passed(pushed(address, "other", target="xla"))
    with pytest.raises(UserError, match="is an image of target 'xla', not 'tf-cpu'"):
        promote.promote(spec, address, image="other")


def test_an_image_that_is_not_there_says_what_to_do(address: str, spec: Spec) -> None:
    with pytest.raises(UserError, match="run 'make push TARGET=tf-cpu' first"):
        promote.promote(spec, address, image="nothing")
    with pytest.raises(UserError, match="there is nothing to go back to"):
        rollback.rollback(spec, address)


def test_moving_tags_may_live_in_a_repository_of_their_own(address: str, spec: Spec) -> None:
    """Where the first one's tags are immutable; no blob travels through this host."""
    digest = pushed(address, "one")
    passed(digest)
    promote.promote(spec, address, image="one", to=f"{address}-moving")
    assert registry.digest_of(f"{address}-moving/trainyard:tf-cpu") == digest
    assert Repository(f"{address}/trainyard").tags() == ["one"]
    assert engine.client().images.list(f"{address}-moving/trainyard") == []


def test_two_promotes_at_once_leave_one_whole_image_under_both_tags(address: str, spec: Spec) -> None:
    digests = [pushed(address, "one"), pushed(address, "two")]
    for name, digest in zip(("one", "two"), digests, strict=True):
        passed(digest)
        tags.attest(f"{address}/trainyard", digest)
        assert name
    failures: list[Exception] = []

    def go(digest: str) -> None:
        try:
            promote.promote(spec, address, image=digest)
        except Exception as error:
            failures.append(error)

    threads = [threading.Thread(target=go, args=[digest]) for digest in digests]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
    for tag in ("tf-cpu", "tf-cpu-2.21.0"):
        assert registry.digest_of(f"{address}/trainyard:{tag}") in digests


def test_a_repository_with_immutable_tags_says_where_moving_ones_go(server: str, address: str, spec: Spec) -> None:
    """The real registry has no such switch: before it stands a door that refuses as Artifact Registry does."""
    digest = pushed(address, "one")
    passed(digest)

    class Door(http.server.BaseHTTPRequestHandler):
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

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Door) as door:
        threading.Thread(target=door.serve_forever, daemon=True).start()
        place = f"127.0.0.1:{door.server_address[1]}/{address.partition('/')[2]}"
        with pytest.raises(UserError, match=r"its tags are immutable, so 'tf-cpu-2.21.0' cannot move: .* TO="):
            promote.promote(spec, place, image="one")
        door.shutdown()
    assert Repository(f"{address}/trainyard").tags() == ["one"]


def test_the_last_step_of_a_cloud_build_promotes_if_it_is_told_to(
    address: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    digest = pushed(address, "one")
    passed(digest)
    monkeypatch.setattr(cloud_step, "PUBLISHED", tmp_path / "published.json")
    cloud_step.PUBLISHED.write_text(json.dumps({"tf-cpu": {"digest": digest}}), encoding="utf-8")
    monkeypatch.setenv("REGISTRY", address)
    monkeypatch.setenv("PROMOTE", "")
    cloud_step.promote_published()
    assert Repository(f"{address}/trainyard").tags() == ["one"]
    monkeypatch.setenv("PROMOTE", "yes")
    cloud_step.promote_published()
    assert Repository(f"{address}/trainyard").tags() == ["one", "tf-cpu", "tf-cpu-2.21.0"]


def test_a_registry_that_asks_for_credentials(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, spec: Spec) -> None:
    with running.container(username="someone", password="right") as started:
        where = running.address(started)
        monkeypatch.setenv("DOCKER_CONFIG", str(tmp_path))
        with pytest.raises(StepFailed, match="refuses the credentials: run 'docker login"):
            promote.promote(spec, f"{where}/team", image="x")
        words = ["docker", "login", "--username=someone", "--password-stdin", where]
        subprocess.run(words, input="right", text=True, check=True, capture_output=True)
        with pytest.raises(UserError, match="has no x"):
            promote.promote(spec, f"{where}/team", image="x")


def test_a_registry_out_of_reach_is_one_line(spec: Spec) -> None:
    with pytest.raises(StepFailed, match="is out of reach") as refused:
        promote.promote(spec, "127.0.0.1:9/team", image="x")
    assert "\n" not in str(refused.value)


# --- Artifact Registry, by the real gcloud ---------------------------------------------------------------------------


@pytest.fixture
def cloud(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[CloudBuild]:
    """The fake, and an environment in which gcloud finds it."""
    with CloudBuild() as started:
        for name, value in started.environment(tmp_path).items():
            monkeypatch.setenv(name, value)
        monkeypatch.delenv("DOCKER_CONFIG", raising=False)
        yield started


PLACE = "us-central1-docker.pkg.dev/my-project/ml"
NAME = "projects/my-project/locations/us-central1/repositories/ml"


def test_a_repository_is_created_once_with_its_cleanup_policy(cloud: CloudBuild) -> None:
    assert repository.create(PLACE, immutable=True) is True
    made = cloud.repositories[NAME]
    assert made["format"] == "DOCKER"
    assert made["dockerConfig"] == {"immutableTags": True}
    condition = made["cleanupPolicies"]["delete-untagged"]["condition"]
    assert (condition["tagState"], cloud_config.seconds(condition["olderThan"])) == ("UNTAGGED", 30 * 86400)
    assert made["cleanupPolicies"]["keep-newest"]["mostRecentVersions"] == {"keepCount": 20}
    assert made["cleanupPolicyDryRun"] is False
    assert repository.create(PLACE, immutable=True) is False, "running it again is harmless"
    with pytest.raises(UserError, match="is there already, and its tags are immutable"):
        repository.create(PLACE, immutable=False)


def test_a_refused_repository_is_one_line(cloud: CloudBuild) -> None:
    cloud.denied.add(".*/repositories")
    with pytest.raises(StepFailed, match=r"PERMISSION_DENIED|Permission denied") as refused:
        repository.create(PLACE, immutable=False)
    assert "\n" not in str(refused.value)
    assert not cloud.repositories


@pytest.mark.parametrize("address", ["localhost:5000/ml", "us-central1-docker.pkg.dev/my-project", "gcr.io/p/r"])
def test_only_artifact_registrys_addresses_are_taken(address: str) -> None:
    with pytest.raises(UserError, match=r"is not <location>-docker\.pkg\.dev/<project>/<repository>"):
        repository.create(address, immutable=False)


def test_login_lets_docker_ask_gcloud(cloud: CloudBuild, tmp_path: Path) -> None:
    """And the credentials that come out of it are those that promote finds."""
    environment = os.environ | {"REGISTRY": PLACE}
    command = [sys.executable, "-m", "scripts.login"]
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
    environment = os.environ | {"REGISTRY": f"{server}/team"}
    command = [sys.executable, "-m", "scripts.login"]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert re.fullmatch(rf"login: {server} is no host of Artifact Registry: run 'docker login {server}'\n", done.stderr)


def test_the_registry_really_is_one(server: str) -> None:
    """What these tests stand on: the distribution API, not a stub."""
    assert requests.get(f"http://{server}/v2/", timeout=10).headers["Docker-Distribution-Api-Version"] == "registry/2.0"
