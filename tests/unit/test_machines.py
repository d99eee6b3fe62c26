"""Engines on other machines, proxies, and macOS as the machine on which one types."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.fakes.engine import FakeEngine, Refusal

from trainyard.common import proxies
from trainyard.common.docker_engine import Engine
from trainyard.common.errors import UserError
from trainyard.image import provenance
from trainyard.oci import layer_contents
from trainyard.sandbox.containers import Sandbox

#: ``docker system dial-stdio``, which connects to the engine of the test.
DIAL = """#!{python} -IS
import socket, sys, threading
assert sys.argv[1:] == ["system", "dial-stdio"]
ours, engine = socket.socket(fileno=0), socket.socket(socket.AF_UNIX)
engine.connect({address!r})
def copy(source, target):
    while read := source.recv(65536):
        target.sendall(read)
    target.shutdown(socket.SHUT_WR)
threading.Thread(target=copy, args=(ours, engine), daemon=True).start()
copy(engine, ours)
"""

#: What macOS has in place of Linux: its name, no /proc, no calls of Linux, and proxies of its own settings.
MACOS = """
import os, platform, sys, sysconfig, types
sysconfig.get_config_vars()  # whose file has the platform's name
for name in ("sched_getaffinity", "getxattr", "listxattr", "posix_fadvise", "memfd_create"):
    delattr(os, name)
sys.platform, platform.system, platform.machine = "darwin", lambda: "Darwin", lambda: "arm64"
settings = sys.modules["_scproxy"] = types.ModuleType("_scproxy")
settings._get_proxies, settings._get_proxy_settings = dict, lambda: {"exclude_simple": False, "exceptions": ()}
def without_proc(event, arguments):
    if event == "open" and str(arguments[0]).startswith(("/proc/", "/sys/")):
        raise FileNotFoundError(2, "No such file or directory", arguments[0])
sys.addaudithook(without_proc)
from trainyard import __main__
__main__.main()
"""


@pytest.fixture
def over_ssh(fake_engine: FakeEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeEngine:
    program = tmp_path / "bin" / "docker"
    program.parent.mkdir()
    program.write_text(DIAL.format(python=sys.executable, address=str(fake_engine.socket)), encoding="utf-8")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(program.parent), prepend=os.pathsep)
    monkeypatch.setenv("DOCKER_HOST", "ssh://me@box")
    return fake_engine


def test_the_docker_command_connects_over_ssh(over_ssh: FakeEngine) -> None:
    over_ssh.add("trainyard:a")
    engine = Engine()
    assert engine.remote == "ssh://me@box" and engine.find("trainyard:a")


def test_a_folder_that_the_engines_machine_lacks_is_one_line(over_ssh: FakeEngine) -> None:
    over_ssh.add("trainyard:a")
    Engine().require_folder("trainyard:a", "/data")
    over_ssh.instead("POST /containers/create", Refusal(400, "bind source path does not exist: /data"))
    with pytest.raises(
        UserError, match=r"^the engine at ssh://me@box is on another machine, which has no folder /data"
    ):
        Engine().require_folder("trainyard:a", "/data")


@pytest.mark.parametrize("host", ["tcp://127.0.0.1:1", "tcp://localhost:1", "unix:///run/docker.sock"])
def test_engines_at_loopback_may_be_of_this_machine(host: str, fake_engine: FakeEngine) -> None:
    engine = Engine()
    engine.client.api.address = host  # type: ignore[attr-defined]
    assert not engine.remote


def test_layers_are_not_read_from_a_process_that_has_the_number_of_a_container() -> None:
    """As that of an engine in a virtual machine has."""
    assert layer_contents._lower(os.getpid(), "a" * 64) == []


def configure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    (tmp_path / "config.json").write_text(text, encoding="utf-8")
    monkeypatch.setenv("DOCKER_CONFIG", str(tmp_path))


def test_builds_get_proxies_of_the_environment_that_are_not_on_this_machine(
    fake_engine: FakeEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    configure(tmp_path, monkeypatch, "{}")
    for name in proxies.of_environment():
        monkeypatch.delenv(name)
    assert proxies.of_builds(Engine()) == []
    monkeypatch.setenv("no_proxy", "example.com")
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:3128")
    assert proxies.of_builds(Engine()) == [] and proxies.only_here() == ["HTTP_PROXY"]
    monkeypatch.setenv("https_proxy", "http://me:password@proxy.example:3128")
    assert proxies.of_builds(Engine()) == ["https_proxy", "no_proxy"]
    configure(tmp_path, monkeypatch, '{"proxies": {"default": {"httpsProxy": "http://other.example"}}}')
    assert proxies.of_builds(Engine()) == ["no_proxy"], "buildx gives builds that of Docker's configuration"
    found = proxies.of_containers(Engine(), "fake")
    assert found["HTTPS_PROXY"] == found["https_proxy"] == "http://other.example"
    assert found["NO_PROXY"] == "example.com,localhost,127.0.0.1,fake"


def test_containers_get_no_proxies_unless_they_are_given_some(
    fake_engine: FakeEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Keep them out of containers: an image made of one would hand them on, and no proxy finds the fakes of a test."""
    configure(tmp_path, monkeypatch, '{"proxies": {"default": {"httpProxy": "http://proxy.example"}}}')
    fake_engine.add("a:1")
    with Sandbox(Engine(), "test") as sandbox:
        sandbox.create("a:1", ["true"], environment={"A": "1"})
        (container,) = fake_engine.of_kind("container")
        assert container.given["Env"] == ["A=1"]


