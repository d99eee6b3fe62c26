"""Check that an image is what its spec, its locks, its labels and its tags say, in seconds and without an accelerator.

    make verify TARGET=tf-cpu
    make verify IMAGE=registry.example/team/image:tag [TARGET=mine]

It looks at the candidate (`trainyard:tf-cpu-candidate`), or at `trainyard:tf-cpu` where there is no candidate; with
IMAGE at any other one, which is pulled if it is not here. Without TARGET that is held against the rules that need no
spec. The rules are the functions of scripts/rules.
"""

from __future__ import annotations

import os
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from typing import Any

import docker.errors
from rich.table import Table

from scripts import cli, engine, findings, plan, rules, state, waivers
from scripts.cli import StepFailed, UserError, log, say, warn
from scripts.findings import Finding
from scripts.rules import Evidence, Inside, Package, applicable
from scripts.spec import Spec, load, relative, targets
from scripts.stored import inside, layers
from scripts.stored.layers import Stored
from scripts.units import in_units


def probe(reference: str) -> Inside:
    """What Python sees inside the image.

    Raises:
        StepFailed: the image has no Python that runs; the message ends with its last word.
    """
    found = inside.look(reference)
    bytecode = found["bytecode"]
    return Inside(
        python=found["python"],
        packages=tuple(Package(**entry | {"requires": tuple(entry["requires"])}) for entry in found["packages"]),
        sources=bytecode["sources"],
        missing=tuple(bytecode["missing"]),
        stale=tuple(bytecode["stale"]),
        texts=found["texts"],
    )


def _dockerfile(spec: Spec) -> str:
    path = spec.folder / "Dockerfile"
    try:
        return path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise UserError(f"{relative(path)} is missing: run 'make render'") from None


#: What is known from inside an image that has no Python.
NOTHING = Inside("", (), 0, (), (), {})


def gather(spec: Spec | None, reference: str) -> Evidence:
    """All that the rules look at. The probe runs in its container while the layers are read here.

    Raises:
        UserError: there is no such image, or the target was never rendered.
        StepFailed: it cannot be read or run.
    """
    image = engine.image(reference, made_by=f"make build TARGET={spec.target}" if spec else "docker pull")
    dockerfile = _dockerfile(spec) if spec else ""
    with ThreadPoolExecutor(max_workers=1) as background:
        seen = background.submit(probe, reference)
        stored = layers.read(reference, dockerfile)
        try:
            found = seen.result()
        except inside.NoPython as error:
            if spec:
                raise
            warn(f"{error}; only what lies in its layers is looked at")
            found = NOTHING
        return Evidence(
            spec=spec,
            reference=reference,
            tags=tuple(image.tags),
            stored=stored if spec else layers.above_the_lowest(stored),
            inside=found,
            build=state.recall(spec.target, "build", str(image.id)) if spec else None,
            waivers=waivers.load(),
        )


def examine(spec: Spec | None, reference: str) -> tuple[Evidence, dict[str, list[Finding]]]:
    """The evidence about an image, and the findings by rule. Nothing is recorded."""
    evidence = gather(spec, reference)
    return evidence, rules.check(evidence)


def default_reference(spec: Spec) -> str:
    """The candidate, or the image that passed before where there is no candidate."""
    candidate = f"{plan.NAME}:{spec.target}-candidate"
    try:
        engine.client().images.get(candidate)
        return candidate
    except docker.errors.ImageNotFound:
        return f"{plan.NAME}:{spec.target}"


def described(stored: Stored) -> dict[str, Any]:
    """What the record says of an image's blobs: ``layers``, ``config``, ``manifest``; see :func:`verify`."""
    parts = [
        {
            "stage": layer.stage,
            "created_by": layer.created_by.splitlines()[0] if layer.created_by else "",
            "digest": layer.digest,
            "diff_id": layer.diff_id,
            "size": layer.contents.size,
            "compressed": layer.stored,
        }
        for layer in stored.layers
    ]
    config = {"digest": stored.config_digest, "size": stored.config_size}
    return {"layers": parts, "config": config, "manifest": {"size": stored.manifest_size}}


