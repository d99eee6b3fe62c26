"""The launcher below real schedulers: Slurm's srun (two slurmd on this host) and Open MPI's mpirun (R13).

On Debian and Ubuntu as root, which CI is, missing programs are installed; elsewhere the tests need them on PATH. Facts
that srun 22.05 and Open MPI 4.1 showed, and that the launcher's rules are based on:

- Only a task of a step has SLURM_STEP_ID. The script of `sbatch -n4` has SLURM_PROCID=0 and SLURM_NTASKS=4 too.
- SLURM_STEP_NODELIST is "n[0-1]"; the names need not resolve anywhere but on the nodes.
- SLURM_STEP_TASKS_PER_NODE is "1(x2)", or "3,1" where nodes differ.
- mpirun sets OMPI_COMM_WORLD_RANK, _SIZE, _LOCAL_RANK and _LOCAL_SIZE, and its own addresses in OMPI_MCA_orte_hnp_uri.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from tests.cloud import slurm_cluster
from tests.cloud.slurm_cluster import Slurm
from tests.conftest import ROOT

from trainyard.image import recipes
from trainyard.spec.model import load
from trainyard_jobs import platforms
from trainyard_jobs.model import request

LAUNCHER = (sys.executable, "-I", "-S", str(ROOT / "launcher"))
NAMES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "NODE_RANK", "NNODES")

# Prints what this process got, after it has met the others at MASTER_ADDR and MASTER_PORT and added their ranks up.
MEET = f"""
import json, os, socket, time
rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
address = (os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))
if rank == 0:
    server = socket.create_server(address)
    peers = [server.accept()[0] for _ in range(world - 1)]
    total = sum(int(peer.recv(10)) for peer in peers)
    for peer in peers:
        peer.sendall(str(total).encode())
else:
    end = time.monotonic() + 30
    while True:
        try:
            peer = socket.create_connection(address, timeout=30)
            break
        except OSError:
            if time.monotonic() > end:
                raise
            time.sleep(0.1)
    peer.sendall(str(rank).encode())
    total = int(peer.recv(10))
