"""Write a job for a trainer and an image, with the command that submits it; or submit it and follow its log.

    make job PLATFORM=vertex TARGET=xla TRAINER=mnist ACCELERATOR=v5litepod-4 REGISTRY=... >job.yaml
    make job PLATFORM=vertex TARGET=cpu WORKERS=2 SPOT=1 OUTPUT=gs://bucket/run ARGS="--epochs 2" REGISTRY=... SUBMIT=1
    make job PLATFORM=vertex TARGET=cpu TUNE="lr=1e-3:1e-1:log batch-size=32,64,128" TRIALS=8 REGISTRY=... >tune.yaml
    make job PLATFORM=gke TARGET=xla ACCELERATOR=v5litepod-16 SLICES=2 REGISTRY=... >jobset.yaml
    make job PLATFORM=tpu-vm TARGET=xla ACCELERATOR=v5litepod-16 REGISTRY=... >run.sh
    make job PLATFORM=ai-platform TARGET=tf-cpu MACHINE=n1-highcpu-16 REGISTRY=... >old.yaml
    make job FROM=old.yaml PLATFORM=vertex >job.yaml                     an AI Platform job, converted

The configuration is on stdout, all else on stderr. What is printed has passed `make check-job`.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import shlex
import stat
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from scripts import cli, spec
from scripts.cli import UserError, nearest, say, warn
from scripts.jobs import (
    ai_platform,
    contents,
    files,
    flags,
    gke,
    machines,
    migrate,
    rules,
    submit,
    text,
    tpu_vm,
    tuning,
    vertex,
)
from scripts.jobs import request as requests
from scripts.jobs.request import PLATFORMS, Request
from scripts.published import registry

#: Options that only make sense together with TUNE.
_OF_TUNING = ("metric", "goal", "trials", "parallel", "algorithm")


@dataclass(frozen=True)
class Written:
    """A job that was written: its text, and the words of the command that submits it."""

    text: str
    command: list[str]


def _file_name(default: str) -> str:
    """The file that stdout goes to, if it is one; the name that the printed command then uses."""
    try:
        if stat.S_ISREG(os.fstat(sys.stdout.fileno()).st_mode):
            path = Path(os.readlink(f"/proc/self/fd/{sys.stdout.fileno()}"))
            return str(path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path)
    except (OSError, ValueError):  # no such file system, or no real stdout
        pass
    return default


def _checked(written: str, request: Request, name: str) -> str:
    """The text, if it breaks no rule that can be looked at here.

    Raises:
        UserError: the first thing that is wrong, and how to mend it.
    """
    file = files.parse(written, Path(name))
    # AI Platform's old form is written on request for images that it never knew.
    known = (
        {}
        if request.platform == "ai-platform" or not request.spec
        else {request.image: contents.of_spec(request.image, request.spec)}
    )
    wrong = [one for one in rules.check(rules.Evidence(file, request.place, known)) if not one.note]
    if wrong:
        more = f" (and {len(wrong) - 1} more)" if len(wrong) > 1 else ""
        raise UserError(f"this would be no good job: {wrong[0].what}: {wrong[0].fix}{more}")
    return written


def _head(request: Request, command: list[str]) -> str:
    """What a file says of itself: the command names it job.yaml, wherever it is kept."""
    holds = f"; {request.spec.framework.name} {request.spec.framework.version}" if request.spec else ""
    return text.comment(
        [
            f"{request.name}: {request.image}{holds}",
            "Written by `make job`; check it with `make check-job FILE=job.yaml`. Submit it with:",
            shlex.join(command),
        ]
    )


def _vertex(request: Request) -> Written:
    about = _head(request, vertex.submit_command(request, "job.yaml"))
    command = vertex.submit_command(request, _file_name("job.yaml"))
    return Written(_checked(about + text.dump(vertex.config(request)), request, "job.yaml"), command)


def _ai_platform(request: Request) -> Written:
    """The old form; the job that replaces it stands below it, as a comment, so that the file stays one document."""
    command = ai_platform.submit_command(request, _file_name("job.yaml"))
    old = ai_platform.config(request)
    new = migrate.migrate(old)
    head = text.comment(
        [
            f"NOT FOR USE: AI Platform Training was shut down on {ai_platform.SHUT_DOWN}. This is its format, for",
            "comparing, and for converting with `make job FROM=job.yaml PLATFORM=vertex`.",
        ]
    ) + _head(request, ai_platform.submit_command(request, "job.yaml"))
    below = text.comment(["", "The same job on Vertex AI:", "", *text.dump(new.config).splitlines()])
    warn(f"AI Platform Training was shut down on {ai_platform.SHUT_DOWN}: nothing takes this job any more")
    for note in new.notes:
        say(f"on Vertex AI: {note}")
    return Written(_checked(head + text.dump(old) + below, request, "job.yaml"), command)


def _gke(request: Request) -> Written:
    command = gke.submit_command(request, _file_name("job.yaml"))
    objects = "---\n".join(text.dump(one) for one in gke.manifests(request))
    about = _head(request, gke.submit_command(request, "job.yaml"))
    return Written(_checked(about + objects, request, "job.yaml"), command)


def _tpu_vm(request: Request) -> Written:
    head = text.comment([f"{request.name}: {request.image}", "Written by `make job`. Run it with: bash job.sh"])
    script = tpu_vm.script(request)
    return Written("#!/usr/bin/env bash\n" + head + script, ["bash", _file_name("job.sh")])


_WRITERS = {"vertex": _vertex, "ai-platform": _ai_platform, "gke": _gke, "tpu-vm": _tpu_vm}


def write(request: Request) -> Written:
    """The job of a request.

    Raises:
        UserError: the platform cannot do what was asked for.
    """
    return _WRITERS[request.platform](request)


def convert(path: Path, options: argparse.Namespace) -> tuple[Written, Request]:
    """An AI Platform job's file as a Vertex AI job.

    Raises:
        UserError: it is no such file.
    """
    file = files.load(path)
    if file.kind != "ai-platform":
        raise UserError(f"{path}: a {file.kind}: FROM= takes AI Platform jobs only")
    if options.platform != "vertex":
        raise UserError("FROM= converts to PLATFORM=vertex")
    for one in rules.complaints(file.kind, file.documents[0]):
        raise UserError(f"{file.where(one.location)}: {one.what}; `make check-job FILE={path}` tells all of it")
    done = migrate.migrate(file.documents[0], image=options.image)
    name = options.name or str(file.documents[0].get("jobId") or path.stem)
    request = Request("vertex", name, "", region=options.region or done.region, project=options.project)
    if "studySpec" in done.config:
        trials = {"trials": done.config["maxTrialCount"], "parallel": done.config["parallelTrialCount"]}
        request = dataclasses.replace(request, tuning=tuning.Tuning((), **trials))
        done.config["displayName"] = name
    plain = [*vertex.submit_command(request, "job.yaml"), *done.flags]
    command = [*vertex.submit_command(request, _file_name("job.yaml")), *done.flags]
    for note in done.notes:
        say(f"changed: {note}")
    head = text.comment(
        [f"{name}: converted from {path.name} by `make job`. Submit it with:", shlex.join(plain), "", *done.notes]
    )
    return Written(_checked(head + text.dump(done.config), request, "job.yaml"), command), request


def _number(options: argparse.Namespace, name: str, default: int) -> int:
    value = getattr(options, name)
    if value in (None, ""):
        return default
    if not str(value).isdigit() or not int(value):
        raise UserError(f"{name.upper()}={value!r} is not a whole number from 1")
    return int(value)


def _tuning(options: argparse.Namespace) -> tuning.Tuning | None:
    if not options.tune:
        given = next((name for name in _OF_TUNING if getattr(options, name)), None)
        if given:
            raise UserError(f"{given.upper()}= goes with TUNE=, as in TUNE='lr=1e-3:1e-1:log'")
        return None
    goal = (options.goal or "maximize").upper()
    if goal not in ("MAXIMIZE", "MINIMIZE"):
        raise UserError(f"GOAL={options.goal!r} is neither maximize nor minimize")
    found = tuning.Tuning(
        tuning.parse(options.tune),
        metric=options.metric or tuning.METRIC,
        goal=goal,
        trials=_number(options, "trials", 8),
        parallel=_number(options, "parallel", 2),
        algorithm=options.algorithm,
    )
    if found.parallel > found.trials:
        raise UserError(f"PARALLEL={found.parallel} is more than TRIALS={found.trials}")
    return found


def asked(options: argparse.Namespace) -> Request:
    """The request that the options make.

    Raises:
        UserError: one of them is wrong; it is named.
    """
    about = spec.load(options.target) if options.target or not options.image else None
    address = registry.check_address(options.registry) if options.registry else None
    gpus, slice_name = requests.accelerator(options.accelerator) if options.accelerator else (None, None)
    of_tpu = options.machine if options.platform in ("gke", "vertex") else None  # elsewhere it is another machine
    tpu = machines.slice_of(slice_name, of_tpu) if slice_name else None
    search = _tuning(options)
    started = requests.trainer_of(about, options.trainer)
    args = (*started, *requests.words(options.args or ""))
    if about:
        flags.check(about, started[0], args[1:], variable="ARGS")
        flags.check(
            about, started[0], [f"--{one.name}" for one in search.parameters] if search else [], variable="TUNE"
        )
    if search and about and not any(word.startswith("--hypertune-tag") for word in args):
        args = (*args, f"--hypertune-tag={search.metric}")
    image = requests.image_of(about, options.image, address)
    if address is None and not options.image:
        warn("no REGISTRY: the image is this host's own, which `make rehearse` can run and no cloud can pull")
    return Request(
        platform=options.platform,
        name=options.name or f"{about.target if about else 'image'}-{started[0] if started else 'job'}",
        image=requests.pinned(image) if options.pin else image,
        spec=about,
        args=args,
        machine=options.machine,
        gpus=gpus,
        tpu=tpu,
        workers=_number(options, "workers", 1),
        slices=_number(options, "slices", 1),
        spot=options.spot,
        service_account=options.service_account,
        tensorboard=options.tensorboard,
        output=options.output,
        region=options.region,
        zone=options.zone,
        project=options.project,
        timeout=requests.seconds(options.timeout) if options.timeout else None,
        tpu_version=options.tpu_version,
        tuning=search,
    )


def _parser() -> argparse.ArgumentParser:
    found = cli.parser(__doc__)

    def add(name: str, about: str) -> None:
        variable = name.upper().replace("-", "_")
        found.add_argument(f"--{name}", default=os.environ.get(variable) or None, help=f"{about}; or {variable}")

    add("platform", f"one of {', '.join(PLATFORMS)}")
    add("trainer", "a trainer of the image; its default one if left out")
    add("image", "reference of the image, instead of TARGET's at REGISTRY")
    add("registry", "host[:port]/path that TARGET was pushed to")
    add("machine", "machine type")
    add("accelerator", "T4, 2xNVIDIA_L4, v5litepod-16, ...")
    add("workers", "machines of the job; 1 if left out")
    add("slices", "TPU slices that train together, on GKE")
    add("args", "flags of the trainer, as a shell splits them")
    add("service-account", "whose rights the job has")
    add("tensorboard", "projects/P/locations/L/tensorboards/ID")
    add("output", "gs:// folder of checkpoints, model and logs")
    add("name", "display name, job id or object name")
    add("region", "such as us-central1")
    add("zone", "such as us-central1-a, for TPU VMs")
    add("project", "Google Cloud project; gcloud's own if left out")
    add("timeout", "after which the platform ends it: 90m, 12h, 2d")
    add("tune", "what trials differ in: 'lr=1e-3:1e-1:log batch-size=32,64 epochs=2:8'")
    add("metric", f"what the trainer reports; {tuning.METRIC} if left out")
    add("goal", "maximize or minimize")
    add("trials", "trials in all; 8 if left out")
    add("parallel", "trials at a time; 2 if left out")
    add("algorithm", "GRID_SEARCH or RANDOM_SEARCH; the service's own if left out")
    add("poll", f"seconds between two looks at a job that is followed; {submit.INTERVAL} if left out")
    add("tpu-version", "AI Platform's tpuTfVersion")
    found.add_argument(
        "--from", dest="source", default=os.environ.get("FROM") or None, help="AI Platform file; or FROM"
    )
    for switch in ("spot", "pin", "submit"):
        found.add_argument(f"--{switch}", action="store_true", default=bool(os.environ.get(switch.upper())))
    return found


def main(arguments: list[str]) -> int:
    options = _parser().parse_args(arguments)
    if options.platform not in PLATFORMS:
        given = f"unknown platform '{options.platform}'" if options.platform else "no PLATFORM"
        raise UserError(f"{given}{nearest(options.platform or '', PLATFORMS)}; there are: {', '.join(PLATFORMS)}")
    if options.source:
        written, request = convert(Path(options.source), options)
    else:
        request = asked(options)
        written = write(request)
    if options.submit:
        done: dict[str, Any] = submit.submit(request, written.text, interval=_number(options, "poll", submit.INTERVAL))
        cli.result(done, as_json=options.json)
        return 0
    if not options.json:
        print(written.text, end="")
    say(f"submit it with:\n  {shlex.join(written.command)}")
    cli.result({"config": written.text, "command": written.command}, as_json=options.json)
    return 0


if __name__ == "__main__":
    cli.run(main)
