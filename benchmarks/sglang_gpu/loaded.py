"""Rows `loaded`: conversations on two replicas, and decodes beside copies, for every system.

Both, or one of them alone (`turns`, `gaps`). Owns the engines of the systems (treecored with each
kind of loads, private HiCache, none beyond the pool) on the same GPUs, all up at once and asked one
system at a time in turn, with CUDA graphs for decodes as SGLang has them (those that are not asked
sleep, so that they take no core from those that are); and what each costs: processor time in the
cache, memory of mover and host tier. Each kind of loads has a daemon and a host tier of its own:
all systems are asked the same.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Collection, Mapping
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from functools import partial
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
SYSTEMS: Final = (*LOADS, "none", "hicache", "hicache-direct")
PARTS: Final = ("turns", "gaps")
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
    parts: Collection[str] = PARTS,
    checked: bool = False,
    load: Load | None = None,
    systems_of: Collection[str] = SYSTEMS,
    save: Save = lambda _: None,
) -> dict[str, Any]:
    """Run the group. `parts`: of `PARTS`; `checked`: treecored alone, one round, with every page
    compared (and random weights, so that pages differ), and nothing of it is a figure of speed;
    `load`: instead of the scale's; `systems_of`: those that are asked. What is timed has SGLang's
    dummy weights: nobody looks at what is said."""
    folder = place.folder.parent / f"model-{scale.ttft_model}"
    dummy = place.cuda and not checked
    if dummy:
        folder = models.without_weights(scale.ttft_model, place.folder / "model")
    else:
        models.make(scale.ttft_model, folder, python)
    load = load or scale.load
    result: dict[str, Any] = {
        "ok": False, "talk": asdict(load.talk), "decodes": asdict(load.decodes), "turns": {},
        "gaps": {}, "gap_ratios": {}, "digests": {}, "violations": [], "complaints": [],
        "cost": {}, "absent": {},
    }  # fmt: skip
    if not checked:
        del result["digests"]
    given = engine_options(place, load, dummy=dummy)
    if place.cuda:
        given |= {
            "disable_cuda_graph": False, "disable_prefill_cuda_graph": True,
            "cuda_graph_max_bs_decode": load.running,
        }  # fmt: skip
    right = True
    for part in parts:
        pool = load.pool if part == "turns" else load.decodes_pool
        asked = Part(place, load, part, folder, given | {"max_total_tokens": pool}, checked=checked)
        asked.run(result, save, systems_of, models.kv_bytes(scale.ttft_model))
        right &= not (result["violations"] or result["complaints"])
    failed = [one["failed"] for rounds in result["turns"].values() for one in rounds]
    for digests in result.get("digests", {}).values():
        right &= digests["wrong"] == 0 and digests["compared"] > 0
    result["ok"] = right and not any(failed)
    return result


@dataclass
class Part:
    """One of the parts with its engines: two a system for `turns`, one for `gaps`."""

    place: Place
    load: Load
    name: str
    model: Path
    given: dict[str, Any]
    checked: bool

    def run(
        self, result: dict[str, Any], save: Save, systems_of: Collection[str], token_bytes: int
    ) -> None:
        """Start the engines, ask them, and end them."""
        place, load = self.place, self.load
        tier = f"{load.tier_gib}GiB" if place.cuda else "64MiB"
        with ExitStack() as stack:
            pairs = {
                loads: stack.enter_context(
                    Pair(
                        place, self.model, tier, self.given, {"TREECORED_LOADS": loads},
                        checked=self.checked, wait=not place.cuda,
                        folder=place.folder / self.name / loads,
                    )
                )
                for loads in LOADS
                if loads in systems_of
            }  # fmt: skip
            systems = self._systems(pairs, systems_of)
            for engines in systems.values():
                for engine in engines:
                    stack.callback(engine.kill)
            result["absent"] |= without(systems)
            up = [e for name in systems if name not in LOADS for e in systems[name]]
            for pair in pairs.values():
                pair.settled(up)
            loaded = Loaded(pairs, systems, load, result, save)
            if self.name == "turns":
                loaded.turns(1 if self.checked else load.rounds)
            else:
                loaded.gaps(1 if self.checked else load.decode_rounds, token_bytes)
            loaded.end()
            if self.checked:
                digests = {f"{self.name}, {loads}": _compared(of) for loads, of in pairs.items()}
                result["digests"] |= digests

    def _systems(
        self, pairs: dict[str, Pair], systems_of: Collection[str]
    ) -> dict[str, list[Engine]]:
        place = self.place
        replicas = range(2 if self.name == "turns" else 1)
        other = 1 if len(place.gpus) > 1 else 0
        systems = {
            loads: [
                pair.start(
                    f"{self.name}-{loads}{n}", n * other,
                    {} if n or self.checked else _cost(place, f"{self.name}-{loads}0"),
                )
                for n in replicas
            ]
            for loads, pair in pairs.items()
        }  # fmt: skip
        if self.checked:
            return systems
        plain = {"model_path": str(self.model), **self.given}
        each = self.load.tier_gib // len(replicas)
        given = {
            "none": plain, "hicache": plain | _hicache(each),
            "hicache-direct": plain | _hicache(each, "direct", "page_first_direct"),
        }  # fmt: skip
        for name, options in given.items():
            wanted = name in systems_of and (place.cuda or name == "none")
            if wanted and (self.name == "gaps" or name != "hicache-direct"):
                systems[name] = [
                    _beside(place, f"{self.name}-{name}{n}", options, n * other) for n in replicas
                ]
        return systems


def _compared(pair: Pair) -> dict[str, Any]:
    pair.settle_digests()
    return compare(pair.digests).as_json()


def _cost(place: Place, name: str) -> dict[str, str]:
    """Variables of an engine whose scheduler counts what its cache costs."""
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
    """The systems of one part, and what is asked of them. What comes of it goes into `result`."""

    def __init__(
        self,
        trees: dict[str, Pair],
        systems: dict[str, list[Engine]],
        load: Load,
        result: dict[str, Any],
        save: Save,
    ) -> None:
        self.trees = trees
        self.systems = systems
        self.load = load
        self.result = result
        self._save = save

    def turns(self, rounds: int) -> None:
        """Conversations of every system, in rounds that begin with another one each."""
        found = self.result["turns"]
        for number in range(rounds):
            for name in _from(number, list(self.systems)):
                drove = turns.drive(self.systems[name], self.load.talk, 10 + number)
                found.setdefault(name, []).append(drove.as_json(self.load.talk))
                self._save(self.result)
                time.sleep(REST_S)
            self.result["factors"] = {loads: factors(found, loads) for loads in self.trees}
            self.result["cost"] = self._costs()
            self._save(self.result)

    def gaps(self, rounds: int, token_bytes: int) -> None:
        """Decodes beside copies, in such rounds, at a pace by the engine that moves nothing, where
        there is one."""
        decodes, found = self.load.decodes, self.result["gaps"]
        engine = self.systems.get("none", next(iter(self.systems.values())))[0]
        pace = gaps.pace(engine, decodes, gaps.prepare(engine, decodes, tiers=False))
        self.result["pace"] = pace._asdict()
        for number in range(rounds):
            for name in _from(number, list(self.systems)):
                engine = self.systems[name][0]
                kept = gaps.prepare(engine, decodes, tiers=name != "none")
                time.sleep(REST_S)
                moved = partial(_moved, self.trees[name]) if name in self.trees else None
                one = gaps.measure(engine, decodes, kept, 3 + number, pace, token_bytes, moved)
                found.setdefault(name, []).append(one)
                self.result["gap_ratios"] = {
                    loads: gaps.judged(found, loads) for loads in self.trees
                }
                self._save(self.result)
            self.result["gaps_cost"] = self._costs()

    def end(self) -> None:
        """What the part costs in the end, and what is wrong with it."""
        reports = [pair.at_rest() for pair in self.trees.values()]
        self.result["violations"] += [said for one in reports for said in one.violations][:5]
        self.result["complaints"] += [
            said for pair in self.trees.values() for said in pair.complaints()
        ]
        costs = self._costs(fresh=True)
        self.result["gaps_cost" if "gaps_cost" in self.result else "cost"] = costs

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


def _moved(pair: Pair, at_rest: bool) -> Mapping[str, int]:
    """Bytes that one of treecored's has moved so far; `at_rest`: once it moves nothing."""
    counters = (pair.at_rest() if at_rest else pair.report()).counters
    return {name: counters.get(f"bytes_{name}", 0) for name in gaps.KINDS_MOVED}


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
