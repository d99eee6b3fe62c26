"""Test the nodes of a job before it starts, and name the one that is not fit (R17). Imported only for a preflight.

Node 0 asks (`Lead`, in a thread), and every node answers (`Node`): what it has, its links to others, and the result of
the framework's test, which is a program for each process (`Programs`).
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import resource
import signal
import socket
import subprocess
import threading
import time

from launcher import process, processes
from launcher.address import join
from launcher.errors import LaunchError
from launcher.image import RECIPE
from launcher.preflight import rendezvous
from launcher.preflight.rendezvous import Channel, Coordinator, reason

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, Callable, Iterable

    from launcher.explain import Report
    from launcher.preflight.rendezvous import Message, Problems

    Started = list[tuple[list[str], dict[str, str]]]  # command and environment of processes

TOLD = 10.0  # seconds until the nodes that wait say which node is missing
FOLDER = 10.0  # for the checkpoint folder: a network file system may not answer
IMPORT = 180.0  # for the import of the framework: 2 to 13 s were measured, and a cold disk is slower
COLLECTIVES = 12.0  # from the last import to the last result: 8 processes on 2 cores took 2 s
FIRST = 0.3  # seconds after the end of a program in which others may end for the same reason
FROZEN = 4.0  # seconds without a line of a program, which prints one each second
CLOCKS = 5.0  # seconds by which clocks may differ
SLOWER = 10.0  # times slower than the best quarter is not fit: links of healthy nodes on busy CPUs differ by up to 4
LATER = 0.05  # seconds by which a message must also be later: a busy CPU delays it by less
BUSY = 0.5  # seconds by which a pair of processes must be slower on CPUs: 0.1 was measured with 8 on 2 cores
LOSS, FEWEST = 0.01, 20  # part of the segments that is sent again, and how many at least, of a link that is not fit
GIB = 1 << 30
SHM = 64 << 20  # default of Docker and Kubernetes, with which every image is tested
SHM_GPUS = 1 << 30  # of several processes with NCCL (nccl-shm)
PACKAGES = {"torch": "torch", "torch_xla": "torch", "torch_tpu": "torch", "tensorflow": "tf", "jax": "jax"}
TRAINERS = "/opt/trainyard/trainers"
FRAMEWORKS = f"{os.path.dirname(os.path.abspath(__file__))}/frameworks"  # programs that run in the image's Python
FOLDERS = ("--checkpoint-dir", "--job-dir", "--output-dir")
STEPS = ("import", "join", "all-reduce", "pairs", "done")
COMPARED = {
    "count": "number of nodes",
    "framework": "framework",
    "image": "image",
    "driver": "driver",
    "gpus": "number of GPUs",
}
SHOWN = 8  # nodes of the line that says which are not fit


class Place:
    """The place of this launcher in the job: `number` of `count`, the coordinator's address, and why it is `alone`."""

    def __init__(self, report: Report) -> None:
        cluster, task = report.cluster, report.cluster.task
        self.alone = ""
        if cluster.node_rank is None:
            self.alone = f"this node is outside the training world ({cluster.role})"
        elif cluster.given or report.torchrun:
            self.alone = "torchrun finds the nodes"
        self.number, self.count = (task.rank, task.world_size) if task else (cluster.node_rank or 0, cluster.nnodes)
        if self.alone:
            self.number, self.count = 0, 1
        self.host, self.master_port = cluster.master_addr, cluster.master_port
        self.port = self.master_port + (1 if self.master_port < 65535 else -1)
        if self.count == 1:
            self.host, self.port = "127.0.0.1", 0


