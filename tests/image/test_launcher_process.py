"""Test the launcher in a container: below tini, as entry point, with `--init` (docs/launcher-contract.md#r15).

Containers have no network and are removed after each test.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from docker.models.containers import Container

from tests.engine import ENGINE
from trainyard.common.docker_engine import resource_labels

pytestmark = pytest.mark.concurrent

# PID 1 of a container -> options that start it this way.
INITS: dict[str, dict[str, Any]] = {
    "tini": {},
    "launcher": {"entrypoint": ["launch"]},
    "docker-init": {"init": True},
    "wrapped": {"entrypoint": ["/bin/sh", "-c", 'exec "$@"', "another-entrypoint", "tini", "--", "launch"]},
    "wrapped-without-tini": {"entrypoint": ["/bin/sh", "-c", 'exec "$@"', "another-entrypoint", "launch"]},
}
every_init = pytest.mark.parametrize("init", INITS)
both_inits = pytest.mark.parametrize("init", ["tini", "launcher"])

# Limit in seconds for the end of a container after a signal. It takes under 1 s, more if the engine is busy (2026-11).
# If the signal has no effect, it ends after the sleep or wait that it is in.
SOON = 10

# A trainer with a SIGTERM handler, as the reference trainers have: it saves, then exits with 143.
TRAINER = """
import signal, sys, time
def save(*_):
    time.sleep(0.3)
    print("saved", flush=True)
    sys.exit(143)
signal.signal(signal.SIGTERM, save)
print("up", flush=True)
time.sleep(60)
"""
NO_HANDLER = "import time; print('up', flush=True); time.sleep(60)"
# Five orphans that exit at once; those that PID 1 has not reaped after 10 s are zombies.
ORPHANS = """
import os, time
for _ in range(5):
    if os.fork() == 0:
        if os.fork() == 0:
            time.sleep(0.05)
        os._exit(0)
    os.wait()
time.sleep(0.6)
end = time.monotonic() + 10
while True:
    states = []
    for pid in filter(str.isdigit, os.listdir("/proc")):
        try:
            states.append(open(f"/proc/{pid}/stat").read().rpartition(")")[2].split()[0])
        except OSError:
            pass
    if "Z" not in states or time.monotonic() > end:
        break
    time.sleep(0.1)
