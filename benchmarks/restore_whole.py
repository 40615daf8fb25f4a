"""The whole way of a restore, through a daemon and its mover, with pages of a few bytes.

What is left of a restore when nothing has to be copied is messages and being woken. Owns two
schedulers' sides of it and the daemon's program (`python -m benchmarks.restore_whole serve ...`),
which lets a mover of CPU pools spin as those of GPUs do.
"""

from __future__ import annotations

import statistics
import time
from array import array
from typing import Final

from benchmarks.node import Daemon, ThinScheduler
from benchmarks.trees import KEY
from directory.cli.main import app
from directory.core.actions import Matched, Restored
from directory.core.events import Match, Restore, Unlock
from directory.daemon.config import Settings
from scheduler_shim.client import DaemonClient
from scheduler_shim.pools import SharedPool

PAGE: Final = 64
TOKENS: Final = 8_192
PAUSE_S: Final = 0.02
BETWEEN_S: Final = 0.0009
"""A shim's own part between answer and restore."""
SPINNING: Final = ("benchmarks.restore_whole",)
SLEEPING: Final = ("directory.cli.main",)


def whole_way(times: int, *, spins: bool) -> dict[str, float]:
    """Medians in microseconds of a match and of a restore out of another pool, and the processor
    time of the daemon for both."""
    matches, restores, used = list[float](), list[float](), list[float]()
    with Daemon(program=SPINNING if spins else SLEEPING) as daemon:
        owner = ThinScheduler(daemon, PAGE, TOKENS, instance="owner")
        count = TOKENS // PAGE
        pool = SharedPool(page_size=PAGE, page_count=2 * count, bytes_per_token=1, layers=1)
        client = DaemonClient.connect(daemon.runtime_dir, pool, instance="asker", mode="mirrored")
        targets = array("I", range(count)).tobytes()
        try:
            for number in range(times + 1):
                time.sleep(PAUSE_S)
                name, before, began = f"r{number}", daemon.cpu_us(), time.perf_counter_ns()
                matched = client.call(Match(name, 0, KEY, owner.tokens))
                told = time.perf_counter_ns()
                assert isinstance(matched, Matched), matched
                assert matched.peer_pages == count, matched
                time.sleep(BETWEEN_S)
                asked = time.perf_counter_ns()
                quiet = pool.advance()
                restored = client.call(Restore(name, 0, matched.receipt, 0, targets, quiet))
                ended = time.perf_counter_ns()
                assert isinstance(restored, Restored), restored
                assert restored.landed, restored
                client.report(Unlock(matched.receipt))
                matches.append((told - began) / 1e3)
                restores.append((ended - asked) / 1e3)
                used.append(daemon.cpu_us() - before)
        finally:
            client.close()
            pool.close()
            owner.close()
    taken = {"match": matches, "restore": restores, "daemon's CPU": used}
    return {name: round(statistics.median(us[1:]), 1) for name, us in taken.items()}


def main() -> None:
    """Be a daemon whose mover spins."""
    options = Settings.mover_options.fget  # type: ignore[attr-defined]
    spin = ("--limit", "idle_spin_us=500")
    Settings.mover_options = property(lambda self: (*options(self), *spin))  # type: ignore[assignment]
    app()


if __name__ == "__main__":
    main()
