"""Push to a real registry: uploads, refusals and messages."""

from __future__ import annotations

import base64
import json
import os
import secrets
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import requests
from testcontainers.community.registry import DockerRegistryContainer

from tests.engine import ENGINE
from tests.image.registry import running
from trainyard.common.errors import StepFailed, UserError
from trainyard.common.settings import ROOT
from trainyard.image import recipes
from trainyard.lint.image import verify
from trainyard.oci import layers, registry
from trainyard.oci.reference import Reference
from trainyard.recipe import FILE, PATH
from trainyard.release import publish, sources
from trainyard.release.publish import Source
from trainyard.spec import state
from trainyard.spec.model import load

pytestmark = pytest.mark.concurrent

#: Media types of `docker buildx bake` and of `buildx build --load`.
MANIFESTS = "application/vnd.oci.image.manifest.v1+json, application/vnd.docker.distribution.manifest.v2+json"
TAG = "tf-cpu-2.21.0-20261120-00000000"


@pytest.fixture(scope="module")
def server() -> Iterator[DockerRegistryContainer]:
    with running.container() as started:
        yield started


@pytest.fixture
def address(server: DockerRegistryContainer, request: pytest.FixtureRequest) -> str:
    """Where to push: a repository for this test in a registry with plain HTTP on localhost."""
    return f"{running.address(server)}/{request.node.name.replace('_', '-')[:60]}"


@pytest.fixture
def source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Source:
    """A target without results."""
    monkeypatch.setenv("TRAINYARD_BUILD", str(tmp_path / "records"))
    return sources.of(load("tf-cpu"))


@pytest.fixture
def make(tmp_path: Path, source: Source) -> Iterator[Callable[..., str]]:
    """Make an image of a big and a small layer that passed the steps ``passed``; its reference."""
    made: list[str] = []

    def image(name: str, *, small: str = "small", tag: str = TAG, passed: tuple[str, ...] = ("verify", "smoke")) -> str:
        folder = tmp_path / name
        folder.mkdir()
        big = tmp_path / "big"
        if not big.exists():
            big.write_bytes(os.urandom(3_000_000))
        (folder / "big").write_bytes(big.read_bytes())
        (folder / FILE).write_text(recipes.make(load("tf-cpu")).text(), encoding="utf-8")
        (folder / "small").write_text(small, encoding="utf-8")
        text = f"FROM scratch AS lower\nCOPY big /big\nCOPY {FILE} {PATH}\nFROM scratch\nCOPY --from=lower / /\n"
        text += f"COPY small /small\nLABEL org.opencontainers.image.version={tag}\n"
        (folder / "Dockerfile").write_text(text, encoding="utf-8")
        reference = f"trainyard-test:{name}"
        command = ["build", "--quiet", "--load", "--provenance=false", f"--tag={reference}", str(folder)]
        ENGINE.buildx(*command, environment={"SOURCE_DATE_EPOCH": "1"})
        made.append(reference)
        facts = {"passed": True} | verify.described(layers.read(ENGINE, reference))
        for step in passed:
            state.record(source.kept, step, ENGINE.digest(reference), facts)
        return reference

    yield image
    for reference in made:
        ENGINE.client.images.remove(reference, force=True)


def uploads(server: DockerRegistryContainer) -> int:
    """Number of blobs that were uploaded to the registry so far, by its log.

    The engine writes the log with a delay, but in order: it is complete up to a request that is made here.
    """
    path = f"/v2/{secrets.token_hex(8)}/tags/list"
    requests.get(f"http://{running.address(server)}{path}", timeout=60)
    end = time.monotonic() + 60
    while path not in (log := server.get_logs()[0].decode()):
        assert time.monotonic() < end, f"no {path} in the log: {log[-2000:]}"
        time.sleep(0.1)
    return sum("PUT /v2/" in line and "/blobs/uploads/" in line for line in log.splitlines())


def at_registry(pushed: dict[str, Any]) -> tuple[str, dict[str, Any], int]:
    """Digest, content and length of the manifest that the registry has for the pushed tag."""
    named = Reference.parse(pushed["tag"])
    url = f"http://{named.registry}/v2/{named.repository}/manifests/{named.tag}"
    answer = requests.get(url, headers={"Accept": MANIFESTS}, timeout=10)
    answer.raise_for_status()
    return answer.headers["Docker-Content-Digest"], answer.json(), len(answer.content)


def test_a_push_uploads_the_digest_that_passed_and_reports_every_byte(
    source: Source, make: Callable[..., str], server: DockerRegistryContainer, address: str
) -> None:
    reference = make("whole")
    before = uploads(server)
    pushed = publish.push(source, address, reference=reference)
    digest, manifest, length = at_registry(pushed)
    assert pushed["digest"] == ENGINE.digest(reference) == digest
    assert pushed["reference"] == f"{address}/trainyard@{digest}" and pushed["tag"] == f"{address}/trainyard:{TAG}"
    sizes = [layer["size"] for layer in manifest["layers"]] + [manifest["config"]["size"]]
    assert [blob["size"] for blob in pushed["blobs"]] == sizes
    assert all(blob["uploaded"] for blob in pushed["blobs"])
    assert pushed["bytes_uploaded"] == sum(sizes) + length
    assert uploads(server) - before == len(sizes)
    assert ENGINE.image(reference, made_by="").tags == [reference], "the registry's tag is not kept locally"


