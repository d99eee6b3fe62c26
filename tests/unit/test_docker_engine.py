"""A missing engine is one line, and builds without progress are retried after a transient error."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import docker
import pytest

from trainyard.console import StepFailed, UserError
from trainyard.oci import docker_engine
from trainyard.spec.architectures import AMD64, ARM64, Architecture

#: ``docker_engine.client`` without the client that other tests got before.
new_client: Callable[[], docker.DockerClient] = docker_engine.client.__wrapped__


def test_an_engine_that_does_not_answer_is_one_line(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """From scripts/install-engine.sh, which changes nothing where DOCKER_HOST names an engine."""
    monkeypatch.setenv("DOCKER_HOST", "tcp://127.0.0.1:9")
    with pytest.raises(UserError, match=r"^no engine answers at DOCKER_HOST=tcp://127\.0\.0\.1:9: start it, or unset"):
        new_client()
    assert capfd.readouterr().err == "", "the line is printed once, by the command"


def test_what_an_installer_prints_is_shown_whatever_its_bytes_and_its_error_is_the_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    script = tmp_path / "scripts" / "install-engine.sh"
    script.parent.mkdir()
    script.write_bytes(b"#!/bin/sh\necho 'M\xfcnchen' >&2\necho 'engine: error: no archive answers' >&2\nexit 1\n")
    script.chmod(0o755)
    monkeypatch.setenv("DOCKER_HOST", "tcp://127.0.0.1:9")
    monkeypatch.setattr(docker_engine, "ROOT", tmp_path)
    with pytest.raises(UserError, match=r"^no archive answers$"):
        new_client()
    assert capsys.readouterr().err == "M\N{REPLACEMENT CHARACTER}nchen\n"


@pytest.mark.parametrize(("words", "attempts"), [("no active sessions", 3), ("hash mismatch", 1)])
def test_a_quiet_build_is_retried_after_a_transient_error(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, words: str, attempts: int
) -> None:
    """With a ``docker`` that records its calls and fails."""
    docker = tmp_path / "docker"
    docker.write_text(f"#!/bin/sh\necho called >>{tmp_path}/calls\necho 'ERROR: {words}' >&2\nexit 1\n")
    docker.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.setattr(docker_engine, "client", lambda: None)
    with pytest.raises(StepFailed, match=f"'docker buildx build' failed: ERROR: {words}"):
        docker_engine.buildx("build", ".", quiet=True)
    assert (tmp_path / "calls").read_text().count("called") == attempts


def test_a_pull_that_fails_after_the_engine_answered_has_the_engines_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine reports such an error in its answer, whose status is 200."""

    class Engine:
        api = images = property(lambda self: self)

        def get(self, reference: str) -> None:
            raise docker.errors.ImageNotFound(f"No such image: {reference}")

        def pull(self, repository: str, tag: str = "", **_: object) -> list[dict[str, str]]:
            assert (repository, tag) in (("registry:5000/xla:nightly", "sha256:1"), ("xla", "latest"))
            return [{"status": "Pulling"}, {"error": "no space left on device"}, {"status": "Digest"}]

    monkeypatch.setattr(docker_engine, "client", Engine)
    for reference in ("registry:5000/xla:nightly@sha256:1", "xla"):
        with pytest.raises(UserError, match=rf"^no local image {reference}, and .* pulled: no space left on device$"):
            docker_engine.pull(reference)


INSPECTED = """Name:          default
Driver:        docker

Nodes:
Name:      default
Status:    running
Platforms: linux/amd64, linux/amd64/v2, linux/arm64*
"""


@pytest.mark.parametrize(
    ("wanted", "printed", "runs"),
    [(AMD64, "", True), (ARM64, INSPECTED, True), (ARM64, INSPECTED.replace("arm64", "386"), False), (ARM64, "", True)],
)
def test_whether_programs_run_is_what_the_engine_says(
    monkeypatch: pytest.MonkeyPatch, wanted: Architecture, printed: str, runs: bool
) -> None:
    monkeypatch.setattr(docker_engine, "architecture", lambda: AMD64)
    monkeypatch.setattr(docker_engine, "buildx", lambda *_, **__: printed)
    assert docker_engine.can_run(wanted) is runs
    if runs:
        docker_engine.require_emulation(wanted)
    else:
        with pytest.raises(
            UserError, match=r"^the engine runs no programs for linux/arm64: run 'make setup EMULATION=1'"
        ):
            docker_engine.require_emulation(wanted)


@pytest.mark.parametrize(
    ("of_engine", "wanted", "emulated"),
    [(AMD64, AMD64, False), (AMD64, ARM64, True), (ARM64, ARM64, False), (ARM64, AMD64, False)],
)
def test_emulated_arm64_has_a_processor_that_is_fast_to_emulate(
    monkeypatch: pytest.MonkeyPatch, of_engine: Architecture, wanted: Architecture, emulated: bool
) -> None:
    monkeypatch.setattr(docker_engine, "architecture", lambda: of_engine)
    assert ("QEMU_CPU" in docker_engine.emulated_environment(wanted)) is emulated
