"""Settings of the daemon: one TOML file, the environment and flags, the later overriding.

Owns the names, defaults and ranges of every setting, and the one sentence that a wrong value gets.
It must never read anything but the file it is pointed at and `TREECORED_*` variables.
"""

import os
import re
import tomllib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import (
    AfterValidator,
    ByteSize,
    Field,
    ValidationError,
    WrapValidator,
    model_validator,
)
from pydantic_settings import (
    BaseSettings,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
    TomlConfigSettingsSource,
)

from directory.core.limits import (
    MIB,
    MOVER_SILENCE_MS_MAX,
    MOVER_START_MS_MAX,
    POOLS_MAX,
    SEGMENTS_MAX,
)
from directory.daemon.loop import SPIN_NS
from directory.kvevents.addresses import parse
from directory.kvevents.wire import Form
from directory.protocol.runtime_dir import default_runtime_dir
from directory.protocol.variables import CONFIG_VARIABLE, DAEMON_VARIABLES, PREFIX, unknown

ONE_DEVICE = r"(cpu(:[a-z]+)?|cuda:GPU-[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12})"
DEVICE_PATTERN = rf"^{ONE_DEVICE}(,{ONE_DEVICE})*$"

Checksums = Literal["off", "kept", "verified"]
LogLevel = Literal["debug", "info", "warning", "error"]
LogFormat = Literal["console", "json"]
DEVICE_HELP = (
    'it is "cpu", or "cuda:" and the UUID of a GPU, such as "cuda:GPU-8f7e...", '
    "or several of these with commas"
)
LOOK_US_MAX = 1_000_000
SIZE_PATTERN = re.compile(r"\s*\d+(\.\d+)?\s*[A-Za-z]*\s*", re.ASCII)
SIZE_HELP = 'write a number and a unit, such as "64GiB"'
FOLDER_HELP = "write off, on, or the path of a folder"


class ConfigError(Exception):
    """A setting that cannot be used; the message is one sentence that names it."""


def _size(value: object, parsed: Callable[[object], ByteSize]) -> ByteSize:
    """A size is a number, or the whole text is one with a unit: "50%" is not 50 bytes."""
    if isinstance(value, bool) or (isinstance(value, str) and not SIZE_PATTERN.fullmatch(value)):
        raise ValueError(SIZE_HELP)
    try:
        return parsed(value)
    except ValidationError:
        raise ValueError(SIZE_HELP) from None


Size = Annotated[ByteSize, WrapValidator(_size)]
"""Bytes: a number, or text such as "64GiB"."""


def _switch_or_folder(value: str) -> str:
    """A word that is neither switch is no folder of that name where the daemon happens to start."""
    if value.lower() in ("off", "on"):
        return value.lower()
    if "/" not in value:
        raise ValueError(f"{FOLDER_HELP} (./{value})" if value else FOLDER_HELP)
    return value