def test_the_provenance_has_no_proxies() -> None:
    """BuildKit records them, with their passwords, as arguments and of every step."""
    step = {"exec": {"meta": {"args": ["true"], "proxy_env": {"https_proxy": "http://me:password@proxy"}}}}
    text = {"predicateType": f"{provenance.SLSA}v0.2", "subject": [{"digest": {"sha256": "a"}}], "steps": [step]}
    text["args"] = {"build-arg:HTTPS_PROXY": "http://me:password@proxy", "build-arg:A": "1"}
    found = provenance.statement_about("sha256:a", [json.dumps(text).encode()])
    assert found and "password" not in str(found)
    assert found["args"] == {"build-arg:A": "1"} and found["steps"] == [{"exec": {"meta": {"args": ["true"]}}}]


def test_setup_check_is_ten_lines_with_remedies(
    no_engine: None, trainyard: Callable[..., tuple[int, str, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("UV_DEFAULT_INDEX", "http://127.0.0.1:9")
    status, _, err = trainyard("setup", "--check")
    assert status == 2
    words = {line.split()[0]: line for line in err.splitlines()}
    names = "engine context buildx platforms disk registry index proxy driver toolkit setup:"
    assert list(words) == names.split()
    assert "start it, or unset DOCKER_HOST" in words["engine"] and words["disk"].endswith("?")
    assert "does not answer uv" in words["index"] and "UV_DEFAULT_INDEX" in words["index"]


def test_commands_that_need_no_engine_run_on_macos(tmp_path: Path) -> None:
    """As far as Linux can imitate it: nothing was run on a Mac."""
    subprocess.run(["git", "init", "--quiet", str(tmp_path)], check=True)
    (tmp_path / "train.py").write_text("import numpy\nprint('loss 1')\n", encoding="utf-8")
    (tmp_path / "requirements.txt").write_text("tensorflow-cpu\n", encoding="utf-8")
    environment = os.environ | {"DOCKER_HOST": "unix:///nowhere", "TRAINYARD_BUILD": str(tmp_path / "state")}

    def trainyard(*words: str) -> tuple[int, str, str]:
        command = [sys.executable, "-c", MACOS, *words]
        done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
        assert "Traceback" not in done.stderr, done.stderr
        return done.returncode, done.stdout, done.stderr

    assert trainyard("init")[0] == 0 and trainyard("check")[0] == 0
    image = f"europe-docker.pkg.dev/a/b/c@sha256:{'a' * 64}"
    status, job, _ = trainyard("job", "--platform", "gke", "--image", image)
    assert status == 0
    (tmp_path / "job.yaml").write_text(job, encoding="utf-8")
    assert trainyard("job", "check", "job.yaml")[0] in (0, 1)
    nowhere = ("--registry", "localhost:1/x")
    for words in (("find", "cpu", *nowhere), ("promote", "cpu", "--image", "a", *nowhere), ("push", "--code-only")):
        assert trainyard(*words)[0] in (1, 2)
    assert "no engine answers" in trainyard("image")[2]
