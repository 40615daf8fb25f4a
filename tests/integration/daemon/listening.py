"""A reader of KV events over the wire: subscribes, asks for replays, keeps what it is told.

Owns its sockets. It knows the format and nothing of the publisher.
"""

from __future__ import annotations

import json
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any, Self

import msgspec
import zmq

from tests.integration.daemon.support import DEADLINE_S, DaemonProcess, wait_until

Blocks = dict[int, set[str]]


def streams(daemon: DaemonProcess, *instances: str) -> dict[str, dict[str, str]]:
    """Where the streams of these instances are, once the daemon says so."""
    place = daemon.runtime_dir / "kv_events.json"

    def look() -> dict[str, dict[str, str]] | None:
        try:
            listing: dict[str, dict[str, str]] = json.loads(place.read_text())
        except FileNotFoundError:
            return None
        return listing if listing.keys() >= set(instances) else None

    found = wait_until(look)
    assert found is not None
    return found


def get(url: str, body: bytes | None = None, kind: str = "application/json") -> Any:
    """One request over HTTP, its answer from JSON."""
    request = urllib.request.Request(url, body, {"Content-Type": kind})
    with urllib.request.urlopen(request, timeout=DEADLINE_S) as reply:
        return json.loads(reply.read())


class Listener:
    """One subscriber. `blocks`: media by hash, as told; `batches`: (sequence, batch)."""

    def __init__(self, stream: dict[str, str]) -> None:
        self.stream = stream
        self.context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.socket = self.context.socket(zmq.SUB)
        self.socket.setsockopt(zmq.SUBSCRIBE, b"")
        self.socket.connect(stream["events"])
        self.batches: list[tuple[int, list[Any]]] = []
        self.blocks: Blocks = {}
        self.told = False
        """Everything was told once. What goes before that may never have been heard of: a stream
        goes on while who has just come waits to be told all of it."""

    def hear(self) -> list[Any]:
        """The next batch, taken in."""
        assert self.socket.poll(int(DEADLINE_S * 1000)), "no batch came"
        topic, sequence, payload = self.socket.recv_multipart()
        assert topic == b""
        batch: list[Any] = msgspec.msgpack.decode(payload)
        number = int.from_bytes(sequence, "big")
        if self.batches:
            assert number == self.batches[-1][0] + 1, "a batch is missing"
        self.batches.append((number, batch))
        take(self.blocks, batch, told=self.told)
        self.told |= any(event["type"] == "AllBlocksCleared" for event in batch[1])
        return batch

    def until(self, look: Callable[[Blocks], bool]) -> None:
        """Hear on until what is known is as it should be."""
        while not look(self.blocks):
            self.hear()

    def ask(self, first: int, *, frames: int = 4) -> list[tuple[int, list[Any]]]:
        """What is replayed from a sequence on; each reply has so many frames."""
        return replayed(self.context, self.stream, first, frames=frames)

    def close(self) -> None:
        """Leave."""
        self.context.destroy(linger=0)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def replayed(
    context: zmq.Context[zmq.Socket[bytes]], stream: dict[str, str], first: int, *, frames: int = 4
) -> list[tuple[int, list[Any]]]:
    """What a stream replays from a sequence on; each reply has so many frames."""
    asker = context.socket(zmq.DEALER)
    asker.setsockopt(zmq.LINGER, 0)
    asker.connect(stream["replay"])
    asker.send_multipart([b"", first.to_bytes(8, "big")])
    found: list[tuple[int, list[Any]]] = []
    with asker:
        while True:
            assert asker.poll(int(DEADLINE_S * 1000)), "the replay has no end"
            reply = asker.recv_multipart()
            assert len(reply) == frames
            assert reply[0] == b""
            sequence, payload = reply[-2:]
            if sequence == b"\xff" * 8:
                assert payload == b""
                return found
            found.append((int.from_bytes(sequence, "big"), msgspec.msgpack.decode(payload)))


def published(stream: dict[str, str]) -> Blocks:
    """What a stream would tell who asks for all of it, asked without subscribing. Whatever came to
    this has been published before."""
    blocks: Blocks = {}
    with zmq.Context() as context:
        for _, batch in replayed(context, stream, 0):
            take(blocks, batch)
    return blocks


def take(blocks: Blocks, batch: list[Any], *, told: bool = True) -> None:
    """Take in one batch in the map form. `told`: nothing unknown goes."""
    for event in batch[1]:
        match event["type"]:
            case "AllBlocksCleared":
                blocks.clear()
            case "BlockStored":
                for block in event["block_hashes"]:
                    blocks.setdefault(block, set()).add(event["medium"])
            case "BlockRemoved":
                for block in event["block_hashes"]:
                    if block not in blocks and not told:
                        continue
                    blocks[block].discard(event["medium"])
                    if not blocks[block]:
                        del blocks[block]


def publisher_of(daemon: DaemonProcess) -> int:
    """The process id of a daemon's publisher."""
    children = Path(f"/proc/{daemon.process.pid}/task/{daemon.process.pid}/children")
    for pid in children.read_text().split():
        if b"kv_main" in Path(f"/proc/{pid}/cmdline").read_bytes():
            return int(pid)
    raise AssertionError("there is no publisher")
