"""The BuildKit of the engine behind another socket, as a node of a builder that `docker buildx create` makes.

buildx reaches it with the driver `remote`, which is for a BuildKit that runs anywhere. The engine offers BuildKit's API
on its own socket, after an upgrade: https://github.com/moby/moby/blob/v26.1.5/api/server/router/grpc/grpc.go
"""

from __future__ import annotations

import contextlib
import socket
import threading
from pathlib import Path
from types import TracebackType

#: Where the engine listens.
SOCKET = "/var/run/docker.sock"

_UPGRADE = b"POST /grpc HTTP/1.1\r\nHost: engine\r\nConnection: Upgrade\r\nUpgrade: h2c\r\nContent-Length: 0\r\n\r\n"


class EngineSocket:
    """A socket at ``path`` while the context lasts; every connection is one to the engine's BuildKit."""

    def __init__(self, path: Path) -> None:
        self.address = f"unix://{path}"
        self.connections = 0
        self._server = socket.socket(socket.AF_UNIX)
        self._server.bind(str(path))
        self._server.listen()

    def __enter__(self) -> EngineSocket:
        threading.Thread(target=self._accept, daemon=True).start()
        return self

    def __exit__(
        self, _kind: type[BaseException] | None, _error: BaseException | None, _trace: TracebackType | None
    ) -> None:
        self._server.shutdown(socket.SHUT_RDWR)
        self._server.close()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):  # closed
            while True:
                client, _ = self._server.accept()
                self.connections += 1
                engine = socket.socket(socket.AF_UNIX)
                engine.connect(SOCKET)
                engine.sendall(_UPGRADE)
                answer = b""
                while not answer.endswith(b"\r\n\r\n"):
                    answer += engine.recv(1)
                for pair in ((client, engine), (engine, client)):
                    threading.Thread(target=_copy, args=pair, daemon=True).start()


def _copy(source: socket.socket, destination: socket.socket) -> None:
    with contextlib.suppress(OSError):
        while data := source.recv(1 << 16):
            destination.sendall(data)
    with contextlib.suppress(OSError):
        destination.shutdown(socket.SHUT_WR)