def test_a_second_push_uploads_nothing(
    source: Source, make: Callable[..., str], server: DockerRegistryContainer, address: str
) -> None:
    reference = make("again")
    publish.push(source, address, reference=reference)
    before = uploads(server)
    pushed = publish.push(source, address, reference=reference)
    assert pushed["already_there"] and pushed["bytes_uploaded"] == 0
    assert not any(blob["uploaded"] for blob in pushed["blobs"]) and uploads(server) == before


def test_after_a_small_change_only_the_small_layer_is_uploaded(
    source: Source, make: Callable[..., str], server: DockerRegistryContainer, address: str
) -> None:
    publish.push(source, address, reference=make("first"))
    before = uploads(server)
    pushed = publish.push(source, address, reference=make("second", small="changed", tag=TAG.replace("00", "11")))
    assert [blob["uploaded"] for blob in pushed["blobs"]] == [False, True, True], (
        "big layer, small layer, configuration"
    )
    assert 0 < pushed["bytes_uploaded"] < 5_000 and not pushed["already_there"]
    assert uploads(server) - before == 2


@pytest.mark.parametrize(("passed", "missing"), [((), "verify"), (("verify",), "smoke"), (("smoke",), "verify")])
def test_a_digest_that_did_not_pass_is_refused(
    source: Source,
    make: Callable[..., str],
    server: DockerRegistryContainer,
    address: str,
    passed: tuple[str, ...],
    missing: str,
) -> None:
    before = uploads(server)
    with pytest.raises(UserError, match=f"never passed '{missing}': run 'trainyard image tf-cpu'"):
        publish.push(source, address, reference=make(f"unfit-{'-'.join(passed)}", passed=passed))
    assert uploads(server) == before


def test_an_immutable_tag_is_never_moved(source: Source, make: Callable[..., str], address: str) -> None:
    first = publish.push(source, address, reference=make("owner"))
    with pytest.raises(UserError, match="immutable tags are never moved") as refused:
        publish.push(source, address, reference=make("intruder", small="other content"))
    assert first["digest"][:19] in str(refused.value) and "\n" not in str(refused.value)
    assert at_registry(first)[0] == first["digest"]


def test_an_unreachable_registry_is_one_line(source: Source, make: Callable[..., str]) -> None:
    reference = make("nowhere")
    for address in ("localhost:9/team", "registry.invalid/team"):
        with pytest.raises(StepFailed, match="cannot be reached: check the address and the network") as failed:
            publish.push(source, address, reference=reference)
        assert "\n" not in str(failed.value)


def test_a_registry_with_a_full_disk_is_one_line_and_leaves_no_tag(source: Source, make: Callable[..., str]) -> None:
    reference = make("large")
    with running.container(disk="1m") as small:
        address = f"{running.address(small)}/team"
        with pytest.raises(StepFailed, match="its disk may be full") as failed:
            publish.push(source, address, reference=reference)
        assert "\n" not in str(failed.value) and len(str(failed.value)) < 400
        assert registry.digest_of(ENGINE, f"{address}/trainyard:{TAG}") is None
    assert ENGINE.image(reference, made_by="").tags == [reference]


def run(registry_address: str, config: Path) -> subprocess.CompletedProcess[str]:
    """``trainyard push tf-cpu`` with the Docker configuration ``config``."""
    command = [sys.executable, "-m", "trainyard", "push", "tf-cpu", "--json"]
    environment = os.environ | {"DOCKER_CONFIG": str(config), "TRAINYARD_REGISTRY": registry_address}
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)


def log_in(folder: Path, host: str, password: str) -> Path:
    """A Docker configuration as `docker login` writes it."""
    folder.mkdir()
    auth = base64.b64encode(f"someone:{password}".encode()).decode()
    (folder / "config.json").write_text(json.dumps({"auths": {host: {"auth": auth}}}), encoding="utf-8")
    return folder


def test_the_image_that_passed_is_pushed_to_a_registry_with_credentials(
    built_image: Callable[[str], str], tmp_path: Path
) -> None:
    digest = ENGINE.digest(built_image("tf-cpu"))
    with running.container(username="someone", password="right") as guarded:
        host = running.address(guarded)
        for name, config in {
            "none": tmp_path,
            "wrong": log_in(tmp_path / "wrong", host, "wrong"),
        }.items():
            refused = run(f"{host}/team", config)
            assert (refused.returncode, refused.stdout) == (1, ""), name
            assert f"push: {host} refuses the credentials: run 'docker login {host}'" in refused.stderr
            assert len(refused.stderr.strip().splitlines()) == 1, refused.stderr
        done = run(f"{host}/team", log_in(tmp_path / "right", host, "right"))
        assert done.returncode == 0, done.stderr
        assert "no known vulnerability, by a snapshot that is" in done.stderr
        pushed = json.loads(done.stdout)["images"][load("tf-cpu").platform]
        assert pushed["digest"] == digest and pushed["reference"] == f"{host}/team/trainyard@{digest}"
        assert {"wheel-tensorflow-cpu", "wheels-1", "trainers", "launcher"} <= {
            blob["name"] for blob in pushed["blobs"]
        }
        assert all(blob["uploaded"] for blob in pushed["blobs"])
