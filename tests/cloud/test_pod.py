"""`trainyard pod` with the real gcloud against a fake Cloud TPU API, whose workers are containers with ssh."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.engine import CONTEXT, ENGINE
from tests.fakes.tpu_vms import TpuVms

from trainyard.common.docker_engine import OWNER, owner_name, resource_labels
from trainyard.common.settings import ROOT
from trainyard.image import base_image
from trainyard_jobs.pods.shell_commands import CONTAINER

pytestmark = [pytest.mark.concurrent, pytest.mark.needs("gcloud")]

#: An image that only the workers' service account can read.
IMAGE = "us-central1-docker.pkg.dev/fake-project/ml/small:1"
#: Two workers; small enough for a test.
SLICE = ("--accelerator=v4-16", "--zone=us-central2-b")
QUICK = ("--poll=2s", "--grace=2s", "--wait=120s")


class Running:
    """A command in the background, and its output so far."""

    def __init__(self, command: list[str], environment: dict[str, str], folder: Path) -> None:
        self._log = folder / f"{time.monotonic_ns()}.log"
        with self._log.open("w") as log:
            self.process = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=log, stderr=subprocess.STDOUT)

    @property
    def text(self) -> str:
        return self._log.read_text(encoding="utf-8")

    def until(self, pattern: str, seconds: float = 300) -> None:
        """Wait until its output has a line like this."""
        deadline = time.monotonic() + seconds
        while not re.search(pattern, self.text, re.MULTILINE):
            assert self.process.poll() is None, f"ended without {pattern!r}:\n{self.text}"
            assert time.monotonic() < deadline, f"no {pattern!r} in:\n{self.text}"
            time.sleep(0.1)

    def end(self, seconds: float = 300) -> int:
        return self.process.wait(timeout=seconds)


@pytest.fixture(scope="session")
def cloud() -> Iterator[TpuVms]:
    with TpuVms(images={IMAGE: base_image.resolve(CONTEXT, "debian-12").reference}) as found:
        yield found


@pytest.fixture(scope="session")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A home folder, where gcloud makes its ssh keys once."""
    return tmp_path_factory.mktemp("home")


@pytest.fixture
def start(cloud: TpuVms, home: Path, tmp_path: Path) -> Iterator[Callable[..., Running]]:
    """Start `trainyard pod` in the background with these flags and variables."""
    started = []

    def run(*words: str, **variables: str) -> Running:
        given = {f"TRAINYARD_{name}": value for name, value in variables.items()}
        command = [sys.executable, "-m", "trainyard", "pod", *words]
        started.append(Running(command, os.environ | cloud.environment(home) | given, tmp_path))
        return started[-1]

    yield run
    for running in started:
        running.process.kill()


@pytest.fixture
def pod(start: Callable[..., Running]) -> Callable[..., tuple[int, str]]:
    """Exit status and output of `trainyard pod` with these flags and variables."""

    def run(*words: str, **variables: str) -> tuple[int, str]:
        running = start(*words, **variables)
        return running.end(), running.text

    return run


@pytest.fixture
def volume(request: pytest.FixtureRequest) -> str:
    """A volume, used as the bucket that remains when a pod is deleted."""
    made = ENGINE.client.volumes.create(f"trainyard-test-{os.getpid()}", labels=resource_labels("test"))

    def remove() -> None:
        for container in ENGINE.client.containers.list(all=True, filters={"volume": str(made.name)}):
            container.remove(force=True)
        made.remove(force=True)

    request.addfinalizer(remove)
    return str(made.name)


def shell(script: str) -> str:
    """The flag that runs a shell script."""
    return f"--command=sh -c '{script}'"


def bodies(cloud: TpuVms, method: str, ends: str) -> list[Any]:
    """Bodies of the requests so far."""
    return [body for kind, path, body in cloud.requests if kind == method and path.endswith(ends)]


