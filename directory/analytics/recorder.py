"""The hand-over between whoever serves requests and the access log, and digests a piece at a time.

Owns the queue, its bounds and what is remembered of digests made before. To offer something costs
an append; the work waits for `step` (a small piece, for an idle loop) or `drain` (all of it). It
must never hold more than its bounds: what comes beyond is dropped, counted, and the log says so.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict, deque
from collections.abc import Generator, Sequence
from hashlib import blake2b
from typing import Final, TypeAlias

import msgspec

from directory.analytics.block import Pathed
from directory.analytics.log import AccessLog
from directory.analytics.record import Digests, Frame, chain

QUEUE_MAX: Final = 16_384
QUEUE_BYTES_MAX: Final = 64 * 1024 * 1024
PIECE_PAGES: Final = 32
"""Pages whose digests are made at once, or fewer where they are large,..."""
BYTES_AT_ONCE: Final = 16 * 1024
"""...for a piece has no more than that, unless a page has: it takes some 30 microseconds..."""
PIECES_KNOWN_AT_ONCE: Final = 8
"""...and no longer than so many that were met before, of no more bytes together."""
PIECES_KEPT_MAX: Final = 8_192

ENDS_KEPT_MAX: Final = 65_536
Ends: TypeAlias = OrderedDict[int, int]
"""The digest at the end of a path, by the number of its last part."""

Work: TypeAlias = Generator["Frame | None", None, "Frame | Pathed | None"]
"""Makes frames; what it returns is its last one. None: a piece is done and more is to come."""


class Recorder:
    """A bounded queue of frames and of work that makes frames. Used from one thread."""

    def __init__(
        self,
        log: AccessLog,
        *,
        queue_max: int = QUEUE_MAX,
        queue_bytes_max: int = QUEUE_BYTES_MAX,
    ) -> None:
        self._log = log
        self._queue_max = queue_max
        self._queue_bytes_max = queue_bytes_max
        self._queue: deque[tuple[Frame | Work, int]] = deque()
        self._work: Work | None = None
        self._nbytes = 0
        self._refused = 0
        self.refused = 0
        """Items that the queue had no room for, ever."""

    def offer(self, item: Frame | Work, nbytes: int = 0) -> bool:
        """Take an item that keeps `nbytes` alive; False, and counted, when there is no room."""
        if not self.has_room(nbytes):
            return False
        self._queue.append((item, nbytes))
        self._nbytes += nbytes
        return True

    def has_room(self, nbytes: int = 0) -> bool:
        """Whether an item could be taken; if not, one is counted as dropped. To be asked before
        something dear is done for an item."""
        if len(self._queue) < self._queue_max and self._nbytes + nbytes <= self._queue_bytes_max:
            return True
        self._refused += 1
        self.refused += 1
        return False

    def give_up(self) -> None:
        """Drop and count all that waits: there is no time left for it."""
        self._refused += len(self)
        self.refused += len(self)
        self._queue.clear()  # what the log has begun, it ends
        self._nbytes, self._work = 0, None

    def step(self, now_us: int) -> bool:
        """Do one piece of work; False when there is none."""
        if self._refused:
            self._log.lose(self._refused)
            self._refused = 0
        if self._log.go_on(now_us):
            return True
        work = self._work
        if work is None:
            if not self._queue:
                return False
            item, nbytes = self._queue.popleft()
            self._nbytes -= nbytes
            if isinstance(item, msgspec.Struct):
                self._log.begin(item, now_us)
                return True
            work = self._work = item
        frame: Frame | Pathed | None
        try:
            frame = next(work)
        except StopIteration as done:
            self._work = None
            frame = done.value
        if frame is not None:
            self._log.begin(frame, now_us)
        return True

    def drain(self, now_us: int) -> None:
        """Do all of it."""
        while self.step(now_us):
            pass

    @property
    def busy(self) -> bool:
        """Whether `step` has something to do."""
        return len(self) > 0 or self._log.busy

    @property
    def fill(self) -> float:
        """How full the queue is: 0 where nothing waits, and from 1 on it takes no more."""
        return max(len(self) / self._queue_max, self._nbytes / self._queue_bytes_max)

    def __len__(self) -> int:
        return len(self._queue) + (self._work is not None)


class Chains:
    """Chained digests, with those of pieces that were met of late at hand: what prompts share is
    hashed once, not page by page every time."""

    def __init__(self, *, key: bytes = b"", kept_max: int = PIECES_KEPT_MAX) -> None:
        self._key = key
        self._kept_max = kept_max
        self._kept: OrderedDict[tuple[int, int, bytes], Digests] = OrderedDict()

    def pieces(
        self, tokens: bytes, page_bytes: int, previous: int = 0
    ) -> Generator[None, None, Digests]:
        """The digests of the whole pages of packed tokens, as `record.chain` makes them; yields
        when it has worked for some 30 microseconds. `previous`: digest of the page before."""
        digests: Digests = array("Q")
        view = memoryview(tokens)
        end = len(tokens) - len(tokens) % page_bytes
        kept, known_at_once, known_bytes = self._kept, 0, 0
        piece_bytes = min(PIECE_PAGES, max(1, BYTES_AT_ONCE // page_bytes)) * page_bytes
        for start in range(0, end, piece_bytes):
            piece = view[start : min(end, start + piece_bytes)]
            name = (previous, page_bytes, blake2b(piece, digest_size=16).digest())
            found = kept.get(name)
            if found is not None:
                kept.move_to_end(name)
                known_at_once += 1
                known_bytes += len(piece)
            else:
                found = kept[name] = chain(
                    bytes(piece), page_bytes, key=self._key, previous=previous
                )
                if len(kept) > self._kept_max:
                    kept.popitem(last=False)
                known_at_once = PIECES_KNOWN_AT_ONCE
            digests.extend(found)
            previous = found[-1]
            if known_at_once >= PIECES_KNOWN_AT_ONCE or known_bytes >= BYTES_AT_ONCE:
                known_at_once = known_bytes = 0
                yield
        return digests

    def follow(
        self, ends: Ends, above: Sequence[tuple[int, bytes]], page_bytes: int, previous: int = 0
    ) -> Generator[None, None, int]:
        """The digest at the end of a path of (number, tokens) parts, from the one before them on;
        yields as `pieces` does. `ends`: of parts that were met before, and from now on of these.
        """
        digest = previous
        for number, tokens in above:
            known = ends.get(number)
            if known is None:
                made = yield from self.pieces(tokens, page_bytes, digest)
                known = ends[number] = made[-1]
                if len(ends) > ENDS_KEPT_MAX:
                    ends.popitem(last=False)
            digest = known
        return digest

    def whole(self, tokens: bytes, page_bytes: int) -> Digests:
        """The same at once."""
        work = self.pieces(tokens, page_bytes)
        while True:
            try:
                next(work)
            except StopIteration as done:
                found: Digests = done.value
                return found

    def one(self, page: bytes, previous: int) -> int:
        """The digest of one page that follows upon another one's."""
        return chain(page, len(page), key=self._key, previous=previous)[0]
