"""The sandbox of smoke tests, rehearsals and local builds, with the Docker engine."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator

import docker
import pytest

from tests.engine import CONTEXT, ENGINE
from trainyard.common.docker_engine import OWNER, Engine, owner_name
from trainyard.common.errors import StepFailed
from trainyard.image import base_image
from trainyard.oci import probe_runner
from trainyard.sandbox import containers
from trainyard.sandbox.containers import NoFile, Sandbox
from trainyard.spec.naming import NAME

pytestmark = pytest.mark.concurrent


@pytest.fixture(scope="module")
def small() -> str:
    """An image with python3 and a shell."""
    return base_image.resolve(CONTEXT, "debian-12").reference


def left(process: int) -> dict[str, str]:
    """Return identity -> kind of what ``process`` created and is not removed."""
    client, ours = ENGINE.client, {"label": f"{OWNER}={owner_name(process)}"}
    listed = {
        "container": client.containers.list(all=True, ignore_removed=True, filters=ours),  # type: ignore[arg-type]
        "volume": client.volumes.list(filters=ours),  # type: ignore[arg-type]
        "network": client.networks.list(filters=ours),  # type: ignore[arg-type]
    }
    return {str(resource.id): kind for kind, resources in listed.items() for resource in resources}


RUNS = """
import os, sys, time
from trainyard.common.docker_engine import Engine
from trainyard.sandbox.containers import Sandbox
with Sandbox(Engine(), "test") as sandbox:
    box = sandbox.create(sys.argv[1], ["sleep", "600"], volumes={sandbox.volume("data"): {"bind": "/data"}})
    box.start()
    print("running", flush=True)
    sys.stdin.read(1)
    raise SystemExit(3)
"""


@pytest.mark.parametrize("interrupted", [True, False])
def test_a_process_leaves_nothing_after_a_failure_and_ctrl_c(small: str, interrupted: bool) -> None:
    command = ["env", "--default-signal=INT", sys.executable, "-c", RUNS, small]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    ) as running:
        assert running.stdout and running.stdin and running.stdout.readline() == "running\n"
        assert list(left(running.pid).values()) == ["container", "volume", "network"]
        if interrupted:
            running.send_signal(signal.SIGINT)
        running.stdin.close()
        assert running.wait(60) == (-signal.SIGINT if interrupted else 3)
    assert left(running.pid) == {}


def test_a_log_is_followed_until_its_container_ends_or_its_deadline(small: str) -> None:
    script = "echo first; printf 'se'; sleep 8; printf 'cond\\nlast'"
    with Sandbox(ENGINE, "test", network="none") as sandbox:
        box = sandbox.create(small, ["sh", "-c", script])
        box.start()
        started = time.monotonic()
        assert list(containers.lines(box, 3)) == ["first"], "the engine keeps a line until it is whole"
        assert time.monotonic() - started < 8
        impatient = docker.from_env(timeout=1).containers.get(str(box.id))
        assert list(containers.lines(impatient)) == ["first", "second", "last"], "silence is no end"
        assert list(containers.lines(box, stdout=False)) == []
        assert (containers.wait(box, 0), containers.lines_of(box)) == (0, ["first", "second", "last"])


def test_files_are_read_out_of_containers_and_images(small: str) -> None:
    before = left(os.getpid())  # by tests of other files in the same process
    with Sandbox(ENGINE, "test", network="none") as sandbox:
        box = sandbox.create(small, ["sleep", "600"], files=containers.archive({"a/b": b"x" * 100_000}))
        assert containers.read_file(box, "/a/b") == b"x" * 100_000
        for path in ("/a/c", "/a", "/etc/os-release"):
            with pytest.raises(NoFile, match=path):
                containers.read_file(box, path)
        box.start()
        assert containers.wait(box, 0) is None
        status, seconds = containers.stop(box, 1)
        assert (status, 1 <= seconds < 30) == (137, True), "PID 1 of a shell ignores SIGTERM"
    image = ENGINE.client.images.get(small)
    assert list(containers.files_of(ENGINE, image, "/usr/lib/os-release", "/none")) == ["/usr/lib/os-release"]
    assert left(os.getpid()).keys() <= before.keys()


@pytest.fixture
def with_python(small: str) -> Iterator[Callable[[str], str]]:
    """``with_python("exec yes")``: the reference of a small image whose python3 is this shell script."""
    made: list[str] = []

    def make(script: str) -> str:
        with Sandbox(ENGINE, "test", network="none") as sandbox:
            text = f"#!/bin/sh\n{script}\n".encode()
            box = sandbox.create(small, ["true"])
            box.put_archive("/", containers.archive({"usr/local/bin/python3": text}, mode=0o755))
            made.append(f"{NAME}-test:{sandbox.name}")
            box.commit(*made[-1].split(":"))
        return made[-1]

    yield make
    for reference in made:
        ENGINE.untag(reference)


@pytest.mark.parametrize(
    ("script", "engine", "said"),
    [
        ("exec cat /dev/zero", Engine(look_seconds=3), r"its python3 does not end: given up after 3 s$"),
        ("exec sleep 600", Engine(look_seconds=3), r"its python3 does not end: given up after 3 s$"),
        ("head -c 100000000 /dev/zero", ENGINE, r"printed no list of what is installed"),
        ("echo '{}'", ENGINE, r"printed no list of what is installed: python Field required$"),
    ],
    ids=["prints without end", "sleeps", "prints 100 MB", "prints no list"],
)
def test_whatever_an_images_python_does_is_one_line(
    with_python: Callable[[str], str], script: str, engine: Engine, said: str
) -> None:
    before = left(os.getpid())
    reference = with_python(script)
    with pytest.raises(StepFailed, match=rf"^{reference}: .*{said}"):
        probe_runner.probe(engine, reference)
    assert left(os.getpid()).keys() <= before.keys()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=["SIGINT", "SIGTERM"])
def test_a_signal_to_verify_alone_ends_it_and_its_container(
    with_python: Callable[[str], str], number: signal.Signals
) -> None:
    """As a CI system sends it: to the process, and not to its group."""
    words = ["env", "--default-signal=INT", sys.executable, "-m", "trainyard", "verify"]
    reference = with_python("exec sleep 600")
    with subprocess.Popen([*words, f"--image={reference}"], stderr=subprocess.PIPE, text=True) as running:
        assert running.stderr
        until = time.monotonic() + 60
        while "container" not in left(running.pid).values() and time.monotonic() < until:
            time.sleep(0.1)
        time.sleep(3)  # the layers are read, and nothing but the container is waited for
        running.send_signal(number)
        assert running.wait(20) == 130
        assert running.stderr.read().endswith("verify: interrupted\n")
        assert left(running.pid) == {}
