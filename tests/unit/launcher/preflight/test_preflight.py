"""A preflight names the node that is not fit, on every node, with exit status 75 (R17).

Nodes are launchers on one host.
The frameworks and the faults of networks are in tests/image/test_preflight.py.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import re
import resource
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from launcher.preflight import nodes as preflight
from launcher.preflight import rendezvous
from launching import ROOT, Launch, Machine
from tests.fakes import cuda_driver

Link = dict[str, Any]


def free_port() -> int:
    """Return a port that is free, as the next one is, and that no connection of another test gets meanwhile."""
    while True:
        port = random.randrange(20_000, 32_000, 2)  # below net.ipv4.ip_local_port_range
        with contextlib.suppress(OSError), socket.socket() as first, socket.socket() as second:
            first.bind(("", port))
            second.bind(("", port + 1))
            return port


def connect(port: int) -> socket.socket:
    """Connect to a port of this host as soon as something listens there."""
    end = time.monotonic() + 60
    while True:
        with contextlib.suppress(OSError):
            return socket.create_connection(("127.0.0.1", port))
        assert time.monotonic() < end
        time.sleep(0.05)


class Nodes:
    """Launchers that preflight each other."""

    def __init__(self, folder: Path, count: int) -> None:
        self.folder, self.count, self.port = folder, count, free_port()
        self.started: dict[int, subprocess.Popen[str]] = {}
        self.machine = Machine(folder / "root")
        self.machine.add("/dev/shm/.keep")
        self.machine.add("/proc/meminfo", "MemAvailable: 9000000 kB\n")

    def start(self, number: int, *argv: str, **env: str) -> None:
        """Start a launcher that prints "started" where all is well."""
        full = {
            "PATH": os.environ["PATH"], "LAUNCHER_SYSROOT": str(self.machine.root), "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(self.port), "NNODES": str(self.count), "NODE_RANK": str(number),
            "LAUNCHER_PREFLIGHT": "1", "AIP_CHECKPOINT_DIR": str(self.folder / "out"),
            "LAUNCHER_PREFLIGHT_NEEDS": "disk=0", **env,
        }  # fmt: skip
        command = [sys.executable, "-I", "-S", str(ROOT / "launcher"), *(argv or ("--", "echo", "started"))]
        pipe = subprocess.PIPE
        self.started[len(self.started)] = subprocess.Popen(
            command, env=full, stdout=pipe, stderr=pipe, text=True, cwd=self.folder
        )

    def ends(self) -> dict[int, tuple[int, str, str]]:
        """Wait for all: status, stdout and the line of the error."""
        found = {}
        for number, process in self.started.items():
            out, err = process.communicate(timeout=60)
            lines = [line for line in err.splitlines() if "error: " in line]
            found[number] = (process.returncode, out.strip(), lines[-1].partition("error: ")[2] if lines else "")
        return found

    @property
    def report(self) -> dict[str, Any]:
        found = json.loads((self.folder / "out" / "preflight.json").read_text())
        assert isinstance(found, dict)
        return found

    def add_framework(self, body: str) -> None:
        """Add an image with a torch whose test does `body` in `join`."""
        program = f"""
import os, signal, sys, time
sys.path.insert(0, {preflight.FRAMEWORKS!r})
import collectives
rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
def join():
    {body}
    half = size * (size + 1) / 2
    return collectives.Group(rank, size, lambda count: (half, half), lambda k, count: time.sleep(0.001), "fake")
