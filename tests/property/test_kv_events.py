"""KV events against the tree: who replays the stream knows exactly what each scheduler has.

Strategy: the random histories of `history.History` (computing, splits, evictions, restores, copies
that end in any way, deaths, flushes), captured as the daemon does it and told to consumers that
know nothing but the wire: one keeps tiers apart, one forgets a block at any removal (as viewers
do), one reads the union. Records are handed on late, in odd portions, through a queue that is now
and then too small. Expected: the tree, page by page, hashed by a chain of this file's own.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from hashlib import sha256
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from directory.core.events import Mode
from directory.core.ids import HOST
from directory.core.limits import CLOSED_A_STEP_MAX
from directory.core.namespace import NamespaceKey
from directory.core.node import Node
from directory.core.tokens import unpack_pages
from directory.kvevents.capture import Capture
from directory.kvevents.records import decode, encode
from directory.kvevents.teller import Teller
from directory.kvevents.union import UNION
from directory.kvevents.wire import Form, encode_batch
from tests.property.history import History, Pick

MODES: tuple[Mode, ...] = ("thin", "mirrored")
KEYS = (
    NamespaceKey(),
    NamespaceKey(extra_key="tenant"),
    NamespaceKey(cache_salt="salt"),
    NamespaceKey(bigram=True),
)
"""Two and more of them have the same hashes."""
ARRAY_NAMES = {
    "BlockStored": (
        *("type", "block_hashes", "parent_block_hash", "token_ids", "block_size", "lora_id"),
        "medium",
    ),
    "BlockRemoved": ("type", "block_hashes", "medium"),
    "AllBlocksCleared": ("type",),
}
Blocks = dict[int, set[str]]


def hash_chain(tokens: Sequence[int], page_size: int, digest: bytes = b"") -> list[int]:
    """The published hashes of all whole pages of a prompt, by the rule in SGLang's sources."""
    found = []
    for at in range(0, len(tokens) // page_size * page_size, page_size):
        page = b"".join(token.to_bytes(4, "little") for token in tokens[at : at + page_size])
        digest = sha256(digest + page).digest()
        found.append(int.from_bytes(digest[:8], "big", signed=True))
    return found


def hashes_of(node: Node) -> list[int]:
    """The published hashes of a node's own pages."""
    salt = node.space.key.cache_salt
    digest = b"" if salt is None else sha256(b"sglang-cache-salt-v1\0" + salt.encode()).digest()
    path = unpack_pages(b"".join(above.edge for above in node.path()))  # any 32-bit numbers
    return hash_chain(path, node.space.page_key // 4, digest)[-node.page_count :]


class Consumer:
    """A reader of one stream, in either form."""

    def __init__(self, page_size: int) -> None:
        self.page_size = page_size
        self.tiers: Blocks = {}
        self.viewer: dict[int, str] = {}
        self.stored = 0

    def take(self, payload: bytes) -> None:
        """One batch."""
        _, events, rank = msgspec.msgpack.decode(payload)
        assert rank == 0
        for event in events:
            if isinstance(event, list):
                names = ARRAY_NAMES[event[0]]
                event = dict(zip(names, event, strict=True))
            self.hear(event.pop("type"), event.pop("medium", ""), event)

    def hear(self, kind: str, medium: str, fields: dict[str, Any]) -> None:
        """One event."""
        if kind == "AllBlocksCleared":
            self.tiers.clear()
            self.viewer.clear()
            return
        blocks: list[int] = fields["block_hashes"]
        assert blocks, "an event without blocks"
        if kind == "BlockRemoved":
            for block in blocks:
                assert medium in self.tiers[block], "removed from where it was not"
                self.tiers[block].discard(medium)
                self.viewer.pop(block, None)
                if not self.tiers[block]:
                    del self.tiers[block]
            return
        assert kind == "BlockStored"
        assert fields["block_size"] == self.page_size
        assert len(fields["token_ids"]) == len(blocks) * self.page_size
        parent = fields["parent_block_hash"]
        for block in blocks:
            assert parent is None or medium in self.tiers[parent], "a child before its parent"
            self.tiers.setdefault(block, set()).add(medium)
            self.viewer[block] = medium
            self.stored += 1
            parent = block


class UnionConsumer(Consumer):
    """A viewer of the union: one label a block."""

    def hear(self, kind: str, medium: str, fields: dict[str, Any]) -> None:
        """One event."""
        if kind == "AllBlocksCleared":
            self.viewer.clear()
        for block in fields.get("block_hashes", ()):
            if kind == "BlockRemoved":
                del self.viewer[block]
            else:
                self.viewer[block] = medium


class Watched:
    """A history whose tree is captured, and everybody who listens."""

    def __init__(
        self,
        page_size: int,
        host_pages: int,
        modes: list[Mode],
        form: Form,
        records_max: int,
        closed_a_step: int = CLOSED_A_STEP_MAX,
    ) -> None:
        self.history = History(page_size, host_pages, modes, closed_a_step)
        self.history.keys = KEYS
        directory = self.history.world.directory
        self.capture = Capture(directory.tree, directory.pools, records_max=records_max)
        directory.tree.tap = self.capture
        self.teller = Teller(union=True)
        self.form = form
        self.payloads: list[bytes] = []
        self.consumers: dict[str, Consumer] = {UNION: UnionConsumer(page_size)}

    def hand_on(self) -> None:
        """One message to the publisher, and what it publishes."""
        if self.capture.lost:
            self.capture.begin()
        self.capture.meet_pools()
        taken = self.capture.take()
        for instance, told in self.teller.take(decode(encode(taken))).items():
            consumer = self.consumers.setdefault(instance, Consumer(self.history.page_size))
            for batch in told:
                payload = encode_batch(batch, self.form, 0.0)
                self.payloads.append(payload)
                consumer.take(payload)

    def check(self) -> None:
        """Once everything was handed on, every consumer knows the tree."""
        self.hand_on()
        for _ in range(1_000):
            if not (self.capture.busy or self.capture.lost):
                break
            self.hand_on()
        else:
            pytest.fail("the queue never empties")
        directory = self.history.world.directory
        live = {pool.instance: pool for pool in directory.pools.values() if pool.live}
        union: dict[int, set[str]] = {}
        for instance, consumer in self.consumers.items():
            expected: Blocks = {}
            pool = live.get(instance)
            for node in directory.tree.nodes.values() if pool is not None else ():
                places = {pool.place: "GPU", HOST: "CPU_PINNED"} if pool is not None else {}
                for place, medium in places.items():
                    for block in hashes_of(node) if node.resident(place) else ():
                        expected.setdefault(block, set()).add(medium)
                        who = instance if place != HOST else "host"
                        union.setdefault(block, set()).add(f"{who}:{medium}")
            if instance != UNION:
                assert consumer.tiers == expected
                assert consumer.viewer.keys() == expected.keys()
                for block, medium in consumer.viewer.items():
                    assert medium in expected[block]
        if live and not self.history.world.ending:
            labels = {block: " ".join(sorted(who)) for block, who in union.items()}
            assert self.consumers[UNION].viewer == labels


def tell_of(pick: Pick, watched: Watched, steps: int, patience: int) -> None:
    """A random history, told while it happens: about once in `patience` steps."""
    history = watched.history
    choices: list[Callable[[Pick], None]] = [
        *[history.compute] * 5,
        *[history.look] * 4,
        *[history.grow] * 2,
        *[history.release] * 4,
        *[history.restore] * 3,
        *[history.evict] * 2,
        *[history.finish] * 6,
        history.carry_out,
        history.mishap,
        history.close_more,
    ]
    for _ in range(steps):
        choices[pick(len(choices))](pick)
        history.check()
        if pick(patience) == 0:
            watched.hand_on()
        if pick(2 * patience) == 0:
            watched.check()
    history.finish_all(lambda _: 0)
    watched.check()
    while history.world.ending:
        history.close_more(lambda _: 0)
    watched.check()


def storm(seed: int, form: Form, records_max: int, patience: int) -> Watched:
    """A long history from a seed."""
    pick = random.Random(seed).randrange
    modes = [MODES[pick(2)] for _ in range(1 + pick(3))]
    closed = (1, 2, CLOSED_A_STEP_MAX)[seed % 3]
    watched = Watched(1 + pick(4), (0, 6, 20, 400)[seed % 4], modes, form, records_max, closed)
    tell_of(pick, watched, 300, patience)
    return watched


@settings(max_examples=60)
@given(
    data=st.data(),
    page_size=st.integers(1, 4),
    host_pages=st.sampled_from([0, 5, 16, 400]),
    modes=st.lists(st.sampled_from(MODES), min_size=1, max_size=3),
    form=st.sampled_from(["map", "array"]),
    records_max=st.sampled_from([12, 10_000]),
)
def test_any_history_replayed_is_the_tree(
    data: st.DataObject,
    page_size: int,
    host_pages: int,
    modes: list[Mode],
    form: Form,
    records_max: int,
) -> None:
    def pick(n: int) -> int:
        return data.draw(st.integers(0, n - 1))

    watched = Watched(page_size, host_pages, modes, form, records_max)
    tell_of(pick, watched, steps=30, patience=4)


@pytest.mark.parametrize("seed", range(24))
def test_who_replays_the_stream_knows_the_tree(seed: int) -> None:
    form: Form = "map" if seed % 2 else "array"
    watched = storm(seed, form, records_max=10_000, patience=4)
    assert watched.capture.times_lost == 0
    assert any(consumer.stored for consumer in watched.consumers.values())


@pytest.mark.parametrize("seed", range(24, 36))
def test_a_queue_that_is_too_small_loses_nothing_in_the_end(seed: int) -> None:
    assert storm(seed, "map", records_max=12, patience=25).capture.times_lost > 0
