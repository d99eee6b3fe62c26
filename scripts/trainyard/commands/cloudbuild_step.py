"""``trainyard cloudbuild-step``, which the steps of cloudbuild.yaml run."""

from __future__ import annotations

from pathlib import Path

import click

from trainyard import options, settings

GROUP = "publish"


@click.command(
    hidden=True,
    short_help="Run a step of cloudbuild.yaml.",
    epilog="""\b
    Examples:
      trainyard cloudbuild-step prepare --targets "tf-cpu cpu" --registry HOST/PROJECT/REPOSITORY
      trainyard cloudbuild-step build tf-cpu
    """,
)
@click.argument("step", type=click.Choice(["prepare", "build", "verify", "smoke", "publish", "promote"]))
@click.argument("name", metavar="[TARGET]", required=False)
@options.option("--targets", default="", help="Targets to build, separated by spaces: _TARGETS.")
@options.registry
@options.option("--tag", default="", help="Suffix of an additional tag for every image: _TAG.")
@options.option("--index", metavar="NAME=URL,...", default="", help="Mirrors of package indexes: _INDEX.")
@options.option("--cache", metavar="REPOSITORY", default="", help="Repository for BuildKit's cache: _CACHE.")
@options.option("--promote", default="", help="Not empty: 'promote' moves the floating tags: _PROMOTE.")
def command(
    step: str, name: str | None, targets: str, registry: str | None, tag: str, index: str, cache: str, promote: str
) -> None:
    """Run a STEP of cloudbuild.yaml, inside the builder image. Substitutions arrive as TRAINYARD_ variables.

    build, verify and smoke need a TARGET; for a target that is not among --targets they do nothing.
    """
    from trainyard import console
    from trainyard.release import cloud_build_steps as steps

    given = steps.Substitutions(targets, registry or "", tag, index, cache, promote)
    if step == "prepare":
        steps.prepare(given)
        return
    steps.continue_build(given)
    if step == "publish":
        from trainyard.release import signature

        key, password = map(settings.standard_variable, ("COSIGN_KEY", "COSIGN_PASSWORD"))
        steps.publish(given, signature.private_key(Path(key), password) if key else None)
    elif step == "promote":
        steps.promote(given)
    elif not name:
        raise console.UserError(f"no target: {step} needs one, as in 'cloudbuild-step {step} tf-cpu'")
    elif name not in given.target_names():
        console.say(f"{name} is not among _TARGETS: nothing to do")
    else:
        steps.TARGET_STEPS[step](name, given)
