"""Plan the build of an image from its spec: what this host can reach, and the recipe of what is built then."""

from __future__ import annotations

import contextlib
import datetime
import logging
from collections.abc import Callable, Iterator
from pathlib import Path

from trainyard import recipe as recipes_
from trainyard.common.errors import UserError
from trainyard.image import (
    base_image,
    dockerfile,
    fallback,
    offline,
    package_index,
    recipes,
    target_lock,
    workspace_files,
)
from trainyard.image.facts import labels_from_arguments, other_pythons, python_argument, revision, source_date_epoch
from trainyard.image.plan import Plan, Sources
from trainyard.oci import builder
from trainyard.spec import state
from trainyard.spec.lock import DEFAULT
from trainyard.spec.model import RepositorySpec, Spec, relative
from trainyard.spec.units import in_units
from trainyard.workspace.lines import without_userinfo

logger = logging.getLogger(__name__)


@contextlib.contextmanager
def planned(spec: Spec) -> Iterator[Plan]:
    """Plan the build of the candidate of ``spec``, which no other process may build meanwhile.

    Raises:
        UserError, StepFailed: see :func:`plan_for`.
    """
    with state.candidate_lock(spec.kept):
        builder.current(spec.context).require(spec.architecture)
        yield plan_for(spec)


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
        found = offline.recall(spec.kept, spec.command("dev fetch"))
    else:
        spec, found = _reachable(spec)
    in_place = [text] if (text := fallback.note(spec)) else []
    return make_plan(spec, found.model_copy(update={"notes": [*in_place, *found.notes]}), code)


def make_plan(spec: Spec, sources: Sources, code_layer: str = "") -> Plan:
    """Return the plan of a build from what a host can reach, and write the recipe where the build reads it.

    Args:
        code_layer: diff id of the layer with the user's code; empty if there is none.
    """
    recipe = recipes.make(spec, sources.index, code_layer)
    epoch = source_date_epoch(spec.root)
    committed = datetime.datetime.fromtimestamp(epoch, tz=datetime.UTC)
    day = recipe.day or committed.strftime("%Y%m%d")
    tag = f"{recipe.version_tag}-{day}-{recipe.content_hash(sources.base_digest or sources.base)}"
    recipe = recipe.model_copy(
        update={
            "built": recipes_.Built(
                tag=f"{tag}-{spec.arch}" if len(spec.platforms) > 1 else tag,
                created=committed.strftime("%Y-%m-%dT%H:%M:%SZ"),
                revision=revision(spec.root),
                base=sources.base,
                base_digest=sources.base_digest,
                notes=tuple(sources.notes),
            )
        }
    )
    recipes.write(recipe, spec.context.state)
    compile_base = _compile_base(spec, sources)
    return Plan(
        recipe=recipe,
        sources=sources,
        dockerfile=spec.dockerfile(sources.index),
        contexts=dockerfile.contexts(spec),
        arguments=_arguments(spec, recipe, sources, compile_base) | {"SOURCE_DATE_EPOCH": str(epoch)},
        secrets=workspace_files.secrets(spec),
        index_secrets=tuple(package_index.secrets(sources.index)),
        folder=spec.folder,
        sets_folder=not spec.framework_in_base,
        context=spec.context,
    )


def _arguments(spec: Spec, recipe: recipes_.Recipe, sources: Sources, compile_base: str) -> dict[str, str]:
    """Return values of the Dockerfile's ARGs."""
    labels = recipe.image_labels()
    optional = {"COMPILE_BASE": compile_base, "INDEX_URL": sources.index_url}
    optional |= {name: labels.get(label, "") for label, name in labels_from_arguments(spec).items()}
    return (
        spec.kind.arguments(spec.version, sources.build_base or sources.base)
        | {name: value for name, value in optional.items() if value}
        | {python_argument(name): reference for name, reference in sources.pythons.items()}
        | {"BASE": sources.base, "BASE_DIGEST": sources.base_digest, "RECIPE": recipes_.digest(recipe.text())}
    )


def _compile_base(spec: Spec, found: Sources) -> str:
    """Return the reference of the image in which source distributions are compiled; empty if there are none.

    What is compiled must be run on the image's platform, and the build base is on that of the engine.
    """
    if not spec.locked().compiled and not spec.workspace.compiles_own:
        return ""
    return found.build_base or found.base if spec.arch == spec.context.engine.architecture else found.base


def _reachable(spec: Spec) -> tuple[Spec, Sources]:
    """Return the index and the base that this host can reach, and the spec, locked for that index."""
    index, reason = package_index.choose(spec)
    notes = []
    if reason:
        notes.append(
            f"index {spec.framework.index} is unreachable ({reason}): {', '.join(spec.packages)} come from "
            f"the default index{_of_nvidia(spec)}"
        )
    spec.locked()  # reports a lock that is missing or cannot be used before anything is downloaded
    if spec.usable_lock and index not in spec.usable_lock.names(spec.arch):
        reason = f"no lock for index {index} yet: resolving one; commit it"
        spec = _completed(spec, reason, target_lock.lock_index, index)
    if spec.usable_lock and index not in spec.usable_lock.names(spec.arch):
        notes.append(
            f"{spec.lock_file.name} has no packages of index {index}: run 'trainyard lock --upgrade' to add them"
        )
        index = DEFAULT
    if not reason:
        notes += _for_cuda(spec, index)
    origin = spec.usable_lock.origin if spec.usable_lock else None
    machine = builder.current(spec.context).machine(spec.architecture)
    locked = origin.base if origin else ""
    found = base_image.resolve(spec.context, spec.base, locked, spec.architecture, machine)
    if found.note:
        notes.append(found.note)
    pythons, missing = base_image.pythons(spec.context, other_pythons(spec), machine)
    notes += missing
    index_spec = spec.index_spec()
    return spec, Sources(
        index=index,
        index_url=without_userinfo(package_index.url(index, index_spec)) if index != DEFAULT and index_spec else "",
        base=found.reference,
        base_digest=found.digest,
        build_base=found.build_base,
        pythons=pythons,
        notes=notes,
    )


def _for_cuda(spec: Spec, index: str) -> list[str]:
    """Return a note if the requirements of a repository bring libraries of CUDA into its image for CPUs."""
    more = _of_nvidia(spec, index) if spec.target_below and spec.accelerator == "none" else ""
    return [f"{spec.where}: an image for CPUs{more}: a requirement is for CUDA, as jax[cuda] is"] if more else []


def _of_nvidia(spec: Spec, index: str = DEFAULT) -> str:
    """Return what the builds for CUDA cost that an index has, as the end of a note; empty if there are none."""
    pins = [pin for pin in spec.locked(index).pins if pin.name.startswith("nvidia-")]
    if not pins:
        return ""
    return f", with {len(pins)} packages of NVIDIA, {in_units(sum(pin.size for pin in pins))} to download"


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


def _with_framework_in_base(spec: Spec) -> tuple[Spec, Sources]:
    """Return the spec, and its base that holds the framework: on the digest that the lock records.

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
    machine = builder.current(spec.context).machine(spec.architecture)
    pythons, notes = base_image.pythons(spec.context, other_pythons(spec), machine)
    if not locked.digest:
        notes.insert(0, f"base {base} has no digest, as it comes from no registry")
    return spec, Sources(
        index=DEFAULT, index_url="", base=base, base_digest=locked.digest, build_base="", pythons=pythons, notes=notes
    )
