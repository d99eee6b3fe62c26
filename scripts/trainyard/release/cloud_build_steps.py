"""What the steps of cloudbuild.yaml do, inside the builder image: prepare, build, verify, smoke, publish, promote."""

from __future__ import annotations

import json
import os
import socket
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import docker.errors

from trainyard import settings, state
from trainyard.cloudbuild import pipelines
from trainyard.console import StepFailed, UserError, nearest, say
from trainyard.image import build, smoke_test, target_lock
from trainyard.lint.image import verify
from trainyard.oci import docker_engine, referrers, registry
from trainyard.oci.reference import Reference
from trainyard.release import promotion
from trainyard.release import publish as publication
from trainyard.settings import ROOT, STATE
from trainyard.spec.model import indexes, load, targets
from trainyard.spec.naming import NAME, candidate_tag

if TYPE_CHECKING:
    from trainyard.release.signature import PrivateKey

#: What `prepare` leaves for later steps, and `publish` for `promote`.
PREPARED, PUBLISHED = STATE / "cloudbuild.json", STATE / "published.json"

#: Set in the container that :func:`_promote_on_host_network` starts.
ON_HOST_NETWORK = "ON_HOST_NETWORK"


@dataclass(frozen=True)
class Substitutions:
    """Values of the substitutions of cloudbuild.yaml, which reach the steps as TRAINYARD_ variables.

    Attributes:
        targets: names, separated by spaces or commas.
        registry: ``host[:port]/path``.
        tag: suffix of an additional tag for every image; empty for none.
        index: ``name=address`` pairs of package indexes, separated by spaces or commas.
        cache: repository for BuildKit's cache; empty for none.
        promote: not empty: ``promote`` moves the tags.
    """

    targets: str = ""
    registry: str = ""
    tag: str = ""
    index: str = ""
    cache: str = ""
    promote: str = ""

    def target_names(self) -> list[str]:
        """The targets to build.

        Raises:
            UserError: a target is unknown, or none is given.
        """
        names = self.targets.replace(",", " ").split()
        for name in names:
            if name not in targets():
                near = nearest(name, targets())
                raise UserError(f"_TARGETS: unknown target '{name}'{near}; valid: {', '.join(targets())}")
        if not names:
            raise UserError(f"_TARGETS is empty; valid: {', '.join(targets())}")
        return list(dict.fromkeys(names))

    def use_indexes(self) -> None:
        """Set the addresses of the package indexes (images/indexes.yaml) for this process and its children.

        Raises:
            UserError: a pair is malformed, or there is no such index.
        """
        for entry in self.index.replace(",", " ").split():
            name, equals, address = entry.partition("=")
            if not equals or name not in indexes():
                raise UserError(f"_INDEX: {entry!r} is not <index>=<address>; indexes: {', '.join(indexes())}")
            settings.set_variable(f"INDEX_{name.upper().replace('-', '_')}", address)


def newest_source() -> int:
    """The time of the newest file that images are made of, in seconds since 1970.

    An upload has no git repository with the commit's time, but its files keep theirs, so an upload determines the tag.
    """
    folders = ("images", "trainers", "launcher")
    return max(int(path.stat().st_mtime) for name in folders for path in (ROOT / name).rglob("*") if path.is_file())


def prepare(given: Substitutions) -> None:
    """Check the substitutions, set the images' time, and create a BuildKit builder that can export a cache if needed.

    Raises:
        UserError: a substitution is invalid.
    """
    names = given.target_names()
    registry.check_address(given.registry)
    given.use_indexes()
    STATE.mkdir(parents=True, exist_ok=True)
    PREPARED.write_text(json.dumps({"epoch": newest_source()}), encoding="utf-8")
    if given.cache and not docker_engine.stores_in_containerd():
        # The default builder exports a cache only with the containerd image store:
        # https://docs.docker.com/build/cache/backends/
        command = ["create", "--name=trainyard", "--driver=docker-container", "--use", "--bootstrap"]
        docker_engine.buildx(*command, quiet=True)
    memory = Path("/proc/meminfo").read_text(encoding="utf-8").splitlines()[0]
    say(f"targets: {', '.join(names)}; {memory}; {os.cpu_count()} cores")


