"""``trainyard job``."""

from __future__ import annotations

from typing import Any

import click

from trainyard import options

GROUP = "jobs"

#: Seconds between two queries of a submitted job's state: gcloud's default of 60 delays the log too long.
POLL_INTERVAL = 10

_POSITIVE = options.Count(min=1)


@click.command(
    cls=options.Group,
    short_help="Write a training job for a platform, or submit it.",
    epilog="""\b
    Examples:
      trainyard job xla --platform vertex --accelerator v5litepod-4 --registry HOST/PATH >job.yaml
      trainyard job cpu --platform vertex --workers 2 --spot --output gs://bucket/run --submit
      trainyard job cpu --platform vertex --tune "lr=1e-3:1e-1:log batch-size=32,64" >tune.yaml
      trainyard job xla --platform gke --accelerator v5litepod-16 --slices 2 >jobset.yaml
      trainyard job xla --platform tpu-vm --accelerator v5litepod-16 >run.sh
      trainyard job gpu --platform kubeflow --accelerator 8xA100 --workers 2 >train.yaml
      trainyard job gpu --platform slurm --accelerator 8xA100 --workers 2 --queue ml >train.sbatch
      trainyard job gpu --platform skypilot --accelerator 8xA100 --spot >task.yaml
      trainyard job tf-cpu --platform ai-platform --machine n1-highcpu-16 >old.yaml
      trainyard job --platform vertex --from old.yaml >job.yaml
      trainyard job --code . --platform vertex --accelerator v5litepod-4 --submit
    """,
)
@options.target
@options.option("--platform", metavar="NAME", help="Platform that runs the job; the examples show each.")
@options.option("--trainer", metavar="NAME", help="Trainer of the image. Default: the image's.")
@options.option("--image", metavar="REFERENCE", help="Any image, instead of TARGET's at the registry.")
@options.option(
    "--code",
    metavar="FOLDER",
    is_flag=False,
    flag_value=".",
    help="Push the code of the repository in FOLDER first, as 'trainyard push --code-only', and run that image.",
)
@options.registry
@options.flag("--pin", help="Name the image by its digest, so that a restarted job gets exactly the same one.")
@options.option("--args", metavar="WORDS", help="Flags of the trainer, split as a shell splits words.")
@options.option("--accelerator", metavar="NAME", help="GPUs or a TPU slice: T4, 2xNVIDIA_L4, v5litepod-16, ...")
@options.option("--machine", metavar="TYPE", help="Machine type. Default: one that fits the accelerator.")
@options.option("--workers", type=_POSITIVE, help="Number of machines. Default: 1.")
@options.option("--slices", type=_POSITIVE, help="Number of TPU slices that train together, on GKE. Default: 1.")
@options.flag("--spot", help="Use Spot VMs, which are cheaper and can be preempted.")
@options.option("--timeout", metavar="DURATION", help="End the job after this time: 90m, 12h, 2d.")
@options.option("--output", metavar="gs://...", help="Folder for checkpoints, model and logs.")
@options.option("--name", help="Display name, job ID or object name. Default: TARGET-TRAINER.")
@options.option("--region", help="Region, such as us-central1. Default: one that has the accelerator.")
@options.option("--zone", help="Zone of a TPU VM, such as us-central1-a.")
@options.option("--project", help="Google Cloud project. Default: gcloud's.")
@options.option("--service-account", metavar="EMAIL", help="Service account that the job runs as.")
@options.option("--tensorboard", metavar="RESOURCE", help="projects/PROJECT/locations/REGION/tensorboards/ID.")
@options.flag("--flex-start", help="Wait for capacity, which the job then keeps for at most 7 days (DWS).")
@options.option("--max-wait", metavar="DURATION", help="With --flex-start: how long to wait. Default: the platform's.")
@options.option("--reservation", metavar="NAME", help="Reservation of machines to use, or 'any'.")
@options.option("--queue", metavar="NAME", help="LocalQueue of Kueue (GKE), or partition (Slurm).")
@options.option("--priority", metavar="NAME", help="PriorityClass (GKE), or QOS (Slurm).")
@options.option(
    "--placement", metavar="LEVEL", help="With --queue, on GKE: machines in one block, subblock or preferred:block."
)
@options.option("--disk", metavar="[TYPE:]GB", help="Disk of each machine, as in hyperdisk-balanced:500.")
@options.option("--mount", metavar="LIST", help="Folders of Cloud Storage: 'gs://bucket/data:/data:ro'.")
@options.option("--labels", metavar="A=B,...", help="Labels of the job.")
@options.option("--kms-key", metavar="RESOURCE", help="Cloud KMS key that encrypts what the job stores.")
@options.option("--network", metavar="NAME", help="VPC network that the machines are connected to.")
@options.option("--network-attachment", metavar="NAME", help="Network attachment of Private Service Connect.")
@options.option("--persistent-resource", metavar="ID", help="Persistent resource of Vertex AI that runs the job.")
@options.option(
    "--container-runtime",
    type=click.Choice(["pyxis", "apptainer"]),
    help="What starts containers on a Slurm cluster. Default: pyxis.",
)
@options.option(
    "--tune", metavar="SEARCH", help="Flags that trials vary: 'lr=1e-3:1e-1:log batch-size=32,64 epochs=2:8'."
)
@options.option("--metric", metavar="NAME", help="Metric that the trainer reports. Default: accuracy.")
@options.option(
    "--goal",
    type=click.Choice(["maximize", "minimize"], case_sensitive=False),
    help="What to do with the metric. Default: maximize.",
)
@options.option("--trials", type=_POSITIVE, help="Number of trials. Default: 8.")
@options.option("--parallel", type=_POSITIVE, help="Number of trials at a time. Default: 2.")
@options.option("--algorithm", metavar="NAME", help="GRID_SEARCH or RANDOM_SEARCH. Default: the service's.")
@options.option("--tpu-version", metavar="VERSION", help="tpuTfVersion of AI Platform. Default: the framework's.")
@options.option(
    "--from", "source", metavar="FILE", help="Convert this AI Platform job instead of writing one for TARGET."
)
@options.flag("--submit", help="Submit the job and follow its log until it ends, instead of printing it.")
@options.option(
    "--poll", type=_POSITIVE, default=POLL_INTERVAL, help="Seconds between two queries of a submitted job's state."
)
@options.json_output
def command(
    platform: str | None, code: str | None, source: str | None, submit: bool, poll: int, as_json: bool, **given: Any
) -> None:
    """Write a job that runs a trainer of TARGET's image on a platform; the command that submits it is on stderr.

    Without TARGET, in a repository with a trainyard.yaml, it runs the repository's own command in the image that was
    pushed last. With --code, the repository's code replaces that of the image first: no engine is needed.

    The job has passed 'trainyard job check'. With --submit it is submitted instead, and the exit status is 0 only if it
    succeeds; Ctrl-C stops following its log and leaves it running.
    """
    import dataclasses
    import shlex
    from pathlib import Path

    from trainyard import console
    from trainyard.oci.reference import Reference
    from trainyard_jobs import platforms
    from trainyard_jobs.model import request
    from trainyard_jobs.platforms import writing
    from trainyard_jobs.platforms.base import Conversion
    from trainyard_jobs.schema import job_file

    chosen = platforms.by_name(platform)
    file = None if submit else writing.redirected_stdout()
    if source:
        conversion = Conversion(**{one.name: given[one.name] for one in dataclasses.fields(Conversion)})
        rendered = chosen.convert(job_file.load(Path(source)), conversion, file)
    else:
        if code:
            given |= _push_code(code, given)
        parsed = request.parse_request(request.Options(**given), tpu_machine=chosen.tpu_machine)
        if not given["image"] and Reference.parse(parsed.image).names_docker_hub:
            no, rehearse = "no '--registry'", "trainyard job rehearse"
            console.warn(f"{no}: the image is local; '{rehearse}' can run it, but no platform can pull it")
        platforms.check_options(chosen, parsed)
        rendered = chosen.write(parsed, file)
    for warning in rendered.warnings:
        console.warn(warning)
    for note in rendered.notes:
        console.say(note)
    if submit:
        console.result(dataclasses.asdict(chosen.submit(rendered, interval=poll)), as_json=as_json)
        return
    if not as_json:
        click.echo(rendered.text, nl=False)
    console.say(f"submit it with:\n  {shlex.join(rendered.command)}")
    console.result({"config": rendered.text, "command": rendered.command}, as_json=as_json)


def _push_code(folder: str, given: dict[str, Any]) -> dict[str, Any]:
    """Replace the code of the image of the repository in ``folder``; the options that name the result."""
    from pathlib import Path

    from trainyard import console
    from trainyard.release import code_push
    from trainyard.spec import model, workspace

    for name in ("target", "image"):
        if given[name]:
            raise console.UserError(f"--code names the image: remove {name.upper()}")
    file = workspace.find(Path(folder))
    if file is None:
        raise console.UserError(f"no {workspace.FILE} in {folder} or above it: run 'trainyard init' there")
    target = str(file.parent)
    spec = model.load(target)
    made = code_push.push(spec, code_push.address(spec, given["registry"]))
    console.say(f"{made['tag']}: {'pushed, not tested' if made['changed'] else 'the code has not changed'}")
    return {"target": target, "image": made["reference"]}
