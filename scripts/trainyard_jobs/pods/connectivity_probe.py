"""Runs on every worker of a TPU slice at the same time and finds out which workers it can connect to.

    python3 -c "$(cat connectivity_probe.py)" PORT SECONDS INDEX ADDRESS0 ADDRESS1 ...

Every worker listens on PORT and connects to all others there, until it has connected to each and each has connected to
it, or SECONDS have passed. It prints {"unreached": [index, ...]}, or {"busy": true} if the port is in use. It
needs only the Python of the VM (3.8 or later): it is sent over ssh and not installed.
"""

from __future__ import annotations

import errno
import json
import socket
import sys
import threading
import time


def main(port: int, seconds: float, index: int, addresses: list[str], bind_address: str = "") -> dict[str, object]:
    """Connect to the other workers and accept their connections, for at most ``seconds``; what is printed."""
    deadline = time.monotonic() + seconds
    others = [number for number in range(len(addresses)) if number != index]
    connected: set[int] = set()
    server = socket.socket()
    server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        server.bind((bind_address, port))
    except OSError as error:
        if error.errno != errno.EADDRINUSE:
            raise
        return {"busy": True}
    server.listen(len(addresses))
    server.settimeout(0.2)

    done = threading.Event()

    def listen() -> None:
        while not done.is_set():
            try:
                connection, _ = server.accept()
                connection.settimeout(5)
                connected.add(int(connection.recv(16)))
                connection.close()
            except (OSError, ValueError):
                continue

    listener = threading.Thread(target=listen, daemon=True)
    listener.start()
    unreached = list(others)
    while time.monotonic() < deadline and (unreached or not connected.issuperset(others)):
        for number in list(unreached):
            try:
                with socket.create_connection((addresses[number], port), timeout=2) as connection:
                    connection.sendall(b"%d" % index)
                unreached.remove(number)
            except OSError:
                continue
        time.sleep(0.1)
    done.set()
    listener.join()
    server.close()
    return {"unreached": unreached}


if __name__ == "__main__":
    print(json.dumps(main(int(sys.argv[1]), float(sys.argv[2]), int(sys.argv[3]), sys.argv[4:])))
