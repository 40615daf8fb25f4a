"""The shrinker: a smaller run that still fails in the same way.

Owns nothing. Tries, in turn, to leave out a kind of fault, a scheduler, half of the requests, and
options that make runs long, and keeps every change with which the same checker still complains.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import msgspec

from tests.simulation.options import Options
from tests.simulation.simulation import Result, Simulation

Run = Callable[[Options], Result]

PLAIN = {
    "page_size": 1,
    "layers": 1,
    "namespaces": 1,
    "branches": 1,
    "documents": 1,
    "output_pages": 0,
    "running_max": 1,
    "waiting_max": 1,
    "turns": 0.0,
    "current_share": 0.0,
    "kept_bytes": 0,
    "portion": 0,
    "world_sizes": (),
}
"""Simpler values of single options, tried one by one."""


def run(options: Options) -> Result:
    """One run, with every event recounted, so that failures show where they begin."""
    return Simulation(msgspec.structs.replace(options, check_every=1, audit_every=1)).run()


def shrink(
    options: Options, checker: str, *, run: Run = run, tries_max: int = 200
) -> tuple[Options, Result | None, int]:
    """Return the smallest options found, their result, and how many runs it took."""
    best: Result | None = None
    tries = 0
    improved = True
    while improved:
        improved = False
        for smaller in _smaller(options):
            if tries >= tries_max:
                return options, best, tries
            tries += 1
            result = run(smaller)
            if result.problem and result.checker == checker:
                options, best, improved = smaller, result, True
                break
    return options, best, tries


def _smaller(options: Options) -> Iterator[Options]:
    """Variants of the options, the boldest first."""
    if len(options.rates) > 1:
        yield msgspec.structs.replace(options, rates={})
    count = len(options.modes)
    for fewer in sorted({1, 2, count // 2, count - 1}):
        if 0 < fewer < count:
            yield options.smaller(schedulers=fewer)
    if options.requests > 1:
        yield options.smaller(requests=options.requests // 2)
        yield options.smaller(requests=options.requests - 1)
    for fault in options.rates:
        yield options.without(fault)
    for name, plain in PLAIN.items():
        if getattr(options, name) != plain:
            yield msgspec.structs.replace(options, **{name: plain})
