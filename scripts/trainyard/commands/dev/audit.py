"""``trainyard dev audit``."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from trainyard.common import options

if TYPE_CHECKING:
    from trainyard.common.context import Context
    from trainyard.release.vulnerabilities import Pins

GROUP = "publish"


@options.command(
    "Check locked packages for known vulnerabilities.",
    "trainyard dev audit",
    "trainyard dev audit tf-cpu --offline",
    "trainyard dev audit --image localhost:5000/team/trainyard:tf-cpu",
    "trainyard dev audit --update",
)
@options.target
@options.option("--image", metavar="REFERENCE", help="Any image, local or at a registry, instead of TARGET's locks.")
@options.flag("--offline", help="Use the stored snapshot only, as 'trainyard dev check' and 'trainyard push' do.")
@options.flag("--update", help="Fetch a new snapshot of advisories first, and store it in images/; commit it.")
@options.option("--osv", metavar="URL", help="Mirror of https://api.osv.dev that --update fetches from.")
@options.json_output
@click.pass_obj
def command(
    context: Context,
    target: str | None,
    image: str | None,
    offline: bool,
    update: bool,
    osv: str | None,
    as_json: bool,
) -> None:
    """Check packages for known vulnerabilities: those that TARGET's locks pin, or those of all targets.

    Python packages are looked up with pip-audit if a vulnerability service answers, else in the stored snapshot
    images/advisories.json. A vulnerability without a waiver in images/waivers.yaml fails, and so does one whose waiver
    has expired.

    With --image the Python packages of that image are checked. Debian packages are not: a scanner of images, such as
    Trivy or Grype, knows Debian's security tracker.
    """
    from trainyard.common import console, errors
    from trainyard.release import audit

    if target and image:
        raise errors.UserError(f"give a target or an image, not both: {target} and {image}")
    pins = _of_image(context, image) if image else _pins(context, target)
    if update:
        _update(_pins(context, None), osv or "")
    report = audit.audit(pins, only_snapshot=offline, complete=not target and not image)
    console.result(report.as_dict(), as_json=as_json)
    if report.findings:
        console.show(audit.table(report.findings))
    for old in report.stale:
        console.warn(str(old))
    report.require()
    console.say(f"{report.packages} Python packages, {report.source}: no known vulnerability without a waiver")


def _of_image(context: Context, reference: str) -> dict[str, Pins]:
    """Return the name and the packages of an image, local or at a registry."""
    from trainyard.release import audit, image_packages

    image = image_packages.find(context.engine, reference)
    return {image.name: audit.pinned(image.python)}


def _pins(context: Context, target: str | None) -> dict[str, Pins]:
    """Return the packages that are locked for a target, or for each target, by its name."""
    from trainyard.release import sources
    from trainyard.spec.model import catalogue, load

    return {
        spec.target: sources.pins(spec) for spec in ([load(target, context=context)] if target else catalogue(context))
    }


def _update(pins: dict[str, Pins], osv: str) -> None:
    from trainyard.common import console
    from trainyard.release import audit

    snapshot = audit.update(pins.values(), osv)
    count = f"{len(snapshot.advisories)} advisories on {len(snapshot.covers)} packages"
    console.say(f"images/advisories.json: {count}: commit it")
