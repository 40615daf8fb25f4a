"""Rows `ttft`: how long until the first token, by where the prefix comes from.

Owns one table: cold, own pool, host tier and the other engine's pool with treecored, beside cold,
L1 and L2 with SGLang's in-process HiCache, in the same run and in turn. One request at a time, one
new token, from the sending of the prompt to its answer; medians. Whatever it shows.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

from benchmarks.sglang_gpu import models
from benchmarks.sglang_gpu.pair import Pair
from benchmarks.sglang_gpu.places import Place
from benchmarks.sglang_gpu.scales import Scale
from benchmarks.sglang_gpu.workload import prompt
from tests.sglang.engines import Engine

PAGE: Final = 64
FILLER: Final = 4_096
WARM: Final = 1
ANSWER_S: Final = 60.0

Row = dict[str, list[float]]


def run(
    place: Place,
    scale: Scale,
    python: Path | str,
    *,
    chunk: int = 8_192,
    hicache: tuple[str, str] = ("kernel", "page_first"),
    save: Callable[[dict[str, Any]], None] = lambda _: None,
) -> dict[str, Any]:
    """Run the group; `save` is given what there is after each length."""
    model = models.make(scale.ttft_model, place.folder.parent / f"model-{scale.ttft_model}", python)
    given: dict[str, Any] = {
        "page_size": PAGE if place.cuda else 16,
        "max_total_tokens": scale.ttft_pool,
        "chunked_prefill_size": chunk,
        "context_length": scale.ttft_pool,
        "random_seed": 1,
    }
    tier = f"{scale.ttft_tier_gib}GiB" if place.cuda else "64MiB"
    with Pair(place, model, tier, given, checked=False) as pair:
        engines = [pair.start(name) for name in "ab"]
        engines.append(pair.start("c", 0, {"TREECORED_LOADS": "layerwise"}))
        beside: list[Engine] = []
        if place.cuda:
            backend, layout = hicache
            more = {
                "enable_hierarchical_cache": True, "hicache_size": scale.ttft_tier_gib,
                "hicache_write_policy": "write_through", "hicache_io_backend": backend,
                "hicache_mem_layout": layout, "model_path": str(model),
            }  # fmt: skip
            beside = [place.engine("hicache", {}, {**given, **more})]
        try:
            for engine in [*engines, *beside]:
                engine.wait_up()
            return _rows(pair, engines, beside, scale, save)
        finally:
            for engine in beside:
                engine.kill()


def _rows(
    pair: Pair,
    engines: list[Engine],
    beside: list[Engine],
    scale: Scale,
    save: Callable[[dict[str, Any]], None],
) -> dict[str, Any]:
    result: dict[str, Any] = {"ok": False, "lengths": {}}
    turn = 0
    _treecored(pair, engines, list(prompt(0, scale.ttft_lengths[0])), {}, [])
    for length in scale.ttft_lengths:
        row: Row = {}
        misses: list[str] = []
        for number in range(WARM + scale.ttft_pairs):
            turn += 1
            tokens = list(prompt(turn, length))
            kept = row if number >= WARM else {}
            _treecored(pair, engines, tokens, kept, misses if number >= WARM else [])
            for engine in beside:
                _hicache(engine, tokens, kept, scale.ttft_pool)
            result["lengths"][str(length)] = {
                name: {"median_ms": round(statistics.median(ms), 1), "ms": ms}
                for name, ms in row.items()
            } | {"misses": misses[:5]}
            save(result)
    report = pair.at_rest()
    result["violations"] = list(report.violations)[:5]
    result["complaints"] = pair.complaints()
    result["ok"] = not report.violations and not result["complaints"]
    return result


def _treecored(
    pair: Pair, engines: list[Engine], tokens: list[int], row: Row, misses: list[str]
) -> None:
    """Cold and own on the first engine, peer on the second; after flushes host on the first and,
    layer by layer, on the third."""
    first, second, third = engines
    before = pair.report().counters.get("pages_backed_up", 0)
    whole = len(tokens) - PAGE
    _ask(first, tokens, row, "cold", None, misses)
    _ask(first, tokens, row, "own", whole, misses)
    _ask(second, tokens, row, "peer", whole, misses)
    page = len(tokens) // PAGE
    give_up = time.monotonic() + 10
    while pair.report().counters.get("pages_backed_up", 0) < before + page - 1:
        if time.monotonic() > give_up:
            misses.append("the backup did not come")
            break
        time.sleep(0.01)
    first.flush()
    second.flush()
    _ask(first, tokens, row, "host", whole, misses)
    first.flush()
    _ask(third, tokens, row, "host, layer by layer", whole, misses)
    third.flush()


def _hicache(engine: Engine, tokens: list[int], row: Row, pool: int) -> None:
    """Cold and L1; L2 after other prompts have filled the pool."""
    _ask(engine, tokens, row, "hicache cold", None, [])
    _ask(engine, tokens, row, "hicache L1", None, [])
    for number in range(-(-pool // FILLER) + 1):
        engine.generate(list(prompt(hash((tokens[0], tokens[1], number)) % 10**9, FILLER)), 1)
    _ask(engine, tokens, row, "hicache L2", None, [])


def _ask(
    engine: Engine, tokens: list[int], row: Row, name: str, whole: int | None, misses: list[str]
) -> None:
    began = time.perf_counter()
    answer = engine.collect(engine.submit(tokens, 1), ANSWER_S)
    row.setdefault(name, []).append(round(1e3 * (time.perf_counter() - began), 2))
    row.setdefault(f"{name}, cached tokens", []).append(answer.cached)
    if whole is not None and answer.cached < whole:
        misses.append(f"{name} of {len(tokens)}: {answer.cached} cached, {answer.details}")
