"""The request of ``trainyard job``: its options, checked and typed. Platforms write their configurations from it."""

from __future__ import annotations

import datetime
import logging
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from trainyard.common.errors import UserError, nearest
from trainyard.image import trainer_flags
from trainyard.oci.reference import Reference, why_unusable
from trainyard.oci.registry import Repository, check_address
from trainyard.recipe import Recipe
from trainyard.release import pushed_code
from trainyard.release.pushes import Push
from trainyard.spec import naming
from trainyard.spec.gpus import respelled
from trainyard_jobs.model import image_metadata, machines, tuning
from trainyard_jobs.model.image_metadata import Contents, Targets
from trainyard_jobs.model.machines import TpuSlice
from trainyard_jobs.model.options import ROWS, Disk, Mount, Placement, seconds, words
from trainyard_jobs.model.tuning import Tuning

logger = logging.getLogger(__name__)

#: Returns what this host pushed last of an image to a repository, or with "" to any; None if nothing.
Pushed = Callable[[str], Push | None]


@dataclass(frozen=True)
class Gpus:
    """GPUs of one machine: their ``acceleratorType``, and how many."""

    type: str
    count: int


@dataclass(frozen=True)
class Request:
    """A job, independent of the platform that runs it.

    Attributes:
        name: display name, job ID or object name.
        recipe: of the image, for one of its platforms, and ``contents`` of all; None for an image given by reference.
        targets: what messages recommend.
        args: arguments of the container: the trainer's name and its flags.
        machine: machine type; None lets the platform's module choose.
        workers: number of machines; 1 with a TPU, whose slice determines it.
        slices: number of TPU slices of the same kind that train together (GKE).
        output: gs:// folder for checkpoints, model and logs.
        timeout: seconds after which the platform ends the job; None for the platform's limit.
        tpu_version: AI Platform's tpuTfVersion.
        max_wait: seconds to wait for capacity; None for the platform's default.

    The others are the options of their names: see :data:`trainyard_jobs.model.options.ROWS`.
    """

    name: str
    image: str
    recipe: Recipe | None = None
    contents: Contents | None = None
    targets: Targets = tuple
    args: tuple[str, ...] = ()
    command: tuple[str, ...] = ()
    machine: str | None = None
    gpus: Gpus | None = None
    tpu: TpuSlice | None = None
    workers: int = 1
    slices: int = 1
    spot: bool = False
    service_account: str | None = None
    tensorboard: str | None = None
    output: str | None = None
    region: str | None = None
    zone: str | None = None
    project: str | None = None
    timeout: int | None = None
    tpu_version: str | None = None
    tune: Tuning | None = None
    flex_start: bool = False
    max_wait: int | None = None
    reservation: str | None = None
    queue: str | None = None
    priority: str | None = None
    placement: Placement | None = None
    disk: Disk | None = None
    mounts: tuple[Mount, ...] = ()
    labels: tuple[tuple[str, str], ...] = ()
    kms_key: str | None = None
    network: str | None = None
    network_attachment: str | None = None
    persistent_resource: str | None = None
    container_runtime: str | None = None
    queued: bool = False
    env: tuple[tuple[str, str], ...] = ()
    secret: tuple[tuple[str, str], ...] = ()
    cpu: str | None = None
    memory: str | None = None
    namespace: str | None = None
    node_selector: tuple[tuple[str, str], ...] = ()
    toleration: tuple[str, ...] = ()
    image_pull_secret: tuple[str, ...] = ()
    array: str | None = None
    requeue: bool = False
    pool: tuple[tuple[str, str], ...] = ()
    web_access: bool = False

    @property
    def place(self) -> str:
        """The region: the given one, that of the zone, the first that has the TPU, or us-central1."""
        if self.region:
            return self.region
        if self.zone:
            return self.zone.rpartition("-")[0]
        return self.tpu.regions[0] if self.tpu else "us-central1"

    def with_output(self) -> tuple[tuple[str, ...], dict[str, str]]:
        """The arguments and variables for platforms that do not give containers the output folder themselves."""
        if self.command:
            args, found = self.args, output_variables(self.output.rstrip("/")) if self.output else {}
        else:
            args, found = with_output(self.recipe, self.args, self.output)
        return args, found | dict(self.env)


