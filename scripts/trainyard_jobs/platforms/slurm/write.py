"""Slurm: a batch script that starts the image once on every node, with pyxis and enroot or with Apptainer.

The launcher in the image reads Slurm's variables and starts one process for each GPU (docs/launcher.md). Options of the
script: https://slurm.schedmd.com/sbatch.html; of pyxis: https://github.com/NVIDIA/pyxis#usage; of Apptainer:
https://apptainer.org/docs/user/main/cli/apptainer_run.html.
"""

from __future__ import annotations

import dataclasses
import re
import shlex

from trainyard.common.errors import StepFailed, UserError
from trainyard.oci.reference import Reference
from trainyard_jobs.kubernetes.gke_objects import object_name
from trainyard_jobs.model import options
from trainyard_jobs.model.request import Request
from trainyard_jobs.platforms import submission, writing
from trainyard_jobs.platforms.base import Platform, RenderedJob, Submission

#: Stands for the number of a job array's task: https://slurm.schedmd.com/job_array.html
_TASK = "@SLURM_ARRAY_TASK_ID@"


def _check(request: Request) -> None:
    """Check that Slurm can run what is requested."""
    if request.reservation == "any":
        raise UserError("'--reservation any': jobs of Slurm name their reservation")
    for name in ("queue", "priority", "reservation"):
        # sbatch reads a line of options as words: https://slurm.schedmd.com/sbatch.html.
        if not re.fullmatch(r"[\w.,:@+-]*", value := getattr(request, name) or ""):
            raise UserError(f"'--{name} {value}' is no name of Slurm: it has no spaces")
    writing.refuse("slurm", request, "tune", "tensorboard", "slices", "spot", "machine", "service_account")
    if request.tpu:
        raise UserError(
            "'--platform slurm' runs jobs with GPUs or CPUs: TPUs are on '--platform gke', vertex and tpu-vm"
        )


def directives(request: Request) -> list[str]:
    """The options of sbatch: one task on each node, which has the node to itself unless it says what it needs."""
    found = [
        f"--job-name={object_name(request.name)}",
        f"--nodes={request.workers}",
        "--ntasks-per-node=1",
        # The data loaders use all CPUs of the node, unless a number is given.
        f"--cpus-per-task={options.whole_cpus(request.cpu)}" if request.cpu else "--exclusive",
        f"--output={'%x-%A_%a.log' if request.array else '%x-%j.log'}",
    ]
    found += [f"--array={request.array}"] if request.array else []
    # The log of a job that starts again goes on.
    found += ["--requeue", "--open-mode=append"] if request.requeue else []
    if request.memory:
        found.append(f"--mem={options.mebibytes(request.memory)}M")
    if request.gpus:
        # Names of types of GPUs are the cluster's: the number alone is valid everywhere.
        found.append(f"--gpus-per-node={request.gpus.count}")
    if request.timeout:
        found.append(f"--time={-(-request.timeout // 60)}")  # minutes, rounded up
    optional = {"partition": request.queue, "qos": request.priority, "reservation": request.reservation}
    return found + [f"--{option}={value}" for option, value in optional.items() if value]


def enroot_image(image: str) -> str:
    """An image as enroot names it, with a ``#`` after the registry: https://github.com/NVIDIA/enroot/blob/master/doc/cmd/import.md."""
    if image.startswith("/"):
        return image
    registry = Reference.parse(image).registry
    return f"{registry}#{image[len(registry) + 1 :]}" if image.startswith(f"{registry}/") else image


def step(request: Request) -> list[str]:
    """The lines that run the image on every node. A node that fails ends the others."""
    folder = f"{request.output.rstrip('/')}/{_TASK}" if request.output and request.array else request.output
    args, env = dataclasses.replace(request, output=folder).with_output()
    binds = [f"/{one.folder}:{one.path}{':ro' if one.read_only else ''}" for one in request.mounts]
    # Without --whole, a step of one task has one CPU of the node.
    command = ["srun", "--whole", "--kill-on-bad-exit=1"]
    if request.container_runtime != "apptainer":  # pyxis, the default
        # Variables that the image sets, too, and those that the entrypoint reads, have to be named.
        named = [f"--container-env={','.join(env)}"] if env else []
        entrypoint = "--no-container-entrypoint" if request.command else "--container-entrypoint"
        image = [f"--container-image={enroot_image(request.image)}", entrypoint, *named, "--no-container-mount-home"]
        image += [f"--container-mounts={','.join(binds)}"] if binds else []
        # What follows is the command of the image, which pyxis passes to the entrypoint.
        words, prefix = [*command, *image, *request.command, *args], ""
    else:
        gpu = ["--nv"] if request.gpus else []
        source = request.image if request.image.startswith("/") else f"docker://{request.image}"
        given = [f"--bind={','.join(binds)}"] if binds else []
        start = ["exec" if request.command else "run", *gpu, *given, source, *request.command]
        words, prefix = [*command, "apptainer", *start, *args], "APPTAINERENV_"
    # Not as an option, which would take a comma in a value for its end. srun passes its environment on.
    return [*(f"export {prefix}{name}={_quoted(value)}" for name, value in env.items()), " ".join(map(_quoted, words))]


def _quoted(word: str) -> str:
    """Return a word for bash, in which :data:`_TASK` is the number of the array's task."""
    return '"$SLURM_ARRAY_TASK_ID"'.join(shlex.quote(part) if part else "" for part in word.split(_TASK)) or "''"


class Slurm(Platform):
    """A Slurm cluster. A job is a batch script, which no other command reads."""

    name = "slurm"
    file_name = "job.sbatch"
    mounts = ("folder",)
    options = frozenset({"queue", "priority", "reservation", "container-runtime", "env", "cpu", "memory", "mount",
                         "array", "requeue"})  # fmt: skip
    dry_run = ("sbatch", "--test-only")

    def write(self, request: Request, file: str | None = None) -> RenderedJob:
        _check(request)
        command = ["sbatch", file or self.file_name]
        head = writing.script_header(request, f"Submit it with: {shlex.join(command)}")
        lines = [f"#SBATCH {word}" for word in directives(request)]
        text = "\n".join(["#!/usr/bin/env bash", *lines, "", "set -euo pipefail", "", *step(request), ""])
        shebang, _, rest = text.partition("\n")
        notes = writing.network_notes(request)
        return RenderedJob(f"{shebang}\n{head}{rest}", command, request, notes=notes)

    def submit(self, job: RenderedJob, *, interval: int) -> Submission:
        submission.require_program("sbatch")
        with submission.temporary_file(job.text, self.file_name) as path:
            status = submission.run_visibly(["sbatch", "--wait", str(path)])
        if status:
            raise StepFailed(f"the Slurm job ended with status {status}; its log is in the file above, NAME-JOB.log")
        return Submission(object_name(job.request.name), "COMPLETED")
