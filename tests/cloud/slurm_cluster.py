"""Slurm with two slurmd on this host, and Open MPI: installed where this is possible, for the tests of schedulers."""

from __future__ import annotations

import functools
import os
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

PROGRAMS = {"srun": "slurm-wlm", "munged": "munge", "mpirun": "openmpi-bin"}
INSTALL_TIMEOUT = 600  # seconds; 25 s on 2 cores
CAN_INSTALL = os.geteuid() == 0 and shutil.which("apt-get") is not None
MARKS = [pytest.mark.concurrent, *([] if CAN_INSTALL else [pytest.mark.needs(*PROGRAMS)])]


@functools.cache
def install() -> None:
    """Install the schedulers where this is possible; without their services, which the tests start themselves."""
    missing = sorted({package for program, package in PROGRAMS.items() if not shutil.which(program)})
    if not missing:
        return
    # Debian would start services that the tests do not use, and that outlive them.
    env = {**os.environ, "DEBIAN_FRONTEND": "noninteractive", "RUNLEVEL": "1"}
    for words in (["update"], ["install", "-y", "--no-install-recommends", *missing]):
        done = subprocess.run(
            ["apt-get", "-qq", *words], env=env, capture_output=True, text=True, timeout=INSTALL_TIMEOUT, check=False
        )
        if done.returncode:
            pytest.fail(f"apt-get {' '.join(words)}: {done.stderr.strip().splitlines()[-1:]}")


# Two nodes on one host: `slurmd -N` gives each its name and port. cgroups would need systemd.
CONFIGURATION = """\
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={port}
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
CredType=cred/munge
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
ProctrackType=proctrack/pgid
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SlurmdParameters=config_overrides
MpiDefault=none
KillWait=2
NodeName=trainyard-n[0-1] NodeHostname={host} NodeAddr=127.0.0.1 Port=[{first}-{last}] CPUs=4 State=UNKNOWN
PartitionName=all Nodes=ALL Default=YES State=UP
"""
# The name of this host, too: gloo looks it up, and a resolver outside may not know it.
HOSTS = "127.0.0.1 localhost trainyard-n0\n127.0.0.1 trainyard-n1\n127.0.0.1 {host}\n"
# Runs in separate namespaces: the nodes' names resolve there only, and the services end with the first process.
SERVICES = """\
set -eu
mount --bind "$1/hosts" /etc/hosts
cd "$1"
munged --foreground --force --key-file="$1/munge.key" --socket="$1/munge.socket" --pid-file="$1/munge.pid" \
  --log-file="$1/munge.log" --seed-file="$1/munge.seed" &
until [ -S "$1/munge.socket" ]; do sleep 0.05; done
slurmctld -D -i -f "$1/slurm.conf" >"$1/slurmctld.log" 2>&1 &
for node in trainyard-n0 trainyard-n1; do slurmd -D -N $node -f "$1/slurm.conf" >"$1/$node.log" 2>&1 & done
shift
until [ "$(sinfo -h -t idle -o %D 2>/dev/null)" = 2 ]; do sleep 0.1; done
echo ready
while read -r line; do eval "$line"; done
"""


class Slurm:
    """Run commands in a cluster of two nodes."""

    def __init__(self, folder: Path, services: subprocess.Popen[str]) -> None:
        self.folder = folder
        self.services = services
        self._number = 0

    def run(self, *words: str, timeout: float = 60) -> subprocess.CompletedProcess[str]:
        """Run a command of Slurm's; returns its status and output."""
        self._number += 1
        out = self.folder / f"out-{self._number}"
        self.start(*words, out=out)
        end = time.monotonic() + timeout
        status = Path(f"{out}.status")
        while not (status.exists() and status.read_text().strip()):
            assert time.monotonic() < end, f"{words} takes more than {timeout:g} s: {self.logs()}"
            time.sleep(0.05)
        return subprocess.CompletedProcess(
            words, int(status.read_text()), out.read_text(), Path(f"{out}.err").read_text()
        )

    def start(self, *words: str, out: Path) -> None:
        """Start a command; its output and status are written to files."""
        quoted = " ".join("'" + word.replace("'", "'\\''") + "'" for word in words)
        script = Path(f"{out}.sh")
        script.write_text(f"{quoted} >{out} 2>{out}.err\necho $? >{out}.status\n")
        Path(f"{out}.err").touch()
        assert self.services.stdin is not None
        self.services.stdin.write(f"sh {script} &\n")
        self.services.stdin.flush()

    def logs(self) -> str:
        """Return the last lines of every service."""
        return "\n".join(path.read_text(errors="replace")[-600:] for path in sorted(self.folder.glob("*.log")))


def started(folder: Path) -> Iterator[Slurm]:
    """Start the services in a folder, yield the cluster, and end them."""
    if os.geteuid():
        pytest.skip("Slurm's services need root: run the cloud tests as root, as CI does")
    for path in (folder, *folder.parents[:3]):
        path.chmod(path.stat().st_mode & ~0o022 | 0o011)  # munged refuses sockets in folders that others can write to
    key = folder / "munge.key"
    key.write_bytes(os.urandom(1024))
    key.chmod(0o400)
    (folder / "state").mkdir()
    (folder / "hosts").write_text(HOSTS.format(host=socket.gethostname()))
    host = subprocess.run(["hostname", "-s"], capture_output=True, text=True, check=True).stdout.strip()
    first = 20000 + os.getpid() % 10000  # below the range of outgoing connections
    text = CONFIGURATION.format(host=host, user="root", folder=folder, port=first, first=first + 1, last=first + 2)
    (folder / "slurm.conf").write_text(text)
    words = [
        "unshare",
        "--mount",
        "--pid",
        "--fork",
        "--mount-proc",
        "--kill-child",
        "bash",
        "-c",
        SERVICES,
        "services",
    ]
    env = {"PATH": os.environ["PATH"], "HOME": "/root", "SLURM_CONF": str(folder / "slurm.conf")}
    with (folder / "services.log").open("w") as log:
        services = subprocess.Popen(
            [*words, str(folder)], env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True
        )
    cluster = Slurm(folder, services)
    try:
        watchdog = subprocess.Popen(["sh", "-c", f"sleep 60; kill {services.pid}"], start_new_session=True)
        assert services.stdout is not None
        ready = services.stdout.readline()  # 2 s
        os.killpg(watchdog.pid, signal.SIGTERM)
        watchdog.wait()
        assert ready == "ready\n", cluster.logs()
        yield cluster
    finally:
        services.kill()  # --kill-child: the namespace's first process, and with it all others
        services.wait(timeout=30)
