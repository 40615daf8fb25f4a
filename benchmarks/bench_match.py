"""How long does a match take: across a process, in a mirror, in the core, in SGLang's own trees?

    python -m benchmarks.bench_match --json FILE

One path of so many tokens, fully cached, published in eight steps. `thin`: match and lease over the
wire, the daemon in another process, everything included but packing the tokens (SGLang's key is
built outside of its figure, too). The request was matched before and another prompt was published
since, so that its answer has to be looked up: as far as the node that it had no token is compared
again (ADR 14), where SGLang's trees compare all. `thin_waiting`: nothing has changed since the
request was matched last; `thin_new`: it comes for the first time, its tokens are handed over and
all of them are compared. `mirror`: match and lock in a scheduler's own tree. `core`:
`Directory.handle` of a match. Every figure comes as a ratio to the trees of the newest SGLang: to a
bare `match_prefix`, and (`same`; at the core with a lease) to match, slots and lock: that compares
like with like, and goals are about it. A tree that cannot be used here (SGLang's Rust core needs
the very torch it was built for) is left out, and what it said stands in `unable`. Without SGLang's
environments (`make sglang-envs`) there are no ratios. `--lmcache`: the Python of an environment
with LMCache 0.5.6, whose server's look-up of the same prompt is measured as well.
"""

from __future__ import annotations

import argparse
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.contestants import (
    ROOT,
    STOCK,
    Contestant,
    ContestantEnded,
    stock,
    stock_versions,
)
from benchmarks.node import Daemon, ThinScheduler
from benchmarks.report import Measure, Summary, heading, interleaved, ratio, table, write_json
from benchmarks.trees import CoreTree, MirrorTree

PAGE = 16
TOKENS = (8_192, 131_072)
OURS = {
    "thin": "thin match, after a change",
    "thin_waiting": "thin match",
    "thin_new": "thin match, new request",
    "mirror": "mirror match",
    "core": "core look",
}
SAME = {**OURS, "core": "core match"}
"""What brings the same as a match, its slots and a lock."""
LMCACHE = "lmcache lookup"
NEWEST = "0.5.23"


def cases(
    stack: ExitStack, tokens: int, versions: list[str], lmcache: Path | None
) -> tuple[dict[str, Measure], dict[str, str]]:
    """Everything that is measured with paths of so many tokens, and which of SGLang's trees is
    not because it cannot do this here, with what it says itself."""
    found: dict[str, Measure] = {}
    unable: dict[str, str] = {}
    daemon = stack.enter_context(Daemon())
    for name, lane in (("thin", True), ("thin by ZeroMQ", False)):
        scheduler = ThinScheduler(daemon.runtime_dir, PAGE, tokens, instance=name, lane=lane)
        stack.callback(scheduler.close)
        found[f"{name} match"] = scheduler.match
        found[f"{name} empty"] = scheduler.empty
        if lane:
            found[f"{name} match, after a change"] = scheduler.match_changed
            found[f"{name} match, new request"] = scheduler.match_new
    mirror, core = MirrorTree(PAGE, tokens), CoreTree(PAGE, tokens)
    for case in ("match", "look", "reinsert", "leaf", "evict_leaf"):
        found[f"mirror {case}"] = partial(mirror.run, case)
        found[f"core {case}"] = partial(core.run, case)
    for version in versions:
        for tree in STOCK[version]:
            contestant = stack.enter_context(stock(version))
            try:
                contestant.tell("build", tree, PAGE, tokens)
            except ContestantEnded as error:
                unable[f"{version} {tree}"] = str(error)
                continue
            for case in ("match", "acquire", "reinsert", "leaf", "evict_leaf"):
                found[f"{version} {tree} {case}"] = partial(contestant.tell, "run", case)
    if lmcache is not None:
        command = [str(lmcache), "-m", "benchmarks.lmcache_lookup"]
        server = stack.enter_context(Contestant(command, {"PYTHONPATH": str(ROOT)}))
        server.tell("build", tokens)
        found[LMCACHE] = partial(server.tell, "run", "lookup")
    return found, unable


def daemon_cpu(tokens: int, times: int) -> dict[str, float]:
    """Microseconds of processor time of the daemon for a match and its release: all of it, looking
    for the next one, and work."""
    with Daemon() as daemon:
        scheduler = ThinScheduler(daemon.runtime_dir, PAGE, tokens)
        try:
            scheduler.match(times // 4)
            begin = daemon.used()
            scheduler.match(times)
            scheduler.empty(1)  # the last release is carried out
            return daemon.used().since(begin, times)
        finally:
            scheduler.close()


def ratios(found: dict[str, Summary]) -> dict[str, dict[str, float]]:
    """Of thin, mirror and core to each of the newest SGLang's trees."""
    compared: dict[str, dict[str, float]] = {}
    for name, own in OURS.items():
        compared[name] = {}
        for tree in STOCK[NEWEST]:
            if f"{NEWEST} {tree} match" in found:
                compared[name][tree] = ratio(found[own], found[f"{NEWEST} {tree} match"])
                same = ratio(found[SAME[name]], found[f"{NEWEST} {tree} acquire"])
                compared[name][f"{tree}_same"] = same
        if LMCACHE in found:
            compared[name]["lmcache"] = round(found[own].median / found[LMCACHE].median, 4)
    return compared


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.bench_match")
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--times", type=int, default=20, help="repetitions a round")
    parser.add_argument("--tokens", type=int, nargs="+", default=list(TOKENS))
    parser.add_argument("--without-sglang", action="store_true")
    parser.add_argument("--lmcache", type=Path, metavar="PYTHON", help="of an environment with it")
    options = parser.parse_args()
    versions = [] if options.without_sglang else stock_versions()
    document: dict[str, Any] = heading("python -m benchmarks.bench_match")
    document |= {"page": PAGE, "unit": "us", "figures": {}, **{name: {} for name in OURS}}
    document |= {"unable": {}}
    for tokens in options.tokens:
        with ExitStack() as stack:
            measured, unable = cases(stack, tokens, versions, options.lmcache)
            found = interleaved(measured, rounds=options.rounds, times=options.times)
        size = str(tokens)
        document["unable"] |= unable
        document["figures"][size] = {name: figure.as_json() for name, figure in found.items()}
        for name, compared in ratios(found).items():
            document[name][size] = compared
        for name, us in daemon_cpu(tokens, 1_000).items():
            document.setdefault(name, {})[size] = us
        rows = [[name, figure.median, figure.low, figure.high] for name, figure in found.items()]
        print(f"\n{tokens} tokens, page {PAGE}\n")
        print(table(["case", "median us", "lowest", "highest"], rows))
        print(
            f"\ndaemon: {document['daemon_cpu_us'][size]} us of processor time a match + release, "
            f"{document['daemon_looking_us'][size]} of it looking for the next one, "
            f"{document['daemon_work_us'][size]} work"
        )
        for name in OURS:
            print(f"{name}: {document[name][size]}")
        for name, reason in unable.items():
            print(f"SGLang {name}: cannot be measured here: {reason}")
    write_json(options.json, document)


if __name__ == "__main__":
    main()