collectives.run(join)
"""
        (self.folder / "program.py").write_text(program)
        python = self.folder / "python"
        python.write_text(f'#!/bin/sh\nexec {sys.executable} {self.folder}/program.py "$@"\n')
        python.chmod(0o755)
        self.machine.add_image("torch", "2.15.0", {"mnist": [str(python), "-m", "trainers.torch.mnist"]})
        self.machine.add("/opt/trainyard/trainers/torch/__init__.py")


@pytest.fixture
def nodes(tmp_path: Path) -> Iterator[Callable[[int], Nodes]]:
    made: list[Nodes] = []

    def make(count: int) -> Nodes:
        made.append(Nodes(tmp_path, count))
        return made[-1]

    yield make
    for one in made:
        for process in one.started.values():
            process.kill()
            process.communicate()


def test_nodes_that_are_fit_start_their_command(nodes: Callable[[int], Nodes]) -> None:
    job = nodes(3)
    for number in range(3):
        job.start(number)
    assert job.ends() == dict.fromkeys(range(3), (0, "started", ""))
    report = job.report
    assert report["ok"] and not report["problems"]
    assert [one["number"] for one in report["nodes"]] == [0, 1, 2]
    assert [(one["a"], one["b"]) for one in report["links"]] == [(0, 1), (0, 2), (1, 2)]
    assert all(one["bandwidth"] > 0 and one["latency"] > 0 for one in report["links"])
    assert set(report["seconds"]) == {"join", "port", "links", "framework", "all"}


def test_the_option_does_what_the_variable_does(nodes: Callable[[int], Nodes]) -> None:
    job = nodes(1)
    job.start(0, "--preflight", "--", "echo", "started", LAUNCHER_PREFLIGHT="")
    assert job.ends() == {0: (0, "started", "")}
    assert job.report["ok"]


@pytest.mark.parametrize(
    ("env", "says"),
    [
        ({"LAUNCHER_FRAMEWORK": "torch==2.14.0"}, "node 2 .*: another framework: torch 2.14.0, while 2 have "),
        ({"NNODES": "4"}, "node 2 .*: another number of nodes: 4, while 2 have 3"),
        ({"NODE_RANK": "1"}, "node 1 .*: there twice: .* and .* have this number"),
        ({"LAUNCHER_PREFLIGHT_NEEDS": "memory=999999"}, "node 2 .*: memory: .*, 999999.0 GiB needed"),
        ({"LAUNCHER_PREFLIGHT_NEEDS": "disk=999999"}, "node 2 .*: free disk at .*, 999999.0 GiB needed"),
        ({"AIP_CHECKPOINT_DIR": "/proc/preflight"}, "node 2 .*: /proc/preflight: No such file or directory: make it"),
    ],
)  # fmt: skip
def test_every_node_names_the_node_that_is_not_fit(
    nodes: Callable[[int], Nodes], env: dict[str, str], says: str
) -> None:
    job = nodes(3)
    for number in range(3):
        job.start(number, **({"LAUNCHER_FRAMEWORK": "torch==2.15.0", **(env if number == 2 else {})}))
    for status, out, line in job.ends().values():
        assert (status, out) == (75, "")
        assert re.match("preflight: " + says, line), line
    assert not job.report["ok"]


def hello(number: object, **more: object) -> Link:
    """Return what a node says about itself."""
    return {"number": number, "host": f"host{number}", "port": 2, "problems": [], **more}


#: What somebody on the network may send to a preflight, at once or in pieces.
STRANGERS = [
    b"GET / HTTP/1.1\r\n\r\n",
    b'{"hello": {}}\n',
    b"[1]\n",
    b"",
    b'{"hello": {"number": Infinity, "host": "x", "port": 1, "problems": []}}\n',
    b'{"hello": {"number": NaN, "host": "x", "port": 1, "problems": []}}\n',
    b'{"hello": {"number": 1, "host": "x"}}\n',
    b'{"hello": {"number": "1", "host": "x", "port": 1, "problems": []}}\n',
    b'{"hello": {"number": 1, "host": "x", "port": 1, "problems": 3}}\n',
    b'{"hello": {"number": 1, "host": "x", "port": 1, "problems": [], "image": {}}}\n',
    b'{"clock": 1}\n' * 9,
    b'{"hello": ' + b"[" * 5000 + b"\n",
    b"9" * (1 << 17),
    b"\xff\x00\n",
]


def test_strangers_are_dropped_and_counted_whatever_they_send() -> None:
    port = free_port()
    coordinator = rendezvous.Coordinator(rendezvous.listen(port), 2)
    found: list[dict[int, str]] = []
    waits = threading.Thread(target=lambda: found.append(coordinator.join(60.0, 60.0)), daemon=True)
    waits.start()
    strangers = [connect(port) for _ in STRANGERS]
    for one, text in zip(strangers, STRANGERS, strict=True):
        one.sendall(text)
    said = sum(bool(text) for text in STRANGERS)
    end = time.monotonic() + 60
    while coordinator.strangers < said and time.monotonic() < end:
        time.sleep(0.05)
    nodes = [rendezvous.Channel(connect(port)) for _ in range(2)]
    for number, node in enumerate(nodes):
        node.send(hello=hello(number))
    waits.join(60)
    assert found == [{}] and coordinator.strangers >= said
    assert {number: one.hello["host"] for number, one in coordinator.members.items()} == {0: "host0", 1: "host1"}
    for one in [*strangers, *nodes]:
        one.close()
    coordinator.close()


def test_a_thousand_connections_stop_no_preflight() -> None:
    """They may be more than select() can wait for, and the nodes come after them."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(8192, hard), hard))
    port = free_port()
    coordinator = rendezvous.Coordinator(rendezvous.listen(port), 2)
    found: list[dict[int, str]] = []
    waits = threading.Thread(target=lambda: found.append(coordinator.join(60.0, 60.0)), daemon=True)
    try:
        strangers = [connect(port) for _ in range(1000)]
        waits.start()
        nodes = [rendezvous.Channel(connect(port)) for _ in range(2)]
        assert nodes[1].fileno() > 1000
        for number, node in enumerate(nodes):
            node.send(hello=hello(number))
        waits.join(60)
        assert found == [{}] and coordinator.strangers >= 1000 - rendezvous.STRANGERS - 2
        for one in [*strangers, *nodes]:
            one.close()
        coordinator.close()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_a_stranger_at_the_port_of_a_link_does_not_keep_the_node_from_it() -> None:
    listener = rendezvous.listen(0)
    port = listener.getsockname()[1]
    strangers = [connect(port) for _ in range(3)]
    strangers[1].sendall(b"GET ")
    other: list[Link] = []
    peer = threading.Thread(
        target=lambda: other.append(rendezvous.measure(0, 1, listener, "127.0.0.1", port)), daemon=True
    )
    peer.start()
    mine = rendezvous.measure(1, 0, listener, "127.0.0.1", port)
    peer.join(60)
    assert "error" not in mine and "error" not in other[0]
    for one in [*strangers, listener]:
        one.close()