def nothing_left(cloud: TpuVms, name: str) -> bool:
    """Whether the pod is deleted and no worker of it, nor container on a worker, remains."""
    mine = {"label": f"{OWNER}={owner_name(os.getpid())}", "name": "t1v-n-"}
    containers = [str(each.name) for each in ENGINE.client.containers.list(all=True, filters=mine)]  # type: ignore[arg-type]
    known = {str(w.container.name) for node in cloud.nodes.values() for w in node.workers}
    strays = [container for container in containers if container.partition(".")[0] not in known]
    return not strays and not any(full.endswith(f"/{name}") for full in [*cloud.nodes, *cloud.queue])


Pod = Callable[..., tuple[int, str]]
Start = Callable[..., Running]


def test_a_pod_is_created_trains_and_is_deleted_and_returns_the_status_of_the_first_failed_worker(
    cloud: TpuVms, pod: Pod
) -> None:
    script = "echo out; echo err >&2; case $(hostname) in *-2) exit 7;; esac; exec sleep 300"
    cloud.boots_unseen = False
    words = ("--name=whole", "--accelerator=v5litepod-16", "--spot", f"--image={IMAGE}", "--env=A='x $HOME y'")
    code, text = pod(*words, *QUICK, shell(script))
    cloud.boots_unseen = True
    assert code == 7, text
    said = [
        "whole: creating v5litepod-16 (Spot) in us-central1-a",
        "whole: CREATING",
        "whole: READY (",
        f"whole: pulling {IMAGE} on 4 workers",
        "whole: training on 4 workers",
        "WARNING: worker 2 exited with status 7",
        "whole: deleting it",
        "whole: deleted",
        "whole: a worker failed with exit status 7",
    ]
    places = [text.find(line) for line in said]
    assert -1 not in places and places == sorted(places), text
    for index in range(4):
        for word in ("out", "err"):
            line = rf"^\d{{4}}-\d\d-\d\d \d\d:\d\d:\d\d [\d.]+ \[{index}\] {word}$"
            assert re.search(line, text, re.MULTILINE), f"{line} in:\n{text}"
    body = next(each for each in bodies(cloud, "POST", "/nodes") if each["acceleratorType"] == "v5litepod-16")
    assert body["schedulingConfig"]["spot"] is True
    assert body["runtimeVersion"] == "v2-alpha-tpuv5-lite"
    assert nothing_left(cloud, "whole")


def test_a_preempted_queued_pod_is_queued_again_and_its_run_restarted(cloud: TpuVms, start: Start, volume: str) -> None:
    cloud.provisions.clear()
    script = "f=/v/$(hostname | sed s/.*-//); [ -e $f ] && { echo resumed; exit 0; }; : >$f; echo first; sleep 300"
    words = ("--name=taken", *SLICE, f"--image={IMAGE}", *QUICK, "--queued", "--valid-until=6h", "--spot")
    running = start(*words, f"--flags=-v {volume}:/v", shell(script))
    running.until(r"^taken \(queue\): WAITING_FOR_RESOURCES")
    cloud.provisions.set()
    running.until(r"\[0\] first")
    running.until(r"\[1\] first")
    cloud.preempt("taken")
    assert running.end() == 0, running.text
    text = running.text
    states = re.findall(r"^taken \(queue\): (\w+)", text, re.MULTILINE)
    assert states[0] == "WAITING_FOR_RESOURCES" and states[-1] == "ACTIVE" and states.count("ACTIVE") == 2, text
    assert "WARNING: taken was preempted: creating it again (1 of 50)" in text
    assert text.count("] resumed") == 2
    body = bodies(cloud, "POST", "/queuedResources")[-1]
    assert body["queueingPolicy"]["validUntilDuration"] == "21600s"
    assert body["tpu"]["nodeSpec"][0]["nodeId"] == "taken"
    assert "spot" in body
    assert nothing_left(cloud, "taken")