print("zombies", states.count("Z"))
"""


class Started:
    """A container of the image under test."""

    def __init__(self, container: Container) -> None:
        self.container = container

    def log(self, *, stderr: bool = True) -> str:
        """Its output so far."""
        return str(self.container.logs(stderr=stderr).decode())

    def until(self, text: str, *, stderr: bool = False) -> None:
        """Wait until a line of its standard output, or error, contains this text."""
        for line in self.container.logs(stdout=not stderr, stderr=stderr, stream=True, follow=True):
            if text in line.decode():
                return
        pytest.fail(f"the container ended without {text!r}: {self.log()}")

    def wait(self, timeout: float = 30) -> int:
        """Its exit status."""
        return int(self.container.wait(timeout=timeout)["StatusCode"])

    def stop(self, signal: str = "SIGTERM") -> tuple[int, float]:
        """Send a signal; return the exit status and the seconds until the exit."""
        started = time.monotonic()
        self.container.kill(signal)
        status = self.wait()
        return status, time.monotonic() - started


Start = Callable[..., Started]


@pytest.fixture
def start(built_image: Callable[[str], str]) -> Iterator[Start]:
    """Start the image with these arguments."""
    made: list[Container] = []

    def run(*words: str, **options: Any) -> Started:
        container = ENGINE.client.containers.create(
            built_image("tf-cpu"),
            list(words),
            labels=resource_labels("test"),
            **{"network_mode": "none", **options},
        )
        made.append(container)
        container.start()
        return Started(container)

    yield run
    for container in made:
        container.remove(force=True)


@pytest.mark.parametrize(
    ("init", "status"),
    [
        *((init, status) for init in ("tini", "launcher") for status in (0, 1, 42, 126, 127)),
        *((init, 42) for init in ("docker-init", "wrapped", "wrapped-without-tini")),
    ],
)
def test_the_trainers_status_is_the_exit_status(start: Start, init: str, status: int) -> None:
    assert start("--", "sh", "-c", f"exit {status}", **INITS[init]).wait() == status


@both_inits
@pytest.mark.parametrize(
    ("command", "status", "message"),
    [
        pytest.param("no-such-command", 127, "'no-such-command' not found", id="not-found"),
        pytest.param("/etc/passwd", 126, "cannot execute '/etc/passwd': Permission denied", id="not-executable"),
    ],
)
def test_commands_that_cannot_be_started(start: Start, init: str, command: str, status: int, message: str) -> None:
    started = start("--", command, **INITS[init])
    assert started.wait() == status
    assert message in started.log().splitlines()[-1]


@every_init
def test_a_crash_is_128_plus_its_signal(start: Start, init: str) -> None:
    """As PID 1 without an init, a process that sends itself SIGSEGV survives."""
    crash = "import os, signal; os.kill(os.getpid(), signal.SIGSEGV)"
    assert start("--", "python3", "-c", crash, **INITS[init]).wait() == 139


@every_init
def test_sigterm_runs_the_trainers_handler(start: Start, init: str) -> None:
    started = start("--", "python3", "-c", TRAINER, **INITS[init])
    started.until("up")
    status, seconds = started.stop()
    assert status == 143
    assert seconds < SOON
    assert "saved" in started.log(stderr=False)


@every_init
def test_sigterm_reaches_each_of_several_processes(start: Start, init: str) -> None:
    # Not with print: the handler may interrupt the first one.
    text = "import os\n" + TRAINER.replace('print("saved", flush=True)', 'os.write(1, b"saved\\n")')
    started = start("--", "python3", "-c", text, environment={"LAUNCHER_NPROC": "2"}, **INITS[init])
    end = time.monotonic() + 30
    while started.log(stderr=False).count("up") < 2:
        assert time.monotonic() < end, started.log()
        time.sleep(0.05)
    status, seconds = started.stop()
    assert status == 143
    assert seconds < SOON
    assert started.log(stderr=False).count("saved") == 2


@every_init
def test_the_first_failure_of_several_processes_is_the_exit_status(start: Start, init: str) -> None:
    command = 'if [ "$RANK" = 1 ]; then exit 42; fi; exec sleep 60'
    started = start("--", "sh", "-c", command, environment={"LAUNCHER_NPROC": "2"}, **INITS[init])
    assert started.wait() == 42
    assert "rank 1 exited with 42; ending the other process" in started.log()


@both_inits
def test_sigterm_ends_a_trainer_without_a_handler(start: Start, init: str) -> None:
    """As PID 1 it would ignore SIGTERM."""
    started = start("--", "python3", "-c", NO_HANDLER, **INITS[init])
    started.until("up")
    status, seconds = started.stop()
    assert (status, seconds < SOON) == (143, True)


@pytest.mark.parametrize("init", ["tini", "docker-init"])
def test_sigterm_is_not_lost_at_the_start(start: Start, init: str) -> None:
    """Sent as early as possible: before, during or after the exec. This needs an init: the kernel drops signals that
    reach PID 1 before it has a handler, and a Python interpreter takes about 10 ms to install one."""
    started = start("--", "python3", "-c", NO_HANDLER, **INITS[init])
    status, seconds = started.stop()
    assert (status, seconds < SOON) == (143, True)


@both_inits
def test_sigterm_ends_the_wait_for_a_tpu_node(start: Start, init: str) -> None:
    config = {"project": "p", "zone": "z", "tpu_node_name": "n"}
    # The interval is longer than SOON: the wait ends in time only if the signal interrupts it.
    env = {"TPU_CONFIG": json.dumps(config), "GCE_METADATA_HOST": "127.0.0.1:1", "LAUNCHER_TPU_INTERVAL": "20"}
    started = start("mnist", environment=env, **INITS[init])
    started.until("attempt 1 of 40", stderr=True)
    status, seconds = started.stop()
    assert (status, seconds < SOON) == (143, True)
    assert "SIGTERM while waiting for TPU 'n'" in started.log()


@every_init
def test_orphans_are_reaped(start: Start, init: str) -> None:
    started = start("--", "python3", "-c", ORPHANS, **INITS[init])
    assert started.wait() == 0
    assert started.log(stderr=False) == "zombies 0\n"


SHELL = 'python3 -c "$0"; exit 3'


@pytest.mark.parametrize(
    ("options", "handled"),
    [
        pytest.param({"entrypoint": ["launch", "--signal-group"]}, True, id="signal-group"),
        pytest.param({"environment": {"LAUNCHER_SIGNAL_GROUP": "1"}}, True, id="signal-group-below-tini"),
        pytest.param({"entrypoint": ["launch"]}, False, id="launcher"),
        pytest.param({}, False, id="tini"),
    ],
)
def test_signals_to_a_shell_entry_point(start: Start, options: dict[str, Any], handled: bool) -> None:
    """A shell that waits for its child: only a signal to the whole group reaches the trainer's handler, and only the
    launcher waits for the handler. (`tini -g` exits with the shell, even if the handler is still running.)"""
    started = start("--", "bash", "-c", SHELL, TRAINER, **options)
    started.until("up")
    status, seconds = started.stop()
    # The signal ends bash, or bash exits with its own status after the child has handled the signal.
    assert status in ((143, 3) if handled else (143,))
    assert seconds < SOON
    assert ("saved" in started.log(stderr=False)) == handled


def test_an_entrypoint_in_shell_form(start: Start) -> None:
    """With an entrypoint `sh -c`, dash remains the parent process of the trainer."""
    started = start(entrypoint=["sh", "-c", "launch -- python3 -c 'import sys; sys.exit(42)'"])
    assert started.wait() == 42


@pytest.mark.parametrize("init", ["tini", "launcher", "wrapped", "wrapped-without-tini"])
def test_pid_1_is_tini(start: Start, init: str) -> None:
    """Expect that the launcher, as PID 1, starts itself again below tini."""
    started = start("--", "cat", "/proc/1/comm", **INITS[init])
    assert started.wait() == 0
    assert started.log(stderr=False) == "tini\n"


@pytest.mark.parametrize("signal", ["SIGINT", "SIGHUP", "SIGUSR1"])
def test_other_signals_are_forwarded(start: Start, signal: str) -> None:
    text = TRAINER.replace("SIGTERM", signal).replace("143", "9")
    for options in ({}, {"entrypoint": ["launch"]}):
        started = start("--", "python3", "-c", text, **options)
        started.until("up")
        assert started.stop(signal)[0] == 9


@both_inits
@pytest.mark.parametrize(
    "options",
    [
        pytest.param({"user": "12345:0"}, id="arbitrary-user"),
        pytest.param({"user": "65534:65534"}, id="nobody"),
        pytest.param({"user": "0:0"}, id="root"),
        pytest.param({"read_only": True}, id="read-only-root"),
        pytest.param({"cap_drop": ["ALL"], "security_opt": ["no-new-privileges"], "pids_limit": 16}, id="restricted"),
    ],
)
def test_runs_as_any_user_and_with_restrictions(start: Start, init: str, options: dict[str, Any]) -> None:
    show = "import os; print(os.getuid(), os.environ['NNODES'])"
    started = start("--", "python3", "-c", show, environment={"LAUNCHER_NPROC": "1"}, **INITS[init], **options)
    assert started.wait() == 0, started.log()
    assert started.log(stderr=False).split()[1] == "1"


def test_a_command_that_replaces_the_entrypoint_does_not_need_the_launcher(start: Start) -> None:
    """Vertex AI's containerSpec.command replaces the entrypoint."""
    assert start(entrypoint=["python3", "-c", "print('without the launcher')"]).wait() == 0


