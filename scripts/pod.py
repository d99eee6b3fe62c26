"""Train on a Cloud TPU pod: create it, run the image on every worker, follow the logs, delete it at the end.

    make pod NAME=run1 ACCELERATOR=v5litepod-16 TARGET=xla REGISTRY=... ARGS="--epochs 2"   all of it
    make pod NAME=run1 ... SPOT=1              cheaper; starts again after a preemption
    make pod NAME=run1 ... QUEUED=1            waits in the queue for capacity
    make pod NAME=run1 ... KEEP=1              is not deleted at the end
    make pod ACTION=create NAME=run1 ...       and its parts: create, check, run, logs, stop, status, delete
    python -m scripts.pod --tpu=run1 --docker-image=IMAGE -- python train.py   as torch_xla's xla_dist was called

Ctrl-C deletes what this command created. The exit status is that of the first worker that failed.
"""

from __future__ import annotations

import argparse
import os
import re
import signal
import sys
from collections.abc import Callable
from typing import Any

from scripts import cli
from scripts.cli import StepFailed, UserError, nearest, say
from scripts.jobs import machines
from scripts.jobs import request as requests
from scripts.pods import calls, life, remote, training, xla_dist
from scripts.pods.calls import Node
from scripts.pods.follow import Printer
from scripts.pods.gcloud import Pod
from scripts.pods.life import Limits
from scripts.pods.training import Run, Show
from scripts.pods.whole import Whole
from scripts.pods.workers import Workers, check, connect
from scripts.published import registry
from scripts.spec import Spec, load

#: Options that are also make variables of the same name in capitals: name -> what for.
OPTIONS = {
    "action": "create, check, run, logs, stop, status or delete; all of it without one",
    "name": "of the pod",
    "accelerator": "such as v5litepod-16",
    "zone": "gcloud's own (compute/zone), or the first that has the accelerator",
    "project": "gcloud's own",
    "version": "software version of the TPU VM; the one for PyTorch without it",
    "network": "a network other than 'default'",
    "subnetwork": "",
    "service_account": "whose rights the workers have; it reads the image from the registry",
    "ssh_user": "the local user's name without it",
    "registry": "that the target's image was pushed to",
    "image": "instead of TARGET",
    "trainer": "of the target; its default one without it",
    "args": "the trainer's, as a shell would split them",
    "output": "gs:// folder for checkpoints, model and logs: the trainer's --job-dir",
    "command": "a program of the image instead of a trainer",
    "env": "variables for the containers, as in ENV='A=1 B=2'",
    "flags": "further flags of docker run, as in FLAGS='-v data:/data'",
    "valid_until": "with QUEUED: how long the request is valid, such as 6h",
    "wait": "for READY, once it is being created (30m)",
    "queue_wait": "with QUEUED: for the turn to come (for ever)",
    "check_wait": "for every worker to reach every other one (30s)",
    "poll": "between two looks at a state (10s)",
    "grace": "for a last checkpoint (15s)",
    "restarts": "after that many preemptions it is over (50)",
}
SWITCHES = {
    "spot": "Spot VMs",
    "queued": "through a queued resource",
    "keep": "do not delete the pod at the end",
    "internal": "workers have no external addresses",
}


def options_of(arguments: list[str]) -> argparse.Namespace:
    """The options, out of flags or make variables."""
    parser = cli.parser(__doc__)
    for name, text in OPTIONS.items():
        variable = name.upper()
        words = f"{text}; or {variable}" if text else f"or {variable}"
        parser.add_argument(f"--{name.replace('_', '-')}", default=os.environ.get(variable) or None, help=words)
    for name, text in SWITCHES.items():
        parser.add_argument(f"--{name}", action="store_true", default=bool(os.environ.get(name.upper())), help=text)
    return parser.parse_args(arguments)


def limits_of(options: argparse.Namespace) -> Limits:
    """How long to wait for what.

    Raises:
        UserError: one is no duration.
    """

    def seconds(name: str, default: float) -> float:
        given = getattr(options, name)
        return requests.seconds(given, name.upper()) if given else default

    usual = Limits()
    restarts = options.restarts or str(usual.restarts)
    if not restarts.isdigit():
        raise UserError(f"RESTARTS={restarts!r} is no number")
    return Limits(
        ready=seconds("wait", usual.ready),
        queue=seconds("queue_wait", 0) or None,
        poll=seconds("poll", usual.poll),
        check=seconds("check_wait", usual.check),
        grace=seconds("grace", usual.grace),
        restarts=int(restarts),
    )


