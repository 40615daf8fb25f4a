"""What was asked of the daemon, and for which request.

Owns the record of a question. It must never guess: a message that speaks for no single request
has no asker.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Final

from directory.core import limits
from directory.core.events import Insert, Live, Lock, Match, Request, Restore

LiveRequest = tuple[str, int]
"""A request's name and its attempt, as a `Live` report has them."""
FOR_ONE: Final = (Match, Lock, Restore, Insert)
"""Messages that speak for one request."""


class Question:
    """An asked message whose answer has not come. `due_us` 0: its deadline has passed."""

    __slots__ = ("body", "due_us", "sent_us")

    def __init__(self, body: Request, sent_us: int, due_us: int) -> None:
        self.body = body
        self.sent_us = sent_us
        self.due_us = due_us


def asker(body: Request) -> LiveRequest | None:
    """The request that a message speaks for; None when it speaks for no single one."""
    if isinstance(body, FOR_ONE):
        return body.request, body.attempt
    return None


def askers(bodies: Iterable[Request]) -> list[LiveRequest]:
    """The requests that messages speak for."""
    found = map(asker, bodies)
    return [request for request in found if request is not None]


def live_parts(live: Iterable[LiveRequest]) -> Iterator[Live]:
    """The messages that list all these requests, one after the other; one at least."""
    requests, most = tuple(live), limits.LIVE_REQUESTS_MAX
    for at in range(0, len(requests) or 1, most):
        yield Live(requests[at : at + most], first=at == 0, last=at + most >= len(requests))
