"""``trainyard dev schema``."""

from __future__ import annotations

from pathlib import Path

import click

from trainyard.common import options

GROUP = "shell"


@options.command(
    "Print the JSON schema of trainyard.yaml, for editors.",
    "trainyard dev schema",
    "trainyard dev schema --output .trainyard/schema.json",
)
@options.option(
    "--output", type=click.Path(path_type=Path, dir_okay=False), help="File to write instead of printing the schema."
)
def command(output: Path | None) -> None:
    """Print the JSON schema of trainyard.yaml on stdout.

    'trainyard init' writes it to .trainyard/schema.json and names that file in the first line of trainyard.yaml, where
    editors with yaml-language-server (VS Code, Neovim, Helix) find it without a network:

    \b
      # yaml-language-server: $schema=.trainyard/schema.json

    After an upgrade, --output writes it again.
    """
    from trainyard.common import console
    from trainyard.workspace import init

    text = init.schema_text()
    if output is None:
        click.echo(text, nl=False)
        return
    output.parent.mkdir(parents=True, exist_ok=True)
    output.write_text(text, encoding="utf-8")
    console.say(f"{output}: the schema of trainyard.yaml")
