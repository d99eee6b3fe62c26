"""Run the steps of a build of Cloud Build with the local Docker engine, as far as the files of this project need it.

A step starts when those that it waits for have passed; all have /workspace and the engine's socket
(https://cloud.google.com/build/docs/build-config-file-schema). A step's ``timeout``, volumes, allowed failures
and bash's expansions of substitutions are missing: no file of this project has them.
"""

from __future__ import annotations

import contextlib
import re
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from typing import Any, BinaryIO

import docker.errors
from docker.models.containers import Container
from docker.types import Mount

from tests.engine import CONTEXT, ENGINE
from trainyard.common import settings
from trainyard.common.docker_engine import OWNED
from trainyard.common.errors import StepFailed
from trainyard.image import base_image
from trainyard.oci import registry
from trainyard.sandbox import containers
from trainyard.spec.naming import NAME

SOCKET = "/var/run/docker.sock"
CA_BUNDLE = "/etc/ssl/certs/ca-certificates.crt"  # of Debian's images and of Google's builder images
#: What a step writes for later ones, and how many bytes of it Cloud Build keeps (Results.buildStepOutputs).
OUTPUT, MAX_OUTPUT = "/builder/outputs/output", 4096
#: The image of Google's whose place a stage of scripts/trainyard/builder/Dockerfile takes.
DOCKER = "gcr.io/cloud-builders/docker"


def docker_image() -> str:
    """Return the reference of an image with Docker's and buildx's commands, built here (from the cache: 1 s)."""
    reference, folder = f"{NAME}-cloud-builder:docker", settings.PACKAGE / "builder"
    bundle = settings.ca_bundle()
    ENGINE.buildx(
        "build", f"--builder={ENGINE.docker_context}", "--quiet", "--load", "--provenance=false",
        "--target=docker", f"--tag={reference}",
        f"--build-arg=BASE={base_image.resolve(CONTEXT, 'debian-13').reference}",
        f"--label={OWNED}=cloudbuild", *([f"--secret=id=ca,src={bundle}"] if bundle else []),
        f"--file={folder / 'Dockerfile'}", str(folder),
    )  # fmt: skip
    return reference


def substituted(node: Any, values: Mapping[str, str]) -> Any:
    """Return a part of a build with ``$NAME`` and ``${NAME}`` replaced, and ``$$`` made ``$``; others are empty."""
    if isinstance(node, dict):
        return {key: substituted(entry, values) for key, entry in node.items()}
    if isinstance(node, list):
        return [substituted(entry, values) for entry in node]
    if not isinstance(node, str):
        return node
    pattern = r"\$(\$)|\$([A-Z_][A-Z0-9_]*)|\$\{([A-Z_][A-Z0-9_]*)\}"
    return re.sub(pattern, lambda match: match[1] or values.get(match[2] or match[3], ""), node)


def values_of(build: Mapping[str, Any], built_in: Mapping[str, str]) -> dict[str, str]:
    """Return the substitutions of a build; with dynamicSubstitutions, they may refer to each other."""
    values = {**built_in, **(build.get("substitutions") or {})}
    if (build.get("options") or {}).get("dynamicSubstitutions"):
        for _ in values:  # as deep as a chain of all of them
            values = {name: substituted(value, values) for name, value in values.items()}
    return values


@dataclass
class Outcome:
    """The result of a step; times in seconds since 1970, 0 if it did not start or end."""

    status: str = "QUEUED"
    started: float = 0.0
    ended: float = 0.0
    output: bytes = b""


@dataclass
class Result:
    """The result of a build: SUCCESS, FAILURE, CANCELLED or INTERNAL_ERROR, and the digests of the pushed images."""

    status: str = "SUCCESS"
    detail: str = ""
    images: dict[str, str] = field(default_factory=dict)


