"""``trainyard dev check``."""

from __future__ import annotations

import click

from trainyard.common import options

GROUP = "project"


@options.command(
    "Check specs, locks, generated files, style and types.",
    "trainyard dev check",
    "make check",
)
@options.json_output
def command(as_json: bool) -> None:
    """Check what needs no engine and no network: specs and locks, known vulnerabilities, generated files, style, types.

    The checks run side by side. It needs a checkout.
    """
    from trainyard.common import console, errors
    from trainyard.project import check
    from trainyard.spec import architectures

    architectures.use_all()
    for line in check.warnings():
        console.warn(line)
    root = click.get_current_context().find_root().command
    failed = check.check(root)
    for findings in failed.values():
        for line in findings:
            console.say(line)
    console.result({"failed": list(failed)}, as_json=as_json)
    if failed:
        raise errors.StepFailed(f"failed: {', '.join(failed)}")
    console.say(f"passed: {', '.join(check.checks(root))}")
