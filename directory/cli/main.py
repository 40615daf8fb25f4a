"""The `treecored` command: a group whose commands are loaded when they are called.

Owns the table of commands. It must never import a command's module before it is needed: the
daemon's process would otherwise load what only the demo needs.
"""

import importlib
from importlib.util import find_spec
from typing import Final

import click

COMMANDS: Final = {
    "serve": "directory.cli.serve",
    "check": "directory.cli.check",
    "stats": "directory.cli.stats",
    "top": "directory.cli.top",
    "tree": "directory.cli.tree",
    "demo": "directory.cli.demo",
    "replay": "directory.cli.replay",
    "chaos": "directory.cli.chaos",
    "report": "directory.cli.report",
    "simulate": "directory.cli.simulate",
    "explain": "directory.cli.explain",
    "record": "directory.cli.record",
    "doctor": "directory.cli.doctor",
    "purge": "directory.cli.purge",
    "sglang-env": "directory.cli.sglang_env",
}
"""Command name -> module that defines it as a function of the same name (`_` for `-`)."""


class LazyGroup(click.Group):
    """A group that imports a command's module on first use."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Names of the commands that are installed."""
        del ctx
        return [name for name, module in COMMANDS.items() if find_spec(module) is not None]

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """The command, or None where there is none of that name."""
        if cmd_name not in self.list_commands(ctx):
            return None
        module = importlib.import_module(COMMANDS[cmd_name])
        found = getattr(module, cmd_name.replace("-", "_"))
        assert isinstance(found, click.Command)
        return found


@click.group(cls=LazyGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="treecored")
def app() -> None:
    """Share prefix caches between the LLM schedulers of one node."""


if __name__ == "__main__":
    app()
