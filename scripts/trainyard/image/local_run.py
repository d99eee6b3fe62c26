"""Run an image on this machine: the ``docker run`` of ``trainyard run``."""

from __future__ import annotations

import csv
import io
import os
import re
import tempfile
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from docker.models.images import Image

from trainyard.common.docker_engine import Engine, resource_labels
from trainyard.common.errors import UserError
from trainyard.image import build_backends
from trainyard.image.command_words import DATA, OUTPUT, SHARED_MEMORY, container_words
from trainyard.spec import pylock, state, workspace
from trainyard.spec.model import Spec
from trainyard.spec.naming import FOLDER, LABELS, NAME
from trainyard.spec.workspace import Workspace
from trainyard.workspace import code_files, code_layer

#: What gives a container the chips of a TPU VM
#: (https://cloud.google.com/tpu/docs/run-in-container#train_a_pytorch_model_in_a_docker_container).
TPU_FLAGS = ("--privileged", "--net=host")

#: How an engine gets NVIDIA's runtime.
NVIDIA_TOOLKIT = "https://docs.nvidia.com/datacenter/cloud-native/container-toolkit/latest/install-guide.html"

#: Device nodes that a TPU VM has: of the accel driver up to v4, of VFIO since v5e.
TPU_DEVICES = ("/dev/accel0", "/dev/vfio/0")

#: Jupyter's servers, the preferred first.
JUPYTER = ("jupyter-lab", "jupyter-notebook")

#: Variables that the docker command reads itself, or the loader of programs before it: what they are in the container
#: cannot be said in this command's own environment (https://docs.docker.com/reference/cli/docker/#environment-variables).
_OF_DOCKER = re.compile(
    r"HOME|PATH|LD_\w+|DOCKER_(API_VERSION|CERT_PATH|CONFIG|CONTEXT|DEFAULT_PLATFORM|HOST|TLS\w*|CONTENT_TRUST\w*)"
)


#: ``--volume``: a folder, a file or the name of a volume, a path in the container, and whether it is read-only.
_VOLUME = re.compile(r"([^:]+):(/[^:,]*)(?::(ro)|:rw)?")

#: Labels of a container of ``trainyard run``: the image's name, the folder at /output, and whether it was made for it.
RUN, RUN_OUTPUT, RUN_MADE = f"{LABELS}.run", f"{LABELS}.run.output", f"{LABELS}.run.made"

#: Prints a line for each GPU: index, MiB in use, MiB in all (https://docs.nvidia.com/deploy/nvidia-smi/index.html).
NVIDIA_SMI = ("nvidia-smi", "--query-gpu=index,memory.used,memory.total", "--format=csv,noheader,nounits")


@dataclass(frozen=True)
class Request:
    """What to run, and how.

    Attributes:
        words: arguments of the image's command, of ``command``, of bash, or of Jupyter.
        command: a program of the image and its first arguments, which run instead of the image's command.
        mount: use the code of the repository instead of that in the image.
        shell: run bash. ``jupyter``: run Jupyter, at ``port`` of 127.0.0.1.
        data: folder that is read-only at /data. ``output``: folder that is writable at /output; it may not exist.
        volumes, ports: as ``docker run --volume`` and ``--publish`` have them; ports are at 127.0.0.1 without a host.
        detach: leave the container running. ``name``: of the container, which then stays when it ends.
        gpus: value of ``docker run --gpus``; ``auto``: all if the image and the engine support them; ``none``.
        environment: ``NAME=VALUE``, or ``NAME`` of a variable of this process.
        terminal: stdin and stdout are a terminal.
    """

    words: tuple[str, ...] = ()
    command: tuple[str, ...] = ()
    mount: bool = False
    shell: bool = False
    jupyter: bool = False
    port: int = 8888
    data: Path | None = None
    output: Path | None = None
    volumes: tuple[str, ...] = ()
    ports: tuple[str, ...] = ()
    detach: bool = False
    name: str = ""
    gpus: str = "auto"
    environment: tuple[str, ...] = ()
    terminal: bool = False


@dataclass(frozen=True)
class Host:
    """What this machine and its engine offer.

    Attributes:
        nvidia: the engine has NVIDIA's runtime. ``tpu``: the machine is a TPU VM.
        rootless: root in a container is the user of the engine (https://docs.docker.com/engine/security/rootless/).
        selinux: containers may not read mounted folders unless they are labelled, or labels are off
            (https://docs.docker.com/engine/storage/bind-mounts/#configure-the-selinux-label).
        user: ``uid:gid`` of this process.
    """

    nvidia: bool = False
    tpu: bool = False
    rootless: bool = False
    selinux: bool = False
    user: str = "1000:1000"


def host(engine: Engine) -> Host:
    """This machine and its engine.

    Raises:
        UserError: there is no engine.
    """
    info = engine.client.info()
    security = " ".join(info.get("SecurityOptions") or [])
    return Host(
        nvidia="nvidia" in (info.get("Runtimes") or {}),
        tpu=any(Path(device).exists() for device in TPU_DEVICES),
        rootless="name=rootless" in security,
        selinux="name=selinux" in security,
        user=f"{os.getuid()}:{os.getgid()}",
    )


