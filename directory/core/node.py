"""Tree nodes and their residencies: the data that `tree.Tree` alone mutates.

Owns no behaviour beyond reading itself. A node's edge is packed tokens, a whole number of pages;
children are keyed by the bytes of their first page. There can be a million nodes, so they are
small: Python's collector does not know them (the tree unties what refers to one another, see
`Tree.__del__`), and what most nodes have one of stands in the node (ADR 14).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, MutableMapping
from types import MappingProxyType
from typing import Final, NamedTuple, cast

import msgspec

from directory.core.ids import NodeId, Place
from directory.core.namespace import NamespaceKey
from directory.core.states import ResidencyState
from directory.core.tokens import unpack_pages

RESIDENT: Final = ResidencyState.RESIDENT
NOT_FILED: Final = -1


class Run(NamedTuple):
    """Consecutive pages of one span: pages [first, first + length) of the insert report."""

    span: int
    first: int
    length: int


class Residency(msgspec.Struct, gc=False, eq=False):
    """One node's pages at one place.

    `pages`: packed, one a page of the edge. `written`: timelines after which they may be read.
    `tick`: last use. `locks`: lease claims at or below. `children`: child nodes with a residency
    here. `next`: the node's residency at another place. `filed`: the key of its entry in the
    place's eviction order, which is not above its own (`eviction` mutates it). `span`, `first`,
    `more`: its runs, of which the first one is as long as the others leave it.
    """

    place: Place
    state: ResidencyState
    pages: bytes
    written: tuple[int, int]
    tick: int
    span: int = 0
    first: int = 0
    more: tuple[Run, ...] = ()
    locks: int = 0
    children: int = 0
    filed: int = NOT_FILED
    next: Residency | None = None

    @property
    def page_count(self) -> int:
        """Pages held."""
        return len(self.pages) // 4

    @property
    def runs(self) -> tuple[Run, ...]:
        """The spans behind the pages (of a pool; at the host, stamps of the journal)."""
        if not self.span:
            return ()
        length = len(self.pages) // 4
        for run in self.more:
            length -= run.length
        return (Run(self.span, self.first, length), *self.more)

    @runs.setter
    def runs(self, runs: tuple[Run, ...]) -> None:
        """Together they are as long as the pages are."""
        self.span, self.first = runs[0][:2] if runs else (0, 0)
        self.more = runs[1:]

    def __repr__(self) -> str:
        return (
            f"Residency({self.state}, pages={list(unpack_pages(self.pages))}, "
            f"locks={self.locks}, children={self.children})"
        )


class Space:
    """What the nodes of one namespace share. `page_key`: bytes of packed tokens a page.

    `page_bytes`: one host page; it consists of as many shards as its groups have ranks. `version`:
    another one whenever a path might be found otherwise than before (the tree's to count).
    """

    __slots__ = ("fingerprint", "key", "page_bytes", "page_key", "page_size", "ranks", "version")

    def __init__(
        self,
        fingerprint: bytes,
        key: NamespaceKey,
        page_size: int,
        page_bytes: int,
        ranks: int = 1,
    ) -> None:
        self.fingerprint = fingerprint
        self.key = key
        self.page_size = page_size
        self.page_bytes = page_bytes
        self.ranks = ranks
        self.page_key = page_size * key.unit_bytes
        self.version = 0


class RootedSpace(Space):
    """A namespace with its tree. The nodes know the space without its root: there is no circle."""

    __slots__ = ("root",)

    def __init__(
        self,
        fingerprint: bytes,
        key: NamespaceKey,
        page_size: int,
        page_bytes: int,
        ranks: int = 1,
    ) -> None:
        super().__init__(fingerprint, key, page_size, page_bytes, ranks)
        self.root = Node(0, None, b"", Space(fingerprint, key, page_size, page_bytes, ranks))


class Places(MutableMapping[Place, Residency]):
    """A node's residencies by place, in the order in which they came: a view, made when asked for.

    What has to be fast follows `Node.here` and `Residency.next` itself.
    """

    __slots__ = ("_node",)

    def __init__(self, node: Node) -> None:
        self._node = node

    def __getitem__(self, place: Place) -> Residency:
        return self._node.there(place)

    def __setitem__(self, place: Place, residency: Residency) -> None:
        assert residency.place == place
        self._node.attach(residency)

    def __delitem__(self, place: Place) -> None:
        self._node.detach(place)

    def __iter__(self) -> Iterator[Place]:
        at = self._node.here
        while at is not None:
            yield at.place
            at = at.next

    def __contains__(self, place: object) -> bool:
        return any(at == place for at in self)

    def __len__(self) -> int:
        return sum(1 for _ in self)


NO_CHILDREN: Final = cast("dict[bytes, Node]", MappingProxyType({}))
"""All leaves' children."""


class Node(msgspec.Struct, gc=False, eq=False):
    """A tree node. `ends`: lease claims and leases that end exactly here (they bar merging).

    `here`: the first of its residencies. `children` is changed by `hang` and `unhang`.
    """

    id: NodeId
    parent: Node | None
    edge: bytes
    space: Space
    children: dict[bytes, Node] = NO_CHILDREN
    here: Residency | None = None
    ends: int = 0

    @property
    def page_count(self) -> int:
        """Pages of the edge."""
        return len(self.edge) // self.space.page_key

    @property
    def places(self) -> Places:
        """Its residencies by place."""
        return Places(self)

    def at(self, place: Place) -> Residency | None:
        """Return the residency at a place, in whichever state, or None."""
        residency = self.here
        while residency is not None and residency.place != place:
            residency = residency.next
        return residency

    def there(self, place: Place) -> Residency:
        """Return the residency at a place; raises `KeyError` where there is none."""
        residency = self.here
        while residency is not None and residency.place != place:
            residency = residency.next
        if residency is None:
            raise KeyError(place)
        return residency

    def attach(self, residency: Residency) -> None:
        """Have one more residency, behind those that are there."""
        last = self.here
        if last is None:
            self.here = residency
            return
        while last.next is not None:
            last = last.next
        last.next = residency

    def detach(self, place: Place) -> None:
        """Have the one at a place no more; raises `KeyError` where there is none."""
        before, at = None, self.here
        while at is not None and at.place != place:
            before, at = at, at.next
        if at is None:
            raise KeyError(place)
        if before is None:
            self.here = at.next
        else:
            before.next = at.next
        at.next = None

    def resident(self, place: Place) -> Residency | None:
        """Return the residency at a place if its pages can be used, else None."""
        residency = self.here
        while residency is not None:
            if residency.place == place:
                return residency if residency.state is RESIDENT else None
            residency = residency.next
        return None

    def hang(self, key: bytes, child: Node) -> None:
        """Have a child under the first page of its edge, instead of the one that is there."""
        if self.children is NO_CHILDREN:
            self.children = {key: child}
        else:
            self.children[key] = child

    def unhang(self, key: bytes) -> None:
        """Have that child no more."""
        if len(self.children) == 1 and key in self.children:
            self.children = NO_CHILDREN
        else:
            del self.children[key]

    def path(self) -> list[Node]:
        """Return the nodes from the root's child down to this one."""
        nodes: list[Node] = []
        node: Node = self
        while node.parent is not None:
            nodes.append(node)
            node = node.parent
        nodes.reverse()
        return nodes

    def __repr__(self) -> str:
        where = " ".join(f"{place}:{r.state}" for place, r in sorted(self.places.items()))
        return f"Node({self.id}, pages={self.page_count}, children={len(self.children)}, {where})"


def untie(nodes: Iterable[Node]) -> None:
    """Parents and children name one another, and Python's collector does not look at them: have
    those that nobody else names go."""
    for node in nodes:
        node.children = NO_CHILDREN


Tap = Callable[[Node, Place, int], None]
"""Told by the tree of every node that becomes usable at a place (1) or no longer is (-1), while its
path still is what it was. Splits and merges are not told. It must change nothing."""