def test_many_strangers_at_the_port_of_a_link_that_come_and_go_end_nothing() -> None:
    listener = rendezvous.listen(0)
    port = listener.getsockname()[1]
    found: list[Link] = []
    node = threading.Thread(
        target=lambda: found.append(rendezvous.measure(1, 0, listener, "127.0.0.1", port)), daemon=True
    )
    node.start()
    strangers: list[socket.socket] = []
    while node.is_alive():
        strangers.append(connect(port))
        if len(strangers) > rendezvous.STRANGERS:
            with contextlib.suppress(OSError):
                strangers[0].sendall(b"GET ")
            strangers.pop(0).close()
    assert found[0]["error"] == "no connection from node 0 arrived"
    for one in [*strangers, listener]:
        one.close()


def test_nodes_that_come_after_two_have_one_number_learn_of_it() -> None:
    port = free_port()
    coordinator = rendezvous.Coordinator(rendezvous.listen(port), 4)
    found: list[dict[int, str]] = []
    waits = threading.Thread(target=lambda: found.append(coordinator.join(60.0, 60.0)), daemon=True)
    waits.start()
    channels = []
    for number in (1, 1, 0, 2):
        channels.append(rendezvous.Channel(connect(port)))
        channels[-1].send(hello=hello(number))
    waits.join(60)
    assert found == [{1: "there twice: host1 and host1 have this number"}]
    coordinator.send(verdict={})
    for channel in channels:
        while not any("verdict" in message for message in channel.receive()):
            assert not channel.lost
        channel.close()
    coordinator.close()


