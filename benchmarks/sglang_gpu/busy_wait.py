"""Rows `busy-wait`: what a tick's wait for the daemon's answers is worth, and what it costs.

Owns two pairs of engines that differ in `TREECORED_BUSY_WAIT_US` alone (0 or 500), each
with a daemon and a tier of its own, both up at once and asked the same conversations in turn.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Final

from benchmarks.sglang_gpu import models, turns
from benchmarks.sglang_gpu.loaded import REST_S, engine_options
from benchmarks.sglang_gpu.pair import Pair
from benchmarks.sglang_gpu.places import Place
from benchmarks.sglang_gpu.ratios import Ratio, paired
from benchmarks.sglang_gpu.scales import Scale

WAITS_US: Final = (0, 500)
ROUNDS: Final = 8
Save = Callable[[dict[str, Any]], None]


def run(
    place: Place, scale: Scale, python: Path | str, *, save: Save = lambda _: None
) -> dict[str, Any]:
    """Run the group: eight rounds of each, and one before that does not count."""
    load = scale.load
    folder = place.folder.parent / f"model-{scale.ttft_model}"
    if place.cuda:
        folder = models.without_weights(scale.ttft_model, place.folder / "model")
    else:
        models.make(scale.ttft_model, folder, python)
    given = engine_options(place, load, dummy=place.cuda)
    tier = f"{load.tier_gib}GiB" if place.cuda else "64MiB"
    with ExitStack() as stack:
        pairs = {}
        for wait_us in WAITS_US:
            environ = {"TREECORED_LOADS": "layerwise", "TREECORED_BUSY_WAIT_US": str(wait_us)}
            pair = Pair(
                place, folder, tier, given, environ, checked=False, wait=False,
                folder=place.folder / str(wait_us),
            )  # fmt: skip
            pairs[wait_us] = stack.enter_context(pair)
            for n in (0, 1):
                pair.start(f"w{wait_us}-{n}", n if len(place.gpus) > 1 else 0)
        for pair in pairs.values():
            for engine in pair.engines:
                engine.wait_up()
        for pair in pairs.values():
            pair.settled()
        result: dict[str, Any] = {"ok": False, "busy_wait_us": {wait: [] for wait in WAITS_US}}
        for number in range(1 + ROUNDS):
            for wait_us in WAITS_US[:: 1 if number % 2 else -1]:
                drove = turns.drive(pairs[wait_us].engines, load.talk, 10 + number)
                if number:
                    result["busy_wait_us"][wait_us].append(drove.as_json(load.talk))
                save(result)
                time.sleep(REST_S)
        result["factors"] = factors(*(result["busy_wait_us"][wait] for wait in WAITS_US))
        found = [pair.at_rest() for pair in pairs.values()]
        result["violations"] = [said for report in found for said in report.violations][:5]
        result["complaints"] = [said for pair in pairs.values() for said in pair.complaints()]
        result["counters"] = {wait: pair.counters(fresh=True) for wait, pair in pairs.items()}
        rounds = [one for some in result["busy_wait_us"].values() for one in some]
        failed = any(one["failed"] for one in rounds)
        result["ok"] = not (result["violations"] or result["complaints"] or failed)
        return result


def factors(
    without: list[dict[str, Any]], waiting: list[dict[str, Any]]
) -> dict[str, dict[str, float]]:
    """Mean time to the first token and rate with the wait, beside without: the mean ratio of the
    rounds, and its upper bound."""

    def of(name: str) -> dict[str, float]:
        ratio: Ratio = paired([one[name] for one in waiting], [one[name] for one in without])
        return {"ratio": round(ratio.value, 3), "upper": round(ratio.upper, 3)}

    return {name: of(name) for name in ("ttft_ms_mean", "requests_per_s")}
