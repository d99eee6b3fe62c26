"""The commands that `trainyard pod` runs through gcloud and on the workers, and how it reads their results."""

from __future__ import annotations

import ast
import dataclasses
import datetime
import io
import json
import os
import shlex
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.fakes.registry import Registry, sha256

from trainyard.common.errors import StepFailed, UserError
from trainyard.common.gcloud import Finished
from trainyard.image import recipes
from trainyard.spec import model
from trainyard_jobs.commands import pod
from trainyard_jobs.pods import actions, api, connectivity_probe, gcloud_args, shell_commands, ssh, xla_dist
from trainyard_jobs.pods.api import Node
from trainyard_jobs.pods.controller import PodController
from trainyard_jobs.pods.gcloud_args import Pod
from trainyard_jobs.pods.logs import Printer, prefix

POD = Pod("run1", "us-central1-a", "v5litepod-16", "v2-alpha-tpuv5-lite")
RICH = Pod("run1", "z", "v4-16", "v", spot=True, project="p", network="n", subnetwork="s", internal=True,
           service_account="a@b", user="me")  # fmt: skip


@pytest.fixture
def gcloud_calls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A file that exists once gcloud was called."""
    calls = tmp_path / "calls"
    (tmp_path / "gcloud").write_text(f"#!/bin/sh\necho >{calls}\nexit 1\n")
    (tmp_path / "gcloud").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    return calls


# --- commands of gcloud ----------------------------------------------------------------------------------------------


def test_create_has_the_accelerator_version_and_zone_and_no_other_flags() -> None:
    assert gcloud_args.create(POD) == [
        "gcloud", "compute", "tpus", "tpu-vm", "create", "run1", "--zone=us-central1-a",
        "--accelerator-type=v5litepod-16", "--version=v2-alpha-tpuv5-lite",
    ]  # fmt: skip


def test_direct_and_queued_creation_pass_every_property_of_a_pod() -> None:
    flags = ["--project=p", "--spot", "--network=n", "--subnetwork=s", "--service-account=a@b", "--internal-ips"]
    queued = gcloud_args.create_queued(RICH, valid_until="6h")
    assert set(flags) <= set(gcloud_args.create(RICH)) & set(queued)
    assert {"--node-id=run1", "--runtime-version=v", "--valid-until-duration=6h"} <= set(queued)
    assert not any(flag.startswith("--valid-until") for flag in gcloud_args.create_queued(POD))


def test_ssh_passes_the_user_and_uses_internal_addresses_if_there_are_no_others() -> None:
    words = gcloud_args.ssh(RICH, 3, "true")
    assert "me@run1" in words and "--internal-ip" in words and "--worker=3" in words
    assert "--internal-ip" not in gcloud_args.ssh(POD, "all", "true")


def test_deletion_has_no_prompt_and_includes_the_queued_resource() -> None:
    assert "--quiet" in gcloud_args.delete(POD)
    assert {"--quiet", "--force"} <= set(gcloud_args.delete(POD, queued=True))


# --- commands on the workers -----------------------------------------------------------------------------------------


@given(st.lists(st.text(st.characters(codec="utf-8", exclude_characters="\0")), max_size=4),
       st.text(st.characters(codec="utf-8", exclude_characters="\0")))  # fmt: skip
def test_arguments_and_variables_are_quoted_for_the_shell(command: list[str], value: str) -> None:
    words = shlex.split(shell_commands.start("image", command, {"A": value}))
    assert words[-len(command) - 2 :] == [f"--env=A={value}", "image", *command]


def test_containers_run_privileged_on_the_host_network_with_the_users_flags() -> None:
    words = shell_commands.start("image", ["mnist"], flags=["-v=data:/data"], container="mine").split()
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
    assert (f" https://{host} " in shell_commands.login(image)) == bool(host)
    assert shell_commands.pull(image).startswith("curl " if host else "{ sudo docker pull ")


def test_the_token_is_extracted_from_the_metadata_servers_answer() -> None:
    script = shell_commands.login("gcr.io/p/t").replace(
        f"curl -fsS -H Metadata-Flavor:Google {shell_commands.TOKEN_URL}", "cat"
    )
    answer = json.dumps({"access_token": "ya29.a-b_c", "expires_in": 3599, "token_type": "Bearer"})
    sed = script.partition(" | sudo")[0]
    done = subprocess.run(["sh", "-c", sed], input=answer, capture_output=True, text=True, check=True)
    assert done.stdout == "ya29.a-b_c"


def test_a_log_continues_after_the_lines_that_were_shown() -> None:
    assert "sed" not in shell_commands.follow()
    assert "| sed -u 1,7d;" in shell_commands.follow(skip=7)


def test_the_connectivity_probe_is_one_argument() -> None:
    words = shlex.split(shell_commands.probe_connectivity(1, ["10.0.0.1", "10.0.0.2"], seconds=5))
    assert words[:2] == ["python3", "-c"] and words[3:] == ["8476", "5", "1", "10.0.0.1", "10.0.0.2"]
    compile(words[2], "connectivity_probe.py", "exec")


# --- connectivity probe ----------------------------------------------------------------------------------------------


@pytest.fixture
def port() -> int:
    with socket.socket() as free:
        free.bind(("", 0))
        return int(free.getsockname()[1])


def test_workers_report_which_others_they_did_not_reach(port: int) -> None:
    addresses = ["127.0.0.1", "127.0.0.2", "127.0.0.3"]
    found: dict[int, object] = {}

    def worker(index: int, seconds: float) -> None:
        found[index] = connectivity_probe.main(
            port, seconds, index, addresses[: 2 if seconds > 1 else 3], addresses[index]
        )

    threads = [threading.Thread(target=worker, args=[index, 5.0]) for index in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == {0: {"unreached": []}, 1: {"unreached": []}}
    worker(0, 0.3)
    assert found[0] == {"unreached": [1, 2]}


def test_a_port_in_use_is_reported(port: int) -> None:
    with socket.socket() as taken:
        taken.bind(("", port))
        taken.listen()
        assert connectivity_probe.main(port, 1, 0, ["127.0.0.1"]) == {"busy": True}


# --- results of commands ---------------------------------------------------------------------------------------------


def test_ssh_commands_are_what_gcloud_printed_without_the_remote_command() -> None:
    line = "/usr/bin/ssh -T -i /k -o HostKeyAlias=tpu.1-0-x me@10.0.0.1 -- true"
    [command] = ssh.ssh_commands(line + "\n")
    assert command[0] == "/usr/bin/ssh" and command[-1] == "me@10.0.0.1" and "-oBatchMode=yes" in command
    with pytest.raises(StepFailed, match="printed no ssh command"):
        ssh.ssh_commands("Updates are available\n")


@pytest.mark.parametrize(
    ("stderr", "line"),
    [
        ("ERROR: (gcloud.compute.tpus.create) RESOURCE_EXHAUSTED: Quota", "RESOURCE_EXHAUSTED: Quota"),
        ('ERROR: (gcloud.x) {\n  "code": 8,\n  "message": "There is no \\"room\\"."\n}\n', 'There is no "room".'),
        ("ERROR: (gcloud.x) Error parsing [tpu].\nThe [tpu] resource", "gcloud has no project: set '--project', or"),
        ("ERROR: (gcloud.x) NOT_FOUND: no. This command is authenticated with an access token", "NOT_FOUND: no."),
    ],
)  # fmt: skip
def test_an_error_of_gcloud_becomes_one_line(stderr: str, line: str) -> None:
    assert api.error_message(Finished([], 1, "", stderr)).startswith(line)


def node(state: str = "READY", health: str = "", addresses: tuple[str, ...] = ("10.0.0.1",)) -> Node:
    return Node(state, health, addresses, "v4-8")


def test_a_node_is_ready_if_it_is_healthy_and_has_addresses() -> None:
    assert node().ready and node(health="HEALTHY").ready
    assert not node(addresses=()).ready and not node("CREATING").ready
    assert not node(health="UNHEALTHY_MAINTENANCE").ready
    assert str(node(health="UNHEALTHY_TENSORFLOW")) == "READY, UNHEALTHY_TENSORFLOW"


def test_workers_with_the_same_error_are_reported_together() -> None:
    answers = [Finished([], 1, "", "denied\n"), Finished([], 0, "", ""), Finished([], 1, "", "x\ndenied\n"),
               Finished([], 255, "", "timed out")]  # fmt: skip
    workers = ssh.Workers(POD, [["ssh"]] * 4, ("a", "b", "c", "d"),
                          lambda commands, timeout: [answers[int(words[-1])] for words in commands])  # fmt: skip
    with pytest.raises(StepFailed) as error:
        workers.require_all("the pull", str)
    assert str(error.value) == (
        "run1: the pull failed on workers 0 and 2: denied; worker 3: no answer by ssh (timed out)"
    )


def test_commands_run_in_parallel_with_a_timeout_each() -> None:
    began = time.monotonic()
    slow, failing = ssh.run_parallel([["sleep", "30"], ["sh", "-c", "echo out; echo err >&2; exit 3"]], 2)
    assert (failing.returncode, failing.stdout, failing.stderr) == (3, "out\n", "err\n")
    assert (slow.returncode, slow.stderr) == (ssh.SSH_FAILED, "no answer within 2 s")
    assert time.monotonic() - began < 10


def test_lines_have_the_prefix_of_xla_dist() -> None:
    moment = datetime.datetime(2026, 11, 21, 1, 2, 3)
    assert prefix(moment, "10.0.0.7", 3) == "2026-11-21 01:02:03 10.0.0.7 [3] "
    stream = io.StringIO()
    Printer(("10.0.0.7",), stream)(0, "Loss=2.3 [/x]")
    assert stream.getvalue().endswith(" 10.0.0.7 [0] Loss=2.3 [/x]\n")


# --- command line of xla_dist ----------------------------------------------------------------------------------------


def parsed(*words: str) -> xla_dist.XlaDistArgs:
    return xla_dist.parse(list(words), lambda: "default")


def test_every_flag_of_xla_dist_is_parsed() -> None:
    found = parsed("--tpu=pod", "--vm=a", "--vm", "b", "--docker-container=c", "--docker-image=i",
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


def test_a_conda_environment_is_replaced_by_the_default_image() -> None:
    found = parsed("--tpu", "pod", "--conda-env", "torch-xla-1.9", "--", "python3", "train.py")
    assert found.run.image == "default"
    assert found.notes == ("--conda-env is ignored: the program runs in a container with its own Python",)


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["--tpu=p"], "no program: give it after --"),
        (["--tpu=p", "--docker-imag=i", "--", "x"], "no flag --docker-imag=i (did you mean '--docker-image'?)"),
        (["--tpu=p", "--env=A", "--", "x"], "'--env': 'A' is not NAME=VALUE"),
        (["--tpu=p", "--env=XRT_TPU_CONFIG=x", "--", "x"], "XRT_TPU_CONFIG differs on every worker"),
        (["--tpu=p", "--conda-env=c", "--docker-image=i", "--", "x"], "--conda-env cannot be used with --docker-..."),
        (["--tpu", "--", "x"], "expected one argument"),
    ],
)
def test_an_invalid_command_line_of_xla_dist_fails_with_one_line(words: list[str], line: str) -> None:
    with pytest.raises(UserError, match=r".*") as error:
        parsed(*words)
    assert line in str(error.value) and "\n" not in str(error.value)


def test_a_command_line_of_xla_dist_is_recognized_by_its_flag_tpu() -> None:
    assert xla_dist.is_xla_dist(["--tpu=p", "--", "x"]) and xla_dist.is_xla_dist(
        ["--env", "A=1", "--tpu", "p", "--", "x"]
    )
    assert not xla_dist.is_xla_dist(["--name=p", "--", "--tpu=q"])


# --- command ---------------------------------------------------------------------------------------------------------

Trainyard = Callable[..., tuple[int, str, str]]


@pytest.mark.parametrize(
    ("flags", "line"),
    [
        ([], "no name: set '--name', as in"),
        (["--name=Run_1"], "'--name Run_1': a name consists of lowercase letters"),
        (["--name=a", "--accelerator=v5litepod-17"], "no TPU slice 'v5litepod-17' (did you mean"),
        (["--name=a", "--accelerator=v4-16", "--zone=us-central2-c"], "'--zone us-central2-c' has no v4-16"),
        (["--name=a", "--zone=z", "--action=creat"], "'creat' is not one of"),
        (["--name=a", "--zone=z"], "no accelerator: set '--accelerator', as in"),
        (["--name=a", "--zone=z", "--action=create"], "no accelerator: set '--accelerator', as in"),
        (["--name=a", "--zone=z", "--wait=soon"], "'--wait soon' is not a duration"),
        (["--name=a", "--zone=z", "--restarts=many"], "'many' is not a valid whole number"),
        (["--name=a", "--zone=z", "--action=run"], "no image: "),
        (["--name=a", "--zone=z", "--action=run", "--image=i", "--env=A"], "'--env': 'A' is not NAME=VALUE"),
        (["--name=a", "--zone=z", "--action=run", "--command=x '"], "'--command x '': no closing quotation"),
        (["--name=a", "--zone=z", "--action=run", "--command=x", "--args=y"], "'--command' replaces the trainer"),
    ],
)  # fmt: skip
def test_a_mistake_is_reported_in_one_line_without_a_request_to_the_cloud(
    trainyard: Trainyard, gcloud_calls: Path, flags: list[str], line: str
) -> None:
    code, _, err = trainyard("pod", *flags)
    assert code == 2 and line in err and err.count("\n") == 1, err
    assert not gcloud_calls.exists()


def test_a_trainer_and_its_arguments_are_passed_to_the_container() -> None:
    options = actions.Options(
        recipe=lambda: recipes.outline(model.load("tf-cpu")),
        registry="us-docker.pkg.dev/p/ml",
        args="--epochs 2 --job-dir 'gs://b/a b'",
        output="gs://other",
    )
    run = options.run()
    assert run.image == "us-docker.pkg.dev/p/ml/trainyard:tf-cpu-2.21.0"
    assert run.command == ("mnist", "--epochs", "2", "--job-dir", "gs://b/a b") and not run.program


@pytest.fixture
def image_for() -> Iterator[Callable[..., str]]:
    """``image_for("arm64")``: the reference of an image, or of an index of several, at a registry."""
    oci = "application/vnd.oci.image"
    with Registry() as fake:

        def put(*architectures: str) -> str:
            entries = []
            for name in architectures:
                config = json.dumps({"os": "linux", "architecture": name}).encode()
                fake.blobs[sha256(config)] = config
                about = {"mediaType": f"{oci}.config.v1+json", "digest": sha256(config), "size": len(config)}
                manifest = json.dumps({"config": about, "layers": []}).encode()
                digest = fake.put_manifest("alone", f"{oci}.manifest.v1+json", manifest)
                entry = {"mediaType": f"{oci}.manifest.v1+json", "digest": digest, "size": len(manifest)}
                entries.append({**entry, "platform": {"os": "linux", "architecture": name}})
            index = json.dumps({"manifests": entries}).encode()
            fake.put_manifest("index", f"{oci}.index.v1+json", index)
            return f"{fake.host}/team/trainyard:{'alone' if len(entries) == 1 else 'index'}"

        yield put


@pytest.fixture
def no_cloud(monkeypatch: pytest.MonkeyPatch, gcloud_calls: Path) -> list[str]:
    """Nothing is created: the images that TPU VMs would be created for."""
    started: list[str] = []

    def execute(controller: PodController) -> int:
        started.append(controller.run.image)
        return 0

    monkeypatch.setattr(PodController, "execute", execute)
    return started


POD_FLAGS = ("--name=a", "--accelerator=v5litepod-16", "--zone=us-central1-a")


def test_an_image_that_the_workers_cannot_run_is_refused_before_a_vm_is_created(
    trainyard: Trainyard, image_for: Callable[..., str], no_cloud: list[str]
) -> None:
    image = image_for("arm64")
    code, _, err = trainyard("pod", *POD_FLAGS, f"--image={image}")
    assert (code, no_cloud) == (2, [])
    assert err == (
        f"pod: {image}: TPU VMs run linux/amd64; the image is for linux/arm64: push an image of a target that has "
        "linux/amd64 ('trainyard list')\n"
    )


@pytest.mark.parametrize("architectures", [("amd64",), ("arm64", "amd64")])
def test_an_image_or_an_index_that_the_workers_can_run_is_taken(
    trainyard: Trainyard, image_for: Callable[..., str], no_cloud: list[str], architectures: tuple[str, ...]
) -> None:
    """An engine pulls the image for its platform."""
    image = image_for(*architectures)
    assert trainyard("pod", *POD_FLAGS, f"--image={image}")[0] == 0
    assert no_cloud == [image]


@pytest.mark.parametrize("image", ["127.0.0.1:9/team/trainyard:xla", "trainyard:xla"])
def test_an_image_whose_registry_cannot_be_asked_is_taken(
    trainyard: Trainyard, no_cloud: list[str], image: str
) -> None:
    """It may have been loaded on the workers by hand, and this host may have no access to it."""
    assert trainyard("pod", *POD_FLAGS, f"--image={image}")[0] == 0
    assert no_cloud == [image]


def test_options_of_the_command_and_of_the_library_are_the_same() -> None:
    options = {parameter.name for parameter in pod.command.params} - {"target", "action", "as_json"}
    own = {"logs_to_stderr", "recipe", "pushed"}
    assert options == {field.name for field in dataclasses.fields(actions.Options)} - own


def test_a_command_line_of_xla_dist_is_passed_on_as_it_is(
    trainyard: Trainyard, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines: list[tuple[str, ...]] = []

    def perform(action: str | None, options: actions.Options, line: tuple[str, ...]) -> tuple[int, dict[str, object]]:
        assert options.zone == "z"
        lines.append(line)
        return 3, {}

    monkeypatch.setattr(actions, "perform", perform)
    words = ("--env", "A=1", "--env=B=2", "--tpu=run1", "--docker-image=i", "--", "python", "train.py", "--help")
    assert trainyard("pod", *words, ZONE="z")[0] == 3
    assert lines == [words]


def test_a_missing_gcloud_is_reported_with_its_installation_page(
    trainyard: Trainyard, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", "/nonexistent")
    code, _, err = trainyard("pod", "--name=a", "--zone=z", "--action=status")
    assert (code, err) == (2, "pod: gcloud is not installed: see https://cloud.google.com/sdk/docs/install\n")


def test_the_connectivity_probe_imports_the_standard_library_only() -> None:
    tree = ast.parse(shell_commands.CONNECTIVITY_PROBE.read_text(encoding="utf-8"))
    imported = {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
    imported |= {str(node.module) for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    assert imported and {name.partition(".")[0] for name in imported} <= sys.stdlib_module_names
