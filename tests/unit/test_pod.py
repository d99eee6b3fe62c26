"""What `make pod` tells gcloud and the workers, and what it makes of their answers."""

from __future__ import annotations

import datetime
import io
import json
import shlex
import socket
import subprocess
import threading
import time
from collections.abc import Callable
from types import ModuleType

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scripts import pod as pod_verb
from scripts.cli import StepFailed, UserError
from scripts.pods import calls, gcloud, meet, remote, workers, xla_dist
from scripts.pods.calls import Finished, Node
from scripts.pods.follow import Printer, prefix
from scripts.pods.gcloud import Pod

POD = Pod("run1", "us-central1-a", "v5litepod-16", "v2-alpha-tpuv5-lite")
RICH = Pod("run1", "z", "v4-16", "v", spot=True, project="p", network="n", subnetwork="s", internal=True,
           service_account="a@b", user="me")  # fmt: skip


# --- what gcloud is told ---------------------------------------------------------------------------------------------


def test_create_says_what_and_where_and_no_more() -> None:
    assert gcloud.create(POD) == [
        "gcloud", "compute", "tpus", "tpu-vm", "create", "run1", "--zone=us-central1-a",
        "--accelerator-type=v5litepod-16", "--version=v2-alpha-tpuv5-lite",
    ]  # fmt: skip


def test_every_property_of_a_pod_reaches_both_ways_to_create_it() -> None:
    flags = ["--project=p", "--spot", "--network=n", "--subnetwork=s", "--service-account=a@b", "--internal-ips"]
    queued = gcloud.create_queued(RICH, valid_until="6h")
    assert set(flags) <= set(gcloud.create(RICH)) & set(queued)
    assert {"--node-id=run1", "--runtime-version=v", "--valid-until-duration=6h"} <= set(queued)
    assert not any(flag.startswith("--valid-until") for flag in gcloud.create_queued(POD))


def test_ssh_names_the_user_and_goes_to_internal_addresses_where_there_are_no_others() -> None:
    words = gcloud.ssh(RICH, 3, "true")
    assert "me@run1" in words and "--internal-ip" in words and "--worker=3" in words
    assert "--internal-ip" not in gcloud.ssh(POD, "all", "true")


def test_deleting_asks_nothing_and_takes_the_queued_pod_along() -> None:
    assert "--quiet" in gcloud.delete(POD)
    assert {"--quiet", "--force"} <= set(gcloud.delete_queued(POD))


# --- what the workers are told ---------------------------------------------------------------------------------------


@given(st.lists(st.text(st.characters(codec="utf-8", exclude_characters="\0")), max_size=4),
       st.text(st.characters(codec="utf-8", exclude_characters="\0")))  # fmt: skip
def test_no_word_of_the_users_is_seen_by_a_shell(command: list[str], value: str) -> None:
    words = shlex.split(remote.start("image", command, {"A": value}))
    assert words[-len(command) - 2 :] == [f"--env=A={value}", "image", *command]


def test_containers_run_as_the_guide_for_tpu_vms_says() -> None:
    words = remote.start("image", ["mnist"], flags=["-v=data:/data"], container="mine").split()
    assert words[:5] == ["sudo", "docker", "run", "--detach", "--name=mine"]
    assert {"--privileged", "--net=host", "-v=data:/data"} <= set(words)


@pytest.mark.parametrize(
    ("image", "host"),
    [
        ("us-central1-docker.pkg.dev/p/ml/t:xla", "us-central1-docker.pkg.dev"),
        ("eu.gcr.io/p/t", "eu.gcr.io"),
        ("gcr.io/p/t@sha256:00", "gcr.io"),
        ("docker.io/library/debian:12", ""),
        ("trainyard:xla", ""),
        ("us-docker.pkg.dev.example.com/p/t", ""),
    ],
)
def test_only_googles_registries_get_the_workers_token(image: str, host: str) -> None:
    assert (f" https://{host} " in remote.login(image)) == bool(host)
    assert remote.pull(image).startswith("curl " if host else "{ sudo docker pull ")


