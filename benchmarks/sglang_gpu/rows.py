"""Rows `rows`: time to the first token by where the prefix comes from, beside stock and HiCache.

Owns the rows of one table and their order: every turn measures every column once, the engines in an
order drawn anew, so that what a machine does in a moment falls on all of them. Neither side
flushes: what is to come from a lower tier was evicted by what was asked in between (engines of the
other GPU, which have no counterpart, do). Before each timed request its engine has answered a short
one, so that no column pays for waking an idle process. One request at a time, one new token, from
sending the prompt to its answer. Engines that are not asked sleep, all of them: one that spins
makes the one that is timed as much as half as fast (an eager pass over 8 k cached tokens is bound
by the CPU).
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Final

from benchmarks.sglang_gpu import models
from benchmarks.sglang_gpu.compare import compare
from benchmarks.sglang_gpu.cores import Cores
from benchmarks.sglang_gpu.pair import Pair
from benchmarks.sglang_gpu.places import Place
from benchmarks.sglang_gpu.ratios import ratio_of
from benchmarks.sglang_gpu.scales import Scale
from benchmarks.sglang_gpu.workload import prompt
from tests.sglang.engines import Engine, session_of
from transfer.ipc.marks import VARIABLE, mark

ANSWER_S: Final = 60.0
BACKUP_S: Final = 20.0
GOALS: Final[dict[tuple[str, str], tuple[float, float]]] = {
    ("host", "HiCache L2"): (1.15, 1.15),
    ("own evicted", "HiCache L2"): (1.05, 1.05),
    ("host, held back", "HiCache L2"): (1.15, 1.15),
    ("peer", "own"): (1.10, 1.20),
    ("peer, other GPU", "own"): (1.10, 1.20),
    ("own", "stock own"): (1.03, 1.03),
}
"""(column, beside): the goals at shorter and at longer prompts."""
LONG: Final = 16_384
"""Tokens of a longer prompt, at least."""

Column = dict[str, list[float]]
Save = Callable[[dict[str, Any]], None]


def run(
    place: Place,
    scale: Scale,
    python: Path | str,
    *,
    pairs: int = 0,
    marks: bool = False,
    checked: bool = False,
    dummy: bool = False,
    hicache: tuple[str, str] = ("kernel", "page_first"),
    save: Save = lambda _: None,
) -> dict[str, Any]:
    """Run the group. `pairs`: turns a length (0: the scale's); `marks`: each process notes when
    what happened (transfer/ipc/marks.py); `checked`: every page is compared, nothing is timed;
    `dummy`: SGLang fills the weights in."""
    dummy &= place.cuda
    folder = place.folder.parent / f"model-{scale.ttft_model}"
    if dummy:
        folder = models.without_weights(scale.ttft_model, place.folder / "model")
    else:
        models.make(scale.ttft_model, folder, python)
    given: dict[str, Any] = {
        "page_size": 64 if place.cuda else 16,
        "max_total_tokens": scale.rows_pool,
        "chunked_prefill_size": 8_192,
        "context_length": scale.ttft_pool,
        "random_seed": 1,
        **({"load_format": "dummy"} if dummy else {}),
    }
    environ = {}
    if marks:
        environ[VARIABLE] = str(place.folder / "marks")
        (place.folder / "marks").mkdir(exist_ok=True)
        mark.begin_in(environ[VARIABLE])
    tier = f"{scale.rows_tier_gib}GiB" if place.cuda else "64MiB"
    with Pair(
        place, folder, tier, given, environ, checked=checked, daemons=environ, wait=False
    ) as pair:
        engines = {name: pair.start(name, 0, {"TREECORED_LOADS": "layerwise"}) for name in "ab"}
        if len(place.gpus) != 1:  # the dry run has them as well
            engines["n"] = pair.start("n", 1)
            engines["held"] = pair.start("held", 1, {"TREECORED_LOADS": "held"})
        beside: dict[str, Engine] = {}
        if not checked:
            beside["stock"] = place.engine("stock", {}, _plain(given, folder))
        if place.cuda and not checked:
            backend, layout = hicache
            more = {
                "enable_hierarchical_cache": True, "hicache_size": scale.hicache_gib,
                "max_total_tokens": scale.hicache_pool,
                "hicache_write_policy": "write_through", "hicache_io_backend": backend,
                "hicache_mem_layout": layout,
            }  # fmt: skip
            beside["hicache"] = place.engine("hicache", {}, _plain(given | more, folder))
        try:
            everybody = [*engines.values(), *beside.values()]
            for engine in everybody:
                engine.wait_up()
            pair.settled(list(beside.values()))
            spread(pair, everybody)
            rows = Rows(pair, {**engines, **beside}, scale, pairs)
            result = rows.run(save, marks=place.folder / "marks" if marks else None)
            if checked:
                pair.settle_digests()
                digests = compare(pair.digests)
                result["digests"] = digests.as_json()
                result["ok"] &= digests.wrong == 0 and digests.compared > 0
            return result
        finally:
            for engine in beside.values():
                engine.kill()


def spread(pair: Pair, engines: Sequence[Engine]) -> None:
    """Give every engine cores of its own; daemon, mover and this process have the rest."""
    cores = Cores.of_machine(len(engines))
    for share, engine in enumerate(engines):
        cores.move(share, session_of(engine.pid))
    daemon = pair.daemon.process.pid
    cores.move(None, [daemon, pair.report().counters["daemon_mover_pid"]])
    cores.settle()


def _plain(given: dict[str, Any], folder: Path) -> dict[str, Any]:
    return {"model_path": str(folder), **given}


class Rows:
    """The engines and what was measured. `engines`: a, b, n and held share a tree; n and held are
    on the other GPU. `pairs`: turns of each length (0: the scale's)."""

    def __init__(self, pair: Pair, engines: dict[str, Engine], scale: Scale, pairs: int) -> None:
        self.pair = pair
        self.engines = engines
        self.scale = scale
        self.pairs = pairs
        self.misses: list[str] = []
        self.page = int(pair.given["page_size"])
        self._short = list(prompt(999_999, self.page))  # no whole page that could be shared

    def run(self, save: Save, marks: Path | None) -> dict[str, Any]:
        """Every length in turn; what there is after each is saved."""
        result: dict[str, Any] = {"ok": False, "rows": {}, "ratios": {}}
        for at, length in enumerate(self.scale.rows_lengths):
            column: Column = {}
            for _ in self._turns(at, length, column, self.pairs or self.scale.rows_pairs[at]):
                result["rows"][str(length)] = {
                    name: {"median_ms": round(statistics.median(ms), 2), "ms": ms}
                    for name, ms in column.items()
                }
                result["misses"] = self.misses[:10]
                save(result)
            result["ratios"][str(length)] = judged(column, long=length >= LONG)
            save(result)
        report = self.pair.at_rest()
        result["violations"] = list(report.violations)[:5]
        result["complaints"] = self.pair.complaints()
        if marks is not None:
            from benchmarks.sglang_gpu.timeline import told

            result["timeline"] = told(marks)
        result["ok"] = not (report.violations or result["complaints"] or self.misses)
        return result

    def _turns(self, at: int, length: int, column: Column, pairs: int) -> Iterator[None]:
        """Prepare the prompts of a length, then measure in turns, after each of which there is more
        in the column."""
        fit = self.scale.rows_pool // length
        base = 1_000 * (at + 1)
        # Enough of them that each was evicted when its turn comes again.
        host = [list(prompt(base + n, length)) for n in range((fit + 2) // 2 * 2)]
        peers = [list(prompt(base + 500 + n, length)) for n in range(fit // 3 + 1)]
        apart = list(prompt(base + 900, length))  # in no pool but that of the engine that asks
        before = self._backed_up()
        a, b = self.engines["a"], self.engines["b"]
        for number, tokens in enumerate(host):
            self._ask("b" if number % 2 else "a", "cold", tokens, column, 0)
        a.generate(apart, 1)
        self._wait_backed_up(before + (len(host) + 1) * (length // self.page))
        a.flush()  # what the host tier is to give no pool has, and b has to restore its own
        b.flush()
        for tokens in peers:
            a.generate(tokens, 1)
        self._wait_backed_up(before + (len(host) + 1 + len(peers)) * (length // self.page))
        if "stock" in self.engines:
            self.engines["stock"].generate(peers[0], 1)
        hicache = self.engines.get("hicache")
        beside = host[: self.scale.hicache_pool // length + 1]
        if hicache is not None:
            for tokens in beside:
                hicache.generate(tokens, 1)
        first = self._restored()
        for turn in range(1 + pairs):
            kept = column if turn else {}
            self._turn(turn, kept, host, peers, apart, beside)
            yield
        each = (pairs + 1) * ((length - 1) // self.page)
        other = "n" in self.engines
        wanted = [each * (3 if other else 2), each * (2 if other else 1)]
        came = [after - at for after, at in zip(self._restored(), first, strict=True)]
        if came != wanted:
            self.misses.append(f"pages from the host and from pools: {came}, not {wanted}")

    def _turn(
        self,
        turn: int,
        kept: Column,
        host: list[list[int]],
        peers: list[list[int]],
        apart: list[int],
        beside: list[list[int]],
    ) -> None:
        length = len(peers[0])
        whole = length - 1 - (length - 1) % self.page
        even, peer = host[2 * turn % len(host)], peers[turn % len(peers)]
        odd = host[(2 * turn + 1) % len(host)]
        ask = self._ask

        def of_b() -> None:
            ask("b", "peer", peer, kept, whole, "pool")
            ask("b", "host", even, kept, whole, "host")
            ask("b", "own evicted", odd, kept, whole, "host")

        def of_n() -> None:
            self.engines["n"].flush()
            ask("n", "peer, other GPU", peer, kept, whole, "pool")

        def held_back() -> None:
            self.engines["held"].flush()
            ask("held", "host, held back", apart, kept, whole, "host")

        def of_hicache() -> None:
            first, second = (beside[(2 * turn + n) % len(beside)] for n in (0, 1))
            ask("hicache", "HiCache L2", first, kept, whole, "host")
            ask("hicache", "HiCache L1", first, kept, whole)
            ask("hicache", "HiCache L2 again", second, kept, whole, "host")

        rounds: dict[str, Callable[[], None]] = {
            "stock": lambda: ask("stock", "stock own", peers[0], kept, whole),
            "a": lambda: ask("a", "own", peer, kept, whole),
            "b": of_b, "n": of_n, "held": held_back, "hicache": of_hicache,
        }  # fmt: skip
        names = [name for name in rounds if name in self.engines]
        random.Random(turn).shuffle(names)
        for name in names:
            rounds[name]()

    def _ask(
        self, name: str, column: str, tokens: list[int], kept: Column, whole: int, source: str = ""
    ) -> None:
        """Time one request; a hit that is not what the column says is a miss."""
        engine = self.engines[name]
        engine.generate(self._short, 1)
        mark("ask", column.replace(" ", "_"), len(tokens))
        began = time.perf_counter()
        answer = engine.collect(engine.submit(tokens, 1), ANSWER_S)
        took = 1e3 * (time.perf_counter() - began)
        mark("told", answer.id)
        kept.setdefault(column, []).append(round(took, 3))
        restored = int(str((answer.details or {}).get("host", 0)))
        right = answer.cached >= whole and (restored > 0) == bool(source)
        right &= bool(whole) or not answer.cached
        if not right:
            self.misses.append(f"{column}: {answer.cached} of {whole}, {answer.details}")

    def _backed_up(self) -> int:
        return self.pair.report().counters.get("pages_backed_up", 0)

    def _restored(self) -> list[int]:
        counters = self.pair.at_rest().counters
        return [counters.get(f"{source}_pages_restored", 0) for source in ("host", "peer")]

    def _wait_backed_up(self, pages: int) -> None:
        give_up = time.monotonic() + BACKUP_S
        while self._backed_up() < pages:
            if time.monotonic() > give_up:
                self.misses.append(f"{self._backed_up()} pages were backed up of {pages}")
                return
            time.sleep(0.02)


def judged(column: Column, *, long: bool) -> dict[str, Any]:
    """Each column with a goal beside what it is to be compared with."""
    found = {}
    for (ours, theirs), goals in GOALS.items():
        if ours in column and theirs in column:
            ratio = ratio_of(column[ours], column[theirs])
            found[f"{ours} / {theirs}"] = {
                "ratio": round(ratio.value, 3), "upper": round(ratio.upper, 3),
                "goal": goals[long], "pairs": ratio.pairs,
                "ok": ratio.within(goals[long]),
            }  # fmt: skip
    return found
