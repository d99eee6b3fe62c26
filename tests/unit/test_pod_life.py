"""What `make pod` decides when something happens to a pod; gcloud and the workers are told apart from it here."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest

from scripts import cli
from scripts.cli import StepFailed
from scripts.pods import calls, follow, life, training, whole
from scripts.pods.calls import Node
from scripts.pods.follow import Follower
from scripts.pods.gcloud import Pod
from scripts.pods.life import Limits
from scripts.pods.training import Interruption, Run
from scripts.pods.whole import Whole
from scripts.pods.workers import Workers

POD = Pod("run1", "z", "v4-16", "v")
READY = Node("READY", "HEALTHY", ("10.0.0.1", "10.0.0.2"), "v4-16", "v")
LIMITS = Limits(poll=0, grace=0, restarts=2)
Outcome = int | Interruption | BaseException


class Cloud:
    """Stands for everything outside: what is there, and what was done to it, in order."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.node: Node | None = None
        self.done: list[str] = []
        self.creations: list[str | None] = []
        self.outcomes: Iterator[Outcome] = iter([0])
        monkeypatch.setattr(calls, "node", lambda pod: self.node)
        monkeypatch.setattr(calls, "queued", lambda pod: None)
        monkeypatch.setattr(whole, "create", self.create)
        monkeypatch.setattr(whole, "delete", self.delete)
        monkeypatch.setattr(whole, "connect", lambda pod, node: Workers(pod, [["ssh"]] * 2, node.addresses))
        for name in ("check", "clear", "start", "stop"):
            monkeypatch.setattr(whole, name, self.step(name))
        monkeypatch.setattr(whole, "watch", self.watch)

    def step(self, name: str) -> Callable[..., None]:
        return lambda *_, **__: self.done.append(name)

    def create(self, pod: Pod, limits: Limits) -> Node:
        self.done.append("create")
        why = self.creations.pop(0) if self.creations else None
        if why:
            raise StepFailed(why)
        self.node = READY
        return READY

    def delete(self, pod: Pod, limits: Limits, *, queued: bool) -> bool:
        self.done.append("delete")
        self.node = None
        return True

    def watch(self, *_: object) -> int | Interruption:
        self.done.append("watch")
        outcome = next(self.outcomes)
        if isinstance(outcome, BaseException):
            raise outcome
        return outcome

    def live(self, *outcomes: Outcome, **options: bool) -> int:
        self.outcomes = iter(outcomes)
        return Whole(POD, Run("image"), LIMITS, lambda addresses: lambda worker, line: None, **options).live()


@pytest.fixture
def cloud(monkeypatch: pytest.MonkeyPatch) -> Cloud:
    return Cloud(monkeypatch)


ONCE = ["create", "check", "clear", "start", "watch"]


def test_a_run_ends_with_its_status_and_leaves_nothing(cloud: Cloud) -> None:
    assert cloud.live(7) == 7
    assert cloud.done == [*ONCE, "delete"]


def test_what_was_taken_is_deleted_and_created_again_but_not_for_ever(cloud: Cloud) -> None:
    assert cloud.live(Interruption.TAKEN, 0) == 0
    assert cloud.done == [*ONCE, "delete", *ONCE, "delete"]
    with pytest.raises(StepFailed, match=r"was preempted again, after 2 restarts"):
        cloud.live(*[Interruption.TAKEN] * 3)
    assert cloud.node is None


@pytest.mark.parametrize("why", [Interruption.MAINTENANCE, Interruption.RETRY])
def test_what_was_not_taken_is_started_again_where_it_is(cloud: Cloud, why: Interruption) -> None:
    assert cloud.live(why, 0) == 0
    assert cloud.done == [*ONCE, "stop", *ONCE[1:], "delete"]


def test_a_pod_that_was_there_is_neither_created_nor_deleted(cloud: Cloud) -> None:
    cloud.node = READY
    assert cloud.live(0) == 0
    assert cloud.done == ONCE[1:]
    with pytest.raises(StepFailed, match="was preempted, and was not created here"):
        cloud.live(Interruption.TAKEN)
    assert "delete" not in cloud.done


