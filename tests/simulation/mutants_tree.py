"""Deliberate bugs of the core's tree: shape, locks, orders, token comparison, namespaces.

Owns the wrong functions. Each wraps the real one and spoils a single thing, so that it stays the
same bug when the code around it changes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

from directory.core import eviction as core_eviction
from directory.core import tree as core_tree
from directory.core.ids import HOST, Place
from directory.core.namespace import NamespaceKey
from directory.core.node import Node, Residency
from directory.core.states import ResidencyState
from directory.core.tree import Tree
from tests.simulation.mutants_seams import Call, Mutant, Patch, seam

# Tree.


@seam(Tree, "split")
def split_without_locks(original: Call) -> Call:
    def split(self: Tree, node: Node, pages: int) -> Node:
        upper: Node = original(self, node, pages)
        for place, half in upper.places.items():
            if half.locks and half.state is ResidencyState.RESIDENT:
                self.places[place].count(upper, 0, -half.page_count)
            half.locks = 0
        return upper

    return split


@seam(Tree, "split")
def split_at_the_wrong_end(original: Call) -> Call:
    def split(self: Tree, node: Node, pages: int) -> Node:
        upper: Node = original(self, node, pages)
        for place, half in upper.places.items():
            lower = node.places[place]
            whole = half.pages + lower.pages
            half.pages, lower.pages = whole[len(lower.pages) :], whole[: len(lower.pages)]
        return upper

    return split


@seam(Tree, "merge")
def merge_over_leases(original: Call) -> Call:
    def merge(self: Tree, node: Node) -> None:
        child = next(iter(node.children.values()), None)
        if child is None or not node.ends:
            original(self, node)
            return
        ends, locks = node.ends, {place: node.places[place].locks for place in node.places}
        node.ends = 0
        for place in node.places.keys() & child.places.keys():
            node.places[place].locks = child.places[place].locks
        original(self, node)
        if node.id in self.nodes:
            node.ends = ends
            for place, count in locks.items():
                node.places[place].locks = count

    return merge


@seam(Tree, "merge")
def merge_to_the_earlier_fence(original: Call) -> Call:
    def merge(self: Tree, node: Node) -> None:
        child = next(iter(node.children.values()), None)
        before = {place: residency.written for place, residency in node.places.items()}
        original(self, node)
        if child is not None and node.parent is not None and node.id not in self.nodes:
            for place, written in before.items():
                child.places[place].written = min(written, child.places[place].written)

    return merge


@seam(Tree, "prune")
def prune_what_drains(original: Call) -> Call:
    def prune(self: Tree, node: Node) -> None:
        states = {residency.state for residency in node.places.values()}
        if node.parent is None or node.children or states != {ResidencyState.DRAINING}:
            original(self, node)
            return
        node.parent.unhang(node.edge[: node.space.page_key])
        del self.nodes[node.id]
        original(self, node.parent)

    return prune


@seam(core_eviction, "evictable")
def evictable_though_leased(original: Call) -> Call:
    def evictable(residency: Residency) -> bool:
        locks, residency.locks = residency.locks, 0
        try:
            return bool(original(residency))
        finally:
            residency.locks = locks

    return evictable


@seam(core_eviction, "rank")
def rank_the_other_way(original: Call) -> Call:
    def rank(node: Node, place: Place) -> int:
        right: int = original(node, place)
        return 1 - right if place == HOST else right

    return rank


@seam(core_tree, "common_pages")
def common_pages_uncompared(original: Call) -> Call:
    def common_pages(edge: bytes, tokens: bytes, position: int, end: int, page: int) -> int:
        return min(len(edge), end - position) // page

    return common_pages


# Namespaces.


def _without_names(key: NamespaceKey) -> NamespaceKey:
    return NamespaceKey(key.weight_epoch, bigram=key.bigram, wide=key.wide)


def _without_empty_salt(key: NamespaceKey) -> NamespaceKey:
    salt = key.cache_salt or None
    return NamespaceKey(key.weight_epoch, salt, key.extra_key, key.adapter, key.bigram, key.wide)


def _without_epoch(key: NamespaceKey) -> NamespaceKey:
    return NamespaceKey(0, key.cache_salt, key.extra_key, key.adapter, key.bigram, key.wide)


def _spaces_by(narrow: Callable[[NamespaceKey], NamespaceKey]) -> tuple[Patch, ...]:
    """Have every namespace looked up by less than its whole key."""

    def make_space(original: Call) -> Call:
        def space(
            self: Tree,
            fingerprint: bytes,
            key: NamespaceKey,
            page_size: int,
            page_bytes: int,
            ranks: int = 1,
        ) -> Any:
            return original(self, fingerprint, narrow(key), page_size, page_bytes, ranks)

        return space

    def make_find(original: Call) -> Call:
        def find_space(self: Tree, fingerprint: bytes, key: NamespaceKey) -> Any:
            return original(self, fingerprint, narrow(key))

        return find_space

    return Patch(Tree, "space", make_space), Patch(Tree, "find_space", make_find)


TREE: Final = (
    Mutant(
        "split-loses-a-lease",
        "the upper half of a split node inherits no locks",
        (split_without_locks,),
    ),
    Mutant(
        "split-keeps-pages-together",
        "a split gives each half the pages of the wrong end",
        (split_at_the_wrong_end,),
    ),
    Mutant(
        "merge-over-a-lease",
        "two nodes are merged though a lease ends between them",
        (merge_over_leases,),
    ),
    Mutant(
        "merge-to-the-earlier-fence",
        "merged nodes may be read after the earlier of their two fences",
        (merge_to_the_earlier_fence,),
    ),
    Mutant(
        "prune-of-a-locked-node",
        "a node that drains under a lease is taken for empty and removed",
        (prune_what_drains,),
        rates={"flush_host": 5.0},
    ),
    Mutant(
        "evict-of-a-leased-node",
        "a leased leaf stays in the eviction order",
        (evictable_though_leased,),
    ),
    Mutant(
        "host-gives-up-the-only-copy",
        "the host evicts pages that are nowhere else before those that a pool holds, too",
        (rank_the_other_way,),
    ),
    Mutant(
        "first-page-decides",
        "where tokens part within a node they are not compared",
        (common_pages_uncompared,),
    ),
    Mutant(
        "adopt-across-namespaces",
        "salt, extra key and adapter do not separate namespaces",
        _spaces_by(_without_names),
        pins={"namespaces": 4},
    ),
    Mutant(
        "absent-is-empty",
        "an empty salt and no salt are one namespace",
        _spaces_by(_without_empty_salt),
        pins={"namespaces": 5},
    ),
    Mutant(
        "weight-epoch-ignored",
        "pages of other weights match",
        _spaces_by(_without_epoch),
        rates={"epoch_bump": 3.0},
    ),
)