def own_facts(report: Report, folder: str) -> Message:
    """Return what this node has, with `problems`, a line for each thing that the image or the job needs (R17.2)."""
    facts, number = report.facts, report.nproc
    host, image, settings = facts.host, facts.image, facts.settings
    found: Message = {}
    problems = list(facts.problems)

    def need(name: str, what: str, present: int, least: int, fix: str, size: bool = True) -> None:
        found[name] = present
        least = settings.needs[name] * (GIB if size else 1) if name in settings.needs else least
        if present < least:
            words = [_size(one) if size else str(one) for one in (present, least)]
            problems.append(f"{what}: {words[0]}, {words[1]} needed: {fix}")

    gpu = report.decision.runtime == "gpu" and not settings.rehearse
    shared, least = _space(host.sysroot + "/dev/shm")[0], SHM_GPUS if gpu and number > 1 else SHM
    need("shm", "/dev/shm", shared, least, "docker run --shm-size, or a volume in memory")
    need("memory", "memory", host.memory(), number * GIB, "use a larger machine, or raise the limit of the container")
    used = folder or facts.has("TMPDIR") or "/tmp"
    if "://" not in used:
        problem = _write(used)
        if problem:
            problems.append(f"{used}: {problem}: make it writable for uid {os.getuid()}, or use another folder")
        else:
            need("disk", f"free disk at {used}", _space(used)[1], GIB, "free some, or use another folder")
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    least = max(512, 256 + 4 * number * report.cluster.nnodes)  # sockets to all processes, and their own files
    need("files", "file handles", limit if limit >= 0 else 1 << 30, least, "docker run --ulimit nofile", size=False)
    if gpu:
        present, driver = host.gpu_count(facts.env), facts.driver
        need("gpus", "GPUs", present, settings.nproc, "look for Xid errors in the kernel log of the host", size=False)
        found["driver"] = driver.text if driver else ""
        if driver and (driver.error or driver.problem or driver.missing):
            problems.append(driver.problem or driver.missing or f"CUDA does not start: cuInit returned {driver.error}")
    found["image"], version = _content(host.sysroot, image.python(), image.framework)
    found["framework"] = f"{image.framework} {version or image.version}".strip()
    return {**found, "problems": problems}


def _size(number: int) -> str:
    return f"{number / GIB:.1f} GiB" if number >= GIB else f"{number >> 20} MiB"


def _space(path: str) -> tuple[int, int]:
    """Return size and free space of a file system in bytes; 0 if it is missing."""
    with contextlib.suppress(OSError):
        found = os.statvfs(path)
        return found.f_blocks * found.f_frsize, found.f_bavail * found.f_frsize
    return 0, 0


def _write(folder: str) -> str:
    """Write a file into a folder; returns what fails. In a thread: a network file system that is gone stops it."""
    answer = [f"did not answer within {FOLDER:g} s"]
    path = os.path.join(folder, f".preflight-{socket.gethostname()}-{os.getpid()}")

    def try_it() -> None:
        try:
            os.makedirs(folder, exist_ok=True)
            with open(path, "wb") as file:
                file.write(b"." * 65536)
                file.flush()
                os.fsync(file.fileno())
            os.unlink(path)
            answer[0] = ""
        except OSError as error:
            answer[0] = reason(error)

    thread = threading.Thread(target=try_it, daemon=True)
    thread.start()
    thread.join(FOLDER)
    return answer[0]


def _content(sysroot: str, python: str, framework: str) -> tuple[str, str]:
    """Return a digest of what the image contains, and the version of its framework that is installed.

    An image does not know its digest. Images that differ in recipe.json (which has the commit and the tag among its
    labels), in names or sizes of the launcher's and trainers' files, or in a package, have different ones here.
    """
    digest, found = hashlib.sha256(), ""
    for folder, folders, names in os.walk(f"{sysroot}{os.path.dirname(RECIPE)}"):
        folders[:] = sorted(name for name in folders if name != "__pycache__")
        for path in [os.path.join(folder, name) for name in sorted(names)]:
            with contextlib.suppress(OSError):
                digest.update(f"{path[len(sysroot) :]} {os.path.getsize(path)}\n".encode("utf-8", "replace"))
    with contextlib.suppress(OSError), open(sysroot + RECIPE, "rb") as file:
        digest.update(file.read())
    library = f"{sysroot}{os.path.dirname(os.path.dirname(python))}/lib"
    for folder in sorted(os.listdir(library)) if python.startswith("/") and os.path.isdir(library) else []:
        site = f"{library}/{folder}/site-packages"
        for name in sorted(os.listdir(site)) if os.path.isdir(site) else []:
            package, _, version = name.partition(".dist-info")[0].partition("-")
            if name.endswith(".dist-info"):
                digest.update(name.encode() + b"\n")
                found = version if package.lower() == framework else found
    return digest.hexdigest()[:12], found


