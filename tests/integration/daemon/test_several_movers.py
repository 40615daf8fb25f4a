"""A daemon with a mover for each of two devices that do not reach one another."""

import os
import signal
from collections.abc import Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import msgspec
import pytest

from directory.core.actions import Matched, Restored
from directory.core.events import Mode
from directory.protocol.messages import Register
from tests.integration.daemon import support
from tests.integration.daemon.support import DaemonProcess, RawClient, wait_until
from transfer.ipc.memory import MemoryHandle

DEVICES = ("cpu:near", "cpu:far")
RESTORES_MAX = 10


class PlacedPool(support.Pool):
    """A pool that announces where it lies."""

    device = DEVICES[0]

    def register(
        self, instance: str, mode: Mode = "mirrored", world_size: int = 1, rank: int = 0
    ) -> Register:
        handles = tuple(MemoryHandle("memfd", a.nbytes, self.device) for a in self.allocations)
        said = super().register(instance, mode, world_size, rank)
        return msgspec.structs.replace(said, handles=msgspec.msgpack.encode(handles))


@pytest.fixture
def clients(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[RawClient]]:
    """One on each device."""
    config = tmp_path / "treecored.toml"
    config.write_text(f'device = "{",".join(DEVICES)}"\n', encoding="ascii")
    monkeypatch.setattr(support, "Pool", PlacedPool)
    with ExitStack() as stack:
        daemon = stack.enter_context(DaemonProcess(tmp_path / "rt", "--config", str(config)))
        clients = []
        for device in DEVICES:
            monkeypatch.setattr(PlacedPool, "device", device)
            clients.append(stack.enter_context(RawClient(daemon.runtime_dir, device)))
        yield clients


def publish(client: RawClient, first_token: int, pages: list[int]) -> range:
    """Write pages and publish them; returns their tokens."""
    tokens = range(first_token, first_token + support.PAGE_SIZE * len(pages))
    for page in pages:
        client.pool_memory.write(page, bytes([1 + page % 255]) + b"content")
    client.insert(tokens, pages)
    return tokens


def backed_up(client: RawClient, pages: int) -> bool:
    """Whether so many pages are in the host tier."""
    return client.stats().get("pages_backed_up", 0) >= pages


def restore(client: RawClient, tokens: range, targets: list[int]) -> Restored:
    """Match and restore a whole path."""
    matched = client.match(tokens)
    assert isinstance(matched, Matched)
    assert matched.restorable_pages == len(targets)
    restored = client.restore(matched.receipt, 0, targets)
    assert isinstance(restored, Restored)
    return restored


def test_what_one_gpu_computed_reaches_the_other_through_the_host(clients: list[RawClient]) -> None:
    near, far = clients
    for turn, (source, target) in enumerate(((near, far), (far, near)), 1):
        tokens = publish(source, 10_000 * turn, [0, 1, 2])
        wait_until(partial(backed_up, near, 3 * turn))
        landed = restore(target, tokens, [7, 8, 9])
        assert (landed.landed, landed.host_pages, landed.peer_pages) == (True, 3, 0)
        assert [target.pool_memory.read(page) for page in (7, 8, 9)] == [
            source.pool_memory.read(page) for page in (0, 1, 2)
        ]
    assert near.stats()["daemon_copies_void"] >= 2, "it was tried between the pools, too"


def test_when_one_mover_dies_all_are_replaced_and_serve_again(clients: list[RawClient]) -> None:
    near, far = clients
    tokens = publish(near, 0, [0, 1])
    wait_until(partial(backed_up, near, 2))
    first = near.stats()["daemon_mover_pid"]
    os.kill(first, signal.SIGKILL)
    wait_until(lambda: near.stats()["daemon_mover_pid"] not in (0, first))
    # A copy that was with those that died is lost, and none waits long for those that start.
    landed = restore(far, tokens, [4, 5])
    for _ in range(RESTORES_MAX):
        if landed.landed:
            break
        landed = restore(far, tokens, [4, 5])
    assert (landed.landed, landed.host_pages) == (True, 2)
    assert near.stats()["daemon_movers_lost"] == 1
