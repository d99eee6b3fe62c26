"""Make the recipe of an image from its spec and its lock."""

from __future__ import annotations

from collections.abc import Iterable

from packaging.utils import canonicalize_name

from trainyard import recipe
from trainyard.image import dockerfile, plan, workspace_files
from trainyard.recipe import Recipe
from trainyard.spec import framework, lock
from trainyard.spec.model import Spec, each_platform
from trainyard.spec.naming import LABELS


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
    layers = tuple(
        recipe.Layer(stage=layer.stage, index=layer.index, private=layer.private, pins=_pins(layer.pins))
        for layer in dockerfile.wheels(spec, index)
    )
    if "requirements" in spec.kind.layered:
        return layers
    pins = _pins(spec.locked(index).requirements)
    return (*layers, recipe.Layer(stage="requirements", index=False, private=bool(spec.secrets), pins=pins))


def _test(spec: Spec) -> recipe.Training | recipe.Command:
    if not spec.run:
        smoke = spec.smoke
        return recipe.Training(trainer=smoke.trainer, accuracy=smoke.accuracy, epochs=smoke.epochs)
    run = spec.workspace.document.smoke
    if run is None:
        return recipe.Command(args=None, data=False, expect=None, seconds=None, resume=False, timeout=600)
    return recipe.Command(
        args=tuple(run.args),
        data=bool(run.data),
        expect=run.expect,
        seconds=run.seconds,
        resume=run.resume,
        timeout=run.timeout,
    )


def make(spec: Spec, index: str = lock.DEFAULT) -> Recipe:
    """Return the recipe of a spec's image when its framework comes from ``index``.

    Raises:
        UserError: there is no lock for its platform and that index, or its Dockerfile was not rendered.
    """
    code, locked = spec.device_code, spec.locked(index)
    versions = {str(canonicalize_name(name)): version for name, version in framework.versions_of(spec.packages).items()}
    return Recipe(
        name=spec.target,
        extends=spec.own_labels.get(f"{LABELS}.extends", ""),
        fallback_for=spec.fallback_for or "",
        summary=spec.summary,
        tags=(spec.target, spec.version_tag()),
        day=spec.tag_day,
        platform=spec.platform,
        platforms=tuple(spec.platforms),
        index=index,
        base=_base(spec),
        framework=recipe.Framework(name=spec.framework.name, version=spec.version, packages=versions),
        layers=_layers(spec, index),
        compiled=_pins(lock.parse(locked.text("compiled"))),
        system=tuple(spec.system),
        compiler=spec.has_compiler,
        tools=tuple(spec.tools),
        environment={"PATH": dockerfile.search_path(spec)} | dockerfile.environment(spec),
        commands={name: tuple(words) for name, words in spec.trainer_commands().items()},
        default=spec.trainers.default,
        labels=plan.labels(spec),
        accelerator=recipe.Accelerator(
            kind=spec.accelerator,
            cuda=code.cuda if code else "",
            driver=code.driver if code else "",
            gpus=code.text if code else "",
        ),
        level=spec.level,
        test=_test(spec),
        budget=recipe.Budget(size=spec.budget.size, enforced=spec.limited),
        ends=tuple(recipe.End(what=end.what, day=end.day) for end in spec.ends),
        inputs=plan.inputs(spec, index),
    )


def every(spec: Spec) -> list[Recipe]:
    """Return the recipes of a target or repository, for each platform and package index that it is locked for.

    Raises:
        UserError, StepFailed: see :func:`trainyard.image.workspace_files.prepare`; or it is not locked.
    """
    made = []
    for platform in each_platform(spec):
        prepared, _ = workspace_files.prepare(platform)
        made += [make(prepared, index) for index in dockerfile.locked_indexes(prepared)]
    return made
