"""Rows `rows`: time to the first token by where the prefix comes from, beside stock and HiCache.

Owns the rows of one table and their order: a round measures every column once, and what is compared
was measured in the same rounds. An eager pass over 8 k cached tokens is bound by the CPU, and a CPU
is half as fast for moments of some tenths of a second: so all engines have their turn on the same
core (cores.py), columns of a ratio are measured beside one another, as often one first as the other
(`order`), and all collectors are quiet (quiet.py). Every column is asked under the same
circumstances: another engine had the core before, and then its own engine answered, uncounted, what
it was asked last once more, which is as long and in its pool. So nothing pays for waking an idle
process or for a core whose caches are another's, and as that prompt was the newest already, no
order of eviction changes. Nobody flushes: what is to come from a lower tier or another pool was
evicted by what was asked in between. One request at a time, one new token, from sending the prompt
to its answer. Engines that are not asked sleep, all of them.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from pathlib import Path
from typing import Any, ClassVar, Final, NamedTuple

from benchmarks.sglang_gpu import models, quiet
from benchmarks.sglang_gpu.compare import compare
from benchmarks.sglang_gpu.cores import Seat
from benchmarks.sglang_gpu.pair import Pair
from benchmarks.sglang_gpu.places import Place
from benchmarks.sglang_gpu.ratios import paired, ratio_of
from benchmarks.sglang_gpu.scales import Scale
from benchmarks.sglang_gpu.workload import prompt
from tests.sglang import wire
from tests.sglang.engines import Engine, session_of
from transfer.ipc.marks import VARIABLE, mark

ANSWER_S: Final = 60.0
BACKUP_S: Final = 20.0
SEATED_FOR: Final = 5
"""Rounds: threads may be new after so many."""
GOALS: Final[dict[tuple[str, str], tuple[float, float]]] = {
    ("host", "HiCache L2"): (1.15, 1.15),
    ("own evicted", "HiCache L2"): (1.05, 1.05),
    ("peer", "own"): (1.10, 1.20),
    ("peer, other GPU", "own, other GPU"): (1.10, 1.20),
    ("own", "stock own"): (1.03, 1.03),
}
"""(column, beside): the goals at shorter and at longer prompts."""
LONG: Final = 16_384
"""Tokens of a longer prompt, at least."""
ASKED_OF: Final = {
    "own": "b", "peer": "b", "host": "b", "own evicted": "b", "stock own": "stock",
    "peer, other GPU": "n", "own, other GPU": "n", "HiCache L1": "hicache", "HiCache L2": "hicache",
}  # fmt: skip
"""The engine of each column."""
BLOCKS: Final = (
    ("own", "stock own", "peer"),
    ("peer, other GPU", "HiCache L1", "own, other GPU"),
    ("host", "HiCache L2", "own evicted"),
)
"""What is compared stands together, and no engine beside itself."""

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
    loads: str = "adaptive",
    table: type[Rows] | None = None,
    save: Save = lambda _: None,
) -> dict[str, Any]:
    """Run the group. `pairs`: rounds of a length (0: the scale's); `marks`: each process notes when
    what happened (transfer/ipc/marks.py); `checked`: every page is compared, nothing is timed;
    `dummy`: SGLang fills the weights in; `table`: whose engines and rounds they are."""
    table = table or Rows
    seat = Seat.of_machine(look=place.cuda)  # before anything else runs
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
    tier = f"{table.tier_gib(scale)}GiB" if place.cuda else "64MiB"
    with Pair(
        place, folder, tier, given, environ, checked=checked, daemons=environ, wait=False
    ) as pair:

        def entry(name: str) -> dict[str, str]:
            return quiet.environ(place.folder / f"{name}.pid")

        other = len(place.gpus) != 1  # the dry run has n as well
        names = [name for name in table.NAMES if name != "n" or other]
        pools = {
            "a": {"max_total_tokens": scale.rows_pool_source(given["page_size"])},
            "n": {"max_total_tokens": scale.rows_pool_other},
        }
        engines = {
            name: pair.start(
                name, int(name == "n"), {"TREECORED_LOADS": loads, **entry(name)},
                **pools.get(name, {}),
            )
            for name in names
        }  # fmt: skip
        beside: dict[str, Engine] = {}
        if not checked:
            beside["stock"] = place.engine("stock", entry("stock"), _plain(given, folder))
        if place.cuda and not checked and "hicache" in table.BESIDE:
            backend, layout = hicache
            more = {
                "enable_hierarchical_cache": True, "hicache_size": scale.hicache_gib,
                "max_total_tokens": scale.hicache_pool,
                "hicache_write_policy": "write_through", "hicache_io_backend": backend,
                "hicache_mem_layout": layout,
            }  # fmt: skip
            plain = _plain(given | more, folder)
            beside["hicache"] = place.engine("hicache", entry("hicache"), plain)
        try:
            everybody = [*engines.values(), *beside.values()]
            for engine in everybody:
                engine.wait_up()
            pair.settled(list(beside.values()))
            daemon = pair.daemon.process.pid
            seat.movers([daemon, pair.report().counters["daemon_mover_pid"]])
            seat.settle()
            rows = table(pair, {**engines, **beside}, scale, pairs, seat)
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


def _plain(given: dict[str, Any], folder: Path) -> dict[str, Any]:
    return {"model_path": str(folder), **given}


class Prompts(NamedTuple):
    """Of a length: in the host tier, in another's pool, and what HiCache is asked."""

    host: list[list[int]]
    peers: list[list[int]]
    beside: list[list[int]]


class Rows:
    """The engines and what was measured. `engines`: a, b and n share a tree, n is on the other GPU;
    a has what is in another's pool and is not timed. `pairs`: rounds of each length (0: the
    scale's)."""

    NAMES: ClassVar[str] = "abn"
    BESIDE: ClassVar[tuple[str, ...]] = ("stock", "hicache")

    @staticmethod
    def lengths(scale: Scale) -> Sequence[tuple[int, int]]:
        """Tokens of a prompt and rounds, of each length in turn."""
        return list(zip(scale.rows_lengths, scale.rows_pairs, strict=True))

    @staticmethod
    def tier_gib(scale: Scale) -> int:
        """The host tier holds every prompt there is."""
        return scale.rows_tier_gib

    def __init__(
        self, pair: Pair, engines: dict[str, Engine], scale: Scale, pairs: int, seat: Seat
    ) -> None:
        self.pair = pair
        self.engines = engines
        self.scale = scale
        self.pairs = pairs
        self.seat = seat
        self.misses: list[str] = []
        self.page = int(pair.given["page_size"])
        self._short = list(prompt(999_999, self.page))  # no whole page that could be shared
        self._last: dict[str, list[int]] = {}
        """What each engine was asked last."""

    def run(self, save: Save, marks: Path | None) -> dict[str, Any]:
        """Every length in turn; what there is after each is saved."""
        result: dict[str, Any] = {
            "ok": False, "cpus": self.seat.as_json(), "rows": {}, "ratios": {},
        }  # fmt: skip
        for at, (length, pairs) in enumerate(self.lengths(self.scale)):
            column: Column = {}
            for _ in self._rounds(at, length, column, self.pairs or pairs):
                result["rows"][str(length)] = {
                    name: {"median_ms": round(statistics.median(ms), 2), "ms": ms}
                    for name, ms in column.items()
                }
                result["misses"] = self.misses[:10]
                save(result)
            result["ratios"][str(length)] = judged(column, long=length >= LONG)
            result["misses"] = self.misses[:10]  # those that only the end of a length shows, too
            save(result)
        report = self.pair.at_rest()
        result["violations"] = list(report.violations)[:5]
        result["counters"] = self.pair.counters(fresh=True)
        result["complaints"] = self.pair.complaints()
        if marks is not None:
            from benchmarks.sglang_gpu.timeline import told

            result["timeline"] = told(marks)
        result["ok"] = not (report.violations or result["complaints"] or self.misses)
        return result

    def _rounds(self, at: int, length: int, column: Column, pairs: int) -> Iterator[None]:
        """Prepare the prompts of a length, then measure in rounds; now and then there is more in
        the column. A first round does not count."""
        fit = self.scale.rows_pool // length
        base = 1_000 * (at + 1)
        # Enough of them that each was evicted when its turn comes again, in whatever order b is
        # asked for the three of a round: even from last in one to first in another.
        host = [list(prompt(base + n, length)) for n in range((fit + 2) // 2 * 2)]
        count = self.scale.rows_peers(length)
        peers = [list(prompt(base + 500 + n, length)) for n in range(count)]
        before = self._backed_up()
        a, b = self.engines["a"], self.engines["b"]
        for number, tokens in enumerate(host):
            name = "b" if number % 2 else "a"
            self.engines[name].generate(self._short, 1)
            self._ask(name, "cold", tokens, column, 0)
        self._wait_backed_up(before + len(host) * (length // self.page))
        a.flush()  # what the host tier is to give no pool has, and b has to restore its own
        b.flush()
        for tokens in peers:
            a.generate(tokens, 1)
        self._wait_backed_up(before + (len(host) + len(peers)) * (length // self.page))
        prompts = Prompts(host, peers, host[: self.scale.hicache_pool // length + 1])
        begin_with = {
            "b": peers[-1:],
            "n": peers[-1:],
            "stock": peers[:1],
            "hicache": prompts.beside,
        }
        for name in [name for name in begin_with if name in self.engines]:
            for tokens in begin_with[name]:
                self.engines[name].generate(tokens, 1)
                self._last[name] = tokens
        first = self._restored()
        for number in range(1 + pairs):
            if number % SEATED_FOR == 0:
                self._seat()
            self._round(number, column if number else {}, prompts)
            if number == pairs or (number and number % SEATED_FOR == 0):
                yield
        each = (1 + pairs) * ((length - 1) // self.page)
        wanted = [2 * each, each * (2 if "n" in self.engines else 1)]
        came = [after - at for after, at in zip(self._restored(), first, strict=True)]
        if came != wanted:
            self.misses.append(f"pages from the host and from pools: {came}, not {wanted}")

    def _seat(self) -> None:
        """Put every engine where it is to run; threads that are new, too."""
        for name, engine in self.engines.items():
            file = self.pair.place.folder / f"{name}.pid"
            self.seat.engine(int(file.read_text(encoding="utf-8")), session_of(engine.pid))

    def _round(self, number: int, kept: Column, prompts: Prompts) -> None:
        host, peers, beside = prompts
        length = len(peers[0])
        whole = length - 1 - (length - 1) % self.page
        peer = peers[number % len(peers)]
        asked = {
            "peer": (peer, "pool"), "peer, other GPU": (peer, "pool"),
            "host": (host[2 * number % len(host)], "host"),
            "own evicted": (host[(2 * number + 1) % len(host)], "host"),
            "HiCache L2": (beside[number % len(beside)], "host"),
        }  # fmt: skip
        if "stock" in self.engines:
            self._hit("stock", whole)  # the first column comes after another engine, too
        for column in order(number, self.engines):
            name = ASKED_OF[column]
            self._hit(name, whole)
            tokens, source = asked.get(column) or (self._last[name], "")
            self._ask(name, column, tokens, kept, whole, source)

    def _hit(self, name: str, whole: int) -> None:
        """Have an engine answer once more, uncounted, what it was asked last."""
        answer = self.engines[name].generate(self._last[name], 1)
        self._check("uncounted hit", answer, whole, restored=False)

    def _ask(
        self, name: str, column: str, tokens: list[int], kept: Column, whole: int, source: str = ""
    ) -> None:
        """Time one request."""
        engine = self.engines[name]
        mark("ask", column.replace(" ", "_"), len(tokens))
        began = time.perf_counter()
        answer = engine.collect(engine.submit(tokens, 1), ANSWER_S)
        took = 1e3 * (time.perf_counter() - began)
        mark("told", answer.id)
        self._last[name] = tokens
        kept.setdefault(column, []).append(round(took, 3))
        self._check(column, answer, whole, restored=bool(source))

    def _check(self, column: str, answer: wire.Output, whole: int, *, restored: bool) -> None:
        """A hit that is not what its column says is a miss."""
        came = int(str((answer.details or {}).get("host", 0)))
        right = answer.cached >= whole and (came > 0) == restored
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


def order(number: int, engines: Collection[str]) -> list[str]:
    """The columns of a round, of these engines. Rounds that follow one another go through every
    order of the blocks and of each block's ends, so what is compared takes every place alike."""
    turned = [
        block[::-1] if number >> at & 1 else block for at, block in enumerate(BLOCKS, start=1)
    ]
    blocks = turned[::-1] if number & 1 else turned
    return [column for block in blocks for column in block if ASKED_OF[column] in engines]


def judged(column: Column, *, long: bool) -> dict[str, Any]:
    """Each column with a goal beside what it is to be compared with. What counts is the mean ratio
    of what was measured in the same round; the ratio of the two columns' medians, which common
    moments widen, is told beside it."""
    found = {}
    for (ours, theirs), goals in GOALS.items():
        if ours in column and theirs in column:
            left, right = column[ours], column[theirs]
            ratio, medians = paired(left, right), ratio_of(left, right)
            found[f"{ours} / {theirs}"] = {
                "ratio": round(ratio.value, 3), "upper": round(ratio.upper, 3),
                "of_medians": round(medians.value, 3), "upper_of_medians": round(medians.upper, 3),
                "goal": goals[long], "pairs": ratio.pairs,
                "ok": ratio.within(goals[long]),
            }  # fmt: skip
    return found
