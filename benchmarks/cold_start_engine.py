"""A second Docker engine with an empty store behind a link of limited rate, for benchmarks/cold_start.py. Needs root.

The engine is in a network namespace, whose only way out is a pair of virtual interfaces. Its mount and PID namespaces
end with it, and with them all mounts, processes and containers, also if it is killed.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

import docker
import docker.errors
import requests

from trainyard.common import settings
from trainyard.common.errors import StepFailed, UserError
from trainyard_jobs.pods.provisioning import ignore_signals

#: Rate of the link towards the engine, and the queue in front of it: bytes sent at once (4 ms at 1 Gbit/s) and the
#: longest delay. https://man7.org/linux/man-pages/man8/tc-tbf.8.html
RATE, BITS = "1gbit", 1e9
_BURST, _LATENCY = "512kb", "20ms"

#: Addresses of both ends of the link, of the network reserved for benchmarks (RFC 2544, appendix C.2.2).
HOST, GUEST, _PREFIX = "198.18.0.1", "198.18.0.2", 30

#: Seconds between two readings of the link's counter.
_INTERVAL = 0.02

#: The part of this machine's processors that others may use for it to be quiet, and for how long that is looked at.
_QUIET, _QUIET_SECONDS = 0.1, 2.0

#: Version of the engine's API (Docker 24), so that none is negotiated before the engine answers.
_API = "1.43"

#: Seconds for the engine to start and to stop; each took 2 s (2 cores, 2026-11).
_START, _STOP = 60, 60

_PROGRAMS = ("ip", "tc", "nsenter", "unshare", "dockerd", "containerd", "docker")

#: Read a URL; prints bytes and seconds.
_FETCH = """\
import sys, time, urllib.request
started, size = time.monotonic(), 0
with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(sys.argv[1]) as answer:
    while data := answer.read(1 << 20):
        size += len(data)
