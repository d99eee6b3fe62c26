"""List the targets: what each holds, and which are built on this host.

make list
"""

from __future__ import annotations

import docker.errors
from rich.table import Table

from scripts import cli, engine
from scripts.cli import log
from scripts.plan import NAME
from scripts.spec import Spec, load, targets


def _local(spec: Spec) -> dict[str, str]:
    """Digest and version of the local image of a target; empty if there is none, or no engine answers."""
    try:
        image = engine.existing_client().images.get(f"{NAME}:{spec.target}")
    except (docker.errors.DockerException, OSError):
        return {}
    return {"digest": str(image.id), "version": image.labels.get("org.opencontainers.image.version", "")}


def main(arguments: list[str]) -> int:
    options = cli.parser(__doc__, target=False).parse_args(arguments)
    table = Table("target", "contents", "trainers", "here")
    found = {}
    for target in targets():
        spec = load(target)
        local = _local(spec)
        table.add_row(target, spec.summary, " ".join(spec.trainer_commands()), local.get("version", "-"))
        found[target] = {
            "summary": spec.summary,
            "packages": spec.framework.packages,
            "trainers": list(spec.trainer_commands()),
            "local": local,
        }
    log.print(table)
    cli.result(found, as_json=options.json)
    return 0


if __name__ == "__main__":
    cli.run(main)
