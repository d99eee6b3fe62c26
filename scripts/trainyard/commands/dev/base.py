"""``trainyard dev base``."""

from __future__ import annotations

import click

from trainyard.common import options
from trainyard.common.context import Context

GROUP = "build"


@options.command(
    "Find or bootstrap the base images.",
    "trainyard dev base             # the bases of all targets that can be bootstrapped",
    "trainyard dev base xla         # the base of one target",
    "trainyard dev base --force     # bootstrap again, from today's Debian archive",
)
@options.target
@options.flag("--force", help="Bootstrap again what was bootstrapped on this host.")
@options.json_output
@click.pass_obj
def command(context: Context, target: str | None, force: bool, as_json: bool) -> None:
    """Find the base image of TARGET, or of all targets, at its registry.

    If the registry does not answer, bootstrap an equivalent from the Debian archive with mmdebstrap.
    """
    from trainyard.common import console
    from trainyard.image import base_image
    from trainyard.spec.model import bases, load

    names = [load(target, context=context).base] if target else [name for name, base in bases().items() if base.shared]
    found = {}
    for name in names:
        if force:
            base_image.rebuild(context.engine, name)
        resolved = base_image.resolve(context, name)
        if resolved.note:
            console.warn(resolved.note)
        console.say(f"{name}: {resolved.reference}")
        found[name] = {"reference": resolved.reference, "digest": resolved.digest, "build_base": resolved.build_base}
    console.result(found, as_json=as_json)
