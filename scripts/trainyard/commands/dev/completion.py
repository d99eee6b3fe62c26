"""``trainyard dev completion``."""

from __future__ import annotations

import click

from trainyard.common import options

GROUP = "shell"

#: Where click's script is a file of $fpath: zsh runs all of it as a function, which completes the first time and only
#: registers the completion the second time (https://zsh.sourceforge.io/Doc/Release/Functions.html#Autoloading-Functions;
#: click 8.5). To be removed when the second Tab completes without it.
_AUTOLOADED = "if [[ $zsh_eval_context[-1] == loadautofunc ]]; then"


@options.command(
    "Print the script that completes trainyard in bash, zsh or fish.",
    "trainyard dev completion bash >~/.local/share/bash-completion/completions/trainyard",
    "trainyard dev completion zsh >~/.zfunc/_trainyard",
    "trainyard dev completion fish >~/.config/fish/completions/trainyard.fish",
)
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
@click.pass_context
def command(context: click.Context, shell: str) -> None:
    """Print the script that makes SHELL complete commands, options, targets, platforms and accelerators.

    \b
    bash  Needs bash 4.4 or newer. Write it to the folder of bash-completion, as in
          the example, or add this line to ~/.bashrc:
              eval "$(trainyard dev completion bash)"
    zsh   Write it to a folder of $fpath, as in the example, and have in ~/.zshrc:
              fpath+=~/.zfunc; autoload -Uz compinit; compinit
          or add this line to ~/.zshrc, after compinit:
              eval "$(trainyard dev completion zsh)"
    fish  Write it to the folder of completions, as in the example.

    New shells complete then. The script is click's: it asks trainyard for the words,
    so that it stays valid when trainyard is upgraded.
    """
    from click.shell_completion import BashComplete, FishComplete, ZshComplete

    group = context.find_root().command
    kind = {"bash": BashComplete, "zsh": ZshComplete, "fish": FishComplete}[shell]
    # What click itself asks its bash for: source() would run the bash of this machine to learn its version.
    words = kind(group, {}, "trainyard", "_TRAINYARD_COMPLETE")
    template = words.source_template
    if shell == "zsh":
        template = template.replace(_AUTOLOADED, f"{_AUTOLOADED}\n    compdef %(complete_func)s %(prog_name)s")
    click.echo(template % words.source_vars(), nl=False)
