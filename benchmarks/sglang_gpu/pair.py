"""One daemon and a pair of engines that share its tree, for the length of a group of rows.

Owns the processes and their folder; what is asked of the engines is the groups' business. Closing
it ends everything it started.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final, Self

from benchmarks.sglang_gpu.places import Place
from benchmarks.sglang_gpu.workload import prompt
from directory.cli.check import ask
from directory.protocol.admin import AdminReport
from tests.integration.daemon.support import DaemonProcess
from tests.sglang.engines import Engine

REST_S: Final = 60.0
ANSWER_S: Final = 120.0
WARM_TOKENS: Final = 512
STATS_S: Final = 1.1
"""Counters are written once a second at most."""
UNDER_WAY: Final = ("copies_in_flight", "leases", "backups_waiting", "host_pages_leased")
PATIENT: Final[Mapping[str, str]] = {
    "TREECORED_MATCH_MS": "1000",
    "TREECORED_HOLD_MS_MAX": "8000",
    "TREECORED_LAYER_MS": "5000",
}
"""Deadlines under which a machine with more to do than cores still restores."""
COUNTED: Final = (
    "asked", "offers", "offers_held_back", "offers_crowded", "loads", "loads_declined",
    "loads_put_back", "loads_put_off", "restores", "restores_without_room", "landed", "lost",
    "landings_freed", "held_too_long", "matches_missed", "evictions_waited", "steps_first",
    "ticks", "ticks_us",
)  # fmt: skip
"""What is told of engines, from their start on."""


class Pair:
    """The daemon is started with this, and opens its host tier while the engines that are started
    with `start` come up: `settled` checks that both have."""

    def __init__(
        self,
        place: Place,
        model: Path,
        host_tier: str,
        given: Mapping[str, Any],
        environ: Mapping[str, str] | None = None,
        program: Sequence[str] = (),
        *,
        checked: bool = True,
        daemons: Mapping[str, str] | None = None,
        wait: bool = True,
        folder: Path | None = None,
    ) -> None:
        """`given`: SGLang's arguments; `environ`: treecored's settings; `program`: the daemon's;
        `checked`: engines record digests; `daemons`: variables of the daemon; `wait`:
        return when its host tier is open, within 20 s; `folder`: of daemon and digests (the
        place's, if nothing is said), where there are two of these at a place."""
        self.place = place
        self.model = model
        self.given = given
        self.environ = {**PATIENT, **(environ or {})}
        self.folder = folder or place.folder
        self.digests = self.folder / "digests"
        self.digests.mkdir(parents=True, exist_ok=True)
        if checked:
            self.environ["TREECORED_CHECK_DIGESTS"] = str(self.digests)
        self.engines: list[Engine] = []
        self._program = program
        self._daemons = daemons
        self._host_tier = host_tier
        self.daemon = self._daemon(wait=wait)

    def start(
        self, name: str, gpu: int = 0, settings: Mapping[str, str] | None = None, **more: Any
    ) -> Engine:
        """Start an engine; `wait_up` it. `settings`: treecored's, of this one alone."""
        environ = {
            "TREECORED_RUNTIME_DIR": str(self.daemon.runtime_dir),
            "TREECORED_INSTANCE": name,
            "TREECORED_STATS_FILE": str(self.place.folder / f"{name}.stats"),
            **self.environ,
            **(settings or {}),
        }
        given = {"model_path": str(self.model), "radix_cache_backend": "treecored"}
        engine = self.place.engine(name, environ, {**given, **self.given, **more}, gpu)
        self.engines.append(engine)
        return engine

    def settled(self, others: Sequence[Engine] = ()) -> None:
        """Once all engines are up, these others too: have them compile what they run, and wait
        until nothing is under way. Raises `AssertionError` where one has not found the daemon."""
        engines = [*self.engines, *others]
        for _ in range(2):  # computed, then found
            asked = [
                (engine, engine.submit(list(prompt(990_000 + n, WARM_TOKENS)), 4))
                for n, engine in enumerate(engines)
            ]
            for engine, name in asked:
                engine.collect(name, ANSWER_S)
        registered = self.at_rest().pools
        if len(registered) != len(self.engines):
            raise AssertionError(f"{len(registered)} of {len(self.engines)} engines are registered")

    def report(self) -> AdminReport:
        """The daemon's account of itself, with all invariants checked. Raises `AssertionError` with
        the end of its log where it has ended."""
        if (status := self.daemon.process.poll()) is not None:
            raise AssertionError(f"the daemon ended: {status}\n{self.daemon.log()[-3000:]}")
        return ask(self.daemon.runtime_dir, 20.0)

    def at_rest(self) -> AdminReport:
        """The same once nothing is under way, or after a minute."""
        give_up = time.monotonic() + REST_S
        while True:
            report = self.report()
            busy = any(report.counters[name] for name in UNDER_WAY)
            if not busy or time.monotonic() > give_up:
                return report
            time.sleep(0.05)

    def counters(self, *, fresh: bool = False) -> dict[str, int]:
        """Of all engines together, as they were written last. `fresh`: wait until they may be
        written again, and have them written, by two requests."""
        if fresh:
            time.sleep(STATS_S)
            self.settle_digests()
        stats = [engine.stats() for engine in self.engines]
        return {name: sum(one.get(name, 0) for one in stats) for name in COUNTED}

    def restart_daemon(self) -> None:
        """A new daemon in the place of one that was killed."""
        self.daemon = self._daemon(wait=True)

    def settle_digests(self) -> None:
        """What engines have digested is in their files: after two requests more, one by one."""
        for engine in self.engines:
            if engine.alive:
                for _ in range(2):
                    engine.generate([5, 6, 7], 2)

    def complaints(self) -> list[str]:
        """What engines logged that they should not have."""
        found = []
        for engine in self.engines:
            try:
                engine.check_log()
            except AssertionError as error:
                found.append(str(error)[:2000])
        return found

    def _daemon(self, *, wait: bool) -> DaemonProcess:
        program = (sys.executable, *self._program) if self._program else ()
        flags = ["--host-tier", self._host_tier, "--segment", "64MiB", *self.place.daemon_flags]
        folder = self.folder / "rt"
        return DaemonProcess(folder, *flags, program=program, wait=wait, environ=self._daemons)

    def close(self) -> None:
        """End everything, the engines first."""
        for engine in self.engines:
            engine.kill()
        self.daemon.__exit__(None, None, None)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
