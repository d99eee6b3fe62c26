"""Build a target's image as a candidate, with `docker buildx bake`, from its locks.

    make build TARGET=xla [COMPRESSION=zstd|gzip] [NO_CACHE=1]

The candidate (`trainyard:xla-candidate`) becomes `trainyard:xla` when it has passed verify and smoke (`make image`).
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from scripts import base, cli, engine, indexes, lock, locks, render, state
from scripts.cli import UserError, say, warn
from scripts.plan import Plan, make_plan
from scripts.spec import IMAGES, Spec, load, relative

#: zstd at level 1: a 6.9 GB venv exported in 51 s where gzip took 208 s for 8.5 GB (2 cores; design's facts).
COMPRESSIONS = {
    "zstd": "compression=zstd,compression-level=1,force-compression=true",
    "gzip": "compression=gzip",
}


def plan_for(spec: Spec) -> Plan:
    """Find out what this host can reach and plan the build accordingly; every fallback is in ``Plan.notes``."""
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


def bake_arguments(plan: Plan, *, compression: str, no_cache: bool = False) -> list[str]:
    """The arguments of ``docker buildx bake`` for a plan, but for progress and metadata."""
    target = plan.spec.target
    sets = {f"args.{name}": value for name, value in plan.build_args().items()}
    output = f"type=image,name={plan.candidate}"
    if engine.stores_in_containerd():
        output += f",oci-mediatypes=true,{COMPRESSIONS[compression]}"
    else:
        output = f"type=docker,name={plan.candidate}"
    sets["output"] = output
    bundle = engine.ca_bundle()
    if bundle:
        sets["secrets"] = f"id=ca,src={bundle}"
    arguments: list[str] = []
    for name, value in sets.items():
        arguments += ["--set", f"{target}.{name}={value}"]
    # Provenance holds times: it is attached when an image is published, not built.
    arguments += ["--provenance=false", "--sbom=false"]
    return [*arguments, *(["--no-cache"] if no_cache else []), target]


def build(spec: Spec, *, compression: str = "zstd", no_cache: bool = False) -> tuple[Plan, dict[str, Any]]:
    """Build the candidate of ``spec``; the plan, and the facts recorded for its digest.

    Raises:
        UserError: generated files drifted, or a lock is missing.
        StepFailed: the build failed; BuildKit's words stand above.
    """
    if compression not in COMPRESSIONS:
        raise UserError(f"COMPRESSION={compression!r}: use one of {', '.join(COMPRESSIONS)}")
    check_rendered(spec)
    engine.client()
    plan = plan_for(spec)
    for note in plan.notes:
        warn(note)
    started = time.monotonic()
    progress = "auto" if sys.stderr.isatty() else "plain"
    with tempfile.TemporaryDirectory() as folder:
        metadata = Path(folder) / "metadata.json"
        own = spec.folder.parent != IMAGES
        bake_file = Path(folder) / "docker-bake.json" if own else render.BAKE_FILE
        if own:
            bake_file.write_text(render.bake([spec]), encoding="utf-8")
        engine.buildx(
            "bake",
            f"--progress={progress}",
            f"--metadata-file={metadata}",
            f"--file={bake_file}",
            *bake_arguments(plan, compression=compression, no_cache=no_cache),
        )
        built = json.loads(metadata.read_text(encoding="utf-8"))[spec.target]
    seconds = time.monotonic() - started
    digest = str(built["containerimage.digest"])
    facts = {
        "seconds": round(seconds, 1),
        "tag": plan.tag,
        "moving": list(plan.moving),
        "index": plan.index,
        "base": plan.base,
        "notes": list(plan.notes),
        "passed": True,
    }
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
