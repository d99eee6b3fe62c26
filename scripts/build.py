"""Build a target's image as a candidate, with `docker buildx bake`, from its locks.

    make build TARGET=xla [COMPRESSION=zstd|gzip] [NO_CACHE=1]

The candidate (`trainyard:xla-candidate`) becomes `trainyard:xla` when it has passed verify and smoke (`make image`).
"""

from __future__ import annotations

import contextlib
import os
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import docker.errors

from scripts import base, cli, engine, indexes, lock, locks, render, state
from scripts.bake import bake
from scripts.cli import UserError, say, warn
from scripts.plan import Plan, make_plan
from scripts.published import provenance
from scripts.spec import IMAGES, Spec, held_file, load, relative

#: zstd at level 1: a 6.9 GB venv exported in 51 s where gzip took 208 s for 8.5 GB (2 cores; design's facts).
COMPRESSIONS = {
    "zstd": "compression=zstd,compression-level=1,force-compression=true",
    "gzip": "compression=gzip,force-compression=true",  # or layers that were packed before stay as they are
}


def plan_for(spec: Spec) -> Plan:
    """Find out what this host can reach and plan the build accordingly; every fallback is in ``Plan.notes``."""
    if spec.on_framework:
        return _plan_on_framework(spec)
    index, reason = indexes.choose(spec)
    notes = []
    if reason:
        notes.append(
            f"index {spec.framework.index} is out of reach ({reason}): {', '.join(spec.framework.packages)} come from "
            "the default index, which may mean CUDA builds and a larger image"
        )
    pair = (locks.framework_lock(spec, index), locks.requirements_lock(spec, index))
    if index != "default" and not all(path.is_file() for path in pair):
        say(f"no lock for index {index} yet: resolving one; commit it")
        for path in lock.lock_target(spec, index):
            say(f"wrote {relative(path)}")
    locks.installed(spec, index)  # missing or broken locks are refused here, before anything is downloaded
    found = base.resolve(spec.base)
    if found.note:
        notes.append(found.note)
    index_spec = spec.index_spec()
    address = indexes.url(index, index_spec) if index != "default" and index_spec else ""
    return make_plan(
        spec,
        index=index,
        index_url=address,
        base=found.reference,
        base_digest=found.digest,
        notes=tuple(notes),
        workshop=found.workshop,
    )


def _plan_on_framework(spec: Spec) -> Plan:
    """The plan of an image whose base holds the framework: on what was found in it when it was locked.

    A base that was never locked, or another than was locked, is looked into first.
    """
    asked = base.asked_for(spec.base)
    if spec.held is None or spec.held.image != asked:
        say(f"base {asked} is not the one of {relative(held_file(spec))}: locking; commit it to build the same again")
        for path in lock.lock_target(spec, "default"):
            say(f"wrote {relative(path)}")
        spec = load(str(spec.folder))
    assert spec.held is not None
    locks.installed(spec, "default")
    note = None if spec.held.digest else f"base {asked} has no digest: no registry was asked for it"
    return make_plan(
        spec,
        index="default",
        index_url="",
        base=spec.held.reference,
        base_digest=spec.held.digest,
        notes=(note,) if note else (),
    )


def check_rendered(spec: Spec) -> None:
    """Refuse to build from generated files that are not what the specs give.

    Raises:
        UserError: they drifted; the line names them.
    """
    drifted = render.drift(spec)
    if drifted:
        names = ", ".join(relative(path) for path in drifted)
        raise UserError(f"{names}: not what the spec gives; run 'make render' and look at the difference")