def test_a_missing_node_is_named_by_those_that_are_there(nodes: Callable[[int], Nodes]) -> None:
    job = nodes(3)
    for number in (0, 2):
        job.start(number, LAUNCHER_PREFLIGHT_WAIT="1")
    assert [one[0] for one in job.ends().values()] == [75, 75]
    assert job.report["problems"] == [{"node": 1, "host": "", "why": "did not join within 1 s"}]


def test_a_missing_node_0_is_named(nodes: Callable[[int], Nodes]) -> None:
    job = nodes(2)
    job.start(1, LAUNCHER_PREFLIGHT_WAIT="0.5")
    ((status, _, line),) = job.ends().values()
    assert status == 75
    assert line.startswith("preflight: node 0 (127.0.0.1): did not accept a connection of this node at 127.0.0.1:")
    assert json.loads((job.folder / "out" / "preflight-node1.json").read_text())["problems"][0]["node"] == 0


def test_a_retryable_status_of_the_user_replaces_75(nodes: Callable[[int], Nodes]) -> None:
    job = nodes(2)
    job.start(0, LAUNCHER_PREFLIGHT_WAIT="0.5", LAUNCHER_RETRYABLE_EXIT="138")
    assert job.ends()[0][0] == 138


@pytest.mark.slow("the other tests of nodes that are not fit")
def test_a_node_that_stops_after_it_has_joined_is_named(nodes: Callable[[int], Nodes]) -> None:
    job = nodes(3)
    job.start(0)
    job.start(1)
    for line in job.started[1].stderr or ():
        if "preflight waits for node 2: 1 of 3 are not there" in line:  # it has joined
            break
    os.kill(job.started[1].pid, signal.SIGSTOP)
    job.start(2)
    frozen = job.started.pop(1)
    try:
        for status, _, line in job.ends().values():
            assert status == 75
            assert "node 1" in line and "node 2" not in line and "was silent for 8 s" in line
    finally:
        frozen.kill()
        frozen.communicate()


def test_strangers_at_the_port_are_ignored(nodes: Callable[[int], Nodes]) -> None:
    job = nodes(2)
    job.start(0)
    strangers = []
    for text in STRANGERS:
        strangers.append(connect(job.port + 1))
        strangers[-1].sendall(text)
    job.start(1)
    assert [one[:2] for one in job.ends().values()] == [(0, "started")] * 2
    for one in strangers:
        one.close()


def test_a_port_that_is_taken_is_said(nodes: Callable[[int], Nodes]) -> None:
    job = nodes(2)
    with socket.socket() as taken:
        taken.bind(("", job.port))
        taken.listen()
        for number in range(2):
            job.start(number)
        for status, _, line in job.ends().values():
            assert status == 75
            assert line.startswith("preflight: node 0 ")
            assert f"its port {job.port} cannot be used (Address already in use)" in line


def test_a_signal_ends_a_preflight_at_once(nodes: Callable[[int], Nodes]) -> None:
    job = nodes(2)
    job.start(0)
    connect(job.port + 1).close()  # it waits now
    job.started[0].terminate()
    assert job.ends()[0][0] == 143


@pytest.mark.parametrize(
    ("body", "says"),
    [
        ("pass", ""),
        ("rank == 1 and sys.exit('no GPU')", "rank 1 failed in step join: SystemExit: no GPU"),
        ("rank == 1 and os.kill(os.getpid(), 9); time.sleep(60 * (rank == 0))", "step join: killed by signal 9"),
        ("assert rank != 1, 'bad link'", "step join: AssertionError: bad link"),
    ],
)
def test_the_framework_test_is_started_and_its_result_reported(
    nodes: Callable[[int], Nodes], body: str, says: str
) -> None:
    job = nodes(2)
    job.add_framework(body)
    for number in range(2):
        job.start(number)
    ends = job.ends()
    if not says:
        assert [one[:2] for one in ends.values()] == [(0, "started")] * 2, ends
        assert [one["rank"] for one in job.report["collectives"]] == [0, 1]
        return
    for status, _, line in ends.values():
        assert status == 75
        assert line.startswith("preflight: node 1 ") and says in line and "node 0" not in line