def code_mounts(ws: Workspace) -> dict[Path, str]:
    """Folder or file of the code -> its place in the container.

    Raises:
        UserError: one does not exist, or is outside of the git repository.
    """
    places = {path: code_files.destination(ws, path) for path in code_files.folders(ws)}
    made = {ws.converted: f"{FOLDER}/{ws.converted.name}"} if ws.converted else {}
    return made | {path: f"{FOLDER}/{place}".removesuffix("/.") for path, place in places.items()}


def bind(source: Path, target: str, *, read_only: bool = False) -> str:
    """A value of ``docker run --mount``, which is a line of CSV: names with commas and quotes are quoted."""
    text = io.StringIO()
    fields = ["type=bind", f"source={source.resolve()}", f"target={target}", *(["readonly"] if read_only else [])]
    csv.writer(text, lineterminator="").writerow(fields)
    return text.getvalue()


def _folders(spec: Spec, request: Request) -> tuple[list[str], bool]:
    """The values of ``--mount``, and whether the container writes to one of them."""
    mounts = []
    if request.mount:
        own = spec.repository(f"--mount: {spec.target} is a target of the catalogue: there is no code to mount")
        mounts += [bind(path, place) for path, place in code_mounts(own.workspace).items()]
    data = request.data or spec.workspace.data
    if data is not None:
        if not data.is_dir():
            raise UserError(f"--data: no folder '{data}'")
        mounts.append(bind(data, DATA, read_only=True))
    if request.output is not None:
        if request.output.exists() and not request.output.is_dir():
            raise UserError(f"--output: '{request.output}' is not a folder")
        mounts.append(bind(request.output, OUTPUT))
    writes = request.mount or request.output is not None
    for text in request.volumes:
        match = _VOLUME.fullmatch(text)
        if not match:
            raise UserError(f"--volume: '{text}' is not SOURCE:/PATH[:ro], with a folder, a file or a volume's name")
        source = Path(match[1]).expanduser()
        if "/" not in match[1] and not source.exists():
            mounts.append(
                ",".join([f"type=volume,source={match[1]},target={match[2]}", *(["readonly"] if match[3] else [])])
            )
            continue
        if not source.exists():
            raise UserError(f"--volume: no file or folder '{match[1]}'")
        mounts.append(bind(source, match[2], read_only=bool(match[3])))
        writes = writes or not match[3]
    return mounts, writes


def _devices(spec: Spec, request: Request, host: Host) -> list[str]:
    if spec.accelerator == "tpu" and host.tpu:
        return list(TPU_FLAGS)
    if request.gpus not in ("auto", "none"):
        # A value is a line of CSV: https://docs.docker.com/reference/cli/docker/container/run/#gpus
        return ["--gpus", f'"{request.gpus}"' if re.fullmatch(r"device=[^\"]*,[^=\"]*", request.gpus) else request.gpus]
    return ["--gpus", "all"] if request.gpus == "auto" and spec.accelerator == "nvidia" and host.nvidia else []


def variables(request: Request) -> dict[str, str]:
    """Return the variables that ``docker run --env NAME`` takes from its environment.

    A value may be a secret, and every user of the machine can read the arguments of a process.
    """
    given = (variable.partition("=") for variable in request.environment)
    return {name: value for name, equals, value in given if name and equals and not _OF_DOCKER.fullmatch(name)}


def arguments(spec: Spec, reference: str, request: Request, host: Host, server: str = JUPYTER[0]) -> list[str]:
    """The ``docker run`` of a request, with :func:`variables`. It ends with the container's status and gets signals.

    A container that writes to a folder of this machine runs as the current user, so that the files are the user's. Its
    second group is 0, which may write to /workspace and to the home directory of the image.

    Args:
        reference: the image.
        server: program of the image that serves Jupyter.
    Raises:
        UserError: a folder does not exist, or is not one; a shell without a terminal.
    """
    if request.shell and not request.words and not request.terminal:
        raise UserError("--shell: no terminal: give a command, as in 'trainyard run --shell -- -c \"ls -l\"'")
    mounts, writes = _folders(spec, request)
    found = ["docker", "run", *_kept(spec, request), f"--shm-size={SHARED_MEMORY}"]
    if request.terminal:
        found += ["--interactive", "--tty"]
    found += _devices(spec, request, host)
    root = False
    if writes:
        user = "0:0" if host.rootless else host.user
        root = user.startswith("0:")
        found += ["--user", user, "--group-add=0"]
        if request.mount:
            found.append("--env=PYTHONDONTWRITEBYTECODE=1")  # no __pycache__ in the repository
    if mounts and host.selinux:
        found.append("--security-opt=label=disable")
    for mount in mounts:
        found += ["--mount", mount]
    for port in request.ports:
        host_port = port if ":" in port else f"{port}:{port}"
        found.append(f"--publish={host_port if host_port.count(':') > 1 else f'127.0.0.1:{host_port}'}")
    folders = spec.kind.jupyter if request.jupyter else {}
    inherited = variables(request)
    named = [name if (name := given.partition("=")[0]) in inherited else given for given in request.environment]
    for variable in (*(f"{name}={folder}" for name, folder in folders.items()), *named):
        found += ["--env", variable]
    if request.jupyter:
        if "--net=host" not in found:
            found.append(f"--publish=127.0.0.1:{request.port}:{request.port}")
        address = "127.0.0.1" if "--net=host" in found else "0.0.0.0"
        words = ["--", server, f"--ip={address}", f"--port={request.port}", "--no-browser"]
        words += ["--allow-root"] if root else []
        words += request.words
    elif program := ["bash"] if request.shell else request.command:
        words = ["--", *program, *request.words]
    else:
        words = container_words(request.words) if spec.run else list(request.words)
    return [*found, reference, *words]


