"""Run a build of Cloud Build with the local Docker engine.

A step starts as soon as the steps that it waits for have passed. Its container has /workspace, the network `cloudbuild`
and the engine's socket. Images under `images:` are pushed at the end if all steps passed. All containers, volumes and
networks of a run are removed when it ends, however it ends
(https://cloud.google.com/build/docs/build-config-file-schema).
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import posixpath
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

import docker.errors
from docker.models.containers import Container
from docker.types import Mount

from cloudbuild_local.builder_images import CA_BUNDLE, find_image
from cloudbuild_local.config import Build, Step
from trainyard.common import settings
from trainyard.common.errors import StepFailed
from trainyard.oci import docker_engine, registry
from trainyard.oci.reference import Reference
from trainyard.sandbox import containers
from trainyard.sandbox.containers import Sandbox

logger = logging.getLogger(__name__)

#: The socket of the Docker engine.
SOCKET = "/var/run/docker.sock"

#: What a step writes for later ones, and how many bytes of it Cloud Build keeps (Results.buildStepOutputs).
OUTPUT, MAX_OUTPUT = "/builder/outputs/output", 4096

#: Statuses of builds and steps
#: (https://cloud.google.com/build/docs/api/reference/rest/v1/projects.builds#status).
SUCCESS, FAILURE, TIMEOUT, CANCELLED, QUEUED, INTERNAL = (
    "SUCCESS", "FAILURE", "TIMEOUT", "CANCELLED", "QUEUED", "INTERNAL_ERROR"
)  # fmt: skip


#: The network that the builds of a host share. Its name is part of Cloud Build's interface: steps start containers in
#: it (https://cloud.google.com/build/docs/build-config-file-schema#network).
NETWORK = "cloudbuild"


@dataclass
class Outcome:
    """The result of a step.

    Attributes:
        exit_code: None if its container did not run to its end.
        started, ended: in seconds since 1970; 0 if it did not start or end.
        detail: one line about a failure.
        output: what it wrote to $BUILDER_OUTPUT/output.
    """

    status: str = QUEUED
    exit_code: int | None = None
    started: float = 0.0
    ended: float = 0.0
    detail: str = ""
    output: bytes = b""


@dataclass
class Result:
    """The result of a build.

    Attributes:
        status: SUCCESS, FAILURE, TIMEOUT, CANCELLED or INTERNAL_ERROR.
        detail: one line about a failure; empty for a success.
        steps: outcomes in the order of the file.
        images: name -> digest of every image that was pushed.
        seconds: duration.
    """

    status: str = SUCCESS
    detail: str = ""
    steps: list[Outcome] = field(default_factory=list)
    images: dict[str, str] = field(default_factory=dict)
    seconds: float = 0.0


@contextlib.contextmanager
def shared_network() -> Iterator[None]:
    """Create the network unless another run has, and remove it when the last run that uses it ends.

    Every run holds a shared lock while it uses the network; the run that can make its lock exclusive is the last.
    `filelock`, which Trainyard uses for other locks, refuses to change a lock from exclusive to shared or back (4.2.11,
    ReadWriteLock); between a release and the next lock, another run could remove the network.
    """
    client = docker_engine.client()
    # The lock belongs to the host, not to a checkout: the network has the same name for all of them.
    with open(Path(tempfile.gettempdir()) / "trainyard-cloudbuild.lock", "a", encoding="utf-8") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        if not client.networks.list(names=[f"^{NETWORK}$"]):
            client.networks.create(NETWORK, labels={docker_engine.OWNED: "cloudbuild"})
        fcntl.flock(file, fcntl.LOCK_SH)
        try:
            yield
        finally:
            with contextlib.suppress(BlockingIOError, docker.errors.APIError):  # another run uses it
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                for network in client.networks.list(names=[f"^{NETWORK}$"], filters={"label": docker_engine.OWNED}):
                    network.remove()


Log = Callable[[str], None]


class Executor:
    """One run of a build. :meth:`run` may be called once; :meth:`cancel` at any time, from any thread."""

    def __init__(
        self,
        build: Build,
        source: BinaryIO | None = None,
        *,
        write: Log = logger.info,
        images: Mapping[str, str] | None = None,
        push_to: str | None = None,
        engine_socket: bool = True,
    ) -> None:
        """
        Args:
            source: a tar archive (of any compression) that is extracted to /workspace.
            write: called with every line of the log, from several threads.
            images: image name -> local image to use for it.
            push_to: host[:port] that replaces the registry's host when ``images:`` are pushed.
            engine_socket: whether the steps get the engine's socket, which is root on its host.
        """
        self.build = build
        self._source, self._write = source, write
        self._given, self._push_to, self._engine_socket = images or {}, push_to, engine_socket
        self.outcomes = [Outcome() for _ in build.steps]
        self._running: dict[int, Container] = {}
        self._stopping: str | None = None
        self._guard = threading.Lock()
        self._sandbox = Sandbox("cloudbuild", network=NETWORK)
        self._volumes: dict[str, str] = {}
        self._clock_offset = time.time() - time.monotonic()

    def cancel(self, status: str = CANCELLED) -> None:
        """Cancel the build: start no further steps and kill those that are running."""
        with self._guard:
            self._stopping = self._stopping or status
            running = list(self._running.values())
        for container in running:
            containers.signal(container)

    def run(self) -> Result:
        """Run the build, and remove its containers, volumes and network afterwards.

        Raises:
            UserError: see :func:`cloudbuild_local.builder_images.find_image`.
        """
        started = time.monotonic()
        result = Result(steps=self.outcomes)
        timer = threading.Timer(self.build.timeout, self.cancel, [TIMEOUT])
        timer.daemon = True
        with shared_network(), self._sandbox:
            try:
                timer.start()
                self._prepare()
                self._run_graph()
                result.status, result.detail = self._evaluate()
                if result.status == SUCCESS:
                    self._push(result)
            except BaseException:
                self.cancel()
                raise
            finally:
                timer.cancel()
        result.seconds = round(time.monotonic() - started, 1)
        return result

    def _prepare(self) -> None:
        """Create the volumes and extract the source to /workspace."""
        names = ["workspace", "home", *sorted({name for step in self.build.steps for name, _ in step.volumes})]
        self._volumes = {name: self._sandbox.volume(name) for name in dict.fromkeys(names)}
        if self._source is None:
            return
        # A container that is never started: the engine copies into the volume through it, even a remote engine.
        first = find_image(self.build.steps[0].name, self._given, self._write)
        copier = self._sandbox.create(
            first.image, ["true"], volumes={self._volumes["workspace"]: {"bind": "/workspace"}}
        )
        copier.put_archive("/workspace", self._source)
        containers.remove(copier)

    def _run_graph(self) -> None:
        """Start every step as soon as the steps that it waits for have passed; start none after a failure."""
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
            except BaseException:  # includes Ctrl-C: the pool waits for its threads, and they wait for the containers
                self.cancel()
                raise
        for number in waiting:
            self.outcomes[number].status = CANCELLED if self._stopping == CANCELLED else QUEUED

    def _evaluate(self) -> tuple[str, str]:
        """Status of the build and, if it failed, one line in Cloud Build's wording."""
        for step, outcome in zip(self.build.steps, self.outcomes, strict=True):
            if outcome.status in (FAILURE, TIMEOUT) and outcome.detail and not self._failure_allowed(step, outcome):
                return (self._stopping or FAILURE), outcome.detail
        if self._stopping == TIMEOUT:
            return TIMEOUT, f"the build took longer than its timeout of {self.build.timeout:g} s"
        if self._stopping:
            return self._stopping, "the build was cancelled"
        return SUCCESS, ""

    @staticmethod
    def _failure_allowed(step: Step, outcome: Outcome) -> bool:
        """Whether the build continues after a step's failure.

        With both fields, allowExitCodes takes precedence (discovery document: BuildStep.allowExitCodes).
        """
        if outcome.status != FAILURE or outcome.exit_code is None:
            return False
        return outcome.exit_code in step.allow_exit_codes if step.allow_exit_codes else step.allow_failure

    def _container(self, step: Step) -> Container:
        """Create a step's container without starting it."""
        found = find_image(step.name, self._given, self._write)
        entrypoint = found.entrypoint
        mounts = [
            *found.mounts,
            Mount("/workspace", self._volumes["workspace"]),
            Mount("/builder/home", self._volumes["home"]),
            *([Mount(SOCKET, SOCKET, type="bind")] if self._engine_socket else []),
            *(Mount(path, self._volumes[name]) for name, path in step.volumes),
        ]
        bundle = settings.ca_bundle()  # needed in networks that inspect TLS
        if bundle and not settings.standard_variable("DOCKER_HOST"):
            mounts.append(Mount(CA_BUNDLE, str(bundle.resolve()), type="bind", read_only=True))
        options: dict[str, Any] = {}
        if step.script:
            entrypoint, command = ["/builder/script"], None
        else:
            command = list(step.args)
            entrypoint = [step.entrypoint] if step.entrypoint else entrypoint
        if entrypoint:
            options["entrypoint"] = entrypoint
        folder = posixpath.normpath(posixpath.join("/workspace", step.dir))
        files = {}
        if step.script:
            # Without a shebang, /bin/sh is used:
            # https://cloud.google.com/build/docs/configuring-builds/run-bash-scripts.
            text = step.script if step.script.startswith("#!") else f"#!/bin/sh\n{step.script}"
            files["builder/script"] = text.encode()
        return self._sandbox.create(
            found.image,
            command,
            f"step-{step.number}",
            files=containers.archive(files, ["builder/outputs"], mode=0o755, folder_mode=0o755),
            working_dir=folder,
            environment=["HOME=/builder/home", "BUILDER_OUTPUT=/builder/outputs", *found.environment, *step.env],
            mounts=mounts,
            **options,
        )

    def _now(self) -> float:
        """Seconds since 1970 that a change of the system's clock during the build does not affect."""
        return self._clock_offset + time.monotonic()

    def _step(self, step: Step) -> bool:
        """Run a step; whether the build may continue."""
        outcome = self.outcomes[step.number]
        outcome.started = self._now()
        container: Container | None = None
        try:
            try:
                container = self._container(step)
                with self._guard:
                    if self._stopping:
                        outcome.status = CANCELLED
                        return False
                    self._running[step.number] = container
                self._write(f"Starting {step.title}")
                container.start()
            except docker.errors.APIError as error:
                outcome.status, outcome.detail = FAILURE, f"{step.title} could not start: {error.explanation}"
                return False
            if self._stopping:  # cancelled between the check above and the start
                containers.signal(container)
            started, limit = time.monotonic(), step.timeout or None
            for line in containers.lines(container, limit):
                self._write(f"{step.title}: {line}")
            late = limit is not None and time.monotonic() - started >= limit
            if late:
                containers.signal(container)
            code = int(container.wait()["StatusCode"])
            with contextlib.suppress(StepFailed):  # it has written none
                outcome.output = containers.read_file(container, OUTPUT)[:MAX_OUTPUT]
            outcome.exit_code = code
            if late:
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
            if self._failure_allowed(step, outcome):
                self._write(f"{step.title}: exit status {code} is allowed; the build continues")
                return True
            return outcome.status == SUCCESS
        finally:
            outcome.ended = self._now()
            with self._guard:
                self._running.pop(step.number, None)
            if container:
                containers.remove(container)

    def _push(self, result: Result) -> None:
        """Push ``images:``, if all of them exist."""
        for name in self.build.images:
            try:
                docker_engine.client().images.get(name)
            except docker.errors.ImageNotFound:
                result.status, result.detail = FAILURE, f"no image {name} was built, which is listed under 'images'"
                return
        for name in self.build.images:
            host, _, path = name.partition("/")
            destination = f"{self._push_to}/{path}" if self._push_to else name
            parsed = Reference.parse(destination)
            repository, tag = parsed.familiar_name, parsed.tag or "latest"
            destination = f"{repository}:{tag}"
            self._write(f"PUSH: {name}" + (f" (to {self._push_to} instead of {host})" if self._push_to else ""))
            docker_engine.client().images.get(name).tag(repository, tag)
            try:
                for _ in registry.push(destination):
                    pass
                digest = registry.digest_of(destination)
            except StepFailed as error:
                result.status, result.detail = FAILURE, str(error)
                return
            finally:
                if self._push_to:
                    docker_engine.client().api.remove_image(destination, noprune=True)
            result.images[name] = str(digest)
