"""What do KV events cost a match? `python -m benchmarks.bench_kv_events --json FILE`

Two real daemons with equal trees, one of which publishes, with a subscriber that reads everything.
Owns the questions and their target: matches alone, and matches between inserts and evictions, of
which each one is told; the median of one must be within 2 % of the other's. And what a publisher
takes for a large tree.
"""

from __future__ import annotations

import argparse
import resource
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Final

import msgspec

from benchmarks.report import machine, percentile
from directory.core.events import Match
from directory.core.ids import HOST
from directory.core.namespace import NamespaceKey
from directory.core.tokens import pack_tokens
from directory.kvevents.records import Begin, Changed, Opened, SpaceNamed, Whole
from directory.kvevents.teller import Teller
from tests.consumers.crowd import Prompts, Scheduler
from tests.integration.daemon.listening import Listener, free_ports, streams
from tests.integration.daemon.support import DaemonProcess, packed

LIMIT: Final = 1.02
TREE_BLOCKS: Final = 200_000
PAGE: Final = 16
NODE_PAGES: Final = 50
QUESTION_TOKENS: Final = 96


class Node:
    """A daemon with one scheduler, which has published the same prompts as any other's."""

    def __init__(self, folder: Path, stack: ExitStack, *flags: str) -> None:
        self.daemon = stack.enter_context(DaemonProcess(folder, *flags))
        self.scheduler = stack.enter_context(Scheduler(self.daemon.runtime_dir, "a"))
        self.prompts = Prompts(seed=1)
        for _ in range(150):
            self.scheduler.compute(self.prompts.next())
        self.scheduler.at_rest()
        tokens = packed(self.prompts.documents[0][:QUESTION_TOKENS])
        self.question = Match("r", 0, NamespaceKey(), tokens, acquire=False)

    def match(self) -> float:
        """Microseconds of one match."""
        began = time.perf_counter_ns()
        self.scheduler.ask(self.question)
        return (time.perf_counter_ns() - began) / 1000

    def cpu_us(self) -> float:
        """Microseconds that the daemon has run on a processor, whatever else runs there."""
        schedstat = Path(f"/proc/{self.daemon.process.pid}/schedstat").read_text()
        return int(schedstat.split()[0]) / 1000

    def insert(self) -> None:
        """Publish the next prompt, with the evictions that it takes."""
        self.scheduler.compute(self.prompts.next())


def paired(off: Node, on: Node, pairs: int, *, inserts: bool) -> dict[str, float]:
    """Matches of both by turns, so that whatever else the machine does meets both alike.

    With `inserts` there is one before each match, at its own daemon; `cpu` then has it, too.
    """
    taken: dict[bool, list[float]] = {False: [], True: []}
    before = off.cpu_us(), on.cpu_us()
    for pair in range(pairs):
        for which in (pair % 2 == 0, pair % 2 == 1):
            node = on if which else off
            if inserts:
                node.insert()
            taken[which].append(node.match())
    cpu = (off.cpu_us() - before[0]) / pairs, (on.cpu_us() - before[1]) / pairs
    p50 = percentile(taken[False], 50), percentile(taken[True], 50)
    figures = {
        "off_us_p50": p50[0],
        "on_us_p50": p50[1],
        "off_us_p99": percentile(taken[False], 99),
        "on_us_p99": percentile(taken[True], 99),
        "off_daemon_cpu_us": cpu[0],
        "on_daemon_cpu_us": cpu[1],
        "ratio_daemon_cpu": cpu[1] / cpu[0],
        "ratio_p50": p50[1] / p50[0],
        "pairs": pairs,
    }
    return {name: round(figure, 3) for name, figure in figures.items()}


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print, and fail where the target is missed."""
    parser = argparse.ArgumentParser(prog="bench_kv_events")
    parser.add_argument("--pairs", type=int, default=20_000)
    parser.add_argument("--json", type=Path, metavar="FILE")
    options = parser.parse_args(arguments)
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="t")))
        base = free_ports(3)
        off = Node(folder / "off", stack)
        on = Node(folder / "on", stack, "--kv-events", f"tcp://127.0.0.1:{base}")
        listener = stack.enter_context(Listener(streams(on.daemon, "a")["a"]))
        paired(off, on, 500, inserts=False)  # warm
        figures = {
            "match": paired(off, on, options.pairs, inserts=False),
            "match_after_insert": paired(off, on, options.pairs // 10, inserts=True),
        }
        while listener.socket.poll(1_000):
            listener.hear()
        told = len(listener.batches)
    for name, measured in figures.items():
        print(f"{name} (ratio_p50 at most {LIMIT}):")
        print("".join(f"  {what:18} {figure:10.3f}\n" for what, figure in measured.items()))
    large = large_tree()
    print(f"batches heard {told}; a large tree: {large}")
    report = {
        "machine": machine(),
        "limit_ratio_p50": LIMIT,
        "figures": figures,
        "large_tree": large,
    }
    if options.json is not None:
        options.json.write_bytes(msgspec.json.format(msgspec.json.encode(report)) + b"\n")
    return int(any(figure["ratio_p50"] > LIMIT for figure in figures.values()))


def large_tree() -> dict[str, float]:
    """What a publisher takes for a tree of many blocks, of one scheduler and the host tier."""
    teller = Teller()
    space = SpaceNamed(1, 1, PAGE, 4, False, None, None)
    teller.take([Begin(), Opened(1, "a", 1, PAGE), space, Whole()])
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    began = time.process_time()
    for node in range(1, TREE_BLOCKS // NODE_PAGES + 1):
        first = node * NODE_PAGES * PAGE
        edge = pack_tokens(range(first, first + NODE_PAGES * PAGE))
        base = max(0, node - 1) if node % 20 else 0
        teller.take([Changed(1, place, True, node, base, (), edge) for place in (1, HOST)])
    taken_s = time.process_time() - began
    kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    began = time.process_time()
    teller.everything("a")
    return {
        "blocks": TREE_BLOCKS,
        "us_a_block": taken_s / TREE_BLOCKS * 1e6,
        "bytes_a_block": kib * 1024 / TREE_BLOCKS,
        "everything_s": time.process_time() - began,
    }


if __name__ == "__main__":
    sys.exit(main())
