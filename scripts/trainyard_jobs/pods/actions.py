"""Do what ``trainyard pod`` asks for: a whole training run on a TPU VM, or one of its parts.

Every action returns an :data:`Outcome`, and raises UserError or StepFailed.
"""

from __future__ import annotations

import contextlib
import logging
import re
import signal
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from trainyard.common import gcloud
from trainyard.common.errors import StepFailed, UserError, nearest
from trainyard.oci import registry
from trainyard.recipe import Recipe
from trainyard_jobs.model import image_metadata, machines
from trainyard_jobs.model import options as job_options
from trainyard_jobs.model import request as requests
from trainyard_jobs.model.image_metadata import ImageNotFoundError, ImageUnavailableError
from trainyard_jobs.pods import provisioning, shell_commands, ssh, xla_dist
from trainyard_jobs.pods.api import Node, TpuApi
from trainyard_jobs.pods.controller import PodController
from trainyard_jobs.pods.gcloud_args import Pod
from trainyard_jobs.pods.logs import Printer
from trainyard_jobs.pods.provisioning import Limits, TpuVm
from trainyard_jobs.pods.run import Interruption, Run, Show, TrainingVm
from trainyard_jobs.pods.ssh import plural

logger = logging.getLogger(__name__)

#: Value of ZONE= for every zone that has the accelerator.
ANY_ZONE = "any"

#: Exit status, and result for programs.
Outcome = tuple[int, dict[str, Any]]


@dataclass(frozen=True)
class Options:
    """Options of ``trainyard pod``; its help describes them. Durations are text such as ``30m``.

    Its methods raise UserError if an option that they need is missing or invalid.

    Attributes:
        recipe: reads the recipe of the image; returns None for an image given by reference alone.
        pushed: tells what this host has pushed of it.
    """

    name: str | None = None
    accelerator: str | None = None
    zone: str | None = None
    project: str | None = None
    version: str | None = None
    network: str | None = None
    subnetwork: str | None = None
    service_account: str | None = None
    ssh_user: str | None = None
    registry: str | None = None
    image: str | None = None
    trainer: str | None = None
    args: str | None = None
    output: str | None = None
    command: str | None = None
    env: str | None = None
    flags: str | None = None
    valid_until: str | None = None
    wait: str | None = None
    queue_wait: str | None = None
    check_wait: str | None = None
    poll: str | None = None
    grace: str | None = None
    restarts: int | None = None
    spot: bool = False
    queued: bool = False
    keep: bool = False
    internal: bool = False
    logs_to_stderr: bool = False
    recipe: Callable[[], Recipe | None] = lambda: None
    pushed: requests.Pushed = lambda _: None

    def limits(self) -> Limits:
        """Return the time limits that are given, and the defaults of the others."""
        durations = {
            "ready": (self.wait, "--wait"),
            "queue": (self.queue_wait, "--queue-wait"),
            "poll": (self.poll, "--poll"),
            "check": (self.check_wait, "--check-wait"),
            "grace": (self.grace, "--grace"),
        }
        found = {name: job_options.seconds(text, option) for name, (text, option) in durations.items() if text}
        return Limits(**found) if self.restarts is None else Limits(**found, restarts=self.restarts)

    def _zones(self, zones: tuple[str, ...], tpu: TpuApi) -> tuple[str, ...]:
        """Return the zones to try: those given, gcloud's, or the first of ``zones``, which have the accelerator."""
        if self.zone == ANY_ZONE:
            if not zones:
                raise UserError(f"'--zone {ANY_ZONE}' requires '--accelerator', whose zones it stands for")
            return zones
        named = tuple(dict.fromkeys(word for word in re.split(r"[,\s]+", self.zone or "") if word))
        return tuple(self._zone(zone, zones, tpu) for zone in named or ("",))

    def _zone(self, zone: str, zones: tuple[str, ...], tpu: TpuApi) -> str:
        if not zone:
            gcloud.require()
            configured = tpu.call(["gcloud", "config", "get-value", "compute/zone"]).stdout.strip()
            zone = configured if configured and (not zones or configured in zones) else (zones or ("",))[0]
        if not zone:
            raise UserError("no zone: set '--zone' or '--accelerator', or run 'gcloud config set compute/zone <zone>'")
        if zones and not machines.slice_of(self.accelerator or "").may_be_in(zone):
            places = f"it is available in {', '.join(zones)}"
            raise UserError(f"'--zone {zone}' has no {self.accelerator}{nearest(zone, zones)}; {places}")
        return zone

    def pods(self, tpu: TpuApi) -> tuple[Pod, ...]:
        """Return the TPU VM that the options describe, in each zone where it may be created."""
        if not self.name:
            raise UserError("no name: set '--name', as in 'trainyard pod --name run1 --accelerator v5litepod-16 xla'")
        # https://cloud.google.com/tpu/docs/reference/rest/v2/projects.locations.nodes/create: nodeId.
        if not re.fullmatch(r"[a-z]([a-z0-9-]{0,61}[a-z0-9])?", self.name):
            raise UserError(
                f"'--name {self.name}': a name consists of lowercase letters, digits and -, and starts with a letter"
            )
        slice_ = machines.slice_of(self.accelerator) if self.accelerator else None
        version = self.version or (slice_.runtime_version if slice_ else "")
        if slice_ and not version:
            fix = "use 'trainyard job' with '--platform gke' or vertex"
            raise UserError(f"the Cloud TPU API has no {slice_.accelerator_type}: {fix}")
        described = Pod(
            name=self.name,
            zone="",
            accelerator_type=slice_.accelerator_type if slice_ else "",
            version=version or "",
            spot=self.spot,
            project=self.project,
            network=self.network,
            subnetwork=self.subnetwork,
            internal=self.internal,
            service_account=self.service_account,
            user=self.ssh_user,
        )
        return tuple(replace(described, zone=zone) for zone in self._zones(slice_.zones if slice_ else (), tpu))

    def image_reference(self) -> str:
        """Return the image to run: IMAGE, or that of TARGET."""
        recipe, address = self.recipe(), registry.check_address(self.registry) if self.registry else None
        return requests.image_of(recipe, self.image, address, self.pushed)

    def run(self) -> Run:
        """Return the image, the trainer or command, and the variables to start on the workers."""
        recipe = self.recipe()
        program = job_options.words(self.command or "", "--command")
        if program and (self.trainer or self.args):
            raise UserError("'--command' replaces the trainer: remove '--trainer' and '--args'")
        command = program or (*requests.trainer_of(recipe, self.trainer), *job_options.words(self.args or ""))
        command, output = requests.with_output(recipe, command, self.output)
        return Run(
            image=self.image_reference(),
            command=command,
            env=output | xla_dist.variables(job_options.words(self.env or "", "--env")),
            flags=job_options.words(self.flags or "", "--flags"),
            program=bool(program),
        )

    def show(self) -> Callable[[tuple[str, ...]], Show]:
        """What prints log lines: on stdout, or on stderr if stdout is for the JSON result."""
        return lambda addresses: Printer(addresses, sys.stderr if self.logs_to_stderr else sys.stdout)


