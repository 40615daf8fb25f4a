"""A tiny node whose every move can be enumerated: the model of the exhaustive small scope.

Owns two schedulers of two pages each (a mirrored and a thin one), three paths that share a first
page, a host tier of two pages, and what every page holds. `check` recounts everything and
compares every page with its path. It never draws anything.

What is left out, and which move stands for it:
- several pages in one Evict or Evicted: one page at a time with nothing between, because the
  directory gives pages up one by one and starts no copy meanwhile; the flushes give up many;
- a mirror's choice of what goes: the mirrored scheduler may give up any end of a path at any
  time, its own locks and order of use notwithstanding, which is more than any mirror does;
- a copy reported as failed: told apart from a void one for peer copies only, so only there;
- the end of a pool in several steps: pools are so small that it is one event;
- a second lease or restore of one scheduler, Lock, Live, Stats, groups, several namespaces,
  late and lost messages: not covered here; the seeds of the simulation have them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from directory.core.actions import (
    Action,
    Answer,
    GaveUp,
    Inserted,
    Matched,
    Refused,
    Registered,
    Restored,
    SubmitCopy,
)
from directory.core.directory import Directory
from directory.core.events import (
    Asked,
    Body,
    CopyDone,
    Event,
    Evict,
    Evicted,
    Flush,
    Insert,
    Match,
    Mode,
    MoverLost,
    Outcome,
    PoolClosed,
    PoolRegistered,
    Restore,
    Unlock,
)
from directory.core.ids import HOST, POOL_WORD
from directory.core.tokens import pack_pages, unpack_pages
from tests.simulation.tiny_parts import (
    HOST_PAGES,
    KEY,
    KEYS,
    MODES,
    OUTCOMES,
    PAGES,
    PATHS_BYTES,
    POOLS,
    Broken,
    Move,
    Scheduler,
)


class Tiny:
    """A directory with its two schedulers and the copies in flight."""

    def __init__(self, modes: tuple[Mode, Mode] = MODES) -> None:
        self.modes = modes
        self.directory = Directory(host_bytes=HOST_PAGES, segment_bytes=HOST_PAGES)
        self.schedulers: list[Scheduler | None] = [None] * POOLS
        self.by_pool: dict[int, Scheduler] = {}
        self.copies: dict[int, SubmitCopy] = {}
        self.host: dict[int, bytes] = {}
        self.replies: dict[tuple[int, int], object] = {}

    # What can happen.

    def moves(self) -> Iterator[Move]:
        """Everything that can happen now."""
        for index, scheduler in enumerate(self.schedulers):
            if scheduler is None:
                yield Move("register", index)
                continue
            yield Move("close", index)
            yield from self._moves_of(index, scheduler)
        for at, op in enumerate(self.copies):
            if self.words_hold(self.copies[op]):
                yield Move("ok", at)
            yield Move("void", at)
            peers = any(part.source != HOST != part.target for part in self.copies[op].parts)
            if peers and len(self.copies) > 1:
                yield Move("failed", at)
        if self.copies:
            yield Move("mover_lost")
        if self.directory.host.nodes:
            # Whoever asks, what is done is the same.
            live = [at for at, scheduler in enumerate(self.schedulers) if scheduler is not None]
            if live:
                yield Move("flush_host", live[0])

    def _moves_of(self, index: int, scheduler: Scheduler) -> Iterator[Move]:
        for which, key in enumerate(KEYS):
            if not scheduler.receipt:
                yield Move("match", index, which)
            if self._pages_for(scheduler, key) is not None:
                yield Move("insert", index, which)
        if scheduler.held:
            if scheduler.mode == "thin":
                yield Move("evict", index)
            else:
                paths = scheduler.held.values()
                for which, key in enumerate(KEYS):
                    if key in paths and not any(p != key and p.startswith(key) for p in paths):
                        yield Move("evict", index, which)
            yield Move("flush_pool", index)
        if scheduler.receipt:
            yield Move("unlock", index)
            idle = scheduler.beyond and scheduler.restore is None
            if idle and len(scheduler.free) >= scheduler.beyond:
                yield Move("restore", index)

    def do(self, move: Move) -> None:
        """Let it happen."""
        if move.what == "register":
            self._register(move.who)
        elif move.what in OUTCOMES:
            self._finish(list(self.copies)[move.who], OUTCOMES[move.what])
        elif move.what == "mover_lost":
            self.copies.clear()
            self._send(MoverLost(0, "gone"))
        elif move.what == "flush_host":
            self._ask(self._live(move.who), Flush("host"))
        elif move.what == "close":
            scheduler = self._live(move.who)
            self.schedulers[move.who] = None
            self._send(PoolClosed(scheduler.pool, 0))
        else:
            getattr(self, f"_{move.what}")(self._live(move.who), move.which)

    def _live(self, index: int) -> Scheduler:
        scheduler = self.schedulers[index]
        assert scheduler is not None
        return scheduler

    def _register(self, index: int) -> None:
        event = PoolRegistered(index, 0, f"s{index}", b"f", 1, PAGES, 1, self.modes[index])
        (said,) = self.directory.handle(event)
        assert isinstance(said, Registered), said
        scheduler = Scheduler(said.pool, self.modes[index])
        self.schedulers[index] = self.by_pool[said.pool] = scheduler

    def _match(self, scheduler: Scheduler, which: int) -> None:
        held = {path: page for page, path in scheduler.held.items()}
        start = 0
        if scheduler.mode == "mirrored":
            start = sum(KEYS[which].startswith(path) for path in held)
        reply = self._ask(scheduler, Match("r", 1, KEY, KEYS[which], start))
        assert isinstance(reply, Matched)
        for at, page in enumerate(unpack_pages(reply.own), 1):
            if held.get(KEYS[which][: at * PATHS_BYTES]) != page:
                raise Broken(f"{reply} where the scheduler holds {held}")
        if scheduler.mode == "mirrored" and (reply.own or reply.own_pages != start):
            raise Broken(f"{reply} beyond {start} pages of a mirrored scheduler")
        scheduler.receipt, scheduler.key = reply.receipt, KEYS[which]
        scheduler.own, scheduler.beyond = reply.own_pages, reply.restorable_pages

    def _unlock(self, scheduler: Scheduler, _: int) -> None:
        self._ask(scheduler, Unlock(scheduler.receipt))
        scheduler.receipt = 0

    def _pages_for(self, scheduler: Scheduler, key: bytes) -> tuple[list[int], int] | None:
        held = {path: page for page, path in scheduler.held.items()}
        row: list[int] = []
        for at in range(1, len(key) // PATHS_BYTES + 1):
            page = held.get(key[: at * PATHS_BYTES])
            if page is None:
                break
            row.append(page)
        missing = len(key) // PATHS_BYTES - len(row)
        if missing > len(scheduler.free):
            return None
        return row + scheduler.free[:missing], missing

    def _insert(self, scheduler: Scheduler, which: int) -> None:
        key = KEYS[which]
        found = self._pages_for(scheduler, key)
        assert found is not None
        row, missing = found
        for at, page in enumerate(row):
            scheduler.content[page] = key[: (at + 1) * PATHS_BYTES]
        self._publish(scheduler, key, row, missing)

    def _publish(self, scheduler: Scheduler, key: bytes, row: list[int], fresh: int) -> None:
        span = next((s for s in range(1, PAGES + 1) if s not in scheduler.span_of.values()), 0)
        body = Insert(
            "r",
            1,
            KEY,
            key,
            pack_pages(row),
            span,
            scheduler.words[span],
            (0, 0),
            scheduler.receipt if scheduler.mode == "thin" else 0,
        )
        reply = self._ask(scheduler, body)
        if scheduler.mode == "thin":
            if not isinstance(reply, Inserted) or unpack_pages(reply.canonical).tolist() != row:
                raise Broken(f"{body} was answered {reply}")
            if reply.fresh_pages != fresh:
                raise Broken(f"{reply.fresh_pages} pages are fresh, not {fresh}")
        for at, page in enumerate(row):
            if page not in scheduler.held:
                scheduler.held[page] = key[: (at + 1) * PATHS_BYTES]
                scheduler.span_of[page] = span
                if page in scheduler.free:
                    scheduler.free.remove(page)

    def _evict(self, scheduler: Scheduler, which: int) -> None:
        if scheduler.mode == "thin":
            self._gave_up(scheduler, self._ask(scheduler, Evict(1)))
            return
        # The end of a path is the last page of its span.
        page = next(page for page, path in scheduler.held.items() if path == KEYS[which])
        span = scheduler.span_of[page]
        first = sum(of == span for of in scheduler.span_of.values()) - 1
        scheduler.words[span] += 1
        self._free(scheduler, [page])
        self._ask(scheduler, Evicted(((span, first, 1),), ((span, scheduler.words[span]),)))

    def _flush_pool(self, scheduler: Scheduler, _: int) -> None:
        if scheduler.mode == "thin":
            self._gave_up(scheduler, self._ask(scheduler, Flush("pool")))
            return
        scheduler.words[POOL_WORD] += 1
        self._free(scheduler, list(scheduler.held))
        self._ask(scheduler, Flush("pool", scheduler.words[POOL_WORD]))

    def _gave_up(self, scheduler: Scheduler, reply: object) -> None:
        assert isinstance(reply, GaveUp), reply
        for span, value, _ in reply.words:
            scheduler.words[span] = value
        self._free(scheduler, unpack_pages(reply.pages))

    def _free(self, scheduler: Scheduler, pages: Iterable[int]) -> None:
        for page in pages:
            del scheduler.held[page]
            del scheduler.span_of[page]
            scheduler.free.append(page)
        scheduler.free.sort()

    def _restore(self, scheduler: Scheduler, _: int) -> None:
        targets = scheduler.free[: scheduler.beyond]
        del scheduler.free[: scheduler.beyond]
        scheduler.restore = (scheduler.key, scheduler.own, targets)
        body = Restore("r", 1, scheduler.receipt, scheduler.own, pack_pages(targets), (0, 0))
        self._ask(scheduler, body)

    # Copies.

    def words_hold(self, copy: SubmitCopy) -> bool:
        """Whether a mover could call it a success now."""
        named = {word.pool for word in copy.words}
        named |= {p for part in copy.parts for p in (part.source, part.target) if p != HOST}
        live = {s.pool for s in self.schedulers if s is not None}
        if not named <= live:
            return False
        return all(self.by_pool[w.pool].words[w.slot] == w.value for w in copy.words)

    def _finish(self, op: int, outcome: Outcome) -> None:
        copy = self.copies.pop(op)
        for part in copy.parts:
            source = self.memory(part.source)
            target = self.memory(part.target)
            pairs = zip(
                unpack_pages(part.source_pages), unpack_pages(part.target_pages), strict=True
            )
            for mine, theirs in pairs:
                target[theirs] = source.get(mine, b"") if outcome == "ok" else b"?"
        self._send(CopyDone(op, outcome, "", 1, 1))

    def memory(self, place: int) -> dict[int, bytes]:
        """What each page of a place holds."""
        return self.host if place == HOST else self.by_pool[place].content

    def _landed(self, scheduler: Scheduler, reply: Restored) -> None:
        assert scheduler.restore is not None
        key, own, targets = scheduler.restore
        scheduler.restore = None
        held = {path: page for page, path in scheduler.held.items()}
        row = [held.get(key[: (at + 1) * PATHS_BYTES], -1) for at in range(own)]
        if reply.landed:
            for at, page in enumerate(targets, own + 1):
                if scheduler.content.get(page) != key[: at * PATHS_BYTES]:
                    raise Broken(f"page {page} was restored as {scheduler.content.get(page)!r}")
        end = (own + len(targets)) * PATHS_BYTES
        rest = [held.get(key[: (own + at + 1) * PATHS_BYTES]) for at in range(len(targets))]
        if reply.landed and -1 not in row and not any(page is not None for page in rest):
            self._publish(scheduler, key[:end], row + targets, len(targets))
        else:
            scheduler.free += targets
            scheduler.free.sort()

    # The directory.

    def _ask(self, scheduler: Scheduler, body: Body) -> object:
        scheduler.seq += 1
        seq = scheduler.seq
        self._send(Asked(scheduler.pool, seq, 0, body))
        reply = self.replies.pop((scheduler.pool, seq), None)
        if isinstance(reply, Refused):
            raise Broken(f"{body} was refused: {reply}")
        return reply

    def _send(self, event: Event) -> None:
        self._take(self.directory.handle(event))

    def _take(self, actions: list[Action]) -> None:
        landed: list[tuple[Scheduler, Restored]] = []
        for action in actions:
            if isinstance(action, SubmitCopy):
                self.copies[action.op] = action
            elif isinstance(action, Answer):
                scheduler = self.by_pool[action.pool]
                if isinstance(action.body, Restored):
                    landed.append((scheduler, action.body))
                else:
                    self.replies[action.pool, action.seq] = action.body
        for scheduler, reply in landed:
            self._landed(scheduler, reply)

    def check(self) -> None:
        """Raise `Broken` where something does not hold."""
        found = self.directory.check()
        if found:
            raise Broken("; ".join(found))
        for node in self.directory.tree.nodes.values():
            path = b"".join(above.edge for above in node.path())
            first = len(path) // PATHS_BYTES - node.page_count
            for place in node.places:
                residency = node.resident(place)
                if residency is None:
                    continue
                for at, page in enumerate(unpack_pages(residency.pages), first + 1):
                    holds = self.memory(place).get(page)
                    if holds != path[: at * PATHS_BYTES]:
                        raise Broken(f"page {page} at {place} holds {holds!r}, is {path!r}")
        for scheduler in self.schedulers:
            if scheduler is not None:
                targets = scheduler.restore[2] if scheduler.restore else []
                pages = sorted([*scheduler.free, *scheduler.held, *targets])
                owned = self.directory.pools[scheduler.pool].owned
                if pages != list(range(PAGES)) or owned != scheduler.held.keys():
                    raise Broken(f"pages of {scheduler.pool}: {pages}, {owned}")
                pool = self.directory.pools[scheduler.pool]
                words = {span: scheduler.words[span] for span in scheduler.span_of.values()}
                if pool.word != scheduler.words[POOL_WORD] or words != {
                    span: state.value for span, state in pool.spans.items()
                }:
                    raise Broken(f"words of {scheduler.pool}: {scheduler.words}, {pool.spans}")