def test_print_env_in_the_image(start: Start) -> None:
    started = start("--print-env", "--json")
    assert started.wait() == 0
    assert json.loads(started.log(stderr=False))["runtime"] in ("cpu", "gpu", "tpu-local", "tpu-node")


def test_an_unknown_trainer_lists_the_valid_ones(start: Start) -> None:
    started = start("mnits")
    assert started.wait() == 2
    assert "'mnits' is not a trainer of this image; trainers: " in started.log()
    assert started.log().count("\n") == 1


def test_sigterm_ends_the_wait_for_the_name_of_node_0(start: Start) -> None:
    cluster = {"workerpool0": ["no-such-host.invalid:2222"], "workerpool1": ["here:2222"]}
    spec = json.dumps({"cluster": cluster, "task": {"type": "workerpool1", "index": 0}})
    env = {"CLUSTER_SPEC": spec, "LAUNCHER_FRAMEWORK": "torch==2.9.1"}
    for options in ({}, {"entrypoint": ["launch"]}):
        started = start("--", "true", environment=env, **options)
        started.until("start     true", stderr=True)
        status, seconds = started.stop()
        assert (status, seconds < SOON) == (143, True)


@pytest.mark.big("xla")
def test_the_launchers_layer_is_the_same_blob_in_every_image(built_image: Callable[[str], str]) -> None:
    layers = [ENGINE.client.images.get(built_image(target)).attrs["RootFS"]["Layers"] for target in ("tf-cpu", "xla")]
    assert layers[0][-1] == layers[1][-1]
