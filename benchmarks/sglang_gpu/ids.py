"""Rows `ids`: what the engines answer, beside what a stock engine without any cache answers.

Owns the comparison of ids. Stock SGLang is compared with itself first, over two runs in different
batches: only prompts for which it agrees with itself are an oracle, and the share for which it does
not is what a shared cache may have, too. Beside it stands what a stock engine with its own cache
answers to the same visits: its tree and, on a GPU, HiCache with a host tier as large, because a hit
is another batch than a cold run and only as many hits of either kind make a fair comparison.
"""

from __future__ import annotations

from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from benchmarks.sglang_gpu import models
from benchmarks.sglang_gpu.compare import compare
from benchmarks.sglang_gpu.pair import Pair
from benchmarks.sglang_gpu.places import Place
from benchmarks.sglang_gpu.scales import Scale
from benchmarks.sglang_gpu.workload import Answers, Drive, questions, visits
from tests.sglang.engines import Engine

NEW = 16
TIMES = 3
ONE_SIDED_95 = 1.645


def run(
    place: Place,
    scale: Scale,
    python: Path | str,
    *,
    deterministic: bool,
    loads: str = "held",
    page: int = 16,
    seed: int = 2,
) -> dict[str, Any]:
    """Run the group; returns its result."""
    model = models.make(scale.model, place.folder.parent / f"model-{scale.model}", python)
    # A stock engine that has begun a long prompt in chunks admits others into the room of its later
    # chunks, and ends itself when that is gone ("Prefill out of memory"): twice the room, and half
    # as many at a time, keep all of them from it.
    running = max(1, scale.running // 2)
    given: dict[str, Any] = {
        "page_size": page,
        "max_total_tokens": 2 * scale.pool,
        "max_running_requests": running,
        "chunked_prefill_size": scale.chunk,
        "context_length": scale.longest + 200,
    }
    if deterministic and place.cuda:
        # SGLang then cuts prompts at multiples of 4,096 and never admits one for which the chunk
        # is smaller, with its own cache as well.
        given |= {"enable_deterministic_inference": True, "chunked_prefill_size": 8_192}
    with Pair(place, model, scale.host_tier, given, {"TREECORED_LOADS": loads}) as pair:
        plain = {"model_path": str(model), **given}
        stock = [place.engine("stock", {}, {**plain, "disable_radix_cache": True})]
        more: dict[str, Any] = {}
        if place.cuda and not deterministic:
            more = {
                "enable_hierarchical_cache": True, "hicache_size": scale.ids_tier_gb,
                "hicache_write_policy": "write_through",
            }  # fmt: skip
        stock.append(place.engine("radix", {}, plain | more))
        engines = [pair.start(name) for name in "ab"]
        try:
            for engine in [*stock, *engines]:
                engine.wait_up()
            return _rows(pair, stock, engines, scale, deterministic=deterministic, seed=seed)
        finally:
            for engine in stock:
                engine.kill()


def _rows(
    pair: Pair,
    stock: list[Engine],
    engines: list[Engine],
    scale: Scale,
    *,
    deterministic: bool,
    seed: int,
) -> dict[str, Any]:
    asked = questions(scale.ids, scale.shortest, scale.ids_longest, seed, NEW)
    with ThreadPoolExecutor() as at_a_time:
        beside = at_a_time.submit(
            Drive([stock[1]], visits(asked, TIMES, seed), seed, scale.under_way).run
        )
        shared_run = at_a_time.submit(
            Drive(engines, visits(asked, TIMES, seed), seed, scale.under_way).run
        )
        drives = [Drive([stock[0]], visits(asked, 1, t), t, scale.running // 2) for t in (1, 2)]
        cold = [drive.run() for drive in drives]
        radix, shared = beside.result(), shared_run.result()
    pair.settle_digests()
    digests = compare(pair.digests)
    at_rest = pair.at_rest()
    first, second = ({n: seen[0][0] for n, seen in answers.ids.items()} for answers in cold)
    agree = {number for number in first if second.get(number) == first[number]}
    rows = judge(shared, first, agree)
    own_cache = judge(radix, first, agree)
    failed = [*shared.failed, *cold[0].failed, *cold[1].failed]
    differing = len(asked) - len(agree)
    if deterministic:
        right = rows["differing_visits"] == 0 and bool(agree)
    else:
        right = not above(rows, own_cache)
    clean = not failed and not at_rest.violations and not pair.complaints()
    return {
        "ok": right and clean and digests.wrong == 0 and digests.unknown == 0,
        "prompts": len(asked),
        "stock_differs_from_itself": differing,
        **rows,
        "stock_radix": own_cache,
        "digests": digests.as_json(),
        "failed": failed[:5],
        "violations": list(at_rest.violations)[:5],
        "complaints": pair.complaints(),
    }


def above(ours: dict[str, Any], stock: dict[str, Any]) -> bool:
    """Whether more of our visits differ from a cold answer than of stock's with its own cache, by
    more than chance makes of two like samples in one of twenty."""
    total = ours["all_visits"] + stock["all_visits"]
    share = (ours["all_differing"] + stock["all_differing"]) / total
    error = (share * (1 - share) * 4 / total) ** 0.5
    return bool(ours["differing_share"] > stock["differing_share"] + ONE_SIDED_95 * error)


def judge(shared: Answers, first: dict[int, list[int]], agree: set[int]) -> dict[str, Any]:
    """Visits that differ from the stock answer, by kind of hit, where stock agrees with itself;
    and, over all prompts, the share of visits that differ from stock's first run, in all and
    [differing, all] by kind."""
    visits_by: Counter[str] = Counter()
    differ_by: Counter[str] = Counter()
    every: Counter[str] = Counter()
    of_every: Counter[str] = Counter()
    differing = total = 0
    for number, seen in shared.ids.items():
        for tokens, cached, host in seen:
            kind = "restored" if host else "own pool" if cached else "cold"
            same = tokens == first.get(number)
            total += 1
            differing += not same
            every[kind] += 1
            of_every[kind] += not same
            if number in agree:
                visits_by[kind] += 1
                differ_by[kind] += not same
    return {
        "visits": dict(visits_by),
        "differing": {kind: count for kind, count in differ_by.items() if count},
        "differing_visits": sum(differ_by.values()),
        "differing_share": differing / max(1, total),
        "by_kind": {kind: [of_every[kind], count] for kind, count in sorted(every.items())},
        "all_differing": differing,
        "all_visits": total,
    }