class Settings(BaseSettings):
    """What a user may choose. Sizes are bytes or text such as "4GiB"."""

    model_config = SettingsConfigDict(
        env_prefix=PREFIX, extra="forbid", frozen=True, validate_default=False
    )

    runtime_dir: Path = Field(default_factory=default_runtime_dir)
    """Folder (mode 0700) of the sockets and the lock; created where it is missing."""
    host_tier: Annotated[Size, Field(ge=0)] = ByteSize(4096 * MIB)
    """Memory of the host tier; 0 means that there is none. On a CPU it is touched only as it fills;
    with a GPU the mover pins all of it as it starts, unless host_unpinned."""
    segment: Annotated[Size, Field(ge=4096)] = ByteSize(64 * MIB)
    """Piece of the host tier that is given to one page size at a time."""
    host_keep: bool = True
    """Keep the host tier in files, so that the next daemon takes it up again (warm restart)."""
    host_dir: Path | None = None
    """Folder (mode 0700, in memory) of those files; else one below the runtime folder or in
    shared memory is used, if it has room."""
    cold: bool = False
    """Begin with an empty host tier whatever an earlier daemon left."""
    host_checksums: Checksums = "off"
    """Checksums of host pages: "kept" computes them at backup, for the scrubber to compare; with
    "verified" every load is compared, too, before it counts. Needs the extra "checksum"."""
    host_scrub: Annotated[Size, Field(ge=0)] = ByteSize(0)
    """Bytes of the host tier that are read and compared a second, all of it in turn; 0: none."""
    device: Annotated[str, Field(pattern=DEVICE_PATTERN)] = "cpu"
    """What the mover drives: "cpu", or "cuda:" and the UUID of a GPU as `nvidia-smi -L` names it;
    several with commas: a mover each.
    Never an ordinal, which means something only under one process's CUDA_VISIBLE_DEVICES."""
    host_unpinned: bool = False
    """Leave host memory unregistered with the GPU's driver: slower copies, no locked memory."""
    copy_rate: Annotated[Size, Field(ge=0)] = ByteSize(0)
    """Bytes a second that restores, backups and copies between pools take at most, each of the
    three by itself; 0: whatever the bus does."""
    readers_dir: Path | None = None
    """Folder (mode 0750) of one more socket, where other users of its group may ask for figures,
    the tree and explanations, and change nothing."""
    access_log: Annotated[str, AfterValidator(_switch_or_folder)] = "off"
    """"off", "on" (in the runtime folder), or a folder (made with mode 0700) for the access log:
    one record a request, without its tokens."""
    access_log_size: Annotated[Size, Field(ge=MIB)] | None = None
    """What the access log may have of the disk; older files go. 64 MiB in the runtime folder, 1 GiB
    elsewhere."""
    metrics: str = ""
    """Where Prometheus finds counters: "127.0.0.1:PORT", or a file to be written every 15 s."""
    kv_events: str = ""
    """Address of the first scheduler's KV events, such as "tcp://127.0.0.1:5557"; empty: none are
    published. Each scheduler has three ports in a row: events, replay, HTTP. They name every token
    of every prompt that is cached: whoever can connect can read those."""
    kv_events_form: Form = "map"
    """"map" as SGLang since 0.5.20 encodes events, "array" as it did up to 0.5.18."""
    kv_events_union: str = ""
    """Address of one more stream, of all schedulers together, for viewers; empty: none."""
    kv_events_detokenizer: str = ""
    """URL that POST /detokenize of a stream's HTTP port is handed on to; empty: 404."""
    log_level: LogLevel = "info"
    log_format: LogFormat = "console"
    sessions_max: Annotated[int, Field(ge=1, le=POOLS_MAX)] = 256
    """Scheduler processes (connections to the session socket) at once."""
    look_us: Annotated[int, Field(ge=0, le=LOOK_US_MAX)] = SPIN_NS // 1000
    """Microseconds for which the daemon looks for the next question before it sleeps, while they
    come as close as that upon one another; more keeps a core for it, where there are many."""
    mover_silence_ms_max: Annotated[int, Field(ge=100, le=3_600_000)] = MOVER_SILENCE_MS_MAX
    """A mover that has copies to do and says nothing for so long is killed and replaced."""
    mover_start_ms_max: Annotated[int, Field(ge=100, le=3_600_000)] = MOVER_START_MS_MAX
    """The same for one that starts, or maps or unmaps memory: single steps of that are long."""

    @property
    def mover_options(self) -> tuple[str, ...]:
        """Flags of the mover that follow from the settings."""
        pinning = ("--unpinned",) if self.host_unpinned else ()
        rate = ("--limit", f"lane_bytes_per_s={int(self.copy_rate)}") if self.copy_rate else ()
        return (*pinning, *rate)

    @model_validator(mode="after")
    def _a_scrubber_has_something_to_compare(self) -> Self:
        if self.host_scrub and self.host_checksums == "off":
            raise ValueError(
                "host_scrub compares pages with their checksums: set host_checksums to kept or "
                "verified as well"
            )
        return self

    @model_validator(mode="after")
    def _kv_events_have_addresses(self) -> Self:
        for name in ("kv_events", "kv_events_union"):
            text: str = getattr(self, name)
            if text:
                try:
                    parse(text)
                except ValueError as error:
                    raise ValueError(f"setting {name}: {error}") from None
        return self

    @model_validator(mode="after")
    def _what_needs_kv_events_comes_with_them(self) -> Self:
        if not self.kv_events:
            for name in ("kv_events_union", "kv_events_detokenizer"):
                if getattr(self, name):
                    raise ValueError(
                        f"setting {name}: no KV events are published without kv_events, the "
                        f"address of the first scheduler's; set that as well, or leave {name} out"
                    )
        return self

    @model_validator(mode="after")
    def _tier_has_few_enough_segments(self) -> Self:
        count = -(-self.host_tier // self.segment)
        if count > SEGMENTS_MAX:
            raise ValueError(
                f"host_tier of {self.host_tier} bytes makes {count} segments of {self.segment} "
                f"bytes, at most {SEGMENTS_MAX} are possible; choose a larger segment"
            )
        return self


def load_settings(
    config: Path | None = None, flags: Mapping[str, object] | None = None
) -> Settings:
    """Read the settings. `flags` override the environment, which overrides the file.

    `config` falls back to `TREECORED_CONFIG`; without either there is no file. Values of None in
    `flags` count as not given. Raises `ConfigError`.
    """
    named = os.environ.get(CONFIG_VARIABLE)
    path = config or (Path(named) if named else None)
    given = {name: value for name, value in (flags or {}).items() if value is not None}
    _refuse_unknown_variables()
    try:
        return _settings_class(path)(**given)  # type: ignore[arg-type]
    except ValidationError as error:
        raise ConfigError(_sentence(error, path, given)) from None


def _refuse_unknown_variables() -> None:
    """A misspelled variable is an error like a misspelled line of the file, not a default.

    One of an engine's is none: commands run where the engines run, too.
    """
    for name in unknown(os.environ):
        known = ", ".join(sorted(DAEMON_VARIABLES))
        raise ConfigError(f"there is no setting for the variable {name}; known are {known}")


def _settings_class(path: Path | None) -> type[Settings]:
    """A Settings that also reads the file; the file is read here once to report its own errors."""
    if path is None:
        return Settings
    try:
        tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"the settings file {path} cannot be read: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"the settings file {path} is not TOML: {error}") from None

    class FileSettings(Settings):
        @classmethod
        def settings_customise_sources(
            cls,
            settings_cls: type[BaseSettings],
            init_settings: PydanticBaseSettingsSource,
            env_settings: PydanticBaseSettingsSource,
            dotenv_settings: PydanticBaseSettingsSource,
            file_secret_settings: PydanticBaseSettingsSource,
        ) -> tuple[PydanticBaseSettingsSource, ...]:
            del dotenv_settings, file_secret_settings
            return init_settings, env_settings, TomlConfigSettingsSource(settings_cls, path)

    return FileSettings


def _sentence(error: ValidationError, path: Path | None, flags: Mapping[str, object]) -> str:
    """The first problem in one sentence: which setting, from where, what is wrong with it."""
    problem = error.errors(include_url=False)[0]
    name = ".".join(str(part) for part in problem["loc"])
    if not name:
        return str(problem["msg"]).removeprefix("Value error, ")
    if name in flags:
        origin = "given as a flag"
    elif f"{PREFIX}{name}".upper() in os.environ:
        origin = f"from {PREFIX}{name.upper()}"
    else:
        origin = f"in {path}"
    if problem["type"] == "extra_forbidden":
        known = ", ".join(Settings.model_fields)
        return f"there is no setting {name!r} ({origin}); known are {known}"
    value = problem["input"]
    if name == "device":
        return f"setting device ({origin}) cannot be {value!r}: {DEVICE_HELP}"
    reason = str(problem["msg"]).removeprefix("Value error, ")
    return f"setting {name} ({origin}) cannot be {value!r}: {reason}"
