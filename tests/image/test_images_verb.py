"""`make images`: a target that fails does not affect the others, and is not tagged."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import docker.errors
import pytest

from tests.engine import ENGINE
from tests.image.registry import running
from tests.workspaces import write_lock
from trainyard.common.settings import ROOT, state_folder
from trainyard.image import dockerfile
from trainyard.spec import model

BuiltImage = Callable[[str], str]
Write = Callable[[str], str]


@pytest.fixture
def write(tmp_path: Path) -> Iterator[Write]:
    """Write a target whose lock no wheel can satisfy: its build fails at the framework."""
    made: list[str] = []

    def target(name: str) -> str:
        folder = tmp_path / name
        folder.mkdir()
        (folder / "image.yaml").write_text(
            "summary: broken\nbase: debian-12\nframework: {name: torch, packages: [torch==2.9.1]}\n"
            "requirements: [einops==0.8.2]\ntrainers: {package: torch, default: mnist}\nbudget: {size: 1 GB}\n"
            "smoke: {trainer: mnist, accuracy: 0.9}\n",
            encoding="utf-8",
        )
        write_lock(folder, framework="torch==2.9.1", requirements="einops==0.8.2")
        dockerfile.write(dockerfile.rendered(model.load(str(folder))))
        made.append(name)
        return str(folder)

    yield target
    for name in made:
        shutil.rmtree(state_folder() / name, ignore_errors=True)


def start(*names: str, **variables: str) -> subprocess.Popen[str]:
    """`trainyard images`, as a child process that can be interrupted."""
    command = [sys.executable, "-m", "trainyard", "images", *names, "--json"]
    environment = os.environ | variables
    return subprocess.Popen(
        command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def tagged(name: str) -> list[str]:
    return [tag for image in ENGINE.images() for tag in image.tags if f":{name}" in tag]


def test_a_target_that_fails_does_not_stop_the_others_and_has_a_reason(built_image: BuiltImage, write: Write) -> None:
    digest = ENGINE.digest(built_image("tf-cpu"))
    process = start("tf-cpu", write("broken"))
    out, err = process.communicate(timeout=600)
    assert process.returncode == 1, err
    result = json.loads(out)
    assert result["tf-cpu"]["stage"] == "ready" and result["tf-cpu"]["build"]["digest"] == digest
    assert result["tf-cpu"]["verify"]["passed"] and result["tf-cpu"]["smoke"]["passed"]
    assert result["broken"]["stage"] == "failed" and "hash" in result["broken"]["reason"].lower()
    assert "images: broken: the build of broken failed" in err and "(1 of 2 targets)" in " ".join(err.split())
    assert "Traceback" not in err and tagged("broken") == []


def test_an_interrupt_ends_every_build_and_leaves_nothing_tagged(write: Write) -> None:
    """While a step of a build without cache runs, at the same time as a second build."""
    process = start(write("one"), write("two"), TRAINYARD_NO_CACHE="1", TRAINYARD_JOBS="2")
    log = state_folder() / "one" / "build.log"
    until = time.monotonic() + 300
    while time.monotonic() < until and process.poll() is None:
        if log.is_file() and "/tmp/system.sh --python" in log.read_text(encoding="utf-8"):
            break
        time.sleep(0.1)
    children = subprocess.run(["pgrep", "-P", str(process.pid)], capture_output=True, text=True, check=False)
    process.send_signal(signal.SIGINT)
    _, rest = process.communicate(timeout=60)
    assert process.returncode == 130 and "images: interrupted" in rest, rest
    assert "Traceback" not in rest
    for child in children.stdout.split():
        assert not Path(f"/proc/{child}").exists(), "every build has ended"
    assert tagged("one") == [] and tagged("two") == []


def test_a_full_disk_is_reported_and_nothing_is_tagged(write: Write, tmp_path: Path) -> None:
    """A wrapper in front of the real client prints the engine's error in the middle of a build."""
    real = shutil.which("docker")
    wrapper = tmp_path / "bin" / "docker"
    wrapper.parent.mkdir()
    wrapper.write_text(
        f'#!/bin/sh\n[ "$1 $2" = \'buildx bake\' ] || exec {real} "$@"\n'
        "echo '#9 [framework 3/3] RUN install' >&2\n"
        f"{real} tag {running.image()} trainyard:full-candidate\n"  # the engine tags an image before it unpacks it
        "echo 'ERROR: target full: failed to solve: ResourceExhausted: failed to copy: write "
        "/var/lib/docker/x: no space left on device' >&2\nexit 1\n",
        encoding="utf-8",
    )
    wrapper.chmod(0o755)
    process = start(write("full"), PATH=f"{wrapper.parent}:{os.environ['PATH']}")
    out, err = process.communicate(timeout=300)
    assert process.returncode == 1
    assert "the engine's disk is full: 'docker system df' shows what uses it" in json.loads(out)["full"]["reason"]
    assert tagged("full") == [] and "Traceback" not in err
    with pytest.raises(docker.errors.ImageNotFound):
        ENGINE.client.images.get("trainyard:full")