def test_several_processes_of_a_node_are_tested_without_a_network(nodes: Callable[[int], Nodes]) -> None:
    job = nodes(1)
    job.add_framework("pass")
    job.start(0, "--", sys.executable, "-c", "print('started')", LAUNCHER_NPROC="2")
    ((status, out, _),) = job.ends().values()
    assert (status, out.split()) == (0, ["started", "started"])
    assert [one["rank"] for one in job.report["collectives"]] == [0, 1]


def test_the_report_is_a_line_of_the_log_without_a_folder(nodes: Callable[[int], Nodes]) -> None:
    job = nodes(1)
    job.start(0, AIP_CHECKPOINT_DIR="gs://bucket/checkpoints")
    _, err = job.started[0].communicate(timeout=30)
    (line,) = [line for line in err.splitlines() if "preflight report " in line]
    assert json.loads(line.partition("preflight report ")[2])["ok"] is True


@pytest.mark.parametrize("value", ["memory", "memory=x", "gpu=8", "memory=-1"])
def test_invalid_needs_are_refused(launch: Launch, value: str) -> None:
    launched = launch({"LAUNCHER_PREFLIGHT_NEEDS": value}, "--print-env")
    assert launched.status == 2 and "LAUNCHER_PREFLIGHT_NEEDS" in launched.err


GPUS = {"cuda": "13.2", "driver": "580", "gpus": "8.0 9.0"}


def test_an_old_driver_is_a_problem_of_its_node(machine: Machine, launch: Launch, tmp_path: Path) -> None:
    machine.add_image("torch", "2.15.0", accelerator="nvidia", **GPUS)
    machine.add_devices("/dev/nvidiactl", "/dev/nvidia0", "/dev/shm/.keep")
    machine.add("/proc/driver/nvidia/version", cuda_driver.VERSION.format("470.82.01"))
    library = machine.root / "usr/lib/x86_64-linux-gnu/libcuda.so.1"
    cuda_driver.compile_library(library, [("NVIDIA H100", "9.0")], cuda="11.4")
    env = {"LAUNCHER_PREFLIGHT": "1", "AIP_CHECKPOINT_DIR": str(tmp_path / "out")}
    launched = launch(env, "--", "true")
    assert launched.status == 75
    assert "preflight: node 0 " in launched.err and "driver of this machine is too old" in launched.err
    assert launch({}, "--", "true").status == 2


def test_few_file_handles_are_a_problem(launch: Launch, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _: (256, 256))
    launched = launch({"LAUNCHER_PREFLIGHT": "1", "AIP_CHECKPOINT_DIR": str(tmp_path)}, "--", "true")
    assert launched.status == 75
    assert "file handles: 256, 512 needed: docker run --ulimit nofile" in launched.err


def test_memory_is_what_the_container_may_use(machine: Machine) -> None:
    from launcher.host import Host

    host = Host(str(machine.root))
    machine.add("/proc/meminfo", "MemTotal: 100 kB\nMemAvailable:    4096 kB\n")
    assert host.memory() == 4 << 20
    machine.add("/sys/fs/cgroup/memory.max", "max\n")
    assert host.memory() == 4 << 20
    machine.add("/sys/fs/cgroup/memory.max", "1048576\n")
    assert host.memory() == 1 << 20


# --- verdicts --------------------------------------------------------------------------------------------------------


def mesh(count: int, **more: Any) -> list[Link]:
    """Links between all nodes, as healthy ones are."""
    pairs = [(a, b) for a in range(count) for b in range(a + 1, count)]
    return [{"a": a, "b": b, "latency": 1e-4, "bandwidth": 1e9, **more} for a, b in pairs]


def named(links: list[Link]) -> dict[int, str]:
    return preflight.name_nodes(preflight.unfit_links(links), links)


