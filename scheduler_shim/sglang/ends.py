"""Ends: telling the daemon of requests that SGLang has finished.

Owns what is remembered of a request between its admission and its end, and the report. All numbers
are SGLang's own, but for where restored tokens came from. It must never be on the way of a batch:
a report leaves after the batch's outputs are used, and only to a daemon that wants it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final, Protocol

from directory.core.namespace import NamespaceKey
from directory.protocol.ended import Ended, EndedKind
from scheduler_shim.client import DaemonClient
from scheduler_shim.pools import Pool

PROBE: Final = "HEALTH_CHECK"
"""How the id of a health check begins (SGLang, srt/constants.py)."""
ADMITTED: Final = "_treecored_admitted"
TOLD: Final = "_treecored_told"


class Teller(Protocol):
    """What is needed of the shim."""

    key_of: Callable[..., tuple[NamespaceKey, bytes]]
    ended: list[Any]

    @property
    def client(self) -> DaemonClient | None:
        """The daemon's, while there is one."""
        ...

    @property
    def pool(self) -> Pool:
        """The engine's own."""
        ...

    def now_us(self) -> int:
        """The clock of the client."""
        ...


def admitted(shim: Teller, req: Any, restored: int, peers: int) -> None:
    """A request is admitted: so many tokens were restored for it, of which some from pools of
    others. What a preempted request finds when it comes back it has computed itself."""
    if getattr(req, ADMITTED, None) is None:
        setattr(req, ADMITTED, (shim.now_us(), restored, min(peers, restored)))


def results(shim: Teller) -> None:
    """A batch's outputs are used: report those that have finished of the requests that gave their
    rows back. (Who runs on is not looked at: there may be hundreds in every step.)

    The reports are held: the caller sends what is held.
    """
    reqs, shim.ended = shim.ended, []
    client = shim.client
    if client is None or client.lost or not client.registration.ended:
        return
    for req in reqs:
        if req.finished() and not getattr(req, TOLD, False):
            setattr(req, TOLD, True)
            told = report(shim, req, paths=client.registration.ended == "paths")
            client.report(told, hold=True)


def report(shim: Teller, req: Any, *, paths: bool) -> Ended:
    """The report of a finished request."""
    size = shim.pool.page_size
    prompt, output = len(req.origin_input_ids), len(req.output_ids)
    now_us = shim.now_us()
    since_us, restored, peers = getattr(req, ADMITTED, None) or (now_us, 0, 0)
    hit = min(int(req.cached_tokens), prompt)
    restored = min(restored, hit)
    peers = min(peers, restored)
    key, tokens = shim.key_of(req)
    # The last token put out is never computed into the pool; a partial page is not stored.
    stored = max(hit, (prompt + output - 1) // size * size)
    kind: EndedKind = "probe" if str(req.rid).startswith(PROBE) else "request"
    unit = key.unit_bytes
    return Ended(
        request=str(req.rid)[:256],
        attempt=0,
        namespace=key,
        kind=kind,
        prompt_tokens=prompt,
        output_tokens=output,
        hit=(hit - restored, restored - peers, peers, 0),
        found=hit,
        restored=restored,
        inserted=stored - hit,
        age_us=max(0, now_us - since_us),
        tokens=tokens[: stored * unit] if paths else b"",
    )