def _require_accelerator(pod: Pod) -> None:
    if not pod.accelerator_type:
        raise UserError("no accelerator: set '--accelerator', as in '--accelerator v5litepod-16'")


def _require_platform(image: str) -> None:
    """Check that an image is for the workers, if its registry says what it is for."""
    with contextlib.suppress(ImageNotFoundError, ImageUnavailableError):  # it may have been loaded on the workers
        if what := machines.TPU_VMS.mismatch(image_metadata.at_registry(image).platforms):
            raise UserError(f"{image}: {what}: {machines.TPU_VMS.remediation()}")


def train(
    pods: Sequence[Pod], options: Options, tpu: TpuApi, *, run: Run | None = None, may_create: bool = True
) -> Outcome:
    """Create the TPU VM unless it exists, train, and delete it if it was created here.

    Args:
        pods: the TPU VM in each zone where it may be created, in the order in which they are tried.
        run: what to start instead of what the options say.
        may_create: whether the TPU VM need not exist.
    """
    limits = options.limits()
    gcloud.require()
    if may_create:
        _require_accelerator(pods[0])
    run = run or options.run()
    _require_platform(run.image)
    vm, *others = (TrainingVm(pod, limits, tpu) for pod in pods)
    controller = PodController(
        vm,
        run,
        options.show(),
        queue=options.queued,
        valid_until=options.valid_until,
        keep=options.keep,
        may_create=may_create,
        others=others,
    )
    code = controller.execute()
    logger.info(f"{vm.pod.name}: {'done' if code == 0 else f'a worker failed with exit status {code}'}")
    return code, {"zone": controller.vm.pod.zone, "exit_code": code, "restarts": controller.restarts}


def create(pods: Sequence[Pod], options: Options, tpu: TpuApi) -> Outcome:
    """Create the TPU VM, in the first zone that has capacity.

    Raises:
        UserError: it exists, or no accelerator is given.
        StepFailed: it could not be created.
    """
    _require_accelerator(pods[0])
    limits = options.limits()
    for pod in pods:
        existing = tpu.node(pod)
        if existing:
            delete = f"trainyard pod --action delete --name {pod.name}"
            raise UserError(f"{pod.name} exists ({existing}): delete it with '{delete}'")
    *first, last = pods
    for pod in first:
        try:
            return 0, {"zone": pod.zone} | _facts(_create_in(pod, limits, options, tpu))
        except StepFailed as error:
            if not provisioning.is_no_capacity(error):
                raise
            logger.warning(f"{error}; trying the next zone")
            TpuVm(pod, limits, tpu).delete(queued=options.queued)
    return 0, {"zone": last.zone} | _facts(_create_in(last, limits, options, tpu))