def runs_own_command(recipe: Recipe | None, args: tuple[str, ...]) -> bool:
    """Whether the arguments of a container start the command of the user's repository, whose flags are not known."""
    own = args[1:] if args[:1] == (PREFLIGHT,) else args
    return recipe is not None and recipe.test.kind == "command" and own[:1] == (naming.COMMAND,)


def with_output(
    recipe: Recipe | None, args: tuple[str, ...], output: str | None
) -> tuple[tuple[str, ...], dict[str, str]]:
    """The arguments and variables by which a container gets its output folder, where the platform sets none.

    Trainyard's trainers take the folder as a flag. A user's command has variables, those of Vertex AI.

    Args:
        args: the trainer's name and its flags.
        output: gs:// folder.
    """
    if not output or any(word.partition("=")[0].replace("_", "-") == "--job-dir" for word in args):
        return args, {}
    if not runs_own_command(recipe, args):
        return (*args, f"--job-dir={output}"), {}
    return args, output_variables(output.rstrip("/"))


def output_variables(folder: str) -> dict[str, str]:
    """Return the variables by which Vertex AI gives a container its output folder:
    https://docs.cloud.google.com/vertex-ai/docs/training/code-requirements#environment-variables.
    """
    return {
        "AIP_MODEL_DIR": f"{folder}/model/",
        "AIP_CHECKPOINT_DIR": f"{folder}/checkpoints/",
        "AIP_TENSORBOARD_LOG_DIR": f"{folder}/logs/",
    }


def accelerator(text: str) -> tuple[Gpus | None, str | None]:
    """GPUs, or the name of a TPU slice.

    ``T4``, ``2xNVIDIA_L4``, ``nvidia-tesla-a100:8``, ``8xH100``; ``v5litepod-16``, ``v5p-4x4x12``.

    Raises:
        UserError: it is neither; the message suggests the nearest.
    """
    if re.fullmatch(r"(v\d\w*|tpu\d\w*)-\d+(x\d+)*", text.lower()):
        return None, text
    match = re.fullmatch(r"(?:(\d+)x)?([A-Za-z][\w-]*?)(?::(\d+))?", text)
    if not match or (match[1] and match[3]):
        forms = "neither GPUs (T4, 2xNVIDIA_L4, nvidia-a100-80gb:8) nor a TPU slice (v5litepod-16)"
        raise UserError(f"'--accelerator {text}' is {forms}")
    known = machines.table().gpus
    name = respelled(match[2], known)
    if not name:
        words = [*(re.sub(r"^(NVIDIA_)?(TESLA_)?", "", one) for one in known), *machines.slices()]
        raise UserError(f"no accelerator '{match[2]}'{nearest(match[2], words)}; there are: {', '.join(words)}")
    return Gpus(name, int(match[1] or match[3] or 1)), None


def _gpus_of_machine(machine: str) -> Gpus | None:
    """The GPUs that a machine type includes; None if it includes none, or is not in the table.

    Raises:
        UserError: it has TPUs: the size of the slice is missing.
    """
    generation = machines.generation_of_machine(machine)
    if generation and machine != "cloud-tpu":
        prefix = machines.table().tpus[generation].prefix
        fitting = [
            name
            for name, one in machines.slices().items()
            if one.generation == generation and machines.slice_on(machine, one.topology)
        ]
        raise UserError(
            f"'--machine {machine}' is a TPU {prefix} machine: give the slice, as in '--accelerator {fitting[0]}'"
        )
    own = machines.gpu_of_machine(machine)
    return Gpus(*own) if own else None


