"""Build an image as a candidate, with `docker buildx bake`, from its plan.

The candidate (`trainyard:xla-candidate`) is tagged `trainyard:xla` when it has passed verify and smoke
(:mod:`trainyard.release.candidate`).
"""

from __future__ import annotations

import contextlib
import json
import logging
import tempfile
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from trainyard import recipe as recipes
from trainyard.common import proxies, settings, stages
from trainyard.common.context import Context
from trainyard.common.docker_engine import Engine
from trainyard.common.errors import StepFailed, UserError
from trainyard.common.settings import ROOT
from trainyard.image import offline, provenance, working_directory
from trainyard.image.buildx import OnStep, Steps, bake, place
from trainyard.image.plan import Plan
from trainyard.oci import builder, layer_contents
from trainyard.oci.builder import Builder
from trainyard.spec import state
from trainyard.spec.units import in_units

logger = logging.getLogger(__name__)

#: BuildKit's output, in the folder of a target.
_LOG = "build.log"

#: Start of the names of variables with the secrets of a build. Files would stay behind a process that is killed.
_SECRET = f"{settings.PREFIX}SECRET_"

#: Compression -> its attributes of BuildKit's exporters (https://docs.docker.com/build/exporters/image-registry/).
#: zstd at level 3 packs tf-cpu to 403 MB, at level 1, the fastest, to 433 MB (`make sizes`, 2026-11).
COMPRESSIONS = {
    "zstd": "compression=zstd,compression-level=3,force-compression=true",
    "gzip": "compression=gzip,force-compression=true",  # without force, layers that were compressed before stay zstd
}


def bake_arguments(
    plan: Plan,
    *,
    compression: str,
    no_cache: bool = False,
    cache: str | None = None,
    name: str = "",
    provenance: bool = False,
) -> list[str]:
    """The arguments of ``docker buildx bake`` for a plan, except progress and metadata.

    Args:
        compression: a key of :data:`COMPRESSIONS`.
        cache: repository at a registry to import the build cache from and to export it to.
        name: reference of the image; the plan's candidate if empty.
        provenance: whether to add a provenance attestation, which makes the result an image index.
    """
    name = name or plan.recipe.candidate
    target = plan.recipe.bake_name
    build_arguments = {**plan.arguments, **(offline.NO_NETWORK if plan.context.offline else {})}
    sets = {f"args.{name}": value for name, value in build_arguments.items()}
    sets["output"] = _output(name, compression, plan.context)
    sets["tags"] = name  # overrides the tags of the bake file
    given = [f"id=ca,src={bundle}"] if (bundle := settings.ca_bundle()) else []
    given += [*(f"id={id_},env={_SECRET}{id_}" for id_ in plan.secrets), *plan.index_secrets]
    arguments = [word for secret in given for word in ("--set", f"{target}.secrets={secret}")]
    if cache:
        where = f"type=registry,ref={cache}:{target}"
        sets |= {"cache-from": where, "cache-to": f"{where},mode=max,ignore-error=true"}
    for name, value in sets.items():
        arguments += ["--set", f"{target}.{name}={value}"]
    # Without a value, which may be a secret, it is that of the environment.
    given = [] if plan.context.offline else proxies.of_builds(plan.context.engine)
    arguments += [word for name in given for word in ("--set", f"{target}.args.{name}")]
    arguments += [f"--provenance={'mode=max' if provenance else 'false'}", "--sbom=false"]
    return [*arguments, *(["--no-cache"] if no_cache else []), target]


def _output(name: str, compression: str, context: Context) -> str:
    """The exporter that leaves the image in the engine, compressed as wanted if the engine's store keeps that.

    Of a builder outside of the engine, ``type=docker`` loads the image into the engine.
    """
    if not context.engine.stores_in_containerd:
        return f"type=docker,name={name}"
    kind = "image" if builder.current(context).in_engine else "docker"
    return f"type={kind},name={name},oci-mediatypes=true,{COMPRESSIONS[compression]}"


