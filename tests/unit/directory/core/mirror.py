"""A mirror as small as can be: the tree of one pool, with the claims on it.

Owns the tree and its locks; reports are the caller's. The shim has the real one.
"""

from __future__ import annotations

from directory.core.invariants import tree_violations
from directory.core.namespace import NamespaceKey
from directory.core.node import Node
from directory.core.place import PoolState
from directory.core.pool import OwnMatch, match_path
from directory.core.tree import Tree

PAGE_BYTES = 64


class Mirror:
    """A scheduler's own tree of its own pool, as the shim keeps it."""

    def __init__(self, page_size: int, pages: int) -> None:
        self.tree = Tree()
        self.claims: list[Node] = []
        self.pool = PoolState(
            1,
            instance="mirror",
            generation=1,
            fingerprint=b"",
            page_size=page_size,
            page_count=pages,
            page_bytes=PAGE_BYTES,
            mode="mirrored",
        )
        self.tree.places[1] = self.pool

    def match(self, key: NamespaceKey, tokens: bytes) -> OwnMatch:
        """Longest own prefix."""
        space = self.tree.find_space(b"", key)
        if space is None:
            space = self.tree.space(b"", key, self.pool.page_size, PAGE_BYTES)
            self.tree.prune(space.root)
        return match_path(self.tree, self.pool, space, tokens)

    def lock(self, node: Node) -> None:
        """Protect a path."""
        if node.parent is not None:
            self.tree.lock(node, 1)
            self.claims.append(node)

    def unlock(self, node: Node) -> None:
        """Undo one lock."""
        if node.parent is not None:
            self.claims.remove(node)
            self.tree.unlock(node, 1)
            self.tree.prune(node)

    def check(self) -> None:
        """The mirror's invariants hold."""
        found = tree_violations(self.tree, {1: list(self.claims)})
        assert not found, found
