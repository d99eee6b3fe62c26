"""`make pod` against our fake of the Cloud TPU API: the real gcloud, and real ssh into containers, its workers."""

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

from scripts import base, engine
from scripts.cli import ROOT
from scripts.fakes.tpu_vms import TpuVms

#: An image that only the workers' service account can read.
IMAGE = "us-central1-docker.pkg.dev/fake-project/ml/small:1"
#: Two workers; small enough for a test.
SLICE = ("--accelerator=v4-16", "--zone=us-central2-b")
QUICK = ("--poll=2s", "--grace=2s", "--wait=120s")


class Running:
    """A command in the background; what it says so far."""

    def __init__(self, command: list[str], environment: dict[str, str], folder: Path) -> None:
        self._log = folder / f"{time.monotonic_ns()}.log"
        with self._log.open("w") as log:
            self.process = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=log, stderr=subprocess.STDOUT)

    @property
    def text(self) -> str:
        return self._log.read_text(encoding="utf-8")

    def until(self, pattern: str, seconds: float = 120) -> None:
        """Wait for it to say something."""
        deadline = time.monotonic() + seconds
        while not re.search(pattern, self.text, re.MULTILINE):
            assert self.process.poll() is None, f"ended without {pattern!r}:\n{self.text}"
            assert time.monotonic() < deadline, f"no {pattern!r} in:\n{self.text}"
            time.sleep(0.1)

    def end(self, seconds: float = 120) -> int:
        return self.process.wait(timeout=seconds)


@pytest.fixture(scope="session")
def cloud() -> Iterator[TpuVms]:
    with TpuVms(images={IMAGE: base.resolve("debian-12").reference}) as found:
        yield found


