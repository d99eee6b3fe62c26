"""``trainyard dev test``."""

from __future__ import annotations

import shlex

import click

from trainyard.common import options
from trainyard.common.context import Context

GROUP = "project"


def _words(_context: click.Context, _parameter: click.Parameter, value: str | None) -> list[str]:
    try:
        return shlex.split(value or "")
    except ValueError as error:
        raise click.BadParameter(f"{error}: {value}") from None


@options.command(
    "Run the checks and the tests.",
    "trainyard dev test",
    'trainyard dev test --suite unit --args "-k lock"',
    'make test SUITE=unit ARGS="-k lock"',
    "make test REQUIRE=gcloud",
    "make test ALL=1 PART=1/3",
)
@options.option(
    "--suite",
    type=click.Choice(("unit", "image", "cloud", "builder", "jobs", "launcher", "trainers")),
    help="One folder of tests/, or the tests of one package, without the checks. The unit tests need no Docker engine.",
)
@options.option("--args", "words", callback=_words, metavar="ARGUMENTS", help="More arguments for pytest.")
@options.option(
    "--require",
    default="",
    metavar="PROGRAM,...",
    help="Fail if one of these programs is not installed. Without it, the tests that need the program are deselected.",
)
@options.flag(
    "--all",
    "big",
    help="Also test the largest images, 4 minutes and 20 GB of disk each, and run slow tests that others cover.",
)
@options.option("--part", default="", metavar="N/COUNT", help="One of several parts that take about the same time.")
@click.pass_obj
def command(context: Context, suite: str | None, words: list[str], require: str, big: bool, part: str) -> None:
    """Run the checks, the unit tests, and the tests that build images and run in them.

    It needs a checkout.
    """
    from trainyard.common import console, errors
    from trainyard.project import check, test

    if not suite:
        failed = check.check(click.get_current_context().find_root().command)
        for line in (line for findings in failed.values() for line in findings):
            console.say(line)
        if failed:
            raise errors.StepFailed(f"failed: {', '.join(failed)}")
    if suite != "unit":
        context.engine.set_up_in_checkout()
    test.run(suite, words, require=require, big=big, part=part)
