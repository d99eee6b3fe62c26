"""What the steps of cloudbuild.yaml run, inside the builder image: the verbs, told by substitutions.

    python -m scripts.cloud.step prepare
    python -m scripts.cloud.step build tf-cpu        and verify, smoke
    python -m scripts.cloud.step publish             then promote, which moves tags if PROMOTE is set

The substitutions come as environment variables of the same names without the underscore: TARGETS, REGISTRY, TAG, INDEX,
CACHE, BASE, PROMOTE, REVISION. A step of a target that is not among TARGETS says so and ends well.
"""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Callable
from pathlib import Path

import docker.errors

from scripts import build, cli, engine, lock, promote, push, sign, smoke, state, verify
from scripts.cli import ROOT, STATE, StepFailed, UserError, nearest, say
from scripts.cloud import plan as cloud_plan
from scripts.plan import NAME
from scripts.published import registry, tags
from scripts.spec import indexes, load, targets

#: What `prepare` finds out for the steps after it, and what `publish` leaves for `promote`.
FACTS, PUBLISHED = STATE / "cloudbuild.json", STATE / "published.json"


def wanted() -> list[str]:
    """The targets to build: TARGETS, separated by spaces or commas.

    Raises:
        UserError: there is no target of a name, or none was given.
    """
    names = os.environ.get("TARGETS", "").replace(",", " ").split()
    for name in names:
        if name not in targets():
            near = nearest(name, targets())
            raise UserError(f"_TARGETS: unknown target '{name}'{near}; valid: {', '.join(targets())}")
    if not names:
        raise UserError(f"_TARGETS is empty; valid: {', '.join(targets())}")
    return list(dict.fromkeys(names))


def newest_source() -> int:
    """When what goes into images was last changed, in seconds since 1970.

    An upload has no repository to ask for the commit's time; its files keep theirs, so that one upload gives one tag.
    """
    folders = ("images", "trainers", "launcher")
    return max(int(path.stat().st_mtime) for name in folders for path in (ROOT / name).rglob("*") if path.is_file())


def use_index(given: str) -> None:
    """Take the addresses of package indexes from ``name=address`` pairs (see images/indexes.yaml).

    Raises:
        UserError: a pair is none, or names an index that does not exist.
    """
    for entry in given.replace(",", " ").split():
        name, equals, address = entry.partition("=")
        if not equals or name not in indexes():
            raise UserError(f"_INDEX: {entry!r} is not <index>=<address>; indexes: {', '.join(indexes())}")
        os.environ[f"TRAINYARD_INDEX_{name.upper().replace('-', '_')}"] = address


def prepare() -> None:
    """Check the substitutions, settle the images' date, and make a builder that can export a cache if one is wanted."""
    names = wanted()
    registry.check_address(os.environ.get("REGISTRY"))
    use_index(os.environ.get("INDEX", ""))
    STATE.mkdir(parents=True, exist_ok=True)
    FACTS.write_text(json.dumps({"epoch": newest_source()}), encoding="utf-8")
    if os.environ.get("CACHE") and not engine.stores_in_containerd():
        # The default builder exports one only with the containerd image store (docs.docker.com/build/cache/backends).
        command = ["create", "--name=trainyard", "--driver=docker-container", "--use", "--bootstrap"]
        engine.buildx(*command, quiet=True)
    say(f"targets: {', '.join(names)}; {Path('/proc/meminfo').read_text().splitlines()[0]}; {os.cpu_count()} cores")


def build_target(target: str) -> None:
    """Build a target; what is on the nightly schedule, on the base that its makers have today."""
    spec = load(target)
    if cloud_plan.schedule_of(spec) is cloud_plan.NIGHTLY:
        lock.lock_target(spec, "default")
        spec = load(target)
    plan, facts = build.build(spec, cache=os.environ.get("CACHE"))
    say(f"built {plan.candidate} {facts['digest']} in {facts['seconds']} s")


def _candidate(target: str) -> str:
    return f"{NAME}:{target}-candidate"


def verify_target(target: str) -> None:
    verify.verify(load(target), _candidate(target))


def smoke_target(target: str) -> None:
    smoke.smoke(load(target), _candidate(target))


