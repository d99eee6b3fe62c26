"""What the smoke test starts in restricted containers, and how it judges those runs: nothing here needs an engine."""

from __future__ import annotations

import json
import os
import runpy
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from launcher.host import Host
from launcher.image import Image
from launcher.runtime import Decision, Facts
from launcher.settings import Settings
from launcher.tpu_node.rules import refuse

from trainyard.image import memory_filler, smoke_containers, smoke_test, worker_processes
from trainyard.image.smoke_test import Finished

#: Replaces a checkpoint as most programs do.
SAVE = """
import os, sys
with open("checkpoints/new", "w") as file:
    file.write("2")
os.rename("other", "moved")
print("saves", flush=True)
os.replace("checkpoints/new", os.path.join(sys.argv[1], "last"))
print("saved", flush=True)
"""


@pytest.fixture
def saving(tmp_path: Path) -> subprocess.Popen[str]:
    """A program that is about to replace its checkpoint, with memory_filler.py in its process."""
    for name in ("checkpoints", "memory"):
        (tmp_path / name).mkdir()
    (tmp_path / "checkpoints" / "last").write_text("1")
    (tmp_path / "other").write_text("")
    (tmp_path / "memory" / "sitecustomize.py").write_bytes(Path(memory_filler.__file__).read_bytes())
    (tmp_path / "memory" / "folder").write_text(str(tmp_path / "checkpoints"))
    environment = os.environ | {"PYTHONPATH": str(tmp_path / "memory")}
    command = [sys.executable, "-c", SAVE, str(tmp_path / "checkpoints")]
    return subprocess.Popen(command, cwd=tmp_path, env=environment, stdout=subprocess.PIPE, text=True)


def test_a_program_is_stopped_before_its_new_checkpoint_has_its_name(
    saving: subprocess.Popen[str], tmp_path: Path
) -> None:
    assert saving.stdout is not None
    assert [saving.stdout.readline().strip() for _ in range(2)] == ["saves", memory_filler.SAVING]
    (tmp_path / "memory" / "part").write_text(str(3 << 20))
    (tmp_path / "memory" / "part").rename(tmp_path / "memory" / "fill")
    assert saving.stdout.read() == "", "it was killed before it went on"
    assert saving.wait(30) == -signal.SIGKILL, "where the engine limits no memory, it kills itself"
    found = {path.name: path.read_text() for path in (tmp_path / "checkpoints").iterdir()}
    assert found == {"last": "1", "new": "2"}


def test_pytorch_starts_its_second_process_itself() -> None:
    words, variables = smoke_containers.two_processes("torch", ["mnist", "--epochs=1"])
    assert (words, variables) == (["mnist", "--epochs=1", "--device=cpu", "--num-cores=2"], {})


@pytest.mark.parametrize(("fails", "status"), [("none", 0), ("0", 7), ("1", 7)])
def test_tensorflow_gets_two_workers_of_one_cluster_and_a_failure_ends_both(
    tmp_path: Path, fails: str, status: int
) -> None:
    words, variables = smoke_containers.two_processes("tf", ["mnist", "--epochs=1"])
    launcher = tmp_path / "launch"
    launcher.write_text(
        f"#!{sys.executable}\nimport json, os, sys, time\n"
        "task = json.loads(os.environ['TF_CONFIG'])['task']\n"
        "line = [os.environ['TF_CONFIG'], str('TPU_CONFIG' in os.environ), *sys.argv[1:]]\n"
        "os.write(1, (' '.join(line) + '\\n').encode())  # at once: print with PYTHONUNBUFFERED writes each word\n"
        f"open(f'{tmp_path}/started-{{task[\"index\"]}}', 'w').close()\n"
        f"if str(task['index']) == '{fails}':\n"
        f"    while not os.path.exists('{tmp_path}/started-{1 if fails == '0' else 0}'): time.sleep(0.01)\n"
        "    sys.exit(7)\n"
        f"time.sleep({0 if fails == 'none' else 60})\n"
    )
    launcher.chmod(0o755)
    environment = os.environ | variables | {"PATH": f"{tmp_path}:{os.environ['PATH']}", "TPU_CONFIG": "{}"}
    done = subprocess.Popen(words, env=environment, stdout=subprocess.PIPE, text=True)
    assert done.wait(50) == status, "a worker that waits for one that has failed does not delay the end"
    assert done.stdout is not None
    lines = sorted(done.stdout.readline().strip() for _ in range(2))
    configs = [json.JSONDecoder().raw_decode(line) for line in lines]
    assert [config["task"]["index"] for config, _ in configs] == [0, 1]
    assert configs[0][0]["cluster"] == configs[1][0]["cluster"]
    assert all(line[end:] == " False mnist --epochs=1" for line, (_, end) in zip(lines, configs, strict=True))


