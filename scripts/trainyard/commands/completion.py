"""``trainyard completion``."""

from __future__ import annotations

import click

GROUP = "shell"


@click.command(
    short_help="Print the script that completes trainyard in bash, zsh or fish.",
    epilog="""\b
    Examples:
      trainyard completion bash >~/.local/share/bash-completion/completions/trainyard
      trainyard completion zsh >~/.zfunc/_trainyard
      trainyard completion fish >~/.config/fish/completions/trainyard.fish
    """,
)
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
@click.pass_context
def command(context: click.Context, shell: str) -> None:
    """Print the script that makes SHELL complete commands, options, targets, platforms and accelerators.

    \b
    bash  Needs bash 4.4 or newer. Write it to the folder of bash-completion, as in
          the example, or add this line to ~/.bashrc:
              eval "$(trainyard completion bash)"
    zsh   Write it to a folder of $fpath, as in the example, and have in ~/.zshrc:
              fpath+=~/.zfunc; autoload -Uz compinit; compinit
          or add this line to ~/.zshrc, after compinit:
              eval "$(trainyard completion zsh)"
    fish  Write it to the folder of completions, as in the example.

    New shells complete then. The script is click's: it asks trainyard for the words,
    so that it stays valid when trainyard is upgraded.
    """
    from click.shell_completion import get_completion_class

    group = context.find_root().command
    found = get_completion_class(shell)
    assert found is not None
    # What click itself asks its bash for: source() would run the bash of this machine to learn its version.
    words = found(group, {}, "trainyard", "_TRAINYARD_COMPLETE")
    click.echo(words.source_template % words.source_vars(), nl=False)