@pytest.mark.parametrize(
    "change", [{"bandwidth": 2e6}, {"latency": 0.2}, {"loss": 0.05}, {"error": "timed out"}], ids=lambda one: str(one)
)
def test_links_are_compared_with_the_median(change: Link) -> None:
    assert named(mesh(4)) == {}
    of_one_node = [{**one, **change} if 2 in (one["a"], one["b"]) else one for one in mesh(4)]
    assert list(named(of_one_node)) == [2]
    assert named(of_one_node)[2].startswith("3 of its 3 links are not fit, as that to node ")
    of_one_link = [{**one, **change} if (one["a"], one["b"]) == (1, 3) else one for one in mesh(4)]
    assert sorted(named(of_one_link)) == [1, 3]
    of_two_nodes = [{**one, **change} if {1, 5} & {one["a"], one["b"]} else one for one in mesh(8)]
    assert sorted(named(of_two_nodes)) == [1, 5]


def test_links_of_busy_nodes_are_fit() -> None:
    links = mesh(8)
    for number, one in enumerate(links):
        one.update(bandwidth=1e9 / (1 + number % 5), latency=1e-4 * (1 + 9 * (number % 40)))
    assert named(links) == {}
    assert preflight.slowest(links)["median"] == pytest.approx(1e9 / 3)


def test_rounds_pair_every_node_with_every_other_up_to_8_and_with_log2_of_them_beyond() -> None:
    for count in range(2, 9):
        pairs = {frozenset((n, n ^ k)) for k in rendezvous.rounds(count) for n in range(count) if n ^ k < count}
        assert len(pairs) == count * (count - 1) // 2
    assert list(rendezvous.rounds(64)) == [1, 2, 4, 8, 16, 32]
    assert list(rendezvous.rounds(1)) == []


def test_clocks_are_compared_with_the_median_and_a_slow_answer_is_no_fault() -> None:
    fit = {0: (100.0, 100.0, 100.0), 1: (100.2, 100.0, 100.4), 2: (103.0, 100.0, 106.0)}
    assert preflight.compare_clocks(fit) == {}
    assert list(preflight.compare_clocks({**fit, 1: (190.0, 100.0, 100.4)})) == [1]
    assert list(preflight.compare_clocks({0: (0.0, 0.0, 0.1), 1: (90.0, 0.0, 0.1)})) == [0, 1]
    late = {0: (10.0, 10.0, 10.0), 1: (100.2, 10.0, 10.4), 2: (103.0, 10.0, 16.0)}
    assert list(preflight.compare_clocks(late)) == [0]


def test_where_no_value_has_most_nodes_all_of_them_are_named() -> None:
    nodes = [{"problems": [], "image": image} for image in ("a", "a", "b", "b")]
    assert sorted(preflight.compare(dict(enumerate(nodes)))) == [0, 1, 2, 3]
    assert list(preflight.compare(dict(enumerate(nodes[1:])))) == [0]


def failed(step: str, error: str = "timed out", came: float = 1.0, **more: Any) -> dict[str, Any]:
    one = {"rank": 0, "step": step, "error": error, "late": False, "died": False, "silent": 0.0, **more}
    return {"came": came, "failed": [one]}


@pytest.mark.parametrize(
    ("results", "expected"),
    [
        ({0: failed("join", late=True), 1: failed("import", "no libcuda", died=True)}, [1]),
        ({0: failed("pairs", "Connection closed by peer"), 1: failed("pairs", "signal 9", died=True)}, [1]),
        ({0: failed("pairs", "signal 6", 1.9, died=True), 1: failed("pairs", "signal 9", 1.0, died=True)}, [1]),
        ({0: failed("import", "no libcuda", 1.1, died=True), 1: failed("import", "no libcuda", died=True)}, [0, 1]),
        ({0: failed("pairs"), 1: failed("pairs", silent=9.0, late=True), 2: failed("pairs")}, [1]),
        ({0: failed("join", "no route to 10.0.0.3"), 1: failed("join", "10.0.0.3: refused"), 2: failed("join")}, [2]),
        ({0: failed("pairs"), 1: failed("all-reduce"), 2: failed("pairs")}, [1]),
        ({0: failed("pairs", late=True), 1: failed("pairs", "an error"), 2: failed("pairs", late=True)}, [1]),
        ({0: failed("import", "not imported", late=True), 1: failed("join", "an error")}, [1]),
        ({0: failed("pairs"), 1: failed("pairs")}, [0, 1]),
    ],
)
def test_of_collectives_that_failed_the_cause_is_named(results: dict[int, Any], expected: list[int]) -> None:
    addresses = {number: f"10.0.0.{number + 1}" for number in range(3)}
    assert sorted(preflight.blame(results, addresses)) == expected


