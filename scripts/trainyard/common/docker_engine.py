"""Talk to the Docker engine: its client, local images and the build cache.

The docker package is imported by what uses it: every command imports this module, also for its ``--help``.
"""

from __future__ import annotations

import contextlib
import os
import platform
import re
import subprocess
import sys
import time
from collections.abc import Callable, Collection, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any

from trainyard.common import settings
from trainyard.common.errors import EngineFailed, StepFailed, UserError
from trainyard.common.settings import ROOT

if TYPE_CHECKING:
    from docker import DockerClient
    from docker.models.images import Image

#: Label on every container, volume and network that a command or a test creates: clean-up removes nothing else.
OWNED = "io.trainyard.owned"

#: Label with the id of the process that created it: what a running process uses is not cleaned up.
OWNER = f"{OWNED}.by"

#: Errors of BuildKit in Docker 26.1 that do not recur when the build is retried. The first: two builds share a step,
#: and the one that requested it has ended, so that its session, with secrets and contexts, is gone. The second: the
#: engine garbage-collected a snapshot that the build had just found, after other images were removed. The third:
#: it garbage-collected a blob. The fourth: equal steps of two builds were merged, and the build that had them first has
#: ended: https://github.com/moby/buildkit/issues/2303
_TRANSIENT_ERRORS = re.compile(
    r"no active sessions|failed to prepare extraction snapshot .*: not found|failed to solve: not found$"
    r"|inconsistent graph state",
    re.MULTILINE,
)

#: Seconds before a build that failed with a transient error is started again, so that the other build gets further.
_PAUSES = (1, 5)

#: Limits of every container: processes and threads, of which a training on many cores has thousands, and its log on the
#: engine's disk, of which the end is kept.
LIMITS = {"pids_limit": 16_384, "log_config": {"type": "json-file", "config": {"max-size": "64m"}}}

#: Options of a container that looks into an image, whatever the programs of the image do.
LOOKING: dict[str, Any] = {"network_mode": "none", "read_only": True, "mem_limit": 4 << 30, **LIMITS}

#: Seconds until a program that looks into an image is given up: 5 for 2 GB of packages on 2 cores (2026-11).
LOOK_SECONDS = 300

#: Seconds to wait for a registry's answer; one that answers did so in under 2 s, a closed network refuses at once.
REGISTRY_TIMEOUT = 20

#: The line in which scripts/install-engine.sh or scripts/setup-emulation.sh says why it ends.
_SCRIPT_ERROR = re.compile(r"(?:engine|emulation): error: (.*)")


def resource_labels(purpose: str) -> dict[str, str]:
    """Return the labels of a container, volume or network that this process creates for ``purpose``."""
    return {OWNED: purpose, OWNER: owner_name(os.getpid())}


def owner_name(process: int) -> str:
    """Return the value of :data:`OWNER` of a process of this machine: several machines may use one engine."""
    return f"{process}.{platform.node()}"


def in_use(labels: dict[str, str] | None) -> bool:
    """Return whether the process that created the resource with these labels is running, and is not this one.

    Whether one of another machine runs is not known: it may.
    """
    owner, _, machine = (labels or {}).get(OWNER, "").partition(".")
    if not owner.isdigit() or (int(owner) == os.getpid() and machine == platform.node()):
        return False
    try:
        if machine == platform.node():
            os.kill(int(owner), 0)
    except PermissionError:  # it is another user's
        return True
    except (OSError, OverflowError):
        return False
    return True


def cannot_run(what: str) -> str:
    """Return what to do about an engine that cannot run ``what``, for messages."""
    return (
        f"the engine runs no {what}: run 'trainyard setup --emulation' to emulate them, or use an engine on such a "
        "machine"
    )


def set_up(*, emulation: bool = False) -> None:
    """Start the engine that is installed, or install one on a Debian or Ubuntu host, as root; nothing if one answers.

    Args:
        emulation: also let this host's kernel run programs for arm64.
    Raises:
        UserError: that failed; the script's last line says why.
    """
    _run_script("install-engine.sh", "trainyard setup")
    if emulation:
        _run_script("setup-emulation.sh", "trainyard setup --emulation")


def _run_script(name: str, setup: str, *arguments: str) -> None:
    """Run a script of scripts/, which names the command ``setup`` in what it prints, or raise :class:`UserError`."""
    command = [str(ROOT / "scripts" / name), *arguments]
    environment = settings.environment(TRAINYARD_SETUP=setup)
    script = subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True, errors="replace")
    reason = f"{name} failed"
    for line in script.stderr or ():
        if error := _SCRIPT_ERROR.match(line):
            reason = error[1]
        else:
            sys.stderr.write(line)
    if script.wait():
        raise UserError(reason)


