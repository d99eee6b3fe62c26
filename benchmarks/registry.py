"""A registry in a container behind a proxy that delays answers and counts what clients send, all on loopback.

The image is that of tests/image/registry (Debian's docker-registry, CNCF distribution 2.8); there is no login.
"""

from __future__ import annotations

import contextlib
import json
import socket
import socketserver
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent

#: The command of this checkout.
TRAINYARD = (sys.executable, "-m", "trainyard")

#: The first byte of a TLS handshake (RFC 8446, section 5.1): the engine tries it before plain HTTP.
_TLS_HANDSHAKE = b"\x16"


def docker(*words: str) -> str:
    """Run docker; returns what it prints. It ends the program with docker's last line if it fails."""
    done = subprocess.run(["docker", *words], capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"'docker {' '.join(words)}' failed: {done.stderr.strip().rpartition(chr(10))[2]}")
    return done.stdout.strip()


@contextlib.contextmanager
def removed(*starts: str) -> Iterator[None]:
    """Remove the images afterwards whose references start so."""
    try:
        yield
    finally:
        listed = docker("images", "--format={{.Repository}}:{{.Tag}} {{.Repository}}@{{.Digest}}", "--digests")
        names = {name for name in listed.split() if name.startswith(starts) and "<none>" not in name}
        if names:
            docker("rmi", "--force", *sorted(names))


def in_units(size: float) -> str:
    """Write a number of bytes for people."""
    for unit in ("B", "KB", "MB"):
        if size < 1000:
            return f"{size:.0f} B" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1000
    return f"{size:.2f} GB"


@dataclass
class Traffic:
    """Count what clients sent: how often they waited for an answer (``requests``), and ``sent`` bytes."""

    requests: int = 0
    sent: int = 0


class _Connection(socketserver.BaseRequestHandler):
    """A client's connection, and the one to the registry."""

    server: _Proxy

    def handle(self) -> None:
        """Pass on what both send, until the client closes its connection."""
        client: socket.socket = self.request
        counted = client.recv(1, socket.MSG_PEEK) not in (b"", _TLS_HANDSHAKE)
        with contextlib.suppress(OSError), socket.create_connection(self.server.registry) as registry:
            for one in (client, registry):
                one.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            asked = threading.Event()

            def answers() -> None:
                with contextlib.suppress(OSError):
                    while data := registry.recv(1 << 20):
                        if asked.is_set() and counted:
                            asked.clear()
                            with self.server.lock:
                                self.server.traffic.requests += 1
                            time.sleep(self.server.delay)
                        client.sendall(data)
                    client.shutdown(socket.SHUT_WR)

            thread = threading.Thread(target=answers, daemon=True)
            thread.start()
            while data := client.recv(1 << 20):
                asked.set()
                with self.server.lock:
                    self.server.traffic.sent += len(data)
                registry.sendall(data)
            registry.shutdown(socket.SHUT_WR)
            thread.join()


class _Proxy(socketserver.ThreadingTCPServer):
    daemon_threads = True
    request_queue_size = 128

    def __init__(self, registry: tuple[str, int], delay: float) -> None:
        super().__init__(("127.0.0.1", 0), _Connection)
        self.registry, self.delay = registry, delay
        self.traffic, self.lock = Traffic(), threading.Lock()


@dataclass
class Registry:
    """A started registry.

    Attributes:
        container: its name.
        address: the proxy's ``localhost:port``: with localhost alone the engine uses plain HTTP.
    """

    container: str
    proxy: _Proxy
    address: str = field(init=False)

    def __post_init__(self) -> None:
        self.address = f"localhost:{self.proxy.server_address[1]}"

    def take(self) -> Traffic:
        """Return the traffic since the last call."""
        with self.proxy.lock:
            found, self.proxy.traffic = self.proxy.traffic, Traffic()
        return found

    def stored(self) -> int:
        """Return the bytes of the blobs that it stores."""
        find = "find /var/lib/registry -type f -name data -path '*/blobs/*' -printf %s+ 2>/dev/null || true"
        return sum(int(size) for size in docker("exec", self.container, "sh", "-c", find).split("+") if size)

    def manifest(self, reference: str) -> dict[str, Any]:
        """Return the manifest of an image by its reference with a digest; of an index, that for Linux."""
        name, _, digest = reference.partition("/")[2].partition("@")
        while True:
            accept = "application/vnd.oci.image.index.v1+json, application/vnd.oci.image.manifest.v1+json"
            url = f"http://{self.address}/v2/{name}/manifests/{digest}"
            kinds = f"{accept}, application/vnd.docker.distribution.manifest.v2+json"
            with urllib.request.urlopen(urllib.request.Request(url, headers={"Accept": kinds})) as answer:
                document: dict[str, Any] = json.load(answer)
            if "layers" in document:
                return document
            # An index: of the image and its provenance, whose platform is unknown/unknown.
            digest = next(entry["digest"] for entry in document["manifests"] if entry["platform"]["os"] == "linux")


def base(name: str) -> str:
    """Return the reference of a base image of images/bases.yaml."""
    said = subprocess.check_output([*TRAINYARD, "dev", "base", "--json"], stderr=subprocess.DEVNULL)
    return str(json.loads(said)[name]["reference"])


@contextlib.contextmanager
def started(delay: float = 0.0) -> Iterator[Registry]:
    """Start a registry whose answers take ``delay`` seconds more each; removed afterwards."""
    image, folder = "trainyard-registry:2.8", str(ROOT / "tests" / "image" / "registry")
    docker("build", "--quiet", f"--build-arg=BASE={base('debian-12')}", f"--tag={image}", folder)
    container = docker("run", "--detach", "--publish=127.0.0.1::5000", "--label=benchmark", image)
    try:
        port = int(docker("port", container, "5000/tcp").rpartition(":")[2])
        end = time.monotonic() + 30
        while time.monotonic() < end:
            with contextlib.suppress(OSError), urllib.request.urlopen(f"http://127.0.0.1:{port}/v2/"):
                break
            time.sleep(0.1)
        else:
            sys.exit(f"the registry did not start: {docker('logs', '--tail=3', container)}")
        with _Proxy(("127.0.0.1", port), delay) as proxy:
            threading.Thread(target=proxy.serve_forever, args=(0.01,), daemon=True).start()
            yield Registry(container, proxy)
            proxy.shutdown()
    finally:
        docker("rm", "--force", "--volumes", container)
