"""What do match, insert and evict cost in the core, and a node, in small trees and in large ones?

    python -m benchmarks.bench_core --nodes 1000 1000000 --json FILE

The first table is the core by itself (`Directory.handle`, one thin pool, page 16), one path fully
cached, published in eight steps. The second is that path of 8,192 tokens in a tree with so many
other nodes, each of one page, and what such a node takes besides the bytes of its edge and of its
pages. bench_match.py has the same cases beside SGLang's trees.
"""

from __future__ import annotations

import argparse
import gc
import os
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.report import heading, interleaved, table, write_json
from benchmarks.trees import KEY, CoreTree
from directory.core.events import Insert

PAGE = 16
TOKENS = (1_024, 8_192, 32_768, 131_072)
CASES = ("match", "look", "release", "reinsert", "leaf", "evict_leaf")
EDGE_BYTES = PAGE * 4
PAGE_NUMBER_BYTES = 4
SIBLINGS = 1_000
TELLING = 100_000
"""Fewer nodes than that are lost in what the allocator has at hand."""


def grown(nodes: int, times: int) -> dict[str, float]:
    """A tree with so many other nodes: bytes a node, and microseconds of a match in it."""
    tree = CoreTree(PAGE, 8_192, host=False, spare_pages=2 * nodes + 64)
    gc.collect()
    before = _resident_bytes()
    made = 0
    while made < nodes:
        # One node that begins a group, and below it as many as there is room for.
        group = min(SIBLINGS, nodes - made)
        head = b"\1" + made.to_bytes(8, "little") + bytes(EDGE_BYTES - 9)
        first = tree.pages.take(1)
        _insert(tree, head, first)
        for number in range(1, group):
            leaf = b"\2" + number.to_bytes(8, "little") + bytes(EDGE_BYTES - 9)
            _insert(tree, head + leaf, first + tree.pages.take(1))
        made += group
    gc.collect()
    each = (_resident_bytes() - before) / nodes - EDGE_BYTES - PAGE_NUMBER_BYTES
    gc.freeze()
    taken = sorted(tree.run("match", times))
    return {"bytes": each, "match": taken[len(taken) // 2], "nodes": len(tree.directory.tree.nodes)}


def _insert(tree: CoreTree, tokens: bytes, row: bytes) -> None:
    tree.span += 1
    tree.ask(Insert("r", 1, KEY, tokens, row, tree.span, 0, (1, 1)))


def _resident_bytes() -> int:
    pages = Path("/proc/self/statm").read_text(encoding="ascii").split()[1]
    return int(pages) * os.sysconf("SC_PAGE_SIZE")


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.bench_core")
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--nodes", type=int, nargs="*", default=[1_000, 1_000_000])
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--times", type=int, default=20)
    options = parser.parse_args()
    document: dict[str, Any] = heading("python -m benchmarks.bench_core")
    document |= {"page": PAGE, "unit": "us", "cases": {}, "nodes": {}}
    rows: list[list[object]] = []
    for tokens in TOKENS:
        tree = CoreTree(PAGE, tokens)
        cases = {case: partial(tree.run, case) for case in CASES}
        found = interleaved(cases, rounds=options.rounds, times=options.times)
        document["cases"][str(tokens)] = {name: case.as_json() for name, case in found.items()}
        rows.append([f"{tokens:,}", *(found[case].median for case in CASES)])
    print(table(["tokens", *CASES], rows))
    rows = []
    for nodes in options.nodes:
        told = grown(nodes, 400)
        document["nodes"][str(nodes)] = told
        many = nodes >= TELLING
        rows.append([f"{nodes:,}", told["bytes"] if many else "-", told["match"]])
    print()
    print(table(["other nodes", "bytes a node", "match us"], rows))
    write_json(options.json, document)


if __name__ == "__main__":
    main()
