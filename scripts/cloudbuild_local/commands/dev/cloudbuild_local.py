"""``trainyard dev cloudbuild-local``."""

from __future__ import annotations

from pathlib import Path

import click

from trainyard.common import options, settings

GROUP = "publish"


@click.command(
    short_help="Run a cloudbuild.yaml with the local Docker engine.",
    epilog="""\b
    Examples:
      trainyard dev cloudbuild-local --substitutions _TARGETS=tf-cpu,_REGISTRY=localhost:5000/team
      trainyard dev cloudbuild-local --config ../other/cloudbuild.yaml --images gcr.io/my/builder=my/builder
      trainyard dev cloudbuild-local --check ../other/cloudbuild.yaml
      trainyard dev cloudbuild-local --check ../other/cloudbuild.yaml --trigger
    """,
)
@options.option(
    "--config",
    type=click.Path(path_type=Path),
    help="The cloudbuild.yaml. Default: that of this checkout.",
)
@options.option(
    "--source",
    type=click.Path(path_type=Path),
    help="Folder of the build's source. Default: that of the configuration.",
)
@options.option(
    "--substitutions", metavar="_A=b,_C=d", default="", help="Substitutions; ^;^_A=b,c;_D=e sets another delimiter."
)
@options.option("--images", metavar="NAME=LOCAL,...", default="", help="Local images to use for images of steps.")
@options.option("--project", metavar="ID", default="local-project", help="Value of $PROJECT_ID.")
@options.flag(
    "--trigger",
    help="Read the file as for a build of a trigger: substitutions need not match, and the trigger may give others.",
)
@options.flag("--no-socket", help="Keep the engine's socket, which is root on this host, from the steps.")
@options.option(
    "--check",
    "checked",
    metavar="FILE",
    type=click.Path(path_type=Path),
    help="Only check FILE by the rules of gcloud and Cloud Build, without a Docker engine.",
)
@options.json_output
def command(
    config: Path | None,
    source: Path | None,
    substitutions: str,
    images: str,
    project: str,
    trigger: bool,
    no_socket: bool,
    checked: Path | None,
    as_json: bool,
) -> None:
    """Run a cloudbuild.yaml with the local Docker engine, as Cloud Build would run it.

    The build's source are the files that 'gcloud builds submit' would upload. Builder images of Google that cannot be
    pulled (docker, git, make, gcloud, gsutil) are replaced by images built here. Containers, volumes and networks of
    the run are removed at the end. What Cloud Build refuses, and what cannot be run locally, is refused by name.

    As on Cloud Build, the steps get the engine's socket. It is root on this host: run only files that you trust, or
    give --no-socket, with which a step that calls docker fails as it does without a daemon.
    """
    from cloudbuild_local import config as cloud_config
    from cloudbuild_local.substitutions import pairs
    from trainyard.common import console, errors
    from trainyard.spec import yaml_source

    given = pairs(substitutions, "--substitutions")
    if checked:
        found = cloud_config.check(checked, substitutions=given, project=project, trigger=trigger)
        where = yaml_source.relative(checked)
        for line in found.lines(where):
            console.say(line)
        console.result(found.facts(where), as_json=as_json)
        if found.errors:
            raise errors.StepFailed(f"{where}: not a valid build")
        return

    from cloudbuild_local import local
    from cloudbuild_local.executor import SUCCESS

    made = local.run(
        config or settings.ROOT / "cloudbuild.yaml",
        source=source,
        substitutions=given,
        images=pairs(images, "--images"),
        project=project,
        trigger=trigger,
        engine_socket=not no_socket,
    )
    console.show(local.table(made.build, made.result))
    for name, digest in made.result.images.items():
        console.say(f"{name} {digest}")
    console.result(made.facts(), as_json=as_json)
    if made.result.status != SUCCESS:
        raise errors.StepFailed(f"{made.result.status}: {made.result.detail}")
