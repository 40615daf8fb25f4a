"""Settings: where each comes from, which wins, and what a wrong one is answered with."""

import os
from pathlib import Path

import pytest

from directory.daemon.config import LOOK_US_MAX, ConfigError, Settings, load_settings
from directory.daemon.loop import SPIN_NS
from directory.protocol.runtime_dir import default_runtime_dir
from directory.protocol.variables import DAEMON_VARIABLES, ENGINE_VARIABLES
from transfer.engine_limits import EngineLimits

GIB = 1024**3
GPU = "GPU-12345678-9abc-def0-1234-56789abcdef0"


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """No variable of whoever runs the tests has a say."""
    for name in list(os.environ):
        if name.startswith("TREECORED_"):
            monkeypatch.delenv(name)


def file(tmp_path: Path, text: str) -> Path:
    """A settings file."""
    path = tmp_path / "treecored.toml"
    path.write_text(text, encoding="utf-8")
    return path


def test_the_defaults_are_sizes_in_bytes() -> None:
    settings = load_settings()
    assert (settings.host_tier, settings.segment) == (4 * GIB, 64 * 1024**2)
    assert settings.runtime_dir == default_runtime_dir()


def test_flags_override_the_environment_which_overrides_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = file(tmp_path, 'host_tier = "1GiB"\nsegment = "1MiB"\nlog_format = "json"\n')
    monkeypatch.setenv("TREECORED_HOST_TIER", "2GiB")
    monkeypatch.setenv("TREECORED_SEGMENT", "2MiB")
    settings = load_settings(path, {"host_tier": "3GiB", "segment": None})
    assert settings.host_tier == 3 * GIB
    assert settings.segment == 2 * 1024**2
    assert settings.log_format == "json"


def test_the_environment_can_name_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TREECORED_CONFIG", str(file(tmp_path, "sessions_max = 7\n")))
    assert load_settings().sessions_max == 7