def image_of(recipe: Recipe | None, image: str | None, address: str | None, pushed: Pushed) -> str:
    """Return the image's reference: the given one, or that of the version at a registry, or the local image.

    A user's image is named by the digest that was pushed last from this host, to ``address`` or, without one, anywhere.

    Raises:
        UserError: neither a recipe nor an image is given, or what is given names no image.
    """
    if image:
        if not image.startswith("/") and (wrong := why_unusable(image)):
            raise UserError(f"'--image': {wrong}")
        return image
    if recipe is None:
        raise UserError(
            "no image: give 'xla' '--registry us-central1-docker.pkg.dev/<project>/<repository>', or '--image'"
        )
    # Nothing is recorded of the pushes of a target of the catalogue.
    place = f"{address}/{naming.NAME}" if address else ""
    if known := pushed(place):
        logger.info(_remembered(known))
        return known.reference
    if address:
        # The framework's version in a base image is unknown until `make lock` has read it: the tag is the target alone.
        reference = f"{address}/{naming.NAME}:{recipe.tags[-1]}"
        if recipe.test.kind == "command":
            logger.info(f"image {reference}: not pushed from this host, so how far it was tested is not known here")
        return reference
    return f"{naming.NAME}:{recipe.name}"


def _remembered(push: Push) -> str:
    """Return which image was pushed last, when, and how far it was tested."""
    name = f"{push.repository}:{push.code_tag if push.code_digest else push.tag}"
    when = f"{datetime.datetime.fromtimestamp(push.time):%Y-%m-%d %H:%M}"
    if push.code_digest:
        return f"image {name}: pushed {when} with --code-only, not tested"
    level = pushed_code.images_of(push)[0].labels.get(f"{naming.LABELS}.tested", naming.UNTESTED)
    return f"image {name}: pushed {when}, {'not tested' if level == naming.UNTESTED else f'tested: {level}'}"


def pinned(image: str) -> str:
    """The image by its digest, so that a restarted job gets exactly the same one.

    Raises:
        UserError: its registry has no such image.
        StepFailed: the registry does not answer.
    """
    reference = Reference.parse(image)
    if reference.names_docker_hub:
        raise UserError(f"'--pin': {image} names no registry: give '--registry'")
    found = Repository(reference.name).manifest(reference.version)
    if found is None:
        missing = f"{reference.registry} has no {reference.repository}:{reference.version}"
        raise UserError(f"'--pin': {missing}: run 'trainyard push' first")
    return f"{reference.name}@{found.digest}"


def trainer_of(recipe: Recipe | None, trainer: str | None) -> tuple[str, ...]:
    """The first of the container's arguments: a trainer of the image.

    Raises:
        UserError: the image has no trainer of that name.
    """
    if recipe is None:
        return (trainer,) if trainer else ()
    known, name = recipe.commands, trainer or recipe.default
    if name not in known:
        raise UserError(f"{recipe.name} has no trainer '{name}'{nearest(name, known)}; it has: {', '.join(known)}")
    return (name,)


#: The launcher's option, before the trainer's name: an argument is what every platform passes on.
PREFLIGHT = "--preflight"

#: Most seconds that Dynamic Workload Scheduler gives a job: https://docs.cloud.google.com/kubernetes-engine/docs/concepts/dws
#: and https://docs.cloud.google.com/tpu/docs/request-using-flex-start
FLEX_START = 7 * 86400


