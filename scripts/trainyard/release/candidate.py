"""Build an image, verify it, run the smoke test in it, and tag it only when it has passed all of them.

An image whose digest has passed before is not verified and smoke-tested again, unless that is forced.
"""

from __future__ import annotations

import dataclasses
import logging
import shlex
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from docker.models.images import Image

from trainyard import recipe as recipes
from trainyard.common import stages
from trainyard.common.context import Context
from trainyard.common.docker_engine import Engine
from trainyard.common.errors import UserError
from trainyard.image import build, smoke_command, smoke_test, trainer_flags
from trainyard.image.command_words import DATA
from trainyard.image.plan import Plan
from trainyard.image.smoke_failure import HostFiles
from trainyard.lint.image import verify
from trainyard.recipe import Recipe, Training
from trainyard.release import diff, events
from trainyard.sandbox.containers import files_of
from trainyard.spec import state
from trainyard.spec.naming import LABELS, NAME
from trainyard.spec.units import in_units

logger = logging.getLogger(__name__)

#: Packages that are named among what changed; the others are counted.
_NAMED = 3

#: Name of an input of an image -> what it is.
_PARTS = {"code.tar": "code"}

#: How the names of inputs begin whose changes are changes of packages, or of settings.
_OF_PACKAGES = ("pylock.", "Dockerfile")

#: Files of every image of Trainyard: the launcher, and what it reads about the image.
_LAUNCHER, _ABOUT = "/usr/local/bin/launch", recipes.PATH


class Rewritten(Exception):
    """Tell that the trainyard.yaml of an image that was built has a smoke test now: it is to be made again."""


def make(
    plan: Plan,
    files: HostFiles | None = None,
    *,
    compression: str = "zstd",
    no_cache: bool = False,
    force: bool = False,
    emit: events.Emit = events.ignore,
    show: Callable[[object], None] = verify.unseen,
    find: Callable[[Recipe, bool], bool] = lambda recipe, passed: False,
) -> dict[str, Any]:
    """Build (:func:`trainyard.image.build.build`), verify, smoke-test and tag an image.

    Args:
        files: the repository that a user's image is from, on this host.
        force: verify and smoke-test again if this digest has passed before.
        emit: called with the ``stage`` and ``step`` events of :mod:`trainyard.release.events`.
        show: see :func:`trainyard.lint.image.verify.verify`.
        find: called with the recipe of an image that is verified, and whether its smoke test has passed before;
            returns whether it has changed its trainyard.yaml.
    Returns:
        ``image`` (its local reference), ``tag`` (the immutable one), the results of ``build``, ``verify`` and
        ``smoke``, and ``changed`` (see :func:`changed`).
    Raises:
        UserError, StepFailed: a stage failed; the candidate is kept for inspection and no other tag is set.
        Rewritten: ``find`` has found a smoke test.
    """
    recipe, context, kept = plan.recipe, plan.context, plan.kept
    context.engine.require_emulation(recipe.platform)  # whatever the builder runs
    with state.candidate_lock(kept):
        before = _readable(state.passed(kept))
        since = state.when(kept, "smoke", before["digest"]) if before else ""
        emit("stage", stage="build")
        with build.building(
            plan,
            compression=compression,
            no_cache=no_cache,
            on_step=lambda stage, step: emit("step", stage=stage, step=step),
        ) as built:
            digest = built["digest"]
            with state.testing_lock(context.state):
                emit("stage", stage="verify")
                verified = None if force else _passed(kept, "verify", digest)
                verified = verified or verify.verify(recipe, recipe.candidate, context, show=show)
                emit("stage", stage="smoke")
                known = None if force else state.recall(kept, "smoke", digest)
                if find(recipe, bool(known and known["passed"])):
                    raise Rewritten
                trained = None if force else _passed(kept, "smoke", digest)
                trained = trained or smoke_test.smoke(recipe, recipe.candidate, context, files)
        image = context.engine.image(recipe.candidate, made_by=recipe.command("image"))
        for tag in (recipe.local_name, plan.built.tag):
            image.tag(NAME, tag)
        context.engine.client.images.remove(recipe.candidate)
        changes = f"{changed(before, built)} since {since}" if before else "everything: no image passed before"
        made = {"image": recipe.local, "tag": plan.built.tag, "build": built, "verify": verified, "smoke": trained}
        return made | {"changed": changes}


def _passed(kept: Path, step: state.Step, digest: str) -> Any:
    """Return the result of a step that an image has passed before, and say so; None if it has not."""
    result = state.recall(kept, step, digest)
    if not result or not result["passed"]:
        return None
    logger.info(stages.row(step, f"unchanged, passed {state.when(kept, step, digest)}"))
    return result


def _readable(result: state.BuildResult | None) -> state.BuildResult | None:
    """Return the result of a build; None if another version of Trainyard recorded it."""
    try:
        return result if result and recipes.parse(result["recipe"]) else None
    except (KeyError, ValueError):
        return None


