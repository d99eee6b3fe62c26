"""``trainyard smoke``."""

from __future__ import annotations

import click

from trainyard import options

GROUP = "build"


@click.command(
    short_help="Train in an image, stop it and resume it, with a fake TPU node.",
    epilog="""\b
    Examples:
      trainyard smoke xla
    """,
)
@options.target
@options.json_output
def command(target: str | None, as_json: bool) -> None:
    """Run the smoke test in TARGET's candidate, or in trainyard:<target> if there is no candidate.

    It runs offline, on a read-only root file system and with a fake of Google Cloud: a run that must learn real digits,
    the same run stopped by SIGTERM, and its resumption, which must end with the same weights.
    """
    from trainyard import console
    from trainyard.image import local_images, smoke_test
    from trainyard.spec.model import load

    spec = load(target)
    facts = smoke_test.smoke(spec, local_images.default_reference(spec.target))
    console.say(f"{spec.target}: trained, stopped and resumed in {facts['seconds']} s")
    console.result(facts, as_json=as_json)
