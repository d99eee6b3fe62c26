"""Start of the trainer, signals while waiting, termination log (R15). Tests with a real PID 1 are in tests/image."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from launcher import process
from launcher.errors import LaunchError
from launching import ROOT, Launch, Machine

LAUNCHER = [sys.executable, "-I", "-S", str(ROOT / "launcher")]


def _run(machine: Machine, *argv: str, **env: str) -> subprocess.CompletedProcess[str]:
    full = {"LAUNCHER_SYSROOT": str(machine.root), "PATH": os.environ["PATH"], **machine.env, **env}
    # 60 s: where no name server answers, the resolver gives up after 5 s and two attempts per server (resolv.conf(5)).
    return subprocess.run([*LAUNCHER, *argv], env=full, capture_output=True, text=True, timeout=60)


@pytest.mark.parametrize("status", [0, 1, 42, 126, 127, 255])
def test_the_trainers_status_is_the_exit_status(machine: Machine, status: int) -> None:
    assert _run(machine, "--", "/bin/sh", "-c", f"exit {status}").returncode == status


def test_the_process_is_replaced(machine: Machine) -> None:
    process = subprocess.Popen([*LAUNCHER, "--", "/bin/sh", "-c", "echo $$"], stdout=subprocess.PIPE, text=True)
    out, _ = process.communicate(timeout=30)
    assert int(out) == process.pid


def test_stdout_and_arguments_belong_to_the_trainer(machine: Machine) -> None:
    words = ["a b", "", "$HOME", "`x`", "\"'", "*", "--explain", "\u00e9"]
    machine.add_image("torch", "2.9", {"show": [sys.executable, "-c", "import sys; print(sys.argv[1:])"]})
    assert _run(machine, "show", *words).stdout == f"{words}\n"


def test_exports_and_unsets_reach_the_trainer(machine: Machine) -> None:
    show = "import os; print(os.environ['NNODES'], 'CLOUD_ML_HP_METRIC_FILE' in os.environ, os.environ['OTHER'])"
    env = {"CLOUD_ML_HP_METRIC_FILE": "", "OTHER": "kept", "LAUNCHER_NPROC": "1"}
    ended = _run(machine, "--", sys.executable, "-c", show, **env)
    assert ended.stdout == "1 False kept\n"


def test_values_that_are_not_utf8_are_passed_on(machine: Machine) -> None:
    env = {b"PATH": os.environb[b"PATH"], b"ODD": b"\xff\xfe", b"LAUNCHER_SYSROOT": os.fsencode(machine.root)}
    command = [*LAUNCHER, "--", "/bin/sh", "-c", 'printf "%s" "$ODD"']
    assert subprocess.run(command, env=env, capture_output=True).stdout == b"\xff\xfe"


def _shell(machine: Machine, script: str, **env: str) -> subprocess.CompletedProcess[str]:
    """Run a shell script in which $LAUNCH is the launcher."""
    full = {"LAUNCHER_SYSROOT": str(machine.root), "PATH": os.environ["PATH"], "LAUNCH": " ".join(LAUNCHER), **env}
    return subprocess.run(["/bin/sh", "-c", script], env=full, capture_output=True, text=True, timeout=60, check=False)


@pytest.mark.parametrize("stderr", ["2>&-", "2>/dev/full"])
@pytest.mark.parametrize("processes", ["1", "2"])
def test_a_log_that_cannot_be_written_does_not_end_the_job(machine: Machine, stderr: str, processes: str) -> None:
    ended = _shell(machine, f"$LAUNCH -- /bin/echo trained {stderr}", LAUNCHER_NPROC=processes)
    assert (ended.returncode, ended.stdout) == (0, "trained\n" * int(processes))


@pytest.mark.parametrize("mode", ["--help", "--version", "--explain", "--print-env"])
def test_an_stdout_that_cannot_be_written_is_one_line_and_status_1(machine: Machine, mode: str) -> None:
    ended = _shell(machine, f"$LAUNCH {mode} >/dev/full", CLOUD_ML_HP_METRIC_FILE="")
    assert ended.returncode == 1
    assert ended.stderr == "launch: error: cannot write to stdout: No space left on device\n"


@pytest.mark.parametrize("processes", ["1", "2"])
def test_the_trainer_gets_the_default_actions_of_signals(machine: Machine, processes: str) -> None:
    """Python ignores SIGPIPE and SIGXFSZ: `yes | head` in a script would print errors."""
    ended = _shell(machine, "$LAUNCH -- /bin/grep SigIgn /proc/self/status", LAUNCHER_NPROC=processes)
    masks = [int(line.removeprefix("SigIgn:"), 16) for line in ended.stdout.splitlines()]
    assert len(masks) == int(processes)
    # Signals that the tests' own parent ignores stay ignored; some, like glibc's own 32, no program can reset.
    assert [number for number in (signal.SIGPIPE, signal.SIGXFSZ) for mask in masks if mask >> number - 1 & 1] == []


@pytest.mark.parametrize("processes", ["1", "2"])
def test_a_signal_that_the_parent_ignores_stays_ignored(machine: Machine, processes: str) -> None:
    """As below nohup: SIGHUP ends neither the wait for node 0 nor the processes."""
    started = subprocess.Popen(
        ["/bin/sh", "-c", f"trap '' HUP; exec {' '.join(LAUNCHER)} -- /bin/sh -c 'echo up; sleep 1; exit 7'"],
        env={"LAUNCHER_SYSROOT": str(machine.root), "PATH": os.environ["PATH"], "LAUNCHER_NPROC": processes},
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    with started:
        assert started.stdout is not None
        assert started.stdout.readline() == "up\n"
        started.send_signal(signal.SIGHUP)
        assert started.wait(timeout=30) == 7


def test_sighup_that_is_ignored_does_not_end_the_wait(machine: Machine) -> None:
    script = "trap '' HUP; $LAUNCH -- /bin/true & sleep 0.7; kill -HUP $!; wait $!"
    env = {"NODE_RANK": "1", "NNODES": "2", "MASTER_ADDR": "no-such-host.invalid", "LAUNCHER_DNS_TIMEOUT": "1.5"}
    ended = _shell(machine, script, **env)
    assert ended.returncode == 138
    assert "did not resolve within 1.5 s" in ended.stderr


def _script(path: Path, text: str, mode: int = 0o755) -> str:
    path.write_text(text)
    path.chmod(mode)
    return str(path)


@pytest.mark.parametrize(
    ("make", "status", "message"),
    [
        pytest.param(lambda d: "no-such-command", 127, "not found", id="not-found"),
        pytest.param(lambda d: str(d / "missing"), 127, "not found", id="no-file"),
        pytest.param(lambda d: _script(d / "x", "#!/no/interpreter\n"), 127, "#! line", id="no-interpreter"),
        pytest.param(lambda d: _script(d / "x", "#!/bin/sh\n", 0o644), 126, "Permission denied", id="not-executable"),
        pytest.param(lambda d: _script(d / "x", "\x7fELFnonsense"), 126, "format error", id="format"),
        pytest.param(lambda d: str(d), 126, "Permission denied", id="folder"),
    ],
)
def test_commands_that_cannot_be_started(
    machine: Machine, tmp_path: Path, make: Callable[[Path], str], status: int, message: str
) -> None:
    ended = _run(machine, "--", make(tmp_path))
    assert ended.returncode == status
    last = ended.stderr.splitlines()[-1]
    assert last.startswith("launch: error: ") and message in last


@pytest.mark.parametrize(("number", "status"), [(signal.SIGTERM, 143), (signal.SIGINT, 130), (signal.SIGHUP, 129)])
def test_a_signal_during_the_wait_ends_it_at_once(
    machine: Machine, google_cloud: Callable[..., Any], tpu_config: Callable[..., str], number: int, status: int
) -> None:
    google_cloud(states=["CREATING"])
    env = {**machine.env, "LAUNCHER_TPU_INTERVAL": "60", "TPU_CONFIG": tpu_config(), "PATH": os.environ["PATH"]}
    env["TERMINATION_LOG"] = str(machine.root / "reason")
    waiting = subprocess.Popen([*LAUNCHER, "--", "/bin/true"], env=env, stderr=subprocess.PIPE, text=True)
    assert waiting.stderr is not None
    assert "CREATING" in waiting.stderr.readline()
    waiting.send_signal(number)
    assert waiting.wait(timeout=10) == status  # of the 60 s until the next attempt
    assert f"{signal.Signals(number).name} while waiting" in waiting.stderr.read()
    waiting.stderr.close()
    assert json.loads((machine.root / "reason").read_text())["exit_code"] == status


def test_signal_mask_and_threads_are_restored_after_the_wait(
    machine: Machine, google_cloud: Callable[..., Any], tpu_config: Callable[..., str]
) -> None:
    google_cloud()
    show = "import signal, threading; print(signal.pthread_sigmask(signal.SIG_BLOCK, []), threading.active_count())"
    ended = _run(machine, "--", sys.executable, "-c", show, TPU_CONFIG=tpu_config())
    assert ended.stdout == "set() 1\n"


@pytest.mark.parametrize("explicit", [True, False])
def test_the_termination_log_contains_the_error_as_json(machine: Machine, explicit: bool) -> None:
    file = machine.root / "dev" / "termination-log"
    machine.add("/dev/termination-log", "x" * 9000)
    env = {"TERMINATION_LOG": str(file)} if explicit else {}
    ended = _run(machine, "--print-env", TPU_CONFIG="not json", **env)
    text = file.read_text()
    assert text.count("\n") == 1
    assert json.loads(text) == {
        "exit_code": 2,
        "exit_reason": ended.stderr[len("launch: error: ") : -1],
        "traceback": "",
    }


def test_the_default_termination_log_is_not_created(machine: Machine) -> None:
    machine.add("/dev/null")
    assert _run(machine, "--print-env", TPU_CONFIG="not json").returncode == 2
    assert not (machine.root / "dev" / "termination-log").exists()


def test_the_termination_log_has_less_than_4_kib(tmp_path: Path) -> None:
    file = tmp_path / "log"
    process.termination_log(str(file), "", 2, '"\u00e9\n' * 5000)
    assert len(file.read_bytes()) < 4096
    json.loads(file.read_text())


@pytest.mark.parametrize("before", ["", "step 1\nstep 2\n", "step 1", '{"exit_code": 0}\n', "x" * 9000 + "\n"])
def test_the_termination_log_keeps_what_others_have_written(machine: Machine, tmp_path: Path, before: str) -> None:
    file = tmp_path / "log"
    file.write_text(before)
    assert _run(machine, "--print-env", TPU_CONFIG="x", TERMINATION_LOG=str(file)).returncode == 2
    kept, _, line = file.read_text()[:-1].rpartition("\n")
    assert kept == before.rstrip("\n")
    assert json.loads(line)["exit_code"] == 2


def test_the_termination_log_has_one_line_after_several_runs(tmp_path: Path) -> None:
    file = tmp_path / "log"
    for status in (138, 2):
        process.termination_log(str(file), "", status, "reason " * status)
        assert json.loads(file.read_text())["exit_code"] == status
    with file.open("a") as opened:
        opened.write("of the user\n")
    process.termination_log(str(file), "", 3, "reason")
    lines = file.read_text().splitlines()
    assert lines[1] == "of the user"
    assert [json.loads(line)["exit_code"] for line in (lines[0], lines[2])] == [2, 3]


def test_a_file_of_the_user_that_a_link_in_dev_names_is_kept(machine: Machine, tmp_path: Path) -> None:
    """/dev/stderr, for example, may be a link to the log of a job."""
    file = tmp_path / "log"
    file.write_text("step 1\n")
    machine.add("/dev/null")
    link = machine.root / "dev" / "stderr"
    link.symlink_to(file)
    process.termination_log(str(link), str(machine.root), 2, "reason")
    assert file.read_text().startswith('step 1\n{"exit_code": 2')


def test_a_termination_log_that_cannot_be_written_is_skipped(machine: Machine, tmp_path: Path) -> None:
    assert _run(machine, "--print-env", TPU_CONFIG="x", TERMINATION_LOG=str(tmp_path)).returncode == 2


class FakeTime:
    """A clock that only sleeping advances."""

    def __init__(self) -> None:
        self.now = 0.0
        self.sleeps: list[float] = []

    def sleep(self, seconds: float) -> None:
        self.sleeps.append(seconds)
        self.now += seconds

    def clock(self) -> float:
        return self.now


def test_waiting_for_node_0_is_bounded() -> None:
    fake = FakeTime()
    assert not process.wait_for_name("no-such-host.invalid", 12, fake.sleep, fake.clock)
    assert fake.sleeps == [5, 5, 2]
    assert process.wait_for_name("127.0.0.1", 0, fake.sleep, fake.clock)
    assert not process.wait_for_name("x" * 300, 0, fake.sleep, fake.clock)


def test_a_name_of_node_0_that_does_not_resolve_is_retryable(
    machine: Machine, cluster_spec: Callable[..., str]
) -> None:
    spec = cluster_spec([1, 1], "workerpool1", 0).replace("cmle-training-workerpool0-ab-0", "no-such-host.invalid")
    ended = _run(machine, "--", "/bin/true", CLUSTER_SPEC=spec, LAUNCHER_DNS_TIMEOUT="0")
    assert ended.returncode == 138
    assert "'no-such-host.invalid' (CLUSTER_SPEC), did not resolve within 0 s" in ended.stderr
    assert _run(machine, "--print-env", CLUSTER_SPEC=spec).returncode == 0  # no lookup


SUPERVISE = """
import os, sys
sys.path.insert(0, {root!r})
from launcher import supervisor
from launcher.errors import LaunchError
from launcher.settings import Settings
try:
    settings = Settings({{}}, {flags!r})
    sys.exit(supervisor.supervise([supervisor.Member("", {command!r}, dict(os.environ))], settings))
