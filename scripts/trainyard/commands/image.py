"""``trainyard image``."""

from __future__ import annotations

import click

from trainyard import options

GROUP = "build"


@click.command(
    short_help="Build, verify and smoke-test an image, and tag it if it passes.",
    epilog="""\b
    Examples:
      trainyard image tf-cpu
      trainyard image examples/patches
      trainyard image xla --force
    """,
)
@options.target
@options.compression
@options.flag("--no-cache", help="Build every stage again.")
@options.flag("--force", help="Verify and smoke-test again, even if this digest has passed.")
@click.option("--events", type=int, hidden=True, help="File descriptor for events (trainyard.release.events).")
@options.json_output
def command(
    target: str | None, compression: str, no_cache: bool, force: bool, events: int | None, as_json: bool
) -> None:
    """Build TARGET's image, verify it and train in it; only if it passes, tag it trainyard:<target>.

    If it fails, the candidate trainyard:<target>-candidate is kept for inspection, and the tags stay as they were.
    """
    from trainyard import console
    from trainyard.release import candidate
    from trainyard.release import events as progress
    from trainyard.spec.model import load

    emit = progress.ignore if events is None else progress.writer(events)
    try:
        spec = load(target)
        made = candidate.make(spec, compression=compression, no_cache=no_cache, force=force, emit=emit)
    except (console.UserError, console.StepFailed, OSError) as error:
        emit("failed", reason=str(error))
        raise
    found = {name: facts for name, facts in made.items() if name != "plan"}
    emit("ready", result=found)
    console.log.print(candidate.summary(made))
    for note in made["plan"].notes:
        console.warn(note)
    run = f"docker run --rm {made['image']} {spec.trainers.default} --fake-data --epochs 1"
    console.say(f"{made['image']} is ready: {run}")
    console.result(found, as_json=as_json)
