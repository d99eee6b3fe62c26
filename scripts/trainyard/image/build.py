"""Build a target's image as a candidate, with `docker buildx bake`, from its locks.

The candidate (`trainyard:xla-candidate`) is tagged `trainyard:xla` when it has passed verify and smoke
(:mod:`trainyard.release.candidate`).
"""

from __future__ import annotations

import contextlib
import logging
import tempfile
import time
from collections.abc import Callable, Collection, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from trainyard.common import settings, stages
from trainyard.common.context import Context
from trainyard.common.errors import StepFailed, UserError
from trainyard.image import (
    base_image,
    dockerfile,
    fallback,
    offline,
    package_index,
    provenance,
    target_lock,
    working_directory,
    workspace_files,
)
from trainyard.image.buildx import OnStep, Steps, bake, place
from trainyard.image.plan import Plan, inputs, make_plan, other_pythons
from trainyard.image.wheel_layers import WheelLayer
from trainyard.oci import builder, docker_engine, layer_contents
from trainyard.oci.builder import Builder
from trainyard.oci.docker_engine import digest_of
from trainyard.spec import lock, state
from trainyard.spec.lock import DEFAULT
from trainyard.spec.model import IMAGES, RepositorySpec, Spec, relative
from trainyard.spec.naming import NAME
from trainyard.spec.units import in_units
from trainyard.workspace.lines import without_userinfo

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


def plan_for(spec: Spec) -> Plan:
    """Find out which index and base this host can reach, and plan the build; every fallback is in ``Plan.notes``.

    Locks that are missing for a reachable index are resolved first. Offline, index and base are those of the last build
    that was fetched.

    Raises:
        UserError: a lock is missing or damaged, or there is no base; or nothing was fetched for an offline build.
        StepFailed: locks could not be resolved, or the base not bootstrapped.
    """
    spec, code = workspace_files.prepare(spec)
    if spec.framework_in_base:
        spec, found = _with_framework_in_base(spec)
    elif spec.context.offline:
        found = offline.recall(spec)
    else:
        spec, found = _reachable(spec)
    in_place = [text] if (text := fallback.note(spec)) else []
    found = found.model_copy(update={"notes": (*in_place, *found.notes)})
    return make_plan(spec, **dict(found), compile_base=_compile_base(spec, found), code=code)


def _compile_base(spec: Spec, found: offline.Sources) -> str:
    """Reference of the image in which source distributions are compiled; empty if there are none.

    What is compiled must be run on the image's platform, and the build base is on that of the engine.
    """
    if "compiled" not in spec.locked().texts:
        return ""
    return found.build_base or found.base if spec.architecture == docker_engine.architecture() else found.base


def _reachable(spec: Spec) -> tuple[Spec, offline.Sources]:
    """Return the index and the base that this host can reach, and the spec, locked for that index."""
    index, reason = package_index.choose(spec)
    notes = []
    if reason:
        notes.append(
            f"index {spec.framework.index} is unreachable ({reason}): {', '.join(spec.packages)} come from "
            "the default index, possibly as CUDA builds, which make a larger image"
        )
    spec.locked()  # reports a lock that is missing or cannot be used before anything is downloaded
    if spec.usable_lock and index not in spec.usable_lock.indexes(spec.arch):
        reason = f"no lock for index {index} yet: resolving one; commit it"
        spec = _completed(spec, reason, target_lock.lock_index, index)
    if spec.usable_lock and index not in spec.usable_lock.indexes(spec.arch):
        notes.append(f"{lock.FILE} has no packages of index {index}: run 'trainyard lock --upgrade' to add them")
        index = DEFAULT
    origin = spec.usable_lock.origin if spec.usable_lock else None
    machine = builder.current(spec.context.builder).machine(spec.architecture)
    locked = origin.base if origin else ""
    found = base_image.resolve(spec.base, locked, spec.architecture, machine, builder_name=spec.context.builder)
    if found.note:
        notes.append(found.note)
    pythons, missing = base_image.pythons(other_pythons(spec), machine, builder_name=spec.context.builder)
    notes += missing
    index_spec = spec.index_spec()
    return spec, offline.Sources(
        index=index,
        index_url=without_userinfo(package_index.url(index, index_spec)) if index != DEFAULT and index_spec else "",
        base=found.reference,
        base_digest=found.digest,
        build_base=found.build_base,
        pythons=pythons,
        notes=notes,
    )


def fetch(spec: Spec) -> dict[str, Any]:
    """Download everything that building ``spec`` needs, by building it; the result of :func:`build`.

    Raises:
        UserError, StepFailed: see :func:`build`.
    """
    with state.candidate_lock(spec.kept):
        reference = f"{NAME}:{spec.local_name}-fetched"
        try:
            plan, facts = build(spec, name=reference)
        finally:
            docker_engine.untag(reference)
        offline.keep(spec, offline.Sources.model_validate(plan, from_attributes=True))
    return facts


