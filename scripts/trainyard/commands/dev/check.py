"""``trainyard dev check``."""

from __future__ import annotations

import click

from trainyard.common import options

GROUP = "project"


@options.command(
    "Check specs, locks, generated files, style and types.",
    "trainyard dev check",
    "make check",
    "trainyard dev check --ends    # on a schedule: fail if a target is past its last day (images/matrix.yaml)",
)
@options.flag("--ends", help="Fail if a target is past its last day, instead of warning of it.")
@options.json_output
def command(ends: bool, as_json: bool) -> None:
    """Check what needs no engine and no network: specs and locks, known vulnerabilities, generated files, style, types.

    The checks run side by side. It needs a checkout.
    """
    from trainyard.common import console, errors
    from trainyard.project import check
    from trainyard.spec import architectures

    architectures.use_all()
    root = click.get_current_context().find_root().command
    for line in check.warnings(root):
        console.warn(line)
    failed = check.check(root, ends=ends)
    for findings in failed.values():
        for line in findings:
            console.say(line)
    console.result({"failed": list(failed)}, as_json=as_json)
    if failed:
        raise errors.StepFailed(f"failed: {', '.join(failed)}")
    console.say(f"passed: {', '.join(check.checks(root, ends=ends))}")
