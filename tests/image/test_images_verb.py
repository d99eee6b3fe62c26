"""`make images`: one target's failure is its own, and what did not come to its end has no name."""

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

from scripts import cli, engine, render, spec
from scripts.cli import ROOT
from tests.image.registry import running

BuiltImage = Callable[[str], str]
Write = Callable[[str], str]


@pytest.fixture
def write(tmp_path: Path) -> Iterator[Write]:
    """A target whose lock no wheel can satisfy: its build gets as far as the framework, and fails."""
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
        (folder / "Dockerfile").write_text(render.dockerfile(spec.load(str(folder))), encoding="utf-8")
        for lock, pin in (("framework", "torch==2.9.1"), ("requirements", "einops==0.8.2")):
            (folder / f"{lock}.lock").write_text(f"{pin} --hash=sha256:{'0' * 64}\n", encoding="utf-8")
        made.append(name)
        return str(folder)

    yield target
    for name in made:
        shutil.rmtree(cli.STATE / name, ignore_errors=True)


def start(*names: str, **variables: str) -> subprocess.Popen[str]:
    """``make images``, as a child that can be interrupted by itself."""
    command = [sys.executable, "-m", "scripts.images", *names, "--json"]
    return subprocess.Popen(
        command, cwd=ROOT, env=os.environ | variables, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def tagged(name: str) -> list[str]:
    return [tag for image in engine.client().images.list() for tag in image.tags if f":{name}" in tag]


def test_one_that_fails_does_not_stop_the_others_and_the_summary_says_why(
    built_image: BuiltImage, write: Write
) -> None:
    digest = engine.digest(built_image("tf-cpu"))
    process = start("tf-cpu", write("broken"))
    out, err = process.communicate(timeout=600)
    assert process.returncode == 1, err
    told = json.loads(out)
    assert told["tf-cpu"]["stage"] == "ready" and told["tf-cpu"]["build"]["digest"] == digest
    assert told["tf-cpu"]["verify"]["passed"] and told["tf-cpu"]["smoke"]["passed"]
    assert told["broken"]["stage"] == "failed" and "hash" in told["broken"]["reason"].lower()
    assert "images: broken: the build of broken failed" in err and "(1 of 2 targets)" in " ".join(err.split())
    assert "Traceback" not in err and tagged("broken") == []


def test_an_interrupt_ends_every_build_and_leaves_nothing_tagged(write: Write) -> None:
    """In the middle of a step of a build without a cache, and with a second build beside it."""
    process = start(write("one"), write("two"), NO_CACHE="1", JOBS="2")
    log = cli.STATE / "one" / "image.log"
    until = time.monotonic() + 60
    while time.monotonic() < until and not (log.is_file() and "RUN <<SYSTEM" in log.read_text(encoding="utf-8")):
        time.sleep(0.1)
    children = subprocess.run(["pgrep", "-P", str(process.pid)], capture_output=True, text=True, check=False)
    process.send_signal(signal.SIGINT)
    _, rest = process.communicate(timeout=60)
    assert process.returncode == 130 and "interrupted; nothing was tagged or published" in rest
    assert "Traceback" not in rest
    for child in children.stdout.split():
        assert not Path(f"/proc/{child}").exists(), "no build goes on"
    assert tagged("one") == [] and tagged("two") == []


def test_a_full_disk_is_said_so_and_leaves_nothing_tagged(write: Write, tmp_path: Path) -> None:
    """In the engine's own words for it, which a wrapper in front of the real client says in the middle of a build."""
    real = shutil.which("docker")
    wrapper = tmp_path / "bin" / "docker"
    wrapper.parent.mkdir()
    wrapper.write_text(
        f'#!/bin/sh\n[ "$1 $2" = \'buildx bake\' ] || exec {real} "$@"\n'
        "echo '#9 [framework 3/3] RUN install' >&2\n"
        f"{real} tag {running.image()} trainyard:full-candidate\n"  # the engine names an image before it unpacks it
        "echo 'ERROR: target full: failed to solve: ResourceExhausted: failed to copy: write "
        "/var/lib/docker/x: no space left on device' >&2\nexit 1\n",
        encoding="utf-8",
    )
    wrapper.chmod(0o755)
    process = start(write("full"), PATH=f"{wrapper.parent}:{os.environ['PATH']}")
    out, err = process.communicate(timeout=60)
    assert process.returncode == 1
    assert "the engine's disk is full: 'docker system df' shows what fills it" in json.loads(out)["full"]["reason"]
    assert tagged("full") == [] and "Traceback" not in err
    with pytest.raises(docker.errors.ImageNotFound):
        engine.client().images.get("trainyard:full")
