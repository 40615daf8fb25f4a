"""Handles: what SGLang gets in place of a tree node, and the order of waiting requests by them.

Owns the names of paths that SGLang has matched, locked or stored. A handle outlives the node that
it was made from: nodes are split, merged and rebuilt, and the tree itself changes hands when the
daemon is lost or comes back, while SGLang keeps a request's handle for as long as it runs. It must
never stand for more pages than were there when it was made.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch

from directory.core.namespace import NamespaceKey
from scheduler_shim.own_tree import Found
from scheduler_shim.request import Request


class Handle:
    """One path of the own pool: `pages` whole pages, packed in `tokens`, named in `found.pages`.

    `locks`: how often SGLang has it locked; as long, `request` is what protects the path. `slots`:
    where the pages lie, once somebody has asked. `asked`: the tokens for which the path was found
    last, this very object. Mutated by the cache alone. `children`: what is
    further down in the order of waiting requests, as `grow` has set it.
    """

    __slots__ = (
        "__weakref__",
        "asked",
        "children",
        "found",
        "key",
        "locks",
        "pages",
        "request",
        "slots",
        "tokens",
    )

    def __init__(self, key: NamespaceKey, tokens: bytes, found: Found) -> None:
        """`tokens`: exactly those of the found pages."""
        self.key = key
        self.tokens = tokens
        self.found = found
        self.pages = len(found.pages) // 4
        self.locks = 0
        self.asked: bytes | None = None
        self.request: Request | None = None
        self.slots: torch.Tensor | None = None
        self.children: dict[int, Handle | Fork] = {}

    def __eq__(self, other: object) -> bool:
        """Two handles of one path are one place in the order; the empty path is one in all."""
        if self is other:
            return True
        if not isinstance(other, Handle):
            return NotImplemented
        return self.tokens == other.tokens and (not self.tokens or self.key == other.key)

    def __hash__(self) -> int:
        return hash(self.tokens)

    def __repr__(self) -> str:
        return f"<Handle {self.pages} pages, {self.locks} locks, {self.request!r}>"


class Fork:
    """Where paths part that end further down."""

    __slots__ = ("children",)

    def __init__(self) -> None:
        self.children: dict[int, Handle | Fork] = {}


def grow(root: Handle, handles: Iterable[Handle], page_keys: Callable[[NamespaceKey], int]) -> None:
    """Set the children of `root`, of all handles and of the forks between: one tree of them all.

    `page_keys`: bytes of a page's packed units; paths part between pages only.
    """
    root.children = {}
    by_key: dict[NamespaceKey, set[Handle]] = {}
    for handle in handles:
        handle.children = {}
        if handle.pages:
            by_key.setdefault(handle.key, set()).add(handle)
    for key, group in by_key.items():
        page = page_keys(key)
        stack: list[tuple[int, Handle | Fork]] = [(0, root)]
        before = b""
        for handle in sorted(group, key=lambda at: at.tokens):
            common = _common(before, handle.tokens, page)
            below: Handle | Fork | None = None
            while stack[-1][0] > common:
                below = stack.pop()[1]
            above = stack[-1][1]
            if below is not None and stack[-1][0] < common:
                fork = Fork()
                del above.children[id(below)]
                above.children[id(fork)] = fork
                fork.children[id(below)] = below
                stack.append((common, fork))
                above = fork
            above.children[id(handle)] = handle
            stack.append((len(handle.tokens), handle))
            before = handle.tokens


def _common(one: bytes, other: bytes, page: int) -> int:
    """Bytes of the whole pages that two paths have in common."""
    low, high = 0, min(len(one), len(other)) // page
    while low < high:
        middle = (low + high + 1) // 2
        if other.startswith(one[: middle * page]):
            low = middle
        else:
            high = middle - 1
    return low * page