@contextlib.contextmanager
def unnamed_on_failure(engine: Engine, reference: str) -> Iterator[None]:
    """Remove the tag ``reference`` if a build that fails or is interrupted has set it.

    The engine tags an image before it unpacks it, and a full disk or an interrupt may come in between.
    """
    before = engine.digest_of(reference)
    try:
        yield
    except BaseException:
        if engine.digest_of(reference) != before:
            engine.untag(reference)
        raise


@contextlib.contextmanager
def building(
    plan: Plan,
    *,
    compression: str = "zstd",
    no_cache: bool = False,
    cache: str | None = None,
    name: str = "",
    on_step: OnStep | None = None,
) -> Iterator[dict[str, Any]]:
    """Build the candidate of a plan; yield the facts recorded for its digest.

    The provenance is made while the block runs. If that fails, the exception is raised at the end of the block.

    Args:
        compression: a key of :data:`COMPRESSIONS`.
        cache: see :func:`bake_arguments`; a cache that cannot be imported or exported does not fail the build.
        name: reference of the image instead of the candidate; then nothing is recorded, and no provenance is kept.
        on_step: see :class:`trainyard.image.buildx.Steps`.
    Raises:
        UserError: there is no such compression.
        StepFailed: the build failed.
    """
    if compression not in COMPRESSIONS:
        raise UserError(f"'--compression {compression}': use one of {', '.join(COMPRESSIONS)}")
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(1) as background:
        used = builder.current(plan.context)
        for note in plan.built.notes:
            logger.warning(note)
        for name in [] if plan.context.offline else proxies.only_here():
            logger.warning(f"{name} is a proxy on this machine alone: the build goes without it")
        with stages.stage("build", state.seconds(plan.kept, "build")) as stage:
            facts, again = _build(
                plan, used, Path(folder), compression, name=name, on_step=on_step, no_cache=no_cache, cache=cache
            )
            if not name:
                stages.now("recording the layers")
                digest = facts["digest"]
                target, context = plan.recipe.bake_name, plan.context
                made = background.submit(provenance.keep, context, plan.kept, digest, target, *again)
                facts["layers"] = layer_contents.take(context.engine, context.state, plan.recipe.candidate)
                state.record(plan.kept, "build", digest, facts)
            stage.done = place(plan.kept / _LOG)
        yield facts
        if not name:
            made.result()


def build(plan: Plan, **how: Any) -> dict[str, Any]:
    """Build the candidate of a plan and its provenance, and return its facts; see :func:`building`."""
    with building(plan, **how) as facts:
        return facts


def as_json(facts: Mapping[str, Any]) -> dict[str, Any]:
    """Return the facts of a build for ``--json``: with what its recipe says of the image, and without the recipe."""
    recipe = recipes.parse(facts["recipe"])
    built = recipe.built
    return {name: value for name, value in facts.items() if name != "recipe"} | {
        "tag": built.tag if built else "",
        "floating_tags": list(recipe.tags),
        "index": recipe.index,
        "base": built.base if built else recipe.base.reference,
        "notes": list(built.notes) if built else [],
        "inputs": recipe.inputs,
        "versions": recipe.versions,
    }


def fetch(plan: Plan) -> dict[str, Any]:
    """Download everything that a build needs, by building it; return the facts of :func:`build`.

    Raises:
        StepFailed: see :func:`build`.
    """
    reference = f"{plan.recipe.local}-fetched"
    try:
        facts = build(plan, name=reference)
    finally:
        plan.context.engine.untag(reference)
    offline.keep(plan)
    return facts


@contextlib.contextmanager
def _offline_remedy(plan: Plan) -> Iterator[None]:
    """Add to the reason of a failed build without a network what to do about it."""
    try:
        yield
    except StepFailed as error:
        if not plan.context.offline:
            raise
        fetch_ = plan.recipe.command("dev fetch")
        raise StepFailed(f"{error}; if it had to download: run '{fetch_}' with a network") from None


