"""``shardset completion``: what a shell needs to complete commands and options."""

from __future__ import annotations

import click
from click.shell_completion import get_completion_class

from .program import Command


@click.command(
    "completion",
    cls=Command,
    examples=[
        ('eval "$(shardset completion bash)"', "for bash, in ~/.bashrc"),
        ('eval "$(shardset completion zsh)"', "for zsh, in ~/.zshrc"),
        ("shardset completion fish > ~/.config/fish/completions/shardset.fish", "for fish, once"),
    ],
)
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
@click.pass_context
def command(ctx: click.Context, *, shell: str) -> None:
    """Print the completion script of a shell."""
    kind = get_completion_class(shell)
    assert kind is not None  # noqa: S101 - click knows these three
    click.echo(kind(ctx.find_root().command, {}, "shardset", "_SHARDSET_COMPLETE").source())
