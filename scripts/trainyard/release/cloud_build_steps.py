"""Run the steps of cloudbuild.yaml, inside the builder image.

``prepare`` and ``emulation`` come first. ``build``, ``verify`` and ``smoke`` are about one target and the platform of
``TRAINYARD_ARCH``, ``publish`` and ``promote`` about all of them.
"""

from __future__ import annotations

import json
import logging
import os
import socket
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import docker.errors

from trainyard.common import settings
from trainyard.common.context import Context
from trainyard.common.docker_engine import Engine
from trainyard.common.errors import StepFailed, UserError, nearest
from trainyard.common.settings import ROOT
from trainyard.image import build, planning, recipes, smoke_test, target_lock
from trainyard.image.facts import SOURCES
from trainyard.lint.image import verify
from trainyard.oci import registry
from trainyard.oci.registry import Repository
from trainyard.oci.statements import Signer
from trainyard.oci.transport import is_loopback
from trainyard.release import pipelines, promotion, sources
from trainyard.release import publish as publication
from trainyard.sandbox import containers
from trainyard.spec import state
from trainyard.spec.architectures import PLATFORMS, Architecture, named
from trainyard.spec.model import Spec, catalogue, each_platform, indexes, load, targets
from trainyard.spec.naming import NAME, candidate_tag
from trainyard.workspace.lines import without_credentials

logger = logging.getLogger(__name__)

#: Installs QEMU for arm64 and registers it with the kernel.
EMULATION = ROOT / "scripts" / "setup-emulation.sh"

#: Set in the container that :func:`_on_host_network` starts.
ON_HOST_NETWORK = "ON_HOST_NETWORK"


@dataclass(frozen=True)
class Substitutions:
    """Hold the substitutions of cloudbuild.yaml, which reach the steps as TRAINYARD_ variables.

    Attributes:
        targets: names, separated by spaces or commas.
        platforms: those to build of the ones that a target is made for, such as ``linux/arm64``, separated likewise.
        registry: ``host[:port]/path``.
        tag: suffix of an additional tag for every image; empty for none.
        index: ``name=address`` pairs of package indexes, separated by spaces or commas.
        cache: repository for BuildKit's cache; empty for none.
        promote: not empty: ``promote`` moves the tags.
    """

    targets: str = ""
    platforms: str = ""
    registry: str = ""
    tag: str = ""
    index: str = ""
    cache: str = ""
    promote: str = ""
    context: Context = field(default_factory=Context)

    @property
    def prepared(self) -> Path:
        """Return the file that `prepare` leaves for later steps."""
        return self.context.state / "cloudbuild.json"

    @property
    def published(self) -> Path:
        """Return the file that `publish` leaves for `promote`."""
        return self.context.state / "published.json"

    def target_names(self) -> list[str]:
        """Return the targets to build, or raise a :class:`UserError` if one is unknown or none is given."""
        names = _words(self.targets)
        for name in names:
            if name not in targets():
                near = nearest(name, targets())
                raise UserError(f"_TARGETS: unknown target '{name}'{near}; valid: {', '.join(targets())}")
        if not names:
            raise UserError(f"_TARGETS is empty; valid: {', '.join(targets())}")
        return list(dict.fromkeys(names))

    def architectures(self) -> list[Architecture]:
        """Return the architectures to build for, or raise a :class:`UserError` as :meth:`target_names` does."""
        wanted = []
        for text in _words(self.platforms):
            architecture = named(text)
            if architecture is None:
                near = nearest(text, PLATFORMS)
                raise UserError(f"_PLATFORMS: unknown platform '{text}'{near}; valid: {', '.join(PLATFORMS)}")
            wanted.append(architecture)
        if not wanted:
            raise UserError(f"_PLATFORMS is empty; valid: {', '.join(PLATFORMS)}")
        return wanted

    def images(self) -> dict[str, list[Spec]]:
        """Return target -> its spec for each platform to build; one that is made for none of them is left out.

        Raises:
            UserError: none is left, or see :meth:`target_names` and :meth:`architectures`.
        """
        wanted, known = self.architectures(), {spec.target: spec for spec in catalogue(self.context)}
        chosen = {
            name: [spec for spec in each_platform(known[name]) if spec.architecture in wanted]
            for name in self.target_names()
        }
        if not any(chosen.values()):
            raise UserError(f"nothing to build: no target of '{self.targets}' is made for '{self.platforms}'")
        return {name: specs for name, specs in chosen.items() if specs}

    def use_indexes(self) -> None:
        """Set the addresses of the package indexes (images/indexes.yaml) for this process and its children.

        Raises:
            UserError: a pair is malformed, or there is no such index.
        """
        for entry in _words(self.index):
            name, equals, address = entry.partition("=")
            if not equals or name not in indexes():
                shown = without_credentials(entry)
                raise UserError(f"_INDEX: {shown!r} is not <index>=<address>; indexes: {', '.join(indexes())}")
            settings.set_variable(f"INDEX_{name.upper().replace('-', '_')}", address)


