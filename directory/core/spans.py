"""Spans: which nodes hold the pages of one insert report, kept under split and merge.

Owns the arithmetic on runs and the ordered lists of parts; called by `tree.Tree` alone for
changes of shape. A run is [first, first + length) of a span; a node has at most one run a span.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from directory.core.node import Node, Run

if TYPE_CHECKING:
    from directory.core.place import PoolState


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
    below = {run.span for run in lower.places[pool.place].runs}
    for run in upper.places[pool.place].runs:
        parts = pool.spans[run.span].parts
        at = parts.index(lower)
        if run.span in below:
            parts.insert(at, upper)
        else:
            parts[at] = upper


def merge_parts(pool: PoolState, upper: Node, lower: Node, runs: tuple[Run, ...]) -> None:
    """Replace a node by the child it is merged into; `runs` are the node's own."""
    for run in runs:
        parts = pool.spans[run.span].parts
        at = parts.index(upper)
        if lower in parts:
            del parts[at]
        else:
            parts[at] = lower
