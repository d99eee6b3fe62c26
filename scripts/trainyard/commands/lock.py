"""``trainyard lock``."""

from __future__ import annotations

import click

from trainyard import options

GROUP = "build"


@click.command(
    short_help="Resolve packages to hash-pinned locks.",
    epilog="""\b
    Examples:
      trainyard lock xla        # the locks of a target, for every package index that answers
      trainyard lock scripts    # what Trainyard and its tests need (scripts/requirements.lock)
      trainyard lock uv         # the installer inside builds (images/uv.lock); the same for gsutil
    """,
)
@options.target
@options.json_output
def command(target: str | None, as_json: bool) -> None:
    """Resolve TARGET's packages for its Python and platform, and write the hash-pinned locks; commit them.

    If TARGET's base holds the framework, its tag is resolved to a digest and its packages are recorded in base.json.
    """
    from trainyard import console
    from trainyard.image import resolver
    from trainyard.spec import lockfile
    from trainyard.spec.model import relative

    written = resolver.lock(target)
    for path in written:
        console.say(f"{relative(path)}: {len(lockfile.read(path))} packages")
    console.result({"written": [relative(path) for path in written]}, as_json=as_json)