def compare(nodes: dict[int, Message]) -> Problems:
    """Return what each node lacks, or has other than most nodes; where none has most, all that differ (R17.3)."""
    problems: Problems = {number: "; ".join(one["problems"]) for number, one in nodes.items() if one["problems"]}
    for name, meaning in COMPARED.items():
        values = [one.get(name) for one in nodes.values()]
        common = max(values, key=values.count)
        tie = any(values.count(one) == values.count(common) for one in values if one != common)
        for number, one in nodes.items():
            rest = sorted({value for value in values if value != one.get(name)}, key=str)
            others = " and ".join(f"{values.count(value)} have {value}" for value in rest)
            if others and (tie or one.get(name) != common):
                problems.setdefault(number, f"another {meaning}: {one.get(name)}, while {others}")
    return problems


def compare_clocks(clocks: dict[int, tuple[float, float, float]]) -> Problems:
    """Return the nodes whose clock is more than CLOCKS seconds from the median (R17.3).

    `clocks` are node -> its time, and those of node 0 when it asked and when the answer came. Half of the time between
    counts for the node: a busy CPU refuses nobody.
    """
    ahead = {number: own - (asked + came) / 2 for number, (own, asked, came) in clocks.items()}
    off = {number: one - _median(ahead.values()) for number, one in ahead.items()}
    return {
        number: f"its clock is {off[number]:+.1f} s from the others': synchronize it (chrony, ntpd)"
        for number, (_, asked, came) in clocks.items()
        if abs(off[number]) > CLOCKS + (came - asked) / 2
    }


def _median(values: Iterable[float]) -> float:
    ordered = sorted(values)
    middle = len(ordered) // 2
    return (ordered[middle] + ordered[~middle]) / 2 if ordered else 0.0