def test_the_token_is_taken_out_of_the_metadata_servers_answer() -> None:
    script = remote.login("gcr.io/p/t").replace(f"curl -fsS -H Metadata-Flavor:Google {remote.TOKEN_URL}", "cat")
    answer = json.dumps({"access_token": "ya29.a-b_c", "expires_in": 3599, "token_type": "Bearer"})
    sed = script.partition(" | sudo")[0]
    done = subprocess.run(["sh", "-c", sed], input=answer, capture_output=True, text=True, check=True)
    assert done.stdout == "ya29.a-b_c"


def test_a_log_goes_on_after_the_lines_that_were_seen() -> None:
    assert "sed" not in remote.follow()
    assert "| sed -u 1,7d;" in remote.follow(skip=7)


def test_the_check_travels_as_one_word() -> None:
    words = shlex.split(remote.meet(1, ["10.0.0.1", "10.0.0.2"], seconds=5))
    assert words[:2] == ["python3", "-c"] and words[3:] == ["8476", "5", "1", "10.0.0.1", "10.0.0.2"]
    compile(words[2], "meet", "exec")


# --- the check itself ------------------------------------------------------------------------------------------------


@pytest.fixture
def port() -> int:
    with socket.socket() as free:
        free.bind(("", 0))
        return int(free.getsockname()[1])


