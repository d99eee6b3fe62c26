"""The fake Google Cloud is as strict as the real one where clients get things wrong (contract b)."""

from __future__ import annotations

import http.client
import json
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from trainyard.sandbox.fakes.google_cloud import FAULTS, Fault, GoogleCloud, discovery_document

FAKE = Path(__file__).resolve().parents[2] / "scripts" / "trainyard" / "sandbox" / "fakes" / "google_cloud.py"
NODE = "v1/projects/test-project/locations/us-central1-c/nodes/tpu-a"
FLAVOR = {"Metadata-Flavor": "Google"}
BEARER = {"Authorization": "Bearer ya29.fake-access-token"}


@pytest.fixture
def cloud() -> Iterator[GoogleCloud]:
    with GoogleCloud(states=["CREATING", "READY"], attributes={"tpu-env": "ZONE: 'z'"}) as running:
        yield running


def ask(cloud: GoogleCloud, path: str, headers: dict[str, str] | None = None) -> tuple[int, str, Any]:
    """Status, content type and body; JSON bodies parsed where they are JSON."""
    request = urllib.request.Request(f"{cloud.url}/{path}", headers=headers or {})
    try:
        with urllib.request.urlopen(request, timeout=5) as answer:
            status, kind, body = answer.status, answer.headers["Content-Type"], answer.read()
    except urllib.error.HTTPError as error:
        status, kind, body = error.code, error.headers["Content-Type"], error.read()
        error.close()
    try:
        return status, kind, json.loads(body) if kind == "application/json" else body.decode()
    except ValueError:
        return status, kind, body


@pytest.mark.parametrize(
    ("path", "text"),
    [
        ("project/project-id", "test-project"),
        ("project/numeric-project-id", "123456789012"),
        ("instance/zone", "projects/123456789012/zones/us-central1-c"),
        ("instance/attributes/tpu-env", "ZONE: 'z'"),
        ("instance/network-interfaces/0/ip", "10.128.1.2"),
        ("instance/service-accounts/default/email", "trainer@fake-project.iam.gserviceaccount.com"),
        ("universe/universe-domain", "googleapis.com"),
    ],
)
def test_metadata_values(cloud: GoogleCloud, path: str, text: str) -> None:
    assert ask(cloud, f"computeMetadata/v1/{path}", FLAVOR) == (200, "application/text", text)


@pytest.mark.parametrize("path", ["instance/attributes/none", "instance/service-accounts/other/token", "x"])
def test_metadata_that_does_not_exist(cloud: GoogleCloud, path: str) -> None:
    assert ask(cloud, f"computeMetadata/v1/{path}", FLAVOR)[0] == 404


def test_metadata_needs_its_header_and_answers_with_it(cloud: GoogleCloud) -> None:
    assert ask(cloud, "computeMetadata/v1/project/project-id")[0] == 403
    with urllib.request.urlopen(cloud.url, timeout=5) as probe:
        assert probe.headers["Metadata-Flavor"] == "Google"


@pytest.mark.parametrize("account", ["default", "trainer@fake-project.iam.gserviceaccount.com"])
def test_token(cloud: GoogleCloud, account: str) -> None:
    status, kind, body = ask(cloud, f"computeMetadata/v1/instance/service-accounts/{account}/token?scopes=x", FLAVOR)
    assert (status, kind) == (200, "application/json")  # oauth2client wants exactly this type
    assert set(body) == {"access_token", "expires_in", "token_type"}


def test_the_api_needs_the_token(cloud: GoogleCloud) -> None:
    for headers in ({}, {"Authorization": "Bearer other"}):
        status, _, body = ask(cloud, NODE, headers)
        assert (status, body["error"]["status"]) == (401, "UNAUTHENTICATED")


def test_states_in_order_and_the_last_one_stays(cloud: GoogleCloud) -> None:
    states = [ask(cloud, NODE, BEARER)[2]["state"] for _ in range(3)]
    assert states == ["CREATING", "READY", "READY"]
    log = ask(cloud, "_fake/requests")[2]
    assert [request["state"] for request in log["requests"]] == states
    assert log["counts"] == {"node": 3}


def test_fields_of_v1_and_v2(cloud: GoogleCloud) -> None:
    ask(cloud, NODE, BEARER)
    first = ask(cloud, NODE, BEARER)[2]
    second = ask(cloud, NODE.replace("v1/", "v2/"), BEARER)[2]
    assert (first["ipAddress"], first["port"]) == ("10.1.2.3", "8470")  # a string, as the real API has it
    assert first["networkEndpoints"] == second["networkEndpoints"] == [{"ipAddress": "10.1.2.3", "port": 8470}]
    assert set(first) - set(second) == {"ipAddress", "port", "tensorflowVersion"}
    assert set(second) - set(first) == {"runtimeVersion"}


def test_nodes_are_listed_and_others_not_found(cloud: GoogleCloud) -> None:
    listing = ask(cloud, NODE.rpartition("/")[0], BEARER)[2]
    assert [node["name"] for node in listing["nodes"]] == [NODE[3:]]
    status, _, body = ask(cloud, NODE + "-other", BEARER)
    assert (status, body["error"]["status"]) == (404, "NOT_FOUND")
    with GoogleCloud(node="") as empty:
        assert ask(empty, NODE.rpartition("/")[0], BEARER)[2] == {}