def test_pairs_of_a_node_are_not_compared_with_pairs_of_two() -> None:
    def result(rank: int, seconds: Callable[[int], float]) -> dict[str, Any]:
        links = [[peer, 1e-4, seconds(peer)] for peer in range(4) if peer != rank]
        return {"rank": rank, "backend": "nccl", "bytes": 1 << 20, "all_reduce": 0.1, "links": links}

    fit = {n: {"results": [result(r, lambda p, r=r: 1e-5 if p // 2 == r // 2 else 1e-3) for r in (2 * n, 2 * n + 1)]}
           for n in range(2)}  # fmt: skip
    assert preflight.judge_collectives(fit) == {}
    three = {n: {"results": [result(n, lambda p, n=n: 0.9 if 2 in (p, n) else 1e-3)]} for n in range(4)}
    assert list(preflight.judge_collectives(three)) == [2]


def test_of_two_measurements_the_better_counts() -> None:
    slow, fast = {"bandwidth": 1.0, "latency": 2.0, "loss": 0.1}, {"bandwidth": 2.0, "latency": 3.0}
    assert preflight.better(slow, fast) == {"bandwidth": 2.0, "latency": 2.0, "loss": 0.0}
    assert preflight.better({"error": "timed out"}, fast) == fast
    assert preflight.better(slow, {**fast, "loss": 0.2})["loss"] == 0.1


def test_the_two_ends_of_a_link_are_one_measurement() -> None:
    one = {"latency": 1e-4, "bandwidth": 5e8, "retransmitted": 0, "segments": 3000}
    other = {"bandwidth": 1e9, "retransmitted": 300, "segments": 3000}
    assert preflight.merge(one, other) == {"latency": 1e-4, "bandwidth": 5e8, "loss": 0.1}
    assert preflight.merge(one, {**other, "retransmitted": 15})["bandwidth"] == 5e8
    assert "loss" not in preflight.merge(one, {**other, "retransmitted": 15})
    assert preflight.merge(one, {"error": "timed out"})["error"] == "timed out"


@pytest.mark.parametrize(
    ("command", "folder"),
    [
        (["python", "t.py", "--checkpoint-dir", "/a"], "/a"),
        (["python", "t.py", "--checkpoint_dir=/b"], "/b"),
        (["python", "t.py", "--job-dir=gs://c"], "gs://c"),
        (["python", "t.py"], "/env"),
        (["python", "t.py", "--checkpoint-dir"], ""),
    ],
)
def test_the_folder_of_checkpoints_is_that_of_the_command(command: list[str], folder: str) -> None:
    assert preflight.output_folder(command, {"AIP_CHECKPOINT_DIR": "/env"}) == folder


def test_no_module_of_the_preflight_is_imported_without_one(machine: Machine) -> None:
    text = (
        f"import sys; sys.path.insert(0, {str(ROOT)!r}); from launcher import process;"
        "process.replace = lambda command, env: print(*sys.modules);"
        "from launcher.__main__ import main; main(['--', 'true'])"
    )
    env = {"LAUNCHER_SYSROOT": str(machine.root), "PATH": os.environ["PATH"]}
    done = subprocess.run([sys.executable, "-I", "-S", "-c", text], env=env, capture_output=True, text=True, timeout=30)
    assert "launcher.cli" in done.stdout and "launcher.preflight" not in done.stdout


def test_every_framework_of_the_launcher_has_its_program() -> None:
    for package in set(preflight.PACKAGES.values()):
        assert Path(preflight.FRAMEWORKS, f"with_{package}.py").is_file()
    assert shutil.which("env")
