"""Follow the containers of ``trainyard run`` to their end, and report what they used and learned."""

from __future__ import annotations

import contextlib
import datetime
import logging
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

import docker.errors
import requests
from docker.models.containers import Container

from trainyard.common.docker_engine import Engine
from trainyard.common.errors import UserError
from trainyard.image.local_run import RUN, RUN_MADE, RUN_OUTPUT, Request
from trainyard.sandbox import containers, curves

logger = logging.getLogger(__name__)

#: What a terminal, a scheduler or the user sends.
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2)

#: Seconds from SIGTERM to SIGKILL, as on Kubernetes.
GRACE = 30


def to_the_end(engine: Engine, arguments: Sequence[str], variables: Mapping[str, str], request: Request) -> int:
    """Run ``docker run`` with the signals of this process, report, remove the container, and return its exit status."""
    # In a terminal docker reads Ctrl-C as a key; elsewhere it would get the signal of its group besides that from here.
    process = subprocess.Popen(arguments, env=variables, start_new_session=not request.terminal)

    def forward(number: int, _: FrameType | None) -> None:
        with contextlib.suppress(ProcessLookupError):
            process.send_signal(number)

    for number in _SIGNALS:
        signal.signal(number, forward)
    peak: list[int] = [0]
    threading.Thread(target=_measure, args=(engine, request.name, process, peak), daemon=True).start()
    status = process.wait()
    with contextlib.suppress(docker.errors.DockerException, requests.RequestException):
        container = engine.client.containers.get(request.name)
        try:
            report(container, peak[0])
        finally:
            containers.remove(container)
    return 128 - status if status < 0 else status


def _measure(engine: Engine, name: str, process: subprocess.Popen[bytes], peak: list[int]) -> None:
    """Keep the most bytes of memory, without the cache of files, that a container has used; runs in a thread."""
    while process.poll() is None:
        with contextlib.suppress(docker.errors.DockerException, requests.RequestException, OSError):
            used = engine.client.api.stats(name, stream=False, one_shot=True).get("memory_stats") or {}
            peak[0] = max(peak[0], used.get("usage", 0) - (used.get("stats") or {}).get("inactive_file", 0))
        time.sleep(0.5)


def newest(engine: Engine, target: str) -> Container:
    """Return the container of ``trainyard run`` that started last of an image, also one that has ended.

    Raises:
        UserError: there is none.
    """
    found = engine.client.containers.list(all=True, filters={"label": f"{RUN}={target}"}, ignore_removed=True)
    if not found:
        raise UserError(f"no container of {target}: 'trainyard run --detach' starts one")
    return max(found, key=lambda one: str(one.attrs.get("Created")))


def lines(container: Container, *, follow: bool = False) -> Iterator[tuple[float, str]]:
    """Yield the lines of a container's log, each with the seconds since 1970 at which it was printed."""
    rest = b""
    with contextlib.suppress(docker.errors.APIError, OSError):  # the engine keeps no log, or the connection is lost
        for piece in container.logs(stream=True, follow=follow, timestamps=True):
            *complete, rest = (rest + piece).split(b"\n")
            for line in complete:
                moment, _, text = line.decode(errors="replace").partition(" ")
                yield _seconds(moment), text


def _seconds(moment: str) -> float:
    """Return RFC 3339, with nanoseconds, as seconds since 1970; 0 for another text."""
    with contextlib.suppress(ValueError):
        return datetime.datetime.fromisoformat(moment).timestamp()
    return 0.0


def report(container: Container, memory: int = 0) -> dict[str, Any]:
    """Say what a container that has ended did, write that to the folder of its /output, and return it."""
    container.reload()
    state, config = container.attrs["State"], container.attrs["Config"]
    begun = _seconds(str(state.get("StartedAt")))
    found = curves.Curves()
    for moment, line in lines(container):
        for part in line.split("\r"):  # of a progress bar
            found.add(part, max(0.0, moment - begun))
    facts = {
        "image": str(config.get("Image")),
        "digest": str(container.attrs.get("Image")),
        "command": list(config.get("Cmd") or []),
        "status": int(state.get("ExitCode") or 0),
        "out_of_memory": bool(state.get("OOMKilled")),
        "seconds": round(max(0.0, _seconds(str(state.get("FinishedAt"))) - begun), 1),
        "memory": memory,
    }
    used = f", {memory / 2**20:,.0f} MB of memory" if memory else ""
    killed = ": it ran out of memory" if facts["out_of_memory"] else ""
    logger.info(f"status {facts['status']} after {facts['seconds']} s{used}{killed}")
    for line in found.lines():
        logger.info(line)
    labels = config.get("Labels") or {}
    if folder := labels.get(RUN_OUTPUT):
        try:
            if labels.get(RUN_MADE):  # at the end: programs refuse folders with files
                Path(folder, ".gitignore").write_text("*\n", encoding="utf-8")  # results are no code of the next image
            names = curves.report(Path(folder), facts, found, begun)
            logger.info(f"{', '.join(names)} in {os.path.relpath(folder)}")
        except OSError as error:
            logger.warning(f"no report in {folder}: {error.strerror}")
    return facts


def show(container: Container, *, follow: bool) -> None:
    """Print the log of a container to stdout, and its report if it has ended."""
    for _, line in lines(container, follow=follow):
        sys.stdout.write(f"{line}\n")
        sys.stdout.flush()
    container.reload()
    if container.status == "exited":
        report(container)
