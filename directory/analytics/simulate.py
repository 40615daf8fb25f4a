"""What shared and private caches of any size would have hit: the requests of a source, replayed.

Owns the routing of requests to schedulers and the comparison. All capacities are answered by one
pass, because reuse distances do not depend on the capacity.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Final, Literal

import msgspec

from directory.analytics.record import Access
from directory.analytics.reuse import ReuseDistances
from directory.analytics.source import Source

Route = Literal["round-robin", "hash", "random", "recorded"]
ROUTES: Final[tuple[Route, ...]] = ("round-robin", "hash", "random", "recorded")
ROUTE_PAGES: Final = 2
SHARES: Final = (0.01, 0.02, 0.05, 0.1, 0.25, 0.5, 1.0)
"""Capacities when none are asked for, of the different pages."""


class Line(msgspec.Struct, frozen=True):
    """Block hit ratios with `pages` of memory in all: one cache, or as much split over them."""

    pages: int
    bytes: int | None
    shared: float
    private: float


class Simulation(msgspec.Struct, frozen=True):
    """Ratios are fractions. unlimited_*: caches that never evict."""

    file: str
    format: str
    requests: int
    blocks: int
    different_pages: int
    page_tokens: int
    schedulers: int
    route: Route
    unlimited_shared: float
    unlimited_private: float
    capacities: list[Line]


def simulate(
    source: Source,
    *,
    schedulers: int,
    route: Route = "round-robin",
    seed: int = 0,
    capacities: Sequence[int] = (),
    page_bytes: int | None = None,
) -> Simulation:
    """Replay a source. `recorded` takes the instances that the records name, however many.

    Raises `SourceError`.
    """
    shared = ReuseDistances()
    private: dict[object, ReuseDistances] = {}
    choose = _router(route, schedulers, seed)
    requests = page_tokens = 0
    for frame in source.frames():
        if not isinstance(frame, Access) or frame.tokens < 1:
            continue
        page_tokens = page_tokens or frame.page_tokens
        if frame.page_tokens != page_tokens:
            continue
        counts = frame.kind == "request"
        scheduler = choose(frame, requests)
        requests += counts
        path = frame.path
        hittable = len(path) if source.every_block else min(frame.hittable, len(path))
        extent = len(path)
        if source.observed:
            # A simulated cache may miss what the recorded one had: then it computes, and has it.
            extent = -(-(frame.hit.total + frame.inserted) // page_tokens)
        for cache in (shared, private.setdefault(scheduler, ReuseDistances())):
            cache.add(
                path,
                namespace=frame.namespace,
                extent=extent,
                blocks=frame.blocks,
                hittable=hittable,
                counts=counts,
            )
    curve = shared.curve()
    splits = [cache.curve() for cache in private.values()]
    wanted = capacities or sorted({max(1, round(shared.pages * share)) for share in SHARES})
    blocks = max(1, curve.blocks)

    def split(pages: int) -> float:
        return sum(c.hits(pages // max(1, len(splits))) for c in splits) / blocks

    return Simulation(
        file=source.path.name,
        format=source.kind,
        requests=requests,
        blocks=curve.blocks,
        different_pages=shared.pages,
        page_tokens=page_tokens,
        schedulers=len(splits),
        route=route,
        unlimited_shared=round(curve.ratio_max, 6),
        unlimited_private=round(sum(c.hits_max for c in splits) / blocks, 6),
        capacities=[
            Line(
                pages,
                None if page_bytes is None else pages * page_bytes,
                round(curve.ratio(pages), 6),
                round(split(pages), 6),
            )
            for pages in wanted
        ],
    )


def _router(route: Route, schedulers: int, seed: int) -> Callable[[Access, int], object]:
    """Which scheduler serves a request, by its record and its number."""
    chance = random.Random(seed)

    def choose(access: Access, number: int) -> object:
        if route == "recorded":
            return access.instance
        if route == "random":
            return chance.randrange(schedulers)
        return (_head(access) if route == "hash" else number) % schedulers

    return choose


def _head(access: Access) -> int:
    """A number that requests with the same first pages share."""
    path = access.path
    return path[min(ROUTE_PAGES, len(path)) - 1] if path else 0