print(size, time.monotonic() - started)
"""


def check_host() -> None:
    """Check that this process can make namespaces and start an engine.

    Raises:
        UserError: it cannot; the line says what is missing.
    """
    if os.geteuid():
        raise UserError("this benchmark needs root: it makes a network namespace and starts a second engine")
    if missing := [name for name in _PROGRAMS if not shutil.which(name)]:
        raise UserError(f"not found: {', '.join(missing)}; install iproute2, util-linux and docker.io")


def _run(*command: str) -> str:
    found = subprocess.run(command, capture_output=True, text=True, check=False)
    if found.returncode:
        raise StepFailed(f"'{' '.join(command)}' failed: {(found.stderr.strip().splitlines() or ['no output'])[-1]}")
    return found.stdout


@contextlib.contextmanager
def _undone_on_error(stack: contextlib.ExitStack) -> Iterator[None]:
    """Close ``stack`` if what is done within fails or is interrupted; nothing interrupts that."""
    try:
        yield
    except BaseException:
        with ignore_signals():
            stack.close()
        raise


class Link:
    """A network namespace and the link to it, as a context manager; :data:`RATE` towards the namespace.

    Attributes:
        namespace: path of the namespace.
        counter: file with the bytes sent towards the namespace so far, with Ethernet, IP and TCP headers of each
            segment or group of segments.
    """

    def __init__(self) -> None:
        word = uuid.uuid4().hex[:6]
        self._name, self._here, self._there = f"trainyard-{word}", f"ty-{word}-h", f"ty-{word}-n"
        self.namespace = Path("/run/netns") / self._name
        self.counter = Path(f"/sys/class/net/{self._here}/statistics/tx_bytes")
        self._stack = contextlib.ExitStack()

    def __enter__(self) -> Link:
        """Make both.

        Raises:
            StepFailed: the kernel refuses it, or another run of the benchmark has the addresses.
        """
        if HOST in _run("ip", "-oneline", "-4", "address"):
            raise StepFailed(f"{HOST} is in use: another run of this benchmark has it")
        with _undone_on_error(self._stack):
            _run("ip", "netns", "add", self._name)
            self._stack.callback(_run, "ip", "netns", "delete", self._name)
            _run("ip", "link", "add", self._here, "type", "veth", "peer", "name", self._there, "netns", self._name)
            self._stack.callback(_run, "ip", "link", "delete", self._here)
            for words in (
                f"ip address add {HOST}/{_PREFIX} dev {self._here}",
                f"ip link set {self._here} up",
                f"ip -n {self._name} address add {GUEST}/{_PREFIX} dev {self._there}",
                f"ip -n {self._name} link set {self._there} up",
                f"ip -n {self._name} link set lo up",
                f"tc qdisc add dev {self._here} root tbf rate {RATE} burst {_BURST} latency {_LATENCY}",
            ):
                _run(*words.split())
        return self

    def __exit__(self, *_: object) -> None:
        with ignore_signals():
            self._stack.close()

    def measure(self, url: str) -> float:
        """Bits per second at which ``url`` arrives in the namespace: the fastest of three readings.

        Raises:
            StepFailed: it does not arrive, or not at :data:`RATE`.
        """
        best = 0.0
        for _ in range(3):
            words = _run("nsenter", f"--net={self.namespace}", sys.executable, "-c", _FETCH, url).split()
            best = max(best, 8 * float(words[0]) / float(words[1]))
        if not 0.8 * BITS < best < 1.03 * BITS:
            raise StepFailed(f"the link of {RATE} carries {best / 1e9:.2f} Gbit/s: is the machine busy?")
        return best


class Engine:
    """An engine in a link's namespace with an empty store, as a context manager; it ends with its containers and store.

    Attributes:
        host: its address, for ``docker --host``.
        log: its log and that of its containerd, at level debug.
    """

    def __init__(self, link: Link, folder: Path) -> None:
        """Store everything in a new folder in ``folder``, which must not be on overlayfs."""
        self._link, self._parent = link, folder
        self._stack = contextlib.ExitStack()

    def __enter__(self) -> Engine:
        """Start it.

        Raises:
            StepFailed: it does not start.
        """
        with _undone_on_error(self._stack):
            self._folder = Path(tempfile.mkdtemp(prefix="trainyard-cold-start-", dir=self._parent))
            self._stack.callback(self._remove)
            self.log = self._folder / "log"
            self.host = f"unix://{self._folder}/docker.sock"
            self.client = docker.DockerClient(base_url=self.host, version=_API, timeout=60)
            self._stack.callback(self.client.close)
            process = self._start()
            self._stack.callback(self._stop, process)
            self._wait(process)
        return self

    def __exit__(self, *_: object) -> None:
        with ignore_signals():
            self._stack.close()

    def _start(self) -> subprocess.Popen[bytes]:
        configuration = {
            "features": {"containerd-snapshotter": True},
            "data-root": str(self._folder / "data"),
            "exec-root": str(self._folder / "run"),
            "pidfile": str(self._folder / "pid"),
            "hosts": [self.host],
            "insecure-registries": [f"{HOST}/{_PREFIX}"],
            "bridge": "none",  # the rules of the host's engine are in another namespace
            "iptables": False,
            "ip6tables": False,
            "userland-proxy": False,
            "debug": True,
        }
        file = self._folder / "daemon.json"
        file.write_text(json.dumps(configuration), encoding="utf-8")
        # Not `ip netns exec`, which mounts another /sys: the engine needs the cgroups below it.
        command = ["nsenter", f"--net={self._link.namespace}", "unshare", "--mount", "--pid", "--fork"]
        command += ["--kill-child", "--mount-proc", "dockerd", f"--config-file={file}"]
        with self.log.open("wb") as log:
            return subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=settings.environment(NO_PROXY=HOST, no_proxy=HOST),
                start_new_session=True,  # Ctrl-C is for this process, which then stops the engine
            )

    def _wait(self, process: subprocess.Popen[bytes]) -> None:
        end = time.monotonic() + _START
        while process.poll() is None and time.monotonic() < end:
            with contextlib.suppress(docker.errors.DockerException, requests.exceptions.RequestException, OSError):
                self.client.ping()
                if self.client.images.list():
                    raise StepFailed("the engine's store is not empty")
                return
            time.sleep(0.1)
        lines = self.log.read_text(encoding="utf-8", errors="replace").splitlines()
        raise StepFailed(f"the second engine did not start: {(lines or ['no output'])[-1]}")

    def _stop(self, process: subprocess.Popen[bytes]) -> None:
        with contextlib.suppress(docker.errors.DockerException, requests.exceptions.RequestException, OSError):
            for container in self.client.containers.list(all=True):
                container.remove(force=True, v=True)
        # unshare waits for dockerd, its only child, and passes on no signal but its own death.
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children")
        with contextlib.suppress(OSError):
            for child in children.read_text(encoding="ascii").split():
                os.kill(int(child), signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(_STOP)
        process.kill()
        process.wait()

    def _remove(self) -> None:
        shutil.rmtree(self._folder)
        os.sync()  # so that writing and discarding blocks does not delay the next round

    def downloaded(self, digest: str) -> float:
        """When the blob ``digest`` was complete in the store, in seconds since 1970."""
        store = self._folder / "data" / "containerd" / "daemon" / "io.containerd.content.v1.content"
        # containerd sets it when it commits a blob:
        # https://github.com/containerd/containerd/blob/v1.7.24/content/local/writer.go
        return (store / "blobs" / "sha256" / digest.removeprefix("sha256:")).stat().st_mtime

    def versions(self) -> dict[str, str]:
        """Versions of the engine and of the programs that it uses."""
        return {part["Name"]: part["Version"] for part in self.client.version()["Components"]}


def _processors() -> tuple[int, int]:
    """Idle and total time of all processors since the start of the machine, in ticks of the kernel."""
    # user, nice, system, idle, iowait, irq, softirq, steal: https://docs.kernel.org/filesystems/proc.html
    with open("/proc/stat", encoding="ascii") as file:
        times = [int(word) for word in file.readline().split()[1:9]]
    return times[3], sum(times)


def wait_until_quiet(most: float) -> float:
    """Wait until other processes use little of this machine; the part, from 0 to 1, that they used in the end.

    Waiting for a disk counts as use.

    Args:
        most: seconds to wait at most.
    """
    end = time.monotonic() + most
    while True:
        idle, total = _processors()
        time.sleep(_QUIET_SECONDS)
        idle_after, total_after = _processors()
        used = 1 - (idle_after - idle) / (total_after - total)
        if used < _QUIET or time.monotonic() > end:
            return used


class Meter:
    """Reads a link's counter and the processors' times at intervals, in a thread, as a context manager.

    Attributes:
        readings: seconds since 1970, bytes, and the processors' idle and total time in ticks of the kernel.
    """

    def __init__(self, link: Link) -> None:
        self._counter = link.counter
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._read, daemon=True)
        self.readings: list[tuple[float, int, int, int]] = []

    def __enter__(self) -> Meter:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()

    def _read(self) -> None:
        while True:
            sent = int(self._counter.read_text(encoding="ascii"))
            self.readings.append((time.time(), sent, *_processors()))
            if self._ended.wait(_INTERVAL):
                return
