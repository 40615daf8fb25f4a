"""What can be known before anything is started: that the settings cannot work on this machine.

Owns the questions and their sentences. It starts nothing and keeps nothing; it is asked while the
lock of the runtime folder is held, so what an earlier daemon had is about to be free. What is sure
to fail stops the start with the cure, what may work is a warning.
"""

from __future__ import annotations

import errno
import importlib.util
import resource
import socket
import time
from pathlib import Path
from typing import Final

import structlog

from directory.core.limits import MIB
from directory.daemon.config import Settings
from directory.daemon.memory import available_bytes, obtainable_bytes
from directory.daemon.runtime import StartError
from directory.daemon.tier_folder import bytes_there, defaults
from directory.kvevents.addresses import PORTS_EACH, Address, parse

DESCRIPTORS_PER_SEGMENT: Final = 3
"""At most, in a mover that opens the tier: one as it came, one to keep, one that Python's mmap has
for itself. With fewer it depends on how fast it reads."""
DESCRIPTORS_BESIDE: Final = 64
"""What a daemon without a scheduler has open beside its host tier, with some to spare."""
PORTS_DEADLINE_S: Final = 2.0
"""How long a start waits for the publisher of a dead daemon: it dies with it."""
PORTS_AGAIN_S: Final = 0.02
GPU_PREFIX: Final = "cuda:"
EVERY_HOST: Final = ("*", "0.0.0.0", "[::]")
NOT_HERE: Final = (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT)

log = structlog.get_logger("daemon")


def look(settings: Settings, runtime_dir: Path) -> None:
    """Look at everything. Raises `StartError`."""
    gpus = [name for name in settings.device.split(",") if name.startswith(GPU_PREFIX)]
    if gpus and not has_bindings():
        raise StartError("device cuda needs the CUDA bindings: pip install 'treecored[cuda]'")
    _descriptors(settings)
    _memory(settings, runtime_dir, pinned=bool(gpus) and not settings.host_unpinned)
    _ports(settings)


def has_bindings() -> bool:
    """Whether a mover could import the driver's bindings; this process must not."""
    found = importlib.util.find_spec("cuda")
    folders = (found.submodule_search_locations if found is not None else None) or ()
    return any((Path(folder) / "bindings").is_dir() for folder in folders)


def _descriptors(settings: Settings) -> None:
    """Segments of the host tier are descriptors, here and in each mover."""
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    segments = -(-settings.host_tier // settings.segment)
    needed = DESCRIPTORS_PER_SEGMENT * segments + DESCRIPTORS_BESIDE
    if 0 <= limit < needed:
        raise StartError(
            f"segment: a host tier of {settings.host_tier} bytes in segments of {settings.segment} "
            f"takes {needed} open files, {limit} are allowed; choose a "
            "larger segment, or raise the limit (ulimit -Hn, LimitNOFILE=)"
        )


def _memory(settings: Settings, runtime_dir: Path, *, pinned: bool) -> None:
    """Whether the host tier fits into memory, what an earlier one has of it counted as its own."""
    wanted = int(settings.host_tier)
    places = [settings.host_dir] if settings.host_dir is not None else defaults(runtime_dir)
    own = sum(bytes_there(place) for place in places)
    most = obtainable_bytes()
    if pinned and most is not None and wanted > most + own:
        raise StartError(
            f"host_tier: {wanted // MIB} MiB would be pinned at once, and no more than "
            f"{(most + own) // MIB} MiB of memory can be had; choose a smaller host_tier, or "
            "host_unpinned"
        )
    available = available_bytes()
    if available is not None and wanted > available + own:
        log.warning(
            "the host tier is larger than the memory that is available: the kernel may end this "
            "daemon or others as it fills; choose a smaller host_tier",
            host_tier_mib=wanted // MIB,
            available_mib=(available + own) // MIB,
        )


def _ports(settings: Settings) -> None:
    """Ports of the first scheduler's stream and of the union's: free, and not the same."""
    if not settings.kv_events:
        return
    first = parse(settings.kv_events)
    give_up = time.monotonic() + PORTS_DEADLINE_S
    for port in range(first.port, first.port + PORTS_EACH):
        _try_port("kv_events", first, port, give_up)
    if settings.kv_events_union:
        union = parse(settings.kv_events_union)
        if abs(union.port - first.port) < PORTS_EACH and _meet(first.host, union.host):
            raise StartError(
                f"kv_events_union: {union.events} and kv_events {first.events} meet: a stream "
                f"takes {PORTS_EACH} ports in a row"
            )
        for port in range(union.port, union.port + PORTS_EACH):
            _try_port("kv_events_union", union, port, give_up)


def _try_port(name: str, address: Address, port: int, give_up: float) -> None:
    family = socket.AF_INET6 if address.host.startswith("[") else socket.AF_INET
    host = address.bind_host or "0.0.0.0"
    try:
        place = socket.getaddrinfo(host, port, family, socket.SOCK_STREAM)[0][4]
    except OSError:
        return  # such as the name of an interface: the publisher knows those
    while True:
        try:
            with socket.socket(family, socket.SOCK_STREAM) as probe:
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                probe.bind(place)
        except OSError as error:
            if error.errno != errno.EADDRINUSE or time.monotonic() >= give_up:
                cure = f"a stream takes {PORTS_EACH} ports in a row, choose others"
                if error.errno in NOT_HERE:
                    cure = f"choose another host: this machine does not have {address.host}"
                raise StartError(
                    f"{name}: tcp://{address.host}:{port} cannot be had: {error.strerror}; {cure}"
                ) from None
            time.sleep(PORTS_AGAIN_S)
        else:
            return


def _meet(one: str, other: str) -> bool:
    """Whether two hosts of this machine cannot both have a port, as far as can be told."""
    if one == other or one in EVERY_HOST or other in EVERY_HOST:
        return True
    return bool(_numbers(one) & _numbers(other))


def _numbers(host: str) -> set[str]:
    """The addresses that a host stands for; none where only the publisher can tell."""
    try:
        return {str(found[4][0]) for found in socket.getaddrinfo(host.strip("[]"), None)}
    except OSError:
        return set()