def test_ctrl_c_deletes_the_pod_during_creation_and_training(cloud: TpuVms, start: Start) -> None:
    cloud.boots_undeleted = False
    creating = start("--name=early", *SLICE, f"--image={IMAGE}", *QUICK)
    creating.until("early: CREATING")
    cloud.boots_undeleted = True
    training = start("--name=late", *SLICE, f"--image={IMAGE}", *QUICK, shell("echo here; exec sleep 300"))
    creating.process.send_signal(signal.SIGINT)
    training.until(r"\[1\] here")
    training.process.send_signal(signal.SIGTERM)
    training.until("late: deleting it")
    training.process.send_signal(signal.SIGINT)  # a second signal does not leave a pod behind
    for running, name in ((creating, "early"), (training, "late")):
        assert running.end() == 130, running.text
        assert f"{name}: deleted" in running.text
        assert "Traceback" not in running.text
        assert nothing_left(cloud, name)
    assert "early cannot be deleted yet" in creating.text


def test_keep_leaves_the_pod_without_a_running_container(cloud: TpuVms, start: Start, pod: Pod) -> None:
    running = start("--name=kept", *SLICE, f"--image={IMAGE}", *QUICK, "--keep", shell("echo here; exec sleep 300"))
    running.until(r"\[1\] here")
    running.process.send_signal(signal.SIGINT)
    assert running.end() == 130
    assert "kept is kept and billed until 'trainyard pod --action delete --name kept'" in running.text
    code, text = pod("--action=status", "--name=kept", *SLICE, *QUICK, "--json")
    assert code == 0, text
    assert "kept: worker 1 (" in text and "container exited with status 137" in text
    facts = json.loads(text[text.index("{") :])
    assert (facts["state"], facts["containers"]) == ("READY", ["exited with status 137"] * 2)
    # A second run uses the pod and does not delete it.
    code, text = pod("--name=kept", *SLICE, f"--image={IMAGE}", *QUICK, shell("echo again"))
    assert code == 0, text
    assert "kept exists: it is used as it is and not deleted at the end" in text
    assert text.count("] again") == 2
    assert cloud.node("kept").resource["state"] == "READY"
    assert pod("--action=delete", "--name=kept", *SLICE)[0] == 0
    assert nothing_left(cloud, "kept")


@pytest.mark.slow("tests/unit/test_pod_life.py")
def test_a_lost_connection_neither_loses_nor_repeats_a_line(cloud: TpuVms, start: Start) -> None:
    script = (
        "echo line 1; echo line 2; until [ -e /tmp/lost ]; do sleep 0.1; done; "
        "for i in $(seq 3 8); do echo line $i; sleep 1; done"
    )
    running = start("--name=lost", *SLICE, f"--image={IMAGE}", *QUICK, shell(script))
    running.until(r"\[0\] line 2")
    workers = cloud.node("lost").workers
    # The process of a connection: `sshd: USER@…`, `sshd-session: USER@…` since OpenSSH 9.8.
    workers[0].shell("pkill -f '[s]shd(-session)?: .*@'")
    for worker in workers:
        worker.shell(f"docker exec {CONTAINER} touch /tmp/lost")
    assert running.end() == 0, running.text
    for index in range(2):
        assert re.findall(rf"\[{index}\] line (\d)", running.text) == list("12345678")


