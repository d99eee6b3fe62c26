"""Whatever answers in an engine's place ends in one line: an error, a page of a proxy, no JSON, a closed connection.

The answers come over the socket that ``DOCKER_HOST`` names, and the commands are those that users run.
"""

from __future__ import annotations

from collections.abc import Callable

import docker.errors
import pytest
import requests
from tests.fakes.engine import FakeEngine, Raw, Refusal

from trainyard.common.docker_engine import Engine
from trainyard.common.engine_client import Lost, NoAnswer
from trainyard.common.errors import StepFailed
from trainyard.oci import registry

Command = Callable[..., tuple[int, str, str]]

PAGE = "<!DOCTYPE html>\n<html><body><h1>Access denied</h1>\n<p>by the proxy</p></body></html>\n"


def http(body: str, status: str = "200 OK", kind: str = "application/json") -> Raw:
    head = f"HTTP/1.1 {status}\r\nContent-Type: {kind}\r\nContent-Length: {len(body)}\r\nConnection: close\r\n\r\n"
    return Raw((head + body).encode())


#: An odd answer -> it, and what the line says of it.
ODD: dict[str, tuple[Raw | Refusal, str]] = {
    "an error": (Refusal(500, "write /var/lib/docker:\nno space left"), "500: write /var/lib/docker: no space left"),
    "an error without a message": (http("{}", "500 Internal Server Error"), "500: Internal Server Error"),
    "a proxy's error": (http(PAGE, "502 Bad Gateway", "text/html"), "502: a page of HTML"),
    "a page": (http(PAGE, kind="text/html"), "a page of HTML, not JSON"),
    "text": (http("it works"), "'it works', which is not JSON"),
    "an empty object": (http("{}"), "JSON that has no '"),
    "a list": (http("[]"), "JSON that has no '"),
    "nothing": (Raw(), "ended at GET "),
    "half an answer": (Raw(b'HTTP/1.1 200 OK\r\nContent-Length: 1000\r\n\r\n{"Api'), "ended at GET "),
    "another protocol": (Raw(b"SSH-2.0-OpenSSH_9.2p1\r\n"), "ended at GET "),
}
COMMANDS = {
    "list": ("list",),
    "clean": ("clean",),
    "verify": ("verify", "tf-cpu"),
    "image": ("image", "tf-cpu"),
    "run": ("run", "tf-cpu"),
    "diff": ("diff", "trainyard:a", "trainyard:b"),
}


def line_of(found: tuple[int, str, str], command: str) -> str:
    """Return the line that a command ends with, which is all that it says."""
    status, _, err = found
    assert status == 1 and err.count("\n") == 1, err
    assert err.startswith(f"{command}: ") and "Traceback" not in err and "<" not in err
    return err


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize("answer", ODD)
def test_what_is_no_engine_is_one_line(fake_engine: FakeEngine, trainyard: Command, command: str, answer: str) -> None:
    """From the first request on."""
    odd, said = ODD[answer]
    fake_engine.instead("", odd)
    line = line_of(trainyard(*COMMANDS[command]), command)
    assert f"engine at {fake_engine.address}" in line and "/version" in line and said in line
    assert not fake_engine.calls, "no engine is set up in its place"


#: A command -> the request, after others, that is answered oddly.
LATER = {
    "list": "GET /images/trainyard:cpu/json",
    "verify": "GET /images/trainyard:tf-cpu-candidate/json",
    "image": "GET /version",
    "run": "GET /images/trainyard:tf-cpu/json",
    "diff": "GET /images/trainyard:a/json",
}


@pytest.mark.parametrize("command", LATER)
@pytest.mark.parametrize("answer", ODD)
def test_an_engine_that_fails_in_between_is_one_line(
    fake_engine: FakeEngine, trainyard: Command, command: str, answer: str
) -> None:
    odd, said = ODD[answer]
    if command == "image":  # asks whether the engine emulates arm64
        fake_engine.instead("GET /_ping", lambda: fake_engine.instead("GET /version", odd) or b"OK")  # type: ignore[func-returns-value]
        line = line_of(trainyard("image", "cpu", ARCH="arm64"), command)
    else:
        fake_engine.instead(LATER[command], odd)
        line = line_of(trainyard(*COMMANDS[command]), command)
    assert said in line and LATER[command] in line


@pytest.mark.parametrize("command", ["list", "verify", "run"])
def test_an_engine_that_ends_meanwhile_is_one_line(fake_engine: FakeEngine, trainyard: Command, command: str) -> None:
    def end() -> Raw:
        fake_engine.stop()
        return Raw()

    fake_engine.instead(LATER[command], end)
    assert "see whether it runs with 'docker version'" in line_of(trainyard(*COMMANDS[command]), command)


GONE = Refusal(404, "content digest sha256:1627: not found")


@pytest.mark.parametrize("kind", ["images", "containers"])
def test_a_list_is_asked_for_again_if_an_image_is_removed_meanwhile(fake_engine: FakeEngine, kind: str) -> None:
    refused: list[str] = []

    def removed_meanwhile() -> list[object]:
        if len(refused) < 2:
            refused.append(kind)
            raise GONE
        return []

    fake_engine.instead(f"GET /{kind}/json", removed_meanwhile)
    engine = Engine()
    assert (engine.images() if kind == "images" else engine.client.containers.list()) == [] and len(refused) == 2


def test_a_list_that_is_always_refused_names_the_engine(fake_engine: FakeEngine) -> None:
    fake_engine.instead("GET /images/json", GONE)
    with pytest.raises(docker.errors.NotFound, match=r"^the engine at \S+ answered GET /images/json with 404: content"):
        Engine().images()


def test_an_answer_that_does_not_come_is_given_up(fake_engine: FakeEngine) -> None:
    fake_engine.instead("GET /version", Raw(seconds=3))
    with pytest.raises(NoAnswer, match=r"^the engine at unix:\S+ did not answer GET /version in time: see its log"):
        Engine(seconds=10).existing_client()


def test_a_pull_and_a_push_that_break_off_name_the_engine(fake_engine: FakeEngine) -> None:
    begun = Raw(b'HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n1c\r\n{"status": "Pulling from x"}\r\n')
    fake_engine.instead("POST /images/", begun)
    with pytest.raises(Lost, match=r"^the connection to the engine at \S+ ended at POST /images/create "):
        Engine().pull("localhost:5000/x:1")
    with pytest.raises(Lost, match=r"^the connection to the engine at \S+ ended at POST /images/localhost\S+/push "):
        list(registry.push(Engine(), "localhost:5000/x:1"))
    fake_engine.instead("POST /images/", http(PAGE, kind="text/html"))
    with pytest.raises(StepFailed, match=r"^the engine at \S+ answered POST /images/create with a page of HTML"):
        Engine().pull("localhost:5000/x:1")


def test_a_saved_image_that_breaks_off_names_the_engine(fake_engine: FakeEngine) -> None:
    fake_engine.add("x:1")
    fake_engine.instead("GET /images/.*/get", Raw(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n3e8\r\nx"))
    with pytest.raises(Lost, match=r"ended at GET /images/x:1/get "):
        list(Engine().client.api.get_image("x:1"))


def test_its_errors_are_those_that_callers_of_docker_and_requests_expect(fake_engine: FakeEngine) -> None:
    client = Engine().client
    fake_engine.instead("GET /info", Refusal(409, "busy"))
    with pytest.raises(docker.errors.APIError) as refused:
        client.info()
    assert refused.value.explanation == "busy" and refused.value.status_code == 409
    fake_engine.instead("GET /info", Raw())
    with pytest.raises(requests.exceptions.ConnectionError):
        client.info()
