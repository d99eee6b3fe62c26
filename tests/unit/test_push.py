"""Push without a registry: the upload report, the meaning of errors, and retries."""

from __future__ import annotations

import contextlib
import http.server
import json
import re
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.fakes.engine import FakeEngine
from tests.fakes.registry import Registry, sha256

from trainyard.common.docker_engine import Engine
from trainyard.common.errors import StepFailed
from trainyard.image import recipes
from trainyard.oci import registry
from trainyard.oci.registry import Manifest, Repository
from trainyard.recipe import PATH, Pin
from trainyard.release import advisories, promotion, publish
from trainyard.release.advisories import Advisory, Snapshot
from trainyard.spec import state
from trainyard.spec.model import load

VERIFIED = {
    "layers": [
        {
            "stage": "wheel-torch",
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
    ("words", "meaning"),
    [
        ('Get "http://localhost:1/v2/": dial tcp 127.0.0.1:1: connect: connection refused', "cannot be reached"),
        ('Get "https://r.example/v2/": dial tcp: lookup r.example: no such host', "cannot be reached"),
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
        ('Get "https://r.example/v2/": http: server gave HTTP response to HTTPS client', "uses plain HTTP"),
        ("name unknown: Repository 'x' not found", "has no such repository"),
        ("manifest invalid: unknown media type of a layer", "build with 'trainyard image --compression gzip'"),
        ("something new", "r.example refused: something new"),
    ],
)
def test_an_error_is_explained_in_one_line(words: str, meaning: str) -> None:
    line = registry.meaning(words, "r.example/team/trainyard:tag")
    assert meaning in line and line.startswith("r.example") and "\n" not in line


def test_the_state_in_upload_urls_is_left_out() -> None:
    line = registry.meaning(
        f'PUT "http://h/v2/uploads/1?_state={"x" * 500}&digest=sha256%3Aabc": 500 Internal', "h:1/a:t"
    )
    assert "_state" not in line and len(line) < 300 and "500 Internal" in line


def test_every_blob_is_reported() -> None:
    parts = publish.blobs(VERIFIED)
    assert [part.name for part in parts] == ["wheel-torch", "trainers", "configuration"]
    report = publish.upload_report(parts, {"aaaa": "exists", "dddd4444": "uploaded"})
    assert [(blob["name"], blob["uploaded"]) for blob in report] == [
        ("wheel-torch", False),
        ("trainers", True),
        ("configuration", True),
    ]
    assert sum(blob["size"] for blob in report if blob["uploaded"]) == 77


def test_layers_are_also_known_by_their_uncompressed_digest() -> None:
    report = publish.upload_report(publish.blobs(VERIFIED), {"bbbb2222": "exists", "dddd4444": "exists"})
    assert [blob["uploaded"] for blob in report] == [False, False, True]


class Named:
    """An image as the engine's client describes it."""

    def __init__(self, identity: str, *names: str) -> None:
        self.id, self.attrs = identity, {"RepoDigests": list(names)}


def test_digests_of_other_repositories_do_not_count() -> None:
    first, second, third = (f"sha256:{digit * 64}" for digit in "123")
    image: Any = Named(first, f"host.io/a/trainyard@{second}", f"host.io/b/trainyard@{third}")
    assert publish.known_digests(image, "host.io/a/trainyard") == {first, second}


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("tf-cpux", "--registry=localhost:1/a"), "unknown target 'tf-cpux' (did you mean 'tf-cpu'?)"),
        (("tf-cpu",), "no registry to push to"),
        (("tf-cpu", "--registry=HTTP://x"), "leave out 'HTTP://'"),
    ],
)
def test_a_mistake_is_one_line(
    trainyard: Callable[..., tuple[int, str, str]], arguments: tuple[str, ...], words: str
) -> None:
    status, out, err = trainyard("push", *arguments)
    assert (status, out) == (2, "") and words in err and len(err.splitlines()) == 1


def vulnerable() -> bytes:
    """The recipe of an image with a package that has a known vulnerability."""
    recipe = recipes.make(load("tf-cpu", "amd64"))
    pin = Pin(name="pillow", version="0.1", sha256=("0" * 64,), size=1)
    layer = recipe.layers[-1].model_copy(update={"pins": (pin,)})
    return recipe.model_copy(update={"layers": (*recipe.layers[:-1], layer)}).text().encode()


@pytest.mark.parametrize(
    ("files", "status", "words"),
    [
        ({}, 2, r"has no /opt/trainyard/recipe\.json: run 'trainyard image tf-cpu'"),
        ({PATH: b"{"}, 2, r"its /opt/trainyard/recipe\.json is damaged \(.*\): run 'trainyard image tf-cpu'"),
        ({PATH: vulnerable()}, 1, r"pillow 0\.1: PLANTED-1 .*\('trainyard dev audit tf-cpu' lists all\)"),
    ],
    ids=["no recipe", "a damaged recipe", "a known vulnerability"],
)
def test_an_image_is_judged_by_its_recipe_before_anything_is_sent(
    fake_engine: FakeEngine,
    trainyard: Callable[..., tuple[int, str, str]],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    files: dict[str, bytes],
    status: int,
    words: str,
) -> None:
    """Its files may have changed since it was built: `git pull` makes no image safe, and none unsafe."""
    planted = Advisory("PLANTED-1", (), "pillow", "planted", "2026-11-01", ((("introduced", "0"), ("fixed", "0.2")),))
    monkeypatch.setattr(advisories, "load", lambda: Snapshot("a test", "2026-11-20", ("pillow",), (planted,)))
    image = fake_engine.add("trainyard:tf-cpu", files=files)
    for step in ("verify", "smoke"):
        state.record(tmp_path / "tf-cpu", step, image.id, {"passed": True})
    made = trainyard("push", "tf-cpu", "--registry=localhost:1/a", ARCH="amd64", BUILD=str(tmp_path))
    assert made[:2] == (status, "") and re.search(words, made[2]) and len(made[2].splitlines()) == 1
    assert fake_engine.pushed == []


