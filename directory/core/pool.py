"""What one pool's owner does to the tree: match, insert, give up. Shared by daemon and mirror.

Owns no state: functions over a `Tree` and a `PoolState`. The daemon calls them for thin pools'
questions and mirrored pools' reports, a mirror for its own pool; at equal stream positions both
therefore answer the same. Eviction is exact to the page, so that it does not depend on where
nodes happen to be split.
"""

from __future__ import annotations

from typing import NamedTuple

import msgspec

from directory.core import limits
from directory.core.again import Found
from directory.core.errors import BadMessage, Diverged, TooLarge
from directory.core.ids import HOST, POOL_WORD
from directory.core.node import RESIDENT, Node, RootedSpace, Run
from directory.core.place import PoolState
from directory.core.spans import SpanState
from directory.core.tokens import pack_pages, unpack_pages
from directory.core.tree import Step, Tree


class OwnMatch(msgspec.Struct, gc=False):
    """The own pool's part of a path: its last node, pages (packed), and their count.

    `beyond`: the path from there on, as far as it is anywhere.
    """

    node: Node
    pages: bytes
    page_count: int
    beyond: list[Step]


class InsertOutcome(NamedTuple):
    """What an insert did. `steps`: the whole path; `end`: its last node (the root if empty).

    `canonical`: packed pages in the tree for the path; `duplicates`: packed pages not taken;
    `fresh_pages`: how many are new under the span.
    """

    end: Node
    steps: list[Step]
    canonical: bytes
    duplicates: bytes
    fresh_pages: int


class GivenUp(NamedTuple):
    """Pages given up (packed, last of a path first), their runs (children first), and words:
    (span, value, count)."""

    pages: bytes
    runs: tuple[Run, ...]
    words: tuple[tuple[int, int, int], ...]


def check_prompt(page_key: int, tokens: bytes) -> None:
    """Raise `TooLarge` for a path whose page list no message could carry; `page_key`: bytes of a
    page's tokens.

    The same bound at Match and at Insert, so that nothing is matched that cannot be published.
    """
    count = len(tokens) // page_key
    if count > limits.PROMPT_PAGES_MAX:
        raise TooLarge(
            f"a prompt of {count} pages, at most {limits.PROMPT_PAGES_MAX}; serve it without the "
            "cache or with larger pages"
        )


