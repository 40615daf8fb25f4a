"""Recovery: a host tier that outlived its daemon is taken up again from its journal.

Owns the reading: which pages of the logs are valid, and the tree that they make. A page counts if
a whole record names it, the word of its slot is the record's stamp, and its parent counts. What
else the records name is dropped and its slots are invalidated. It believes nothing that the logs
say about sizes: a slot must lie in the tier as it is now. It never looks at the pages' bytes.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby
from typing import NamedTuple

from directory.core.errors import TreecoredError
from directory.core.host import HostSlots
from directory.core.ids import HOST
from directory.core.node import Node, Run, Space
from directory.core.place import HostState
from directory.core.records import Numbered, PagesRecord, SlotWord, SpaceRecord, read_log
from directory.core.tokens import pack_pages, unpack_pages
from directory.core.tree import Tree

Page = tuple[int, int]
"""Slot and stamp: no two pages ever have the same."""
ROOT: Page = (0, 0)


class Chain(NamedTuple):
    """Valid pages that follow one another, as one record names them."""

    seq: int
    space: SpaceRecord
    stamp: int
    parent: Page
    slots: Sequence[int]
    tokens: bytes


class Found(NamedTuple):
    """What a tier's logs say. `seq`: the highest number; `lost`: numbers that no record has."""

    chains: list[Chain]
    seq: int
    lost: int


class Outcome(NamedTuple):
    """`pages`: taken up again; `dropped`: slots (packed) of valid pages that could not be."""

    pages: int
    dropped: bytes


def find(logs: Iterable[bytes], word: SlotWord) -> Found:
    """Read logs, the older first, and keep what the slots' words confirm."""
    chains: list[Chain] = []
    seen: set[int] = set()
    last = lost = 0
    for log in logs:
        records = list(read_log(log))
        if not records:
            continue
        lost += records[-1].seq - records[0].seq + 1 - len(records)
        last = max(last, records[-1].seq)
        spaces = {r.record.number: r.record for r in records if isinstance(r.record, SpaceRecord)}
        for numbered in records:
            chains += _valid(numbered, spaces, word, seen)
    return Found(chains, last, max(0, lost))


def _valid(
    numbered: Numbered, spaces: dict[int, SpaceRecord], word: SlotWord, seen: set[int]
) -> Iterator[Chain]:
    """Cut a record into runs of pages that are valid and that no record has named before."""
    record = numbered.record
    if not isinstance(record, PagesRecord):
        return
    space = spaces.get(record.space)
    if space is None or not _sound(record, space):
        return
    slots, stamp = unpack_pages(record.slots), record.stamp
    key = space.page_size * space.key.unit_bytes
    begin = 0
    for at in range(len(slots) + 1):
        if at < len(slots):
            slot = slots[at]
            if word(slot) == stamp and slot not in seen:
                seen.add(slot)
                continue
        if begin < at:
            parent = (record.parent_slot, record.parent_stamp)
            if begin:
                parent = (slots[begin - 1], stamp)
            tokens = record.tokens[begin * key : at * key]
            yield Chain(numbered.seq, space, stamp, parent, slots[begin:at], tokens)
        begin = at + 1


def _sound(record: PagesRecord, space: SpaceRecord) -> bool:
    """Whether a record can be meant; one that was written by us always is."""
    try:
        space.key.check()
    except TreecoredError:
        return False
    count, uneven = divmod(len(record.slots), 4)
    return (
        space.page_size > 0
        and space.page_bytes > 0
        and space.ranks > 0
        and record.stamp > 0
        and count > 0
        and not uneven
        and len(record.tokens) == count * space.page_size * space.key.unit_bytes
    )


class Builder:
    """Builds the tree of the valid pages. `sizes`: bytes that each segment of the tier has."""

    def __init__(self, tree: Tree, host: HostState, slots: HostSlots, sizes: Sequence[int]) -> None:
        self._tree = tree
        self._host = host
        self._slots = slots
        self._sizes = sizes
        self._page_bytes: dict[int, int] = {}
        self._room: dict[tuple[int, int], int] = {}
        self._held: list[int] = []

    def build(self, found: Found) -> Outcome:
        """Publish every chain whose ancestors are there, root side first."""
        below: dict[Page, list[Chain]] = {}
        for chain in found.chains:
            below.setdefault(chain.parent, []).append(chain)
        wanted = sum(len(chain.slots) for chain in found.chains)
        todo: list[tuple[Node | None, Chain]] = [(None, c) for c in below.pop(ROOT, [])]
        while todo:
            above, chain = todo.pop()
            for node, page in self._hang(above, chain, below):
                todo += [(node, child) for child in below.pop(page, [])]
        for segment, taken in groupby(sorted(self._held), lambda slot: slot >> 16):
            self._slots.adopt(segment, self._page_bytes[segment], list(taken))
        for space in list(self._tree.spaces.values()):
            if not space.root.children:
                self._tree.prune(space.root)
        self._host.tick = found.seq
        held = set(self._held)
        chains = found.chains if len(held) < wanted else []
        dropped = [slot for chain in chains for slot in chain.slots if slot not in held]
        return Outcome(len(held), pack_pages(dropped))

    def _hang(
        self, above: Node | None, chain: Chain, below: dict[Page, list[Chain]]
    ) -> Iterator[tuple[Node, Page]]:
        """Hang a chain below a node, cut where others branch off; yields nodes with their ends."""
        node = self._parent(above, chain)
        if node is None:
            return
        key, stamp = node.space.page_key, chain.stamp
        if chain.tokens[:key] in node.children:
            return  # the same page twice: one of them is as good as the other
        last = self._fitting(chain)
        begin = 0
        for end, slot in enumerate(chain.slots[:last], 1):
            if end < last and (slot, stamp) not in below:
                continue
            node = self._tree.add_leaf(node, chain.tokens[begin * key : end * key])
            slots = chain.slots[begin:end]
            run = Run(stamp, begin, len(slots))
            self._tree.publish(node, HOST, pack_pages(slots), (run,), (0, 0), chain.seq)
            self._held.extend(slots)
            yield node, (slot, stamp)
            begin = end

    def _parent(self, above: Node | None, chain: Chain) -> Node | None:
        space = chain.space
        if above is None:
            try:
                found = self._tree.space(
                    space.fingerprint, space.key, space.page_size, space.page_bytes, space.ranks
                )
            except TreecoredError:
                return None
            return found.root if _same(found, space) else None
        return above if _same(above.space, space) else None

    def _fitting(self, chain: Chain) -> int:
        """How many of a chain's first slots lie in the tier, in segments of their page size."""
        room, size = self._room, chain.space.page_bytes
        for at, slot in enumerate(chain.slots):
            limit = room.get((slot >> 16, size))
            if limit is None:
                limit = self._measure(slot >> 16, size)
            if slot & 0xFFFF >= limit:
                return at
        return len(chain.slots)

    def _measure(self, segment: int, page_bytes: int) -> int:
        """Slots that a segment has for a page size: none if it is another size's already."""
        limit = 0
        known = segment < len(self._sizes)
        if known and self._page_bytes.setdefault(segment, page_bytes) == page_bytes:
            there = self._sizes[segment] // page_bytes
            limit = min(there, self._slots.slots_in(page_bytes, segment))
        self._room[segment, page_bytes] = limit
        return limit


def _same(space: Space, record: SpaceRecord) -> bool:
    return (space.fingerprint, space.key, space.page_size, space.page_bytes, space.ranks) == (
        record.fingerprint,
        record.key,
        record.page_size,
        record.page_bytes,
        record.ranks,
    )