def test_a_pod_that_somebody_else_made_in_between_is_left_alone(cloud: Cloud) -> None:
    cloud.creations = ["run1: ALREADY_EXISTS: Resource 'run1' already exists."]
    with pytest.raises(StepFailed, match="already exists"):
        cloud.live(0)
    assert cloud.done == ["create"]


def test_capacity_is_waited_for_only_after_a_preemption(cloud: Cloud) -> None:
    none_left = "run1: There is no more capacity in the zone"
    cloud.creations = [none_left]
    with pytest.raises(StepFailed, match="QUEUED=1 waits for capacity"):
        cloud.live(0)
    assert cloud.done == ["create", "delete"]
    cloud.done, cloud.creations = [], [None, none_left, none_left]
    assert cloud.live(Interruption.TAKEN, 0) == 0
    assert cloud.done.count("create") == 4


def test_ctrl_c_deletes_what_was_created_and_stops_what_is_kept(cloud: Cloud) -> None:
    with pytest.raises(KeyboardInterrupt):
        cloud.live(KeyboardInterrupt())
    assert cloud.done == [*ONCE, "delete"]
    cloud.done = []
    with pytest.raises(KeyboardInterrupt):
        cloud.live(KeyboardInterrupt(), keep=True)
    assert cloud.done == [*ONCE, "stop"]


def test_containers_of_others_are_not_stopped(cloud: Cloud, monkeypatch: pytest.MonkeyPatch) -> None:
    def occupied(*_: object) -> None:
        raise StepFailed("run1: a container 'trainyard' runs there already")

    cloud.node = READY
    monkeypatch.setattr(whole, "clear", occupied)
    with pytest.raises(StepFailed, match="runs there already"):
        cloud.live(0)
    assert cloud.done == ["check"]


# --- what an end means ----------------------------------------------------------------------------------------------


def settled(monkeypatch: pytest.MonkeyPatch, code: int, *states: Node | None) -> int | Interruption:
    answers = iter(states)
    last = states[-1]
    monkeypatch.setattr(calls, "node", lambda pod: next(answers, last))
    monkeypatch.setattr(calls, "queued", lambda pod: None)
    return training._settled(POD, LIMITS, code)


def test_a_killed_container_is_a_preemption_if_the_api_says_so_soon_after(monkeypatch: pytest.MonkeyPatch) -> None:
    taken = replace(READY, state="PREEMPTED")
    assert settled(monkeypatch, 143, READY, READY, taken) is Interruption.TAKEN
    assert settled(monkeypatch, 143, READY) == 143
    assert settled(monkeypatch, 1, taken) == 1, "a trainer's own failure is not waited about"


def test_the_launchers_wish_for_a_retry_is_granted(monkeypatch: pytest.MonkeyPatch) -> None:
    assert settled(monkeypatch, 138, READY) is Interruption.RETRY


@pytest.mark.parametrize("state", [None, replace(READY, state="STOPPED")])
def test_what_somebody_took_away_is_no_preemption(monkeypatch: pytest.MonkeyPatch, state: Node | None) -> None:
    with pytest.raises(StepFailed, match="somebody deleted or stopped it"):
        settled(monkeypatch, 143, state)


def test_a_suspended_queued_resource_is_a_preemption(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calls, "node", lambda pod: None)
    monkeypatch.setattr(calls, "queued", lambda pod: ("SUSPENDED", ""))
    assert training.interruption(POD) is Interruption.TAKEN


def test_waiting_for_ready_ends_with_a_line_that_says_how_to_wait_longer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calls, "node", lambda pod: replace(READY, state="CREATING"))
    with pytest.raises(StepFailed, match=r"run1 is CREATING after 0 s \(WAIT= waits longer\)"):
        life.await_ready(POD, replace(LIMITS, ready=-1))
    monkeypatch.setattr(calls, "node", lambda pod: replace(READY, state="STOPPED"))
    with pytest.raises(StepFailed, match="run1 is STOPPED and will not be READY by itself"):
        life.await_ready(POD, LIMITS)


def test_a_queued_resource_that_failed_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calls, "queued", lambda pod: ("FAILED", "the interval expired"))
    with pytest.raises(StepFailed, match="run1: the queued resource is FAILED: the interval expired"):
        life.await_turn(POD, LIMITS)


