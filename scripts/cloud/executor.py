"""Runs a build of Cloud Build's with the local Docker engine, as Cloud Build would run it.

Steps start as soon as what they wait for has passed, in containers that share /workspace, on a network called
`cloudbuild`, with the engine's socket. Images listed under `images:` are pushed at the end, and only if every step
passed. Whatever happens, no container, volume or network of a run is left.
"""

from __future__ import annotations

import contextlib
import fcntl
import io
import os
import secrets
import tarfile
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

import docker.errors
import requests
from docker.models.containers import Container
from docker.types import Mount

from scripts import engine
from scripts.cli import StepFailed, say
from scripts.cloud.config import Build, Step
from scripts.cloud.step_images import CA_BUNDLE, find_image
from scripts.published import registry

NETWORK = "cloudbuild"
#: The engine's socket inside its host.
SOCKET = "/var/run/docker.sock"

#: Cloud Build's statuses of builds and steps (Build.Status).
SUCCESS, FAILURE, TIMEOUT, CANCELLED, QUEUED, INTERNAL = (
    "SUCCESS", "FAILURE", "TIMEOUT", "CANCELLED", "QUEUED", "INTERNAL_ERROR"
)  # fmt: skip


@dataclass
class Outcome:
    """How a step ended: its status, exit code (None if it never ran to an end), and times in seconds since 1970."""

    status: str = QUEUED
    exit_code: int | None = None
    started: float = 0.0
    ended: float = 0.0
    detail: str = ""
    output: bytes = b""


@dataclass
class Result:
    """How a build ended.

    Attributes:
        status: SUCCESS, FAILURE, TIMEOUT, CANCELLED or INTERNAL_ERROR.
        detail: one line on what went wrong; empty for a success.
        steps: outcomes in the file's order.
        images: name -> digest of every image that was pushed.
        seconds: how long it took.
    """

    status: str = SUCCESS
    detail: str = ""
    steps: list[Outcome] = field(default_factory=list)
    images: dict[str, str] = field(default_factory=dict)
    seconds: float = 0.0


Log = Callable[[str], None]


@contextlib.contextmanager
def shared_network() -> Iterator[None]:
    """The network `cloudbuild`, whose name steps rely on: shared by all runs on this host, removed after the last."""
    client = engine.client()
    # Of the host, not of this checkout: others have the same network's name.
    with open(Path(tempfile.gettempdir()) / "trainyard-cloudbuild.lock", "a", encoding="utf-8") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        if not client.networks.list(names=[f"^{NETWORK}$"]):
            client.networks.create(NETWORK, labels={engine.OWNED: "cloudbuild"})
        fcntl.flock(file, fcntl.LOCK_SH)
        try:
            yield
        finally:
            with contextlib.suppress(BlockingIOError, docker.errors.APIError):  # another run goes on
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                for network in client.networks.list(names=[f"^{NETWORK}$"], filters={"label": engine.OWNED}):
                    network.remove()


