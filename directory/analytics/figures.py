"""The figures of a report as one plain structure: what `--json` prints and the page shows.

Owns the names and units of the fields. Everything here is computed from a finished `Study`; the
page and the pictures must never compute a figure that is not here.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import msgspec

from directory.analytics.attribution import MEANING
from directory.analytics.reader import LogHealth
from directory.analytics.reuse import Curve
from directory.analytics.study import Study
from directory.analytics.totals import Beside, HitTokens, Totals
from directory.analytics.workingset import WINDOWS_S

CURVE_POINTS: Final = 64
TENANTS_SHOWN_MAX: Final = 50
EXTRA_SHARES: Final = (0.125, 0.25, 0.5, 1.0, 2.0, 4.0)
NEARLY_ALL: Final = 0.95


class CurvePoint(msgspec.Struct, frozen=True):
    """An LRU cache of `pages` shared by all requests, and what would have hit in it."""

    pages: int
    bytes: int | None
    block_hit_ratio: float


class Mark(msgspec.Struct, frozen=True):
    """A capacity that is there now."""

    label: str
    pages: int
    bytes: int | None
    block_hit_ratio: float


class Extra(msgspec.Struct, frozen=True):
    """What a larger cache would give. saved_tokens: hit more than at the present capacity."""

    extra_pages: int
    extra_bytes: int | None
    pages: int
    block_hit_ratio: float
    saved_tokens: int


class DistanceBucket(msgspec.Struct, frozen=True):
    """Reused pages whose distance is in first..last."""

    first: int
    last: int
    pages: int


class TimeBucket(msgspec.Struct, frozen=True):
    """Sums of one stretch of time, beginning `at_s` seconds after the first request."""

    at_s: float
    requests: int
    prompt_tokens: int
    hit_tokens: HitTokens
    block_hit_ratio: float
    token_hit_ratio: float


class WorkingSetPoint(msgspec.Struct, frozen=True):
    """Different pages touched in the last window, by its name, at a moment."""

    at_s: float
    pages: dict[str, int]


class CauseLine(msgspec.Struct, frozen=True):
    """Requests whose hits ended for this cause, and tokens computed for it."""

    cause: str
    meaning: str
    requests: int
    tokens: int


class TenantLine(msgspec.Struct, frozen=True):
    """One tenant. pages: different pages that it brought in first."""

    tenant: str
    requests: int
    prompt_tokens: int
    block_hit_ratio: float
    token_hit_ratio: float
    hit_tokens: HitTokens
    pages: int
    evicted_tokens: int


class InstanceLine(msgspec.Struct, frozen=True):
    """One scheduler."""

    instance: str
    requests: int
    prompt_tokens: int
    token_hit_ratio: float
    hit_tokens: HitTokens


class Figures(msgspec.Struct, frozen=True):
    """A whole report. Ratios are fractions; docs/analytics.md defines them.

    basis: "observed" (an access log: what a real cache did) or "simulated" (a trace: one cache
    shared by all, of `simulated_pages`, None without end).
    """

    file: str
    format: str
    basis: str
    simulated_pages: int | None
    requests: int
    beside: Beside
    span_s: float
    page_tokens: int
    page_bytes: int | None
    prompt_tokens: int
    blocks: int
    hit_blocks: int
    block_hit_ratio: float
    token_hit_ratio: float
    hit_tokens: HitTokens
    missed_tokens: int
    block_hit_ratio_max: float
    different_pages: int
    pages_for_95_percent: int
    causes: list[CauseLine]
    evicted_from: dict[str, int]
    present: list[Mark]
    more: list[Extra]
    curve: list[CurvePoint]
    reuse_distance: list[DistanceBucket]
    bucket_s: float
    over_time: list[TimeBucket]
    working_set: list[WorkingSetPoint]
    tenants: list[TenantLine]
    tenants_left_out: int
    instances: list[InstanceLine]
    dropped_records: int
    other_page_sizes: int
    log: LogHealth | None


def figures(
    study: Study,
    *,
    file: str,
    format: str,  # noqa: A002
    page_bytes: int | None = None,
    present_pages: int | None = None,
    health: LogHealth | None = None,
) -> Figures:
    """Compute everything. page_bytes, present_pages: where the log does not say them."""
    curve, rooms = study.reuse.curve(), study.rooms
    page_bytes = page_bytes or rooms.page_bytes
    total, first_us = study.totals, study.first_us or 0
    marks = _marks(study, curve, page_bytes, present_pages)
    tenants = sorted(
        study.tenants.items(), key=lambda item: (-item[1].totals.prompt_tokens, item[0])
    )
    return Figures(
        file=file,
        format=format,
        basis="observed" if study.observed else "simulated",
        simulated_pages=None if study.observed else study.capacity,
        requests=total.requests,
        beside=study.beside,
        span_s=(study.last_us - first_us) / 1e6,
        page_tokens=study.page_tokens,
        page_bytes=page_bytes,
        prompt_tokens=total.prompt_tokens,
        blocks=total.blocks,
        hit_blocks=total.hit_blocks,
        block_hit_ratio=_rounded(total.block_hit_ratio),
        token_hit_ratio=_rounded(total.token_hit_ratio),
        hit_tokens=total.hit_tokens,
        missed_tokens=total.missed_tokens,
        block_hit_ratio_max=_rounded(curve.ratio_max),
        different_pages=study.reuse.pages,
        pages_for_95_percent=curve.capacity_for(NEARLY_ALL),
        causes=[
            CauseLine(cause, MEANING[cause], sums.requests, sums.tokens)
            for cause, sums in study.causes.items()
        ],
        evicted_from=dict(sorted(study.evicted_from.items())),
        present=marks,
        more=_more(curve, marks, page_bytes, study.page_tokens),
        curve=[
            CurvePoint(pages, _times(pages, page_bytes), _rounded(curve.ratio(pages)))
            for pages in _spread(curve.distance_max, marks)
        ],
        reuse_distance=_distances(curve),
        bucket_s=study.timeline.width_us / 1e6,
        over_time=[_bucket(at_us, first_us, totals) for at_us, totals in study.timeline],
        working_set=[
            WorkingSetPoint(
                (sample.at_us - first_us) / 1e6,
                {window_name(s): n for s, n in zip(WINDOWS_S, sample.pages, strict=True)}
                | {"ever": sample.ever},
            )
            for sample in study.working.samples
        ],
        tenants=[
            TenantLine(
                name,
                tenant.totals.requests,
                tenant.totals.prompt_tokens,
                _rounded(tenant.totals.block_hit_ratio),
                _rounded(tenant.totals.token_hit_ratio),
                tenant.totals.hit_tokens,
                tenant.pages,
                tenant.evicted_tokens,
            )
            for name, tenant in tenants[:TENANTS_SHOWN_MAX]
        ],
        tenants_left_out=max(0, len(tenants) - TENANTS_SHOWN_MAX),
        instances=[
            InstanceLine(
                name,
                totals.requests,
                totals.prompt_tokens,
                _rounded(totals.token_hit_ratio),
                totals.hit_tokens,
            )
            for name, totals in sorted(study.instances.items())
        ],
        dropped_records=study.dropped_records,
        other_page_sizes=study.other_page_sizes,
        log=health,
    )


def window_name(seconds: int) -> str:
    """A window for people: `1 min`."""
    return f"{seconds // 3600} h" if seconds >= 3600 else f"{seconds // 60} min"


def _marks(
    study: Study, curve: Curve, page_bytes: int | None, present_pages: int | None
) -> list[Mark]:
    rooms = study.rooms
    capacities: list[tuple[str, int]] = []
    if present_pages:
        capacities.append(("present capacity", present_pages))
    elif study.capacity and not study.observed:
        capacities.append(("assumed cache", study.capacity))
    else:
        if rooms.host_pages:
            capacities.append(("host tier", rooms.host_pages))
        if rooms.device_pages:
            label = "pools and host tier" if rooms.host_pages else "pools"
            capacities.append((label, rooms.host_pages + rooms.device_pages))
    return [
        Mark(label, pages, _times(pages, page_bytes), _rounded(curve.ratio(pages)))
        for label, pages in capacities
    ]


def _more(
    curve: Curve, marks: Sequence[Mark], page_bytes: int | None, page_tokens: int
) -> list[Extra]:
    """Shares of the largest present capacity on top of it, until nothing more is to be had."""
    if not marks:
        return []
    base, lines = marks[-1].pages, []
    for share in EXTRA_SHARES:
        extra = max(1, round(base * share))
        hits = curve.hits(base + extra)
        lines.append(
            Extra(
                extra,
                _times(extra, page_bytes),
                base + extra,
                _rounded(curve.ratio(base + extra)),
                (hits - curve.hits(base)) * page_tokens,
            )
        )
        if hits == curve.hits_max:
            break
    return lines


def _spread(pages_max: int, marks: Sequence[Mark]) -> list[int]:
    """Capacities at equal factors from 1 to the largest distance, and the present ones."""
    if pages_max < 1:
        return []
    points = {round(pages_max ** (step / CURVE_POINTS)) for step in range(CURVE_POINTS + 1)}
    points |= {mark.pages for mark in marks}
    # A little to the right of where the curve ends, so that its flat end is seen.
    points.add(pages_max + max(1, pages_max // 2))
    return sorted(points)


def _distances(curve: Curve) -> list[DistanceBucket]:
    """Powers of two."""
    edges = [1]
    while edges[-1] < curve.distance_max:
        edges.append(edges[-1] * 2)
    firsts = [1, *(edge + 1 for edge in edges[:-1])]
    return [
        DistanceBucket(first, last, pages)
        for first, last, pages in zip(firsts, edges, curve.histogram(edges), strict=True)
    ]


def _bucket(at_us: int, first_us: int, totals: Totals) -> TimeBucket:
    return TimeBucket(
        max(0, at_us - first_us) / 1e6,
        totals.requests,
        totals.prompt_tokens,
        totals.hit_tokens,
        _rounded(totals.block_hit_ratio),
        _rounded(totals.token_hit_ratio),
    )


def _times(pages: int, page_bytes: int | None) -> int | None:
    return None if page_bytes is None else pages * page_bytes


def _rounded(ratio: float) -> float:
    return round(ratio, 6)
