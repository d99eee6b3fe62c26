"""Make the recipe of an image from its spec and its lock."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from trainyard import recipe
from trainyard.common.errors import UserError
from trainyard.image import dockerfile, facts, workspace_files
from trainyard.image.smoke_command import STARTED
from trainyard.oci import layers
from trainyard.recipe import FILE, Recipe
from trainyard.spec import framework, lock, pylock, state
from trainyard.spec.model import Spec, each_platform, relative, requirements_of
from trainyard.spec.naming import LABELS
from trainyard.workspace import requirements


def _pins(pins: Iterable[lock.Pin]) -> tuple[recipe.Pin, ...]:
    return tuple(recipe.Pin(name=pin.name, version=pin.version, sha256=pin.hashes, size=pin.size) for pin in pins)


def _base(spec: Spec) -> recipe.Base:
    contents, base = spec.base_contents, spec.base_spec()
    return recipe.Base(
        name=spec.base,
        reference=contents.reference if contents else base.image,
        python=spec.python_version,
        packages=contents.packages if contents else {},
        interpreter=contents.interpreter if contents else "",
        site=contents.site if contents else "",
    )


def _layers(spec: Spec, index: str) -> tuple[recipe.Layer, ...]:
    """Return the layers of the rendered Dockerfile, with the pins of each."""
    below, copies = layers.stages(dockerfile.dockerfile(spec, index))
    wheels = {layer.stage: layer for layer in dockerfile.wheels(spec, index)}
    locked = spec.locked(index)
    pins: dict[str, Sequence[lock.Pin]] = {stage: layer.pins for stage, layer in wheels.items()}
    pins |= {"requirements": locked.requirements, "compiled": locked.compiled}

    def layer(stage: str, instruction: Any, *, copied: bool) -> recipe.Layer:
        known = wheels.get(stage)
        return recipe.Layer(
            stage=stage,
            instruction=instruction,
            copied=copied,
            pins=_pins(pins.get(stage, ())),
            index=bool(known and known.index),
            private=known.private if known else bool(spec.secrets and pins.get(stage)),
        )

    return (*(layer(*made, copied=False) for made in below), *(layer(name, "COPY", copied=True) for name in copies))


def _training(spec: Spec) -> recipe.Training:
    smoke, package = spec.smoke, spec.trainers.package
    return recipe.Training(package=package, trainer=smoke.trainer, accuracy=smoke.accuracy, epochs=smoke.epochs)


def command_test(spec: Spec) -> recipe.Command:
    """Return how the smoke test runs the command of a user's repository."""
    smoke = spec.workspace.document.smoke
    if smoke is None:
        return STARTED
    return recipe.Command(
        args=tuple(smoke.args),
        data=bool(smoke.data),
        expect=smoke.expect,
        seconds=smoke.seconds,
        resume=smoke.resume,
        timeout=smoke.timeout,
    )


def _listed(spec: Spec) -> tuple[str, ...]:
    """Return the canonical names of the distributions that the files of a spec ask for."""
    if spec.target_below:
        wanted = requirements.of_platform(spec.repository(""))
        lines = [line.requirement.name for line in (*wanted.lines, *wanted.compiled)]
        names = [*lines, *(source.name for source in wanted.sources if source.name)]
    else:
        names = [Requirement(text).name for text in (*spec.packages, *requirements_of(spec))]
    return tuple(sorted({*map(canonicalize_name, names)}))


def _tried(spec: Spec, index: str) -> tuple[str, ...]:
    """Return the names of the distributions that are tried beside the training; see :class:`Recipe`."""
    here = {pin.name: pin.version for pin in spec.locked(index).pins if pin.role != "build"}
    target = spec.target_below
    locked = target.usable_lock.of(target.arch, index) if target and target.usable_lock else None
    there = {pin.name: pin.version for pin in locked.pins} if locked else {}
    if any(here.get(name, version) != version for name, version in there.items()):
        there = {}
    return tuple(sorted(here.keys() - there.keys()))


def _check_pins(spec: Spec, index: str) -> None:
    """Raise a :class:`UserError` if the lock lacks what the spec pins: the image is built from the lock."""
    versions = spec.locked(index).versions
    # A user's requirements may replace those of the target that it extends.
    for text in [*spec.packages, *([] if spec.lock_labels else requirements_of(spec))]:
        pin = Requirement(text)
        locked = versions.get(canonicalize_name(pin.name))
        if locked is None or not pin.specifier.contains(locked, prereleases=True):
            raise UserError(
                f"{spec.where} asks for {text}, and {relative(spec.lock_file)} has {locked or 'none'}: run "
                f"'{spec.command('lock')}'"
            )


def named(spec: Spec) -> recipe.Named:
    """Return the name of the images of a spec."""
    return recipe.Named(
        name=spec.target,
        extends=spec.own_labels.get(f"{LABELS}.extends", ""),
        fallback_for=spec.fallback_for or "",
        platforms=tuple(spec.platforms),
        source=dockerfile.from_root(spec.file, spec.root) if spec.workspace.one_file else dockerfile.source_of(spec),
    )