@pytest.fixture(scope="session")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A home folder, where gcloud makes its ssh keys once."""
    return tmp_path_factory.mktemp("home")


@pytest.fixture
def start(cloud: TpuVms, home: Path, tmp_path: Path) -> Iterator[Callable[..., Running]]:
    """Start the verb in the background with these flags."""
    started = []

    def run(*words: str, **variables: str) -> Running:
        command = [sys.executable, "-m", "scripts.pod", *words]
        started.append(Running(command, os.environ | cloud.environment(home) | variables, tmp_path))
        return started[-1]

    yield run
    for running in started:
        running.process.kill()


@pytest.fixture
def pod(start: Callable[..., Running]) -> Callable[..., tuple[int, str]]:
    """What the verb does with these flags: exit status and all it says."""

    def run(*words: str, **variables: str) -> tuple[int, str]:
        running = start(*words, **variables)
        return running.end(), running.text

    return run


@pytest.fixture
def volume(request: pytest.FixtureRequest) -> str:
    """A volume, which stands for the bucket that outlives a pod."""
    made = engine.client().volumes.create(f"trainyard-test-{os.getpid()}", labels=engine.owned("test"))

    def remove() -> None:
        for container in engine.client().containers.list(all=True, filters={"volume": str(made.name)}):
            container.remove(force=True)
        made.remove(force=True)

    request.addfinalizer(remove)
    return str(made.name)


def shell(script: str) -> str:
    """COMMAND for a shell script."""
    return f"--command=sh -c '{script}'"


def asked(cloud: TpuVms, method: str, ends: str) -> list[Any]:
    """Bodies of the requests so far."""
    return [body for kind, path, body in cloud.requests if kind == method and path.endswith(ends)]


def nothing_left(cloud: TpuVms, name: str) -> bool:
    """Whether the pod is gone, and of all workers and what ran in them only those of other pods are here."""
    mine = {"label": f"{engine.OWNER}={os.getpid()}", "name": "t1v-n-"}
    containers = [str(each.name) for each in engine.client().containers.list(all=True, filters=mine)]  # type: ignore[arg-type]
    known = {str(w.container.name) for node in cloud.nodes.values() for w in node.workers}
    strays = [container for container in containers if container.partition(".")[0] not in known]
    return not strays and not any(full.endswith(f"/{name}") for full in [*cloud.nodes, *cloud.queue])


Pod = Callable[..., tuple[int, str]]
Start = Callable[..., Running]


def test_a_pod_lives_from_create_to_delete_and_passes_on_how_its_first_worker_failed(cloud: TpuVms, pod: Pod) -> None:
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
        "WARNING: worker 2 ended with exit status 7",
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
    body = next(each for each in asked(cloud, "POST", "/nodes") if each["acceleratorType"] == "v5litepod-16")
    assert body["schedulingConfig"]["spot"] is True
    assert body["runtimeVersion"] == "v2-alpha-tpuv5-lite"
    assert nothing_left(cloud, "whole")


def test_a_queued_pod_that_is_taken_is_queued_again_and_the_run_goes_on(
    cloud: TpuVms, start: Start, volume: str
) -> None:
    cloud.queue_seconds = 2
    script = "f=/v/$(hostname | sed s/.*-//); [ -e $f ] && { echo resumed; exit 0; }; : >$f; echo first; sleep 300"
    words = ("--name=taken", *SLICE, f"--image={IMAGE}", *QUICK, "--queued", "--valid-until=6h", "--spot")
    running = start(*words, f"--flags=-v {volume}:/v", shell(script))
    running.until(r"\[0\] first")
    running.until(r"\[1\] first")
    cloud.preempt("taken")
    assert running.end() == 0, running.text
    cloud.queue_seconds = 0
    text = running.text
    states = re.findall(r"^taken \(queue\): (\w+)", text, re.MULTILINE)
    assert states[0] == "WAITING_FOR_RESOURCES" and states[-1] == "ACTIVE" and states.count("ACTIVE") == 2, text
    assert "WARNING: taken was preempted: creating it again (1 of 50)" in text
    assert text.count("] resumed") == 2
    body = asked(cloud, "POST", "/queuedResources")[-1]
    assert body["queueingPolicy"]["validUntilDuration"] == "21600s"
    assert body["tpu"]["nodeSpec"][0]["nodeId"] == "taken"
    assert "spot" in body
    assert nothing_left(cloud, "taken")


def test_ctrl_c_deletes_the_pod_whatever_it_was_doing(cloud: TpuVms, start: Start) -> None:
    cloud.boot_seconds = 4
    creating = start("--name=early", *SLICE, f"--image={IMAGE}", *QUICK)
    creating.until("early: CREATING")
    cloud.boot_seconds = 0
    training = start("--name=late", *SLICE, f"--image={IMAGE}", *QUICK, shell("echo here; exec sleep 300"))
    creating.process.send_signal(signal.SIGINT)
    training.until(r"\[1\] here")
    training.process.send_signal(signal.SIGTERM)
    time.sleep(0.5)
    training.process.send_signal(signal.SIGINT)  # whoever is impatient does not leave a pod behind
    for running, name in ((creating, "early"), (training, "late")):
        assert running.end() == 130, running.text
        assert f"{name}: deleted" in running.text
        assert "Traceback" not in running.text
        assert nothing_left(cloud, name)
    assert "early cannot be deleted yet" in creating.text


def test_keep_leaves_the_pod_but_no_container_running(cloud: TpuVms, start: Start, pod: Pod) -> None:
    running = start("--name=kept", *SLICE, f"--image={IMAGE}", *QUICK, "--keep", shell("echo here; exec sleep 300"))
    running.until(r"\[1\] here")
    running.process.send_signal(signal.SIGINT)
    assert running.end() == 130
    assert "kept is kept, and costs money until 'make pod ACTION=delete NAME=kept'" in running.text
    code, text = pod("--action=status", "--name=kept", *SLICE, *QUICK, "--json")
    assert code == 0, text
    assert "kept: worker 1 (" in text and "container ended with exit status 137" in text
    facts = json.loads(text[text.index("{") :])
    assert (facts["state"], facts["containers"]) == ("READY", ["ended with exit status 137"] * 2)
    # A second run finds the pod, and leaves it where it is.
    code, text = pod("--name=kept", *SLICE, f"--image={IMAGE}", *QUICK, shell("echo again"))
    assert code == 0, text
    assert "kept is there already: it is used as it is, and not deleted at the end" in text
    assert text.count("] again") == 2
    assert cloud.node("kept").resource["state"] == "READY"
    assert pod("--action=delete", "--name=kept", *SLICE)[0] == 0
    assert nothing_left(cloud, "kept")


def test_a_lost_connection_loses_no_line_and_repeats_none(cloud: TpuVms, start: Start) -> None:
    script = "for i in $(seq 1 8); do echo line $i; sleep 1; done"
    running = start("--name=lost", *SLICE, f"--image={IMAGE}", *QUICK, shell(script))
    running.until(r"\[0\] line 2")
    cloud.node("lost").workers[0].shell("pkill -f '[s]shd: .*@'")
    assert running.end() == 0, running.text
    for index in range(2):
        assert re.findall(rf"\[{index}\] line (\d)", running.text) == list("12345678")


def test_maintenance_is_waited_for_and_the_old_command_line_still_works(
    cloud: TpuVms, start: Start, pod: Pod, tmp_path: Path
) -> None:
    assert pod("--action=create", "--name=old", *SLICE, *QUICK)[0] == 0
    words = ["--tpu=old", f"--docker-image={IMAGE}", "--docker-container=mine", "--docker-run-flag=--shm-size=1g"]
    words += ["--restart-tpuvm-pod-server", "--env", "XLA_USE_BF16=1", "--env=B=2"]
    settings = {"ZONE": "us-central2-b", "POLL": "2s", "GRACE": "2s"}
    running = start(*words, "--", "sh", "-c", "echo bf16 $XLA_USE_BF16 $B; sleep 15", **settings)
    running.until(r"\[1\] bf16 1 2")
    cloud.maintain("old", 10)
    running.until("old is under maintenance: starting again as soon as it is healthy")
    assert running.end() == 0, running.text
    text = running.text
    assert (
        "--restart-tpuvm-pod-server means nothing today: there is no XRT server to restart since torch_xla 2.1" in text
    )
    assert "XLA_USE_BF16 has no effect: torch_xla 2.9 does not read it" in text
    assert "old: READY, UNHEALTHY_MAINTENANCE" in text
    assert text.count("] bf16 1 2") == 4
    assert cloud.node("old").resource["state"] == "READY", "what it did not create, it does not delete"
    assert pod("--action=delete", "--name=old", *SLICE)[0] == 0


def one_line(text: str) -> str:
    """The error's line."""
    lines = [line for line in text.splitlines() if line.startswith("pod: ")]
    assert len(lines) == 1 and "Traceback" not in text, text
    return lines[0]