@pytest.mark.slow("tests/unit/test_pod_life.py, tests/unit/test_pod_commands.py")
def test_a_run_waits_for_the_end_of_maintenance_and_takes_xla_dists_command_line(
    cloud: TpuVms, start: Start, pod: Pod, volume: str
) -> None:
    assert pod("--action=create", "--name=old", *SLICE, *QUICK)[0] == 0
    words = ["--tpu=old", f"--docker-image={IMAGE}", "--docker-container=mine", "--docker-run-flag=--shm-size=1g"]
    words += ["--restart-tpuvm-pod-server", "--env", "XLA_USE_BF16=1", "--env=B=2"]
    words += [f"--docker-run-flag=--volume={volume}:/v"]
    # The first run lasts until it is stopped.
    script = "f=/v/$(hostname | sed s/.*-//); [ -e $f ] && s=0 || s=300; : >$f; echo bf16 $XLA_USE_BF16 $B; sleep $s"
    settings = {"ZONE": "us-central2-b", "POLL": "2s", "GRACE": "2s"}
    running = start(*words, "--", "sh", "-c", script, **settings)
    for index in range(2):
        running.until(rf"\[{index}\] bf16 1 2")
    cloud.start_maintenance("old")
    running.until("old is under maintenance: restarting when it is healthy")
    running.until("old: READY, UNHEALTHY_MAINTENANCE")
    cloud.end_maintenance("old")
    assert running.end() == 0, running.text
    text = running.text
    assert "--restart-tpuvm-pod-server is ignored: there is no XRT server to restart since torch_xla 2.1" in text
    assert "XLA_USE_BF16 has no effect: torch_xla 2.9 does not read it" in text
    assert text.count("] bf16 1 2") == 4
    assert cloud.node("old").resource["state"] == "READY", "a pod that it did not create is not deleted"
    assert pod("--action=delete", "--name=old", *SLICE)[0] == 0


def one_line(text: str) -> str:
    """The error's line."""
    lines = [line for line in text.splitlines() if line.startswith("pod: ")]
    assert len(lines) == 1 and "Traceback" not in text, text
    return lines[0]


def test_failures_are_one_line_and_leave_nothing(cloud: TpuVms, pod: Pod, start: Start) -> None:
    words = ("--name=wrong", *SLICE, *QUICK)
    cloud.no_capacity = 1
    code, text = pod(*words, f"--image={IMAGE}")
    assert code == 1
    assert 'wrong: There is no more capacity in the zone "us-central2-b"' in one_line(text)
    assert "('--queued' waits for capacity)" in one_line(text)
    cloud.no_quota = 1
    code, text = pod(*words, f"--image={IMAGE}")
    assert code == 1 and "Quota limit" in one_line(text)
    code, text = pod("--action=create", "--name=wrong", "--accelerator=v4-16", "--zone=us-central2-c")
    assert code == 2 and "'--zone us-central2-c' has no v4-16 (did you mean 'us-central2-b'?)" in one_line(text)
    code, text = pod("--action=status", "--name=wrong", "--zone=moon-1")
    assert code == 1 and "Permission denied on 'locations/moon-1' (or it may not exist)" in one_line(text)
    code, text = pod("--action=check", "--name=missing", "--zone=us-central2-b")
    assert (
        code == 2
        and "no TPU VM missing in us-central2-b: create it with 'trainyard pod --action create'" in one_line(text)
    )
    code, text = pod(*words, "--image=us-central1-docker.pkg.dev/fake-project/ml/none:1")
    assert code == 1
    assert "the pull of us-central1-docker.pkg.dev/fake-project/ml/none:1 failed on workers 0 and 1: " in one_line(text)
    assert nothing_left(cloud, "wrong")


@pytest.mark.slow("tests/unit/test_pod_commands.py, with the same probe")
def test_workers_that_cannot_connect_to_each_other_are_reported_before_the_run(cloud: TpuVms, pod: Pod) -> None:
    assert pod("--action=create", "--name=apart", *SLICE, *QUICK)[0] == 0
    code, text = pod("--action=check", "--name=apart", *SLICE)
    assert code == 0 and "apart: 2 workers: ssh works, and every worker reaches all others" in text
    cloud.cut_off("apart", 1)
    code, text = pod("--action=check", "--name=apart", *SLICE, "--check-wait=5s")
    assert code == 1
    assert re.search(r"worker 0 does not reach worker 1(;.*)? on port 8476: allow traffic inside", one_line(text))
    cloud.node("apart").workers[1].container.stop(timeout=0)
    code, text = pod("--action=check", "--name=apart", *SLICE)
    assert code == 1
    assert "ssh failed on worker 1: no answer by ssh" in one_line(text)
    assert pod("--action=delete", "--name=apart", *SLICE)[0] == 0
