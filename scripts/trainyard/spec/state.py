"""What the commands found out about images, kept by digest, and locks between processes of this host.

Every step of an image (``build``, ``verify``, ``smoke``, ``provenance``) has one result per target and image digest, in
``<state>/<target>/results/<digest>/<step>.json``. An image is published only if its own digest passed the steps,
whatever other images of the target were looked at since.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import shutil
import time
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any, Literal, overload

import filelock
from pydantic import ConfigDict, TypeAdapter, ValidationError, with_config
from typing_extensions import TypedDict  # pydantic needs this one before Python 3.12

from trainyard.common.errors import UserError

logger = logging.getLogger(__name__)

#: A file in each folder of the state folder that Trainyard made. `clean` removes no others: TRAINYARD_BUILD may name a
#: folder that has the user's own files, too.
MARKER = ".trainyard"

#: Images per target whose results are kept, the last recorded ones: about 70 KB each, most of it provenance.
KEPT = 50

#: Results may hold more than is read back here; commands print all of it.
_open = with_config(ConfigDict(extra="allow"))


class Result(TypedDict):
    """What every step records: the image's digest, and whether it passed."""

    digest: str
    passed: bool


@_open
class BuildResult(Result, total=False):
    """See :func:`trainyard.image.build.build`.

    Attributes:
        seconds: how long the build took, ``folder``: of the spec.
        recipe: the document that is in the image (:mod:`trainyard.recipe`).
        layers: diff ids of its layers, whose contents are known (:mod:`trainyard.oci.layer_contents`).
    """

    seconds: float
    folder: str
    recipe: str
    layers: list[str]


@_open
class VerifyResult(Result, total=False):
    """See :func:`trainyard.lint.image.verify.verify`.

    Attributes:
        findings: what failed, ``notes``: what did not.
        size: of all layers in bytes.
        layers: ``stage``, ``created_by``, ``digest``, ``diff_id``, ``size`` and ``compressed`` of each, lowest first.
        config: its ``digest`` and ``size``, ``manifest``: its ``size``.
        packages: number of Python packages.
        rules: ids of the rules that apply to the image.
    """

    findings: list[dict[str, Any]]
    notes: list[dict[str, Any]]
    size: int
    layers: list[dict[str, Any]]
    config: dict[str, Any]
    manifest: dict[str, Any]
    packages: int
    rules: list[str]
    seconds: float


@_open
class SmokeResult(Result, total=False):
    """See :func:`trainyard.image.smoke_test.smoke`. What an image was not tested for is missing.

    Attributes:
        level: how far the image was tested (:data:`trainyard.spec.workspace.Level`).
        notes: what the run did that not every platform allows, a sentence each.
        command: the user's command, ``continued_from``: a file that it read when it was started again,
            ``writes_output``: whether it wrote to /output.
        accuracy: in percent.
        seconds_to_stop: from SIGTERM to the end of the process.
        resumed_from: the step that training resumed from.
        tpu_states: what the TPU API answered, in order.
        restricted: it was stopped and resumed in containers with a uid that the image does not know, of group 0, with
            64 MB of /dev/shm, and without IPv6.
        killed_while_saving: it resumed from its last checkpoint after it had reached a memory limit while saving.
        processes: of the run that was in several, on one machine.
        worker_processes: of a data loader that delivered through 64 MB of /dev/shm.
        compile_seconds: of the first step of a training that torch.compile compiled for the CPU.
        gpu_kernels: ``capabilities`` of GPUs, as numbers (90), that Triton compiled ``kernels`` for, each.
        beside: how many ``scripts``, ``modules``, ``entry_points`` and ``extension_modules`` were tried beside the
            training, in how many ``cpu_seconds``, and the ``findings``: what fails.
    """

    seconds: float
    level: str
    notes: list[str]
    command: list[str]
    continued_from: str
    writes_output: bool
    accuracy: float
    images_per_second: float
    seconds_to_stop: float
    resumed_from: int
    tpu_states: list[str]
    restricted: bool
    killed_while_saving: bool
    processes: int
    worker_processes: int
    compile_seconds: float
    gpu_kernels: dict[str, Any]
    beside: dict[str, Any]


@_open
class ProvenanceResult(Result, total=False):
    """``statement``: BuildKit's statement about an image; see :mod:`trainyard.image.provenance`."""

    statement: dict[str, Any]


Step = Literal["build", "verify", "smoke", "provenance"]

_RESULTS: dict[str, type[Result]] = {
    "build": BuildResult,
    "verify": VerifyResult,
    "smoke": SmokeResult,
    "provenance": ProvenanceResult,
}


@cache
def _reader(step: str) -> TypeAdapter[Any]:
    return TypeAdapter(_RESULTS[step])


def own(folder: Path) -> Path:
    """Return a folder of the state folder, made and marked unless it exists: with private code, for its owner alone."""
    if not folder.is_dir():
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        (folder / MARKER).touch()
    return folder


@contextlib.contextmanager
def locked(state: Path) -> Iterator[set[str]]:
    """Hold all locks of a state folder that no other process holds, and yield the names of those that others hold."""
    busy = set()
    with contextlib.ExitStack() as held:
        for file in sorted((state / "locks").glob("*.lock")):
            try:
                held.enter_context(filelock.FileLock(file, blocking=False))
            except filelock.Timeout:
                busy.add(file.stem)
        yield busy


