"""A Docker engine in memory: its API on a socket, and a program ``docker`` whose ``buildx`` asks it.

``DOCKER_HOST`` names it, as it names any engine, and its program comes first on ``PATH``: commands and libraries find
it, in the process of a test and in others, and nothing of them is replaced. tests/engine_contract.py states what it has
in common with a real engine.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import re
import shutil
import socketserver
import struct
import subprocess
import sys
import tarfile
import tempfile
import threading
import urllib.parse
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any, Self

#: The program ``docker``: it sends its arguments to the engine, and prints what that answers.
_PROGRAM = """#!{python} -IS
import json, os, socket, sys
asking = json.dumps({{"words": sys.argv[1:], "environment": dict(os.environ)}}).encode()
with socket.socket(socket.AF_UNIX) as engine:
    engine.connect({address!r})
    engine.sendall(b"POST /fake/docker HTTP/1.0\\r\\nContent-Length: %d\\r\\n\\r\\n" % len(asking) + asking)
    answer = engine.makefile("rb").read()
status, out, err = json.loads(answer.partition(b"\\r\\n\\r\\n")[2])
sys.stdout.write(out)
sys.stderr.write(err)
sys.exit(status)
"""


@dataclass(frozen=True)
class Ran:
    """What a program did; if ``ends`` is false, it runs until it is killed."""

    status: int = 0
    out: bytes = b""
    err: bytes = b""
    ends: bool = True


class NoProgram(Exception):
    """An image has no such program."""


#: ``program(words, environment)``: what an image's programs do; it raises :class:`NoProgram`.
Program = Callable[[Sequence[str], Mapping[str, str]], Ran]

#: ``answer(words, environment)``: what the program ``docker`` does.
Docker = Callable[[Sequence[str], Mapping[str, str]], Ran]


def without_programs(words: Sequence[str], _environment: Mapping[str, str]) -> Ran:
    """The program of an image that has none."""
    raise NoProgram(words[0])


def on_this_host(words: Sequence[str], environment: Mapping[str, str]) -> Ran:
    """The program of an image that has those of this host; what runs for ten seconds does not end."""
    if not shutil.which(words[0]):
        raise NoProgram(words[0])
    try:
        done = subprocess.run(words, env=dict(environment), capture_output=True, timeout=10, check=False)
    except subprocess.TimeoutExpired:
        return Ran(ends=False)
    return Ran(done.returncode, done.stdout, done.stderr)


class Refusal(Exception):
    """An error of the engine: its status and its message."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


@dataclass(frozen=True)
class Raw:
    """Bytes in place of an answer, after which the connection ends; after ``seconds``."""

    text: bytes = b""
    seconds: float = 0


@dataclass
class Image:
    """An image.

    Attributes:
        layers: diff ids; ``files``: path -> content; ``saved``: what ``docker image save`` writes.
        platforms: of an index.
    """

    id: str
    tags: list[str] = field(default_factory=list)
    labels: dict[str, str] = field(default_factory=dict)
    architecture: str = "amd64"
    config: dict[str, Any] = field(default_factory=dict)
    layers: list[str] = field(default_factory=list)
    files: dict[str, bytes] = field(default_factory=dict)
    program: Program = without_programs
    repo_digests: list[str] = field(default_factory=list)
    platforms: list[str] = field(default_factory=list)
    saved: bytes = b""

    @property
    def document(self) -> dict[str, Any]:
        """What the engine says of it."""
        config = {"Labels": self.labels or None, **self.config}
        layers = {"Type": "layers", "Layers": self.layers}
        about = {"Id": self.id, "RepoTags": self.tags, "RepoDigests": self.repo_digests, "RootFS": layers}
        return about | {"Os": "linux", "Architecture": self.architecture, "Config": config}


