"""``trainyard dev diff``."""

from __future__ import annotations

import click

from trainyard.common import options
from trainyard.common.context import Context
from trainyard.common.settings import PREFIX

GROUP = "publish"


@options.command(
    "Compare two images, of this host or at a registry.",
    "trainyard dev diff trainyard:tf-cpu-2.21.0-20261120-0123abcd trainyard:tf-cpu",
    "trainyard dev diff localhost:5000/ml/trainyard:xla trainyard:xla-candidate",
)
@click.argument("a", envvar=f"{PREFIX}A", required=False)
@click.argument("b", envvar=f"{PREFIX}B", required=False)
@options.json_output
@click.pass_obj
def command(context: Context, a: str | None, b: str | None, as_json: bool) -> None:
    """Compare image A with image B: packages, labels, environment, settings, layers, and bytes to download.

    Images at a registry are not pulled: their manifest, configuration and SBOM are fetched.
    """
    from trainyard.common import console, errors
    from trainyard.oci import inventory
    from trainyard.release import diff
    from trainyard.spec.units import in_units

    if not a or not b:
        example = "trainyard dev diff <reference> <reference>"
        raise errors.UserError(f"two images are needed, as in '{example}'")
    found = diff.diff(inventory.find(context.engine, a), inventory.find(context.engine, b))
    if found["a"]["digest"] == found["b"]["digest"]:
        console.say(f"both are {found['a']['digest']}")
    else:
        for table in diff.tables(found):
            console.show(table)
    sizes = f"{in_units(found['download'])} of {in_units(found['b']['stored'])}"
    console.say(f"a host that has A downloads {sizes} to get B")
    console.result(found, as_json=as_json)