def _completed(spec: Spec, reason: str, add: Callable[..., tuple[Spec, list[Path]]], *what: str) -> Spec:
    """Return the spec with a lock to which a build adds; that of a repository is written before, and stays as it is.

    Args:
        add: function of :mod:`trainyard.image.target_lock` that is called with the spec and ``what``.
    """
    if isinstance(spec, RepositorySpec):
        return spec
    logger.info(reason)
    spec, written = add(spec, *what)
    for path in written:
        logger.info(f"wrote {relative(path)}")
    return spec


def _with_framework_in_base(spec: Spec) -> tuple[Spec, offline.Sources]:
    """Return the spec, and its base that holds the framework: on the digest that trainyard.lock records.

    If the base of a target was never locked, or another one is configured now, it is inspected and locked first.
    """
    configured = base_image.configured_reference(spec.base)
    known = spec.base_contents
    if known is None or known.image != configured:
        reason = f"base {configured} is not the one of {relative(spec.lock_file)}: locking; commit the files to build "
        spec = _completed(spec, reason + "the same image again", target_lock.lock)
    spec.locked()
    if (locked := spec.base_contents) is None:
        raise UserError(f"{relative(spec.lock_file)}: not of base {configured}: run '{spec.command('lock')}'")
    # The same image may be at the registry that BASE names.
    base = configured if locked.digest and configured.endswith(f"@{locked.digest}") else locked.reference
    machine = builder.current(spec.context.builder).machine(spec.architecture)
    pythons, notes = base_image.pythons(other_pythons(spec), machine, builder_name=spec.context.builder)
    if not locked.digest:
        notes.insert(0, f"base {base} has no digest, as it comes from no registry")
    return spec, offline.Sources(
        index=DEFAULT, index_url="", base=base, base_digest=locked.digest, build_base="", pythons=pythons, notes=notes
    )


def bake_arguments(
    plan: Plan,
    *,
    compression: str,
    no_cache: bool = False,
    cache: str | None = None,
    name: str = "",
    provenance: bool = False,
    secrets: Collection[str] = (),
) -> list[str]:
    """The arguments of ``docker buildx bake`` for a plan, except progress and metadata.

    Args:
        compression: a key of :data:`COMPRESSIONS`.
        cache: repository at a registry to import the build cache from and to export it to.
        name: reference of the image; the plan's candidate if empty.
        provenance: whether to add a provenance attestation, which makes the result an image index.
        secrets: ids of secrets of the Dockerfile, whose texts are in variables; besides the CA bundle and the index.
    """
    name = name or plan.candidate
    target = plan.spec.bake_name
    build_arguments = plan.build_args() | (offline.NO_NETWORK if plan.spec.context.offline else {})
    sets = {f"args.{name}": value for name, value in build_arguments.items()}
    sets["output"] = _output(name, compression, plan.spec.context)
    sets["tags"] = name  # overrides the tags of the bake file
    given = [f"id=ca,src={bundle}"] if (bundle := settings.ca_bundle()) else []
    given += [*(f"id={id_},env={_SECRET}{id_}" for id_ in secrets), *package_index.secrets(plan.index)]
    sets["dockerfile"] = dockerfile.from_root(plan.spec.dockerfile(plan.index))
    arguments = [word for secret in given for word in ("--set", f"{target}.secrets={secret}")]
    if cache:
        where = f"type=registry,ref={cache}:{target}"
        sets |= {"cache-from": where, "cache-to": f"{where},mode=max,ignore-error=true"}
    for name, value in sets.items():
        arguments += ["--set", f"{target}.{name}={value}"]
    arguments += [f"--provenance={'mode=max' if provenance else 'false'}", "--sbom=false"]
    return [*arguments, *(["--no-cache"] if no_cache else []), target]


def _output(name: str, compression: str, context: Context) -> str:
    """The exporter that leaves the image in the engine, compressed as wanted if the engine's store keeps that.

    Of a builder outside of the engine, ``type=docker`` loads the image into the engine.
    """
    if not docker_engine.stores_in_containerd():
        return f"type=docker,name={name}"
    kind = "image" if builder.current(context.builder).in_engine else "docker"
    return f"type={kind},name={name},oci-mediatypes=true,{COMPRESSIONS[compression]}"


@contextlib.contextmanager
def unnamed_on_failure(reference: str) -> Iterator[None]:
    """Remove the tag ``reference`` if a build that fails or is interrupted has set it.

    The engine tags an image before it unpacks it, and a full disk or an interrupt may come in between.
    """
    before = digest_of(reference)
    try:
        yield
    except BaseException:
        if digest_of(reference) != before:
            docker_engine.untag(reference)
        raise


