"""``trainyard audit``."""

from __future__ import annotations

import click

from trainyard import options

GROUP = "publish"


@click.command(
    short_help="Check the locked packages for known vulnerabilities.",
    epilog="""\b
    Examples:
      trainyard audit
      trainyard audit tf-cpu --offline
      trainyard audit --update
    """,
)
@options.target
@options.flag("--offline", help="Use the stored snapshot only, as 'trainyard check' and 'trainyard push' do.")
@options.flag("--update", help="Fetch a new snapshot of advisories first; commit images/advisories.json.")
@options.option("--osv", metavar="URL", help="Mirror of https://api.osv.dev that --update fetches from.")
@options.json_output
def command(target: str | None, offline: bool, update: bool, osv: str | None, as_json: bool) -> None:
    """Check the packages that TARGET's locks pin, or those of all targets, for known vulnerabilities.

    They are looked up with pip-audit if a vulnerability service answers, else in the stored snapshot
    images/advisories.json. A vulnerability without a waiver in images/waivers.yaml fails, and so does one whose waiver
    has expired.
    """
    from trainyard import console
    from trainyard.release import audit

    if update:
        snapshot = audit.update(osv or "")
        count = f"{len(snapshot.advisories)} advisories on {len(snapshot.covers)} packages"
        console.say(f"images/advisories.json: {count}: commit it")
    report = audit.audit(target, only_snapshot=offline)
    console.result(report.as_dict(), as_json=as_json)
    if report.findings:
        console.log.print(audit.table(report.findings))
    for waiver in report.stale:
        console.warn(str(waiver))
    report.require()
    console.say(f"{report.packages} locked packages, {report.source}: no known vulnerability without a waiver")
