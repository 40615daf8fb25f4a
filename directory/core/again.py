"""What a pool's prompts were found to have, for when the very same prompt is asked for again.

Owns what one thin pool's last matches found. A request that waits is matched in every tick of its
scheduler; where nothing of its namespace has changed meanwhile the answer is what it was; and where
something has, its tokens need not be compared again as far as the node that was found, if that is
still there: a node's path never changes. It must never take one prompt for another: what counts is
that it is the same object, which is kept here and so is nobody else's.
"""

from __future__ import annotations

from typing import Final

import msgspec

from directory.core.ids import HOST, Place
from directory.core.limits import MIB
from directory.core.node import RESIDENT, Node, Residency, Space

AGAIN_BYTES_MAX: Final = 4 * MIB
"""Of the tokens that are kept for one pool. They are also what its lane remembers."""
AGAIN_BYTES_MIN: Final = 1_024
"""What is shorter comes in its message, and each time as another object."""


class Found(msgspec.Struct, gc=False):
    """All of a prompt that was anywhere: `node`, its last one, and the pool's pages (packed).

    `version`: the namespace's at that time. While it has that version the path has the very same
    residencies: `own`, in the pool (None: not noted yet), and `host`, at the host, whose last node
    is `at_host`.
    """

    tokens: bytes
    node: Node
    pages: bytes
    version: int
    own: list[Residency] | None = None
    host: list[Residency] = []
    at_host: Node | None = None

    def noted(self, place: Place) -> list[Residency]:
        """The path's residencies in the pool, last node first; walked to when asked first."""
        if self.own is not None:
            return self.own
        own: list[Residency] = []
        at = self.node
        while at.parent is not None:
            residency = at.here
            while residency is not None:
                if residency.place == place:
                    own.append(residency)
                elif residency.place == HOST:
                    self.host.append(residency)
                    self.at_host = self.at_host or at
                residency = residency.next
            at = at.parent
        self.own = own
        return own

    def pages_now(self, place: Place) -> bytes | None:
        """The path's pages in the pool by now (packed); None where it does not hold all of it."""
        held: list[bytes] = []
        at = self.node
        while at.parent is not None:
            residency = at.here
            while residency is not None and residency.place != place:
                residency = residency.next
            if residency is None or residency.state is not RESIDENT:
                return None
            held.append(residency.pages)
            at = at.parent
        held.reverse()
        return held[0] if len(held) == 1 else b"".join(held)


class Again:
    """The last matches of one pool, by the identity of their tokens; the oldest goes first."""

    __slots__ = ("_bytes_max", "_found", "_nbytes")

    def __init__(self, bytes_max: int = AGAIN_BYTES_MAX) -> None:
        self._bytes_max = bytes_max
        self._found: dict[int, Found] = {}
        self._nbytes = 0

    def find(self, tokens: bytes, space: Space) -> Found | None:
        """What these very tokens had; None where that is not known. It is what they have as long
        as the namespace has the `version` of then."""
        found = self._found.get(id(tokens))
        if found is None or found.tokens is not tokens:
            return None
        # Another namespace, or this one made anew, has another space.
        return found if found.node.space is space else None

    def keep(self, tokens: bytes, node: Node, pages: bytes) -> None:
        """Remember what was found now; nothing else is anywhere of the prompt."""
        length = len(tokens)
        if not AGAIN_BYTES_MIN <= length <= self._bytes_max:
            return
        self._forget(id(tokens))
        self._found[id(tokens)] = Found(tokens, node, pages, node.space.version)
        self._nbytes += length
        while self._nbytes > self._bytes_max:
            self._forget(next(iter(self._found)))

    def _forget(self, identity: int) -> None:
        found = self._found.pop(identity, None)
        if found is not None:
            self._nbytes -= len(found.tokens)

    def __len__(self) -> int:
        return len(self._found)

    def __repr__(self) -> str:
        return f"<Again {len(self)} prompts, {self._nbytes} bytes>"