def is_transient(output: str) -> bool:
    """Return whether a build failed for a reason of the engine, which says nothing of the image."""
    return bool(_TRANSIENT_ERRORS.search(output))


def retry_transient(run: Callable[[], subprocess.CompletedProcess[str]]) -> subprocess.CompletedProcess[str]:
    """Return the result of ``run``, which runs a build; after a transient error, wait and call it again."""
    ended = run()
    for pause in _PAUSES:
        if not ended.returncode or not is_transient(ended.stderr or ""):
            break
        time.sleep(pause)
        ended = run()
    return ended


class Engine:
    """Give a command its Docker engine: that of the Docker context, to which the first use connects.

    Args:
        seconds: until an answer is given up. To begin with, an engine gets a tenth of that.
        look_seconds: until a program that looks into an image is given up (:meth:`run`).
    """

    def __init__(self, *, seconds: int = 600, look_seconds: int = LOOK_SECONDS) -> None:
        self._seconds, self._look_seconds = seconds, look_seconds
        self._connected: DockerClient | None = None
        self._inspected: dict[str, str] = {}
        self._at_registries: dict[tuple[str, str], tuple[str | None, str]] = {}

    @property
    def docker_context(self) -> str:
        """Return the name of its Docker context, in which buildx's builder of that name builds.

        https://docs.docker.com/engine/manage-resources/contexts/
        """
        from docker.context.config import get_current_context_name

        given = "default" if settings.standard_variable("DOCKER_HOST") else settings.standard_variable("DOCKER_CONTEXT")
        return given or get_current_context_name() or "default"

    def existing_client(self) -> DockerClient | None:
        """Return a client of the engine; None if none is running.

        Raises:
            EngineFailed: what answers at its address is no engine, or one that fails.
        """
        if self._connected is None:
            self._connected = self._connect()
        return self._connected

    def _connect(self) -> DockerClient | None:
        import docker.errors
        from docker.context import ContextAPI
        from docker.utils.config import find_config_file

        from trainyard.common.engine_client import Client, Lost

        # The client itself would take another engine; without a file, it looks for contexts in the current folder.
        name = self.docker_context
        if name != "default" and not (find_config_file() and ContextAPI.get_context(name)):
            return None
        try:
            client = Client.from_env(timeout=max(1, self._seconds // 10))
            client.ping()
        except Lost as error:
            if not error.absent:
                raise
            return None
        except docker.errors.DockerException as error:  # of the first request
            if isinstance(error.__cause__, EngineFailed) and not getattr(error.__cause__, "absent", False):
                raise error.__cause__ from None
            return None
        except OSError:
            return None
        client.api.timeout = self._seconds
        return client

    @property
    def client(self) -> DockerClient:
        """Return a client of the engine.

        Raises:
            UserError: none is running; the line names the command that starts or installs one.
            EngineFailed: see :meth:`existing_client`.
        """
        if client := self.existing_client():
            return client
        _run_script("install-engine.sh", "trainyard setup", "--check")
        raise UserError(
            "'docker' reaches an engine that is not at DOCKER_HOST: set it as 'docker context ls' prints it"
        )

    @property
    def remote(self) -> str:
        """Return its address if that is of another machine, whose folders containers would get; else empty."""
        local = re.match(r"(unix|npipe):|\w+://(localhost|127\.|\[::1\])", self.address)
        return "" if local else self.address

    @property
    def address(self) -> str:
        """Return its address: ``unix:///var/run/docker.sock``."""
        return str(getattr(self.client.api, "address"))  # noqa: B009  of engine_client, which is imported late

    def require_folder(self, image: str, folder: str) -> None:
        """Raise a :class:`UserError` if the engine is on another machine, where containers get no such folder."""
        import docker.errors
        from docker.types import Mount

        if not self.remote:
            return
        mount = Mount("/mnt", folder, type="bind")
        try:
            self.client.containers.create(image, ["true"], mounts=[mount], labels=resource_labels("folder")).remove()
        except docker.errors.APIError:
            raise UserError(
                f"the engine at {self.remote} is on another machine, which has no folder {folder}: use an engine on "
                "this machine ('docker context ls'), or what is in the image"
            ) from None

    def require(self) -> None:
        """Raise what :attr:`client` raises if no engine is running."""
        self.client.ping()

    def set_up_in_checkout(self) -> None:
        """Call :func:`set_up` where no engine answers, if this runs from a checkout."""
        if settings.CHECKOUT and not self.existing_client():
            set_up()

    @cached_property
    def stores_in_containerd(self) -> bool:
        """Return whether the engine keeps images in containerd, which zstd layers and stable digests need."""
        return "containerd.snapshotter" in str(self.client.info().get("DriverStatus"))

    @cached_property
    def architecture(self) -> str:
        """Return the architecture of the engine's machine, maybe another one than this host's: ``amd64``."""
        return str(self.client.version().get("Arch") or "amd64")

    def architecture_of(self, reference: str) -> str:
        """Return the architecture of a local image; the engine's if it is unknown."""
        return str(self.client.images.get(reference).attrs.get("Architecture") or self.architecture)

    def can_run(self, platform: str) -> bool:
        """Return whether it runs programs for ``linux/arm64``, natively or emulated; True if it does not say."""
        if platform == f"linux/{self.architecture}":
            return True
        # `inspect` asks the engine, which tries a program of each architecture:
        # https://github.com/moby/buildkit/blob/v0.13.2/util/archutil/detect.go
        inspected = self.buildx("inspect", "--bootstrap", f"--builder={self.docker_context}")
        platforms = re.search(r"(?m)^Platforms:\s+(.*)$", inspected)
        return platforms is None or platform in re.split(r",\s*", platforms[1].replace("*", ""))

    def emulated_environment(self, architecture: str) -> dict[str, str]:
        """Return variables of a container whose programs the engine's machine emulates; none for its own architecture.

        QEMU's default processor has pointer authentication and SVE, which are slow to emulate: `import tensorflow`
        takes 12 s with this one, and 50 s with the default (2026-11).
        https://www.qemu.org/docs/master/system/arm/cpu-features.html
        """
        return {"QEMU_CPU": "neoverse-n1"} if architecture == "arm64" != self.architecture else {}

    def require_emulation(self, platform: str) -> None:
        """Raise a :class:`UserError` if it does not run programs for ``linux/arm64``."""
        if not self.can_run(platform):
            raise UserError(cannot_run(f"programs for {platform}"))

    def find(self, reference: str) -> Image | None:
        """Return a local image; None if there is no such image."""
        return _image(self.client, reference)

    def image(self, reference: str, *, made_by: str) -> Image:
        """Return a local image, or raise a :class:`UserError` that names the command that makes it, ``made_by``."""
        if image := self.find(reference):
            return image
        raise UserError(f"no local image {reference}: run '{made_by}' first")

    def existing_image(self, reference: str) -> Image | None:
        """Return a local image; None if there is no such image, or no engine is running."""
        client = self.existing_client()
        return _image(client, reference) if client else None

    def images(self, name: str | None = None, *, label: str | None = None) -> list[Image]:
        """Return the engine's images, without those that another process removes meanwhile.

        Args:
            name: of a repository, or with a tag; None for all.
            label: that they have, as in ``io.trainyard.target=xla``.
        """
        listed = self.client.api.images(name, filters={"label": [label]} if label else None)
        return [image for entry in listed if (image := self.find(entry["Id"]))]

    def digest_of(self, reference: str) -> str | None:
        """Return the digest of a local image; None if there is no such image."""
        image = self.find(reference)
        return str(image.id) if image else None

    def digest(self, reference: str, *, made_by: str = "trainyard image") -> str:
        """Return ``sha256:...`` of a local image: with the containerd store, the digest that it has at registries."""
        return str(self.image(reference, made_by=made_by).id)

    def run(
        self, reference: str, program: str, words: Sequence[str], purpose: str, **options: Any
    ) -> tuple[int, bytes, bytes]:
        """Return the exit status, stdout and stderr (64 MB at most) of a program in a local image, whatever it does.

        Args:
            purpose: see :func:`resource_labels`; ``options``: of ``docker.containers.create``, besides :data:`LOOKING`.
        Raises:
            docker.errors.APIError: the image has no such program.
            StepFailed: it does not end.
        """
        import docker.errors

        from trainyard.common.engine_client import NoAnswer

        container = self.client.containers.create(
            reference, list(words), entrypoint=[program], labels=resource_labels(purpose), **LOOKING, **options
        )
        try:
            container.start()
            try:
                status = int(container.wait(timeout=self._look_seconds)["StatusCode"])
                return status, container.logs(stderr=False), container.logs(stdout=False)
            except (NoAnswer, docker.errors.NotFound):
                raise StepFailed(
                    f"{reference}: its {program} does not end: given up after {self._look_seconds} s"
                ) from None
        finally:
            with contextlib.suppress(docker.errors.NotFound):
                container.remove(force=True, v=True)

    def pull(self, reference: str, platform: str | None = None) -> Image:
        """Return a local image, pulled from its registry if it does not exist.

        Args:
            platform: of the image, ``linux/arm64``; None: the engine's, if the image has it.
        Raises:
            UserError: it cannot be pulled; the line ends with the engine's error.
        """
        import docker.errors
        from docker.utils import parse_repository_tag

        image = self.find(reference)
        if image and (platform is None or f"linux/{image.attrs.get('Architecture')}" == platform):
            return image
        repository, tag = parse_repository_tag(reference)
        reason = ""
        try:
            # ImageCollection.pull() ignores errors that the engine reports after it has begun to answer.
            for line in self.client.api.pull(
                repository, tag=tag or "latest", platform=platform, stream=True, decode=True
            ):
                reason = line.get("error") or reason
            if not reason:
                return self.client.images.get(reference)
        except docker.errors.APIError as error:
            reason = str(error.explanation)
        raise UserError(f"no local image {reference}, and it cannot be pulled: {reason}")

    def untag(self, reference: str) -> None:
        """Remove a tag of a local image, and the image if that was its last tag; nothing if there is no such tag."""
        import docker.errors

        with contextlib.suppress(docker.errors.ImageNotFound):
            self.client.images.remove(reference, force=True)

    def cached(self, *, builder: str = "") -> dict[str, str]:
        """Return the records of a builder's cache, the engine's by default: id -> size, as in ``1.9kB``."""
        # Not the API's disk usage, which fails while images are created and removed (404, 500; Docker 26).
        used = self.buildx("du", f"--builder={builder or self.docker_context}")
        return dict(re.findall(r"(?m)^([0-9a-z]{25})\*?\s+\w+\s+([\d.]+[kMGT]?B)", used))

    def drop_cached(self, records: Collection[str], *, builder: str = "") -> None:
        """Remove those records of a builder's cache that no running build, image or other record uses."""
        left = set(records) & self.cached(builder=builder).keys()
        while left:
            for identity in left:
                name = builder or self.docker_context
                self.buildx("prune", f"--builder={name}", "--force", "--all", f"--filter=id={identity}")
            before, left = left, left & self.cached(builder=builder).keys()
            if left == before:
                return

    def inspect_builder(self, name: str = "") -> str:
        """Return what ``docker buildx inspect`` prints of a builder, which it starts; asked once for each name.

        Args:
            name: empty: the builder that buildx itself uses.
        Raises:
            StepFailed: see :meth:`buildx`.
        """
        if name not in self._inspected:
            chosen = [f"--builder={name}"] if name else []
            self._inspected[name] = self.buildx("inspect", "--bootstrap", *chosen)
        return self._inspected[name]

    def digest_at_registry(self, reference: str, builder: str = "") -> tuple[str | None, str]:
        """Return the digest of an image at its registry, asked once; None and the reason, in a few words, without one.

        Args:
            builder: of buildx, which may use mirrors; empty: the one that buildx itself uses.
        """
        if (reference, builder) not in self._at_registries:
            self._at_registries[reference, builder] = _digest_at_registry(reference, builder)
        return self._at_registries[reference, builder]

    def buildx(self, *arguments: str, environment: dict[str, str] | None = None) -> str:
        """Run ``docker buildx``, again after a transient error, and return its standard output.

        Raises:
            StepFailed: it failed; the message ends with the last line of its output.
        """
        self.require()
        command, variables = ["docker", "buildx", *arguments], settings.environment(**(environment or {}))
        ended = retry_transient(
            lambda: subprocess.run(command, cwd=ROOT, env=variables, capture_output=True, text=True, check=False)
        )
        if ended.returncode:
            words = (ended.stderr.strip().splitlines() or ["it printed no error"])[-1]
            raise StepFailed(f"'docker buildx {arguments[0]}' failed: {words}")
        return ended.stdout


def _digest_at_registry(reference: str, builder: str) -> tuple[str | None, str]:
    chosen = [f"--builder={builder}"] if builder else []
    # Without `json`, the format is ignored: https://github.com/docker/buildx/pull/4006
    inspect = ["docker", "buildx", "imagetools", "inspect", *chosen, "--format", "{{json .Manifest.Digest}}"]
    try:
        done = subprocess.run(
            [*inspect, reference], capture_output=True, text=True, timeout=REGISTRY_TIMEOUT, check=False
        )
    except subprocess.TimeoutExpired:
        return None, f"no answer within {REGISTRY_TIMEOUT} s"
    digest = done.stdout.strip().strip('"')
    if done.returncode == 0 and digest.startswith("sha256:"):
        return digest, ""
    words = done.stderr.strip().splitlines() or ["no answer"]
    return None, words[-1].removeprefix("ERROR: ").rsplit(": ", 2)[-1]


def _image(client: DockerClient, reference: str) -> Image | None:
    import docker.errors

    try:
        return client.images.get(reference)
    except docker.errors.ImageNotFound:
        return None
