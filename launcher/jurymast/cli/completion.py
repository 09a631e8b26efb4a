"""`jurymast completion`: what a shell needs to complete jurymast's commands, options and runs."""

from __future__ import annotations

import click
from click.shell_completion import get_completion_class

from jurymast.cli.output import echo

# The variable by which the shell makes its request, in click's naming.
VARIABLE = "_JURYMAST_COMPLETE"


@click.command()
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
@click.pass_context
def command(context: click.Context, shell: str) -> None:
    """Print the script with which a shell completes commands, options and runs. Install it once:

    \b
      bash  jurymast completion bash > ~/.local/share/bash-completion/completions/jurymast
      zsh   jurymast completion zsh > "${fpath[1]}/_jurymast"
      fish  jurymast completion fish > ~/.config/fish/completions/jurymast.fish
    """
    kind = get_completion_class(shell)
    assert kind is not None  # click has all three shells
    echo(kind(context.find_root().command, {}, "jurymast", VARIABLE).source())