print(json.dumps({{"met": total, **{{name: os.environ.get(name) for name in {NAMES!r}}}}}), flush=True)
"""


pytestmark = [*slurm_cluster.MARKS, pytest.mark.usefixtures("schedulers")]


def _met(ended: subprocess.CompletedProcess[str]) -> list[dict[str, object]]:
    assert ended.returncode == 0, ended.stderr
    return sorted((json.loads(line) for line in ended.stdout.splitlines()), key=lambda one: int(one["RANK"]))


def _coordinates(*values: str) -> dict[str, str]:
    return dict(zip(NAMES, values, strict=True))


def test_one_task_per_node(slurm: Slurm) -> None:
    ended = slurm.run("srun", "-N2", *LAUNCHER, "--", sys.executable, "-c", MEET)
    assert _met(ended) == [
        {"met": 1, **_coordinates("0", "2", "0", "1", "0", "2")},
        {"met": 1, **_coordinates("1", "2", "0", "1", "1", "2")},
    ]


def test_several_tasks_on_one_node(slurm: Slurm) -> None:
    ended = slurm.run("srun", "-N1", "-n2", *LAUNCHER, "--", sys.executable, "-c", MEET)
    assert _met(ended) == [
        {"met": 1, **_coordinates("0", "2", "0", "2", "0", "1")},
        {"met": 1, **_coordinates("1", "2", "1", "2", "0", "1")},
    ]


def test_several_tasks_on_each_of_two_nodes(slurm: Slurm) -> None:
    ended = slurm.run("srun", "-N2", "--ntasks-per-node=2", *LAUNCHER, "--", sys.executable, "-c", MEET)
    assert _met(ended) == [
        {"met": 6, **_coordinates(str(rank), "4", str(rank % 2), "2", str(rank // 2), "2")} for rank in range(4)
    ]


def test_several_processes_of_one_task_per_node(slurm: Slurm) -> None:
    """As with a task per node and a process per GPU."""
    ended = slurm.run(
        "srun", "-N2", "env", "LAUNCHER_NPROC=2", *LAUNCHER, "--", sys.executable, "-c", MEET
    )  # fmt: skip
    assert _met(ended) == [
        {"met": 6, **_coordinates(str(rank), "4", str(rank % 2), "2", str(rank // 2), "2")} for rank in range(4)
    ]


def test_the_script_of_sbatch_is_one_process(slurm: Slurm, tmp_path: Path) -> None:
    script = slurm.folder / "job.sh"
    script.write_text(f"#!/bin/sh\n{' '.join(LAUNCHER)} --print-env --json -- true\n")
    out = slurm.folder / "job.out"
    ended = slurm.run("sbatch", "--wait", "-N2", "-n4", f"--output={out}", f"--error={out}.err", str(script))
    assert ended.returncode == 0, ended.stderr + Path(f"{out}.err").read_text()
    cluster = json.loads(out.read_text())["cluster"]
    assert (cluster["source"], cluster["node_rank"], cluster["nnodes"]) == ("single node", 0, 1)


def _written(**options: Any) -> str:
    """The batch script that `make job PLATFORM=slurm` writes for two nodes."""
    known, given = recipes.outlines(load("cpu")), {"workers": 2, **options}
    wanted = request.parse_request(given, known, lambda _: None, tpu_machine=False)
    return platforms.by_name("slurm").write(wanted).text


@pytest.mark.parametrize("runtime", ["pyxis", "apptainer"])
def test_sbatch_accepts_the_job_that_is_written(slurm: Slurm, runtime: str) -> None:
    script = slurm.folder / f"{runtime}.sbatch"
    more = {"cpu": "1", "memory": "1Mi", "env": ("A=1,2", "B=it's"), "mount": "/srv:/data:ro /tmp:/tmp"}
    more |= {"array": "0-1%1", "requeue": True}
    script.write_text(_written(container_runtime=runtime, queue="all", timeout="90m", **more))
    ended = slurm.run("sbatch", "--test-only", str(script))
    assert ended.returncode == 0, ended.stderr
    assert "to start at" in ended.stderr


def test_the_tasks_of_the_job_that_is_written_form_a_group(slurm: Slurm) -> None:
    """The script runs in Slurm; a program in place of Apptainer starts the launcher, as the image's entrypoint does."""
    script, program, out = (slurm.folder / name for name in ("written.sbatch", "apptainer", "written.out"))
    script.write_text(_written(container_runtime="apptainer", args="--epochs 2", env=("SAID=1,2 it's",)))
    meet = slurm.folder / "meet.py"
    # Apptainer takes the prefix away.
    said = "assert os.environ['APPTAINERENV_SAID'] == \"1,2 it's\", os.environ"
    meet.write_text(f"import os, sys\nassert sys.argv[1:] == ['mnist', '--epochs', '2'], sys.argv\n{said}\n{MEET}")
    program.write_text(f'#!/bin/sh\nshift 2\nexec {" ".join(LAUNCHER)} -- {sys.executable} {meet} "$@"\n')
    program.chmod(0o755)
    path = f"PATH={slurm.folder}:{os.environ['PATH']}"
    ended = slurm.run("env", path, "sbatch", "--wait", f"--output={out}", str(script))
    assert ended.returncode == 0, ended.stderr + out.read_text()
    # sbatch writes what the launcher prints on stderr to the same file.
    printed = "".join(line for line in out.read_text().splitlines(keepends=True) if line.startswith("{"))
    assert _met(subprocess.CompletedProcess([], 0, printed, "")) == [
        {"met": 1, **_coordinates("0", "2", "0", "1", "0", "2")},
        {"met": 1, **_coordinates("1", "2", "0", "1", "1", "2")},
    ]


