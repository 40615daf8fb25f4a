"""The daemon's ear: notes which nodes came to which place and which went, as records.

Owns the queue of records, its bound, and what the reader knows already. It is called by the tree
in the middle of an event, so it does no more there than walk up to the nearest node that was told
before. It must never change the tree. When the queue is full it drops everything and says so
(`lost`): its owner then calls `begin`, and what is there is told anew, a few nodes at a time.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from hashlib import blake2b
from itertools import takewhile
from typing import Final

from directory.core import limits
from directory.core.ids import NodeId, Place, PoolId, is_pool
from directory.core.namespace import NamespaceKey
from directory.core.node import Node, Space
from directory.core.place import PoolState
from directory.core.tree import Tree
from directory.kvevents.records import (
    AnyRecord,
    Begin,
    Changed,
    Closed,
    Forget,
    Opened,
    SpaceNamed,
    Whole,
    portion,
    size_of,
)

DROPPED_A_STEP: Final = 64
"""Records of a queue that was given up, let go of at once: a full one takes 8 ms."""
FORGET_ABOVE: Final = 4_096
"""Names that may be kept for nothing, beside as many as there are in use."""


class Capture:
    """A tap of one tree (`node.Tap`). `lost`: nothing is noted until `begin`.

    `pools`: the directory's, by id. `records_max`, `bytes_max`: bounds of the queue.
    """

    def __init__(
        self,
        tree: Tree,
        pools: Mapping[PoolId, PoolState],
        *,
        records_max: int = limits.KV_EVENTS_RECORDS_MAX,
        bytes_max: int = limits.KV_EVENTS_QUEUE_BYTES_MAX,
    ) -> None:
        self.lost = True
        self.times_lost = 0
        self._tree = tree
        self._pools = pools
        self._records_max = records_max
        self._bytes_max = bytes_max
        self._records: list[AnyRecord] = []
        self._dropped: list[AnyRecord] = []
        """What is told no more, until there is time to let go of it."""
        self._bytes = 0
        self._walk: Iterator[NodeId] | None = None
        self._told: set[NodeId] = set()
        self._walked_to: NodeId = 0
        self._known: set[NodeId] = set()
        self._open: set[PoolId] = set()
        self._families: dict[bytes, int] = {}
        self._spaces: dict[tuple[bytes, NamespaceKey], int] = {}
        self._last_space = 0

    @property
    def busy(self) -> bool:
        """Whether there is something to hand on now, or left to let go of."""
        return bool(self._records or self._dropped) or self._walk is not None

    @property
    def walking(self) -> bool:
        """Whether everything is being told anew, which may take long."""
        return self._walk is not None

    @property
    def crowded(self) -> bool:
        """Whether the queue is at least half full: it should be emptied even at a busy time."""
        return 2 * len(self._records) > self._records_max or 2 * self._bytes > self._bytes_max

    def __call__(self, node: Node, place: Place, sign: int) -> None:
        """A node became resident at a place (1) or is no longer (-1)."""
        if self._dropped:
            del self._dropped[-DROPPED_A_STEP:]
        if self.lost:
            return
        self._note(node, place, here=sign > 0)
        if len(self._records) > self._records_max or self._bytes > self._bytes_max:
            self.lose()

    def lose(self) -> None:
        """Drop everything; the reader must be told anew."""
        self.lost = True
        self.times_lost += 1
        self._empty()

    def begin(self) -> None:
        """Begin to tell everything; `take` hands on a part at a time."""
        self._empty()
        self.lost = False
        self._records.append(Begin())
        self.meet_pools()
        self._walked_to = 0
        self._walk_on()

    def meet_pools(self) -> None:
        """See which pools have come and gone. (A pool that never has a page is not heard of.)"""
        if self.lost:
            return
        for place in [*self._open]:
            self._meet(place)
        for place in self._pools:
            self._meet(place)

    def take(self) -> list[AnyRecord]:
        """Return the records of one message, oldest first; they are off the queue."""
        del self._dropped[-DROPPED_A_STEP:]
        self._step()
        count = portion(self._records)
        taken = self._records[:count]
        del self._records[:count]
        self._bytes -= sum(size_of(record) for record in taken)
        if not self._records:
            self._forget()
        return taken

    def put_back(self, taken: list[AnyRecord]) -> None:
        """Nobody took them after all."""
        self._records[:0] = taken
        self._bytes += sum(size_of(record) for record in taken)

    # Private.

    def _empty(self) -> None:
        self._dropped += self._records
        self._records = []
        self._bytes = 0
        self._walk = None
        self._told.clear()
        self._known.clear()
        self._open.clear()
        self._spaces.clear()

    def _meet(self, place: PoolId) -> None:
        pool = self._pools.get(place)
        live = pool is not None and pool.live
        if live == (place in self._open):
            return
        if pool is None or not live:
            self._open.discard(place)
            self._records.append(Closed(place))
            return
        self._open.add(place)
        family = self._family(pool.fingerprint)
        self._records.append(Opened(place, pool.instance, family, pool.page_size))

    def _note(self, node: Node, place: Place, *, here: bool) -> None:
        if is_pool(place):
            self._meet(place)
        known = self._known
        above: list[tuple[NodeId, bytes]] = []
        at = node.parent
        while at is not None and at.parent is not None and at.id not in known:
            above.append((at.id, at.edge))
            known.add(at.id)
            self._bytes += len(at.edge)
            at = at.parent
        above.reverse()
        base = 0 if at is None else at.id
        known.add(node.id)
        self._bytes += len(node.edge)
        space = self._spaces.get((node.space.fingerprint, node.space.key)) or self._name(node.space)
        self._records.append(Changed(space, place, here, node.id, base, tuple(above), node.edge))

    def _name(self, space: Space) -> int:
        self._last_space += 1
        number = self._spaces[space.fingerprint, space.key] = self._last_space
        adapter = space.key.adapter
        self._records.append(
            SpaceNamed(
                number,
                self._family(space.fingerprint),
                space.page_size,
                space.key.unit_bytes,
                space.key.bigram,
                space.key.cache_salt,
                None if adapter is None else (adapter.id, adapter.version),
            )
        )
        return number

    def _family(self, fingerprint: bytes) -> int:
        digest = blake2b(fingerprint, digest_size=16).digest()
        return self._families.setdefault(digest, len(self._families) + 1)

    def _walk_on(self) -> None:
        """Walk over the nodes that are newer than those of the walk before."""
        newer = list(takewhile(lambda node: node > self._walked_to, reversed(self._tree.nodes)))
        newer.reverse()
        self._walk = iter(newer) if newer else None
        if newer:
            self._walked_to = newer[-1]
        else:
            self._told.clear()
            self._records.append(Whole())

    def _step(self) -> None:
        """Tell of a few more nodes, as they are now."""
        for _ in range(limits.KV_EVENTS_NODES_A_STEP):
            if self._walk is None or self.crowded:
                return
            node_id = next(self._walk, None)
            if node_id is None:
                # A node that was split before its turn has left its upper half under a new id.
                self._walk_on()
                continue
            node = self._tree.nodes.get(node_id)
            for above in [] if node is None else node.path():
                if above.id not in self._told:
                    self._tell(above)

    def _tell(self, node: Node) -> None:
        self._told.add(node.id)
        for place in node.places:
            if node.resident(place) is not None:
                # Not as a change: the walk keeps to its own pace, and never loses what it tells.
                self._note(node, place, here=True)

    def _forget(self) -> None:
        nodes, spaces = self._tree.nodes, self._tree.spaces
        if len(self._known) <= 2 * len(nodes) + FORGET_ABOVE and (
            len(self._spaces) <= 2 * len(spaces) + FORGET_ABOVE
        ):
            return
        gone = self._known - nodes.keys()
        self._known -= gone
        unused = [key for key in self._spaces if key not in spaces]
        numbers = tuple(self._spaces.pop(key) for key in unused)
        self._records.append(Forget(tuple(gone), numbers))

    def __repr__(self) -> str:
        return f"<Capture {len(self._records)} records, lost={self.lost}>"