def _quarter(values: Iterable[float]) -> float:
    ordered = sorted(values)
    return ordered[(len(ordered) - 1) // 4] if ordered else 0.0


def unfit_links(links: list[Message]) -> list[Message]:
    """Return the links that are not fit, each with `why`: `a`, `b`, `latency`, `bandwidth`, `loss`, `error` (R17.4)."""
    # A node of three is at two of the three links: the best quarter is healthy where the median need not be.
    latency = _quarter(one["latency"] for one in links if "latency" in one)
    bandwidth = -_quarter(-one["bandwidth"] for one in links if "bandwidth" in one)
    found = []
    for one in links:
        why = one.get("error", "")
        slow, late = one.get("bandwidth", bandwidth), one.get("latency", latency)
        if not why and one.get("loss"):
            why = f"{one['loss']:.1%} of the packets were lost"
        elif not why and slow * SLOWER < bandwidth:
            why = f"{slow / 1e6:.1f} MB/s, others have {bandwidth / 1e6:.1f}"
        elif not why and late > SLOWER * latency and late > latency + LATER:
            why = f"a latency of {late * 1e3:.3g} ms, others have {latency * 1e3:.3g}"
        if why:
            found.append({**one, "why": why})
    return found


def name_nodes(bad: list[Message], links: list[Message]) -> Problems:
    """Return the nodes at fault: those of which most links are bad, else both ends of a link."""
    problems: Problems = {}
    while bad:
        ends = [one[end] for one in bad for end in ("a", "b")]
        worst = max(sorted(set(ends)), key=ends.count)
        own = [one for one in bad if worst in (one["a"], one["b"])]
        measured = sum(worst in (one["a"], one["b"]) for one in links)
        if len(own) < 2 or 2 * len(own) <= measured:
            for one in bad:
                problems.setdefault(one["a"], f"its link to node {one['b']}: {one['why']}")
                problems.setdefault(one["b"], f"its link to node {one['a']}: {one['why']}")
            break
        other = own[0]["a"] + own[0]["b"] - worst
        problems[worst] = f"{len(own)} of its {measured} links are not fit, as that to node {other}: {own[0]['why']}"
        bad = [one for one in bad if one not in own]
    return problems


def slowest(links: list[Message]) -> Message:
    """Return the slowest link and node against the median: `link`, `bandwidth`, `node`, `median`; {} without links."""
    known = sorted((one["bandwidth"], one["a"], one["b"]) for one in links if "bandwidth" in one)
    if not known:
        return {}
    own = {node: _median(one[0] for one in known if node in one[1:]) for one in known for node in one[1:]}
    (bandwidth, *link), middle = known[0], _median(one[0] for one in known)
    return {"link": link, "bandwidth": bandwidth, "node": min(own, key=lambda node: own[node]), "median": middle}


def merge(one: Message, other: Message) -> Message:
    """Return the two ends' measurements of a link as one: the lower bandwidth, and the greater loss."""
    errors = [end["error"] for end in (one, other) if "error" in end]
    if errors:
        return {"error": max(errors, key=len)}  # the shorter says that the other end has closed the connection
    found = {"latency": one.get("latency", 0.0), "bandwidth": min(one["bandwidth"], other["bandwidth"])}
    for end in (one, other):
        again, segments = end.get("retransmitted", 0), max(1, end.get("segments", 0))
        if again >= FEWEST and again > LOSS * segments:
            found["loss"] = max(found.get("loss", 0.0), again / segments)
    return found


def better(one: Message, other: Message) -> Message:
    """Return the better of two measurements of a link, each by each."""
    if "error" in one or "error" in other:
        return other if "error" in one else one
    found = {
        "bandwidth": max(one["bandwidth"], other["bandwidth"]),
        "latency": min(one["latency"], other["latency"]),
        "loss": min(one.get("loss", 0.0), other.get("loss", 0.0)),
    }
    return {**one, **found}


def blame(results: dict[int, Message], addresses: dict[int, str]) -> Problems:
    """Return the nodes at fault for collectives that failed (R17.5).

    `results` are node -> `came` and `failed`: `rank`, `step`, `error`, `late`, `died` and `silent` seconds of each. In
    this order: the programs that ended by themselves first; those that are frozen; the node whose address the errors of
    most others contain; those that did not only wait, and of them those that got least far.
    """
    failures = [(number, one) for number, result in results.items() for one in result.get("failed", [])]
    named = {
        number: sum(address in one["error"] for other, one in failures if other != number)
        for number, address in addresses.items()
    }
    most = [number for number, count in named.items() if count and count == max(named.values())]
    chosen = [pair for pair in failures if pair[1]["died"]]
    first = min((results[number]["came"] for number, _ in chosen), default=0.0)
    chosen = [pair for pair in chosen if results[pair[0]]["came"] <= first + FIRST]
    chosen = chosen or [pair for pair in failures if pair[1]["silent"] > FROZEN]
    if not chosen and len(most) == 1:
        error = next(one["error"] for _, one in failures if addresses[most[0]] in one["error"])
        return {most[0]: f"{named[most[0]]} processes of other nodes could not reach it: {error}"}
    least = min((one["late"], STEPS.index(one["step"])) for _, one in failures)
    chosen = chosen or [pair for pair in failures if (pair[1]["late"], STEPS.index(pair[1]["step"])) == least]
    return {
        number: f"the framework's test of rank {one['rank']} failed in step {one['step']}: {one['error']}"
        for number, one in reversed(chosen)
    }


def judge_collectives(results: dict[int, Message]) -> Problems:
    """Return the nodes whose pairs of processes are slower than the others of their kind: in a node, or between two."""
    every = [one for result in results.values() for one in result["results"]]
    node = {one["rank"]: number for number, result in results.items() for one in result["results"]}
    # On CPUs it is the network of R17.4, and the framework's threads wait for the CPU.
    noise = BUSY if every[0]["backend"] in ("gloo", "grpc", "cpu") else 0.001
    kinds: dict[bool, list[Message]] = {True: [], False: []}
    for one in every:
        for peer, _, seconds in one["links"]:
            link = {"a": node[one["rank"]], "b": node[peer], "bandwidth": one["bytes"] / seconds, "seconds": seconds}
            if one["rank"] < peer:
                kinds[link["a"] == link["b"]].append(link)
    problems: Problems = {}
    for links in kinds.values():
        least = _median(one["seconds"] for one in links) + noise
        bad = [one for one in unfit_links(links) if one["seconds"] > least]
        problems.update({number: f"{why} (by the framework)" for number, why in name_nodes(bad, links).items()})
    return problems


class Programs:
    """The framework's test: a process for each that the job will have on this node."""

    def __init__(self, members: Started) -> None:
        self._children: list[tuple[Any, Message]] = []
        for number, (command, env) in enumerate(members):
            child = subprocess.Popen(
                command, env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                start_new_session=True,
            )  # fmt: skip
            state = {"rank": env.get("RANK", str(number)), "step": "import", "error": "", "died": False, "rest": b""}
            self._children.append((child, {**state, "last": "", "seen": time.monotonic()}))

    def streams(self) -> list[Any]:
        """Return the outputs to read."""
        return [child.stdout for child, state in self._children if not state["error"]]

    def read(self, ready: list[Any]) -> None:
        """Read what the programs have printed."""
        for child, state in [pair for pair in self._children if pair[0].stdout in ready]:
            piece = os.read(child.stdout.fileno(), 65536)
            state["seen"] = time.monotonic()
            *lines, state["rest"] = (state["rest"] + piece).split(b"\n")
            for line in lines:
                self._take(state, line.decode("utf-8", "replace"))
            if not piece and not state["error"]:
                code = _reap(child)
                how = f"killed by signal {-code}" if code < 0 else f"exit status {code}"
                state.update(died=True, error=f"{how} {state['last']}".strip())

    def _take(self, state: Message, line: str) -> None:
        said = None
        with contextlib.suppress(ValueError):
            said = json.loads(line)
        if isinstance(said, dict):
            state.update({name: said[name] for name in ("step", "error", "result") if name in said})
        else:
            state["last"] = line.strip()[:300] or state["last"]  # a message of the framework

    def imported(self) -> bool:
        """Return whether all have imported the framework, or one has failed."""
        states = [state for _, state in self._children]
        return all(state["step"] != "import" for state in states) or any(state["error"] for state in states)

    def result(self, late: str = "") -> Message | None:
        """Return the `results` of all, or what has `failed`; None without either. `late` is why there has to be one."""
        states, now = [state for _, state in self._children], time.monotonic()
        failed = [
            {**{name: state[name] for name in ("rank", "step", "died")}, "error": (state["error"] or late)[:400],
             "silent": 0.0 if state["error"] else now - state["seen"], "late": not state["error"]}
            for state in states if state["error"] or (late and "result" not in state)
        ]  # fmt: skip
        if not failed and all("result" in state for state in states):
            return {"results": [state["result"] for state in states]}
        return {"failed": failed} if failed else None

    def end(self) -> None:
        """Kill all of them, and what they have started."""
        for child, _ in self._children:
            with contextlib.suppress(OSError):
                os.killpg(child.pid, signal.SIGKILL)
            _reap(child)
            child.stdin.close()
            child.stdout.close()


def _reap(child: Any) -> int:
    """Return the status of a program that ends; a process that waits inside the kernel does not end."""
    with contextlib.suppress(subprocess.TimeoutExpired):
        child.wait(rendezvous.GRACE)
    return child.returncode or 0


def programs(report: Report, env: dict[str, str], place: Place) -> Started:
    """Return command and environment of each process of the framework's test on this node; [] where there is none."""
    image, nproc = report.facts.image, report.nproc
    package = PACKAGES.get(image.framework, "")
    found = os.path.exists(f"{report.facts.host.sysroot}{TRAINERS}/{package}")
    if place.count * nproc == 1 or place.alone or not package or not found:
        return []
    # A worker of TensorFlow uses all devices of its host, and those of a slice belong to one system.
    if package == "tf" and (place.count == 1 or not env.get("TF_CONFIG") or report.decision.runtime.startswith("tpu")):
        return []
    environments = [env] if report.cluster.task else processes.environments(env, report.cluster, nproc)
    if image.framework == "jax" and nproc > 1:
        from launcher import jax

        environments = [{**one, **jax.process(one, jax.gpus(report.facts, report.decision))} for one in environments]
    # torch_tpu would take the chips, which the test of torch does not use.
    more = {"TORCH_DEVICE_BACKEND_AUTOLOAD": "0"} if package == "torch" else {}
    program = f"{FRAMEWORKS}/with_{package}.py"
    return [([image.python(), program], {**one, **more}) for one in environments]


class Lead:
    """Node 0's part: ask all nodes, for which it waits `wait` seconds, and judge their answers."""

    def __init__(self, coordinator: Coordinator, place: Place, wait: float, collective: bool) -> None:
        self._coordinator, self._place, self._wait, self._collective = coordinator, place, wait, collective
        self._addresses: dict[int, str] = {}
        self.report: Message = {"schema": 1, "nodes": [], "links": [], "collectives": [], "seconds": {}}

    def run(self) -> None:
        """Ask and judge, until something is not fit; then tell all nodes the verdict."""
        problems: Problems = {}
        steps = [("join", self._join), ("port", self._port), ("links", self._links), ("framework", self._framework)]
        for name, step in steps if self._place.count > 1 else (steps[0], steps[-1]):
            began = time.monotonic()
            try:
                problems = problems or step()
            except Exception as error:  # the nodes wait for a verdict
                problems = {0: f"internal error in {name}: {type(error).__name__}: {error}"}
            self.report["seconds"][name] = round(time.monotonic() - began, 3)
        members = self._coordinator.members
        named = [
            {"node": number, "host": members[number].hello["host"] if number in members else "", "why": why}
            for number, why in sorted(problems.items())
        ]
        self.report["strangers"] = self._coordinator.strangers
        self.report.update(ok=not named, problems=named, slowest=slowest(self.report["links"]))
        verdict = {name: self.report[name] for name in ("ok", "slowest", "seconds")}
        self._coordinator.send(verdict={**verdict, "problems": named[:SHOWN], "count": len(named)})
        self._coordinator.close()

    def _join(self) -> Problems:
        coordinator = self._coordinator
        missing = coordinator.join(self._wait, TOLD)
        hellos = {number: one.hello for number, one in sorted(coordinator.members.items())}
        for number, one in coordinator.members.items():
            self._addresses[number] = one.address() if number else self._place.host
        self.report["nodes"] = [{**one, "address": self._addresses[number]} for number, one in hellos.items()]
        asked = time.time()
        coordinator.send(ping=1)
        answers, silent = coordinator.gather("clock", rendezvous.SILENCE, "did not answer")
        clocks = compare_clocks({number: (one["clock"], asked, one["came"]) for number, one in answers.items()})
        return {**clocks, **silent, **compare(hellos), **missing}

    def _port(self) -> Problems:
        """Let every node connect to MASTER_PORT, at which the framework's processes meet."""
        port, where = self._place.master_port, join(self._place.host, self._place.master_port)
        try:
            listener = rendezvous.listen(port)
        except OSError as error:
            return {0: f"its port {port} cannot be used ({reason(error)}): set LAUNCHER_MASTER_PORT to another"}
        with listener:
            self._coordinator.send(port=port)
            found, late = self._coordinator.gather("port", rendezvous.ROUND + rendezvous.GRACE, "did not connect")
        cannot = {n: f"cannot connect to node 0 at {where}: {one['port']}" for n, one in found.items() if one["port"]}
        if 1 < len(cannot) == len(found) - 1:
            return {0: f"no other node can connect to {where}"}
        return {**late, **cannot}

    def _links(self) -> Problems:
        members = self._coordinator.members
        self._coordinator.send(mesh={n: [self._addresses[n], one.hello["port"]] for n, one in members.items()})
        links: dict[tuple[int, int], Message] = {}
        failed = 0
        for k in rendezvous.rounds(self._place.count):
            late = self._round(k, links)
            failed += any("error" in one for one in links.values() if one["a"] ^ one["b"] == k)
            if late or failed > 1:
                break
        # Once more: a busy CPU passes, and of two measurements the better counts.
        again = {one["a"] ^ one["b"] for one in unfit_links(list(links.values()))}
        for k in sorted(again)[:2]:
            late = late or self._round(k, links)
        self.report["links"] = measured = [links[pair] for pair in sorted(links)]
        return late or name_nodes(unfit_links(measured), measured)

    def _round(self, k: int, links: dict[tuple[int, int], Message]) -> Problems:
        """Measure the links of a round; returns the nodes that do not answer."""
        self._coordinator.send(round=k)
        found, late = self._coordinator.gather("link", rendezvous.ROUND + 2 * rendezvous.GRACE, "measured a link")
        for number, peer in [(number, number ^ k) for number in found if number < number ^ k and number ^ k in found]:
            one = {"a": number, "b": peer, **merge(found[number]["link"], found[peer]["link"])}
            links[number, peer] = better(links[number, peer], one) if (number, peer) in links else one
        return late

    def _framework(self) -> Problems:
        """Let every node start the framework's test, and judge the results."""
        if not self._collective:
            return {}
        coordinator, began = self._coordinator, time.monotonic()
        coordinator.send(start=1)
        found, late = coordinator.gather("imported", IMPORT + rendezvous.GRACE, "imported the framework")
        self.report["seconds"]["import"] = round(time.monotonic() - began, 3)
        results = {number: {**one["imported"], "came": one["came"]} for number, one in found.items()}
        if not late and not any("failed" in one for one in results.values()):
            coordinator.send(go=1)
            found, late = coordinator.gather("result", COLLECTIVES + 2 * rendezvous.GRACE, "tested the framework")
            results = {number: {**one["result"], "came": one["came"]} for number, one in found.items()}
        if any("failed" in one for one in results.values()):
            return blame(results, self._addresses)
        self.report["collectives"] = [one for number in sorted(results) for one in results[number].get("results", [])]
        return late or judge_collectives(results)


class Node:
    """This node's part: say `hello`, and answer the coordinator until there is a verdict."""

    def __init__(self, place: Place, hello: Message, members: Started, say: Callable[[str], None]) -> None:
        self._place, self._members, self._say = place, members, say
        self._listener = rendezvous.listen(0)
        self._hello = {**hello, "port": self._listener.getsockname()[1]}
        self._host = place.host if place.number else "127.0.0.1"  # node 0 may not reach itself by its service's name
        self._mesh: dict[str, Any] = {}
        self._test: Programs | None = None
        self._late = ""
        self._end = self._beaten = 0.0  # when the step of the test is late; 0 outside

    def run(self, wait: float) -> Message | str:
        """Return the verdict, or why there is none: node 0 cannot be reached, or has gone."""
        channel = self._connect(wait)
        if isinstance(channel, str):
            return channel
        channel.send(hello=self._hello)
        while not channel.lost:
            if time.monotonic() - self._beaten > rendezvous.BEAT:
                self._beaten = time.monotonic()
                channel.send(beat=1)
            if time.monotonic() - channel.seen > rendezvous.SILENCE:
                channel.lost = f"was silent for {rendezvous.SILENCE:g} s"
            ready = rendezvous.readable([channel, *(self._test.streams() if self._test else [])], 0.2)
            if self._test:
                self._test.read(ready)
                self._tell(channel, self._test)
            for message in channel.receive() if channel in ready else []:
                if "verdict" in message:
                    channel.close()
                    return dict(message["verdict"])
                self._answer(channel, message)
        return channel.lost

    def _connect(self, wait: float) -> Channel | str:
        began, told, why = time.monotonic(), TOLD, ""
        while time.monotonic() - began <= wait or not why:
            try:
                return Channel(socket.create_connection((self._host, self._place.port), timeout=rendezvous.SEND))
            except (OSError, UnicodeError) as error:
                where = join(self._place.host, self._place.port)
                why = f"did not accept a connection of this node at {where} ({reason(error)})"
            if time.monotonic() - began > told:
                told += 60.0
                self._say(f"preflight waits for node 0, which {why}")
            time.sleep(0.2)
        return f"{why} within {wait:g} s"

    def _answer(self, channel: Channel, message: Message) -> None:
        place = self._place
        if "missing" in message:
            names = ", ".join(str(number) for number in message["missing"][:SHOWN])
            self._say(f"preflight waits for node {names}: {len(message['missing'])} of {place.count} are not there")
        elif "ping" in message:
            channel.send(clock=time.time())
        elif "port" in message:
            why = ""
            try:
                socket.create_connection((self._host, message["port"]), timeout=rendezvous.CONNECT).close()
            except (OSError, UnicodeError) as error:
                why = reason(error)
            channel.send(port=why)
        elif "mesh" in message:
            self._mesh = message["mesh"]
        elif "round" in message:
            peer, found = place.number ^ message["round"], {}
            if peer < place.count:
                found = rendezvous.measure(place.number, peer, self._listener, *self._mesh[str(peer)])
            channel.send(link=found)
        elif "start" in message:
            self._test = Programs(self._members)
            self._end, self._late = time.monotonic() + IMPORT, f"not imported within {IMPORT:g} s"
        elif "failed" in message and self._end:
            self._end = 0.1  # it is late: node 0 asks why
        elif "go" in message:
            self._end, self._late = time.monotonic() + COLLECTIVES, f"no result within {COLLECTIVES:g} s"

    def _tell(self, channel: Channel, test: Programs) -> None:
        """Tell the coordinator once that all programs have imported the framework, and once their result."""
        late = self._late if time.monotonic() > self._end else ""
        if self._end and self._late.startswith("not imported") and (test.imported() or late):
            result = test.result(late) or {}
            channel.send(imported=result if "failed" in result else {})
            self._end = 0.0  # until `go`
        elif self._end and self._late.startswith("no result"):
            result = test.result(late) or {}
            if result:
                channel.send(result=result)
                self._end = 0.0

    def close(self) -> None:
        """Stop listening, and end the programs."""
        self._listener.close()
        if self._test:
            self._test.end()


def run(report: Report, env: dict[str, str], say: Callable[[str], None], fail: Callable[[str, int], object]) -> None:
    """Test this node and the job's others, and write the report; `fail` is called if a signal ends the process.

    Raises:
        LaunchError: (75) if a node is not fit; the line says which, and why.
    """
    began, settings, place = time.monotonic(), report.facts.settings, Place(report)
    folder = output_folder(report.command, env)
    if place.alone:
        say(f"preflight tests this node only: {place.alone}")
    members = programs(report, env, place)
    node: list[Node] = []

    def on_signal(why: str, status: int) -> None:
        for one in node:
            one.close()
        fail(f"{why} for the preflight", status)

    lead: Lead | None = None
    with process.ExitOnSignal(on_signal):
        facts = own_facts(report, folder)
        hello = {"number": place.number, "count": place.count, "host": socket.gethostname(), **facts}
        verdict: Message | str = ""
        try:
            if not place.number:
                listener = rendezvous.listen(place.port)
                place.port = listener.getsockname()[1]
                lead = Lead(Coordinator(listener, place.count), place, settings.preflight_wait, bool(members))
                thread = threading.Thread(target=lead.run, daemon=True)
                thread.start()
            node.append(Node(place, hello, members, say))
            verdict = node[0].run(settings.preflight_wait)
            if lead:
                thread.join(rendezvous.SEND)
        except OSError as error:
            verdict = f"its port {place.port} cannot be used ({reason(error)}): set LAUNCHER_MASTER_PORT to another"
        finally:
            for one in node:
                one.close()
    full = lead.report if lead and not isinstance(verdict, str) else {"schema": 1, "ok": False, "nodes": [hello]}
    name = "preflight.json"
    if isinstance(verdict, str):  # what this node lacks comes first
        problems = [{"node": place.number, "host": hello["host"], "why": one} for one in facts["problems"]]
        problems.append({"node": 0, "host": place.host if place.number else hello["host"], "why": verdict})
        verdict = {"ok": False, "problems": problems, "count": len(problems)}
        full.update(problems=problems)
        name = f"preflight-node{place.number}.json"
    seconds: Message = {**verdict.get("seconds", {}), "all": round(time.monotonic() - began, 3)}
    full["seconds"] = seconds
    if not place.number or "node" in name:
        _write_report(full, folder, name, say)
    if not verdict["ok"]:
        raise LaunchError(described(verdict), settings.unfit_exit)
    say(_summary(place, verdict, seconds))


def output_folder(command: list[str], env: dict[str, str]) -> str:
    """Return the folder of the checkpoints, from the command or AIP_CHECKPOINT_DIR; "" if it is not known."""
    for number, word in enumerate(command):
        name, equals, value = word.partition("=")
        if name.replace("_", "-") in FOLDERS:
            return value if equals else "".join(command[number + 1 : number + 2])
    return env.get("AIP_CHECKPOINT_DIR", "").strip()


def _write_report(full: Message, folder: str, name: str, say: Callable[[str], None]) -> None:
    """Write the report into a folder of this machine; without one, or if that fails, log it in one line."""
    if folder and "://" not in folder:
        with contextlib.suppress(OSError), open(os.path.join(folder, name), "w", encoding="utf-8") as file:
            file.write(json.dumps(full, indent=1, sort_keys=True) + "\n")
            return
    say(f"preflight report {json.dumps(full, sort_keys=True)}")


def described(verdict: Message) -> str:
    """Return the line that says which node is not fit, and why."""
    found = [(f"node {one['node']} ({one['host']})" if one["host"] else f"node {one['node']}") + f": {one['why']}"
             for one in verdict["problems"][:SHOWN]]  # fmt: skip
    more = verdict["count"] - len(found)
    return "preflight: " + "; ".join(found) + (f"; and {more} more nodes" if more > 0 else "")


def _summary(place: Place, verdict: Message, seconds: Message) -> str:
    line = f"preflight ok: {place.count} node{'s' * (place.count > 1)} in {seconds['all']:.1f} s"
    if "import" in seconds:
        line += f", {seconds['import']:.1f} s of it the framework's import"
    worst = verdict["slowest"]
    if worst:
        (a, b), speed, middle = worst["link"], worst["bandwidth"] / 1e6, worst["median"] / 1e6
        line += f"; slowest node {worst['node']}, slowest link {a}-{b}: {speed:.1f} MB/s, the median is {middle:.1f}"
    return line