@contextlib.contextmanager
def file_lock(state: Path, name: str, waiting: str = "") -> Iterator[None]:
    """Hold a lock that one process of this host can hold at a time. A thread that holds it may take it again.

    Args:
        state: the state folder.
        name: of the lock, part of a file's name.
        waiting: what to print if another process holds it.
    """
    folder = state / "locks"
    folder.mkdir(parents=True, exist_ok=True)
    lock = filelock.FileLock(folder / f"{name}.lock", is_singleton=True)
    try:
        lock.acquire(blocking=False)
    except filelock.Timeout:
        if waiting:
            logger.info(waiting)
        lock.acquire()
    try:
        yield
    finally:
        lock.release()


def testing_lock(state: Path) -> contextlib.AbstractContextManager[None]:
    """The lock for verifying and testing an image: tests that run at the same time would exceed their time limits."""
    return file_lock(state, "training", "another process tests an image: waiting for it")


def candidate_lock(kept: Path) -> contextlib.AbstractContextManager[None]:
    """The lock for building a target's candidate and for what must not happen while another process does.

    Args:
        kept: the image's folder, ``Recipe.kept``, as for the other functions here.
    """
    return file_lock(kept.parent, f"candidate-{kept.name}", f"another process makes {kept.name}: waiting for it")


def _path(kept: Path, step: str, digest: str) -> Path:
    return kept / "results" / digest.replace(":", "-") / f"{step}.json"


def _load(path: Path) -> Any:
    """Return a result as its step's type; None if the file is missing, no such result, or about another image."""
    try:
        found = _reader(path.stem).validate_json(path.read_bytes())
    except (FileNotFoundError, ValidationError):
        return None
    return found if found["digest"].replace(":", "-") == path.parent.name else None


def _modified(path: Path) -> int:
    """When a file or folder was last changed; 0 if another process has just removed it."""
    try:
        return path.stat().st_mtime_ns
    except FileNotFoundError:
        return 0


def record(kept: Path, step: Step, digest: str, facts: Mapping[str, Any]) -> None:
    """Keep the result of a step for an image in place of an earlier one, and drop those of the target's oldest images.

    A process that is killed meanwhile leaves the earlier result.

    Args:
        facts: those of the step's :class:`Result`, without the digest.
    Raises:
        pydantic.ValidationError: they are not; :func:`recall` would not find them.
    """
    path = _path(kept, step, digest)
    result = {"digest": digest, **facts}
    _reader(step).validate_python(result)
    text = json.dumps(result, indent=2)
    with file_lock(kept.parent, f"results-{kept.name}"):  # or another process could drop the folder just made
        own(kept)
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.with_suffix(".new")
        temporary.write_text(text, encoding="utf-8")
        # Later than all others: the clock may have been put back, and the kernel takes the time of its last tick.
        now = max(time.time_ns(), *(_modified(folder) + 1 for folder in (kept / "results").iterdir()))
        os.utime(temporary, ns=(now, now))
        temporary.replace(path)
        os.utime(path.parent, ns=(now, now))
        for folder in sorted((kept / "results").iterdir(), key=_modified)[:-KEPT]:
            shutil.rmtree(folder, ignore_errors=True)


@overload
def recall(kept: Path, step: Literal["build"], digest: str) -> BuildResult | None: ...
@overload
def recall(kept: Path, step: Literal["verify"], digest: str) -> VerifyResult | None: ...
@overload
def recall(kept: Path, step: Literal["smoke"], digest: str) -> SmokeResult | None: ...
@overload
def recall(kept: Path, step: Literal["provenance"], digest: str) -> ProvenanceResult | None: ...
@overload
def recall(kept: Path, step: Step, digest: str) -> Any: ...
def recall(kept: Path, step: Step, digest: str) -> Any:
    """The result of a step for the image ``digest``; None if there is none."""
    return _load(_path(kept, step, digest))


def builds(kept: Path) -> Iterator[BuildResult]:
    """The results of all builds of a target that are kept, the newest first."""
    for path in sorted(kept.glob("results/*/build.json"), key=_modified, reverse=True):
        if found := _load(path):
            yield found


def last(kept: Path, step: Step) -> Any:
    """Return the result that was recorded last for a target, whatever image it is about; None if there is none."""
    newest = max(kept.glob(f"results/*/{step}.json"), key=_modified, default=None)
    return _load(newest) if newest else None


def seconds(kept: Path, step: Step) -> float | None:
    """Return how many seconds a step took when it was recorded last for a target; None if that is not known."""
    return (last(kept, step) or {}).get("seconds")


def passed(kept: Path) -> BuildResult | None:
    """Return the result of the last build of a target whose image passed; None if there is none."""
    smoked = ((found, recall(kept, "smoke", found["digest"])) for found in builds(kept))
    return next((found for found, smoke in smoked if smoke and smoke["passed"]), None)


def when(kept: Path, step: Step, digest: str) -> str:
    """Return when the result of a step was recorded, as in ``2026-11-25 14:02`` of this host's clock."""
    path = _path(kept, step, digest)  # its mtime only orders it among others
    return time.strftime("%Y-%m-%d %H:%M", time.localtime(path.stat().st_ctime if path.exists() else 0))


def require(kept: Path, digest: str, *steps: Step, made_by: str = "") -> dict[str, Any]:
    """Step -> its result for the image ``digest``, for every one of ``steps``.

    Args:
        made_by: the command that makes images that pass, for the message; that of a checkout if empty.
    Raises:
        UserError: the image did not pass one of them.
    """
    found: dict[str, Any] = {}
    for step in steps:
        result = recall(kept, step, digest)
        if not result or not result["passed"]:
            command = made_by or f"trainyard image {kept.name}"
            raise UserError(f"{kept.name} ({digest[:19]}) never passed '{step}': run '{command}'")
        found[step] = result
    return found