def _zone(options: argparse.Namespace, offered: tuple[str, ...]) -> str:
    """Where the pod is, or is to be.

    Raises:
        UserError: nothing says it, or the accelerator is not there.
    """
    zone = options.zone
    if not zone:
        calls.need_gcloud()
        own = calls.call(["gcloud", "config", "get-value", "compute/zone"]).stdout.strip()
        zone = own if own and (not offered or own in offered) else (offered or ("",))[0]
    if not zone:
        raise UserError("which zone? give ZONE=, or ACCELERATOR=, or run 'gcloud config set compute/zone <zone>'")
    if offered and zone not in offered:
        raise UserError(
            f"ZONE={zone} has no {options.accelerator}{nearest(zone, offered)}; it is in {', '.join(offered)}"
        )
    return str(zone)


def pod_of(options: argparse.Namespace) -> Pod:
    """The pod that the options name.

    Raises:
        UserError: it has no name, or cannot be.
    """
    if not options.name:
        raise UserError("which pod? give NAME=, as in 'make pod NAME=run1 ACCELERATOR=v5litepod-16 TARGET=xla'")
    # tpu.v2 discovery document, projects.locations.nodes.create: nodeId.
    if not re.fullmatch(r"[a-z]([a-z0-9-]{0,61}[a-z0-9])?", options.name):
        raise UserError(
            f"NAME={options.name!r}: a pod's name is of small letters, digits and -, and begins with a letter"
        )
    tpu = machines.slice_of(options.accelerator) if options.accelerator else None
    version = options.version or (tpu.runtime_version if tpu else "")
    if tpu and not version:
        raise UserError(f"the Cloud TPU API has no {tpu.accelerator_type}; Compute Engine and GKE have ('make job')")
    return Pod(
        name=options.name,
        zone=_zone(options, tpu.zones if tpu else ()),
        accelerator_type=tpu.accelerator_type if tpu else "",
        version=version or "",
        spot=options.spot,
        project=options.project,
        network=options.network,
        subnetwork=options.subnetwork,
        internal=options.internal,
        service_account=options.service_account,
        user=options.ssh_user,
    )


def _image(options: argparse.Namespace, spec: Spec | None) -> str:
    address = registry.check_address(options.registry) if options.registry else None
    return requests.image_of(spec, options.image, address)


def run_of(options: argparse.Namespace) -> Run:
    """What to start on the workers.

    Raises:
        UserError: no image, a trainer it does not have, a variable that is none.
    """
    spec = load(options.target) if options.target else None
    program = requests.words(options.command or "", "COMMAND")
    if program and (options.trainer or options.args):
        raise UserError("COMMAND= is a program of its own: TRAINER= and ARGS= go without it")
    words = program or [*requests.trainer_of(spec, options.trainer), *requests.words(options.args or "")]
    if options.output and not any(word.startswith("--job-dir") for word in words):
        words = [*words, f"--job-dir={options.output}"]
    return Run(
        image=_image(options, spec),
        command=tuple(words),
        env=xla_dist.variables(requests.words(options.env or "", "ENV")),
        flags=requests.words(options.flags or "", "FLAGS"),
        program=bool(program),
    )


def _show(options: argparse.Namespace) -> Callable[[tuple[str, ...]], Show]:
    """Logs go to stdout, but with --json that is for the result."""
    return lambda addresses: Printer(addresses, sys.stderr if options.json else sys.stdout)


# --- the parts ------------------------------------------------------------------------------------------------------


def _create(pod: Pod, limits: Limits, options: argparse.Namespace) -> dict[str, Any]:
    if not pod.accelerator_type:
        raise UserError("which TPU? give ACCELERATOR=, as in ACCELERATOR=v5litepod-16")
    there = calls.node(pod)
    if there:
        raise UserError(f"{pod.name} is there already ({there}): 'make pod ACTION=delete NAME={pod.name}' deletes it")
    if options.queued:
        node = life.create_queued(pod, limits, valid_until=options.valid_until)
    else:
        node = life.create(pod, limits)
    return _node(node)


def _node(node: Node) -> dict[str, Any]:
    return {"state": node.state, "health": node.health, "workers": list(node.addresses)}


