"""The lists of variables are those of the settings, and what is on none is misspelled."""

from directory.daemon import config
from directory.protocol.variables import (
    CONFIG_VARIABLE,
    DAEMON_VARIABLES,
    ENGINE_VARIABLES,
    PREFIX,
    unknown,
)
from scheduler_shim.sglang import settings


def test_the_list_of_the_daemons_variables_is_that_of_its_settings() -> None:
    names = {PREFIX + name.upper() for name in config.Settings.model_fields}
    assert names | {CONFIG_VARIABLE} == DAEMON_VARIABLES
    assert config.Settings.model_config["env_prefix"] == PREFIX


def test_the_list_of_an_engines_variables_is_that_of_its_settings() -> None:
    names = {PREFIX + name.upper() for name in settings.Settings.model_fields}
    assert names == ENGINE_VARIABLES
    assert settings.Settings.model_config["env_prefix"] == PREFIX


def test_what_neither_side_reads_is_unknown() -> None:
    known = [*DAEMON_VARIABLES, *ENGINE_VARIABLES, "treecored_mode", "PATH", "MARKS_OF_TREECORED"]
    assert unknown(known) == []
    assert unknown([*known, "TREECORED_MOED", "TREECORED_"]) == ["TREECORED_", "TREECORED_MOED"]
