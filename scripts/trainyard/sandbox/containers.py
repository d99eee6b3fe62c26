"""Run containers in a sandbox, which is removed when it ends: after a success, a failure and Ctrl-C.

A sandbox has a network, volumes, containers, and sidecars that run fakes of Google's services (the files of
scripts/trainyard/sandbox/fakes/). Smoke tests, rehearsals and local builds of Cloud Build give it their containers.
Nothing needs a port of the host, so that all of it runs on a laptop, in CI, in Cloud Build and with a remote engine.
"""

from __future__ import annotations

import contextlib
import io
import logging
import re
import secrets
import tarfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Self

import docker.errors
import requests
from docker.models.containers import Container
from docker.models.images import Image

from trainyard import recipe as recipes
from trainyard.common import stages
from trainyard.common.docker_engine import LIMITS, OWNED, Engine, resource_labels
from trainyard.common.errors import StepFailed, UserError, one_line
from trainyard.recipe import Recipe

logger = logging.getLogger(__name__)

#: The fakes: single files that need only Python's standard library.
GOOGLE_CLOUD, STORAGE = (Path(__file__).parent / "fakes" / name for name in ("google_cloud.py", "storage.py"))

#: What a training logs of its progress.
_MEASURED = re.compile(r"\b(epoch|step|loss|accuracy)\b[\"']?\s*[:= ]\s*(\d[\d.]*)", re.IGNORECASE)

#: Colours, moves of the cursor and backspaces of a terminal, which Keras's progress bars have everywhere:
#: https://www.ecma-international.org/publications-and-standards/standards/ecma-48/
_CONTROL = re.compile(r"\x1b\[[0-?]*[ -/]*[@-~]|\x08")

#: Most bytes of a line of a container's output.
LONGEST = 1 << 20

#: Folder of a fake and its files in its container.
_FOLDER = "fakes"


class NoFile(StepFailed):
    """A container has no such file."""


class Sandbox:
    """Own a network, volumes and containers of one purpose, and remove them when the context ends.

    Their label :data:`trainyard.common.docker_engine.OWNED` has the sandbox's name as its value. What bears this label
    is removed, also containers that the sandbox's containers have started with it.

    Args:
        engine: that runs the containers.
        purpose: a word for the names.
        network: an existing network to use; if empty, the sandbox creates one.
        internal: whether its own network reaches nothing but its containers.
    Attributes:
        name: ``trainyard-<purpose>-<8 digits>``, which is also the name of the network that it creates.
    """

    def __init__(self, engine: Engine, purpose: str, *, network: str = "", internal: bool = False) -> None:
        self.name = f"trainyard-{purpose}-{secrets.token_hex(4)}"
        self._engine, self._network, self._internal = engine, network, internal
        self._labels = resource_labels(self.name)

    def __enter__(self) -> Self:
        self._engine.require()
        try:
            self.set_up()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def set_up(self) -> None:
        """Create the network. Subclasses add volumes and sidecars; what was created is removed if that fails."""
        if not self._network:
            networks = self._engine.client.networks
            networks.create(self.name, driver="bridge", internal=self._internal, labels=self._labels)

    def close(self) -> None:
        """Remove the containers, the volumes and the network."""
        remove_labelled(self._engine, f"{OWNED}={self.name}")

    def volume(self, name: str) -> str:
        """Create a volume; its name in the engine."""
        found = f"{self.name}-{name}"
        self._engine.client.volumes.create(found, labels=self._labels)
        return found

    def create(
        self,
        image: str | Image,
        command: Sequence[str] | None,
        name: str = "",
        *,
        aliases: Sequence[str] = (),
        files: bytes = b"",
        **options: Any,
    ) -> Container:
        """Create a container in the sandbox's network; the caller starts it.

        Args:
            command: None for the image's.
            name: follows the sandbox's; if empty, the engine invents one.
            aliases: further names on the network.
            files: a tar archive that is unpacked at the root.
            options: of ``docker.containers.create``; they may replace :data:`trainyard.common.docker_engine.LIMITS`.
        """
        client = self._engine.client
        memory = int(client.info().get("MemTotal") or 0) * 9 // 10  # the engine's machine keeps a tenth
        network = self._network or self.name
        if aliases:
            endpoint = client.api.create_endpoint_config(aliases=list(aliases))
            options["networking_config"] = {network: endpoint}
        container = client.containers.create(
            image,
            None if command is None else list(command),
            name=f"{self.name}-{name}" if name else None,
            network=network,
            labels=self._labels,
            **{**LIMITS, "mem_limit": memory, **options},
        )
        if files:
            container.put_archive("/", files)
        return container

    def container(self, identity: str) -> Container:
        """Return a container by its id."""
        return self._engine.client.containers.get(identity)

    def statistics(self, container: Container) -> dict[str, Any]:
        """Return what a container of the sandbox uses now."""
        statistics: dict[str, Any] = self._engine.client.api.stats(str(container.id), stream=False, one_shot=True)
        return statistics

    def sidecar(
        self,
        image: str,
        fake: Path,
        arguments: Sequence[str],
        name: str,
        *,
        files: Mapping[str, bytes] | None = None,
        **options: Any,
    ) -> Container:
        """Create a container of ``image``, which needs python3, that runs a fake.

        Args:
            fake: ``GOOGLE_CLOUD`` or ``STORAGE``.
            files: name -> content, copied into /fakes, the folder of the fake.
            options: of :meth:`create`.
        """
        copies = {fake.name: fake.read_bytes(), **(files or {})}
        entrypoint = ["python3", "-I", "-S", f"/{_FOLDER}/{fake.name}"]
        packed = archive({f"{_FOLDER}/{file}": content for file, content in copies.items()})
        return self.create(image, arguments, name, entrypoint=entrypoint, files=packed, **options)