def test_a_lost_request_does_not_give_up_the_place_in_the_queue(monkeypatch: pytest.MonkeyPatch) -> None:
    answers: Iterator[tuple[str, str] | str] = iter(["UNAVAILABLE"] * 10 + [("ACTIVE", "")])

    def ask(pod: Pod) -> tuple[str, str]:
        answer = next(answers)
        if isinstance(answer, str):
            raise StepFailed(answer)
        return answer

    monkeypatch.setattr(calls, "queued", ask)
    life.await_turn(POD, LIMITS)
    for what, asked in (("UNAVAILABLE", 11), ("PERMISSION_DENIED", 1)):
        answers = iter([what] * 20)
        with pytest.raises(StepFailed, match=what):
            life.await_turn(POD, LIMITS)
        assert len(list(answers)) == 20 - asked


def test_what_cannot_be_deleted_says_what_to_type_and_hides_nothing(
    cloud: Cloud, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    denied = calls.Finished([], 1, "", "ERROR: (gcloud.x) PERMISSION_DENIED: no")
    monkeypatch.setattr(calls, "call", lambda command: denied)
    line = "costs money if it is there: PERMISSION_DENIED: no; run: gcloud compute tpus tpu-vm delete run1"
    with pytest.raises(StepFailed, match=line):
        life.delete(POD, LIMITS, queued=False)
    monkeypatch.setattr(whole, "delete", life.delete)
    monkeypatch.setattr(cli.log, "_file", None)
    cloud.creations = ["run1: PERMISSION_DENIED: create"]
    with pytest.raises(StepFailed, match="run1: PERMISSION_DENIED: create"):
        cloud.live(0)
    assert line in capsys.readouterr().err
    with pytest.raises(StepFailed, match=line):
        cloud.live(0)


# --- following a log over connections that break --------------------------------------------------------------------


class Shells(Workers):
    """Workers whose ssh commands are these shell scripts, one after the other."""

    scripts: Iterator[str]
    asked: list[str]

    def words(self, worker: int, script: str) -> list[str]:
        self.asked.append(script)
        return ["sh", "-c", next(self.scripts)]


def followed(monkeypatch: pytest.MonkeyPatch, *scripts: str) -> tuple[int | None, list[str], list[str]]:
    """The container's exit status, the lines shown, and what the worker was told."""
    monkeypatch.setattr(follow, "AGAIN", 0)
    workers = Shells(POD, [["ssh"]], ("10.0.0.1",))
    object.__setattr__(workers, "scripts", iter(scripts))
    object.__setattr__(workers, "asked", [])
    lines: list[str] = []
    changed = threading.Event()
    follower = Follower(workers, 0, "c", lambda worker, line: lines.append(line), changed)
    follower._thread.join(20)
    assert changed.is_set()
    return follower.code, lines, workers.asked


def test_a_line_that_the_connection_cut_is_shown_once_and_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    code, lines, asked = followed(
        monkeypatch, "printf 'a\\nb\\npart'; exit 255", "echo true 0", "printf 'partial\\nlast'; exit 3"
    )
    assert (code, lines) == (3, ["a", "b", "partial", "last"])
    assert "sed -u 1,2d" in asked[2]


def test_lines_of_a_container_that_ended_meanwhile_are_fetched(monkeypatch: pytest.MonkeyPatch) -> None:
    code, lines, _ = followed(monkeypatch, "exit 255", "echo false 0", "echo late; exit 0")
    assert (code, lines) == (0, ["late"])


def test_a_container_may_end_with_255_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    code, lines, _ = followed(monkeypatch, "echo a; exit 255", "echo false 255", "exit 255")
    assert (code, lines) == (255, ["a"])


def test_a_worker_that_cannot_be_asked_is_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    code, lines, _ = followed(monkeypatch, "exit 255", "exit 255", "echo a; exit 0")
    assert (code, lines) == (0, ["a"])


def test_whoever_reads_no_more_ends_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(worker: int, line: str) -> None:
        raise BrokenPipeError

    monkeypatch.setattr(calls, "node", lambda pod: READY)

    workers = Shells(POD, [["ssh"]], ("10.0.0.1",))
    object.__setattr__(workers, "scripts", iter(["echo a; exec sleep 30"]))
    object.__setattr__(workers, "asked", [])
    with pytest.raises(BrokenPipeError):
        training.watch(workers, LIMITS, broken)