def bake_arguments(
    plan: Plan,
    *,
    compression: str,
    no_cache: bool = False,
    cache: str | None = None,
    name: str = "",
    provenance: bool = False,
) -> list[str]:
    """The arguments of ``docker buildx bake`` for a plan, but for progress and metadata.

    Args:
        cache: repository of a registry to take cached steps from, and to leave this build's in.
        name: what the image is called; the plan's candidate if empty.
        provenance: whether to put BuildKit's account of the build beside the image, in an index around both.
    """
    name = name or plan.candidate
    target = plan.spec.target
    sets = {f"args.{name}": value for name, value in plan.build_args().items()}
    output = f"type=image,name={name}"
    if engine.stores_in_containerd():
        output += f",oci-mediatypes=true,{COMPRESSIONS[compression]}"
    else:
        output = f"type=docker,name={name}"
    sets["output"] = output
    sets["tags"] = name  # or those of the bake file hold
    bundle = engine.ca_bundle()
    if bundle:
        sets["secrets"] = f"id=ca,src={bundle}"
    if cache:
        where = f"type=registry,ref={cache}:{target}"
        sets |= {"cache-from": where, "cache-to": f"{where},mode=max,ignore-error=true"}
    arguments: list[str] = []
    for name, value in sets.items():
        arguments += ["--set", f"{target}.{name}={value}"]
    arguments += [f"--provenance={'mode=max' if provenance else 'false'}", "--sbom=false"]
    return [*arguments, *(["--no-cache"] if no_cache else []), target]


@contextlib.contextmanager
def unnamed_on_failure(reference: str) -> Iterator[None]:
    """Take a name off what a build that fails or is interrupted gave it to: the engine names an image before it unpacks
    it, and a full disk or an interrupt may come in between."""

    def identity() -> str | None:
        try:
            return str(engine.client().images.get(reference).id)
        except docker.errors.ImageNotFound:
            return None

    before = identity()
    try:
        yield
    except BaseException:
        if identity() != before:
            engine.forget(reference)
        raise


def build(
    spec: Spec, *, compression: str = "zstd", no_cache: bool = False, cache: str | None = None, name: str = ""
) -> tuple[Plan, dict[str, Any]]:
    """Build the candidate of ``spec``; the plan, and the facts recorded for its digest.

    Args:
        cache: see :func:`bake_arguments`; one that cannot be read or written costs time, not the build.
        name: what to call the image instead of the candidate; then nothing is recorded, and no provenance is kept.
    Raises:
        UserError: generated files drifted, or a lock is missing.
        StepFailed: the build failed; BuildKit's words stand above.
    """
    if compression not in COMPRESSIONS:
        raise UserError(f"COMPRESSION={compression!r}: use one of {', '.join(COMPRESSIONS)}")
    check_rendered(spec)
    with contextlib.nullcontext() if name else state.candidate_of(spec.target):
        return _build(spec, compression=compression, no_cache=no_cache, cache=cache, name=name)


def _build(
    spec: Spec, *, compression: str, no_cache: bool, cache: str | None, name: str
) -> tuple[Plan, dict[str, Any]]:
    engine.client()
    plan = plan_for(spec)
    for note in plan.notes:
        warn(note)
    started = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        own = spec.folder.parent != IMAGES
        bake_file = Path(folder) / "docker-bake.json" if own else render.BAKE_FILE
        if own:
            bake_file.write_text(render.bake([spec]), encoding="utf-8")
        file = f"--file={bake_file}"
        arguments = bake_arguments(plan, compression=compression, no_cache=no_cache, cache=cache, name=name)
        with unnamed_on_failure(name or plan.candidate):
            digest = str(bake(spec.target, [file, *arguments])["containerimage.digest"])
        seconds = time.monotonic() - started
        if not name:
            again = bake_arguments(plan, compression=compression, name=provenance.local(spec.target), provenance=True)
            provenance.keep(spec.target, digest, [file, *again])
    facts = {
        "seconds": round(seconds, 1),
        "tag": plan.tag,
        "moving": list(plan.moving),
        "index": plan.index,
        "base": plan.base,
        "notes": list(plan.notes),
        "passed": True,
    }
    if not name:
        state.record(spec.target, "build", digest, facts)
    return plan, {"digest": digest} | facts


def main(arguments: list[str]) -> int:
    options = cli.parser(__doc__).parse_args(arguments)
    spec = load(options.target)
    plan, facts = build(
        spec,
        compression=os.environ.get("COMPRESSION") or "zstd",
        no_cache=bool(os.environ.get("NO_CACHE")),
    )
    say(f"built {plan.candidate} {facts['digest']} in {facts['seconds']} s")
    cli.result({"image": plan.candidate} | facts, as_json=options.json)
    return 0


if __name__ == "__main__":
    cli.run(main)
