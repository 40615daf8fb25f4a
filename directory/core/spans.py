"""Spans: which nodes hold the pages of one insert report, kept under split and merge.

Owns the arithmetic on runs and the ordered lists of parts; called by `tree.Tree` alone for
changes of shape. A run is [first, first + length) of a span; a node has at most one run a span.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import msgspec

from directory.core.node import Node, Run

if TYPE_CHECKING:
    from directory.core.place import PoolState


class SpanState(msgspec.Struct, gc=False, eq=False):
    """One insert report's word and the nodes that hold its pages, ordered from the root down.

    Most spans are in one node, `first`; the others are `rest`.
    """

    value: int
    first: Node | None = None
    rest: list[Node] | None = None

    @property
    def parts(self) -> list[Node]:
        """All of its nodes: a list of its own."""
        if self.first is None:
            return []
        return [self.first] if self.rest is None else [self.first, *self.rest]

    @parts.setter
    def parts(self, nodes: Sequence[Node]) -> None:
        self.first = nodes[0] if nodes else None
        self.rest = list(nodes[1:]) if len(nodes) > 1 else None

    @property
    def last(self) -> Node | None:
        """The lowest of its nodes."""
        return self.first if self.rest is None else self.rest[-1]

    def append(self, node: Node) -> None:
        """A node below the others."""
        if self.first is None:
            self.first = node
        elif self.rest is None:
            self.rest = [node]
        else:
            self.rest.append(node)

    def remove(self, node: Node) -> None:
        """Not in this node any more."""
        if self.rest is not None and self.rest[-1] is node:  # what is given up is the lowest
            del self.rest[-1]
            self.rest = self.rest or None
        else:
            parts = self.parts
            parts.remove(node)
            self.parts = parts


def split_runs(runs: tuple[Run, ...], pages: int) -> tuple[tuple[Run, ...], tuple[Run, ...]]:
    """Cut a node's runs after `pages` pages."""
    top: list[Run] = []
    bottom: list[Run] = []
    left = pages
    for run in runs:
        take = min(left, run.length)
        if take:
            top.append(Run(run.span, run.first, take))
        if take < run.length:
            bottom.append(Run(run.span, run.first + take, run.length - take))
        left -= take
    return tuple(top), tuple(bottom)


def join_runs(upper: tuple[Run, ...], lower: tuple[Run, ...]) -> tuple[Run, ...]:
    """Join the runs of a node and its child; neighbours of one span become one run."""
    if upper and lower:
        last, first = upper[-1], lower[0]
        if last.span == first.span and last.first + last.length == first.first:
            joined = Run(last.span, last.first, last.length + first.length)
            return (*upper[:-1], joined, *lower[1:])
    return upper + lower


def split_parts(pool: PoolState, lower: Node, upper: Node) -> None:
    """Enter the upper half of a node that was just split into its spans' parts."""
    below = {run.span for run in lower.there(pool.place).runs}
    for run in upper.there(pool.place).runs:
        span = pool.spans[run.span]
        parts = span.parts
        at = parts.index(lower)
        if run.span in below:
            parts.insert(at, upper)
        else:
            parts[at] = upper
        span.parts = parts


def merge_parts(pool: PoolState, upper: Node, lower: Node, runs: tuple[Run, ...]) -> None:
    """Replace a node by the child it is merged into; `runs` are the node's own."""
    for run in runs:
        span = pool.spans[run.span]
        parts = span.parts
        at = parts.index(upper)
        if lower in parts:
            del parts[at]
        else:
            parts[at] = lower
        span.parts = parts
