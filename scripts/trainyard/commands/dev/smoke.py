"""``trainyard dev smoke``."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from trainyard.common import options
from trainyard.common.context import Context

if TYPE_CHECKING:
    from trainyard.image.smoke_failure import HostFiles
    from trainyard.recipe import Recipe

GROUP = "build"


@options.command(
    "Run your command in its image, or train in a target's, with a fake TPU node.",
    "trainyard dev smoke            # the repository of the current folder",
    "trainyard dev smoke xla",
    "trainyard dev smoke --recipe recipe.json registry.example/team/image:tag",
)
@options.target
@options.recipe
@options.smoke_network
@options.data
@options.verbose
@options.json_output
@click.pass_obj
def command(context: Context, target: str | None, recipe: Path | None, as_json: bool) -> None:
    """Run the smoke test in TARGET's candidate, or in trainyard:<target> if there is no candidate.

    It runs offline and with a fake of Google Cloud. A target of the catalogue has a read-only root file system, and
    these runs: one that must learn real digits; the same one stopped by SIGTERM, out of memory while it saves, and
    resumed, which must end with the same weights; and a short one in two processes. All but the first have an unknown
    uid in group 0, 64 MB of /dev/shm and no IPv6. In a user's repository, the command 'run' of trainyard.yaml is run as
    its 'smoke' says; without 'smoke' it is started with --help. With --recipe, the image TARGET is tested as the recipe
    of a file says.
    """
    from trainyard import recipe as recipes
    from trainyard.common import console
    from trainyard.image import smoke_test

    if recipe:
        wanted, files = recipes.read(recipe), None
        reference = target or wanted.local
        context.engine.pull(reference)
    else:
        wanted, reference, files = _of_target(context, target)
    facts = smoke_test.smoke(wanted, reference, context, files)
    for note in facts["notes"]:
        console.warn(note)
    console.say(f"{wanted.local_name}: {facts['level']}")
    console.result(facts, as_json=as_json)


def _of_target(context: Context, target: str | None) -> tuple[Recipe, str, HostFiles | None]:
    """Return the recipe and the reference of a target's image, and where its repository is on this host."""
    from trainyard.image import recipes, smoke_test, workspace_files
    from trainyard.spec.naming import default_reference
    from trainyard.workspace.loading import load

    spec = load(target, context=context)
    files = workspace_files.on_host(spec)
    smoke_test.network_of(spec.local_name, files, context)  # refuses an option that is for a repository's command
    reference = default_reference(context.engine, spec.local_name)
    local = context.engine.image(reference, made_by=spec.command("dev build"))
    return recipes.for_image(spec, local.labels), reference, files
