"""What do checksums of host pages cost a backup and a load back?

The real engine on the CPU device, one pool in shared memory, in three ways in turn: no checksums,
kept (computed at backup) and verified (compared at load, too). Beside it the bare library, on the
same pages. A copy of the CPU device is a `memcpy` in the mover's own thread, as the checksum is, so
here the two simply add up; on a GPU the copy engines work meanwhile.
"""

from __future__ import annotations

import argparse
import os
import time
from array import array
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import cast

from benchmarks.report import Summary, heading, interleaved, table, write_json
from directory.core.actions import CopyKind, CopyPart, SubmitCopy
from directory.core.events import CopyDone
from directory.core.ids import HOST, PoolId
from directory.core.limits import MIB
from transfer.checksum import SumTable, load_hash, table_bytes
from transfer.checksum_copies import Checksums
from transfer.device.cpu import CpuDevice
from transfer.engine import Engine
from transfer.host_tier import HostTierMemory
from transfer.imports import ImportedPool
from transfer.ipc.memory import SharedMemoryIPC
from transfer.ipc.sync import TimelineTable, WordTable
from transfer.layout import PoolLayout, mha_layer_first

POOL: PoolId = 1
SEGMENT_BYTES = 64 * MIB
GB = 1e9


class Rig:
    """One engine with a pool and a tier of the same size. `sums`: None, "kept" or "verified"."""

    def __init__(self, layout: PoolLayout, sums: str | None) -> None:
        self.layout = layout
        ipc = SharedMemoryIPC()
        sizes = layout.allocation_bytes
        memory = [ipc.create(f"pool-{at}", nbytes) for at, nbytes in enumerate(sizes)]
        tables = TimelineTable.create(ipc, "timelines"), WordTable.create(ipc, "words", 1)
        fds = [*(mapping.fd for mapping in memory), *(made.fd for made in tables)]
        handles = [ipc.export(mapping)[0] for mapping in memory]
        for mapping in memory:
            mapping.view[:] = os.urandom(4096) * (mapping.nbytes // 4096)
        self.engine = Engine(CpuDevice(), lambda: time.monotonic_ns() // 1000)
        self.engine.add_pool(
            ImportedPool.open(POOL, layout, tuple(handles), fds, memory=ipc, tables=ipc)
        )
        nbytes = layout.page_count * layout.page_bytes
        tier = HostTierMemory.create(nbytes, min(nbytes, SEGMENT_BYTES))
        if sums is not None:
            fd = os.memfd_create("checksums")
            os.ftruncate(fd, table_bytes(tier.shape))
            made = SumTable(fd, tier.shape)
            verify = sums == "verified"
            self.engine.use_checksums(Checksums(made, tier, load_hash(), verify=verify))
        self.engine.open_tier(tier)
        pages = range(layout.page_count)
        self._pages = array("I", pages).tobytes()
        each = tier.shape.slots_of(0, layout.page_bytes)
        self._slots = array("I", (page // each << 16 | page % each for page in pages)).tobytes()
        self._op = 0

    def copy(self, kind: CopyKind) -> float:
        """Copy every page once; returns seconds."""
        self._op += 1
        part = CopyPart(POOL, self._pages, HOST, self._slots)
        if kind == "load_back":
            part = CopyPart(HOST, self._slots, POOL, self._pages)
        began = time.perf_counter()
        self.engine.submit(SubmitCopy(self._op, kind, (part,), (), ()))
        while not (events := self.engine.step()):
            pass
        done = cast(CopyDone, events[0])
        assert done.outcome == "ok", done
        return time.perf_counter() - began


def measure(page_kib: int, total_mib: int, rounds: int) -> dict[str, Summary]:
    """GB/s of every case for one size of page."""
    layers, page_size = 16, 16
    head_dim = page_kib * 1024 // (2 * layers * page_size)
    layout = mha_layer_first(
        layers=layers,
        page_size=page_size,
        page_count=total_mib * 1024 // page_kib,
        heads=1,
        head_dim=head_dim,
        itemsize=1,
    )
    nbytes = layout.page_count * layout.page_bytes
    cases: dict[str, Callable[[int], Sequence[float]]] = {}
    for name in ("off", "kept", "verified"):
        rig = Rig(layout, None if name == "off" else name)
        for kind in ("backup", "load_back"):
            cases[f"{kind} {name}"] = lambda times, rig=rig, kind=kind: [  # type: ignore[misc]
                nbytes / rig.copy(kind) / GB for _ in range(times)
            ]
    hash_of, content = load_hash(), memoryview(os.urandom(4096) * (nbytes // 4096))

    def bare(times: int) -> list[float]:
        figures = []
        for _ in range(times):
            began = time.perf_counter()
            for at in range(0, nbytes, layout.page_bytes):
                hash_of(content[at : at + layout.page_bytes], at)
            figures.append(nbytes / (time.perf_counter() - began) / GB)
        return figures

    cases["checksum alone"] = bare
    return interleaved(cases, rounds=rounds, times=1, warm=1)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.bench_checksum")
    parser.add_argument("--total-mib", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--page-kib", type=int, nargs="+", default=[64, 1024])
    parser.add_argument("--json", type=Path, metavar="FILE")
    options = parser.parse_args()
    report = heading("python -m benchmarks.bench_checksum")
    found = {size: measure(size, options.total_mib, options.rounds) for size in options.page_kib}
    rows = [
        [f"{size} KiB", name, f"{figure.median:.2f}", f"{figure.low:.2f} to {figure.high:.2f}"]
        for size, cases in found.items()
        for name, figure in cases.items()
    ]
    print(report)
    print(table(["page", "case", "GB/s (median)", "rounds"], rows))
    report["gb_s"] = {
        str(size): {name: figure.as_json() for name, figure in cases.items()}
        for size, cases in found.items()
    }
    write_json(options.json, report)


if __name__ == "__main__":
    main()
