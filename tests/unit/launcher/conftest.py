"""Fixtures that run the launcher in this process, on a simulated machine and with an environment of the test."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from launcher import cli
from launching import Launch, Launched, Machine, cluster_spec, tpu_config
from tests import environment

from trainyard.sandbox.fakes.google_cloud import GoogleCloud


@pytest.fixture(autouse=True)
def default_signals() -> Iterator[None]:
    """Default actions during a test, also below nohup, which ignores SIGHUP; the previous ones after it.

    The launcher sets actions for what it executes, here in the process of the tests.
    """
    numbers = (signal.SIGHUP, signal.SIGQUIT, signal.SIGPIPE, signal.SIGXFSZ, signal.SIGCHLD)
    before = {number: signal.getsignal(number) for number in numbers}
    for number in (signal.SIGHUP, signal.SIGQUIT):
        signal.signal(number, signal.SIG_DFL)
    yield
    for number, action in before.items():
        signal.signal(number, action)


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    """An empty machine: no accelerator, no image."""
    root = tmp_path / "root"
    root.mkdir()
    return Machine(root)


@pytest.fixture
def launch(machine: Machine, capfd: pytest.CaptureFixture[str]) -> Launch:
    """Run the launcher with this environment only; the default arguments are --print-env --json."""

    def run(env: Mapping[str, str], *argv: str) -> Launched:
        full = {"LAUNCHER_SYSROOT": str(machine.root), "PATH": os.environ["PATH"], **machine.env, **env}
        capfd.readouterr()
        with environment.only(full):
            status = cli.run(list(argv) or ["--print-env", "--json"])
        out, err = capfd.readouterr()
        return Launched(status, out, err)

    return run


@pytest.fixture
def google_cloud(machine: Machine) -> Iterator[Callable[..., GoogleCloud]]:
    """Start a fake Google Cloud and redirect the launcher to it, with a short interval between requests."""
    started: list[GoogleCloud] = []

    def start(**options: Any) -> GoogleCloud:
        cloud = GoogleCloud(**options).__enter__()
        started.append(cloud)
        machine.env.update(
            GCE_METADATA_HOST=cloud.address,
            TPU_API_ENDPOINT=cloud.url,
            LAUNCHER_TPU_INTERVAL="0.01",
            LAUNCHER_HTTP_TIMEOUT="2",
        )
        return cloud

    yield start
    for cloud in started:
        cloud.__exit__()


@pytest.fixture(name="tpu_config")
def tpu_config_fixture() -> Callable[..., str]:
    return tpu_config


@pytest.fixture(name="cluster_spec")
def cluster_spec_fixture() -> Callable[..., str]:
    return cluster_spec