class Runner:
    """One run of a build. :meth:`run` may be called once; :meth:`cancel` at any time, from any thread."""

    def __init__(
        self, build: Mapping[str, Any], built_in: Mapping[str, str], source: BinaryIO | None,
        write: Callable[[str], None], push_to: str | None,
    ) -> None:  # fmt: skip
        """
        Args:
            build: the API's resource.
            source: a tar archive that is extracted to /workspace.
            write: called with every line of the log, from several threads.
            push_to: host[:port] that replaces the registry's host when images are pushed.
        """
        values = values_of(build, built_in)
        self.steps: list[dict[str, Any]] = substituted(build["steps"], values)
        self.images: list[str] = substituted(build.get("images") or [], values)
        self.environment: list[str] = substituted((build.get("options") or {}).get("env") or [], values)
        self.outcomes = [Outcome() for _ in self.steps]
        self._source, self._write, self._push_to = source, write, push_to
        self._cancelled, self._failed = threading.Event(), threading.Event()
        self._running: dict[int, Container] = {}

    def cancel(self) -> None:
        """Start no further steps and kill those that are running."""
        self._cancelled.set()
        self._end()

    def _end(self) -> None:
        for container in list(self._running.values()):
            containers.signal(container)

    def run(self) -> Result:
        """Run the steps, push the images, and remove the containers, the volumes and the network."""
        result = Result()
        with containers.Sandbox(ENGINE, "cloudbuild") as sandbox:
            mounts = [Mount(path, sandbox.volume(path.rpartition("/")[2])) for path in ("/workspace", "/builder/home")]
            if self._source:
                copier = sandbox.create(self._image(self.steps[0]["name"])[0], ["true"], mounts=mounts)
                copier.put_archive("/workspace", self._source)
            failed = self._run_graph(lambda number: self._step(number, sandbox, mounts))
        if self._cancelled.is_set():
            result.status, result.detail = "CANCELLED", "the build was cancelled"
        elif failed:
            result.status, result.detail = "FAILURE", failed
        else:
            self._push(result)
        return result

    def _run_graph(self, run: Callable[[int], str]) -> str:
        """Start every step when those that it waits for have passed; return the line about the first failure."""
        numbers = {step.get("id"): number for number, step in enumerate(self.steps)}
        waiting = {
            number: {numbers[name] for name in step["waitFor"] if name != "-"} if step.get("waitFor") else
            set(range(number)) for number, step in enumerate(self.steps)
        }  # fmt: skip
        passed: set[int] = set()
        running: dict[Future[str], int] = {}
        detail = ""
        with ThreadPoolExecutor(max_workers=len(self.steps)) as pool:
            while True:
                stopped = self._cancelled.is_set() or self._failed.is_set()
                for number in [] if stopped else [number for number, before in waiting.items() if before <= passed]:
                    del waiting[number]
                    running[pool.submit(run, number)] = number
                if not running:
                    return detail
                for future in wait(running, return_when=FIRST_COMPLETED).done:
                    number, line = running.pop(future), future.result()
                    if line:
                        self._failed.set()
                        self._end()
                        detail = detail or line
                    else:
                        passed.add(number)

    def _image(self, name: str) -> tuple[str, list[str] | None]:
        """Return a local image for a step, and an entrypoint that replaces the image's."""
        client = ENGINE.client
        with contextlib.suppress(docker.errors.ImageNotFound):
            client.images.get(name)
            return name, None
        try:
            client.images.pull(name, tag=None if ":" in name.rpartition("/")[2] else "latest")
        except docker.errors.APIError:
            if name != DOCKER:
                raise
            return docker_image(), ["docker"]
        return name, None

    def _step(self, number: int, sandbox: containers.Sandbox, mounts: list[Mount]) -> str:
        """Run a step; return a line, in Cloud Build's words, if it failed."""
        step, outcome = self.steps[number], self.outcomes[number]
        title = f"Step #{number}" + (f' - "{step["id"]}"' if step.get("id") else "")
        outcome.status, outcome.started = "WORKING", time.time()
        image, entrypoint = self._image(step["name"])
        entrypoint = [step["entrypoint"]] if step.get("entrypoint") else entrypoint
        files = {"builder/script": f"#!/bin/sh\n{step['script']}".encode()} if step.get("script") else {}
        bundle = settings.ca_bundle()  # needed in networks that inspect TLS
        more = [Mount(CA_BUNDLE, str(bundle.resolve()), type="bind", read_only=True)] if bundle else []
        options: dict[str, Any] = {"entrypoint": ["/builder/script"] if files else entrypoint}
        container = sandbox.create(
            image, None if files else step.get("args") or [], f"step-{number}",
            files=containers.archive(files, ["builder/outputs"], mode=0o755, folder_mode=0o755),
            working_dir=f"/workspace/{step.get('dir', '')}".rstrip("/"),
            environment=["HOME=/builder/home", "BUILDER_OUTPUT=/builder/outputs", *self.environment,
                         *step.get("env", [])],
            mounts=[*mounts, Mount(SOCKET, SOCKET, type="bind"), *more],
            **{name: value for name, value in options.items() if value},
        )  # fmt: skip
        self._running[number] = container
        try:
            self._write(f"Starting {title}")
            if not (self._cancelled.is_set() or self._failed.is_set()):
                container.start()
                for line in containers.lines(container):
                    self._write(f"{title}: {line}")
            code = int(container.wait()["StatusCode"])
            with contextlib.suppress(StepFailed):  # it has written none
                outcome.output = containers.read_file(container, OUTPUT)[:MAX_OUTPUT]
        finally:
            outcome.ended = time.time()
            del self._running[number]
            containers.remove(container)
        if self._cancelled.is_set() or self._failed.is_set():
            outcome.status = "CANCELLED"
        else:
            outcome.status = "FAILURE" if code else "SUCCESS"
        self._write(f"Finished {title}")
        if outcome.status != "FAILURE":
            return ""
        return f'build step {number} "{step["name"]}" failed: step exited with non-zero status: {code}'

    def _push(self, result: Result) -> None:
        """Push the images."""
        for name in self.images:
            host, _, path = name.partition("/")
            destination = f"{self._push_to or host}/{path}"
            repository, _, tag = destination.rpartition(":")
            self._write(f"PUSH: {name}")
            ENGINE.client.images.get(name).tag(repository, tag)
            for _ in registry.push(ENGINE, destination):
                pass
            result.images[name] = str(registry.digest_of(ENGINE, destination))
            if self._push_to:
                ENGINE.client.api.remove_image(destination, noprune=True)
