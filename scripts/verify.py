"""Check that an image is what its spec, its locks, its labels and its tags say, in seconds and without an accelerator.

    make verify TARGET=tf-cpu

It looks at the candidate (`trainyard:tf-cpu-candidate`), or at `trainyard:tf-cpu` where there is no candidate.
The rules are the functions of scripts/verify_rules.py.
"""

from __future__ import annotations

import json
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from typing import Any

import docker.errors
from rich.table import Table

from scripts import cli, engine, layers, plan, state, verify_rules
from scripts.cli import ROOT, StepFailed, UserError, log, say
from scripts.layers import Stored
from scripts.spec import Spec, load, relative
from scripts.units import in_units
from scripts.verify_rules import RULES, Evidence, Finding, Inside, Package


def probe(reference: str) -> Inside:
    """What Python sees inside the image: run there without a network, on a read-only file system.

    Raises:
        StepFailed: the image has no Python that runs; the message ends with its last word.
    """
    text = (ROOT / "scripts" / "probe.py").read_text(encoding="utf-8")
    container = engine.client().containers.create(
        reference,
        ["-c", text],
        entrypoint=["python"],
        network_mode="none",
        read_only=True,
        labels=engine.owned("verify"),
    )
    try:
        container.start()
        status = int(container.wait()["StatusCode"])
        if status:
            words = container.logs(stdout=False).decode(errors="replace").strip().splitlines() or ["(nothing)"]
            raise StepFailed(f"{reference}: its Python could not say what is installed: {words[-1]}")
        found = json.loads(container.logs(stderr=False))
    except docker.errors.APIError as error:
        raise StepFailed(f"{reference}: cannot run its Python: {error.explanation}") from None
    finally:
        container.remove(force=True)
    bytecode = found["bytecode"]
    return Inside(
        python=found["python"],
        packages=tuple(Package(**entry | {"requires": tuple(entry["requires"])}) for entry in found["packages"]),
        sources=bytecode["sources"],
        missing=tuple(bytecode["missing"]),
        stale=tuple(bytecode["stale"]),
        texts=found["texts"],
    )


def gather(spec: Spec, reference: str) -> Evidence:
    """All that the rules look at. The probe runs in its container while the layers are read here.

    Raises:
        UserError: there is no such image, or the target was never rendered.
        StepFailed: it cannot be read or run.
    """
    image = engine.image(reference, made_by=f"make build TARGET={spec.target}")
    try:
        dockerfile = (spec.folder / "Dockerfile").read_text(encoding="utf-8")
    except FileNotFoundError:
        raise UserError(f"{relative(spec.folder / 'Dockerfile')} is missing: run 'make render'") from None
    with ThreadPoolExecutor(max_workers=1) as background:
        inside = background.submit(probe, reference)
        stored = layers.read(reference, dockerfile)
        return Evidence(
            spec=spec,
            reference=reference,
            tags=tuple(image.tags),
            stored=stored,
            inside=inside.result(),
            build=state.recall(spec.target, "build", str(image.id)),
        )


def examine(spec: Spec, reference: str) -> tuple[Evidence, dict[str, list[Finding]]]:
    """The evidence about an image, and the findings by rule. Nothing is recorded."""
    evidence = gather(spec, reference)
    return evidence, verify_rules.check(evidence)


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


def verify(spec: Spec, reference: str | None = None) -> dict[str, Any]:
    """Verify an image, show the result and record it for its digest.

    Args:
        spec: what the image must be; ``reference``: the image, the target's candidate if None.
    Returns:
        The recorded facts: ``digest``, ``passed``, ``findings`` and ``notes`` (each a :class:`Finding` as dictionary),
        ``size`` (bytes), ``layers`` (``stage``, ``created_by``, ``digest``, ``diff_id``, ``size``, ``compressed``),
        ``config`` (``digest``, ``size``), ``manifest`` (``size``), ``packages`` (their number), ``seconds``.
    Raises:
        UserError: there is no such image.
        StepFailed: it broke a rule; the line names the first finding and how many there are.
    """
    started = time.monotonic()
    reference = reference or default_reference(spec)
    digest = engine.digest(reference, made_by=f"make build TARGET={spec.target}")
    evidence, found = examine(spec, reference)
    findings = [finding for some in found.values() for finding in some if not finding.note]
    notes = [finding for some in found.values() for finding in some if finding.note]
    seconds = round(time.monotonic() - started, 1)
    facts = {
        "passed": not findings,
        "findings": [asdict(finding) for finding in findings],
        "notes": [asdict(finding) for finding in notes],
        "size": evidence.size,
        **described(evidence.stored),
        "packages": len(evidence.inside.packages),
        "seconds": seconds,
    }
    state.record(spec.target, "verify", digest, facts)
    _show(evidence, found, seconds)
    if findings:
        more = f" (and {len(findings) - 1} more findings)" if len(findings) > 1 else ""
        raise StepFailed(f"{reference} is not what it says: {findings[0]}{more}")
    return {"digest": digest} | facts


def _show(evidence: Evidence, found: dict[str, list[Finding]], seconds: float) -> None:
    """Two tables and what was found, for people."""
    sizes = Table(title=f"{evidence.reference}: {in_units(evidence.size)} in layers", title_justify="left")
    for column, justify in (("layer", "left"), ("size", "right"), ("compressed", "right"), ("most of it", "left")):
        sizes.add_column(column, justify=justify)  # type: ignore[arg-type]
    for layer in evidence.stored.layers:
        folder = {"framework": "/opt/venv", "requirements": "/opt/requirements"}.get(layer.stage)
        own = tuple(one for one in evidence.inside.packages if folder and one.folder.startswith(folder))
        packages = [f"{one.name} {in_units(one.bytes)}" for one in verify_rules.heaviest(own, 3)]
        sizes.add_row(layer.stage, in_units(layer.contents.size), in_units(layer.stored), ", ".join(packages))
    about = f"{len(RULES)} rules, {len(evidence.inside.packages)} packages, {seconds} s"
    rules = Table(title=about, title_justify="left")
    rules.add_column("rule")
    rules.add_column("")
    for function in RULES:
        some = found[function.__name__]
        failed = sum(not finding.note for finding in some)
        verdict = f"[red]{failed} found" if failed else "[yellow]see below" if some else "[green]holds"
        rules.add_row(verify_rules.title(function), verdict)
    log.print(sizes)
    log.print(rules)
    for finding in (finding for some in found.values() for finding in some):
        word, style = ("NOTE", "bold yellow") if finding.note else ("FOUND", "bold red")
        log.print(f"{word} {finding}", style=style, markup=False)
        say(f"  why: {finding.why}\n  fix: {finding.fix}")


def main(arguments: list[str]) -> int:
    options = cli.parser(__doc__).parse_args(arguments)
    spec = load(options.target)
    reference = default_reference(spec)
    try:
        facts = verify(spec, reference)
    except StepFailed:
        # Machines get the findings of a failed image too, if it came so far.
        failed = state.recall(spec.target, "verify", engine.digest(reference))
        if failed and not failed["passed"]:
            cli.result(failed, as_json=options.json)
        raise
    say(f"{facts['digest']} is what it says")
    cli.result(facts, as_json=options.json)
    return 0


if __name__ == "__main__":
    cli.run(main)