class Executor:
    """One run of a build. :meth:`run` may be called once; :meth:`cancel` at any time, from any thread."""

    def __init__(
        self,
        build: Build,
        source: BinaryIO | None = None,
        *,
        write: Log = say,
        images: Mapping[str, str] | None = None,
        push_to: str | None = None,
    ) -> None:
        """
        Args:
            source: a tar (of any compression) to unpack into /workspace.
            write: called with every line of the log, from several threads.
            images: image names -> the local images that stand for them.
            push_to: host[:port] that stands for every registry when ``images:`` are pushed; the path stays.
        """
        self.build = build
        self._source, self._write = source, write
        self._given, self._push_to = images or {}, push_to
        self.id = secrets.token_hex(4)
        self.outcomes = [Outcome() for _ in build.steps]
        self._running: dict[int, Container] = {}
        self._stopping: str | None = None
        self._guard = threading.Lock()
        self._labels = engine.owned("cloudbuild") | {"io.trainyard.cloudbuild": self.id}
        self._volumes: dict[str, str] = {}

    def cancel(self, status: str = CANCELLED) -> None:
        """End the build: no further step starts, those that run are killed."""
        with self._guard:
            self._stopping = self._stopping or status
            running = list(self._running.values())
        for container in running:
            with contextlib.suppress(docker.errors.APIError, requests.exceptions.RequestException):
                container.kill()

    def run(self) -> Result:
        """Run the build to its end; what it started is gone afterwards.

        Raises:
            UserError: a step's image is neither here nor to be had.
        """
        started = time.monotonic()
        result = Result(steps=self.outcomes)
        timer = threading.Timer(self.build.timeout, self.cancel, [TIMEOUT])
        timer.daemon = True
        with shared_network():
            try:
                timer.start()
                self._prepare()
                self._run_graph()
                result.status, result.detail = self._verdict()
                if result.status == SUCCESS:
                    self._push(result)
            except BaseException:
                self.cancel()
                raise
            finally:
                timer.cancel()
                self._remove()
                result.seconds = round(time.monotonic() - started, 1)
        return result

    def _prepare(self) -> None:
        """The volumes, and the source in /workspace."""
        names = ["workspace", "home", *sorted({name for step in self.build.steps for name, _ in step.volumes})]
        for name in dict.fromkeys(names):
            volume = f"trainyard-cloudbuild-{self.id}-{name}"
            engine.client().volumes.create(volume, labels=self._labels)
            self._volumes[name] = volume
        if self._source is None:
            return
        # A container that is never started: the engine copies into the volume through it, wherever the engine runs.
        first = find_image(self.build.steps[0].name, self._given, self._write)
        porter = engine.client().containers.create(
            first.image, ["true"], volumes={self._volumes["workspace"]: {"bind": "/workspace"}}, labels=self._labels
        )
        try:
            porter.put_archive("/workspace", self._source)
        finally:
            porter.remove(force=True)

    def _run_graph(self) -> None:
        """Start every step as soon as all it waits for has passed; stop starting once one has failed."""
        waiting = {step.number: step for step in self.build.steps}
        passed: set[int] = set()
        running: dict[Future[bool], Step] = {}
        with ThreadPoolExecutor(max_workers=len(self.build.steps)) as pool:
            try:
                while waiting or running:
                    ready = [] if self._stopping else [step for step in waiting.values() if step.wait_for <= passed]
                    for step in ready:
                        del waiting[step.number]
                        running[pool.submit(self._step, step)] = step
                    if not running:
                        break
                    for future in wait(running, return_when=FIRST_COMPLETED).done:
                        step = running.pop(future)
                        if future.result():
                            passed.add(step.number)
                        else:
                            self.cancel(self.outcomes[step.number].status)
            except BaseException:  # Ctrl-C too: the pool waits for its threads, so what they wait for has to end first
                self.cancel()
                raise
        for number in waiting:
            self.outcomes[number].status = CANCELLED if self._stopping == CANCELLED else QUEUED

    def _verdict(self) -> tuple[str, str]:
        """Status of the build, and one line on why: the server's own words where it has some."""
        for step, outcome in zip(self.build.steps, self.outcomes, strict=True):
            if outcome.status in (FAILURE, TIMEOUT) and outcome.detail and not self._tolerated(step, outcome):
                return (self._stopping or FAILURE), outcome.detail
        if self._stopping == TIMEOUT:
            return TIMEOUT, f"the build took longer than its timeout of {self.build.timeout:g} s"
        if self._stopping:
            return self._stopping, "the build was cancelled"
        return SUCCESS, ""

    @staticmethod
    def _tolerated(step: Step, outcome: Outcome) -> bool:
        if outcome.status != FAILURE or outcome.exit_code is None:
            return False
        return step.allow_failure or outcome.exit_code in step.allow_exit_codes

    def _container(self, step: Step) -> Container:
        """A step's container, created and not started."""
        found = find_image(step.name, self._given, self._write)
        entrypoint = found.entrypoint
        mounts = [
            *found.mounts,
            Mount("/workspace", self._volumes["workspace"]),
            Mount("/builder/home", self._volumes["home"]),
            Mount(SOCKET, SOCKET, type="bind"),
            *(Mount(path, self._volumes[name]) for name, path in step.volumes),
        ]
        bundle = engine.ca_bundle()
        if bundle and not os.environ.get("DOCKER_HOST"):  # steps trust whom this host trusts, in inspected networks too
            mounts.append(Mount(CA_BUNDLE, str(bundle.resolve()), type="bind", read_only=True))
        options: dict[str, Any] = {}
        if step.script:
            entrypoint, command = ["/builder/script"], None
        else:
            command = list(step.args)
            entrypoint = [step.entrypoint] if step.entrypoint else entrypoint
        if entrypoint:
            options["entrypoint"] = entrypoint
        folder = step.dir if step.dir.startswith("/") else f"/workspace/{step.dir}".rstrip("/")
        container = engine.client().containers.create(
            found.image,
            command,
            working_dir=folder,
            environment=["HOME=/builder/home", "BUILDER_OUTPUT=/builder/outputs", *found.environment, *step.env],
            mounts=mounts,
            network=NETWORK,
            labels=self._labels,
            name=f"trainyard-cloudbuild-{self.id}-step-{step.number}",
            **options,
        )
        files = {"builder/outputs/": b""}
        if step.script:
            # run-bash-scripts: without a shebang, Cloud Build uses /bin/sh.
            text = step.script if step.script.startswith("#!") else f"#!/bin/sh\n{step.script}"
            files["builder/script"] = text.encode()
        container.put_archive("/", _tar(files))
        return container

    def _step(self, step: Step) -> bool:
        """Run a step; whether the build may go on."""
        outcome = self.outcomes[step.number]
        outcome.started = time.time()
        container = self._container(step)
        try:
            with self._guard:
                if self._stopping:
                    outcome.status = CANCELLED
                    return False
                self._running[step.number] = container
            self._write(f"Starting {step.title}")
            try:
                container.start()
            except docker.errors.APIError as error:
                outcome.status, outcome.exit_code = FAILURE, None
                outcome.detail = f"{step.title} could not start: {error.explanation}"
                return False
            late = threading.Event()
            timer = threading.Timer(step.timeout or 0, _kill, [container, late])
            timer.daemon = True
            if step.timeout:
                timer.start()
            if self._stopping:  # cancelled between the look above and the start
                _kill(container, threading.Event())
            try:
                self._follow(step, container)
                code = int(container.wait()["StatusCode"])
            finally:
                timer.cancel()
            outcome.output = _output(container)
            outcome.exit_code = code
            if late.is_set():
                outcome.status = TIMEOUT
                outcome.detail = (
                    f"{step.title} took longer than its timeout of {step.timeout or self.build.timeout:g} s"
                )
            elif self._stopping and code == 137:
                outcome.status = CANCELLED
            elif code:
                outcome.status = FAILURE
                outcome.detail = (
                    f'build step {step.number} "{step.name}" failed: step exited with non-zero status: {code}'
                )
            else:
                outcome.status = SUCCESS
            self._write(f"Finished {step.title}" + (f": {outcome.detail}" if outcome.detail else ""))
            if self._tolerated(step, outcome):
                self._write(f"{step.title}: status {code} is allowed; the build goes on")
                return True
            return outcome.status == SUCCESS
        finally:
            outcome.ended = time.time()
            with self._guard:
                self._running.pop(step.number, None)
            with contextlib.suppress(docker.errors.APIError):
                container.remove(force=True, v=True)

    def _follow(self, step: Step, container: Container) -> None:
        """Pass a container's output on, line by line, under the step's name."""
        rest = b""
        for chunk in container.logs(stream=True, follow=True):
            *lines, rest = (rest + chunk).split(b"\n")
            for line in lines:
                self._write(f"{step.title}: {line.decode(errors='replace')}")
        if rest:
            self._write(f"{step.title}: {rest.decode(errors='replace')}")

    def _push(self, result: Result) -> None:
        """Push ``images:``. All of them must be here before the first is sent."""
        for name in self.build.images:
            try:
                engine.client().images.get(name)
            except docker.errors.ImageNotFound:
                result.status, result.detail = FAILURE, f"no image {name} was built, which 'images' wants pushed"
                return
        for name in self.build.images:
            host, _, path = name.partition("/")
            destination = f"{self._push_to}/{path}" if self._push_to else name
            destination = destination if ":" in destination.rpartition("/")[2] else f"{destination}:latest"
            repository, _, tag = destination.rpartition(":")
            self._write(f"PUSH: {name}" + (f" (to {self._push_to}, which stands for {host})" if self._push_to else ""))
            engine.client().images.get(name).tag(repository, tag)
            try:
                for _ in registry.push(destination):
                    pass
                digest = registry.digest_of(destination)
            except StepFailed as error:
                result.status, result.detail = FAILURE, str(error)
                return
            finally:
                if self._push_to:
                    engine.client().api.remove_image(destination, noprune=True)
            result.images[name] = str(digest)

    def _remove(self) -> None:
        """Leave nothing of this run on the engine."""
        client = engine.client()
        ours: dict[str, str | list[str] | bool] = {"label": f"io.trainyard.cloudbuild={self.id}"}
        for container in client.containers.list(all=True, filters=ours):
            with contextlib.suppress(docker.errors.APIError):
                container.remove(force=True, v=True)
        for volume in client.volumes.list(filters=ours):
            with contextlib.suppress(docker.errors.APIError):
                volume.remove(force=True)


def _kill(container: Container, late: threading.Event) -> None:
    late.set()
    with contextlib.suppress(docker.errors.APIError, requests.exceptions.RequestException):
        container.kill()


def _tar(files: Mapping[str, bytes]) -> bytes:
    """A tar of executable files; a name that ends with / is a folder."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as tar:
        for name, content in files.items():
            entry = tarfile.TarInfo(name.rstrip("/"))
            entry.mode, entry.size = 0o755, len(content)
            entry.type = tarfile.DIRTYPE if name.endswith("/") else tarfile.REGTYPE
            tar.addfile(entry, io.BytesIO(content))
    return buffer.getvalue()


def _output(container: Container) -> bytes:
    """What a step wrote to $BUILDER_OUTPUT/output, its first 4 KB (Results.buildStepOutputs); empty if nothing."""
    try:
        chunks, _ = container.get_archive("/builder/outputs/output")
    except docker.errors.APIError:
        return b""
    with tarfile.open(fileobj=io.BytesIO(b"".join(chunks))) as tar:
        found = tar.extractfile(tar.next() or tarfile.TarInfo())
        return found.read(4096) if found else b""
