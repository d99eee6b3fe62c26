"""``trainyard dev cloudbuild-step``, which the steps of cloudbuild.yaml run."""

from __future__ import annotations

from pathlib import Path

import click

from trainyard.common import options, settings
from trainyard.common.context import Context

GROUP = "publish"


@options.command(
    "Run a step of cloudbuild.yaml.",
    'trainyard dev cloudbuild-step prepare --targets "tf-cpu cpu" --platforms linux/amd64 --registry HOST/REPOSITORY',
    "trainyard dev cloudbuild-step build tf-cpu",
    hidden=True,
)
@click.argument("step", type=click.Choice(["prepare", "emulation", "build", "verify", "smoke", "publish", "promote"]))
@click.argument("name", metavar="[TARGET]", required=False)
@options.option("--targets", default="", help="Targets to build, separated by spaces: _TARGETS.")
@options.option("--platforms", default="", help="Platforms to build, separated by spaces: _PLATFORMS.")
@options.registry
@options.option("--tag", default="", help="Suffix of an additional tag for every image: _TAG.")
@options.option("--index", metavar="NAME=URL,...", default="", help="Mirrors of package indexes: _INDEX.")
@options.option("--cache", metavar="REPOSITORY", default="", help="Repository for BuildKit's cache: _CACHE.")
@options.option("--promote", default="", help="Not empty: 'promote' moves the floating tags: _PROMOTE.")
@click.pass_obj
def command(
    context: Context,
    step: str,
    name: str | None,
    targets: str,
    platforms: str,
    registry: str | None,
    tag: str,
    index: str,
    cache: str,
    promote: str,
) -> None:
    """Run a STEP of cloudbuild.yaml, inside the builder image. Substitutions arrive as TRAINYARD_ variables.

    build, verify and smoke need a TARGET, and are about the platform of TRAINYARD_ARCH; for one that is not among
    --targets and --platforms they do nothing.
    """
    from trainyard.common import console, errors
    from trainyard.release import cloud_build_steps as steps

    given = steps.Substitutions(targets, platforms, registry or "", tag, index, cache, promote, context)
    if step == "prepare":
        steps.prepare(given)
        return
    steps.continue_build(given)
    if step == "emulation":
        steps.emulate(given)
    elif step == "publish":
        from trainyard.release import signers

        key = settings.standard_variable("COSIGN_KEY")
        steps.publish(given, signers.signer(Path(key) if key else None, "cloudbuild-step", context=context))
    elif step == "promote":
        steps.promote(given)
    elif not name:
        raise errors.UserError(f"no target: {step} needs one, as in 'cloudbuild-step {step} tf-cpu'")
    else:
        steps.run_target_step(step, name, given, console.show)