def match_path(
    tree: Tree,
    pool: PoolState,
    space: RootedSpace,
    tokens: bytes,
    host_tick: int = 0,
    after: OwnMatch | None = None,
) -> OwnMatch:
    """Return the prefix of a path that the pool holds, marked as used there, and at the host where
    `host_tick` says when; and what of the path lies beyond. `after`: what the tokens are known to
    begin with, of which the node is still there.

    A node that matched in part is split where the pool holds it, so that only the matched part is
    marked. This is what costs time in every tick of a scheduler: as long as whole nodes are the
    pool's, there is one short loop, and what it does not know it leaves to the longer ones.
    """
    node, place, tick = space.root, pool.place, pool.tick + 1
    page = space.page_key
    end = len(tokens) - len(tokens) % page
    position = 0
    held: list[bytes] = []
    if after is not None:
        node, position = after.node, len(after.pages) // 4 * page
        held.append(after.pages)
        use_path(tree, pool, node, host_tick)
    children = node.children
    hold, begins = held.append, tokens.startswith
    at_host: Node | None = None
    while position < end:
        if len(children) == 1:
            (child,) = children.values()
        elif (known := children.get(tokens[position : position + page])) is not None:
            child = known
        else:
            break
        edge = child.edge
        if not begins(edge, position, end):
            break
        own = host = None
        at = child.here
        while at is not None:
            if at.place == place:
                own = at
            elif at.place == HOST:
                host = at
            at = at.next
        if own is None or own.state is not RESIDENT:
            break
        own.tick = tick
        if host is not None and host_tick:
            host.tick = host_tick
            at_host = child
        hold(own.pages)
        position += len(edge)
        children = child.children
        node = child
    steps: list[Step] = []
    if position < end:
        steps = tree.walk(space, tokens, node, position)
        if steps:
            below, pages = steps[0]
            residency = below.resident(place)
            if residency is not None:
                # The short loop left it, so it matched in part, and nothing below it does.
                steps = []
                node = tree.split(below, pages)
                residency = node.there(place)
                residency.tick = tick
                hold(residency.pages)
                host = node.at(HOST)
                if host is not None and host_tick:
                    host.tick = host_tick
                    at_host = node
    if held:
        pool.tick = tick
        tree.refresh(node, place)
        if at_host is not None:
            tree.refresh(at_host, HOST)
    found = held[0] if len(held) == 1 else b"".join(held)
    return OwnMatch(node, found, len(found) // 4, steps)


def match_again(
    tree: Tree, pool: PoolState, space: RootedSpace, tokens: bytes, host_tick: int
) -> OwnMatch:
    """As `match_path`, for prompts that may have been asked for before: marks, answers and the
    order of eviction are the same."""
    found, after = pool.again.find(tokens, space.root.space), None
    if found is not None:
        if found.version == space.root.space.version:
            use_again(tree, pool, found, host_tick)
            return OwnMatch(found.node, found.pages, len(found.pages) // 4, [])
        # However nodes are split and merged, the path of one that is there is what it was.
        if tree.nodes.get(found.node.id) is found.node:
            pages = found.pages_now(pool.place)
            if pages is not None:
                after = OwnMatch(found.node, pages, len(pages) // 4, [])
    match = match_path(tree, pool, space, tokens, host_tick, after)
    if match.page_count and not match.beyond:
        pool.again.keep(tokens, match.node, match.pages)
    return match


def use_path(tree: Tree, pool: PoolState, node: Node, host_tick: int = 0) -> None:
    """Mark a node that the pool holds, and its ancestors, as used now, and at the host where
    `host_tick` says when."""
    place, tick = pool.place, pool.next_tick()
    at, at_host = node, None
    while at.parent is not None:
        residency = at.here
        while residency is not None:
            if residency.place == place:
                residency.tick = tick
            elif residency.place == HOST and host_tick:
                residency.tick = host_tick
                at_host = at if at_host is None else at_host
            residency = residency.next
        at = at.parent
    tree.refresh(node, place)
    if at_host is not None:
        tree.refresh(at_host, HOST)


def use_again(tree: Tree, pool: PoolState, found: Found, host_tick: int) -> None:
    """As `use_path` of what was found. While the namespace has its version the path has the very
    same residencies, so it is walked but once."""
    tick = pool.next_tick()
    for residency in found.noted(pool.place):
        residency.tick = tick
    tree.refresh(found.node, pool.place)
    if host_tick and found.at_host is not None:
        for residency in found.host:
            residency.tick = host_tick
        tree.refresh(found.at_host, HOST)


def insert_pages(
    tree: Tree,
    pool: PoolState,
    space: RootedSpace,
    tokens: bytes,
    pages: bytes,
    span: int,
    span_value: int,
    written: tuple[int, int],
    fresh_pages: int = -1,
) -> InsertOutcome:
    """Publish `pages` for the whole path of `tokens`; whole pages only, partial tails ignored.

    `fresh_pages`: how many the owner takes for new (-1: not said). Before anything is changed,
    raises `BadMessage` when the lists do not fit the pool, `TooLarge` for too long a path and
    `Diverged` when another number of pages is new.
    """
    page_key = space.page_key
    check_prompt(page_key, tokens)
    count = len(tokens) // page_key
    if len(pages) != 4 * count:
        raise BadMessage(
            f"{count} pages of tokens but {len(pages)} bytes of page numbers (4 a page)"
        )
    steps = tree.walk(space, tokens[: count * page_key])
    canonical = _held_prefix(pool, steps)
    held = len(canonical) // 4
    if fresh_pages not in (-1, count - held):
        raise Diverged(
            f"{fresh_pages} pages are said to be new, but of these {count} the tree has {held}; "
            "republish"
        )
    duplicates = _check_insert(pool, canonical, pages, span, fresh=count - held)

    _split_last(tree, steps)
    matched = sum(pages_matched for _, pages_matched in steps)
    end = steps[-1][0] if steps else space.root
    if matched < count:
        end = tree.add_leaf(end, tokens[matched * page_key : count * page_key])
        steps.append((end, count - matched))
    fresh = pages[4 * held :]
    if fresh:
        pool.spans[span] = SpanState(span_value)
        pool.owned.update(unpack_pages(fresh))
    tick = pool.next_tick()
    offset = 0
    for node, pages_here in steps:
        if offset >= held:
            first = offset - held
            run = Run(span, first, pages_here)
            tree.publish(
                node, pool.place, fresh[4 * first : 4 * (first + pages_here)], (run,), written, tick
            )
        offset += pages_here
    tree.touch(steps, pool.place, tick)
    return InsertOutcome(end, steps, canonical + fresh, duplicates, count - held)


def evict_pages(tree: Tree, pool: PoolState, want: int) -> GivenUp:
    """Give up at most `want` pages, coldest unleased leaf first, its last pages first."""
    pages: list[bytes] = []
    runs: list[Run] = []
    values: dict[int, int] = {}
    left = want
    while left > 0:
        node = pool.order.first(tree.nodes)
        if node is None:
            break
        if node.page_count > left:
            tree.split(node, node.page_count - left)
        left -= node.page_count
        given = reversed(node.there(pool.place).runs)
        for run in given:
            values[run.span] = pool.spans[run.span].value
            runs.append(run)
        # Last page first, so that the order too is the same wherever nodes are split.
        dropped = unpack_pages(tree.drop(node, pool.place))
        dropped.reverse()
        pages.append(dropped.tobytes())
        tree.prune(node)
    return _given_up(pool, pages, runs, values)


def flush_pages(tree: Tree, pool: PoolState) -> GivenUp:
    """Give up every page that no lease protects."""
    return evict_pages(tree, pool, pool.evictable_pages)


def apply_given_up(
    tree: Tree,
    pool: PoolState,
    runs: tuple[tuple[int, int, int], ...],
    words: tuple[tuple[int, int], ...],
) -> int:
    """Carry out a mirrored pool's report of given-up runs; returns the page count.

    Raises `Diverged` when the runs are not the tails that the reports so far say they are.
    """
    given = 0
    for span_id, first, count in runs:
        span = pool.spans.get(span_id)
        if span is None or count <= 0:
            raise Diverged(f"span {span_id} is given up but was not reported")
        left = count
        while left > 0:
            node = span.last
            if node is None:
                raise Diverged(f"span {span_id} has fewer pages than are given up")
            residency = node.there(pool.place)
            run = residency.runs[-1]
            if run.span != span_id or run.first + run.length != first + left or residency.children:
                raise Diverged(f"pages {first}+{count} of span {span_id} are not the end of a path")
            take = min(left, run.length)
            if take < node.page_count:
                tree.split(node, node.page_count - take)
            pages = tree.drop(node, pool.place)
            tree.prune(node)
            # At once, so that a report which diverges further on leaves nothing half done.
            pool.owned.difference_update(unpack_pages(pages))
            given += take
            left -= take
    for span_id, value in words:
        if span_id in pool.spans:
            pool.spans[span_id].value = value
    return given


def _given_up(
    pool: PoolState, pages: list[bytes], runs: list[Run], values: dict[int, int]
) -> GivenUp:
    given = b"".join(pages)
    pool.owned.difference_update(unpack_pages(given))
    counts: dict[int, int] = {}
    for run in runs:
        counts[run.span] = counts.get(run.span, 0) + run.length
    words: list[tuple[int, int, int]] = []
    for span_id, count in counts.items():
        value = values[span_id] + 1
        if span_id in pool.spans:
            pool.spans[span_id].value = value
        words.append((span_id, value, count))
    return GivenUp(given, tuple(runs), tuple(words))


def _held_prefix(pool: PoolState, steps: list[Step]) -> bytes:
    held: list[bytes] = []
    for node, pages in steps:
        residency = node.resident(pool.place)
        if residency is None:
            break
        held.append(residency.pages[: 4 * pages])
    return b"".join(held)


def _check_insert(
    pool: PoolState, canonical: bytes, pages: bytes, span: int, *, fresh: int
) -> bytes:
    """Validate before any change; return the duplicates (packed)."""
    held = len(canonical)
    duplicates: list[int] = []
    if pages[:held] != canonical:
        pairs = zip(unpack_pages(canonical), unpack_pages(pages[:held]), strict=True)
        duplicates = [mine for kept, mine in pairs if kept != mine]
    new = unpack_pages(pages[held:])
    mine = set(new)
    mine.update(duplicates)
    if len(mine) != len(new) + len(duplicates):
        raise BadMessage("a page number stands twice in one insert")
    if mine and max(mine) >= pool.page_count:
        raise BadMessage(f"page {max(mine)} is beyond the pool's {pool.page_count} pages")
    if not pool.filling.isdisjoint(mine):
        taken = sorted(pool.filling & mine)[:8]
        raise BadMessage(f"pages {taken} are being restored into; wait for the answer")
    if not pool.owned.isdisjoint(mine):
        taken = sorted(pool.owned & mine)[:8]
        raise BadMessage(f"pages {taken} belong to other paths of the tree already")
    if fresh and (span == POOL_WORD or span in pool.spans or not 0 < span <= pool.page_count):
        raise BadMessage(f"span {span} is in use or out of range 1..{pool.page_count}")
    return pack_pages(duplicates)


def _split_last(tree: Tree, steps: list[Step]) -> None:
    if steps:
        node, pages = steps[-1]
        if pages < node.page_count:
            steps[-1] = (tree.split(node, pages), pages)