def test_transient_errors_of_a_registry_are_retried() -> None:
    """Writes of tags are idempotent: a 500 or a 503 in between does not fail a promote."""
    answers = iter([500, 503, 201])
    bodies: list[bytes] = []

    class Failing(http.server.BaseHTTPRequestHandler):
        def do_PUT(self) -> None:
            bodies.append(self.rfile.read(int(self.headers["Content-Length"])))
            self.send_response(next(answers))
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    with http.server.HTTPServer(("127.0.0.1", 0), Failing) as server:
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        repository = Repository(f"127.0.0.1:{server.server_port}/team")
        repository.put(Manifest.stored(b"{}", "application/vnd.oci.image.manifest.v1+json"), "tag")
        server.shutdown()
    assert bodies == [b"{}"] * 3


REFUSED = (
    'failed commit on ref "manifest-sha256:01": unexpected status from PUT request to '
    "http://localhost:5000/v2/team/trainyard/manifests/big: 400 Bad Request"
)
TAG_IS_WRITTEN = (
    "unexpected status from HEAD request to http://localhost:5000/v2/team/trainyard/manifests/big: "
    "500 Internal Server Error"
)
NO_SUCH_UPLOAD = (
    "unexpected status from PUT request to http://localhost:5000/v2/team/trainyard/blobs/uploads/1: "
    "500 Internal Server Error"
)


@pytest.mark.parametrize(
    ("errors", "calls", "words"),
    [
        ([REFUSED, REFUSED, ""], 3, ""),
        ([REFUSED, REFUSED, REFUSED], 3, "400 Bad Request"),
        ([TAG_IS_WRITTEN, ""], 2, ""),
        ([TAG_IS_WRITTEN] * 3, 3, "its disk may be full"),
        ([NO_SUCH_UPLOAD], 1, "its disk may be full"),
        (["unauthorized: authentication required"], 1, "refuses the credentials"),
    ],
    ids=[
        "blobs that another push sends",
        "a manifest that stays refused",
        "a tag that another push writes",
        "a registry that fails",
        "a blob",
        "credentials",
    ],
)
def test_a_push_is_repeated_if_another_push_stands_in_its_way(
    fake_engine: FakeEngine, monkeypatch: pytest.MonkeyPatch, errors: list[str], calls: int, words: str
) -> None:
    answers = iter(errors)
    waited: list[float] = []

    def events(_reference: str) -> list[dict[str, str]]:
        error = next(answers)
        return [{"id": "a", "status": "Pushed"}, {"error": error} if error else {"id": "b", "status": "Pushed"}]

    fake_engine.push_events = events
    fake_engine.add("localhost:5000/team/trainyard:big")
    monkeypatch.setattr(time, "sleep", waited.append)
    pushed: list[tuple[str, str]] = []
    with pytest.raises(StepFailed, match=words) if words else contextlib.nullcontext():
        pushed.extend(registry.push(Engine(), "localhost:5000/team/trainyard:big"))
    assert fake_engine.pushed == ["localhost:5000/team/trainyard:big"] * calls
    assert waited == [2, 10][: calls - 1]
    assert pushed == [("a", "uploaded")] + ([] if words else [("b", "uploaded")])


def test_floating_tags_of_a_local_version_have_no_plus(tmp_path: Path) -> None:
    """Registries refuse a plus."""
    labels = {"io.trainyard.target": "xla-nightly", "io.trainyard.framework": "torch_xla==2.10.0+git0123abc"}
    config = json.dumps({"os": "linux", "architecture": "amd64", "config": {"Labels": labels}}).encode()
    kind = "application/vnd.oci.image"
    descriptor = {"mediaType": f"{kind}.config.v1+json", "digest": sha256(config), "size": len(config)}
    manifest = {"schemaVersion": 2, "mediaType": f"{kind}.manifest.v1+json", "config": descriptor, "layers": []}
    with Registry() as stored:
        stored.blobs[sha256(config)] = config
        digest = stored.put_manifest("pushed", f"{kind}.manifest.v1+json", json.dumps(manifest).encode())
        for step in ("verify", "smoke"):
            state.record(tmp_path / "xla-nightly", step, digest, {"passed": True})
        repository = Repository(f"{stored.host}/ml/trainyard", tmp_path)
        made = promotion.promote(recipes.named(load("xla-nightly")), repository, "pushed")
        assert list(made["tags"]) == ["xla-nightly-2.10.0_git0123abc", "xla-nightly"]
        assert set(stored.tags) == {"pushed", *made["tags"]}