def parse_request(
    given: Mapping[str, Any], recipes: Sequence[Recipe], pushed: Pushed, targets: Targets = tuple, *, tpu_machine: bool
) -> Request:
    """Return the request that options make.

    Numbers are positive, and ``goal`` is "maximize" or "minimize": the command line checks both.

    Args:
        given: parameter of a row of :data:`trainyard_jobs.model.options.ROWS`, or ``registry`` -> its value.
        recipes: of the image, one for each platform that is known.
        tpu_machine: whether ``machine`` selects the machines of a TPU slice; if not, the slice is the default one, and
            ``machine`` names another machine.
    Raises:
        UserError: an option is wrong; the message names it.
    """
    options = {**dict.fromkeys(("registry", *(row.parameter for row in ROWS))), **given}
    _check_capacity(options)
    recipe = next(iter(recipes), None)
    address = check_address(options["registry"]) if options["registry"] else None
    gpus, slice_name = accelerator(options["accelerator"]) if options["accelerator"] else (None, None)
    if options["machine"] and not options["accelerator"]:
        gpus = _gpus_of_machine(options["machine"])
    tpu = machines.slice_of(slice_name, options["machine"] if tpu_machine else None) if slice_name else None
    search = _parse_search(options)
    if options["command"] and options["trainer"]:
        raise UserError("'--command' replaces the image's entrypoint, which starts trainers: leave out '--trainer'")
    if options["command"] and options["preflight"]:
        raise UserError("'--preflight': '--command' replaces the launcher: begin it with 'launch --preflight --'")
    trainer = () if options["command"] else trainer_of(recipe, options["trainer"])
    args = (*trainer, *words(options["args"] or ""))
    if recipe and trainer:
        trainer_flags.check(recipe, trainer[0], args[1:], option="--args")
        searched = [f"--{parameter.name}" for parameter in search.parameters] if search else []
        trainer_flags.check(recipe, trainer[0], searched, option="--tune")
    if (
        search
        and recipe
        and trainer
        and not runs_own_command(recipe, args)
        and not any(word.startswith("--hypertune-tag") for word in args)
    ):
        args = (*args, f"--hypertune-tag={search.metric}")
    image = image_of(recipe, options["image"], address, pushed)
    image = pinned(image) if options["pin"] else image
    return Request(
        name=options["name"] or f"{recipe.name if recipe else 'image'}-{trainer[0] if trainer else 'job'}",
        image=image,
        recipe=recipe,
        contents=image_metadata.of_recipes(image, recipes) if recipes else None,
        targets=targets,
        args=(PREFLIGHT, *args) if options["preflight"] else args,
        gpus=gpus,
        tpu=tpu,
        tune=search,
        **{row.field: row.value(options[row.parameter]) for row in ROWS if row.field},
    )


def _check_capacity(options: Mapping[str, Any]) -> None:
    """Check that the options ask for one kind of capacity.

    Raises:
        UserError: they ask for two, or for more than one kind gives, or limit a wait that there is not.
    """
    given = [name for name in ("spot", "flex_start", "reservation") if options[name]]
    if len(given) > 1:
        names = [f"'--{name.replace('_', '-')}'" for name in given]
        raise UserError(f"{' and '.join(names)}: a job uses one kind of capacity; leave out the others")
    if options["flex_start"] and options["timeout"] and seconds(options["timeout"]) > FLEX_START:
        raise UserError(
            f"'--timeout {options['timeout']}': with '--flex-start' a job has its machines for at most 7 days"
        )
    if options["max_wait"] and not options["flex_start"] and not options["queued"]:
        raise UserError("'--max-wait' requires '--flex-start' or '--queued'")
    if options["placement"] and not options["queue"]:
        raise UserError("'--placement' requires '--queue': Kueue places the machines")


def _parse_search(options: Mapping[str, Any]) -> Tuning | None:
    """The search that TUNE= and the options that belong to it describe; None without TUNE=."""
    if not options["tune"]:
        for name in ("metric", "goal", "trials", "parallel", "algorithm"):
            if options[name]:
                raise UserError(f"'--{name}' requires '--tune', as in '--tune lr=1e-3:1e-1:log'")
        return None
    found = Tuning(
        tuning.parse(options["tune"]),
        goal=(options["goal"] or "maximize").upper(),
        **{name: options[name] for name in ("metric", "trials", "parallel", "algorithm") if options[name]},
    )
    # https://docs.cloud.google.com/vertex-ai/docs/reference/rest/v1/StudySpec#MetricSpec
    if re.search(r"\s", found.metric):
        raise UserError(f"'--metric {found.metric}': the ID of a metric contains no spaces")
    if found.parallel > found.trials:
        raise UserError(f"'--parallel {found.parallel}' is more than '--trials {found.trials}'")
    return found
