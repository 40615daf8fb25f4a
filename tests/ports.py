"""Ports for tests that must name theirs before anybody listens there.

Owns the reservations: a block of ports belongs to one process until that ends, so tests that run at
once, or one after the other, never meet. Blocks lie below those that the kernel gives to whoever
asks for any port.
"""

import os
import socket
from typing import Final

FIRST: Final = 20_000
BLOCKS: Final = 375
BLOCK: Final = 32
"""Ports of a block; more in a row cannot be had."""

_reserved: list[socket.socket] = []


def free_ports(count: int) -> int:
    """The first of so many ports in a row that nobody has, and that no other test is given."""
    assert count <= BLOCK
    # Each process looks from another place on, so that few have to look twice.
    for number in range(BLOCKS):
        base = FIRST + BLOCK * ((os.getpid() * 16 + number) % BLOCKS)
        guard = socket.socket(socket.AF_UNIX)
        try:
            guard.bind(f"\0treecored-tests-ports-{base}")
        except OSError:
            guard.close()  # another test's
            continue
        _reserved.append(guard)  # until this process ends
        if all(_is_free(port) for port in range(base, base + count)):
            return base
    raise AssertionError("no ports are free")


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True
