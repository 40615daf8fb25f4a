"""A way: one path of a mirror, and the report that says each span on it.

Owns the arithmetic of one path as it was when this was made. It must not be asked for a report once
it is `outdated`.
"""

from __future__ import annotations

from typing import Final, NamedTuple

from directory.core.events import Insert
from directory.core.node import Node
from scheduler_shim.mirror import PLACE

BELOW_NODES_MAX: Final = 16
BELOW_BYTES_MAX: Final = 1 << 16
"""A way goes on below what is to be said by so many nodes, and so many bytes of tokens."""


class SpanEnd(NamedTuple):
    """Where a span's last page on the path lies: in which node, and how many pages of the path
    there are up to it. `fresh`: pages of the span itself; what lies above them is older. `written`:
    after which timeline values all of these may be read."""

    node: Node
    pages: int
    fresh: int
    written: tuple[int, int]


class Way:
    """The path down to a node. `spans`: those with pages on it, the topmost first; `slots`: the
    same, the topmost last, for whoever goes through them to take away."""

    __slots__ = ("_node", "_pages", "_tokens", "_version", "slots", "spans")

    def __init__(self, node: Node) -> None:
        path = node.path()
        there = [on.there(PLACE) for on in path]
        self._node = node
        self._version = node.space.version
        self._tokens = b"".join([on.edge for on in path])
        self._pages = b"".join([residency.pages for residency in there])
        self.spans: dict[int, SpanEnd] = {}
        pages = forward = current = 0
        for on, residency in zip(path, there, strict=True):
            forward = max(forward, residency.written[0])
            current = max(current, residency.written[1])
            for slot, _, length in residency.runs:
                pages += length
                above = self.spans.get(slot)
                fresh = length if above is None else length + above.fresh
                self.spans[slot] = SpanEnd(on, pages, fresh, (forward, current))
        self.slots = list(reversed(self.spans))

    @property
    def outdated(self) -> bool:
        """Whether a path of the namespace may have become another one."""
        return self._node.space.version != self._version

    def report(self, slot: int, value: int, *, thin: bool) -> Insert:
        """The whole path down to a span's last page; it leads to the span's last node. `value`: of
        the span's word."""
        node, pages, fresh, written = self.spans[slot]
        space = node.space
        return Insert(
            "republished",
            0,
            space.key,
            self._tokens[: pages * space.page_key],
            self._pages[: 4 * pages],
            slot,
            value,
            written,
            fresh_pages=-1 if thin else fresh,
        )

    @classmethod
    def beyond(cls, node: Node) -> Way:
        """The path down to a node and on from there, by any child: what lies below is to be said
        as well, and one way is not made for each part of it."""
        nbytes = 0
        for _ in range(BELOW_NODES_MAX):
            child = next(iter(node.children.values()), None)
            if child is None or child.resident(PLACE) is None:
                break
            nbytes += len(child.edge)
            if nbytes > BELOW_BYTES_MAX:
                break
            node = child
        return cls(node)

    def __repr__(self) -> str:
        return f"<Way of {len(self.spans)} spans to {self._node!r}>"