def changed(before: Mapping[str, Any], now: Mapping[str, Any]) -> str:
    """Return what differs between two results of :func:`trainyard.image.build.build`, in words."""
    if before["digest"] == now["digest"]:
        return "nothing"
    old_recipe, recipe = (Recipe.model_validate_json(result["recipe"]) for result in (before, now))
    found = diff.changes(old_recipe.versions, recipe.versions)
    packages = [f"{name} {old} -> {new}" for name, (old, new) in found["changed"].items()]
    packages += [f"{name} {version} added" for name, version in found["added"].items()]
    packages += [f"{name} removed" for name in found["removed"]]
    if len(packages) > _NAMED:
        packages[_NAMED:] = [f"{len(packages) - _NAMED} more packages"]
    files = {name for names in diff.changes(old_recipe.inputs, recipe.inputs).values() for name in names}
    folders = {_PARTS.get(name, name.split("/")[0]) for name in files if not name.startswith(_OF_PACKAGES)}
    bases = {each.built and each.built.base for each in (old_recipe, recipe)}
    parts = [*packages, *sorted(folders), *(["base"] if len(bases) > 1 else [])]
    if not parts:
        same = set(before["layers"]) == set(now["layers"])
        parts = ["settings" if files or same else "base or system packages"]
    fresh = len(set(now["layers"]) - set(before["layers"]))
    return f"{', '.join(parts)} ({fresh} of {len(now['layers'])} layers)"


@dataclasses.dataclass(frozen=True)
class Repository:
    """Describe the repository of an image that the user's own Dockerfile made.

    Attributes:
        name: of its image on this host.
        command: ``run`` of trainyard.yaml; empty without.
    """

    name: str
    files: HostFiles
    command: tuple[str, ...]
    test: recipes.Command


def from_reference(
    reference: str,
    repository: Repository | None,
    context: Context,
    *,
    show: Callable[[object], None] = verify.unseen,
) -> dict[str, Any]:
    """Verify and smoke-test an image that a user's own Dockerfile made ``FROM`` one of Trainyard's.

    The command is ``run`` of trainyard.yaml, with its ``smoke``; else that of the image, which is only started. If it
    passes and there is a trainyard.yaml, it is tagged as the image of that repository. Nothing is recorded for a push:
    the labels of the image, with its immutable tag, are those of the image that it was made from.

    Args:
        repository: that the image is from, if it has a trainyard.yaml.
    Returns:
        ``image`` (its reference), ``digest``, ``run`` (a command that runs it), and the results of ``verify`` and
        ``smoke``.
    Raises:
        UserError: there is no such image, or it is not made from one of Trainyard's.
        StepFailed: it breaks a rule for every image, or the command failed.
    """
    engine = context.engine
    image = engine.image(reference, made_by=f"docker build --tag {reference} .")
    name, files = (repository.name, repository.files) if repository else (reference, None)
    network = smoke_test.network_of(name, files, context) if files else bool(context.smoke_network)
    tested = dataclasses.replace(subject(engine, image, reference, repository), network=network)
    with state.testing_lock(context.state):
        verified = verify.verify(None, reference, context, show=show)
        with stages.stage("smoke") as stage:
            trained = smoke_command.check(engine, tested)
            stage.done = smoke_test.described(trained)
    name = f"{NAME}:{repository.name}" if repository else reference
    if repository:
        image.tag(NAME, repository.name)
    arguments = tested.test.args
    mounts = [f"--volume={files.data}:{DATA}:ro"] if files and files.data else []
    words = tested.words(["--help"] if arguments is None else arguments)
    return {
        "image": name,
        "digest": str(image.id),
        "run": shlex.join(["docker", "run", "--rm", *mounts, name, *words]),
        "verify": verified,
        "smoke": trained,
    }


def subject(engine: Engine, image: Image, reference: str, repository: Repository | None) -> smoke_command.Subject:
    """Return what the smoke test starts in an image that a user made from one of ours, or raise a UserError."""
    files = files_of(engine, image, _LAUNCHER, _ABOUT)
    if f"{LABELS}.target" not in image.labels or _LAUNCHER not in files:
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
    if _ABOUT not in files:
        raise UserError(f"{reference}: its base was built before images had recipes: build that, and this, again")
    try:
        recipe = recipes.parse(files[_ABOUT].decode())
    except ValueError as error:
        raise UserError(f"{reference}: its {_ABOUT} is damaged ({error}): build it again") from None
    if repository and repository.command:
        words, own = repository.command, repository.files
        return smoke_command.Subject(str(image.id), words, ("--", *words), repository.test, recipe, own)
    words = tuple(config.get("Cmd") or [recipe.default])
    return smoke_command.Subject(str(image.id), recipe.commands.get(words[0], words), words, recipe=recipe)


def closing_command(recipe: Recipe, trained: dict[str, Any], target: str | None = None, data: str = "") -> str:
    """Return a command that runs an image once it has passed.

    Args:
        trained: the result of its smoke test.
        target: as the user gave it; None for the repository of the current folder.
        data: the folder that ``--data`` gave.
    """
    test = recipe.test
    if not isinstance(test, Training):
        words = ["--help"] if test.args is None else test.args
        folders = [f"--data={data}"] if data else []
        folders += ["--output=output"] if trained.get("writes_output") else []
        return shlex.join(
            ["trainyard", "run", *([target] if target else []), *folders, *(["--", *words] if words else [])]
        )
    trainer = recipe.default
    flags = trainer_flags.of_trainer(test.package, trainer)
    arguments = ["--fake-data", "--epochs", "1"] if {"fake-data", "epochs"} <= flags else ["--help"]
    return shlex.join(["docker", "run", "--rm", recipe.local, trainer, *arguments])


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
        "image": made["image"] + (f", {NAME}:{made['tag']}" if "tag" in made else ""),
        "size": f"{in_units(verified['size'])} in {len(verified['layers'])} layers, {verified['packages']} packages",
        "tested": tested(trained),
        "changed": made.get("changed"),
        "next": closing,
    }
    return [stages.row(name, text) for name, text in rows.items() if text]