def _words(text: str) -> list[str]:
    """Return words that are separated by spaces or commas."""
    return text.replace(",", " ").split()


def newest_source() -> int:
    """Return the time of the newest file that images are made of, in seconds since 1970.

    An upload has no git repository with the commit's time, but its files keep theirs, so an upload determines the tag.
    """
    return max(int(path.stat().st_mtime) for name in SOURCES for path in (ROOT / name).rglob("*") if path.is_file())


def prepare(given: Substitutions) -> None:
    """Check the substitutions, set the images' time, and create a BuildKit builder that can export a cache if needed.

    An invalid substitution is a :class:`UserError`, also in the other steps.
    """
    images = given.images()
    registry.check_address(given.registry)
    given.use_indexes()
    given.prepared.parent.mkdir(parents=True, exist_ok=True)
    given.prepared.write_text(json.dumps({"epoch": newest_source()}), encoding="utf-8")
    if given.cache and not given.context.engine.stores_in_containerd:
        # The default builder exports a cache only with the containerd image store:
        # https://docs.docker.com/build/cache/backends/
        command = ["create", "--name=trainyard", "--driver=docker-container", "--use", "--bootstrap"]
        given.context.engine.buildx(*command)
    memory = Path("/proc/meminfo").read_text(encoding="utf-8").splitlines()[0]
    names = ", ".join(f"{name} ({', '.join(one.platform for one in specs)})" for name, specs in images.items())
    if others := [name for name in given.target_names() if name not in images]:
        logger.warning(f"nothing is built of {', '.join(others)}, which no platform of _PLATFORMS is for")
    logger.info(f"targets: {names}; {memory}; {os.cpu_count()} cores")


