"""Addresses: where each scheduler's stream is, and what consumers are told about it.

Owns the arithmetic of ports and the settings of the publisher. A scheduler has three ports in a
row: events (PUB), replay (ROUTER) and HTTP.
"""

from __future__ import annotations

import re
from typing import Final, Literal

import msgspec

from directory.kvevents.wire import Form

PORTS_EACH: Final = 3
PORT_MAX: Final = 65_535
PATTERN: Final = r"^tcp://(\*|[A-Za-z0-9.-]+|\[[0-9A-Fa-f:.]+\]):([0-9]{1,5})$"


class Address(msgspec.Struct, frozen=True):
    """The ports of one stream."""

    host: str
    port: int

    @property
    def events(self) -> str:
        """Where events are published."""
        return f"tcp://{self.host}:{self.port}"

    @property
    def replay(self) -> str:
        """Where batches that were missed are asked for."""
        return f"tcp://{self.host}:{self.port + 1}"

    @property
    def http_port(self) -> int:
        """Where the stream is described."""
        return self.port + 2

    @property
    def bind_host(self) -> str:
        """The host as the socket library of HTTP takes it."""
        return "" if self.host == "*" else self.host.strip("[]")

    @property
    def http(self) -> str:
        """The same as a URL."""
        host = "127.0.0.1" if self.host == "*" else self.host
        return f"http://{host}:{self.http_port}"

    def at(self, slot: int) -> Address:
        """The address of the scheduler in a slot, counted from 0."""
        return Address(self.host, self.port + PORTS_EACH * slot)

    @property
    def possible(self) -> bool:
        """Whether there are such ports."""
        return self.port > 0 and self.http_port <= PORT_MAX


def parse(text: str) -> Address:
    """Read "tcp://HOST:PORT"; raises `ValueError` with a sentence."""
    found = re.match(PATTERN, text)
    if found is None:
        raise ValueError(f'{text!r} is no address such as "tcp://127.0.0.1:5557"')
    address = Address(found[1], int(found[2]))
    if not address.possible:
        raise ValueError(f"{text!r}: three ports in a row are used, between 1 and {PORT_MAX}")
    return address


class Options(msgspec.Struct, frozen=True):
    """What the publisher is started with. `feed`: where the daemon's records come from; `listing`:
    file that says where each scheduler's stream is; `parent`: process id of the daemon."""

    feed: str
    parent: int
    base: Address
    form: Form = "map"
    union: Address | None = None
    detokenizer: str | None = None
    listing: str | None = None
    software: str = ""
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    log_format: Literal["console", "json"] = "console"


def server_info(
    address: Address, page_size: int, instance: str, options: Options
) -> dict[str, object]:
    """Return what GET /server_info says of a stream.

    The host is "*" whatever it is bound to: viewers refuse another, and dial the host at which they
    found this. (Seen: radixview 0.1.0.)
    """
    return {
        "version": options.software,
        "instance": instance,
        "page_size": page_size,
        "dp_size": 1,
        "kv_events": {
            "publisher": "zmq",
            "endpoint_host": "*",
            "endpoint_port_base": address.port,
            "replay_endpoint_port_base": address.port + 1,
            "topic": "",
            "block_size": page_size,
            "dp_size": 1,
        },
    }
