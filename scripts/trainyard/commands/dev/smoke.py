"""``trainyard dev smoke``."""

from __future__ import annotations

import click

from trainyard.common import options
from trainyard.common.context import Context

GROUP = "build"


@options.command(
    "Run your command in its image, or train in a target's, with a fake TPU node.",
    "trainyard dev smoke            # the repository of the current folder",
    "trainyard dev smoke xla",
)
@options.target
@options.smoke_network
@options.data
@options.verbose
@options.json_output
@click.pass_obj
def command(context: Context, target: str | None, as_json: bool) -> None:
    """Run the smoke test in TARGET's candidate, or in trainyard:<target> if there is no candidate.

    It runs offline and with a fake of Google Cloud. A target of the catalogue has a read-only root file system, and
    these runs: one that must learn real digits; the same one stopped by SIGTERM, out of memory while it saves, and
    resumed, which must end with the same weights; and a short one in two processes. All but the first have an unknown
    uid in group 0, 64 MB of /dev/shm and no IPv6. In a user's repository, the command 'run' of trainyard.yaml is run as
    its 'smoke' says; without 'smoke' it is started with --help.
    """
    from trainyard.common import console
    from trainyard.image import smoke_test
    from trainyard.spec import naming
    from trainyard.spec.model import load

    spec = load(target, context=context)
    facts = smoke_test.smoke(spec, naming.default_reference(context.engine, spec.local_name))
    for note in facts["notes"]:
        console.warn(note)
    console.say(f"{spec.local_name}: {facts['level']}")
    console.result(facts, as_json=as_json)
