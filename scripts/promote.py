"""Move a target's tags at the registry to an image that passed; nothing is pulled or pushed.

    make promote TARGET=tf-cpu REGISTRY=localhost:5000/team                     the image of this host
    make promote TARGET=tf-cpu REGISTRY=... IMAGE=tf-cpu-2.21.0-20261120-0123abcd    or sha256:...
    make promote TARGET=tf-cpu REGISTRY=... TO=localhost:5000/team-moving       where REGISTRY's tags are immutable

`trainyard:<target>` and `trainyard:<target>-<version>` then mean that digest. It must have passed verify and smoke,
here or where it was pushed from (Cloud Build leaves a record beside the image). What the tags meant before stays at the
registry as `<tag>.previous`, which `make rollback` returns to.
"""

from __future__ import annotations

import os
from typing import Any

from scripts import cli, engine, state
from scripts.cli import UserError, say
from scripts.plan import LABELS, NAME
from scripts.published import registry, tags
from scripts.published.tags import Manifest, Repository
from scripts.spec import Spec, load


def passed_here(target: str, digest: str) -> bool:
    """Whether this host's records say that a digest passed verify and smoke."""
    return all((state.recall(target, step, digest) or {}).get("passed") for step in ("verify", "smoke"))


def chosen(spec: Spec, repository: Repository, image: str | None) -> Manifest:
    """The manifest to promote: of the tag or digest given, or of this host's image.

    Raises:
        UserError: the registry has no such image, or it is another target's, or it never passed.
    """
    reference = image or engine.digest(f"{NAME}:{spec.target}", made_by=f"make image TARGET={spec.target}")
    found = repository.manifest(reference)
    if found is None:
        raise UserError(f"{repository.name} has no {reference}: run 'make push TARGET={spec.target}' first")
    target = ((repository.config(found).get("config") or {}).get("Labels") or {}).get(f"{LABELS}.target")
    if target != spec.target:
        raise UserError(f"{reference} at {repository.name} is an image of target '{target}', not '{spec.target}'")
    if not passed_here(spec.target, found.digest) and not tags.attested(repository, found.digest):
        raise UserError(
            f"{found.digest[:19]} never passed verify and smoke, neither here nor by a record at {repository.name}: "
            f"run 'make image TARGET={spec.target}' and 'make push'"
        )
    return found


def version_of(repository: Repository, manifest: Manifest) -> str:
    """The framework's version by the image's own label, ``<name>==<version>``: not today's spec, which may be newer."""
    labels = (repository.config(manifest).get("config") or {}).get("Labels") or {}
    return str(labels.get(f"{LABELS}.framework", "")).rpartition("==")[2]


def promote(spec: Spec, address: str, *, image: str | None = None, to: str | None = None) -> dict[str, Any]:
    """Move the tags of ``spec``.

    Args:
        address: registry and path that the image was pushed to.
        image: tag or digest there; this host's image if None.
        to: registry and path whose tags move; ``address`` if None.
    Returns:
        ``digest``, ``tags`` (tag -> the digest it had before, or None), ``repository``.
    """
    source = Repository(f"{address}/{NAME}")
    destination = Repository(f"{to}/{NAME}") if to else source
    manifest = chosen(spec, source, image)
    if destination.host != source.host:
        raise UserError(f"TO={to}: must be at {source.host}, where the image is")
    if destination.name != source.name:
        destination.mount(manifest, source)
    moved: dict[str, str | None] = {}
    for tag in (f"{spec.target}-{version_of(source, manifest)}", spec.target):
        before = destination.manifest(tag)
        if before and before.digest == manifest.digest:
            continue
        if before:
            destination.put(before, f"{tag}.previous")
        destination.put(manifest, tag)
        moved[tag] = before.digest if before else None
    return {"digest": manifest.digest, "tags": moved, "repository": destination.name}


def main(arguments: list[str]) -> int:
    parser = cli.parser(__doc__)
    parser.add_argument("--registry", default=os.environ.get("REGISTRY"), help="host[:port]/path; or REGISTRY")
    parser.add_argument("--image", default=os.environ.get("IMAGE") or None, help="tag or digest; or IMAGE")
    parser.add_argument("--to", default=os.environ.get("TO") or None, help="host[:port]/path of the tags; or TO")
    options = parser.parse_args(arguments)
    to = registry.check_address(options.to) if options.to else None
    made = promote(load(options.target), registry.check_address(options.registry), image=options.image, to=to)
    for tag, before in made["tags"].items():
        say(f"{made['repository']}:{tag} is {made['digest'][:19]}, was {before[:19] if before else 'not there'}")
    if not made["tags"]:
        say(f"the tags are {made['digest'][:19]} already: nothing to do")
    cli.result(made, as_json=options.json)
    return 0


if __name__ == "__main__":
    cli.run(main)
