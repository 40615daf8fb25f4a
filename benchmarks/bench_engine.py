"""How long is a real engine's scheduler in its cache, a request: SGLang's own trees, and ours?

    python -m benchmarks.bench_engine --requests 96 --json FILE

Real SGLang on CPU with a tiny model, one engine after the other: its own caches and treecored's,
mirrored and thin, with the daemon in another process. Prompts of 1,536 tokens, four at a time,
eight of them over and over, a part of each new: so most of a prompt is cached, and something is
published, locked and now and then evicted with every request. What counts is processor time of the
scheduler's thread in its cache and in treecored's hooks, while a request is there. Looking for the
daemon's answer is processor time, too. Needs SGLang's environments (`make sglang-envs`).
"""

from __future__ import annotations

import argparse
import json
import random
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Final, NamedTuple

from benchmarks.contestants import stock_versions
from benchmarks.report import heading, table, write_json
from benchmarks.sglang_gpu.cache_cost import EVERY_S, FILE_VARIABLE
from tests.sglang import model
from tests.sglang.driver import SCHEDULER_VARIABLE
from tests.sglang.engines import Engine, Nursery
from tests.sglang.node import Node

ENTRY: Final = "benchmarks.sglang_gpu.cache_cost:run"
TOKENS: Final = 1_536
FRESH: Final = 192
PROMPTS: Final = 8
AT_ONCE: Final = 4
PAGE: Final = 16
POOL_TOKENS: Final = 24_576
GIVEN: Final[dict[str, Any]] = {
    "page_size": PAGE,
    "max_total_tokens": POOL_TOKENS,
    "context_length": TOKENS + 64,
    "max_running_requests": AT_ONCE,
}
CORE: Final = "SGLANG_UNIFIED_RADIX_TREE_CORE_BACKEND"


class Kind(NamedTuple):
    """An engine: its version, its cache, and whether treecored's daemon is used (and how)."""

    version: str
    cache: str


KINDS: Final = (
    Kind("0.5.16", "radix"), Kind("0.5.16", "mirrored"), Kind("0.5.16", "thin"),
    Kind("0.5.23", "python"), Kind("0.5.23", "rust"), Kind("0.5.23", "mirrored"),
    Kind("0.5.23", "thin"),
)  # fmt: skip


class Counted(NamedTuple):
    """Microseconds in all, and by call: how many of them, and theirs."""

    us: float
    by: dict[str, tuple[float, float]]
    ended: int

    def since(self, before: Counted) -> Counted:
        """What has come since, a request that has ended since."""
        none, requests = (0, 0.0), max(1, self.ended - before.ended)
        by = {
            name: (
                round((calls - before.by.get(name, none)[0]) / requests, 2),
                round((us - before.by.get(name, none)[1]) / requests, 1),
            )
            for name, (calls, us) in self.by.items()
        }
        by = dict(sorted(by.items(), key=lambda item: -item[1][1]))
        return Counted((self.us - before.us) / requests, by, requests)


def started(kind: Kind, stack: ExitStack, folder: Path, nursery: Nursery, path: Path) -> Engine:
    """An engine that counts, up and running."""
    environ = {SCHEDULER_VARIABLE: ENTRY, FILE_VARIABLE: str(folder / "cost")}
    if kind.cache in ("mirrored", "thin"):
        node = stack.enter_context(Node(folder, lambda _: nursery, path))
        engine = node.engine("engine", kind.version, kind.cache, environ=environ, **GIVEN)  # type: ignore[arg-type]
    else:
        environ[CORE] = kind.cache
        given = {"model_path": str(path), "environ": environ, **GIVEN}
        engine = nursery.engine("engine", folder, **given)
        stack.callback(engine.stop)
    return engine.wait_up()


def work(engine: Engine, requests: int) -> None:
    """So many requests, a few at a time."""
    draw = random.Random(7)
    prompts = [draw.choices(range(3, model.VOCABULARY), k=TOKENS) for _ in range(PROMPTS)]
    for turn in range(0, requests, AT_ONCE):
        names = []
        for at in range(turn, min(turn + AT_ONCE, requests)):
            old = prompts[at % PROMPTS][: TOKENS - FRESH]
            fresh = random.Random(at).choices(range(3, model.VOCABULARY), k=FRESH)
            names.append(engine.submit(old + fresh, 4))
        for name in names:
            engine.collect(name)


def counted(path: Path) -> Counted:
    """What was counted so far; what was counted last has been written by then."""
    time.sleep(2 * EVERY_S)
    found = json.loads(path.read_text(encoding="utf-8"))
    by = {name: (found["calls"].get(name, 0), ns / 1e3) for name, ns in found["by"].items()}
    return Counted(found["ns"] / 1e3, by, int(found["ended"]))


def measure(kind: Kind, nursery: Nursery, path: Path, requests: int) -> Counted:
    """Microseconds a request of the scheduler's thread in its cache, and calls."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="t")))
        engine = started(kind, stack, folder, nursery, path)
        work(engine, 2 * PROMPTS)
        before = counted(folder / "cost")
        work(engine, requests)
        work(engine, 1)  # what was counted is written with the next call
        return counted(folder / "cost").since(before)


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.bench_engine")
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--requests", type=int, default=96)
    parser.add_argument("--rounds", type=int, default=2, help="engines of each kind")
    parser.add_argument("--kinds", nargs="*", help='such as "0.5.16 mirrored"; none: every one')
    options = parser.parse_args()
    document: dict[str, Any] = heading("python -m benchmarks.bench_engine")
    document |= {"unit": "us", "tokens": TOKENS, "requests": options.requests, "engines": {}}
    kinds = [k for k in KINDS if k.version in stock_versions()]
    if options.kinds:
        kinds = [k for k in kinds if f"{k.version} {k.cache}" in options.kinds]
    found: dict[Kind, list[Counted]] = {kind: [] for kind in kinds}
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="t")))
        path = model.llama(folder / "model")
        nurseries: dict[str, Nursery] = {}
        of: Callable[[str], Nursery] = nurseries.__getitem__
        for version in dict.fromkeys(kind.version for kind in kinds):
            nurseries[version] = Nursery(version, folder)
            stack.callback(nurseries[version].close)
        for _ in range(options.rounds):
            for kind, taken in found.items():
                taken.append(measure(kind, of(kind.version), path, options.requests))
    rows: list[list[object]] = []
    calls: list[list[object]] = []
    for kind, taken in found.items():
        first = next(other for other in found if other.version == kind.version)
        least = min(taken)
        ratio = round(least.us / min(found[first]).us, 3)
        document["engines"][f"{kind.version} {kind.cache}"] = {
            "us": [round(one.us, 1) for one in taken],
            "ratio": ratio,
            "calls_and_us_a_request_by": least.by,
        }
        rows.append([kind.version, kind.cache, least.us, max(taken).us, f"{ratio:.2f}"])
        calls += [[kind.version, kind.cache, name, *least.by[name]] for name in least.by]
    columns = ["sglang", "cache", "us a request, lowest", "highest", "ratio of the lowest"]
    print(table(columns, rows))
    print(table(["sglang", "cache", "call", "calls a request", "us a request"], calls))
    write_json(options.json, document)


if __name__ == "__main__":
    main()
