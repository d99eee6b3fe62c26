"""Build an image, verify it, run the smoke test in it, and tag it only when it has passed all of them.

An image whose digest has passed before is not verified and smoke-tested again, unless that is forced.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import shlex
from collections.abc import Callable, Mapping
from typing import Any

from docker.models.images import Image

from trainyard.common import stages
from trainyard.common.context import Context
from trainyard.common.errors import UserError
from trainyard.image import build, local_run, smoke_command, smoke_test, trainer_flags
from trainyard.lint.image import verify
from trainyard.oci import docker_engine
from trainyard.release import diff, events
from trainyard.sandbox.containers import files_of
from trainyard.spec import lock, pylock, state
from trainyard.spec.model import RepositorySpec, Spec
from trainyard.spec.naming import LABELS, NAME
from trainyard.spec.units import in_units
from trainyard.spec.workspace import Workspace

logger = logging.getLogger(__name__)

#: Packages that are named among what changed; the others are counted.
_NAMED = 3

#: Name of an input of an image -> what it is.
_PARTS = {"code.tar": "code"}

#: What the names of inputs begin with that say which packages an image has.
_OF_PACKAGES = (lock.FILE, pylock.FILE, "Dockerfile")

#: Files of every image of Trainyard: the launcher, and what it reads about the image.
_LAUNCHER, _ABOUT = "/usr/local/bin/launch", "/opt/trainyard/image.json"


def make(
    spec: Spec,
    *,
    compression: str = "zstd",
    no_cache: bool = False,
    force: bool = False,
    emit: events.Emit = events.ignore,
    show: Callable[[object], None] = verify.unseen,
) -> dict[str, Any]:
    """Build (:func:`trainyard.image.build.build`), verify, smoke-test and tag the image of ``spec``.

    Args:
        force: verify and smoke-test again if this digest has passed before.
        emit: called with the ``stage`` and ``step`` events of :mod:`trainyard.release.events`.
        show: see :func:`trainyard.lint.image.verify.verify`.
    Returns:
        ``image`` (its local reference), ``plan``, the results of ``build``, ``verify`` and ``smoke``, and ``changed``
        (see :func:`changed`).
    Raises:
        UserError, StepFailed: a stage failed; the candidate is kept for inspection and no other tag is set.
    """
    docker_engine.require_emulation(spec.architecture)  # whatever the builder runs
    smoke_test.network_of(spec)
    with state.candidate_lock(spec.kept):
        before = state.passed(spec.kept)
        since = state.when(spec.kept, "smoke", before["digest"]) if before else ""
        emit("stage", stage="build")
        with build.building(
            spec,
            compression=compression,
            no_cache=no_cache,
            on_step=lambda stage, step: emit("step", stage=stage, step=step),
        ) as (plan, built):
            spec = plan.spec  # with the versions in a base that was inspected just now
            digest = built["digest"]
            # Smoke tests that run at the same time would exceed their time limits.
            with state.file_lock(spec.context.state, "training"):
                emit("stage", stage="verify")
                verified = None if force else _passed(spec, "verify", digest)
                verified = verified or verify.verify(spec, plan.candidate, show=show)
                emit("stage", stage="smoke")
                trained = None if force else _passed(spec, "smoke", digest)
                trained = trained or smoke_test.smoke(spec, plan.candidate)
        found = docker_engine.image(plan.candidate, made_by=spec.command("image"))
        for tag in (spec.local_name, plan.tag):
            found.tag(NAME, tag)
        docker_engine.client().images.remove(plan.candidate)
        changes = f"{changed(before, built)} since {since}" if before else "everything: no image passed before"
        made = {"image": plan.local, "plan": plan, "build": built, "verify": verified, "smoke": trained}
        return made | {"changed": changes}


def _passed(spec: Spec, step: state.Step, digest: str) -> Any:
    """Return the result of a step that an image has passed before, and say so; None if it has not."""
    found = state.recall(spec.kept, step, digest)
    if not found or not found["passed"]:
        return None
    logger.info(stages.row(step, f"unchanged, passed {state.when(spec.kept, step, digest)}"))
    return found


def changed(before: Mapping[str, Any], now: Mapping[str, Any]) -> str:
    """Return what differs between two results of :func:`trainyard.image.build.build`, in words."""
    if before["digest"] == now["digest"]:
        return "nothing"
    found = diff.changes(before.get("versions", now["versions"]), now["versions"])
    packages = [f"{name} {old} -> {new}" for name, (old, new) in found["changed"].items()]
    packages += [f"{name} {version} added" for name, version in found["added"].items()]
    packages += [f"{name} removed" for name in found["removed"]]
    if len(packages) > _NAMED:
        packages[_NAMED:] = [f"{len(packages) - _NAMED} more packages"]
    files = {name for names in diff.changes(before["inputs"], now["inputs"]).values() for name in names}
    folders = {_PARTS.get(name, name.split("/")[0]) for name in files if not name.startswith(_OF_PACKAGES)}
    parts = [*packages, *sorted(folders), *(["base"] if before["base"] != now["base"] else [])]
    if not parts:
        same = set(before["layers"]) == set(now["layers"])
        parts = ["settings" if files or same else "base or system packages"]
    fresh = len(set(now["layers"]) - set(before["layers"]))
    return f"{', '.join(parts)} ({fresh} of {len(now['layers'])} layers)"


def from_reference(
    reference: str, spec: RepositorySpec | None, context: Context, *, show: Callable[[object], None] = verify.unseen
) -> dict[str, Any]:
    """Verify and smoke-test an image that a user's own Dockerfile made ``FROM`` one of Trainyard's.

    The command is ``run`` of trainyard.yaml, with its ``smoke``; else that of the image, which is only started. If it
    passes and there is a trainyard.yaml, it is tagged as the image of that repository. Nothing is recorded for a push:
    the labels of the image, with its immutable tag, are those of the image that it was made from.

    Args:
        spec: of the repository that the image is from, if it has a trainyard.yaml.
    Returns:
        ``image`` (its reference), ``digest``, ``run`` (a command that runs it), and the results of ``verify`` and
        ``smoke``.
    Raises:
        UserError: there is no such image, or it is not made from one of Trainyard's.
        StepFailed: it breaks a rule for every image, or the command failed.
    """
    image = docker_engine.image(reference, made_by=f"docker build --tag {reference} .")
    network = smoke_test.network_of(spec) if spec else bool(context.smoke_network)
    tested = dataclasses.replace(subject(image, reference, spec.workspace if spec else None), network=network)
    with state.file_lock(context.state, "training"):
        verified = verify.verify(None, reference, show=show)
        with stages.stage("smoke") as stage:
            trained = smoke_command.check(tested)
            stage.done = smoke_test.described(trained)
    name = f"{NAME}:{spec.local_name}" if spec else reference
    if spec:
        image.tag(NAME, spec.local_name)
    smoke = tested.smoke
    mounts = [f"--volume={spec.workspace.data}:{local_run.DATA}:ro"] if spec and spec.workspace.data else []
    words = tested.words(smoke.args if smoke else ["--help"])
    return {
        "image": name,
        "digest": str(image.id),
        "run": shlex.join(["docker", "run", "--rm", *mounts, name, *words]),
        "verify": verified,
        "smoke": trained,
    }


def subject(image: Image, reference: str, workspace: Workspace | None) -> smoke_command.Subject:
    """Return what the smoke test starts in an image that a user made from one of ours, or raise a UserError."""
    files = files_of(image, _LAUNCHER, _ABOUT)
    if f"{LABELS}.target" not in image.labels or len(files) < 2:
        raise UserError(
            f"{reference} is not made from an image of Trainyard: begin the Dockerfile with "
            f"'FROM {NAME}:<target>', and see 'trainyard list'"
        )
    config = image.attrs["Config"]
    entrypoint = list(config.get("Entrypoint") or [])
    if not any(word.rpartition("/")[2] == "launch" for word in entrypoint):
        raise UserError(
            f"{reference}: its ENTRYPOINT {shlex.join(entrypoint) or '(none)'} does not start the launcher: remove "
            "ENTRYPOINT from the Dockerfile, and give the command as CMD"
        )
    command = workspace.document.run if workspace else None
    if workspace and command:
        return smoke_command.Subject(
            str(image.id), tuple(command), ("--", *command), workspace.document.smoke, workspace
        )
    about = json.loads(files[_ABOUT])
    words = list(config.get("Cmd") or [str(about.get("default", ""))])
    return smoke_command.Subject(str(image.id), tuple(about["trainers"].get(words[0], words)), tuple(words))


def closing_command(spec: Spec, trained: dict[str, Any], target: str | None = None) -> str:
    """Return a command that runs the image of ``spec`` once it has passed.

    Args:
        trained: the result of its smoke test.
        target: as the user gave it; None for the repository of the current folder.
    """
    if spec.run:
        smoke = spec.workspace.document.smoke
        words = smoke.args if smoke else ["--help"]
        folders = [f"--data={spec.context.data}"] if spec.context.data else []
        folders += ["--output=output"] if trained.get("writes_output") else []
        return shlex.join(
            ["trainyard", "run", *([target] if target else []), *folders, *(["--", *words] if words else [])]
        )
    trainer = spec.trainers.default
    flags = trainer_flags.of_trainer(spec.trainers.package, trainer)
    arguments = ["--fake-data", "--epochs", "1"] if {"fake-data", "epochs"} <= flags else ["--help"]
    return shlex.join(["docker", "run", "--rm", f"{NAME}:{spec.local_name}", trainer, *arguments])


def tested(trained: dict[str, Any]) -> str:
    """Return how far an image was tested, from the result of its smoke test: ``ran (python -m model.train)``."""
    command = trained.get("command")
    return f"{trained.get('level', 'trained')}{f' ({shlex.join(command)})' if command else ''}"


def summary(made: Mapping[str, Any], closing: str) -> list[str]:
    """Return the result for people: the image, its size, how it was tested, what changed, and the next command.

    Args:
        made: the result of :func:`make` or :func:`from_reference`.
        closing: the next command.
    """
    verified, trained = made["verify"], made["smoke"]
    rows = {
        "image": made["image"] + (f", {NAME}:{made['plan'].tag}" if "plan" in made else ""),
        "size": f"{in_units(verified['size'])} in {len(verified['layers'])} layers, {verified['packages']} packages",
        "tested": tested(trained),
        "changed": made.get("changed"),
        "next": closing,
    }
    return [stages.row(name, text) for name, text in rows.items() if text]