def test_what_goes_wrong_is_one_clear_line_and_leaves_nothing(cloud: TpuVms, pod: Pod, start: Start) -> None:
    words = ("--name=wrong", *SLICE, *QUICK)
    cloud.no_capacity = 1
    code, text = pod(*words, f"--image={IMAGE}")
    assert code == 1
    assert 'wrong: There is no more capacity in the zone "us-central2-b"' in one_line(text)
    assert "(QUEUED=1 waits for capacity)" in one_line(text)
    cloud.no_quota = 1
    code, text = pod(*words, f"--image={IMAGE}")
    assert code == 1 and "Quota limit" in one_line(text)
    code, text = pod("--action=create", "--name=wrong", "--accelerator=v4-16", "--zone=us-central2-c")
    assert code == 2 and "ZONE=us-central2-c has no v4-16 (did you mean 'us-central2-b'?)" in one_line(text)
    code, text = pod("--action=status", "--name=wrong", "--zone=moon-1")
    assert code == 1 and "Permission denied on 'locations/moon-1' (or it may not exist)" in one_line(text)
    code, text = pod("--action=check", "--name=nobody", "--zone=us-central2-b")
    assert code == 2 and "no TPU VM nobody in us-central2-b: 'make pod ACTION=create' makes one" in one_line(text)
    code, text = pod(*words, "--image=us-central1-docker.pkg.dev/fake-project/ml/none:1")
    assert code == 1
    assert "the pull of us-central1-docker.pkg.dev/fake-project/ml/none:1 failed on workers 0 and 1: " in one_line(text)
    assert nothing_left(cloud, "wrong")


def test_workers_that_do_not_reach_each_other_are_found_before_anything_runs(cloud: TpuVms, pod: Pod) -> None:
    assert pod("--action=create", "--name=apart", *SLICE, *QUICK)[0] == 0
    code, text = pod("--action=check", "--name=apart", *SLICE)
    assert code == 0 and "apart: 2 workers, each takes ssh and reaches all others" in text
    cloud.cut_off("apart", 1)
    code, text = pod("--action=check", "--name=apart", *SLICE, "--check-wait=5s")
    assert code == 1
    assert re.search(r"worker 0 does not reach worker 1(;.*)? at port 8476: allow traffic inside", one_line(text))
    cloud.node("apart").workers[1].container.stop(timeout=0)
    code, text = pod("--action=check", "--name=apart", *SLICE)
    assert code == 1
    assert "ssh failed on worker 1: no answer by ssh" in one_line(text)
    assert pod("--action=delete", "--name=apart", *SLICE)[0] == 0
