"""`treecored sglang-env`: what an SGLang engine has to be started with to use a daemon.

Owns the printed lines: `export` for the environment, and the launch flags. Values are checked as
the engine will check them. It must never start, ask or change anything, and never import SGLang or
torch: it runs where the daemon runs, which may have neither.
"""

from __future__ import annotations

import os
import shlex
import sys
from importlib import metadata
from pathlib import Path
from typing import Any, Final

import click
import msgspec
from pydantic import ValidationError

from directory.daemon.config import ConfigError
from directory.daemon.config import load_settings as load_daemon_settings
from directory.daemon.runtime import SESSION_NAME
from directory.protocol.variables import PREFIX
from scheduler_shim.sglang.settings import Settings, SettingsError
from scheduler_shim.sglang.versions import Unsupported, check_version

PLUGIN: Final = "treecored"
PLUGINS_VARIABLE: Final = "SGLANG_PLUGINS"
FLAGS_VARIABLE: Final = "SGLANG_FLAGS_FOR_TREECORED"
FLAGS: Final = ("--radix-cache-backend", PLUGIN)
ALLOCATOR_VARIABLES: Final = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")
CPU_ENVIRONMENT: Final = {"SGLANG_USE_CPU_ENGINE": "1"}
CPU_FLAGS: Final = (
    "--device", "cpu", "--attention-backend", "torch_native", "--sampling-backend", "pytorch",
    "--grammar-backend", "none", "--disable-overlap-schedule", "--disable-cuda-graph",
    "--sleep-on-idle",
)  # fmt: skip
"""What SGLang wants where there is no GPU. An idle scheduler spins unless it is told to sleep."""


class Recipe(msgspec.Struct, frozen=True):
    """How to start an engine. `notes`: what the operator should know, one sentence each."""

    environment: dict[str, str]
    flags: tuple[str, ...]
    notes: tuple[str, ...]


@click.command("sglang-env")
@click.option(
    "--config",
    type=click.Path(path_type=Path),
    help="The daemon's TOML file of settings (or TREECORED_CONFIG): it names the runtime folder.",
)
@click.option(
    "--runtime-dir",
    help="Folder of the daemon's sockets. [$XDG_RUNTIME_DIR/treecored, else $TMPDIR/treecored-UID]",
)
@click.option("--mode", help="mirrored (the engine keeps a tree of its own) or thin.")
@click.option("--instance", help="Name of the engine; each one on the node needs its own.")
@click.option("--model-id", help="Engines with equal ids have equal weights: you promise it.")
@click.option(
    "--set",
    "others",
    multiple=True,
    metavar="NAME=VALUE",
    help="Any other setting of docs/sglang.md, in lower case and without TREECORED_. Repeatable.",
)
@click.option("--cpu", is_flag=True, help="For an engine without a GPU.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def sglang_env(
    config: Path | None,
    runtime_dir: str | None,
    mode: str | None,
    instance: str | None,
    model_id: str | None,
    others: tuple[str, ...],
    cpu: bool,
    as_json: bool,
) -> None:
    """Print the environment and the flags with which SGLang uses this daemon.

    The lines can be evaluated: eval "$(treecored sglang-env)" and then
    python -m sglang.launch_server $SGLANG_FLAGS_FOR_TREECORED --model-path ...

    Exits with 2 for a setting that the engine would refuse.
    """
    given = {"mode": mode, "instance": instance, "model_id": model_id}
    try:
        folder = load_daemon_settings(config, {"runtime_dir": runtime_dir}).runtime_dir
        chosen = {name: value for name, value in given.items() if value is not None}
        settings = checked({"runtime_dir": folder.absolute(), **chosen, **parse_pairs(others)})
    except (ConfigError, SettingsError) as error:
        click.echo(f"treecored sglang-env: {error}", err=True)
        sys.exit(2)
    recipe = recipe_for(settings, cpu=cpu)
    if as_json:
        click.echo(msgspec.json.format(msgspec.json.encode(recipe)).decode())
        return
    for note in recipe.notes:
        click.echo(f"# {note}")
    for name, value in recipe.environment.items():
        click.echo(f"export {name}={shlex.quote(value)}")
    click.echo(f"export {FLAGS_VARIABLE}={shlex.quote(shlex.join(recipe.flags))}")


def checked(values: dict[str, Any]) -> Settings:
    """The settings as the engine will have them; raises `SettingsError` for the first that is
    wrong. What the environment says already counts, too."""
    try:
        return Settings(**values)
    except ValidationError as error:
        first = error.errors()[0]
        name = "_".join(str(part) for part in first["loc"])
        raise SettingsError(f"{name} {first.get('input')!r}: {first['msg']}") from error


def parse_pairs(pairs: tuple[str, ...]) -> dict[str, str]:
    """NAME=VALUE as a dictionary; raises `SettingsError` for anything else."""
    found: dict[str, str] = {}
    for pair in pairs:
        name, equals, value = pair.partition("=")
        name = name.lower().removeprefix(PREFIX.lower())
        if not equals or name not in Settings.model_fields:
            known = ", ".join(Settings.model_fields)
            raise SettingsError(f"--set {pair}: write NAME=VALUE with one of {known}")
        found[name] = value
    return found


def recipe_for(settings: Settings, *, cpu: bool) -> Recipe:
    """Environment and flags for settings; only what differs from the defaults is exported, and
    the runtime folder always."""
    environment = {f"{PREFIX}RUNTIME_DIR": str(settings.runtime_dir)}
    for name, field in Settings.model_fields.items():
        value = getattr(settings, name)
        if name != "runtime_dir" and value != field.default:
            text = str(int(value)) if isinstance(value, bool) else str(value)
            environment[PREFIX + name.upper()] = text
    plugins = [name.strip() for name in os.environ.get(PLUGINS_VARIABLE, "").split(",")]
    plugins = [name for name in plugins if name]
    if plugins and PLUGIN not in plugins:
        environment[PLUGINS_VARIABLE] = ",".join([*plugins, PLUGIN])
    if cpu:
        environment |= CPU_ENVIRONMENT
    return Recipe(environment, (*FLAGS, *(CPU_FLAGS if cpu else ())), tuple(_notes(settings, cpu)))


def _notes(settings: Settings, cpu: bool) -> list[str]:
    notes = []
    if not (settings.runtime_dir / SESSION_NAME).is_socket():
        notes.append(
            f"no daemon is there yet: treecored serve --runtime-dir {settings.runtime_dir}"
        )
    try:
        check_version(metadata.version("sglang"))
    except metadata.PackageNotFoundError:
        pass  # SGLang lives in an environment of its own
    except Unsupported as error:
        notes.append(str(error))
    expandable = [
        name
        for name in ALLOCATOR_VARIABLES
        if "expandable_segments:True" in os.environ.get(name, "")
    ]
    if expandable and not cpu:
        notes.append(
            f"take expandable_segments:True out of {expandable[0]}: a pool cannot lie there"
        )
    return notes