def remove(container: Container) -> None:
    """Remove a container with its anonymous volumes before its sandbox ends, whether it runs or not."""
    with contextlib.suppress(docker.errors.APIError):  # the sandbox's end will try again
        container.remove(force=True, v=True)


def remove_labelled(
    engine: Engine, label: str, unless: Callable[[dict[str, str]], bool] = lambda _: False
) -> list[str]:
    """Remove the containers, then the volumes, then the networks with a label; their names.

    What the engine does not remove is a warning. Ctrl-C takes effect when the rest is removed.

    Args:
        label: ``name`` or ``name=value``.
        unless: called with the labels of each; what it is true of is kept.
    """
    client = engine.client
    ours: Any = {"label": label}
    removed: list[str] = []
    with contextlib.ExitStack() as undo:  # the last one first, all of them whatever one raises
        for network in client.networks.list(filters=ours):
            undo.callback(_remove, network, unless, removed)
        for volume in client.volumes.list(filters=ours):
            undo.callback(_remove, volume, unless, removed, force=True)
        for container in client.containers.list(all=True, ignore_removed=True, filters=ours):
            undo.callback(_remove, container, unless, removed, force=True, v=True)
    return removed


def _remove(resource: Any, unless: Callable[[dict[str, str]], bool], removed: list[str], **options: bool) -> None:
    if unless(resource.labels if isinstance(resource, Container) else resource.attrs.get("Labels") or {}):
        return
    try:
        resource.remove(**options)
        removed.append(str(resource.name))
    except docker.errors.NotFound:
        pass
    except docker.errors.APIError as error:
        logger.warning(
            f"{resource.name} was not removed: {error.explanation}; 'trainyard clean' removes what is not in use"
        )


def archive(
    files: Mapping[str, bytes],
    folders: Sequence[str] = (),
    links: Mapping[str, str] | None = None,
    *,
    mode: int = 0o644,
    folder_mode: int = 0o1777,
) -> bytes:
    """Pack files (name -> content), folders and symbolic links (name -> target) as a tar archive.

    By default, everyone may read the files and write to the folders.
    """
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as tar:
        for name in folders:
            entry = tarfile.TarInfo(name)
            entry.type, entry.mode = tarfile.DIRTYPE, folder_mode
            tar.addfile(entry)
        for name, target in (links or {}).items():
            entry = tarfile.TarInfo(name)
            entry.type, entry.linkname = tarfile.SYMTYPE, target
            tar.addfile(entry)
        for name, content in files.items():
            entry = tarfile.TarInfo(name)
            entry.size, entry.mode = len(content), mode
            tar.addfile(entry, io.BytesIO(content))
    return buffer.getvalue()


def read_file(container: Container, path: str) -> bytes:
    """Return the content of a file of a container, which need not run.

    Raises:
        NoFile: there is none, or it is a folder or a link, which the engine returns without what it refers to.
        StepFailed: the engine cannot read it.
    """
    try:
        pieces, _ = container.get_archive(path)
        packed = b"".join(pieces)
    except docker.errors.NotFound:
        raise NoFile(f"container {container.name} has no file {path}") from None
    except docker.errors.APIError as error:
        raise StepFailed(f"{path} of container {container.name} cannot be read: {error.explanation}") from None
    with tarfile.open(fileobj=io.BytesIO(packed)) as tar:
        entry = tar.next()
        file = tar.extractfile(entry) if entry and entry.isreg() else None
        if file is None:
            raise NoFile(f"{path} of container {container.name} is not a file")
        return file.read()