def _base_contexts(plan: Plan) -> dict[str, str]:
    """Reference of a base image -> the build context that replaces it."""
    context, base = plan.context, plan.sources.base
    if context.offline:
        return offline.contexts(plan)
    in_engine = builder.current(context).in_engine
    # An image without a digest may be in the engine alone.
    sent = {} if in_engine else {name: one for name, one in plan.images().items() if "@" not in name}
    contexts = {name: working_directory.layout(context, name, architecture) for name, architecture in sent.items()}
    # The gigabytes of a base with the framework are not copied for a folder: WORKDIR sets it.
    if base in contexts or not plan.sets_folder:
        return contexts
    other = working_directory.replacement(context, base, plan.recipe.architecture, in_engine=in_engine)
    return contexts | ({base: other} if other else {})


def _digest(reference: str, metadata: dict[str, Any], used: Builder) -> str:
    """The digest of an image in the engine that has just been built.

    Args:
        metadata: of :func:`trainyard.image.buildx.bake`.
        used: the builder that built it.
    Raises:
        StepFailed: the engine has another image under that name, since it was built twice at the same time.
    """
    built = str(metadata["containerimage.digest"])
    if used.in_engine:
        return built
    loaded = used.engine.digest(reference)
    # The classic image store of an engine identifies images by their configurations.
    if loaded not in (built, metadata.get("containerimage.config.digest")):
        raise StepFailed(
            f"builder {used.name} built {reference} as {built[:19]}, and the engine has {loaded[:19]}: build it again"
        )
    return loaded


def _words(layer: recipes.Layer) -> str:
    """Return what is said while the stage of a layer runs: ``installing numpy 20.0 MB``."""
    what = layer.pins[0].name if len(layer.pins) == 1 else f"{len(layer.pins)} wheels"
    size = sum(pin.size for pin in layer.pins)
    return f"installing {what}{f' {in_units(size)}' if size else ''}"


def _build(
    plan: Plan, used: Builder, folder: Path, compression: str, *, name: str, on_step: OnStep | None, **how: Any
) -> tuple[dict[str, Any], tuple[list[str], dict[str, str]]]:
    """Build an image, and return its facts, and what builds it again with its provenance: arguments and variables.

    Args:
        folder: for files that the build reads, now and when it runs again.
        how: ``no_cache`` and ``cache`` of :func:`building`, as the other arguments.
    """
    recipe, started = plan.recipe, time.monotonic()
    bake_file = folder / "docker-bake.json"
    bake_file.write_text(_bake_file(plan), encoding="utf-8")
    variables = {f"{_SECRET}{id_}": text for id_, text in plan.secrets.items()}
    file = f"--file={bake_file}"
    arguments = [file, *bake_arguments(plan, compression=compression, name=name, **how)]
    sizes = {layer.stage: size for layer in recipe.layers if (size := sum(pin.size for pin in layer.pins))}
    steps = Steps({layer.stage: _words(layer) for layer in recipe.layers}, on_step, sizes)
    with unnamed_on_failure(plan.context.engine, name or recipe.candidate), _offline_remedy(plan):
        log = plan.kept / _LOG
        made = bake(plan.context, recipe.bake_name, arguments, variables=variables, log=log, steps=steps)
        digest = _digest(name or recipe.candidate, made, used)
    facts = {
        "digest": digest,
        "seconds": round(time.monotonic() - started, 1),
        "folder": str(plan.folder),
        "recipe": recipe.text(),
        "passed": True,
    }
    kept = provenance.local(recipe.local_name)
    again = bake_arguments(plan, compression=compression, name=kept, provenance=True)
    return facts, ([file, *again], variables)


def _bake_file(plan: Plan) -> str:
    """Return the file of ``docker buildx bake`` with the image alone."""
    file = plan.dockerfile
    target = {
        "context": ".",
        "contexts": {**plan.contexts, **_base_contexts(plan), "recipe": str(plan.kept / "recipe")},
        "dockerfile": str(file.relative_to(ROOT) if file.is_relative_to(ROOT) else file),
        "platforms": [plan.recipe.platform],
    }
    return json.dumps({"target": {plan.recipe.bake_name: target}})
