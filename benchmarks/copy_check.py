"""Whether the copies that are timed move the right bytes: without that, no figure counts.

Owns a few pages and their digests; their scheduler reads them, not the mover.
"""

from __future__ import annotations

from collections.abc import Sequence

from benchmarks import copy_messages as m
from benchmarks.copy_layouts import TOKEN_BYTES
from benchmarks.copy_pages import packed, scattered, slots_of
from benchmarks.copy_rig import SchedulerProcess
from benchmarks.copy_rows import Bench
from directory.core.actions import Landing
from directory.core.ids import HOST, LANDINGS

PAGES = 6


class WrongBytes(RuntimeError):
    """A copy said "ok" and its pages are others."""


def check_copies(bench: Bench, page_size: int = 64, name: str = "A") -> None:
    """Out of the first pool (as `name`), back whole and by layers, and to every other pool."""
    scheduler = bench.scheduler
    count = min(PAGES, bench.pages(page_size) // 4)
    pages = scattered(bench.pages(page_size), 4 * count, bench.rng)
    source, whole, layered, peers = (pages[n * count : (n + 1) * count] for n in range(4))
    slots_each = bench.per_segment(page_size)
    total = slots_each * bench.rig.tier.shape.segment_count
    slots = slots_of(scattered(total, count, bench.rng), slots_each)
    pool, done = bench.pool(name, page_size), bench.rig.done
    submit = bench.rig.submit
    scheduler.ask(m.Fill("A", 11), m.Done)
    expected = _digest(scheduler, "A", page_size, source)
    done(submit("backup", pool, source, HOST, slots))
    if bench.two_gpus and bench.far is not None:
        done(submit("peer_copy", pool, source, bench.pool("C", page_size), peers))
        _compare(expected, _digest(bench.far, "C", page_size, peers), "a copy to the other GPU")
    done(submit("peer_copy", pool, source, bench.pool("B", page_size), peers))
    _compare(expected, _digest(scheduler, "B", page_size, peers), "a copy to the other pool")
    scheduler.ask(m.Fill("A", 12), m.Done)
    if _digest(scheduler, "A", page_size, whole) == expected:
        raise WrongBytes("the check cannot fail")
    done(submit("load_back", HOST, slots, pool, whole))
    _compare(expected, _digest(scheduler, "A", page_size, whole), "a load back")
    table = scheduler.timelines("A")
    landing = Landing(pool, LANDINGS, table.read(LANDINGS))
    done(submit("load_back", HOST, slots, pool, layered, landing=landing))
    _compare(expected, _digest(scheduler, "A", page_size, layered), "a load back by layers")
    if table.read(LANDINGS) != landing.first + bench.sizes.buffers // 2:
        raise WrongBytes("not every layer was told")
    table.close()


def _digest(scheduler: SchedulerProcess, name: str, page_size: int, pages: Sequence[int]) -> bytes:
    request = m.Digest(name, page_size * TOKEN_BYTES, packed(pages))
    return scheduler.ask(request, m.Digested).digest


def _compare(expected: bytes, found: bytes, what: str) -> None:
    if found != expected:
        raise WrongBytes(f"{what} brought other bytes")