@dataclass
class Resource:
    """A container, volume or network; ``given``: the request that created it.

    Attributes:
        files: of a container: path -> content of what is not in its image.
        status: that a container ended with; None before.
    """

    kind: str
    id: str
    name: str
    given: dict[str, Any]
    image: Image | None = None
    files: dict[str, bytes] = field(default_factory=dict)
    ran: Ran | None = None
    status: int | None = None

    @property
    def labels(self) -> dict[str, str]:
        """Its labels."""
        return self.given.get("Labels") or {}

    @property
    def state(self) -> str:
        """``created``, ``running`` or ``exited``."""
        return "created" if self.ran is None else "running" if self.status is None else "exited"


class FakeEngine:
    """An engine of a machine for amd64.

    Attributes:
        images: those it has.
        resources: containers, volumes and networks that were created and are not removed, in that order.
        removed: ``kind name`` of those that were, in that order.
        at_registries: reference -> image that can be pulled; ``pushed``: references of what was pushed.
        pulls: reference and platform of each pull, ``""`` for the engine's own.
        info: what else ``docker info`` says.
        platforms: that it runs programs for.
        builders: of ``docker buildx``: name -> what ``inspect`` prints.
        digest_at_registry: the digest of a reference; None if its registry does not answer.
        cache: id of a record of the build cache -> its size, as in ``1.9kB``.
        docker: does other calls of the program ``docker``; ``calls``: the words of each.
        requests: method and path of each request.
        prunes: how often the build cache was emptied.
    """

    def __init__(self, architecture: str = "amd64") -> None:
        self.architecture = architecture
        self.images: list[Image] = []
        self.resources: list[Resource] = []
        self.removed: list[str] = []
        self.at_registries: dict[str, Image] = {}
        self.pushed: list[str] = []
        self.push_events: Callable[[str], Iterable[dict[str, Any]]] = lambda _reference: [{"status": "Pushed"}]
        self.pulls: list[tuple[str, str]] = []
        self.info: dict[str, Any] = {"MemTotal": 10 << 30, "NCPU": 2, "DockerRootDir": "/nowhere"}
        self.info["DriverStatus"] = [["driver-type", "io.containerd.snapshotter.v1"]]
        self.version: dict[str, Any] = {}
        self.platforms = [f"linux/{architecture}"]
        self.builders: dict[str, str] = {}
        self.digest_at_registry: Callable[[str], str | None] = lambda _reference: None
        self.cache: dict[str, str] = {}
        self.docker: Docker = _unknown
        self.calls: list[list[str]] = []
        self.requests: list[str] = []
        self.prunes = 0
        self._instead: list[tuple[str, Raw | Refusal | Callable[[], Any]]] = []
        self._afterwards: list[tuple[str, Callable[[], object]]] = []
        self._changed = threading.Condition()
        self._count = 0
        self._folder = Path(tempfile.mkdtemp(prefix="engine-"))  # the path of a socket has at most 107 bytes
        self.socket = self._folder / "engine.sock"
        program = self.programs / "docker"
        program.parent.mkdir()
        program.write_text(_PROGRAM.format(python=sys.executable, address=str(self.socket)), encoding="utf-8")
        program.chmod(0o755)
        handler = type("Handler", (_Handler,), {"engine": self})
        self._server = _Server(str(self.socket), handler)

    @property
    def address(self) -> str:
        """Its ``DOCKER_HOST``."""
        return f"unix://{self.socket}"

    @property
    def programs(self) -> Path:
        """The folder with its program ``docker``."""
        return self._folder / "bin"

    def __enter__(self) -> Self:
        threading.Thread(target=self._server.serve_forever, args=(0.01,), daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()
        shutil.rmtree(self._folder, ignore_errors=True)

    def stop(self) -> None:
        """End the engine: nothing listens at its socket any more."""
        self._server.shutdown()
        self._server.server_close()
        self.socket.unlink(missing_ok=True)
        for container in self.of_kind("container"):
            self.end(container, 137)

    # What tests say

    def add(self, *tags: str, digest: str = "", **facts: Any) -> Image:
        """Add an image with these tags, which other images lose; without a ``digest``, it has another one each time."""
        self._count += 1
        image = Image(digest or f"sha256:{hashlib.sha256(str(self._count).encode()).hexdigest()}", **facts)
        image.architecture = facts.get("architecture", self.architecture)
        self.images.append(image)
        for tag in tags:
            self.tag(image, tag)
        return image

    def tag(self, image: Image, reference: str) -> None:
        """Give an image a tag, which another one loses."""
        for other in self.images:
            if _named(reference) in other.tags:
                other.tags.remove(_named(reference))
        image.tags.append(_named(reference))

    @property
    def tags(self) -> dict[str, str]:
        """Every tag -> the id of its image."""
        return {tag: image.id for image in self.images for tag in image.tags}

    def instead(self, pattern: str, answer: Raw | Refusal | Callable[[], Any]) -> None:
        """Answer requests whose method and path match ``pattern`` with ``answer``, or with what it returns."""
        self._instead.insert(0, (pattern, answer))

    def afterwards(self, pattern: str, call: Callable[[], object]) -> None:
        """Call ``call`` when requests that match were done, before they are answered."""
        self._afterwards.append((pattern, call))

    def of_kind(self, kind: str) -> list[Resource]:
        """Return the containers, volumes or networks."""
        return [resource for resource in self.resources if resource.kind == kind]

    def end(self, container: Resource, status: int) -> None:
        """Let a container end with a status."""
        with self._changed:
            if container.ran is not None and container.status is None:
                container.status = status
            self._changed.notify_all()

    # The API: https://docs.docker.com/reference/api/engine/version/v1.45/

    def image(self, name: str) -> Image:
        """Return an image by reference, digest or id."""
        for image in self.images:
            if name in (image.id, image.id.removeprefix("sha256:")) or _named(name) in image.tags:
                return image
            if "@" in name and (name in image.repo_digests or name.partition("@")[2] == image.id):
                return image
        raise Refusal(404, f"No such image: {_named(name)}")

    def resource(self, kind: str, name: str) -> Resource:
        """Return a container, volume or network by id or name."""
        for resource in self.of_kind(kind):
            if name in (resource.id, resource.name) or (len(name) >= 12 and resource.id.startswith(name)):
                return resource
        raise Refusal(404, f"No such {kind}: {name}")

    def handle(self, method: str, path: str, query: dict[str, str], body: bytes) -> Any:
        """Return the answer to a request: a document, bytes, or an iterator of pieces."""
        asked = f"{method} {path}"
        self.requests.append(f"{asked}?{urllib.parse.urlencode(query)}" if query else asked)
        for pattern, answer in self._instead:
            if re.search(pattern, self.requests[-1]):
                if isinstance(answer, Refusal):
                    raise answer
                return answer if isinstance(answer, Raw) else answer()
        for pattern, name in _ROUTES:
            if match := re.fullmatch(pattern, asked):
                given = body if name in ("_put_archive", "_docker") else json.loads(body or b"{}")
                done = getattr(self, name)(*match.groups(), query=query, given=given)
                for wanted, call in self._afterwards:
                    if re.search(wanted, self.requests[-1]):
                        call()
                return done
        raise Refusal(404, f"page not found: {asked}")

    def _ping(self, **_: Any) -> bytes:
        return b"OK"

    def _version(self, **_: Any) -> dict[str, Any]:
        return {"ApiVersion": "1.45", "Version": "26.1.5", "Arch": self.architecture, "Os": "linux", **self.version}

    def _info(self, **_: Any) -> dict[str, Any]:
        return self.info

    def _images(self, query: dict[str, str], **_: Any) -> list[dict[str, Any]]:
        wanted = _filters(query)
        return [
            {"Id": image.id, "RepoTags": image.tags, "Labels": image.labels}
            for image in self.images
            if _labelled(image.labels, wanted.get("label", ()))
            and all(_matches(image.tags, name) for name in wanted.get("reference", ()))
        ]

    def _image(self, name: str, **_: Any) -> dict[str, Any]:
        return self.image(name).document

    def _tag(self, name: str, query: dict[str, str], **_: Any) -> None:
        tag = query.get("tag")
        self.tag(self.image(name), f"{query['repo']}:{tag}" if tag else query["repo"])

    def _untag(self, name: str, **_: Any) -> list[dict[str, str]]:
        image = self.image(name)
        tags = [_named(name)] if _named(name) in image.tags else list(image.tags)
        for tag in tags:
            image.tags.remove(tag)
        if not image.tags:
            self.images.remove(image)
        return [{"Untagged": tag} for tag in tags]

    def _pull(self, query: dict[str, str], **_: Any) -> Iterator[bytes]:
        tag = query.get("tag", "latest")
        reference = f"{query['fromImage']}{'@' if ':' in tag else ':'}{tag}"
        self.pulls.append((reference, query.get("platform", "")))
        image = self.at_registries.get(reference) or self.at_registries.get(_named(reference))
        if image is None:
            raise Refusal(404, f"manifest for {reference} not found")
        wanted = query.get("platform") or f"linux/{self.architecture}"
        if wanted not in (image.platforms or [f"linux/{image.architecture}"]):
            return _lines([{"status": "Pulling"}, {"error": f"no matching manifest for {wanted}"}])
        self.images.append(image)
        if "@" not in reference:
            self.tag(image, reference)
        return _lines([{"status": "Pulling"}, {"status": f"Digest: {image.id}"}])

    def _push(self, name: str, query: dict[str, str], **_: Any) -> Iterator[bytes]:
        reference = f"{name}:{query.get('tag') or 'latest'}"
        self.image(reference)
        self.pushed.append(reference)
        return _lines(self.push_events(reference))

    def _save(self, name: str, **_: Any) -> Iterator[bytes]:
        return iter([self.image(name).saved])

    def _create(self, query: dict[str, str], given: dict[str, Any], **_: Any) -> dict[str, Any]:
        image = self.image(given["Image"])
        name = query.get("name", "")
        if name and any(container.name == name for container in self.of_kind("container")):
            raise Refusal(409, f'Conflict. The container name "/{name}" is already in use')
        given["platform"] = query.get("platform")
        return {"Id": self._make("container", name, given, image).id, "Warnings": []}

    def _make(self, kind: str, name: str, given: dict[str, Any], image: Image | None = None) -> Resource:
        self._count += 1
        identity = hashlib.sha256(f"{kind} {self._count}".encode()).hexdigest()
        made = Resource(kind, name if kind == "volume" else identity, name or f"unnamed-{self._count}", given, image)
        self.resources.append(made)
        return made

    def _containers(self, query: dict[str, str], **_: Any) -> list[dict[str, Any]]:
        every = query.get("all", "0") in ("1", "True", "true")
        return [
            {"Id": one.id, "Names": [f"/{one.name}"], "Labels": one.labels, "State": one.state}
            for one in self._listed("container", query)
            if every or one.state == "running"
        ]

    def _listed(self, kind: str, query: dict[str, str]) -> list[Resource]:
        wanted = _filters(query).get("label", ())
        return [resource for resource in self.of_kind(kind) if _labelled(resource.labels, wanted)]

    def _container(self, name: str, **_: Any) -> dict[str, Any]:
        container = self.resource("container", name)
        state = {"Status": container.state, "Running": container.state == "running", "Pid": 0, "OOMKilled": False}
        config = {name: value for name, value in container.given.items() if name != "HostConfig"}
        about = {"Id": container.id, "Name": f"/{container.name}", "Config": {"Tty": False, **config}}
        host = container.given.get("HostConfig") or {}
        image = container.image.id if container.image else ""
        return about | {"State": state | {"ExitCode": container.status or 0}, "HostConfig": host, "Image": image}

    def _start(self, name: str, **_: Any) -> None:
        container = self.resource("container", name)
        assert container.image is not None
        config = container.image.config
        entrypoint, command = container.given.get("Entrypoint"), container.given.get("Cmd")
        words = [*(entrypoint or config.get("Entrypoint") or [])]
        words += command or ([] if entrypoint else config.get("Cmd") or [])
        variables = [*(config.get("Env") or []), *(container.given.get("Env") or [])]
        environment = {"PATH": os.defpath} | dict(line.partition("=")[::2] for line in variables)
        try:
            container.ran = container.image.program(words, environment)
        except NoProgram as missing:
            container.ran, container.status = Ran(127), 127
            raise Refusal(400, f'exec: "{missing}": executable file not found in $PATH: unknown') from None
        if container.ran.ends:
            self.end(container, container.ran.status)

    def _wait(self, name: str, **_: Any) -> dict[str, int]:
        container = self.resource("container", name)
        with self._changed:
            self._changed.wait_for(lambda: container.state != "running", timeout=60)
        if container not in self.resources:
            raise Refusal(404, f"No such container: {name}")
        return {"StatusCode": container.status or 0}

    def _kill(self, name: str, **_: Any) -> None:
        container = self.resource("container", name)
        if container.state != "running":
            raise Refusal(409, f"cannot kill container: {name}: container {container.id} is not running")
        self.end(container, 137)

    def _logs(self, name: str, query: dict[str, str], **_: Any) -> Iterator[bytes]:
        container = self.resource("container", name)
        ran = container.ran or Ran()
        for number, stream, text in ((1, "stdout", ran.out), (2, "stderr", ran.err)):
            if query.get(stream) in ("1", "True") and text:
                yield struct.pack(">BxxxL", number, len(text)) + text
        if query.get("follow") in ("1", "True"):
            self._wait(name)

    def _remove(self, name: str, query: dict[str, str], **_: Any) -> None:
        container = self.resource("container", name)
        if container.state == "running" and query.get("force") not in ("1", "True"):
            raise Refusal(409, f'cannot remove container "/{container.name}": container is running')
        self.end(container, 137)
        self._drop(container)

    def _drop(self, resource: Resource) -> None:
        self.resources.remove(resource)
        self.removed.append(f"{resource.kind} {resource.name}")

    def _put_archive(self, name: str, query: dict[str, str], given: bytes, **_: Any) -> None:
        container = self.resource("container", name)
        with tarfile.open(fileobj=io.BytesIO(given)) as tar:
            for entry in tar:
                file = tar.extractfile(entry) if entry.isreg() else None
                if file:
                    container.files[f"{query['path'].rstrip('/')}/{entry.name}"] = file.read()

    def _get_archive(self, name: str, query: dict[str, str], **_: Any) -> bytes:
        container = self.resource("container", name)
        files = (container.image.files if container.image else {}) | container.files
        path = query["path"]
        if path not in files:
            raise Refusal(404, f"Could not find the file {path} in container {name}")
        buffer = io.BytesIO()
        with tarfile.open(fileobj=buffer, mode="w") as tar:
            entry = tarfile.TarInfo(Path(path).name)
            entry.size = len(files[path])
            tar.addfile(entry, io.BytesIO(files[path]))
        return buffer.getvalue()

    def _commit(self, query: dict[str, str], **_: Any) -> dict[str, str]:
        container = self.resource("container", query["container"])
        made = self.add(f"{query['repo']}:{query.get('tag') or 'latest'}", architecture=self.architecture)
        made.files = (container.image.files if container.image else {}) | container.files
        made.config = {"changes": query.get("changes", "")}
        return {"Id": made.id}

    def _create_volume(self, given: dict[str, Any], **_: Any) -> dict[str, Any]:
        made = self._make("volume", given["Name"], given)
        return {"Name": made.name, "Labels": made.labels}

    def _volumes(self, query: dict[str, str], **_: Any) -> dict[str, Any]:
        listed = [{"Name": one.name, "Labels": one.labels} for one in self._listed("volume", query)]
        return {"Volumes": listed, "Warnings": None}

    def _volume(self, name: str, **_: Any) -> dict[str, Any]:
        volume = self.resource("volume", name)
        return {"Name": volume.name, "Labels": volume.labels}

    def _create_network(self, given: dict[str, Any], **_: Any) -> dict[str, Any]:
        return {"Id": self._make("network", given["Name"], given).id, "Warning": ""}

    def _networks(self, query: dict[str, str], **_: Any) -> list[dict[str, Any]]:
        return [self._network(one.id) for one in self._listed("network", query)]

    def _network(self, name: str, **_: Any) -> dict[str, Any]:
        network = self.resource("network", name)
        return {"Id": network.id, "Name": network.name, "Labels": network.labels}

    def _remove_network(self, name: str, **_: Any) -> None:
        self._drop(self.resource("network", name))

    def _remove_volume(self, name: str, **_: Any) -> None:
        self._drop(self.resource("volume", name))

    def _prune(self, **_: Any) -> dict[str, Any]:
        self.prunes += 1
        self.cache.clear()
        return {"CachesDeleted": None, "SpaceReclaimed": 0}

    def _docker(self, given: bytes, **_: Any) -> list[Any]:
        asked = json.loads(given)
        self.calls.append(asked["words"])
        done = self._buildx(asked["words"], asked["environment"]) or self.docker(asked["words"], asked["environment"])
        return [done.status, done.out.decode(), done.err.decode()]

    def _buildx(self, words: Sequence[str], environment: Mapping[str, str]) -> Ran | None:
        """Do what buildx 0.13 does with the builders and the cache."""
        named = [word.partition("=")[2] for word in words if word.startswith("--builder=")]
        name = (named or [environment.get("BUILDX_BUILDER") or "default"])[0]
        if words[:3] == ["buildx", "imagetools", "inspect"]:
            digest = self.digest_at_registry(words[-1])
            failed = Ran(1, err=f"ERROR: {words[-1]}: failed to do request: no such host\n".encode())
            return Ran(out=f'"{digest}"\n'.encode()) if digest else failed
        if words[:2] == ["buildx", "ls"]:
            names = "".join(f"{one}  docker\n \\_ {one}  \\_ {one}  running\n" for one in [*self.builders, "default"])
            return Ran(out=f"NAME/NODE  DRIVER/ENDPOINT  STATUS\n{names}".encode())
        asked = words[:2] in (["buildx", "inspect"], ["buildx", "du"], ["buildx", "prune"])
        if asked and name not in self.builders and name != "default":
            return Ran(1, err=f'ERROR: no builder "{name}" found\n'.encode())
        if words[:2] == ["buildx", "inspect"]:
            own = "Name:   default\nDriver: docker\n\nNodes:\nName:      default\nStatus:    running\n"
            own += f"Platforms: {', '.join(self.platforms)}\n" if self.platforms else ""
            return Ran(out=self.builders.get(name, own).encode())
        if words[:2] == ["buildx", "du"]:
            rows = "".join(f"{one}\ttrue\t{size}\t2 days ago\n" for one, size in self.cache.items())
            return Ran(out=f"ID\tRECLAIMABLE\tSIZE\tLAST ACCESSED\n{rows}Reclaimable:\t0B\n".encode())
        if words[:2] == ["buildx", "prune"]:
            for identity in [word.removeprefix("--filter=id=") for word in words]:
                self.cache.pop(identity, None)
            return Ran()
        return None


def _unknown(words: Sequence[str], _environment: Mapping[str, str]) -> Ran:
    return Ran(1, err=f"docker: the test's engine does not know '{' '.join(words)}'\n".encode())


_ROUTES = (
    ("GET /_ping", "_ping"),
    ("HEAD /_ping", "_ping"),
    ("GET /version", "_version"),
    ("GET /info", "_info"),
    ("GET /images/json", "_images"),
    ("POST /images/create", "_pull"),
    ("GET /images/(.+)/json", "_image"),
    ("GET /images/(.+)/get", "_save"),
    ("POST /images/(.+)/tag", "_tag"),
    ("POST /images/(.+)/push", "_push"),
    ("DELETE /images/(.+)", "_untag"),
    ("GET /containers/json", "_containers"),
    ("POST /containers/create", "_create"),
    ("GET /containers/([^/]+)/json", "_container"),
    ("POST /containers/([^/]+)/start", "_start"),
    ("POST /containers/([^/]+)/wait", "_wait"),
    ("POST /containers/([^/]+)/kill", "_kill"),
    ("GET /containers/([^/]+)/logs", "_logs"),
    ("PUT /containers/([^/]+)/archive", "_put_archive"),
    ("GET /containers/([^/]+)/archive", "_get_archive"),
    ("DELETE /containers/([^/]+)", "_remove"),
    ("POST /commit", "_commit"),
    ("POST /volumes/create", "_create_volume"),
    ("GET /volumes", "_volumes"),
    ("GET /volumes/([^/]+)", "_volume"),
    ("DELETE /volumes/([^/]+)", "_remove_volume"),
    ("POST /networks/create", "_create_network"),
    ("GET /networks", "_networks"),
    ("GET /networks/([^/]+)", "_network"),
    ("DELETE /networks/([^/]+)", "_remove_network"),
    ("POST /build/prune", "_prune"),
    ("POST /fake/docker", "_docker"),
)


def _named(reference: str) -> str:
    """Return a reference as the engine lists it: without Docker Hub's name, with a tag."""
    name = reference.removeprefix("docker.io/").removeprefix("library/")
    return name if "@" in name or ":" in name.rpartition("/")[2] else f"{name}:latest"


def _filters(query: dict[str, str]) -> dict[str, list[str]]:
    given: dict[str, Any] = json.loads(query.get("filters") or "{}")
    return {name: list(values) for name, values in given.items()}


def _labelled(labels: Mapping[str, str], wanted: Iterable[str]) -> bool:
    pairs = [(name, value, bool(has)) for name, has, value in (one.partition("=") for one in wanted)]
    return all(name in labels and (not has or labels[name] == value) for name, value, has in pairs)


def _matches(tags: Iterable[str], name: str) -> bool:
    return any(tag == name or tag.rpartition(":")[0] == name for tag in tags)


def _lines(documents: Iterable[dict[str, Any]]) -> Iterator[bytes]:
    return (json.dumps(document).encode() + b"\r\n" for document in documents)


class _Server(socketserver.ThreadingUnixStreamServer):
    daemon_threads = True
    request_queue_size = 64

    def handle_error(self, *_: Any) -> None:
        """Print nothing of a client that has gone."""
        if not isinstance(sys.exception(), ConnectionError):
            super().handle_error(*_)


class _Handler(BaseHTTPRequestHandler):
    engine: FakeEngine
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = False

    def address_string(self) -> str:
        return "a client"

    def log_message(self, *_: Any) -> None:
        """Print nothing."""

    def _do(self) -> None:
        address = urllib.parse.urlsplit(self.path)
        path = re.sub(r"^/v\d[\d.]*(?=/)", "", urllib.parse.unquote(address.path))
        query = dict(urllib.parse.parse_qsl(address.query))
        if self.headers.get("Transfer-Encoding") == "chunked":
            body = b"".join(self._chunks())
        else:
            body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        try:
            answer = self.engine.handle(self.command, path, query, body)
        except Refusal as error:
            self._answer(error.status, json.dumps({"message": str(error)}).encode())
            return
        if isinstance(answer, Raw):
            threading.Event().wait(answer.seconds)
            self.wfile.write(answer.text)
            self.close_connection = True
        elif isinstance(answer, bytes):
            self._answer(200, answer, "application/x-tar")
        elif answer is None:
            self._answer(201 if path.endswith("/tag") else 204, b"")
        elif isinstance(answer, dict | list):
            self._answer(201 if path.endswith("/create") else 200, json.dumps(answer).encode())
        else:
            self.send_response(200)
            self.send_header("Transfer-Encoding", "chunked")
            self.end_headers()
            for piece in answer:
                self.wfile.write(b"%x\r\n%s\r\n" % (len(piece), piece))
            self.wfile.write(b"0\r\n\r\n")

    do_GET = do_POST = do_PUT = do_DELETE = do_HEAD = _do

    def _chunks(self) -> Iterator[bytes]:
        while size := int(self.rfile.readline(), 16):
            yield self.rfile.read(size)
            self.rfile.readline()
        self.rfile.readline()

    def _answer(self, status: int, body: bytes, kind: str = "application/json") -> None:
        self.send_response(status)
        self.send_header("Content-Type", kind)
        if kind == "application/x-tar":
            self.send_header("X-Docker-Container-Path-Stat", "e30=")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)
