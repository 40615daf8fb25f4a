"""Telling the daemon of a request that has ended: what it hit, and what it left behind.

Owns the arithmetic of one report. It must never be on the way of an answer: a report is sent when
all else of a request is done, and only to a daemon that has asked for it.
"""

from __future__ import annotations

from directory.protocol.ended import Ended, Wanted
from scheduler_shim.request import Request


def tell(request: Request, page_size: int, now_us: int, wanted: Wanted) -> Ended | None:
    """The report of an admission that is over, or None where there was none or nobody asks.

    A request that was preempted and comes again is told once more, as a recomputation: what it
    finds then it has computed itself, and that is no reuse.
    """
    admitted = request.computed > 0
    if not wanted or not admitted:
        return None
    own, host, peer = request.own_pages, request.host_pages, request.peer_pages
    hit_pages = own + host + peer
    stored = max(request.accepted_pages, hit_pages)
    path = max(stored, request.prompt_pages) * request.page_key if wanted == "paths" else 0
    unit = request.page_key // page_size
    ended = Ended(
        request=request.name,
        attempt=request.attempt,
        namespace=request.key,
        kind="recompute" if request.told else "request",
        prompt_tokens=request.prompt_bytes // unit,
        output_tokens=(len(request.tokens) - request.prompt_bytes) // unit,
        hit=(own * page_size, host * page_size, peer * page_size, 0),
        found=max(request.reach, hit_pages) * page_size,
        restored=(host + peer) * page_size,
        inserted=(stored - hit_pages) * page_size,
        lookups=request.lookups,
        age_us=max(0, now_us - request.looked_us),
        latency_us=request.latency_us,
        restore_us=request.restore_us,
        tokens=request.tokens[:path],
    )
    request.told = True
    request.lookups = request.looked_us = request.latency_us = request.restore_us = 0
    return ended