def verify(spec: Spec | None, reference: str | None = None) -> dict[str, Any]:
    """Verify an image, show the result and record it for its digest.

    Args:
        spec: what the image must be; with None only general rules are looked at, and nothing is recorded.
        reference: the image, the target's candidate if None.
    Returns:
        The recorded facts: ``digest``, ``passed``, ``findings`` and ``notes`` (each a :class:`Finding` as dictionary),
        ``size`` (bytes), ``layers`` (``stage``, ``created_by``, ``digest``, ``diff_id``, ``size``, ``compressed``),
        ``config`` (``digest``, ``size``), ``manifest`` (``size``), ``packages`` (their number), ``seconds``.
    Raises:
        UserError: there is no such image.
        StepFailed: it broke a rule; the line names the first finding and how many there are.
    """
    started = time.monotonic()
    if reference is None:
        assert spec is not None
        reference = default_reference(spec)
    digest = engine.digest(reference, made_by=f"make build TARGET={spec.target}" if spec else "docker pull")
    evidence, found = examine(spec, reference)
    failures = [finding for some in found.values() for finding in some if not finding.note]
    notes = [finding for some in found.values() for finding in some if finding.note]
    seconds = round(time.monotonic() - started, 1)
    facts = {
        "passed": not failures,
        "findings": [asdict(finding) for finding in failures],
        "notes": [asdict(finding) for finding in notes],
        "size": evidence.size,
        **described(evidence.stored),
        "packages": len(evidence.inside.packages),
        "seconds": seconds,
    }
    # Another target's image held against this spec is no news about this target's own.
    if spec and evidence.labels.get(f"{plan.LABELS}.target") == spec.target:
        state.record(spec.target, "verify", digest, facts)
    _show(evidence, found, seconds)
    if failures:
        more = f" (and {len(failures) - 1} more findings)" if len(failures) > 1 else ""
        verdict = "is not what it says" if spec else "breaks a rule that holds for every image"
        raise StepFailed(f"{reference} {verdict}: {failures[0]}{more}")
    return {"digest": digest} | facts


def _show(evidence: Evidence, found: dict[str, list[Finding]], seconds: float) -> None:
    """Two tables and what was found, for people."""
    sizes = Table(title=f"{evidence.reference}: {in_units(evidence.size)} in layers", title_justify="left")
    for column, justify in (("layer", "left"), ("size", "right"), ("compressed", "right"), ("most of it", "left")):
        sizes.add_column(column, justify=justify)  # type: ignore[arg-type]
    for layer in evidence.stored.layers:
        folder = {"framework": "/opt/venv", "requirements": "/opt/requirements"}.get(layer.stage)
        own = tuple(one for one in evidence.inside.packages if folder and one.folder.startswith(folder))
        packages = [f"{one.name} {in_units(one.bytes)}" for one in rules.heaviest(own, 3)]
        sizes.add_row(layer.stage, in_units(layer.contents.size), in_units(layer.stored), ", ".join(packages))
    about = f"{len(applicable(evidence))} rules, {len(evidence.inside.packages)} packages, {seconds} s"
    book = Table(title=about, title_justify="left")
    book.add_column("rule")
    book.add_column("")
    for function in applicable(evidence):
        some = found[function.__name__]
        failed = sum(not finding.note for finding in some)
        verdict = f"[red]{failed} found" if failed else "[yellow]see below" if some else "[green]holds"
        book.add_row(rules.title(function), verdict)
    log.print(sizes)
    log.print(book)
    for finding in (finding for some in found.values() for finding in some):
        findings.show(finding)


def chosen(target: str | None, image: str | None) -> tuple[Spec | None, str]:
    """The spec, if any, and the reference of the image to look at; it is pulled if only a registry has it.

    Raises:
        UserError: neither is given, there is no such target, or no such image.
    """
    spec = load(target) if target or not image else None
    if not image:
        assert spec is not None
        return spec, default_reference(spec)
    found = engine.pull(image)
    named = str(found.labels.get(f"{plan.LABELS}.target") or "")
    if spec is None and named in targets():
        say(f"{image} says that it is of target {named}: with TARGET={named} it is held against that, too")
    return spec, image


def main(arguments: list[str]) -> int:
    parser = cli.parser(__doc__)
    parser.add_argument("--image", default=os.environ.get("IMAGE") or None, help="any image; or IMAGE")
    options = parser.parse_args(arguments)
    spec, reference = chosen(options.target, options.image)
    try:
        facts = verify(spec, reference)
    except StepFailed:
        # Machines get the findings of a failed image too, if it came so far.
        failed = state.recall(spec.target, "verify", engine.digest(reference)) if spec else None
        if failed and not failed["passed"]:
            cli.result(failed, as_json=options.json)
        raise
    say(f"{facts['digest']} {'is what it says' if spec else 'breaks no rule'}")
    cli.result(facts, as_json=options.json)
    return 0


if __name__ == "__main__":
    cli.run(main)
