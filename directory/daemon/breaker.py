"""A circuit breaker: copies of a kind that keep failing are not tried for a while.

Owns the count of failures and the time of the next try, and no clock. Only what the device or its
mover failed at counts, never a copy that was void, that nobody fenced or that lost its owner. While
it is open copies fail at once, which costs a miss each and holds nobody; then one copy is let
through, and what becomes of it decides. It must never let two through to try.
"""

from enum import StrEnum
from typing import Final

import structlog

from directory.core.ids import OpId
from directory.core.states import Table, step

FAILURES_MAX: Final = 5
"""So many failures without a success between them open it."""
REST_US_MIN: Final = 1_000_000
REST_US_MAX: Final = 30_000_000
"""It rests twice as long after every try that failed, up to this."""

log = structlog.get_logger("breaker")


class BreakerState(StrEnum):
    """State of one breaker."""

    CLOSED = "closed"
    OPEN = "open"
    TRYING = "trying"


class BreakerEvent(StrEnum):
    """What happens to a breaker."""

    TRIP = "trip"
    TRY = "try"
    RECOVER = "recover"
    FAIL = "fail"


_S, _E = BreakerState, BreakerEvent
BREAKER: Final[Table] = {
    (_S.CLOSED, _E.TRIP): _S.OPEN,
    (_S.OPEN, _E.TRY): _S.TRYING,
    (_S.TRYING, _E.RECOVER): _S.CLOSED,
    (_S.TRYING, _E.FAIL): _S.OPEN,
}


class Breaker:
    """The breaker of one kind of copy."""

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self.state = BreakerState.CLOSED
        self._failures = 0
        self._rest_us = REST_US_MIN
        self._try_us = 0
        self._tried: OpId | None = None

    def allows(self, op: OpId, now: int) -> bool:
        """Whether a copy may be tried now; an open one that has rested takes this as its try."""
        if self.state is BreakerState.OPEN and now >= self._try_us:
            self._to(BreakerEvent.TRY)
            self._tried = op
            return True
        return self.state is BreakerState.CLOSED

    def ended(self, op: OpId, *, broken: bool, now: int) -> bool:
        """A copy that was allowed has ended; says whether that has opened a closed breaker.

        While it is open or trying, copies from before decide nothing.
        """
        if self.state is BreakerState.TRYING and op == self._tried:
            self._tried = None
            if broken:
                self._rest_us = min(2 * self._rest_us, REST_US_MAX)
                self._open(BreakerEvent.FAIL, now)
            else:
                self._to(BreakerEvent.RECOVER)
                self._failures, self._rest_us = 0, REST_US_MIN
                log.info("copies are tried again", kind=self.kind)
        elif self.state is BreakerState.CLOSED:
            self._failures = self._failures + 1 if broken else 0
            if self._failures >= FAILURES_MAX:
                self._open(BreakerEvent.TRIP, now)
                return True
        return False

    def mover_lost(self, ops: set[OpId], now: int) -> bool:
        """The mover died with these copies, one failure however many they were; as `ended`."""
        op = self._tried if self._tried in ops else next(iter(ops))
        return self.ended(op, broken=True, now=now)

    def forget(self, op: OpId, now: int) -> None:
        """A copy that was allowed was never tried: the next one may be."""
        if self.state is BreakerState.TRYING and op == self._tried:
            self._tried = None
            self._to(BreakerEvent.FAIL)
            self._try_us = now

    def _open(self, event: BreakerEvent, now: int) -> None:
        self._to(event)
        self._try_us = now + self._rest_us
        log.error(
            "copies keep failing and are not tried for a while",
            kind=self.kind,
            failures=self._failures,
            rest_ms=self._rest_us // 1000,
        )

    def _to(self, event: BreakerEvent) -> None:
        self.state = step(BREAKER, self.state, event, self)

    def __repr__(self) -> str:
        return f"<Breaker {self.kind} {self.state}, {self._failures} failures>"
