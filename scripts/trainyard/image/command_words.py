"""Start the command of an image: its folders, its shared memory, and the words of its container."""

from __future__ import annotations

from collections.abc import Sequence

from trainyard.spec.naming import COMMAND

#: Where the folders of ``--data`` and ``--output`` are in the container.
DATA, OUTPUT = "/data", "/output"

#: Limit of /dev/shm, of which only what is used takes memory. Docker's 64 MB are too few for a DataLoader with workers
#: (https://github.com/pytorch/pytorch#docker-image).
SHARED_MEMORY = "16g"

#: Words of the launcher's own command line, which it does not pass on (launcher/cli.py).
LAUNCHER_OPTIONS = {
    "--", "--explain", "--force", "--help", "--json", "--preflight", "--print-env", "--require-healthy", "--runtime",
    "--signal-group", "--version",
}  # fmt: skip


def container_words(arguments: Sequence[str]) -> list[str]:
    """Return the words of a container that runs the user's command of an image with ``arguments``.

    Platforms give a container the arguments alone. The launcher would take an argument for a command, or for its own
    option, if it comes first and looks like one: then they follow the command's name.
    """
    first = arguments[0].partition("=")[0] if arguments else "-"
    return list(arguments) if first.startswith("-") and first not in LAUNCHER_OPTIONS else [COMMAND, *arguments]
