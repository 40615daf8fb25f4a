"""One daemon and the engines that share its tree, as a test's object.

Owns the daemon's process, the engines started through it and their folder; closing it ends all of
them and asserts that nothing is left. What a test may rely on about time (when a backup is done,
when a dead engine is gone) is asked of the daemon, never slept for.
"""

import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal, Self

from directory.cli.asking import NoAnswer
from directory.cli.check import ask
from directory.protocol.admin import AdminReport
from tests.integration.daemon.support import DaemonProcess, wait_until
from tests.sglang.engines import Engine, Nursery, spawned

Mode = Literal["mirrored", "thin"]

PATIENT: Mapping[str, str] = {
    "TREECORED_MATCH_MS": "5000",
    "TREECORED_CALL_MS": "10000",
    "TREECORED_HOLD_MS_MAX": "30000",
}
"""Deadlines for tests that assert a hit: on a busy machine the defaults would make it a miss."""


class Node:
    """The daemon runs as soon as this exists; engines are started one by one."""

    def __init__(
        self,
        folder: Path,
        nursery: Callable[[str], Nursery],
        model: Path,
        host_tier: str = "16MiB",
    ) -> None:
        self.folder = folder
        self.model = model
        self.host_tier = host_tier
        self.engines: list[Engine] = []
        self._nursery = nursery
        self.daemon = self._daemon()

    def engine(
        self,
        name: str,
        version: str,
        mode: Mode = "mirrored",
        *,
        environ: Mapping[str, str] = PATIENT,
        **given: Any,
    ) -> Engine:
        """Start an engine that uses the daemon; `wait_up` it. The rest is SGLang's arguments."""
        return self._keep(
            self._nursery(version).engine(
                name, self.folder, **self._given(name, mode, environ, given)
            )
        )

    def spawned(self, name: str, version: str, **given: Any) -> Engine:
        """The same, started as a user's program does it."""
        return self._keep(
            spawned(version, name, self.folder, **self._given(name, "mirrored", PATIENT, given))
        )

    def _given(
        self, name: str, mode: Mode, environ: Mapping[str, str], given: dict[str, Any]
    ) -> dict[str, Any]:
        variables = {
            "TREECORED_RUNTIME_DIR": str(self.daemon.runtime_dir),
            "TREECORED_INSTANCE": name,
            "TREECORED_MODE": mode,
            "TREECORED_STATS_FILE": str(self.folder / f"{name}.stats"),
            **environ,
        }
        ours = {"model_path": str(self.model), "radix_cache_backend": "treecored"}
        return ours | given | {"environ": variables}

    def _keep(self, engine: Engine) -> Engine:
        self.engines.append(engine)
        return engine

    # The daemon.

    def report(self) -> AdminReport:
        """Its own account of itself, with all invariants checked."""
        return ask(self.daemon.runtime_dir, 60.0)

    def counter(self, name: str) -> int:
        """One of its counters."""
        return self.report().counters.get(name, 0)

    def wait_for(self, what: Callable[[AdminReport], bool]) -> AdminReport:
        """Wait until its account is as wanted."""
        found: list[AdminReport] = []

        def look() -> bool:
            found[:] = [self.report()]
            return what(found[0])

        wait_until(look)
        return found[0]

    def wait_at_rest(self) -> AdminReport:
        """Wait until nothing is under way: no copy, no lease, no backup that waits."""
        return self.wait_for(lambda report: not any(report.counters[name] for name in UNDER_WAY))

    def backed_up(self, pages: int) -> "Backups":
        """For a `with`: at its end, that many more pages are in the host tier."""
        return Backups(self, pages)

    def restart_daemon(self) -> None:
        """A new daemon in the place of one that was killed."""
        self.daemon = self._daemon()

    def _daemon(self) -> DaemonProcess:
        return DaemonProcess(self.folder / "rt", "--host-tier", self.host_tier)

    # The end.

    def assert_clean(self) -> None:
        """Every invariant holds, nothing is leased, and no engine complained."""
        report = self.wait_at_rest()
        assert report.violations == ()
        for engine in self.engines:
            engine.check_log()

    def close(self) -> None:
        """End everything, the engines first."""
        for engine in self.engines:
            engine.stop()
        self.daemon.__exit__(None, None, None)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


UNDER_WAY = ("copies_in_flight", "leases", "backups_waiting", "host_pages_leased")


class Backups:
    """Waits, when left, until so many more pages than when entered have been backed up."""

    def __init__(self, node: Node, pages: int) -> None:
        self._node = node
        self._pages = pages
        self._before = 0

    def __enter__(self) -> None:
        self._before = self._node.counter("pages_backed_up")

    def __exit__(self, kind: object, *_: object) -> None:
        if kind is None:
            wanted = self._before + self._pages
            self._node.wait_for(lambda report: report.counters["pages_backed_up"] >= wanted)


def answers(node: Node) -> bool:
    """Whether the daemon answers at all."""
    try:
        node.report()
    except NoAnswer:
        return False
    return True


def floor(prompt_tokens: int, page_size: int) -> int:
    """What a hit on a whole prompt reports: the last token is always computed."""
    return (prompt_tokens - 1) // page_size * page_size


def until(look: Callable[[], bool], deadline_s: float) -> None:
    """Look until it is so; each look must itself take time."""
    give_up = time.monotonic() + deadline_s
    while not look():
        assert time.monotonic() < give_up, "it did not come to pass"