except LaunchError as error:
    print(error.status, error)
"""
#: Ends with the signal or with its stdin.
HANDLER = """
import signal, sys
signal.signal(signal.SIGTERM, lambda *_: (print("handled", flush=True), sys.exit(7)))
print("up", flush=True)
sys.stdin.read()
"""


def _supervised(command: list[str], flags: dict[str, str] | None = None) -> subprocess.Popen[str]:
    """Run `supervise` in a subprocess."""
    text = SUPERVISE.format(root=str(ROOT), command=command, flags=flags or {})
    pipe = subprocess.PIPE
    return subprocess.Popen([sys.executable, "-c", text], stdin=pipe, stdout=pipe, stderr=pipe, text=True)


@pytest.mark.parametrize(
    ("command", "status"),
    [
        pytest.param(["/bin/sh", "-c", "exit 42"], 42, id="status"),
        pytest.param(["/bin/sh", "-c", "kill -SEGV $$"], 139, id="SIGSEGV"),
        pytest.param(["/bin/sh", "-c", "kill -KILL $$"], 137, id="SIGKILL"),
    ],
)
def test_supervise_returns_the_trainers_status(command: list[str], status: int) -> None:
    with _supervised(command) as running:
        assert running.wait(timeout=30) == status


def test_supervise_forwards_signals_to_the_trainers_handler() -> None:
    with _supervised([sys.executable, "-c", HANDLER]) as running:
        assert running.stdout is not None
        assert running.stdout.readline() == "up\n"
        running.terminate()
        assert running.wait(timeout=30) == 7


@pytest.mark.parametrize(("flags", "status", "ran"), [({}, 143, False), ({"LAUNCHER_SIGNAL_GROUP": "1"}, 143, True)])
def test_only_signal_group_reaches_the_child_of_a_shell(flags: dict[str, str], status: int, ran: bool) -> None:
    command = ["/bin/sh", "-c", '"$0" -c "$1"; exit 3', sys.executable, HANDLER]
    with _supervised(command, flags=flags) as running:
        assert running.stdin is not None and running.stdout is not None
        assert running.stdout.readline() == "up\n"
        running.terminate()
        assert running.wait(timeout=30) == status
        running.stdin.close()  # ends a child that the signal did not reach
        assert ("handled" in running.stdout.read()) == ran


def test_supervise_reports_a_command_that_cannot_start() -> None:
    with _supervised(["/no/such"]) as running:
        out, err = running.communicate(timeout=30)
        assert out.startswith("127 '/no/such' not found"), err


def test_the_error_of_a_failed_exec_contains_the_command() -> None:
    with pytest.raises(LaunchError, match="'/no/such' not found"):
        process.replace(["/no/such"], {})


def test_print_modes_start_nothing(launch: Launch, tmp_path: Path) -> None:
    target = tmp_path / "touched"
    for mode in ("--print-env", "--explain"):
        assert launch({}, mode, "--", "/bin/sh", "-c", f"touch {target}").status == 0
    assert not target.exists()