def test_good_runs_pass() -> None:
    assert smoke_containers.check_status("out-of-memory run", 137, 137) == []
    assert smoke_containers.check_survived({"resumed_from": 43}, 43) == []
    assert smoke_containers.check_survived({"resumed_from": 43}, None) == [], (
        "a trainer that does not say what it saved"
    )
    assert smoke_containers.check_two_processes(0, {"processes": 2}) == []
    assert smoke_containers.check_status("two worker processes of a data loader", 0) == []


@pytest.mark.parametrize(
    ("problems", "words"),
    [
        (
            smoke_containers.check_status("out-of-memory run", 0, 137, " at its memory limit"),
            "out-of-memory run: exit status 0 at its memory limit where 137",
        ),
        (smoke_containers.check_status("out-of-memory run", 1, 137), "out-of-memory run: exit status 1"),
        (smoke_containers.check_survived({"resumed_from": None}, 43), "resumed from step None where 43 was expected"),
        (smoke_containers.check_survived({"resumed_from": 46}, 43), "did not survive a memory limit"),
        (smoke_containers.check_two_processes(1, {}), "run in two processes: exit status 1"),
        (smoke_containers.check_two_processes(0, {}), "trained in an unknown number of"),
        (smoke_containers.check_two_processes(0, {"processes": 1}), "trained in 1 where 2"),
        (smoke_containers.check_status("two worker processes", 135), "two worker processes: exit status 135 where 0"),
    ],
)
def test_a_run_that_failed_is_refused(problems: list[str], words: str) -> None:
    assert len(problems) == 1 and words in problems[0] and "\n" not in problems[0]


def test_a_failure_in_a_restricted_container_says_so_and_how_to_start_one() -> None:
    with pytest.raises(smoke_test.StepFailed) as failed:
        smoke_test._refuse(["resumed run: exit status 1"], Finished(1, ["PermissionError"], {}), smoke_test.RESTRICTED)
    assert str(failed.value) == (
        "resumed run: exit status 1 in a container with uid 54321 of group 0, 64 MB of /dev/shm, no IPv6: "
        "try docker run --user=54321:0 --shm-size=64m --sysctl=net.ipv6.conf.all.disable_ipv6=1 "
        "(see the last lines of its log above)"
    )


def test_workers_of_a_pool_deliver_what_they_wrote(capfd: pytest.CaptureFixture[str]) -> None:
    assert worker_processes.pool() == list(range(worker_processes.POOLED))
    runpy.run_path(str(Path(worker_processes.__file__)), run_name="__main__")
    assert capfd.readouterr().out == "2 worker processes delivered 32 arrays\n"


def test_the_programs_of_the_containers_are_single_files() -> None:
    for name, source in smoke_containers.files().items():
        assert b"trainyard" not in source, f"{name} runs where Trainyard is not installed"


def warning(framework: str, version: str) -> list[str]:
    """Return the launcher's line about a TPU node in a rehearsal."""
    environment = {"LAUNCHER_REHEARSE": "1"}
    image = Image(framework=framework, version=version)
    decision = Decision("tpu-node", "TPU_CONFIG")
    refuse(Facts(environment, Host(), image, Settings(environment, {})), decision)
    return [f"launch: warning   {text}" for text in decision.warnings]


@pytest.mark.parametrize(
    ("framework", "version", "expected"),
    [
        ("torch", "2.15.0", True),
        ("jax", "0.12.0", True),
        ("torch_tpu", "0.2.0", True),
        ("torch_xla", "2.9.0", False),
        ("tensorflow", "2.21.0", False),
    ],
)
def test_a_run_of_a_framework_without_tpu_nodes_must_warn_about_the_fake_of_one(
    framework: str, version: str, expected: bool
) -> None:
    lines = ["launch: runtime   cpu", *warning(framework, version)]
    assert smoke_containers.check_warning(lines, framework) == []
    problem = f"straight run: the launcher did not warn that {framework} cannot use the TPU node of TPU_CONFIG"
    assert smoke_containers.check_warning(lines[:1], framework) == ([problem] if expected else [])


@pytest.mark.parametrize(("framework", "version"), [("torch", "2.15.0"), ("jax", "0.12.0"), ("torch_xla", "2.9.0")])
def test_the_log_of_a_failed_run_is_shown_without_the_warning_about_the_fake_node(framework: str, version: str) -> None:
    other = "launch: warning   RANK and WORLD_SIZE are set"
    lines = [other, *warning(framework, version), *map(str, range(19))]
    assert len(lines) == 21
    assert smoke_containers.last_lines(lines) == [other, *map(str, range(19))]