def files_of(engine: Engine, image: Image, *paths: str) -> dict[str, bytes]:
    """Return path -> content of those of the files that an image has, from a container that is never started."""
    found = {}
    with Sandbox(engine, "read", network="none") as sandbox:
        container = sandbox.create(image, ["true"])
        for path in paths:
            with contextlib.suppress(NoFile):
                found[path] = read_file(container, path)
    return found


def recipe_of(engine: Engine, image: Image, *, made_by: str) -> Recipe:
    """Return the recipe in an image.

    Args:
        made_by: the command that makes images with recipes, for messages.
    Raises:
        UserError: it has none, as it was built before images had recipes or by others, or that is damaged.
    """
    try:
        return recipes.parse(files_of(engine, image, recipes.PATH)[recipes.PATH].decode())
    except KeyError:
        raise UserError(f"{str(image.id)[:19]} has no {recipes.PATH}: run '{made_by}'") from None
    except ValueError as error:
        raise UserError(f"{str(image.id)[:19]}: its {recipes.PATH} is damaged ({error}): run '{made_by}'") from None


def output(container: Container, seconds: float | None = None, **streams: bool) -> Iterator[bytes]:
    """Yield what a container has written and writes, in pieces, until it ends or is removed.

    Args:
        seconds: after which this ends if the container has not.
        streams: ``stdout=False`` or ``stderr=False`` leaves one out.
    """
    stream = container.logs(stream=True, follow=True, **streams)
    timer = threading.Timer(seconds or 0, _close, [stream])
    timer.daemon = True
    if seconds is not None:
        timer.start()
    try:
        with contextlib.suppress(OSError):  # the connection is lost
            yield from stream
    finally:
        timer.cancel()
        _close(stream)


def _close(stream: Any) -> None:
    """Close a stream of the engine, which wakes a thread that reads from it."""
    with contextlib.suppress(AttributeError, OSError):  # it has ended, and has no socket
        stream.close()


def lines(container: Container, seconds: float | None = None, **streams: bool) -> Iterator[str]:
    """Yield the lines of :func:`output`, without their newlines; what has :data:`LONGEST` bytes and none is a line."""
    rest = b""
    for piece in output(container, seconds, **streams):
        *complete, rest = (rest + piece).split(b"\n")
        if len(rest) > LONGEST:
            complete, rest = [*complete, rest], b""
        for line in complete:
            yield line.decode(errors="replace")
    if rest:
        yield rest.decode(errors="replace")


def prints(container: Container, *texts: str) -> bool:
    """Wait until a container prints a line with one of ``texts``; False if it ends before."""
    return any(text in line for line in lines(container) for text in texts)


def lines_of(container: Container) -> list[str]:
    """Return the lines of a container's log so far; a carriage return ends one too, as in progress bars."""
    return _CONTROL.sub("", container.logs().decode(errors="replace")).splitlines()


def signal(container: Container, name: str = "SIGKILL") -> None:
    """Send a signal to a container, unless it has ended."""
    with contextlib.suppress(docker.errors.APIError, requests.exceptions.RequestException):
        container.kill(name)


def wait(container: Container, seconds: float) -> int | None:
    """Return the exit status of a container; None if it runs for more than ``seconds``."""
    try:
        return int(container.wait(timeout=max(seconds, 0.01))["StatusCode"])
    except requests.exceptions.RequestException:
        container.reload()
        return None if container.status == "running" else int(container.attrs["State"]["ExitCode"])


def watch(container: Container, seconds: float, what: str) -> int | None:
    """Return what :func:`wait` does, and report the last line that the container prints as what ``what`` does now."""
    until = time.monotonic() + seconds
    for piece in output(container, seconds):
        for line in piece.decode(errors="replace").strip().splitlines()[-1:]:
            measured = ", ".join(f"{name.lower()} {value}" for name, value in _MEASURED.findall(line))
            stages.now(f"{what}: {measured or one_line(line)}")
    return wait(container, until - time.monotonic())


def stop(container: Container, grace: float) -> tuple[int, float]:
    """End a container with SIGTERM, and with SIGKILL after ``grace`` seconds; its exit status and the seconds to it."""
    started = time.monotonic()
    signal(container, "SIGTERM")
    status = wait(container, grace)
    if status is None:
        signal(container)
        status = int(container.wait()["StatusCode"])
    return status, time.monotonic() - started
