"""Why a prompt would match so far and no further, as of now: from the live tree.

Owns the verdict, with the causes of directory/analytics/attribution.py. It walks, and touches
nothing: neither recency nor leases know that somebody asked. Where nothing says why pages are
missing, it says so and does not guess.
"""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Final

from directory.analytics.attribution import Cause
from directory.analytics.record import Digests
from directory.core.directory import Directory
from directory.core.errors import BadMessage, TooLarge
from directory.core.ids import HOST
from directory.core.limits import TOKENS_BYTES_MAX
from directory.core.node import Node, Space
from directory.core.place import PoolState
from directory.core.tree import Step
from directory.daemon.names import fields_of
from directory.daemon.recording import Gone, Recording
from directory.daemon.tree_report import place_name
from directory.protocol.admin import AdminExplain, ExplainReport, Stretch

FIELDS_SHOWN_MAX: Final = 6


class Explainer:
    """One question. Reads the directory; `recording` knows what went of late."""

    def __init__(self, directory: Directory, recording: Recording, request: AdminExplain) -> None:
        """Raises `BadMessage` or `TooLarge` where the question cannot be answered."""
        self._directory = directory
        self._recording = recording
        if len(request.tokens) > TOKENS_BYTES_MAX:
            raise TooLarge(f"{len(request.tokens)} bytes of tokens, at most {TOKENS_BYTES_MAX}")
        self._pool = self._find_pool(request.instance)
        fingerprint, self._page_size = self._pool.fingerprint, self._pool.page_size
        self._asks_for_pool = bool(request.instance)
        self._key, self._fingerprint = request.namespace, fingerprint
        self._page_key = self._page_size * request.namespace.unit_bytes
        self._tokens = request.tokens
        self._count = len(request.tokens) // request.namespace.unit_bytes
        self._hittable = max(0, self._count - 1) // self._page_size
        self._path = request.tokens[: self._hittable * self._page_key]
        self._namespace = recording.names.digest(fingerprint, request.namespace)

    def report(self) -> ExplainReport:
        """The prompt from its first token to its last."""
        tree = self._directory.tree
        space = tree.find_space(self._fingerprint, self._key)
        steps = tree.walk(space, self._path) if space is not None else []
        stretches = self._found(steps)
        matched = sum(stretch.tokens for stretch in stretches)
        at = matched // self._page_size
        stretches += self._unusable(steps, at)
        at = max(at, sum(pages for _, pages in steps))
        gone = self._gone(at)
        stretches += gone
        at += sum(stretch.tokens for stretch in gone) // self._page_size
        elsewhere = self._elsewhere(space, at)
        stretches += elsewhere
        at += sum(stretch.tokens for stretch in elsewhere) // self._page_size
        if at < self._hittable:
            forked = bool(steps) and at == sum(pages for _, pages in steps) and _forks(*steps[-1])
            stretches.append(
                self._stretch(
                    Cause.DIVERGED if forked else Cause.NEVER_SEEN,
                    at,
                    self._hittable,
                    "an earlier prompt goes on differently here" if forked else "",
                )
            )
        tail = self._hittable * self._page_size
        if tail < self._count:
            stretches.append(Stretch(Cause.PARTIAL_TAIL.value, tail, self._count - tail))
        return ExplainReport(
            self._namespace.hex(), self._page_size, self._count, matched, tuple(stretches)
        )

    def _find_pool(self, instance: str) -> PoolState:
        for pool in self._directory.pools.values():
            if instance in ("", pool.instance) and pool.live:
                return pool
        known = ", ".join(
            sorted(pool.instance for pool in self._directory.pools.values() if pool.live)
        )
        raise BadMessage(
            f"no instance {instance!r} is registered here (there are: {known or 'none'})"
            if instance
            else "no engine is registered with this daemon yet; start one, or see its log for why "
            "not"
        )

    def _stretch(self, verdict: str, first: int, last: int, detail: str = "") -> Stretch:
        size = self._page_size
        return Stretch(str(verdict), first * size, (last - first) * size, detail)

    def _found(self, steps: list[Step]) -> list[Stretch]:
        """What a match would have: own pages first, then what can be restored, unbroken."""
        stretches: list[Stretch] = []
        at, own = 0, self._asks_for_pool
        for node, pages in steps:
            own = own and node.resident(self._pool.place) is not None
            if own:
                stretches.append(self._stretch("own", at, at + pages))
            else:
                asks = self._pool.place if self._asks_for_pool else 0
                source = self._directory.transfers.source_for(node, asks)
                if source is None:
                    break
                name = place_name(self._directory, source)
                if source == HOST:
                    stretches.append(self._stretch("host", at, at + pages))
                else:
                    stretches.append(self._stretch("peer", at, at + pages, f"pool of {name}"))
            at += pages
        return _joined(stretches)

    def _unusable(self, steps: list[Step], reached: int) -> list[Stretch]:
        """What is in the tree and can be had from nowhere now."""
        known = sum(pages for _, pages in steps)
        if known <= reached:
            return []
        at = 0
        for node, pages in steps:
            if at + pages > reached:
                there = ", ".join(
                    f"{place_name(self._directory, place)} {residency.state}"
                    for place, residency in sorted(node.places.items())
                )
                detail = f"in the tree, usable nowhere ({there or 'no place has it'})"
                return [self._stretch(Cause.NOT_RESTORABLE, reached, known, detail)]
            at += pages
        return []

    def _gone(self, at: int) -> list[Stretch]:
        """What was given up of late."""
        stretches: list[Stretch] = []
        if not self._recording.gone or at >= self._hittable:
            return stretches
        digests = self._recording.chains.whole(self._path, self._page_key)
        while at < self._hittable:
            found = self._latest(digests, at)
            if found is None:
                break
            gone, last = found
            stretches.append(self._stretch(Cause.EVICTED, at, last, _words(gone)))
            at = last
        return stretches

    def _latest(self, digests: Digests, page: int) -> tuple[Gone, int] | None:
        """What was told last of a page's going, and up to which page that goes."""
        best: tuple[Gone, int] | None = None
        for depth in range(page, -1, -1):
            gone = self._recording.gone.get((self._namespace, digests[depth]))
            last = min(self._hittable, depth + gone.pages) if gone is not None else 0
            if gone is not None and last > page and (best is None or gone.at_us > best[0].at_us):
                best = (gone, last)
        return best

    def _elsewhere(self, own: Space | None, at: int) -> list[Stretch]:
        """What another namespace has of the path."""
        longest, there = at, None
        for space in self._directory.tree.spaces.values():
            if space is own or space.page_key != self._page_key:
                continue
            steps = self._directory.tree.walk(space, self._path)
            known = sum(pages for _, pages in steps)
            if known > longest:
                longest, there = known, space
        if there is None:
            return []
        ours, theirs = (
            fields_of(self._fingerprint, self._key),
            fields_of(there.fingerprint, there.key),
        )
        differing = [name for name in {**ours, **theirs} if ours.get(name) != theirs.get(name)]
        words = [
            f"{name}: {ours.get(name, 'absent')!r} here, {theirs.get(name, 'absent')!r} there"
            for name in differing[:FIELDS_SHOWN_MAX]
        ]
        name = self._recording.names.digest(there.fingerprint, there.key).hex()
        detail = "; ".join([f"namespace {name} has it", *words])
        return [self._stretch(Cause.OTHER_NAMESPACE, at, longest, detail)]


def _joined(stretches: list[Stretch]) -> list[Stretch]:
    """Neighbours with one verdict become one."""
    joined: list[Stretch] = []
    for stretch in stretches:
        last = joined[-1] if joined else None
        if last is not None and (last.verdict, last.detail) == (stretch.verdict, stretch.detail):
            joined[-1] = Stretch(
                last.verdict, last.first_token, last.tokens + stretch.tokens, last.detail
            )
        else:
            joined.append(stretch)
    return joined


def _forks(node: Node, pages: int) -> bool:
    """Whether other paths leave where this one ends."""
    return pages < node.page_count or bool(node.children)


def _words(gone: Gone) -> str:
    when = datetime.fromtimestamp(gone.at_us / 1e6, UTC).isoformat(" ", "milliseconds")
    where = f"{gone.tier} tier" + (f" of {gone.instance}" if gone.instance else "")
    return f"from the {where} at {when} ({gone.reason.replace('_', ' ')}, lru)"
