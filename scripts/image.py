"""Build an image, verify that it is what it says, train in it, and only then give it its name.

    make image TARGET=tf-cpu [FORCE=1]

An image whose digest has passed before is not verified and trained in again, unless FORCE is set.
"""

from __future__ import annotations

import os
from typing import Any

from rich.table import Column, Table
from rich.text import Text

from scripts import build, cli, engine, smoke, state, verify
from scripts.cli import log, say, warn
from scripts.plan import NAME, Plan
from scripts.spec import Spec, load
from scripts.units import in_units

#: How a stage announces itself; `make images` knows by these words how far an image is.
VERIFYING, TRAINING = "verifying", "training in"


def _passed(spec: Spec, digest: str, step: str) -> dict[str, Any] | None:
    facts = state.recall(spec.target, step, digest)
    return facts if facts and facts.get("passed") and not os.environ.get("FORCE") else None


def make(spec: Spec) -> dict[str, Any]:
    """Everything ``make image`` does; the facts of every stage.

    Raises:
        UserError, StepFailed: a stage failed; the candidate stays for a look, nothing else is tagged.
    """
    with state.candidate_of(spec.target):
        return _make(spec)


def _make(spec: Spec) -> dict[str, Any]:
    compression = os.environ.get("COMPRESSION") or "zstd"
    plan, built = build.build(spec, compression=compression, no_cache=bool(os.environ.get("NO_CACHE")))
    spec = plan.spec  # a base that was looked into now says which versions it holds
    digest = built["digest"]
    with state.turn("training"):  # side by side, images would miss the limits of a smoke test
        say(f"{VERIFYING} {plan.candidate}")
        verified = _passed(spec, digest, "verify") or verify.verify(spec, plan.candidate)
        say(f"{TRAINING} {plan.candidate}")
        trained = _passed(spec, digest, "smoke") or smoke.smoke(spec, plan.candidate)
    found = engine.client().images.get(plan.candidate)
    for tag in (spec.target, plan.tag):
        found.tag(NAME, tag)
    engine.client().images.remove(plan.candidate)
    return {"image": plan.local, "plan": plan, "build": built, "verify": verified, "smoke": trained}


def summary(made: dict[str, Any]) -> Table:
    """The result for people: what was made, from what, how large, how well it trained, how long it took."""
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
        table.add_row(f"  {layer['stage']}", f"{in_units(layer['size'])} ({in_units(layer['compressed'])} packed)")
    table.add_row("accuracy", f"{trained['accuracy']:.2f} % (floor {100 * plan.spec.smoke.accuracy:g} %)")
    table.add_row("training", f"{trained['images_per_second']:,.0f} images/s")
    stages = {"build": built, "verify": verified, "smoke": trained}
    table.add_row("seconds", ", ".join(f"{name} {facts['seconds']:.1f}" for name, facts in stages.items()))
    return table


def main(arguments: list[str]) -> int:
    options = cli.parser(__doc__).parse_args(arguments)
    spec = load(options.target)
    made = make(spec)
    log.print(summary(made))
    for note in made["plan"].notes:
        warn(note)
    say(f"{made['image']} is ready: docker run --rm {made['image']} {spec.trainers.default} --fake-data --epochs 1")
    cli.result({name: facts for name, facts in made.items() if name != "plan"}, as_json=options.json)
    return 0


if __name__ == "__main__":
    cli.run(main)
