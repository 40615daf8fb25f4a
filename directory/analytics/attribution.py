"""Why a request was not a hit any further: from records alone.

Owns the causes and what each means. The path of a prompt falls into parts, in this order: hit;
promised but not restored; published once and gone since; known in another namespace only; new;
and the tail that no cache can hit. A request's cause is that of its first part after the hits. It
must never guess: where the log does not say what was evicted, the verdict says only between which
two moments.
"""

from __future__ import annotations

from array import array
from enum import StrEnum
from typing import Final

import msgspec

from directory.analytics.paths import PathTree, Walk
from directory.analytics.record import Access, Digests, Eviction, Frame, Named, Room
from directory.analytics.reuse import ReuseDistances

EVICTIONS_KEPT_MAX: Final = 1 << 20
FIELDS_SHOWN_MAX: Final = 16


class Cause(StrEnum):
    """Why tokens were computed. docs/analytics.md defines each."""

    NOT_RESTORABLE = "not_restorable"
    EVICTED = "evicted"
    OTHER_NAMESPACE = "other_namespace"
    DIVERGED = "diverged"
    NEVER_SEEN = "never_seen"
    PARTIAL_TAIL = "partial_tail"


MEANING: Final = {
    Cause.NOT_RESTORABLE: "promised by the match, but the copy was lost or refused",
    Cause.EVICTED: "published before, and no longer anywhere",
    Cause.OTHER_NAMESPACE: "published in another namespace only",
    Cause.DIVERGED: "new tokens where an earlier prompt went on differently",
    Cause.NEVER_SEEN: "new tokens that nothing was known after",
    Cause.PARTIAL_TAIL: "less than a page, or the last token, which is always computed",
}


class Gone(msgspec.Struct, frozen=True):
    """What is known of an eviction. exact: an eviction record says so; otherwise it happened
    between `seen_us` (the last use, in the pool of `instance`) and the request."""

    exact: bool
    seen_us: int
    instance: str
    tier: str = ""
    at_us: int | None = None
    reason: str = ""
    policy: str = ""


class Part(msgspec.Struct, frozen=True):
    """A stretch of a prompt and why it was computed; tokens count from the prompt's start."""

    cause: Cause
    first_token: int
    tokens: int


class Verdict(msgspec.Struct, frozen=True):
    """Why a request ended where it did. `parts`: in order, without the hits.

    gone: for evicted. other_namespace and differs (field -> [here, there]): for pages that another
    namespace has.
    """

    hit_tokens: int
    parts: tuple[Part, ...]
    gone: Gone | None = None
    other_namespace: str = ""
    differs: dict[str, tuple[str | None, str | None]] = {}

    @property
    def cause(self) -> Cause | None:
        """Of the first token that was computed; None when none was."""
        return self.parts[0].cause if self.parts else None


