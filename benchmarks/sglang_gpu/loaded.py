"""Rows `loaded`: conversations on two replicas, and decodes beside copies, for every system.

Owns the engines of the systems (treecored with each kind of loads, private HiCache, none beyond the
pool) on the same GPUs, all up at once and asked one system at a time in turn, with CUDA graphs for
decodes as SGLang has them (those that are not asked sleep, so that they take no core from those
that are); and what each costs: processor time in the cache, memory of mover and host tier. Each
kind of loads has a daemon and a host tier of its own: all systems are asked the same.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final

from benchmarks.sglang_gpu import cache_cost, gaps, models, turns
from benchmarks.sglang_gpu.compare import compare
from benchmarks.sglang_gpu.pair import Pair
from benchmarks.sglang_gpu.places import Place
from benchmarks.sglang_gpu.scales import Load, Scale
from tests.sglang.driver import SCHEDULER_VARIABLE
from tests.sglang.engines import Engine, EngineError

REST_S: Final = 0.3
LOADS: Final = ("layerwise", "adaptive")
"""The systems that are treecored's, each with this setting."""
Save = Callable[[dict[str, Any]], None]


def engine_options(place: Place, load: Load, *, dummy: bool) -> dict[str, Any]:
    """What every engine under such a load is started with. `dummy`: without weights of its own."""
    return {
        "page_size": 64 if place.cuda else 16,
        "max_total_tokens": load.pool,
        "max_running_requests": load.running,
        "chunked_prefill_size": load.chunk,
        "context_length": load.context,
        "random_seed": 1,
        **({"load_format": "dummy"} if dummy else {}),
    }


