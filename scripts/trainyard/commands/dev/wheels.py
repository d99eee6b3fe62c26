"""``trainyard dev wheels``."""

from __future__ import annotations

import datetime
from pathlib import Path

import click

from trainyard.common import options

GROUP = "project"


@options.command(
    "Read what wheels contain into a table.",
    "pip download --no-deps --only-binary=:all: --dest wheels lightgbm soundfile",
    "trainyard dev wheels wheels",
)
@click.argument("folders", nargs=-1, required=True, type=options.Folder(exists=True, file_okay=False, path_type=Path))
def command(folders: tuple[Path, ...]) -> None:
    """Read the wheels in FOLDERS, the newest of each package, into workspace/wheel_contents.json.

    'trainyard init' and 'check' know from it which package has a module, and which Debian packages a wheel needs.
    Packages without a wheel in FOLDERS keep their entries. Commit the file.
    """
    from trainyard.common import console, installation
    from trainyard.spec.model import relative
    from trainyard.workspace import wheel_contents, wheel_reader

    installation.checkout("'trainyard dev wheels'")
    number = wheel_reader.update(folders, datetime.datetime.now(datetime.UTC).date().isoformat())
    console.say(f"read {number} wheels into {relative(wheel_contents.FILE)}: review the difference and commit it")
