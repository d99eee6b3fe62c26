"""``trainyard run``."""

from __future__ import annotations

from pathlib import Path

import click

from trainyard.common import options
from trainyard.common.context import Context

GROUP = "workspace"

_FOLDER = options.Folder(file_okay=False, path_type=Path)


@options.command(
    "Run an image on this machine, with your code if you like.",
    "trainyard run -- --epochs 1",
    "trainyard run --mount --data ~/data -- --data-dir /data --epochs 1",
    "trainyard run --command 'python evaluate.py' -- --split test",
    "trainyard run --gpus free --publish 6006 --volume ~/corpus:/corpus:ro --output out --detach",
    "trainyard run --shell",
    "trainyard run --jupyter --mount",
    "trainyard run cpu -- mnist --fake-data --epochs 1",
    cls=options.Forwarding,
)
@options.target
@options.option("--args", "words", callback=options.words, metavar="WORDS", help="Arguments, as those after '--'.")
@options.option(
    "--command",
    "program",
    callback=options.words,
    metavar="WORDS",
    help="Program of the image to run instead of its command, split as a shell splits words; ARGS follow.",
)
@options.flag("--mount", help="Use the code of the repository instead of that in the image: an edit needs no build.")
@options.flag("--shell", help="Open bash; ARGS are its arguments.")
@options.flag("--jupyter", help="Start JupyterLab, or else Jupyter Notebook, if the image has it.")
@options.option("--port", type=options.Count(1, 65535), default=8888, help="Port of Jupyter, at 127.0.0.1.")
@options.option("--data", type=_FOLDER, help="Folder that is read-only at /data. Default: 'smoke.data'.")
@options.option("--output", type=_FOLDER, help="Folder that is writable at /output; it is created if it is missing.")
@options.option(
    "--volume",
    "volumes",
    multiple=True,
    metavar="SOURCE:/PATH[:ro]",
    help="Folder, file or volume, as for 'docker run'; may be repeated.",
)
@options.option(
    "--publish",
    "ports",
    multiple=True,
    metavar="[PORT:]PORT",
    help="Port of the container, as for 'docker run', at 127.0.0.1 unless it names an address; may be repeated.",
)
@options.flag("--detach", help="Leave the container running: 'trainyard logs' shows it, 'trainyard stop' ends it.")
@options.option(
    "--gpus",
    default="auto",
    metavar="GPUS",
    help="GPUs, as for 'docker run': all, a number, device=0,2; 'free': one that is not in use; 'auto': all, in an "
    "image for GPUs; or 'none'.",
)
@options.option(
    "--env", "environment", multiple=True, metavar="NAME[=VALUE]", help="Variable of the container; may be repeated."
)
@click.pass_obj
def command(
    context: Context,
    target: str | None,
    words: tuple[str, ...],
    program: tuple[str, ...],
    mount: bool,
    shell: bool,
    jupyter: bool,
    port: int,
    data: Path | None,
    output: Path | None,
    volumes: tuple[str, ...],
    ports: tuple[str, ...],
    detach: bool,
    gpus: str,
    environment: tuple[str, ...],
) -> None:
    """Run the image of your repository, or of TARGET, in a new container that is removed at the end.

    ARGS are arguments of the repository's command; of a target of the catalogue, a trainer and its flags. The exit
    status is that of the command, and signals reach it. With --mount, --output or a --volume that is not read-only the
    container runs as the current user, so that the files that it writes are yours. Values of --env are neither printed
    nor arguments of a process, but for PATH, HOME, LD_* and DOCKER_*, which docker reads itself.

    At the end, a line says how long it took, how much memory it used, and what became of each loss of its log, such as
    'loss: 1.23'; with --output, run.json, curves.csv and a file for TensorBoard are in that folder.
    """
    import os
    import secrets
    import shlex
    import subprocess
    import sys

    from trainyard.common import console, errors, settings
    from trainyard.image import local_run, running
    from trainyard.spec.naming import NAME
    from trainyard.workspace.loading import load

    chosen = [name for name, given in (("--command", program), ("--shell", shell), ("--jupyter", jupyter)) if given]
    if len(chosen) > 1:
        raise errors.UserError(f"{' and '.join(chosen[:2])} cannot be used together")
    if detach and shell:
        raise errors.UserError("--detach and --shell cannot be used together")
    spec = load(target, context=context)
    if gpus == "free":
        try:
            gpus = local_run.free_gpu(subprocess.run(local_run.NVIDIA_SMI, capture_output=True, text=True).stdout)
        except FileNotFoundError:
            raise errors.UserError("--gpus free: this machine has no nvidia-smi, which says what is free") from None
    terminal = sys.stdin.isatty() and sys.stdout.isatty()
    name = "" if shell or (jupyter and not detach) else f"{NAME}-{spec.local_name}-{secrets.token_hex(3)}"
    request = local_run.Request(
        words, program, mount, shell, jupyter, port, data, output, volumes, ports, detach, name, gpus, environment,
        terminal and not detach,
    )  # fmt: skip
    reference = f"{NAME}:{spec.local_name}"
    image = context.engine.image(reference, made_by=spec.command("image"))
    local_run.check_own(spec, image)
    host = local_run.host(context.engine)
    server = local_run.jupyter_server(context.engine, reference) if jupyter else ""
    arguments = local_run.arguments(spec, reference, request, host, server)
    if not mount and local_run.code_changed(spec, image.labels):
        console.warn(f"the code has changed since {reference} was built: --mount uses it, 'trainyard image' builds it")
    for note in local_run.notes(spec, request, host):
        console.say(note)
    if output is not None:
        output.mkdir(parents=True, exist_ok=True)
    local_run.check_folders(context.engine, reference, arguments)
    console.say(shlex.join(arguments))
    sys.stderr.flush()
    variables = settings.environment(**local_run.variables(request))
    if detach:
        named = f"its log: 'trainyard logs {target}', its end: 'trainyard stop {target}'"
        console.say(named if target else "its log: 'trainyard logs', its end: 'trainyard stop'")
    if detach or not name:
        os.execvpe(arguments[0], arguments, variables)
    sys.exit(running.to_the_end(context.engine, arguments, variables, request))