def test_the_runtime_folder_is_the_users(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    assert default_runtime_dir() == tmp_path / "treecored"
    monkeypatch.delenv("XDG_RUNTIME_DIR")
    assert default_runtime_dir().name == f"treecored-{os.getuid()}"


@pytest.mark.parametrize(
    ("text", "flags", "parts"),
    [
        ('host_tier = "many"', {}, ["host_tier", "'many'", "treecored.toml"]),
        ("host_tier = -1", {}, ["host_tier", "-1"]),
        ("host_teir = 1", {}, ["host_teir", "no setting", "host_tier"]),
        ("host_tier = ", {}, ["treecored.toml", "not TOML"]),
        ('host_tier = "64TiB"\nsegment = "64KiB"', {}, ["segments", "choose a larger segment"]),
        ("", {"log_level": "loud"}, ["log_level", "flag", "'loud'"]),
        ("", {"device": "tpu"}, ["device", "'tpu'", "UUID"]),
        ("", {"device": "cuda:0"}, ["device", "'cuda:0'", "UUID"]),
        ("", {"device": f"cuda:{GPU}\n"}, ["device", "UUID"]),
        ("", {"device": f"cuda:{GPU} --fd 3"}, ["device", "UUID"]),
        ("mover_start_ms_max = 1", {}, ["mover_start_ms_max"]),
        ("", {"sessions_max": "0"}, ["sessions_max", "flag"]),
    ],
)
def test_a_wrong_value_is_one_sentence_that_names_the_setting(
    tmp_path: Path, text: str, flags: dict[str, str], parts: list[str]
) -> None:
    with pytest.raises(ConfigError) as caught:
        load_settings(file(tmp_path, text), flags)
    said = str(caught.value)
    assert "\n" not in said
    for part in parts:
        assert part in said


def test_a_wrong_variable_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TREECORED_SEGMENT", "1")
    with pytest.raises(ConfigError, match="from TREECORED_SEGMENT"):
        load_settings()


def test_a_misspelled_variable_is_refused_and_not_a_default(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("TREECORED_HOST_TEIR", "64GiB")
    with pytest.raises(ConfigError, match=r"TREECORED_HOST_TEIR.*TREECORED_HOST_TIER"):
        load_settings()


def test_variables_of_an_engine_are_no_mistake_of_a_daemons(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in ENGINE_VARIABLES - DAEMON_VARIABLES:
        monkeypatch.setenv(name, "anything")
    assert load_settings() == Settings()


@pytest.mark.parametrize(
    "name", ["host_tier", "segment", "copy_rate", "host_scrub", "access_log_size"]
)
@pytest.mark.parametrize(
    "text", ["50%", "4 GiB extra", "64MiB;", "abc", "32Gi", "", "-1", "1,5GiB", "4\u0664GiB"]
)
def test_a_size_that_is_more_or_less_than_a_number_and_a_unit_is_refused(
    name: str, text: str
) -> None:
    flags = {"host_checksums": "kept", name: text}
    with pytest.raises(ConfigError) as caught:
        load_settings(None, flags)
    assert str(caught.value) == (
        f"setting {name} (given as a flag) cannot be {text!r}: "
        'write a number and a unit, such as "64GiB"'
    )


@pytest.mark.parametrize(
    ("text", "nbytes"), [("0", 0), (" 64 MiB ", 64 * 1024**2), ("1.5gib", GIB * 3 // 2), (7, 7)]
)
def test_a_number_with_or_without_a_unit_is_a_size(text: str | int, nbytes: int) -> None:
    assert load_settings(None, {"host_tier": text}).host_tier == nbytes


@pytest.mark.parametrize(
    ("text", "found"),
    [("On", "on"), ("OFF", "off"), ("./On", "./On"), ("/var/log/a", "/var/log/a"), ("a/b", "a/b")],
)
def test_an_access_log_is_a_switch_or_a_path(text: str, found: str) -> None:
    assert load_settings(None, {"access_log": text}).access_log == found


@pytest.mark.parametrize("text", ["true", "yes", "1", "log"])
def test_a_word_is_no_folder_of_an_access_log(text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_settings(None, {"access_log": text})
    said = f"cannot be {text!r}: write off, on, or the path of a folder (./{text})"
    assert str(caught.value).endswith(said)


def test_a_missing_file_and_a_folder_are_named(tmp_path: Path) -> None:
    for path in (tmp_path / "none.toml", tmp_path):
        with pytest.raises(ConfigError, match="cannot be read") as caught:
            load_settings(path)
        assert str(path) in str(caught.value)


def test_settings_do_not_change_afterwards() -> None:
    with pytest.raises(ValueError, match="frozen"):
        Settings().host_tier = 1  # type: ignore[assignment]


def test_a_gpu_is_named_by_its_uuid(tmp_path: Path) -> None:
    path = file(tmp_path, f'device = "cuda:{GPU}"\nhost_unpinned = true\n')
    settings = load_settings(path)
    assert (settings.device, settings.host_unpinned) == (f"cuda:{GPU}", True)
    assert (load_settings().device, load_settings().host_unpinned) == ("cpu", False)


def test_a_mover_is_started_with_what_the_settings_say_of_copies(tmp_path: Path) -> None:
    path = file(tmp_path, 'host_unpinned = true\ncopy_rate = "2KiB"\n')
    assert load_settings(path).mover_options == (
        "--unpinned", "--limit", "lane_bytes_per_s=2048",
    )  # fmt: skip
    assert load_settings().mover_options == ()
    limits = EngineLimits().changed(["lane_bytes_per_s=2048"])
    assert limits.bounds[-1].bytes_per_s == 2048, "and the mover understands it"


def test_how_long_a_daemon_looks_can_be_said_and_is_bounded() -> None:
    assert load_settings().look_us == SPIN_NS // 1000
    assert load_settings(None, {"look_us": "0"}).look_us == 0
    for wrong in ("-1", str(LOOK_US_MAX + 1), "soon"):
        with pytest.raises(ConfigError, match="setting look_us"):
            load_settings(None, {"look_us": wrong})


def test_a_mover_that_hangs_is_found_out_within_two_seconds_by_default() -> None:
    settings = load_settings()
    assert settings.mover_silence_ms_max < 2_000 < settings.mover_start_ms_max


@pytest.mark.parametrize("name", ["kv_events", "kv_events_union"])
def test_an_address_of_kv_events_that_is_none_is_refused_by_name(name: str) -> None:
    with pytest.raises(ConfigError, match=rf"setting {name}: '5557' is no address such as"):
        load_settings(None, {name: "5557"})


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("kv_events_union", "tcp://127.0.0.1:5600"),
        ("kv_events_detokenizer", "http://127.0.0.1:30000/detokenize"),
    ],
)
def test_what_needs_kv_events_is_refused_without_them(name: str, value: str) -> None:
    with pytest.raises(ConfigError, match=rf"setting {name}: .* set that as well"):
        load_settings(None, {name: value})
    flags = {"kv_events": "tcp://127.0.0.1:5557", name: value}
    assert getattr(load_settings(None, flags), name) == value


def test_kv_events_are_off_by_default() -> None:
    settings = load_settings()
    assert (settings.kv_events, settings.kv_events_union) == ("", "")
