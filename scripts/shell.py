"""Open a shell in a target's image.

make shell TARGET=xla
"""

from __future__ import annotations

import os
import sys

from scripts import cli, engine
from scripts.cli import UserError
from scripts.plan import NAME
from scripts.spec import load


def main(arguments: list[str]) -> int:
    options = cli.parser(__doc__).parse_args(arguments)
    spec = load(options.target)
    reference = f"{NAME}:{spec.target}"
    engine.image(reference, made_by=f"make image TARGET={spec.target}")
    if not sys.stdin.isatty():
        raise UserError(f"no terminal here; run a command with 'docker run --rm {reference} -- COMMAND'")
    command = ["docker", "run", "--rm", "--interactive", "--tty", reference, "--", "bash"]
    os.execvp(command[0], command)


if __name__ == "__main__":
    cli.run(main)
