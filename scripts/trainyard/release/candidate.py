"""Build an image, verify it, run the smoke test in it, and tag it only when it has passed all of them.

An image whose digest has passed before is not verified and smoke-tested again, unless that is forced.
"""

from __future__ import annotations

from typing import Any

from rich.table import Column, Table
from rich.text import Text

from trainyard import state
from trainyard.console import say
from trainyard.image import build, smoke_test
from trainyard.image.plan import Plan
from trainyard.lint.image import verify
from trainyard.oci import docker_engine
from trainyard.release import events
from trainyard.spec.model import Spec
from trainyard.spec.naming import NAME
from trainyard.spec.units import in_units


def make(
    spec: Spec,
    *,
    compression: str = "zstd",
    no_cache: bool = False,
    force: bool = False,
    emit: events.Emit = events.ignore,
) -> dict[str, Any]:
    """Build, verify, smoke-test and tag the image of ``spec``.

    Args:
        compression: see :func:`trainyard.image.build.build`.
        no_cache: build every stage again.
        force: verify and smoke-test again if this digest has passed before.
        emit: called with the ``stage`` and ``step`` events of :mod:`trainyard.release.events`.
    Returns:
        ``image`` (its local reference), ``plan``, and the results of ``build``, ``verify`` and ``smoke``.
    Raises:
        UserError, StepFailed: a stage failed; the candidate is kept for inspection and no other tag is set.
    """
    with state.candidate_lock(spec.target):
        emit("stage", stage="build")
        plan, built = build.build(
            spec,
            compression=compression,
            no_cache=no_cache,
            on_step=lambda stage, step: emit("step", stage=stage, step=step),
        )
        spec = plan.spec  # with the versions in a base that was inspected just now
        digest = built["digest"]
        with state.file_lock("training"):  # smoke tests that run at the same time would exceed their time limits
            emit("stage", stage="verify")
            say(f"verifying {plan.candidate}")
            verified: Any = None if force else state.recall(spec.target, "verify", digest)
            if not verified or not verified["passed"]:
                verified = verify.verify(spec, plan.candidate)
            emit("stage", stage="smoke")
            say(f"training in {plan.candidate}")
            trained: Any = None if force else state.recall(spec.target, "smoke", digest)
            if not trained or not trained["passed"]:
                trained = smoke_test.smoke(spec, plan.candidate)
        found = docker_engine.client().images.get(plan.candidate)
        for tag in (spec.target, plan.tag):
            found.tag(NAME, tag)
        docker_engine.client().images.remove(plan.candidate)
        return {"image": plan.local, "plan": plan, "build": built, "verify": verified, "smoke": trained}


def summary(made: dict[str, Any]) -> Table:
    """The result for people."""
    plan: Plan = made["plan"]
    built, verified, trained = made["build"], made["verify"], made["smoke"]
    table = Table("", Column("", overflow="fold"), title=plan.local, title_justify="left", show_header=False)
    table.add_row("digest", built["digest"])
    table.add_row("tags", f"{NAME}:{plan.spec.target}, {NAME}:{plan.tag}")
    table.add_row("index", plan.index)
    table.add_row("base", plan.base)
    for note in plan.notes:
        table.add_row("fallback", Text(note), style="yellow")
    table.add_row("packages", str(verified["packages"]))
    table.add_row("size", f"{in_units(verified['size'])}, budget {in_units(plan.spec.budget.size)}")
    for layer in verified["layers"]:
        table.add_row(f"  {layer['stage']}", f"{in_units(layer['size'])} ({in_units(layer['compressed'])} compressed)")
    table.add_row("accuracy", f"{trained['accuracy']:.2f} % (floor {100 * plan.spec.smoke.accuracy:g} %)")
    table.add_row("training", f"{trained['images_per_second']:,.0f} images/s")
    stages = {"build": built, "verify": verified, "smoke": trained}
    table.add_row("seconds", ", ".join(f"{name} {facts['seconds']:.1f}" for name, facts in stages.items()))
    return table
