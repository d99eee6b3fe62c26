"""``trainyard dev audit``."""

from __future__ import annotations

from pathlib import Path

import click

from trainyard.common import options

GROUP = "publish"


@options.command(
    "Check locked and Debian packages for known vulnerabilities.",
    "trainyard dev audit",
    "trainyard dev audit tf-cpu --offline",
    "trainyard dev audit --image localhost:5000/team/trainyard:tf-cpu",
    "trainyard dev audit tf-cpu --vex tf-cpu.openvex.json",
    "trainyard dev audit --update",
)
@options.target
@options.option("--image", metavar="REFERENCE", help="Any image, local or at a registry, instead of TARGET's locks.")
@options.flag("--offline", help="Use the stored snapshots only, as 'trainyard dev check' and 'trainyard push' do.")
@options.flag("--update", help="Fetch new snapshots of advisories first, and store them in images/; commit them.")
@options.option("--osv", metavar="URL", help="Mirror of https://api.osv.dev that --update fetches from.")
@options.option("--tracker", metavar="URL", help="Mirror of the Debian security tracker's JSON document for --update.")
@options.option(
    "--vex",
    type=click.Path(path_type=Path, dir_okay=False),
    help="File to write what waivers say about the images to, as an OpenVEX document.",
)
@options.json_output
def command(
    target: str | None,
    image: str | None,
    offline: bool,
    update: bool,
    osv: str | None,
    tracker: str | None,
    vex: Path | None,
    as_json: bool,
) -> None:
    """Check packages for known vulnerabilities: those that TARGET's locks pin, or those of all targets.

    Python packages are looked up with pip-audit if a vulnerability service answers, else in the stored snapshot
    images/advisories.json. A vulnerability without a waiver in images/waivers.yaml fails, and so does one whose waiver
    has expired.

    The Debian packages of the targets' images on this host are looked up in images/debian-advisories.json. One fails if
    Debian has fixed it in the image's suite and the image has an older version; the others are notes.

    With --image the Python and Debian packages of that image are checked.
    """
    from trainyard.common import console, errors
    from trainyard.release import audit

    if target and image:
        raise errors.UserError(f"give a target or an image, not both: {target} and {image}")
    if update:
        _update(osv or "", tracker or "")
    report = audit.audit(target, only_snapshot=offline, image=image)
    console.result(report.as_dict(), as_json=as_json)
    if report.findings:
        console.show(audit.table(report.findings))
    for line in (*report.uncovered, *map(str, report.stale)):
        console.warn(line)
    if vex:
        _write_vex(audit.vex(report), vex)
    report.require()
    checked = [f"{report.packages} Python packages, {report.source}"]
    if report.debian_source:
        count = sum(len(one.debian) for one in report.images)
        checked.append(f"{count} Debian packages of {len(report.images)} images, {report.debian_source}")
    console.say(f"{'; '.join(checked)}: no known vulnerability without a waiver")


def _update(osv: str, tracker: str) -> None:
    from trainyard.common import console
    from trainyard.release import audit

    snapshot = audit.update(osv)
    count = f"{len(snapshot.advisories)} advisories on {len(snapshot.covers)} packages"
    console.say(f"images/advisories.json: {count}: commit it")
    debian = audit.update_debian(tracker)
    if debian is None:
        console.warn("no target has an image on this host, so it is unknown which Debian packages to fetch")
    else:
        count = f"{len(debian.advisories)} advisories on {len(debian.covers)} source packages"
        console.say(f"images/debian-advisories.json: {count}: commit it")


def _write_vex(document: str | None, path: Path) -> None:
    from trainyard.common import console

    if document is None:
        path.unlink(missing_ok=True)
        console.say(f"no advisory about these images is waived: {path} is not written")
    else:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(document, encoding="utf-8")
        console.say(f"{path}: OpenVEX")