def continue_build(given: Substitutions) -> None:
    """Use what :func:`prepare` found out, first of all in a step; if it did not run, raise a :class:`UserError`."""
    try:
        prepared = json.loads(given.prepared.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UserError(f"no {given.prepared}: the step 'prepare' writes it, run that first") from None
    if not settings.standard_variable("SOURCE_DATE_EPOCH"):
        settings.set_standard_variable("SOURCE_DATE_EPOCH", str(prepared["epoch"]))
    given.use_indexes()


def emulate(given: Substitutions) -> None:
    """Let the engine's machine run programs for every platform to build, under QEMU those for others than its own.

    The kernel takes a registration of QEMU from privileged containers only, and containers of steps are not.

    Raises:
        UserError: it still cannot run them.
        StepFailed: QEMU could not be installed or registered; the log says why.
    """
    wanted = {one.architecture for specs in given.images().values() for one in specs}
    engine = given.context.engine
    missing = [architecture for architecture in wanted if not engine.can_run(architecture.platform)]
    if not missing:
        logger.info("the engine runs programs for all platforms: nothing to do")
        return
    _in_container_like_this(engine, ["bash", str(EMULATION)], "emulation", privileged=True)
    for architecture in missing:
        engine.require_emulation(architecture.platform)


def build_target(spec: Spec, given: Substitutions) -> None:
    """Build a target. A target of the nightly schedule is locked first."""
    if pipelines.schedule_of(spec) is pipelines.NIGHTLY:
        target_lock.lock(spec)
        spec = load(spec.target, context=given.context)
    with planning.planned(spec) as plan:
        facts = build.build(plan, cache=given.cache or None)
    logger.info(f"built {plan.recipe.candidate} {facts['digest']} in {facts['seconds']} s")


def run_target_step(step: str, target: str, given: Substitutions, show: Callable[[object], None]) -> None:
    """Run the step ``build``, ``verify`` or ``smoke`` for the platform of ``TRAINYARD_ARCH``, if it is to be built.

    Args:
        show: called with what people read of the result; see :func:`trainyard.lint.image.verify.verify`.
    """
    if target not in given.target_names():
        logger.info(f"{target} is not among _TARGETS: nothing to do")
    elif (spec := load(target, context=given.context)).architecture not in given.architectures():
        logger.info(f"{spec.platform} is not among _PLATFORMS: nothing to do")
    elif step == "build":
        build_target(spec, given)
    else:
        candidate = candidate_tag(spec.local_name)
        local = given.context.engine.image(candidate, made_by=spec.command("dev build"))
        recipe = recipes.for_image(spec, local.labels)
        if step == "verify":
            verify.verify(recipe, candidate, given.context, show=show)
        else:
            smoke_test.smoke(recipe, candidate, given.context)


def publish(given: Substitutions, signer: Signer | None = None) -> None:
    """Push every image by the digest that passed, and the index of each target that is made for several platforms.

    Nothing is pushed if an image did not pass. The tags and digests are written to the step's output
    (results.buildStepOutputs: https://cloud.google.com/build/docs/api/reference/rest/v1/projects.builds#results).

    Raises:
        UserError: an image did not pass.
    """
    if not _on_host_network("publish", given):
        given.published.write_text(json.dumps(_push(given, signer)), encoding="utf-8")
    output = settings.standard_variable("BUILDER_OUTPUT")
    if output:
        (Path(output) / "output").write_text(given.published.read_text(encoding="utf-8"), encoding="utf-8")


def _push(given: Substitutions, signer: Signer | None) -> dict[str, dict[str, str]]:
    """Push all images, and return target -> ``tag`` and ``digest`` of its image, or of its index."""
    address = registry.check_address(given.registry)
    images = given.images()
    for spec in (one for specs in images.values() for one in specs):
        digest = given.context.engine.digest(candidate_tag(spec.local_name))
        state.require(spec.kept, digest, "build", "verify", "smoke", made_by=spec.command("image"))
    published = {}
    for target, specs in images.items():
        pushed = _push_target(specs, address, signer)
        logger.info(f"{pushed['tag']} {pushed['digest']}")
        published[target] = {"tag": str(pushed["tag"]), "digest": str(pushed["digest"])}
        if given.tag:
            repository = Repository(f"{address}/{NAME}", given.context.state)
            repository.tag(repository.existing(pushed["digest"]), f"{target}-{given.tag}")
            logger.info(f"{repository.name}:{target}-{given.tag}")
    return published


def _push_target(specs: Sequence[Spec], address: str, signer: Signer | None) -> dict[str, Any]:
    """Push the candidates of a target, and an index of them if it is made for several platforms."""
    candidates = {one.architecture: candidate_tag(one.local_name) for one in specs}
    source = sources.of(specs[0])
    if len(source.named.platforms) > 1:
        return publication.push_all(source, address, signer, references=candidates)
    return publication.push_attached(source, address, signer, reference=candidates[source.architecture])


def promote(given: Substitutions) -> None:
    """Move the targets' floating tags to the images that `publish` pushed, if ``given.promote`` is not empty."""
    if not given.promote:
        logger.info("_PROMOTE is empty: no tags are moved")
        return
    if _on_host_network("promote", given):
        return
    address = registry.check_address(given.registry)
    published = json.loads(given.published.read_text(encoding="utf-8"))
    for target, image in published.items():
        named = recipes.named(load(target, context=given.context))
        repository = Repository(f"{address}/{NAME}", given.context.state)
        made = promotion.promote(named, repository, image["digest"])
        for tag in made["tags"]:
            logger.info(f"{made['repository']}:{tag} is {made['digest']}")


def _on_host_network(step: str, given: Substitutions) -> bool:
    """Run a step in a container on the engine's host network if the registry is on localhost; return whether it was.

    `localhost:5000` is the engine's host for a push, but this container for requests of our own. Only local runs use
    such registries, Cloud Build never does.
    """
    if not is_loopback(given.registry) or settings.variable(ON_HOST_NETWORK):
        return False
    changes = {f"{settings.PREFIX}{ON_HOST_NETWORK}": "1", "BUILDER_OUTPUT": ""}  # that folder is this container's
    command = ["python", "-m", "trainyard", "cloudbuild-step", step]
    return _in_container_like_this(
        given.context.engine, command, step, environment=settings.environment(**changes), network_mode="host"
    )


def _in_container_like_this(engine: Engine, command: Sequence[str], what: str, **options: Any) -> bool:
    """Run a command in another container of this container's image, with its files; False if this is no container.

    Args:
        options: of :meth:`docker.models.containers.ContainerCollection.run`.
    Raises:
        StepFailed: ``what`` the command does failed; its log is printed.
    """
    try:
        this = engine.client.containers.get(socket.gethostname())
    except docker.errors.NotFound:
        return False
    container = engine.client.containers.run(
        str(this.attrs["Image"]),
        list(command[1:]),
        entrypoint=command[0],
        detach=True,
        labels=this.labels,
        volumes_from=[str(this.id)],
        working_dir=str(ROOT),
        **options,
    )
    try:
        for line in containers.lines(container):
            logger.info(line.rstrip())
        code = container.wait()["StatusCode"]
    finally:
        container.remove(force=True)
    if code:
        raise StepFailed(f"{what} exited with status {code}; see above")
    return True