def check_folders(engine: Engine, reference: str, arguments: list[str]) -> None:
    """Raise a :class:`UserError` if a folder of :func:`arguments` is not on the engine's machine."""
    for option, value in pairwise(arguments):
        if option == "--mount":
            kind, source, *_ = next(csv.reader([value]))
            if kind == "type=bind":
                engine.require_folder(reference, source.removeprefix("source="))


def _kept(spec: Spec, request: Request) -> list[str]:
    """Return the options for the end of a container: one with a name stays, until its log was read (``running``)."""
    if not request.name:
        return ["--rm"]
    labels = {RUN: spec.local_name, RUN_OUTPUT: str(request.output.resolve()) if request.output else ""}
    labels[RUN_MADE] = "true" if request.output and not request.output.exists() else ""
    labels |= {} if request.detach else resource_labels("run")  # which "clean" removes when this process has ended
    detached = ["--detach"] if request.detach else []
    return [
        *detached,
        f"--name={request.name}",
        *(f"--label={name}={value}" for name, value in labels.items() if value),
    ]


def free_gpu(listed: str) -> str:
    """Return the ``--gpus`` of the GPU that uses the least memory, of what :data:`NVIDIA_SMI` prints.

    Raises:
        UserError: none uses less than a tenth of its memory.
    """
    rows = [[int(one) for one in line.split(",")] for line in listed.splitlines() if re.fullmatch(r"[\d, ]+", line)]
    used, index = min(((used / total, index) for index, used, total in rows if total), default=(1.0, 0))
    if used >= 0.1:
        shown = ", ".join(f"{index}: {used} of {total} MiB" for index, used, total in rows) or "nvidia-smi lists none"
        raise UserError(f"--gpus free: no GPU is free ({shown}): wait, or name one, as in '--gpus device=0'")
    return f"device={index}"


def jupyter_server(engine: Engine, reference: str) -> str:
    """The program of an image that serves Jupyter.

    Raises:
        UserError: it has none; the line says what to add.
    """
    looks = " || ".join(f"command -v {name}" for name in JUPYTER)
    status, output, _ = engine.run(reference, "/bin/sh", ["-c", looks], "run")
    server = Path(output.decode(errors="replace").strip()).name
    if status or server not in JUPYTER:
        raise UserError(
            f"{reference} has no Jupyter: add jupyterlab to 'requirements' in {workspace.FILE}, then run "
            "'trainyard lock' and 'trainyard image'"
        )
    return server


def check_own(spec: Spec, image: Image) -> None:
    """Raise a :class:`UserError` if a local image is that of another repository, which has the same name.

    It is if it was built in another folder, and the lock, the settings or the code of this one differ from its own.
    """
    labels = image.labels
    built = state.recall(spec.kept, "build", str(image.id)) if f"{LABELS}.config" in labels else None
    if not built or built.get("folder", str(spec.folder)) == str(spec.folder):
        return
    lock = pylock.digest(spec.lock_file) if spec.lock_file.is_file() else ""
    same = (labels.get(f"{LABELS}.lock"), labels.get(f"{LABELS}.config")) == (
        lock,
        code_layer.configuration(spec.workspace),
    )
    if not same or code_changed(spec, labels):
        raise UserError(
            f"{NAME}:{spec.local_name} is the image of {built['folder']}, which has the same name: run "
            f"'{spec.command('image')}', or give another 'name' in {spec.where}"
        )


def code_changed(spec: Spec, labels: dict[str, str]) -> bool:
    """Return whether a repository has code that differs from that in its image, whose labels are given.

    Raises:
        UserError: the code cannot be in an image; the message says why.
    """
    recorded = labels.get(f"{LABELS}.code")
    if recorded is None:
        return False
    with tempfile.TemporaryDirectory() as folder:
        written = code_layer.write(build_backends.asked(spec).workspace, Path(folder) / "code.tar", spec.site)
    return written.diff_id != recorded


def notes(spec: Spec, request: Request, host: Host) -> list[str]:
    """What the user may not expect of this machine."""
    if spec.accelerator == "nvidia" and request.gpus == "auto" and not host.nvidia:
        return [f"runs on the CPU: the engine has no NVIDIA runtime ({NVIDIA_TOOLKIT})"]
    if spec.accelerator == "tpu" and not host.tpu:
        return ["runs on the CPU: this machine has no TPU"]
    return []