def continue_build(given: Substitutions) -> None:
    """Use what :func:`prepare` found out; every other step calls this first.

    Raises:
        UserError: a substitution is invalid, or prepare did not run.
    """
    try:
        prepared = json.loads(PREPARED.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UserError(f"no {PREPARED}: the step 'prepare' writes it, run that first") from None
    if not settings.standard_variable("SOURCE_DATE_EPOCH"):
        settings.set_standard_variable("SOURCE_DATE_EPOCH", str(prepared["epoch"]))
    given.use_indexes()


def build_target(target: str, given: Substitutions) -> None:
    """Build a target. A target of the nightly schedule is locked first, on the current nightly base.

    Raises:
        UserError, StepFailed: see :func:`trainyard.image.build.build`.
    """
    spec = load(target)
    if pipelines.schedule_of(spec) is pipelines.NIGHTLY:
        target_lock.lock(spec)
        spec = load(target)
    plan, facts = build.build(spec, cache=given.cache or None)
    say(f"built {plan.candidate} {facts['digest']} in {facts['seconds']} s")


def verify_target(target: str, given: Substitutions) -> None:
    """Verify a target's candidate.

    Raises:
        StepFailed: it breaks a rule.
    """
    verify.verify(load(target), candidate_tag(target))


def smoke_target(target: str, given: Substitutions) -> None:
    """Train in a target's candidate.

    Raises:
        StepFailed: the training failed.
    """
    smoke_test.smoke(load(target), candidate_tag(target))


#: Name of a step of one target -> function.
TARGET_STEPS = {"build": build_target, "verify": verify_target, "smoke": smoke_target}


def publish(given: Substitutions, key: PrivateKey | None = None) -> None:
    """Push the image of every target by the digest that passed; push nothing if one of them did not pass.

    The tags and digests are written to the step's output (results.buildStepOutputs:
    https://cloud.google.com/build/docs/api/reference/rest/v1/projects.builds#results).

    Args:
        key: what to sign with.
    Raises:
        UserError: an image did not pass.
        StepFailed: the registry refuses.
    """
    address = registry.check_address(given.registry)
    specs = [load(target) for target in given.target_names()]
    for spec in specs:
        digest = docker_engine.digest(candidate_tag(spec.local_name))
        state.require(spec.local_name, digest, "build", "verify", "smoke")
    found = {}
    for spec in specs:
        candidate = candidate_tag(spec.local_name)
        pushed = publication.push(spec, address, reference=candidate)
        referrers.record_verification(f"{address}/{NAME}", pushed["digest"])
        if not registry.is_loopback(address):  # localhost of the engine is not localhost of this container
            publication.attach_referrers(spec, address, pushed["digest"], key, reference=candidate)
        say(f"{pushed['tag']} {pushed['digest']}")
        found[spec.target] = {"tag": pushed["tag"], "digest": pushed["digest"]}
        if given.tag:
            _add_tag(spec.target, f"{address}/{NAME}:{spec.target}-{given.tag}")
    PUBLISHED.write_text(json.dumps(found), encoding="utf-8")
    output = settings.standard_variable("BUILDER_OUTPUT")
    if output:
        (Path(output) / "output").write_text(json.dumps(found), encoding="utf-8")


def _add_tag(target: str, destination: str) -> None:
    """Push a target's candidate, whose layers the registry has, under another tag."""
    named = Reference.parse(destination)
    docker_engine.image(candidate_tag(target), made_by="build").tag(named.name, named.tag)
    try:
        for _ in registry.push(destination):
            pass
    finally:
        docker_engine.client().api.remove_image(destination, noprune=True)
    say(destination)


def promote(given: Substitutions) -> None:
    """Move the targets' floating tags to the images that `publish` pushed, if ``given.promote`` is not empty.

    Raises:
        UserError, StepFailed: see :func:`trainyard.release.promotion.promote`.
    """
    if not given.promote:
        say("_PROMOTE is empty: no tags are moved")
        return
    if _promote_on_host_network(given):
        return
    address = registry.check_address(given.registry)
    published = json.loads(PUBLISHED.read_text(encoding="utf-8"))
    for target, image in published.items():
        made = promotion.promote(load(target), address, image=image["digest"])
        for tag in made["tags"]:
            say(f"{made['repository']}:{tag} is {made['digest']}")


def _promote_on_host_network(given: Substitutions) -> bool:
    """If the registry is on localhost, promote in a container on the engine's host network; whether it was.

    `localhost:5000` is the engine's host for a push, but this container for promote's own requests. Only local runs use
    such registries, Cloud Build never does.

    Raises:
        StepFailed: the container failed; its log is printed.
    """
    if not registry.is_loopback(given.registry) or settings.variable(ON_HOST_NETWORK):
        return False
    try:
        this = docker_engine.client().containers.get(socket.gethostname())
    except docker.errors.NotFound:  # not in a container: localhost is the engine's host
        return False
    container = docker_engine.client().containers.run(
        str(this.attrs["Image"]),
        ["-m", "trainyard", "cloudbuild-step", "promote"],
        detach=True,
        environment=settings.environment(**{f"{settings.PREFIX}{ON_HOST_NETWORK}": "1"}),
        labels=this.labels,
        network_mode="host",
        volumes_from=[str(this.id)],
        working_dir=str(ROOT),
    )
    try:
        for line in container.logs(stream=True, follow=True):
            say(line.decode(errors="replace").rstrip())
        code = container.wait()["StatusCode"]
    finally:
        container.remove(force=True)
    if code:
        raise StepFailed(f"promote exited with status {code}; see above")
    return True
