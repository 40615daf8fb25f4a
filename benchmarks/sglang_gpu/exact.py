"""Rows `exact`: every page that was restored has the digest that it had when it was computed.

Owns one group: a pair under a load that evicts without end, then its owner's death. The group is
right if nothing differs, every request was answered, no invariant is broken and no engine
complains; without the destination fence it is right if something differs.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from benchmarks.sglang_gpu import models
from benchmarks.sglang_gpu.compare import compare
from benchmarks.sglang_gpu.pair import Pair
from benchmarks.sglang_gpu.places import Place
from benchmarks.sglang_gpu.scales import Scale
from benchmarks.sglang_gpu.workload import ANSWER_S, Drive, questions, visits, within
from tests.sglang.engines import Engine

UNFENCED = ("-m", "benchmarks.sglang_gpu.unfenced", "serve")
AFTER_DEATH = 24
"""Prompts of the killed engine that the other one is asked for."""


def run(
    place: Place,
    scale: Scale,
    python: Path | str,
    *,
    loads: str,
    page: int,
    overlap: bool,
    graphs: bool = False,
    fenced: bool = True,
    gpus: tuple[int, int] = (0, 0),
    seed: int = 1,
    mode: str = "mirrored",
) -> dict[str, Any]:
    """Run the group; returns its result."""
    model = models.make(scale.model, place.folder.parent / f"model-{scale.model}", python)
    given: dict[str, Any] = {
        "page_size": page,
        "max_total_tokens": scale.pool,
        "max_running_requests": scale.running,
        "chunked_prefill_size": scale.chunk,
        "context_length": scale.longest + 200,
        "disable_cuda_graph": not graphs,
        **(
            {"cuda_graph_max_bs_decode": scale.running, "disable_prefill_cuda_graph": True}
            if graphs
            else {}
        ),
        "disable_overlap_schedule": not overlap,
        "schedule_conservativeness": 0.3,
    }
    environ = {"TREECORED_LOADS": loads, "TREECORED_MODE": mode}
    program = () if fenced else UNFENCED
    with Pair(place, model, scale.host_tier, given, environ, program) as pair:
        engines = [pair.start(name, gpu) for name, gpu in zip("ab", gpus, strict=True)]
        for engine in engines:
            engine.wait_up()
        return _rows(pair, engines, scale, fenced=fenced, seed=seed)


def _rows(
    pair: Pair, engines: list[Engine], scale: Scale, *, fenced: bool, seed: int
) -> dict[str, Any]:
    began = time.monotonic()
    asked = questions(scale.prompts, scale.shortest, scale.longest, seed)
    drive = Drive(engines, visits(asked, scale.times, seed), seed, scale.under_way)
    answers = drive.run(within(scale.seconds))
    driven_s = time.monotonic() - began
    pair.settle_digests()
    before = pair.at_rest()

    dead, survivor = engines
    dead.kill()
    death = time.monotonic()
    theirs = [q for q in asked if "a" in drive.visited.get(q.number, ())][-AFTER_DEATH:]
    after_death = Drive([survivor], theirs, seed, scale.under_way)
    after = after_death.run()
    pair.settle_digests()
    at_rest = pair.at_rest()
    found = compare(pair.digests, {dead.name: death})
    violations = [*before.violations, *at_rest.violations]
    failed = [*answers.failed, *after.failed]
    clean = not violations and not failed and not pair.complaints() and found.unknown == 0
    right = clean and found.wrong == 0 and found.compared > 0
    return {
        "ok": right if fenced else found.wrong > 0,
        "digests": found.as_json(),
        "requests": answers.answered + after.answered,
        "not_asked": len(drive.left),
        "prompt_tokens": answers.prompt_tokens + after.prompt_tokens,
        "cached_tokens": answers.cached_tokens + after.cached_tokens,
        "after_death_cached": after.cached_tokens,
        "failed": failed[:5],
        "failed_count": len(failed),
        "violations": violations[:5],
        "complaints": pair.complaints(),
        "daemon": {name: before.counters[name] for name in COUNTERS if name in before.counters},
        "engines": {engine.name: _stats(engine) for engine in engines},
        "seconds": round(driven_s, 1),
        "deadline_s": ANSWER_S,
    }


COUNTERS = (
    "host_pages_restored", "peer_pages_restored", "pages_backed_up", "pool_pages_evicted",
    "host_pages_evicted", "copies_void", "bytes_restored",
)  # fmt: skip
STATS = (
    "restores", "landed", "lost", "loads", "loads_declined", "loads_put_back", "offers",
    "offers_held_back", "offers_crowded",
    "loads_lost_in_flight", "matches_missed", "held_too_long", "restores_without_room",
    "tick_us_max", "rtt_us_p50", "rtt_us_p99", "problems_seen", "failure", "why_degraded",
    "last_loss",
)  # fmt: skip


def _stats(engine: Engine) -> dict[str, Any]:
    stats = engine.stats()
    return {name: stats[name] for name in STATS if name in stats}