class Attribution:
    """Judges requests in the order of a log. Mutated by `note`, `judge` and `touch` only."""

    def __init__(self, reuse: ReuseDistances) -> None:
        """`reuse` sees each request before it is judged, and numbers them as this does."""
        self._reuse = reuse
        # All namespaces in one tree, so that what another one has is known at once; there is none
        # as long as there is one namespace.
        self._everywhere: PathTree | None = None
        self._namespaces: list[bytes] = []
        self._seen_us = array("q")
        self._seen_in: list[str] = []
        self._evictions: dict[tuple[bytes, int], list[Eviction]] = {}
        self._names: dict[bytes, dict[str, str]] = {}
        self._pools_ended: dict[str, int] = {}

    def note(self, frame: Frame) -> None:
        """Take in what is no request: evictions, names of namespaces, pools that end."""
        if isinstance(frame, Eviction):
            # One line a tier: the same pages can be given up by a pool and by the host tier.
            kept = self._evictions.setdefault((frame.namespace, frame.digest), [])
            kept[:] = [
                old for old in kept if (old.tier, old.instance) != (frame.tier, frame.instance)
            ]
            kept.append(frame)
            if len(self._evictions) > EVICTIONS_KEPT_MAX:
                del self._evictions[next(iter(self._evictions))]
        elif isinstance(frame, Named):
            self._names[frame.namespace] = frame.fields
        elif isinstance(frame, Room) and frame.tier == "device" and frame.pages == 0:
            self._pools_ended[frame.instance] = frame.at_us

    def judge(self, access: Access, walk: Walk, hit_pages: int, hittable: int) -> Verdict:
        """Say why a request's hits ended; `walk`: what its own namespace knew before it."""
        path, size = access.path, access.page_tokens
        everywhere = self._look(access, walk)
        hit = min(hit_pages, hittable)
        found, seen, other = _bounds(access, hit, hittable, walk.known, everywhere.known)
        verdict = Verdict(hit * size, parts_of(access, hit, hittable, walk, everywhere.known))
        if seen > found:
            gone = self._gone(access, path, walk, found)
            verdict = msgspec.structs.replace(verdict, gone=gone)
        if other > seen:
            there = self._namespaces[_tick_at(everywhere, seen)]
            verdict = msgspec.structs.replace(
                verdict,
                other_namespace=there.hex(),
                differs=self._difference(access.namespace, there),
            )
        return verdict

    def touch(self, access: Access, extent: int) -> None:
        """Take in what a request left behind; in step with `ReuseDistances.add`."""
        union = self._union(access.namespace)
        if union is not None:
            union.touch(access.path, len(self._seen_us), extent)
        self._namespaces.append(access.namespace)
        self._seen_us.append(access.at_us)
        self._seen_in.append(access.instance)

    def _look(self, access: Access, walk: Walk) -> Walk:
        """What all namespaces together know of a path; `walk` where there is only one."""
        others = self._union(access.namespace)
        return walk if others is None else others.look(access.path)

    def _union(self, namespace: bytes) -> PathTree | None:
        """The tree of all namespaces, begun with what the first one knows when a second comes."""
        if self._everywhere is None and self._namespaces and namespace != self._namespaces[0]:
            first = self._reuse.tree(self._namespaces[0])
            self._everywhere = PathTree() if first is None else first.copy()
        return self._everywhere

    def _gone(self, access: Access, path: Digests, walk: Walk, page: int) -> Gone:
        """What the log says of the disappearance of the page number `page` (from 0).

        What went stands in the log before the request that missed it. Its time may be a little
        later than that of the request's look-up: the two are told on different ways.
        """
        tick = _tick_at(walk, page)
        seen_us, instance = self._seen_us[tick], self._seen_in[tick]
        latest: Eviction | None = None
        for depth in range(page, -1, -1):
            for eviction in self._evictions.get((access.namespace, path[depth]), ()):
                if (
                    depth + eviction.pages > page
                    and seen_us <= eviction.at_us
                    and (latest is None or eviction.at_us > latest.at_us)
                ):
                    latest = eviction
        if latest is not None:
            return Gone(
                exact=True,
                seen_us=seen_us,
                instance=latest.instance or instance,
                tier=latest.tier,
                at_us=latest.at_us,
                reason=latest.reason,
                policy=latest.policy,
            )
        ended_us = self._pools_ended.get(instance)
        if ended_us is not None and seen_us <= ended_us <= access.at_us:
            return Gone(
                exact=False,
                seen_us=seen_us,
                instance=instance,
                tier="device",
                at_us=ended_us,
                reason="pool_gone",
            )
        return Gone(exact=False, seen_us=seen_us, instance=instance)

    def _difference(self, here: bytes, there: bytes) -> dict[str, tuple[str | None, str | None]]:
        """Fields in which two namespaces differ, as far as the log names them; None: absent."""
        ours, theirs = self._names.get(here, {}), self._names.get(there, {})
        differing = sorted(
            field for field in ours.keys() | theirs.keys() if ours.get(field) != theirs.get(field)
        )
        return {
            field: (ours.get(field), theirs.get(field)) for field in differing[:FIELDS_SHOWN_MAX]
        }


def parts_of(
    access: Access, hit_pages: int, hittable: int, walk: Walk, known_anywhere: int
) -> tuple[Part, ...]:
    """Why each token of a request was computed, in the order of its prompt.

    `walk`: what its own namespace knew of its path before it; `known_anywhere`: pages of it that
    any namespace knew.
    """
    return tuple(
        Part(cause, at, tokens)
        for cause, at, tokens in causes_of(
            access, hit_pages, hittable, walk.known, walk.forked, known_anywhere
        )
    )


def causes_of(
    access: Access, hit_pages: int, hittable: int, known: int, forked: bool, known_anywhere: int
) -> list[tuple[Cause, int, int]]:
    """The same as (cause, first token, tokens). `known`, `forked`: of its own namespace's walk."""
    size = access.page_tokens
    hit = min(hit_pages, hittable)
    found, seen, other = _bounds(access, hit, hittable, known, known_anywhere)
    forked = forked and known == other and other > 0
    ends = (
        (Cause.NOT_RESTORABLE, found * size),
        (Cause.EVICTED, seen * size),
        (Cause.OTHER_NAMESPACE, other * size),
        (Cause.DIVERGED if forked else Cause.NEVER_SEEN, hittable * size),
        (Cause.PARTIAL_TAIL, access.tokens),
    )
    parts, at, most = [], hit * size, access.tokens
    for cause, end in ends:
        if end > most:
            end = most
        if end > at:
            parts.append((cause, at, end - at))
            at = end
    return parts


def _bounds(
    access: Access, hit: int, hittable: int, known: int, known_anywhere: int
) -> tuple[int, int, int]:
    """Pages up to which a path was promised, published in its namespace, and in any."""
    found = min(max(hit, access.found // access.page_tokens), hittable)
    seen = min(max(found, known), hittable)
    return found, seen, min(max(seen, known_anywhere), hittable)


def _tick_at(walk: Walk, page: int) -> int:
    """The access that last touched a known page."""
    for stretch in walk.stretches:
        if page < stretch.pages:
            return stretch.tick
        page -= stretch.pages
    raise AssertionError("the page is not known")