def test_workers_meet_and_say_whom_they_did_not_reach(port: int) -> None:
    addresses = ["127.0.0.1", "127.0.0.2", "127.0.0.3"]
    found: dict[int, object] = {}

    def worker(index: int, seconds: float) -> None:
        found[index] = meet.main(port, seconds, index, addresses[: 2 if seconds > 1 else 3], addresses[index])

    threads = [threading.Thread(target=worker, args=[index, 5.0]) for index in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == {0: {"unreached": []}, 1: {"unreached": []}}
    worker(0, 0.3)
    assert found[0] == {"unreached": [1, 2]}


def test_a_port_that_is_taken_is_said(port: int) -> None:
    with socket.socket() as taken:
        taken.bind(("", port))
        taken.listen()
        assert meet.main(port, 1, 0, ["127.0.0.1"]) == {"busy": True}


# --- what the answers say --------------------------------------------------------------------------------------------


def test_plain_ssh_is_what_gcloud_printed_without_its_command() -> None:
    line = "/usr/bin/ssh -T -i /k -o HostKeyAlias=tpu.1-0-x me@10.0.0.1 -- true"
    [command] = workers.plain_ssh(line + "\n")
    assert command[0] == "/usr/bin/ssh" and command[-1] == "me@10.0.0.1" and "-oBatchMode=yes" in command
    with pytest.raises(StepFailed, match="printed no ssh command"):
        workers.plain_ssh("Updates are available\n")


@pytest.mark.parametrize(
    ("stderr", "line"),
    [
        ("ERROR: (gcloud.compute.tpus.create) RESOURCE_EXHAUSTED: Quota", "RESOURCE_EXHAUSTED: Quota"),
        ('ERROR: (gcloud.x) {\n  "code": 8,\n  "message": "There is no \\"room\\"."\n}\n', 'There is no "room".'),
        ("ERROR: (gcloud.x) Error parsing [tpu].\nThe [tpu] resource", "gcloud knows no project: give PROJECT=, or"),
        ("ERROR: (gcloud.x) NOT_FOUND: no. This command is authenticated with an access token", "NOT_FOUND: no."),
    ],
)  # fmt: skip
def test_what_gcloud_says_becomes_one_line(stderr: str, line: str) -> None:
    assert calls.words(Finished([], 1, "", stderr)).startswith(line)


def node(state: str = "READY", health: str = "", addresses: tuple[str, ...] = ("10.0.0.1",)) -> Node:
    return Node(state, health, addresses, "v4-8", "v")


def test_a_node_is_ready_when_it_is_healthy_and_has_addresses() -> None:
    assert node().ready and node(health="HEALTHY").ready
    assert not node(addresses=()).ready and not node("CREATING").ready
    assert not node(health="UNHEALTHY_MAINTENANCE").ready
    assert str(node(health="UNHEALTHY_TENSORFLOW")) == "READY, UNHEALTHY_TENSORFLOW"


def test_what_workers_say_is_told_once_for_all_that_say_it(monkeypatch: pytest.MonkeyPatch) -> None:
    answers = [Finished([], 1, "", "denied\n"), Finished([], 0, "", ""), Finished([], 1, "", "x\ndenied\n"),
               Finished([], 255, "", "timed out")]  # fmt: skip
    those = workers.Workers(POD, [["ssh"]] * 4, ("a", "b", "c", "d"))
    monkeypatch.setattr(workers, "together", lambda commands, timeout: [answers[int(words[-1])] for words in commands])
    with pytest.raises(StepFailed) as error:
        those.all_do("the pull", str)
    assert str(error.value) == (
        "run1: the pull failed on workers 0 and 2: denied; worker 3: no answer by ssh (timed out)"
    )


def test_commands_run_side_by_side_and_none_longer_than_it_may() -> None:
    began = time.monotonic()
    slow, failing = workers.together([["sleep", "30"], ["sh", "-c", "echo out; echo err >&2; exit 3"]], 0.2)
    assert (failing.returncode, failing.stdout, failing.stderr) == (3, "out\n", "err\n")
    assert (slow.returncode, slow.stderr) == (workers.SSH_FAILED, "no answer within 0 s")
    assert time.monotonic() - began < 10


def test_lines_look_as_xla_dist_wrote_them() -> None:
    moment = datetime.datetime(2026, 11, 21, 1, 2, 3)
    assert prefix(moment, "10.0.0.7", 3) == "2026-11-21 01:02:03 10.0.0.7 [3] "
    stream = io.StringIO()
    Printer(("10.0.0.7",), stream)(0, "Loss=2.3 [/x]")
    assert stream.getvalue().endswith(" 10.0.0.7 [0] Loss=2.3 [/x]\n")


# --- the old command line --------------------------------------------------------------------------------------------


def old(*words: str) -> xla_dist.Old:
    return xla_dist.parse(list(words), lambda: "default")


def test_every_flag_of_xla_dist_is_understood() -> None:
    found = old("--tpu=pod", "--vm=a", "--vm", "b", "--docker-container=c", "--docker-image=i",
                "--docker-run-flag=--shm-size=16G", "--env", "A=1", "--env=XLA_USE_BF16=1",
                "--restart-tpuvm-pod-server", "--tpuvm-server-port=51011",
                "--", "python", "train.py", "--tpu=x")  # fmt: skip
    assert found.name == "pod"
    assert (found.run.image, found.run.container, found.run.flags) == ("i", "c", ("--shm-size=16G",))
    assert found.run.env == {"A": "1", "XLA_USE_BF16": "1"}
    assert found.run.command == ("python", "train.py", "--tpu=x") and found.run.program
    assert [note.split()[0] for note in found.notes] == [
        "--vm", "--restart-tpuvm-pod-server", "--tpuvm-server-port", "XLA_USE_BF16",
    ]  # fmt: skip


def test_a_conda_environment_becomes_the_default_image() -> None:
    found = old("--tpu", "pod", "--conda-env", "torch-xla-1.9", "--", "python3", "train.py")
    assert found.run.image == "default"
    assert found.notes == (
        "--conda-env means nothing today: the program runs in a container, which has its own Python",
    )


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["--tpu=p"], "no program: it follows after --"),
        (["--tpu=p", "--docker-imag=i", "--", "x"], "no flag --docker-imag=i (did you mean '--docker-image'?)"),
        (["--tpu=p", "--env=A", "--", "x"], "'A' in the environment is not NAME=VALUE"),
        (["--tpu=p", "--env=XRT_TPU_CONFIG=x", "--", "x"], "XRT_TPU_CONFIG is different on every worker"),
        (["--tpu=p", "--conda-env=c", "--docker-image=i", "--", "x"], "exclude each other"),
        (["--tpu", "--", "x"], "expected one argument"),
    ],
)
def test_what_xla_dist_would_refuse_is_refused_in_a_line(words: list[str], line: str) -> None:
    with pytest.raises(UserError, match=r".*") as error:
        old(*words)
    assert line in str(error.value) and "\n" not in str(error.value)


