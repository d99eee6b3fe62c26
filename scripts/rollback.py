"""Move a target's tags at the registry back to what they were before the last promote.

    make rollback TARGET=tf-cpu REGISTRY=localhost:5000/team

What they are now becomes `<tag>.previous`, so a second rollback undoes the first. To go back further, promote an older
image: make promote TARGET=tf-cpu REGISTRY=... IMAGE=<its immutable tag>.
"""

from __future__ import annotations

import os
from typing import Any

from scripts import cli
from scripts.cli import UserError, say
from scripts.plan import NAME
from scripts.promote import version_of
from scripts.published import registry
from scripts.published.tags import Repository
from scripts.spec import Spec, load


def rollback(spec: Spec, address: str) -> dict[str, Any]:
    """Swap `<tag>` and `<tag>.previous` of the target, and of the version that it now has.

    Returns:
        ``repository``, and ``tags``: tag -> (digest it has now, digest it had).
    Raises:
        UserError: there is nothing to go back to.
    """
    repository = Repository(f"{address}/{NAME}")
    now = repository.manifest(spec.target)
    before = repository.manifest(f"{spec.target}.previous")
    if now is None or before is None:
        raise UserError(f"{repository.name}:{spec.target} was never promoted twice: there is nothing to go back to")
    moved = {}
    for tag in dict.fromkeys([spec.target, f"{spec.target}-{version_of(repository, now)}"]):
        now, before = repository.manifest(tag), repository.manifest(f"{tag}.previous")
        if now is None or before is None:  # the first image of its version: the tag stays on it
            continue
        repository.put(before, tag)
        repository.put(now, f"{tag}.previous")
        moved[tag] = [before.digest, now.digest]
    return {"repository": repository.name, "tags": moved}


def main(arguments: list[str]) -> int:
    parser = cli.parser(__doc__)
    parser.add_argument("--registry", default=os.environ.get("REGISTRY"), help="host[:port]/path; or REGISTRY")
    options = parser.parse_args(arguments)
    made = rollback(load(options.target), registry.check_address(options.registry))
    for tag, (digest, before) in made["tags"].items():
        say(f"{made['repository']}:{tag} is {digest[:19]} again, was {before[:19]}")
    cli.result(made, as_json=options.json)
    return 0


if __name__ == "__main__":
    cli.run(main)
