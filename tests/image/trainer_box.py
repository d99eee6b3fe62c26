"""Running a trainer in a container as a user would, for the tests of the trainers."""

from __future__ import annotations

import contextlib
import io
import json
import tarfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from docker.models.containers import Container

from scripts import engine

PYTHON = "/opt/venv/bin/python"


def _readable(member: tarfile.TarInfo) -> tarfile.TarInfo:
    """pytest's folders are closed to others; the trainer is another user."""
    member.mode = 0o755 if member.isdir() else 0o644
    return member


class Ended:
    """What a process left: its exit code, its output, and the trainer's summary (the last JSON line)."""

    def __init__(self, code: int, output: str) -> None:
        self.code, self.output = code, output
        self.lines = output.splitlines()
        found = [line for line in self.lines if line.startswith('{"event": "summary"')]
        self.summary: dict[str, Any] = json.loads(found[-1]) if found else {}

    def learned(self) -> dict[str, Any]:
        """The summary of a run that went well; fails with the output if it didn't."""
        assert self.code == 0 and self.summary, self.output
        return self.summary


class Box:
    """One running container of an image with scratch space in /tmp; processes are started in it one by one."""

    def __init__(self, container: Container, environment: dict[str, str]) -> None:
        self.container, self.environment = container, environment

    def put(self, folder: Path, name: str) -> str:
        """Copy the files of ``folder`` to /data/``name``; returns that path."""
        buffer = io.BytesIO()
        with tarfile.open(fileobj=buffer, mode="w") as archive:
            archive.add(folder, arcname=name, filter=_readable)
        self.container.put_archive("/data", buffer.getvalue())
        return f"/data/{name}"

    def run(self, *words: str, **environment: str) -> Ended:
        """Run a command to its end."""
        # One pipe for both streams: Docker's two would come out of order.
        command = ["sh", "-c", 'exec "$@" 2>&1', "sh", *words]
        code, output = self.container.exec_run(command, environment={**self.environment, **environment})
        return Ended(code, output.decode())

    def python(self, script: str, *words: str) -> Ended:
        """Run a Python script in the image's virtual environment."""
        return self.run(PYTHON, "-c", script, *words)

    def trainer(self, name: str, *words: str, **environment: str) -> Ended:
        """Run trainer ``name`` ("torch.mnist") to its end, as the launcher starts it."""
        return self.run(PYTHON, "-m", f"trainers.{name}", *words, **environment)

    def together(self, *commands: str, seconds: int = 240) -> list[Ended]:
        """Run shell ``commands`` at the same time; none may take longer than ``seconds``."""
        script = " ".join(f"(timeout {seconds} {line} >/tmp/out{n} 2>&1; echo $? >/tmp/code{n}) &"
                          for n, line in enumerate(commands)) + " wait"  # fmt: skip
        self.run("sh", "-c", "rm -f /tmp/out* /tmp/code*; " + script)
        return [
            Ended(int(self.run("cat", f"/tmp/code{n}").output), self.run("cat", f"/tmp/out{n}").output)
            for n in range(len(commands))
        ]

    def until(self, path: str, text: str, seconds: float = 120) -> None:
        """Wait until the file ``path`` has ``text`` in it."""
        end = time.monotonic() + seconds
        while text not in self.run("sh", "-c", f"cat {path} 2>/dev/null").output:
            assert time.monotonic() < end, f"no {text!r} in {path}: {self.run('cat', path).output}"
            time.sleep(0.2)


@contextlib.contextmanager
def box(image: str, tmpfs: dict[str, str] | None = None, **environment: str) -> Iterator[Box]:
    """A :class:`Box` of ``image``: no network but loopback, /tmp and /data writable, gone at the end."""
    container = engine.client().containers.run(
        image,
        ["sleep", "infinity"],
        entrypoint=["tini", "--"],
        detach=True,
        network_mode="none",
        tmpfs={"/tmp": "mode=1777", **(tmpfs or {})},
        labels=engine.owned("test"),
    )
    try:
        container.exec_run(["mkdir", "-p", "/data"], user="root")
        yield Box(container, environment)
    finally:
        container.remove(force=True)