def make(spec: Spec, index: str = lock.DEFAULT, code_layer: str = "") -> Recipe:
    """Return the recipe of a spec's image when its framework comes from ``index``.

    Args:
        code_layer: diff id of the layer with the user's code; empty if there is none.
    Raises:
        UserError: there is no lock for its platform and that index, its Dockerfile was not rendered, or a pin of the
            spec is not in the lock.
    """
    _check_pins(spec, index)
    known = outline(spec, index)
    labels = known.labels | {label: pylock.digest(spec.lock_file) for label in spec.lock_labels}
    labels |= {f"{LABELS}.code": code_layer} if code_layer else {}
    locked = {"layers": _layers(spec, index), "labels": labels, "inputs": facts.inputs(spec, index)}
    locked |= {"listed": _listed(spec), "tried": _tried(spec, index)}
    locked["source"] = dockerfile.source_of(spec)
    return known.model_copy(update=locked)


def outline(spec: Spec, index: str = lock.DEFAULT) -> Recipe:
    """Return the recipe of a spec's image, locked or not, without its layers and inputs, and their labels."""
    code = spec.device_code
    versions = {str(canonicalize_name(name)): version for name, version in framework.versions_of(spec.packages).items()}
    return Recipe(
        **dict(named(spec)),
        summary=spec.summary,
        tags=(spec.target, *([spec.version_tag()] if spec.version_known else [])),
        day=spec.tag_day,
        platform=spec.platform,
        index=index,
        base=_base(spec),
        framework=recipe.Framework(
            name=spec.framework.name, version=spec.version, packages=versions, index=spec.framework.index
        ),
        layers=(),
        system=tuple(spec.libraries),
        compiler=spec.has_compiler,
        tools=tuple(spec.tools),
        environment={"PATH": dockerfile.search_path(spec)} | dockerfile.environment(spec),
        commands={name: tuple(words) for name, words in spec.trainer_commands().items()},
        default=spec.trainers.default,
        labels=facts.labels(spec) | {f"{LABELS}.index": index},
        accelerator=recipe.Accelerator(
            kind=spec.accelerator,
            cuda=code.cuda if code else "",
            driver=code.driver if code else "",
            gpus=code.text if code else "",
        ),
        level=spec.level,
        test=command_test(spec) if spec.run else _training(spec),
        budget=recipe.Budget(size=spec.budget.size, enforced=spec.limited),
        ends=tuple(recipe.End(what=end.what, day=end.day) for end in spec.ends),
        inputs={},
        site=spec.site.packages,
    )


def outlines(*specs: Spec) -> list[Recipe]:
    """Return the outlines of specs, each for its own and then for all platforms; ``source`` is a path on this host."""
    every = (each for spec in specs for each in (spec, *each_platform(spec)))
    return [outline(each).model_copy(update={"source": each.where}) for each in every]


def for_image(spec: Spec, labels: Mapping[str, str]) -> Recipe:
    """Return the recipe that an image with these labels must have, by the files of its spec as they are now.

    Raises:
        UserError: see :func:`make`; or the files that it is built from were not rendered.
    """
    label = labels.get(f"{LABELS}.index", "")
    index = label if label == spec.framework.index else lock.DEFAULT
    try:
        return make(spec, index, labels.get(f"{LABELS}.code", ""))
    except FileNotFoundError as error:
        again = spec.command("dev build" if spec.secrets else "dev render")
        raise UserError(f"{relative(Path(error.filename))} is missing: run '{again}'") from None


def locked_versions(spec: Spec) -> dict[str, set[str]]:
    """Return canonical name -> versions of the packages that a spec is locked for, on every platform and index.

    Nothing if it was never locked and its base holds the framework: that can be locked only where it can be pulled.
    """
    pins = {name: {version} for name, version in (spec.base_contents.packages if spec.base_contents else {}).items()}
    if spec.kind.layered:
        spec.locked()
    if content := spec.usable_lock:
        for platform in each_platform(spec):
            for index in content.names(platform.arch):
                for name, version in platform.locked(index).versions.items():
                    pins.setdefault(name, set()).add(version)
    return pins


def every(spec: Spec) -> list[Recipe]:
    """Return the recipes of a target or repository, for each platform and package index that it is locked for.

    That of the default index is written where `docker build` finds it (images/*/Dockerfile).

    Raises:
        UserError, StepFailed: see :func:`trainyard.image.workspace_files.prepare`; or it is not locked.
    """
    made = []
    for platform in each_platform(spec):
        with state.candidate_lock(platform.kept):
            prepared, code_layer = workspace_files.prepare(platform)
            of_platform = [make(prepared, index, code_layer) for index in dockerfile.locked_indexes(prepared)]
            write(of_platform[0], spec.context.state)
        made += of_platform
    return made


def write(recipe: Recipe, folder: Path) -> None:
    """Write a recipe into the build context ``recipe``, which is in the state folder ``folder``."""
    context = state.own(recipe.kept(folder)) / "recipe"
    context.mkdir(exist_ok=True)
    (context / FILE).write_text(recipe.text(), encoding="utf-8")