def publish() -> None:
    """Push every wanted image by the digest that passed; none if one of them has not.

    Its names and digests are what the build's results hold for this step (buildStepOutputs).
    """
    address = registry.check_address(os.environ.get("REGISTRY"))
    specs = [load(target) for target in wanted()]
    for spec in specs:
        state.require(spec.target, engine.digest(_candidate(spec.target)), "build", "verify", "smoke")
    found = {}
    for spec in specs:
        pushed = push.push(spec, address, reference=_candidate(spec.target))
        tags.attest(f"{address}/{NAME}", pushed["digest"])
        if not registry.is_loopback(address):  # which is the engine's, not this container's
            push.accompany(spec, address, pushed["digest"], sign.key_given(), reference=_candidate(spec.target))
        say(f"{pushed['tag']} {pushed['digest']}")
        found[spec.target] = {"tag": pushed["tag"], "digest": pushed["digest"]}
        if os.environ.get("TAG"):
            _alias(spec.target, f"{address}/{NAME}:{spec.target}-{os.environ['TAG']}")
    PUBLISHED.write_text(json.dumps(found), encoding="utf-8")
    output = os.environ.get("BUILDER_OUTPUT")
    if output:
        (Path(output) / "output").write_text(json.dumps(found), encoding="utf-8")


def _alias(target: str, destination: str) -> None:
    """One more tag at the registry, which has every byte of the image by now."""
    repository, _, tag = destination.rpartition(":")
    engine.image(_candidate(target), made_by="build").tag(repository, tag)
    try:
        for _ in registry.push(destination):
            pass
    finally:
        engine.client().api.remove_image(destination, noprune=True)
    say(destination)


def promote_published() -> None:
    """Move the targets' tags to what `publish` pushed, if PROMOTE is set."""
    if not os.environ.get("PROMOTE"):
        say("_PROMOTE is empty: no tag moves")
        return
    if beside_the_engine():
        return
    address = registry.check_address(os.environ.get("REGISTRY"))
    published = json.loads(PUBLISHED.read_text(encoding="utf-8"))
    for target, image in published.items():
        made = promote.promote(load(target), address, image=image["digest"])
        for tag in made["tags"]:
            say(f"{made['repository']}:{tag} is {made['digest']}")


def beside_the_engine() -> bool:
    """Promote in a container where the engine's own loopback is at hand, if the registry is there; whether it was.

    `localhost:5000` is the engine's for a push and this container's for everything else. A local run has such
    registries, Cloud Build never.

    Raises:
        StepFailed: that container did; its lines stand above.
    """
    if not registry.is_loopback(os.environ.get("REGISTRY", "")) or os.environ.get("TRAINYARD_BESIDE_ENGINE"):
        return False
    try:
        me = engine.client().containers.get(socket.gethostname())
    except docker.errors.NotFound:  # in no container: this loopback is the engine's
        return False
    again = engine.client().containers.run(
        str(me.attrs["Image"]),
        ["-m", "scripts.cloud.step", "promote"],
        detach=True,
        environment=dict(os.environ) | {"TRAINYARD_BESIDE_ENGINE": "1"},
        labels=me.labels,
        network_mode="host",
        volumes_from=[str(me.id)],
        working_dir=str(ROOT),
    )
    try:
        for line in again.logs(stream=True, follow=True):
            say(line.decode(errors="replace").rstrip())
        code = again.wait()["StatusCode"]
    finally:
        again.remove(force=True)
    if code:
        raise StepFailed(f"promote ended with status {code}; see above")
    return True


STEPS: dict[str, Callable[[str], None]] = {"build": build_target, "verify": verify_target, "smoke": smoke_target}


def main(arguments: list[str]) -> int:
    parser = cli.parser(__doc__, target=False)
    parser.add_argument("step", choices=["prepare", *STEPS, "publish", "promote"])
    parser.add_argument("name", nargs="?", help="target, for build, verify and smoke")
    options = parser.parse_args(arguments)
    if options.step == "prepare":
        prepare()
        return 0
    facts = json.loads(FACTS.read_text(encoding="utf-8"))
    os.environ.setdefault("SOURCE_DATE_EPOCH", str(facts["epoch"]))
    use_index(os.environ.get("INDEX", ""))
    if options.step == "publish":
        publish()
    elif options.step == "promote":
        promote_published()
    elif options.name not in wanted():
        say(f"{options.name} is not among _TARGETS: nothing to do")
    else:
        STEPS[options.step](options.name)
    return 0


if __name__ == "__main__":
    from scripts.cli import run  # spelt like this, it is no verb of make's (scripts/__main__.py): Cloud Build calls it

    run(main)