def test_each_task_of_an_array_has_its_own_folder_and_the_mounts(slurm: Slurm) -> None:
    """Run the script in Slurm; a program in place of Apptainer prints the words that it got."""
    script, program = slurm.folder / "array.sbatch", slurm.folder / "apptainer"
    options = {"workers": 1, "array": "0-1", "requeue": True, "mount": "/srv:/data:ro", "output": "/out/my run"}
    script.write_text(_written(container_runtime="apptainer", cpu="1", **options))
    program.write_text('#!/bin/sh\nprintf "%s\\n" "$@"\n')
    program.chmod(0o755)
    path, out = f"PATH={slurm.folder}:{os.environ['PATH']}", slurm.folder / "array-%a.out"
    ended = slurm.run("env", path, "sbatch", "--wait", f"--output={out}", str(script))
    assert ended.returncode == 0, ended.stderr
    for task in (0, 1):
        words = Path(str(out).replace("%a", str(task))).read_text().splitlines()
        assert words[:2] == ["run", "--bind=/srv:/data:ro"] and words[-1] == f"--job-dir=/out/my run/{task}"


def test_scancel_ends_every_process_with_sigterm(slurm: Slurm) -> None:
    """Slurm reports a step that a signal ended with the largest status of its tasks."""
    out = slurm.folder / "cancelled"
    wait = "import os, time; os.write(1, b'up\\n'); time.sleep(60)"
    slurm.start(
        "srun", "--job-name=cancelled", "-N2", "env", "LAUNCHER_NPROC=2", *LAUNCHER, "--", sys.executable, "-c", wait,
        out=out,
    )  # fmt: skip
    end = time.monotonic() + 30
    while not (out.exists() and out.read_text().count("up") == 4):
        assert time.monotonic() < end, Path(f"{out}.err").read_text()
        time.sleep(0.05)
    assert slurm.run("scancel", "--signal=TERM", "--name=cancelled").returncode == 0
    status = Path(f"{out}.status")
    while not (status.exists() and status.read_text().strip()):
        assert time.monotonic() < end
        time.sleep(0.05)
    assert int(status.read_text()) == 143, Path(f"{out}.err").read_text()


def _mpirun(*words: str, **env: str) -> subprocess.CompletedProcess[str]:
    options = ["--allow-run-as-root", "--oversubscribe", "--bind-to", "none"]
    full = {"PATH": os.environ["PATH"], "HOME": os.environ.get("HOME", "/"), **env}
    return subprocess.run(
        ["mpirun", *options, *words], env=full, capture_output=True, text=True, timeout=120, check=False
    )


def test_ranks_of_mpirun() -> None:
    ended = _mpirun("-np", "2", *LAUNCHER, "--", sys.executable, "-c", MEET)
    assert _met(ended) == [
        {"met": 1, **_coordinates("0", "2", "0", "2", "0", "1")},
        {"met": 1, **_coordinates("1", "2", "1", "2", "0", "1")},
    ]


def test_two_jobs_of_mpirun_on_one_host_do_not_collide() -> None:
    words = ["mpirun", "--allow-run-as-root", "--oversubscribe", "--bind-to", "none", "-np", "2"]
    env = {"PATH": os.environ["PATH"], "HOME": os.environ.get("HOME", "/")}
    command = [*words, *LAUNCHER, "--", sys.executable, "-c", MEET]
    running = [subprocess.Popen(command, env=env, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    outs = [job.communicate(timeout=120)[0] for job in running]
    assert [job.returncode for job in running] == [0, 0]
    assert [len(out.splitlines()) for out in outs] == [2, 2]


def test_a_single_rank_of_mpirun_is_a_plain_process() -> None:
    ended = _mpirun("-np", "1", *LAUNCHER, "--print-env", "--json", "--", "true")
    assert ended.returncode == 0, ended.stderr
    assert json.loads(ended.stdout)["cluster"]["nnodes"] == 1
