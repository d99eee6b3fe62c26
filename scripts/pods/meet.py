"""Runs on every worker of a pod at the same time: does each reach each other?

    python3 -c "$(cat meet.py)" PORT SECONDS INDEX ADDRESS0 ADDRESS1 ...

Every worker listens at PORT and calls all others there until each was reached and each has called, or the time is up.
It prints {"unreached": [index, ...]}, or {"busy": true} if something listens at the port already. Needs nothing but
the Python (3.8 or later) of the VM; it is sent over ssh, never installed.
"""

from __future__ import annotations

import errno
import json
import socket
import sys
import threading
import time


def main(port: int, seconds: float, index: int, addresses: list[str], here: str = "") -> dict[str, object]:
    deadline = time.monotonic() + seconds
    others = [number for number in range(len(addresses)) if number != index]
    callers: set[int] = set()
    server = socket.socket()
    server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        server.bind((here, port))
    except OSError as error:
        if error.errno != errno.EADDRINUSE:
            raise
        return {"busy": True}
    server.listen(len(addresses))
    server.settimeout(0.2)

    over = threading.Event()

    def listen() -> None:
        while not over.is_set():
            try:
                connection, _ = server.accept()
                connection.settimeout(5)
                callers.add(int(connection.recv(16)))
                connection.close()
            except (OSError, ValueError):
                continue

    listener = threading.Thread(target=listen, daemon=True)
    listener.start()
    unreached = list(others)
    while time.monotonic() < deadline and (unreached or not callers.issuperset(others)):
        for number in list(unreached):
            try:
                with socket.create_connection((addresses[number], port), timeout=2) as connection:
                    connection.sendall(b"%d" % index)
                unreached.remove(number)
            except OSError:
                continue
        time.sleep(0.1)
    over.set()
    listener.join()
    server.close()
    return {"unreached": unreached}


if __name__ == "__main__":
    print(json.dumps(main(int(sys.argv[1]), float(sys.argv[2]), int(sys.argv[3]), sys.argv[4:])))