def run(
    place: Place,
    scale: Scale,
    python: Path | str,
    *,
    rounds: int = 0,
    checked: bool = False,
    save: Save = lambda _: None,
) -> dict[str, Any]:
    """Run the group. `rounds`: of each system (0: the scale's); `checked`: treecored alone, with
    every page compared (and random weights, so that pages differ), and nothing of it is a figure of
    speed. What is timed has SGLang's dummy weights: nobody looks at what is said."""
    folder = place.folder.parent / f"model-{scale.ttft_model}"
    dummy = place.cuda and not checked
    if dummy:
        folder = models.without_weights(scale.ttft_model, place.folder / "model")
    else:
        models.make(scale.ttft_model, folder, python)
    load = scale.load
    given = engine_options(place, load, dummy=dummy)
    if place.cuda:
        given |= {
            "disable_cuda_graph": False, "disable_prefill_cuda_graph": True,
            "cuda_graph_max_bs_decode": load.running,
        }  # fmt: skip
    tier = f"{load.tier_gib}GiB" if place.cuda else "64MiB"
    other = 1 if len(place.gpus) > 1 else 0
    with ExitStack() as stack:
        pairs = {
            loads: stack.enter_context(
                Pair(
                    place, folder, tier, given, {"TREECORED_LOADS": loads}, checked=checked,
                    wait=False, folder=place.folder / loads,
                )
            )
            for loads in LOADS
        }  # fmt: skip
        systems = {
            loads: [
                pair.start(f"{loads}0", 0, _cost(place, f"{loads}0", checked=checked)),
                pair.start(f"{loads}1", other),
            ]
            for loads, pair in pairs.items()
        }
        if not checked:
            plain = {"model_path": str(folder), **given}
            systems["none"] = [_beside(place, f"s{n}", plain, n * other) for n in (0, 1)]
            if place.cuda:
                systems["hicache"] = [
                    _beside(place, f"h{n}", plain | _hicache(load.tier_gib // 2), n * other)
                    for n in (0, 1)
                ]
                direct = _hicache(load.tier_gib // 2, "direct", "page_first_direct")
                systems["hicache-direct"] = [_beside(place, "d0", plain | direct, 0)]
        for engines in systems.values():
            for engine in engines:
                stack.callback(engine.kill)
        absent = without(systems)
        up = [e for name in systems if name not in LOADS for e in systems[name]]
        for pair in pairs.values():
            pair.settled(up)
        loaded = Loaded(pairs, systems, scale, rounds or load.rounds)
        result = loaded.run(save, decodes=not checked)
        result["absent"] = absent
        if checked:
            result["digests"] = {loads: _compared(pair) for loads, pair in pairs.items()}
            for digests in result["digests"].values():
                result["ok"] &= digests["wrong"] == 0 and digests["compared"] > 0
        return result


def _compared(pair: Pair) -> dict[str, Any]:
    pair.settle_digests()
    return compare(pair.digests).as_json()


def _cost(place: Place, name: str, *, checked: bool = False) -> dict[str, str]:
    """Variables of an engine whose scheduler counts what its cache costs."""
    if checked:
        return {}
    entry = f"{cache_cost.__name__}:run"
    file = str(place.folder / f"{name}.cost")
    return {SCHEDULER_VARIABLE: entry, cache_cost.FILE_VARIABLE: file}


def _beside(place: Place, name: str, given: dict[str, Any], gpu: int) -> Engine:
    environ = _cost(place, name) if name.endswith("0") else {}
    return place.engine(name, environ, given, gpu)


def _hicache(gib: int, backend: str = "kernel", layout: str = "page_first") -> dict[str, Any]:
    return {
        "enable_hierarchical_cache": True, "hicache_size": gib,
        "hicache_write_policy": "write_through", "hicache_io_backend": backend,
        "hicache_mem_layout": layout,
    }  # fmt: skip


def without(systems: dict[str, list[Engine]]) -> dict[str, str]:
    """Wait until all serve; a system that does not start is left out, and what it said is told.

    Raises `EngineError` where it is treecored's.
    """
    absent = {}
    for name, engines in list(systems.items()):
        try:
            for engine in engines:
                engine.wait_up()
        except EngineError as error:
            if name in LOADS:
                raise
            absent[name] = str(error)[-1500:]
            del systems[name]
    return absent


class Loaded:
    """The systems and what is asked of them."""

    def __init__(
        self, trees: dict[str, Pair], systems: dict[str, list[Engine]], scale: Scale, rounds: int
    ) -> None:
        self.trees = trees
        self.systems = systems
        self.scale = scale
        self.rounds = rounds

    def run(self, save: Save, *, decodes: bool) -> dict[str, Any]:
        """Conversations of every system, then decodes, in rounds that begin with another system
        each; each is saved."""
        talk = self.scale.load.talk
        result: dict[str, Any] = {
            "ok": False, "talk": asdict(talk), "turns": {}, "gaps": {}, "gap_ratios": {},
            "cost": {},
        }  # fmt: skip
        pairs = {name: engines for name, engines in self.systems.items() if len(engines) > 1}
        names = list(pairs)
        for number in range(self.rounds):
            for name in _from(number, names):
                found = turns.drive(pairs[name], talk, 10 + number).as_json(talk)
                result["turns"].setdefault(name, []).append(found)
                save(result)
                time.sleep(REST_S)
            result["factors"] = {loads: factors(result["turns"], loads) for loads in self.trees}
            result["cost"] = self._costs()
            save(result)
            if decodes and number < self.scale.load.decode_rounds:
                self._decodes(number, result, save)
        result["violations"] = [
            violation for pair in self.trees.values() for violation in pair.at_rest().violations
        ][:5]
        result["complaints"] = [said for pair in self.trees.values() for said in pair.complaints()]
        result["cost"] = self._costs(fresh=True)
        failed = [one["failed"] for rounds in result["turns"].values() for one in rounds]
        result["ok"] = not (result["violations"] or result["complaints"] or any(failed))
        return result

    def _decodes(self, number: int, result: dict[str, Any], save: Save) -> None:
        decodes = self.scale.load.decodes
        for name in _from(number, list(self.systems)):
            engines = self.systems[name]
            kept = gaps.prepare(engines[0], decodes, tiers=name != "none")
            time.sleep(REST_S)
            found = gaps.measure(engines[0], decodes, kept, 3 + number)
            result["gaps"].setdefault(name, []).append(found)
            result["gap_ratios"] = {
                loads: gaps.judged(result["gaps"], loads) for loads in self.trees
            }
            save(result)

    def _costs(self, *, fresh: bool = False) -> dict[str, Any]:
        """Of each system's first engine, and of the processes beside one of treecored's."""
        pair = next(iter(self.trees.values()))
        found: dict[str, Any] = {
            name: cache_cost.read(pair.place.folder / f"{engines[0].name}.cost")
            for name, engines in self.systems.items()
        }
        mover = pair.report().counters.get("daemon_mover_pid", 0)
        found["mover_gpu_bytes"] = pair.place.gpu_bytes_of(mover)
        found["mover_rss_bytes"] = _rss(mover)
        found["daemon_rss_bytes"] = _rss(pair.daemon.process.pid)
        found["counters"] = {loads: of.counters(fresh=fresh) for loads, of in self.trees.items()}
        found["scheduler_rss_bytes"] = {
            name: _rss(engines[0].schedulers[0])
            for name, engines in self.systems.items()
            if engines[0].schedulers
        }
        return found


def _from(number: int, names: list[str]) -> list[str]:
    """All of them, in turn, from another one in each round."""
    at = number % len(names)
    return names[at:] + names[:at]


def _rss(pid: int) -> dict[str, int]:
    """Resident memory of a process, its own and what it shares."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text(encoding="utf-8").splitlines()
    except OSError:
        return {}
    wanted = ("RssAnon", "RssFile", "RssShmem", "VmLck")
    return {
        name: 1024 * int(rest.split()[0])
        for name, _, rest in (line.partition(":") for line in lines)
        if name in wanted
    }


def factors(
    rounds: dict[str, list[dict[str, Any]]], name_of_ours: str
) -> dict[str, dict[str, float]]:
    """One system's throughput and mean time to the first token beside each other's that has as many
    rounds: medians over rounds of their ratios. Above 1 is better for both."""
    ours = rounds.get(name_of_ours, [])
    return {
        name: {
            "throughput": round(
                statistics.median(
                    a["requests_per_s"] / b["requests_per_s"]
                    for a, b in zip(ours, theirs, strict=True)
                ), 3,
            ),
            "ttft": round(
                statistics.median(
                    b["ttft_ms_mean"] / a["ttft_ms_mean"] for a, b in zip(ours, theirs, strict=True)
                ), 3,
            ),
        }
        for name, theirs in rounds.items()
        if name != name_of_ours
    }  # fmt: skip
