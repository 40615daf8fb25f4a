"""The daemon with a clock around its parts: what each kind of message costs its thread, and where.

    python -m benchmarks.costed_daemon FILE serve ...

Owns the clocks. Each part's own time counts to the kind of thing in whose course it was called: a
message of a client, the end of a copy, what is done beside. On SIGUSR1 the sums begin anew, on
SIGUSR2 they are written to FILE. A clock costs about 0.3 us a call, which counts to the part
around it. It never changes what the daemon does.
"""

from __future__ import annotations

import json
import signal
import sys
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

from directory.analytics.log import AccessLog
from directory.cli import main as cli
from directory.core.directory import Directory
from directory.core.events import CopyDone
from directory.daemon import background, kept_tier, kv_feed, lanes, movers, recording, server
from directory.daemon.daemon import Daemon
from directory.daemon.loop import Loop
from directory.kvevents.capture import Capture
from directory.protocol import endpoint
from transfer.ipc.lane import FrameLane

clock = time.perf_counter_ns
NOTHING: Final = "-"
LONG_NS: Final = 500_000
LONG_MOST: Final = 50


class Costs:
    """Own time by (kind, part), and how often each kind came."""

    def __init__(self) -> None:
        self.spent_ns: dict[tuple[str, str], int] = defaultdict(int)
        self.times: dict[str, int] = defaultdict(int)
        self.longest_ns: dict[str, list[int]] = defaultdict(list)
        """By part, each call that took longer than LONG_NS, all that it called included."""
        self.kind = NOTHING
        self._inner_ns = 0
        self._since_ns, self._cpu_ns = clock(), time.process_time_ns()

    def part(self, name: str, kind: Callable[..., str] | None = None) -> Callable[..., Any]:
        """A wrapper whose calls are a part; `kind`: of the thing that begins with the call."""

        def around(function: Callable[..., Any]) -> Callable[..., Any]:
            def timed(*arguments: Any, **named: Any) -> Any:
                before, outer_ns = self.kind, self._inner_ns
                if kind is not None:
                    self.kind = kind(*arguments)
                    self.times[self.kind] += 1
                mine = self.kind
                self._inner_ns = 0
                began = clock()
                try:
                    return function(*arguments, **named)
                finally:
                    took = clock() - began
                    self.spent_ns[mine, name] += took - self._inner_ns
                    if took > LONG_NS:
                        self.longest_ns[name].append(took)
                    self._inner_ns = outer_ns + took
                    self.kind = before

            return timed

        return around

    def begin(self) -> None:
        """Forget what was counted."""
        self.spent_ns.clear()
        self.times.clear()
        self.longest_ns.clear()
        self._since_ns, self._cpu_ns = clock(), time.process_time_ns()

    def as_json(self) -> dict[str, Any]:
        """Microseconds by kind and part; what of the time was the processor's."""
        kinds: dict[str, dict[str, float]] = defaultdict(dict)
        for (kind, name), ns in sorted(self.spent_ns.items()):
            kinds[kind][name] = ns / 1e3
        return {
            "wall_us": (clock() - self._since_ns) / 1e3,
            "cpu_us": (time.process_time_ns() - self._cpu_ns) / 1e3,
            "times": dict(self.times),
            "long_us": {
                name: sorted((ns // 1000 for ns in took), reverse=True)[:LONG_MOST]
                for name, took in self.longest_ns.items()
            },
            "kinds": kinds,
        }


def watch(costs: Costs) -> None:
    """Put clocks around the daemon's parts, before one is made."""
    part = costs.part
    for owner, name, label in (
        (Directory, "handle", "core"),
        (kept_tier.KeptTier, "apply", "journal"),
        (kept_tier.KeptTier, "has_room", "journal room"),
        (movers.Movers, "submit", "to mover"),
        (movers.Movers, "_serve", "from mover"),
        (movers.Movers, "on_time", "on time"),
        (Capture, "__call__", "events note"),
        (kv_feed.KvFeed, "on_time", "events"),
        (recording.Recording, "tap", "log note"),
        (recording.Recording, "ended", "log note"),
        (recording.Recording, "_go_on", "log"),
        (AccessLog, "flush", "log written"),
        (AccessLog, "_begin", "log begun"),
        (background.Background, "turn", "on time"),
        (background.Background, "due_us", "on time"),
        (server.Server, "answer", "answer"),
        (FrameLane, "receive", "receive"),
        (FrameLane, "_send_data", "send"),
        (lanes.Lanes, "_serve", "lane"),
        (Loop, "turn", "turn, with waiting"),
        (Loop, "_call", "questions"),
        (endpoint, "decode_envelope", "decode"),
    ):
        setattr(owner, name, part(label)(getattr(owner, name)))
    Daemon._ask = part("stream", lambda *a: type(a[3]).__name__)(Daemon._ask)  # type: ignore[method-assign]

    def told(daemon: Daemon, event: object) -> str:
        del daemon
        if isinstance(event, CopyDone):
            return f"CopyDone {kinds.pop(event.op, '?')}"
        return costs.kind

    kinds: dict[int, str] = {}
    submit = movers.Movers.submit

    def noted(self: movers.Movers, copy: Any) -> None:
        kinds[copy.op] = "backup" if copy.kind == "backup" else "restore"
        costs.times[f"{costs.kind} begins a {kinds[copy.op]}"] += 1
        submit(self, copy)

    movers.Movers.submit = noted  # type: ignore[method-assign]
    Daemon.tell = _of_copies(part("stream", told)(Daemon.tell), Daemon.tell)  # type: ignore[method-assign]


def _of_copies(timed: Callable[..., Any], plain: Callable[..., Any]) -> Callable[..., Any]:
    def tell(daemon: Daemon, event: object) -> None:
        (timed if isinstance(event, CopyDone) else plain)(daemon, event)

    return tell


def main() -> int:
    """Serve, with clocks."""
    file = Path(sys.argv[1])
    del sys.argv[1]
    costs = Costs()
    watch(costs)
    signal.signal(signal.SIGUSR1, lambda *_: costs.begin())
    signal.signal(signal.SIGUSR2, lambda *_: file.write_text(json.dumps(costs.as_json())))
    cli.app()
    return 0


if __name__ == "__main__":
    sys.exit(main())