def _create_in(pod: Pod, limits: Limits, options: Options, tpu: TpuApi) -> Node:
    vm = TpuVm(pod, limits, tpu)
    return vm.create_queued(options.valid_until) if options.queued else vm.create()


def _facts(node: Node) -> dict[str, Any]:
    return {"state": node.state, "health": node.health, "workers": list(node.addresses)}


def check(pod: Pod, options: Options, tpu: TpuApi) -> Outcome:
    """Check ssh to every worker, and the network between them."""
    vm = TrainingVm(pod, options.limits(), tpu)
    workers = vm.connect(vm.require_ready())
    vm.check_network(workers)
    count = plural(len(workers), "worker")
    logger.info(f"{pod.name}: {count}: ssh works, and every worker reaches all others")
    return 0, {"workers": list(workers.addresses)}


def logs(pod: Pod, options: Options, tpu: TpuApi) -> Outcome:
    """Follow the containers' logs until they end."""
    vm = TrainingVm(pod, options.limits(), tpu)
    workers = vm.connect(vm.require_ready())
    outcome = vm.watch(workers, options.show()(workers.addresses), stop_on_failure=False)
    if isinstance(outcome, Interruption):
        raise StepFailed(f"{pod.name} {outcome.value}")
    return outcome, {"exit_code": outcome}


def stop(pod: Pod, options: Options, tpu: TpuApi) -> Outcome:
    """Stop the containers."""
    vm = TrainingVm(pod, options.limits(), tpu)
    workers = vm.connect(vm.require_ready())
    vm.stop(workers)
    return 0, {"workers": list(workers.addresses)}


def status(pod: Pod, options: Options, tpu: TpuApi) -> Outcome:
    """Print the states of the queued resource, the TPU VM and its containers."""
    queue, node = tpu.queued_resource(pod), tpu.node(pod)
    if queue:
        logger.info(f"{pod.name} (queue): {queue[0]}{f': {queue[1]}' if queue[1] else ''}")
    state = queue[0] if queue else None
    if not node:
        logger.info(f"{pod.name}: no TPU VM of this name in {pod.zone}")
        return 0, {"queue": state, "state": None}
    logger.info(f"{pod.name}: {node} ({node.accelerator_type}, {plural(len(node.addresses), 'worker')})")
    containers = []
    script = shell_commands.container_state()
    answers = ssh.connect(pod, node, tpu).on_all(script, timeout=60) if node.ready else []
    for index, finished in enumerate(answers):
        running, _, code = finished.stdout.strip().partition(" ")
        container = {"true": "running", "false": f"exited with status {code}"}.get(running, "none")
        containers.append(container)
        logger.info(f"{pod.name}: worker {index} ({node.addresses[index]}): container {container}")
    return 0, {"queue": state, **_facts(node), "containers": containers}


def delete(pod: Pod, options: Options, tpu: TpuApi) -> Outcome:
    """Delete the TPU VM and its queued resource."""
    return 0, {"deleted": TpuVm(pod, options.limits(), tpu).delete()}


#: Name of an action on a TPU VM that exists -> function.
ACTIONS: dict[str, Callable[[Pod, Options, TpuApi], Outcome]] = {
    "check": check,
    "run": lambda pod, options, tpu: train([pod], options, tpu, may_create=False),
    "logs": logs,
    "stop": stop,
    "status": status,
    "delete": delete,
}


def _existing(pods: Sequence[Pod], tpu: TpuApi) -> Pod:
    """The one of the TPU VMs, which are the same in several zones, that exists or is queued; the first if none is."""
    if len(pods) == 1:
        return pods[0]
    return next((pod for pod in pods if tpu.node(pod) or tpu.queued_resource(pod)), pods[0])


def _handle_hangup() -> None:
    """Clean up when the terminal is closed too, unless nohup, which ignores the signal, started this process."""
    if signal.getsignal(signal.SIGHUP) == signal.SIG_DFL:
        signal.signal(signal.SIGHUP, signal.getsignal(signal.SIGTERM))


def perform(action: str | None, options: Options, xla_dist_line: Sequence[str] = ()) -> Outcome:
    """Perform an action, or the whole run if it is None; exit status and result.

    Args:
        xla_dist_line: arguments of xla_dist, which then say what to run.
    """
    _handle_hangup()
    tpu = TpuApi()
    if xla_dist_line:
        parsed = xla_dist.parse(list(xla_dist_line), options.image_reference)
        options = replace(options, name=parsed.name)
        pod = _existing(options.pods(tpu), tpu)
        for note in parsed.notes:
            logger.info(note)
        code, facts = train([pod], options, tpu, run=parsed.run, may_create=False)
    else:
        pods = options.pods(tpu)
        pod = pods[0]
        if action:
            gcloud.require()
        if action == "create":
            code, facts = create(pods, options, tpu)
        elif action:
            pod = _existing(pods, tpu)
            code, facts = ACTIONS[action](pod, options, tpu)
        else:
            code, facts = train(pods, options, tpu)
    return code, {"name": pod.name, "zone": pod.zone} | facts
