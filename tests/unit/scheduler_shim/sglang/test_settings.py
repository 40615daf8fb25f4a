"""Settings from the environment, and the plugin's answers to what it cannot serve."""

from pathlib import Path
from types import ModuleType

import pytest

from directory.protocol.runtime_dir import default_runtime_dir
from directory.protocol.variables import DAEMON_VARIABLES, PREFIX
from scheduler_shim.sglang import plugin
from scheduler_shim.sglang.settings import Settings, SettingsError, load_settings
from scheduler_shim.sglang.versions import Unsupported, check_version

DOCS = Path(__file__).parents[4] / "docs" / "sglang.md"


@pytest.fixture(autouse=True)
def clean(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in Settings.model_fields:
        monkeypatch.delenv(PREFIX + name.upper(), raising=False)


def test_without_variables_the_defaults_hold() -> None:
    settings = load_settings()
    assert settings.runtime_dir == default_runtime_dir()
    assert (settings.mode, settings.loads, settings.on_absent) == ("mirrored", "held", "degrade")
    assert settings.deadlines.match_ms == 20


def test_variables_override_and_those_of_the_daemon_do_not_matter(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("TREECORED_MODE", "thin")
    monkeypatch.setenv("TREECORED_MATCH_MS", "35")
    monkeypatch.setenv("TREECORED_HOST_TIER", "4GiB")
    settings = load_settings()
    assert (settings.mode, settings.deadlines.match_ms) == ("thin", 35)


def test_a_variable_that_neither_side_knows_is_warned_of_and_one_of_the_daemons_is_not(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    for name in DAEMON_VARIABLES:
        monkeypatch.setenv(name, "4")
    load_settings()
    assert not caplog.records
    monkeypatch.setenv("TREECORED_MOED", "thin")
    assert load_settings().mode == "mirrored"
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "TREECORED_MOED" in caplog.text


@pytest.mark.parametrize(
    ("name", "value"),
    [("MODE", "fat"), ("SHARE", "1.5"), ("MATCH_MS", "soon"), ("LOADS", "sideways")],
)
def test_a_wrong_value_gets_one_sentence_with_the_variables_name(
    name: str, value: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(PREFIX + name, value)
    with pytest.raises(SettingsError, match=f"{PREFIX}{name}='?{value}") as raised:
        load_settings()
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("loads", "by_layers"),
    [("held", False), ("layerwise", True), ("adaptive", True), ("none", False)],
)
def test_two_kinds_of_loads_need_a_pool_that_waits_layer_by_layer(
    loads: str, by_layers: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TREECORED_LOADS", loads)
    assert load_settings().by_layers is by_layers


def test_an_engine_is_named_after_its_process_unless_it_has_a_name() -> None:
    assert Settings().instance_name().startswith("sglang-")
    assert Settings.model_validate({"instance": "left"}).instance_name() == "left"
    assert Settings.model_validate({"instance": "left"}).instance_name(2) == "left-r2"


def test_every_setting_stands_in_the_table_of_the_docs() -> None:
    table = {
        cells[1].strip().strip("`")
        for line in DOCS.read_text().splitlines()
        if len(cells := line.split("|")) > 4 and cells[1].strip().startswith("`TREECORED_")
    }
    assert table == {PREFIX + name.upper() for name in Settings.model_fields}


@pytest.mark.parametrize("version", ["0.5.13", "0.5.16", "0.5.20.post1", "0.5.23"])
def test_supported_versions_pass(version: str) -> None:
    check_version(version)


@pytest.mark.parametrize(
    "version", ["0.5.12.post1", "0.4.9", "0.5.24", "0.6.0", "1.0.0", "0.0.0.dev1", "unknown"]
)
def test_other_versions_get_one_sentence_with_the_supported_range(version: str) -> None:
    with pytest.raises(Unsupported, match=f"0.5.13 to 0.5.23, this is {version}") as raised:
        check_version(version)
    assert "\n" not in str(raised.value)


def test_registering_offers_the_backend_and_does_nothing_else(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    offered = []
    registry = ModuleType("registry")
    registry.register_radix_cache_backend = (  # type: ignore[attr-defined]
        lambda name, factory: offered.append((name, factory))
    )
    monkeypatch.setattr("importlib.import_module", lambda _: registry)
    plugin.register()
    assert offered == [("treecored", plugin.factory)]


def test_an_sglang_without_backends_from_outside_gets_one_sentence(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("importlib.import_module", ModuleType)
    with pytest.raises(Unsupported, match=r"no cache backends.*0\.5\.13"):
        plugin.register()


def test_a_part_that_cannot_be_loaded_is_told_when_the_backend_is_built(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def import_module(name: str) -> ModuleType:
        if name == "sglang":
            module = ModuleType(name)
            module.__version__ = "0.5.16"  # type: ignore[attr-defined]
            return module
        raise ImportError("No module named 'torch'")

    monkeypatch.setattr("importlib.import_module", import_module)
    with pytest.raises(Unsupported, match=r"torch.*pip install 'treecored\[sglang\]'"):
        plugin.factory(object())