def test_fields_can_be_replaced_and_removed() -> None:
    with GoogleCloud(node_fields={"state": None, "ipAddress": "10.9.9.9"}) as cloud:
        node = ask(cloud, NODE, BEARER)[2]
    assert "state" not in node
    assert node["ipAddress"] == "10.9.9.9"


@pytest.mark.parametrize(
    "path", ["discovery/v1/apis/tpu/v1/rest", "$discovery/rest?version=v1", "discovery/v1/apis/tpu/v2/rest"]
)
def test_discovery(cloud: GoogleCloud, path: str) -> None:
    version = "v2" if "v2" in path else "v1"
    assert ask(cloud, path)[2] == discovery_document(version, f"{cloud.url}/")


@pytest.mark.parametrize("text", ["status:503", "garbage", "text", "empty"])
def test_faults_that_still_are_http(text: str) -> None:
    with GoogleCloud(faults={"metadata": [text + "*2"]}) as cloud:
        answers = [ask(cloud, "computeMetadata/v1/project/project-id", FLAVOR) for _ in range(3)]
    assert answers[0] == answers[1]
    assert answers[2] == (200, "application/text", "test-project")
    assert answers[0][::2] != answers[2][::2]


@pytest.mark.parametrize("text", ["drop", "nothttp", "truncate"])
def test_faults_that_break_http(text: str) -> None:
    with GoogleCloud(faults={"metadata": [text]}) as cloud:
        with pytest.raises((OSError, http.client.HTTPException)):
            urllib.request.urlopen(
                urllib.request.Request(f"{cloud.url}/computeMetadata/v1/project/project-id", headers=FLAVOR), timeout=5
            ).read()
        assert ask(cloud, "computeMetadata/v1/project/project-id", FLAVOR)[2] == "test-project"
        assert [request.get("fault") for request in cloud.requests] == [text, None]


@pytest.mark.parametrize("text", ["delay:0.2", "drip:0.02"])
def test_slow_answers(text: str) -> None:
    with GoogleCloud(faults={"metadata": [text]}) as cloud:
        started = time.monotonic()
        assert ask(cloud, "computeMetadata/v1/project/project-id", FLAVOR)[2] == "test-project"
        assert time.monotonic() - started >= 0.2


def test_a_fault_for_ever() -> None:
    with GoogleCloud(faults={"node": ["status:403*"]}) as cloud:
        assert [ask(cloud, NODE, BEARER)[0] for _ in range(4)] == [403] * 4


@pytest.mark.parametrize("text", ["none", "status:", "status:9", "delay:x", "delay:-1", "garbage*x"])
def test_bad_faults(text: str) -> None:
    with pytest.raises(ValueError, match=r"."):
        Fault.parse(text)


@pytest.mark.parametrize(
    "options", [{"states": []}, {"endpoints": ["1.2.3.4"]}, {"endpoints": ["1.2.3.4:0"]}, {"faults": {"x": ["drop"]}}]
)
def test_bad_options(options: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"."):
        GoogleCloud(**options)


@contextmanager
def _process(*argv: str) -> Iterator[subprocess.Popen[str]]:
    """The fake as a program; gone afterwards whatever happened."""
    command = [sys.executable, "-I", "-S", str(FAKE), *argv]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as running:
        try:
            yield running
        finally:
            running.kill()


def test_as_a_program() -> None:
    """One self-contained file, as it runs beside an image; SIGTERM ends it."""
    options = ["--port=0", "--project=p", "--zone=z", "--node=n", "--states=CREATING,READY", "--endpoint=127.0.0.1:1"]
    with _process(*options, "--endpoint=127.0.0.1:2", "--attribute=a=b", "--fault=node=status:500") as running:
        assert running.stdout is not None
        url = json.loads(running.stdout.readline())["url"]
        answers = []
        for _ in range(3):
            request = urllib.request.Request(f"{url}/v2/projects/p/locations/z/nodes/n", headers=BEARER)
            try:
                with urllib.request.urlopen(request, timeout=5) as answer:
                    answers.append(json.loads(answer.read())["state"])
            except urllib.error.HTTPError as error:
                answers.append(error.code)
                error.close()
        running.terminate()
        assert running.wait(timeout=20) == 143
    assert answers == [500, "READY", "READY"]


@pytest.mark.parametrize("option", ["--fault=x", "--fault=node=x", "--endpoint=x", "--port=99999"])
def test_bad_arguments_get_one_line(option: str) -> None:
    with _process(option, "--host=127.0.0.1") as running:
        _, err = running.communicate(timeout=20)
        assert running.returncode == 2
        assert "error: " in err.splitlines()[-1]
        assert "Traceback" not in err


def test_every_fault_is_documented() -> None:
    text = FAKE.read_text().partition('"""')[2].partition('"""')[0]
    assert all(fault in text for fault in FAULTS)
