"""``trainyard dev sizes``."""

from __future__ import annotations

import click

from trainyard.common import options
from trainyard.common.context import Context

GROUP = "project"


@options.command(
    "Measure the images of this host for docs/images.md.",
    "trainyard dev sizes",
    "trainyard dev sizes tf-cpu",
)
@options.target
@options.json_output
@click.pass_obj
def command(context: Context, target: str | None, as_json: bool) -> None:
    """Measure TARGET's image layer by layer, or those of all targets; a target without an image here keeps its figures.

    It writes docs/sizes.json, its chart docs/sizes.svg, and docs/images.md, which shows both. Commit them.
    """
    from trainyard.common import console, installation
    from trainyard.common.installation import require_extra
    from trainyard.image import catalog_page, sizes
    from trainyard.project import generated
    from trainyard.spec.model import catalogue, load, relative

    installation.checkout("'trainyard dev sizes'")
    require_extra("matplotlib", "plots", "sizes")
    specs = catalogue(context)
    measured, everything = sizes.update([load(target, context=context)] if target else specs)
    files = generated.rendered(click.get_current_context().find_root().command)
    catalog_page.PAGE.write_text(files[catalog_page.PAGE], encoding="utf-8")
    console.show(sizes.table(everything, specs))
    written = ", ".join(relative(path) for path in (sizes.FILE, sizes.CHART, catalog_page.PAGE))
    console.say(f"wrote {written}: review the difference and commit it")
    console.result({"measured": measured, "targets": everything}, as_json=as_json)