@contextlib.contextmanager
def building(
    spec: Spec,
    *,
    compression: str = "zstd",
    no_cache: bool = False,
    cache: str | None = None,
    name: str = "",
    on_step: OnStep | None = None,
) -> Iterator[tuple[Plan, dict[str, Any]]]:
    """Build the candidate of ``spec``; yield the plan, and the facts recorded for its digest.

    The provenance is made while the block runs. If that fails, the exception is raised at the end of the block.

    Args:
        compression: a key of :data:`COMPRESSIONS`.
        cache: see :func:`bake_arguments`; a cache that cannot be imported or exported does not fail the build.
        name: reference of the image instead of the candidate; then nothing is recorded, and no provenance is kept.
        on_step: see :class:`trainyard.image.buildx.Steps`.
    Raises:
        UserError: generated files are out of date, or a lock is missing.
        StepFailed: the build failed.
    """
    if compression not in COMPRESSIONS:
        raise UserError(f"'--compression {compression}': use one of {', '.join(COMPRESSIONS)}")
    with (
        contextlib.nullcontext() if name else state.candidate_lock(spec.kept),
        tempfile.TemporaryDirectory() as folder,
        ThreadPoolExecutor(1) as background,
    ):
        used = builder.current(spec.context.builder)
        used.require(spec.architecture)
        plan = plan_for(spec)
        spec = plan.spec
        for note in plan.notes:
            logger.warning(note)
        with stages.stage("build", state.seconds(spec.kept, "build")) as stage:
            facts, again = _build(
                plan, used, Path(folder), compression, name=name, on_step=on_step, no_cache=no_cache, cache=cache
            )
            if not name:
                stages.now("recording the layers")
                digest = facts["digest"]
                made = background.submit(
                    provenance.keep, spec.kept, digest, spec.bake_name, *again, spec.context.builder
                )
                facts["layers"] = layer_contents.take(spec.context.state, plan.candidate)
                state.record(spec.kept, "build", digest, facts)
            stage.done = place(spec.kept / _LOG)
        yield plan, facts
        if not name:
            made.result()


def build(spec: Spec, **how: Any) -> tuple[Plan, dict[str, Any]]:
    """Build the candidate of ``spec`` and its provenance; see :func:`building`."""
    with building(spec, **how) as made:
        return made


@contextlib.contextmanager
def _offline_remedy(spec: Spec) -> Iterator[None]:
    """Add to the reason of a failed build without a network what to do about it."""
    try:
        yield
    except StepFailed as error:
        if not spec.context.offline:
            raise
        raise StepFailed(f"{error}; if it had to download: run '{spec.command('dev fetch')}' with a network") from None


def _base_contexts(plan: Plan) -> dict[str, str]:
    """Reference of a base image -> the build context that replaces it."""
    context = plan.spec.context
    if context.offline:
        return offline.contexts(plan)
    in_engine = builder.current(context.builder).in_engine
    # An image without a digest may be in the engine alone.
    sent = {} if in_engine else {name: one for name, one in offline.images(plan).items() if "@" not in name}
    contexts = {
        name: working_directory.layout(context.state, name, architecture) for name, architecture in sent.items()
    }
    # The gigabytes of a base with the framework are not copied for a folder: WORKDIR sets it.
    if plan.base in contexts or plan.spec.framework_in_base:
        return contexts
    other = working_directory.context(context.state, plan.base, plan.spec.architecture, in_engine=in_engine)
    return contexts | ({plan.base: other} if other else {})


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
    loaded = docker_engine.digest(reference)
    # The classic image store of an engine identifies images by their configurations.
    if loaded not in (built, metadata.get("containerimage.config.digest")):
        raise StepFailed(
            f"builder {used.name} built {reference} as {built[:19]}, and the engine has {loaded[:19]}: build it again"
        )
    return loaded


def _words(layer: WheelLayer) -> str:
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
    spec = plan.spec
    made_of = inputs(spec, plan.index)
    started = time.monotonic()
    bases = _base_contexts(plan)
    own = spec.folder.parent != IMAGES or bool(bases)
    bake_file = folder / "docker-bake.json" if own else dockerfile.BAKE_FILE
    if own:
        bake_file.write_text(dockerfile.bake([spec], bases), encoding="utf-8")
    secrets = workspace_files.secrets(spec)
    variables = {f"{_SECRET}{id_}": text for id_, text in secrets.items()}
    file = f"--file={bake_file}"
    arguments = [file, *bake_arguments(plan, compression=compression, name=name, secrets=secrets, **how)]
    steps = Steps({layer.stage: _words(layer) for layer in dockerfile.wheels(spec, plan.index)}, on_step)
    with unnamed_on_failure(name or plan.candidate), _offline_remedy(spec):
        made = bake(
            spec.bake_name, arguments, name=spec.context.builder, variables=variables, log=spec.kept / _LOG, steps=steps
        )
        digest = _digest(name or plan.candidate, made, used)
    facts = {
        "digest": digest,
        "seconds": round(time.monotonic() - started, 1),
        "folder": str(spec.folder),
        "tag": plan.tag,
        "floating_tags": list(plan.floating_tags),
        "index": plan.index,
        "base": plan.base,
        "notes": list(plan.notes),
        "inputs": made_of,
        "versions": spec.locked(plan.index).versions,
        "passed": True,
    }
    kept = provenance.local(spec.local_name)
    again = bake_arguments(plan, compression=compression, name=kept, provenance=True, secrets=secrets)
    return facts, ([file, *again], variables)