def _check(workers: Workers, limits: Limits) -> dict[str, Any]:
    check(workers, seconds=limits.check)
    say(f"{workers.pod.name}: {len(workers)} workers, each takes ssh and reaches all others")
    return {"workers": list(workers.addresses)}


def _status(pod: Pod) -> dict[str, Any]:
    """What there is of the pod, and how its containers are."""
    queue, node = calls.queued(pod), calls.node(pod)
    if queue:
        say(f"{pod.name} (queue): {queue[0]}{f': {queue[1]}' if queue[1] else ''}")
    if not node:
        say(f"{pod.name}: no TPU VM of this name in {pod.zone}")
        return {"queue": queue[0] if queue else None, "state": None}
    say(f"{pod.name}: {node} ({node.accelerator_type}, {len(node.addresses)} workers)")
    containers = []
    for index, done in enumerate(connect(pod, node).on_all(remote.ended(), timeout=60) if node.ready else []):
        running, _, code = done.stdout.strip().partition(" ")
        words = {"true": "running", "false": f"ended with exit status {code}"}.get(running, "none")
        containers.append(words)
        say(f"{pod.name}: worker {index} ({node.addresses[index]}): container {words}")
    return {"queue": queue[0] if queue else None, **_node(node), "containers": containers}


def part(action: str, pod: Pod, limits: Limits, options: argparse.Namespace) -> tuple[int, dict[str, Any]]:
    """Do one part of a pod's life; its exit status and result.

    Raises:
        UserError: there is no such part.
    """
    if action == "create":
        return 0, _create(pod, limits, options)
    if action == "delete":
        return 0, {"deleted": life.delete(pod, limits)}
    if action == "status":
        return 0, _status(pod)
    if action == "run":
        return whole(pod, run_of(options), limits, options, may_create=False)
    if action not in ("check", "logs", "stop"):
        known = ("create", "check", "run", "logs", "stop", "status", "delete")
        raise UserError(f"no ACTION={action}{nearest(action, known)}; there are: {', '.join(known)}")
    workers = connect(pod, life.existing(pod))
    if action == "check":
        return 0, _check(workers, limits)
    if action == "stop":
        training.stop(workers, limits)
        return 0, {"workers": list(workers.addresses)}
    outcome = training.watch(workers, limits, _show(options)(workers.addresses), stops=False)
    if isinstance(outcome, training.Interruption):
        raise StepFailed(f"{pod.name} {outcome.value}")
    return outcome, {"exit_code": outcome}


def whole(
    pod: Pod, run: Run, limits: Limits, options: argparse.Namespace, *, may_create: bool
) -> tuple[int, dict[str, Any]]:
    """All of it, or with ``may_create=False`` what is possible on a pod that is there; exit status and result."""
    life_of = Whole(
        pod, run, limits, _show(options), queue=options.queued, valid_until=options.valid_until, keep=options.keep,
        may_create=may_create,
    )  # fmt: skip
    code = life_of.live()
    say(f"{pod.name}: {'done' if code == 0 else f'a worker failed with exit status {code}'}")
    return code, {"exit_code": code, "restarts": life_of.restarts}


def main(arguments: list[str]) -> int:
    # A closed terminal must not leave behind what costs money; nohup, which ignores the signal, is left to do so.
    if signal.getsignal(signal.SIGHUP) == signal.SIG_DFL:
        signal.signal(signal.SIGHUP, signal.getsignal(signal.SIGTERM))
    if xla_dist.spoken(arguments):
        options = options_of([])
        old = xla_dist.parse(arguments, lambda: _image(options, load(options.target) if options.target else None))
        options.name = old.name
        for note in old.notes:
            say(note)
        pod, limits = pod_of(options), limits_of(options)
        calls.need_gcloud()
        code, facts = whole(pod, old.run, limits, options, may_create=False)
    else:
        options = options_of(arguments)
        pod, limits = pod_of(options), limits_of(options)
        calls.need_gcloud()
        if options.action:
            code, facts = part(options.action, pod, limits, options)
        else:
            if not pod.accelerator_type:
                raise UserError("which TPU? give ACCELERATOR=, as in ACCELERATOR=v5litepod-16")
            code, facts = whole(pod, run_of(options), limits, options, may_create=True)
    cli.result({"name": pod.name, "zone": pod.zone} | facts, as_json=options.json)
    return code


if __name__ == "__main__":
    cli.run(main)