def test_the_old_command_line_is_known_by_its_first_flag() -> None:
    assert xla_dist.spoken(["--tpu=p", "--", "x"]) and xla_dist.spoken(["--env", "A=1", "--tpu", "p", "--", "x"])
    assert not xla_dist.spoken(["--name=p", "--", "--tpu=q"])


# --- the verb --------------------------------------------------------------------------------------------------------

Verb = Callable[..., tuple[int, str, str]]


@pytest.mark.parametrize(
    ("flags", "line"),
    [
        ([], "which pod? give NAME="),
        (["--name=Run_1"], "NAME='Run_1': a pod's name is of small letters"),
        (["--name=a", "--accelerator=v5litepod-17"], "no TPU slice 'v5litepod-17' (did you mean"),
        (["--name=a", "--accelerator=v4-16", "--zone=us-central2-c"], "ZONE=us-central2-c has no v4-16"),
        (["--name=a", "--zone=z", "--action=creat"], "no ACTION=creat (did you mean 'create'?)"),
        (["--name=a", "--zone=z"], "which TPU? give ACCELERATOR="),
        (["--name=a", "--zone=z", "--action=create"], "which TPU? give ACCELERATOR="),
        (["--name=a", "--zone=z", "--wait=soon"], "WAIT='soon' is not a duration"),
        (["--name=a", "--zone=z", "--restarts=many"], "RESTARTS='many' is no number"),
        (["--name=a", "--zone=z", "--action=run"], "no image: give TARGET="),
        (["--name=a", "--zone=z", "--action=run", "--image=i", "--env=A"], "'A' in the environment is not NAME=VALUE"),
        (["--name=a", "--zone=z", "--action=run", "--command=x '"], "COMMAND=\"x '\": no closing quotation"),
        (["--name=a", "--zone=z", "--action=run", "--command=x", "--args=y"], "TRAINER= and ARGS= go without"),
    ],
)  # fmt: skip
def test_a_mistake_is_one_line_before_anything_is_asked_of_the_cloud(
    verb: Verb, monkeypatch: pytest.MonkeyPatch, flags: list[str], line: str
) -> None:
    def nothing(*_: object, **__: object) -> None:
        raise AssertionError("gcloud was called")

    monkeypatch.setattr(calls, "call", nothing)
    monkeypatch.setattr(calls, "need_gcloud", lambda: None)
    code, _, err = verb(pod_verb, *flags)
    assert code == 2 and line in err and err.count("\n") == 1, err


def test_a_trainer_and_its_flags_are_what_the_container_gets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ARGS", "--epochs 2 --job-dir 'gs://b/a b'")
    options = pod_verb.options_of(["tf-cpu", "--registry=us-docker.pkg.dev/p/ml"])
    run = pod_verb.run_of(options)
    assert run.image == "us-docker.pkg.dev/p/ml/trainyard:tf-cpu-2.21.0"
    assert run.command == ("mnist", "--epochs", "2", "--job-dir", "gs://b/a b") and not run.program


def test_without_gcloud_the_user_is_told_where_to_get_it(verb: Verb, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nonexistent")
    code, _, err = verb(pod_verb, "--name=a", "--zone=z", "--action=status")
    assert (code, err) == (2, "pod: gcloud is not installed: cloud.google.com/sdk/docs/install\n")


def test_modules_that_run_on_workers_import_nothing_of_ours() -> None:
    module: ModuleType = meet
    assert "scripts" not in (remote.MEET.read_text(encoding="utf-8").partition('"""')[2].partition('"""')[2])
    assert module.__doc__
