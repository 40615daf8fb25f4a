"""What one pool's owner does to the tree: match, insert, give up. Shared by daemon and mirror.

Owns no state: functions over a `Tree` and a `PoolState`. The daemon calls them for thin pools'
questions and mirrored pools' reports, a mirror for its own pool; at equal stream positions both
therefore answer the same. Eviction is exact to the page, so that it does not depend on where
nodes happen to be split.
"""

from __future__ import annotations

from typing import NamedTuple

from directory.core import limits
from directory.core.errors import BadMessage, Diverged, TooLarge
from directory.core.ids import POOL_WORD
from directory.core.node import Node, Run, Space
from directory.core.place import PoolState, SpanState
from directory.core.tokens import pack_pages, unpack_pages
from directory.core.tree import RESIDENT, Step, Tree


class OwnMatch(NamedTuple):
    """The own pool's part of a path: its last node, pages (packed), and their count."""

    node: Node
    pages: bytes
    page_count: int


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


def match_own(tree: Tree, pool: PoolState, space: Space, steps: list[Step]) -> OwnMatch:
    """Return the prefix of a walked path that the pool holds, and mark it used.

    A node that matched in part is split, so that only the matched part is marked; `steps` is
    updated to name the upper half.
    """
    node, place, tick = space.root, pool.place, pool.tick + 1
    held: list[bytes] = []
    count = 0
    for candidate, pages in steps:
        residency = candidate.places.get(place)
        if residency is None or residency.state is not RESIDENT:
            break
        if 4 * pages < len(residency.pages):
            # Only the last step can have matched in part.
            candidate = tree.split(candidate, pages)
            steps[-1] = (candidate, pages)
            residency = candidate.places[place]
        residency.tick = tick
        held.append(residency.pages)
        count += pages
        node = candidate
    if count:
        pool.tick = tick
        tree.refresh(node, place)
    return OwnMatch(node, b"".join(held), count)


def insert_pages(
    tree: Tree,
    pool: PoolState,
    space: Space,
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
        first = pool.order.first()
        if first is None:
            break
        node = tree.nodes[first]
        if node.page_count > left:
            tree.split(node, node.page_count - left)
        left -= node.page_count
        given = reversed(node.places[pool.place].runs)
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
            if not span.parts:
                raise Diverged(f"span {span_id} has fewer pages than are given up")
            node = span.parts[-1]
            residency = node.places[pool.place]
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
