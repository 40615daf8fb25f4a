"""The daemon with a clock around its parts: what each kind of message costs its thread, and where.

    python -m benchmarks.costed_daemon FILE serve ...

Owns the clocks. Each part's own time counts to the kind of thing in whose course it was called: a
message of a client, the end of a copy, what is done beside. For a sixteenth of the time, by chance,
the clocks are there: all the time they were a third of a busy daemon's, and drove it to the end of
what it can. On SIGUSR1 the sums begin anew, on SIGUSR2
they are written to FILE. A clock costs about 0.3 us a call, which counts to the part around it. It
never changes what the daemon does. What single matches waited for is marked_daemon.py's to say.
"""

from __future__ import annotations

import json
import signal
import sys
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from random import Random
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
PERIOD_NS: Final = 20_000_000
"""So long it is looked at what is done."""
REST_NS_MAX: Final = 2 * 15 * PERIOD_NS
"""So long at most it is not, and half of that on the average."""


class Costs:
    """Own time by (kind, part), and how often each kind came, while it is looked."""

    def __init__(self) -> None:
        self.spent_ns: dict[tuple[str, str], int] = defaultdict(int)
        self.times: dict[str, int] = defaultdict(int)
        self.kind = NOTHING
        self.looks = False
        """Whether it is looked now."""
        self.looked_ns = 0
        """So long it was, all together."""
        self._switched: list[tuple[Any, str, Any, Any]] = []
        self._switch_ns = self._began_ns = 0
        self._chance = Random(0)
        self._inner_ns = 0
        self._since_ns, self._cpu_ns = clock(), time.process_time_ns()

    def part(self, name: str, kind: Callable[..., str] | None = None) -> Callable[..., Any]:
        """A wrapper whose calls are a part; `kind`: of the thing that begins with the call."""

        def around(function: Callable[..., Any]) -> Callable[..., Any]:
            def timed(*arguments: Any, **named: Any) -> Any:
                if not self.looks:
                    return function(*arguments, **named)
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
                    self._inner_ns = outer_ns + took
                    self.kind = before

            return timed

        return around

    def put(
        self,
        owner: Any,
        name: str,
        label: str,
        kind: Callable[..., str] | None = None,
        *,
        stays: bool = False,
    ) -> None:
        """Make a function a part while it is looked; `stays`: somebody keeps it, so the clock is
        always there, and does nothing between."""
        plain = getattr(owner, name)
        timed = self.part(label, kind)(plain)
        if stays:
            setattr(owner, name, timed)
        else:
            self._switched.append((owner, name, plain, timed))

    def of_turns(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Turns of the loop, between which it begins and ends to look."""
        timed = self.part("turn, with waiting")(function)

        def turn(*arguments: Any) -> Any:
            now = clock()
            if now >= self._switch_ns:
                self._switch(now)
            return (timed if self.looks else function)(*arguments)

        return turn

    def _switch(self, now: int) -> None:
        self.looks = not self.looks
        if self.looks:
            self._began_ns, self._switch_ns = now, now + PERIOD_NS
        else:
            self.looked_ns += now - self._began_ns
            self._switch_ns = now + self._chance.randint(0, REST_NS_MAX)
        for owner, name, plain, timed in self._switched:
            setattr(owner, name, timed if self.looks else plain)

    def begin(self) -> None:
        """Forget what was counted."""
        self.spent_ns.clear()
        self.times.clear()
        self.looked_ns, self._began_ns = 0, clock()
        self._since_ns, self._cpu_ns = clock(), time.process_time_ns()

    def as_json(self) -> dict[str, Any]:
        """Microseconds by kind and part; what of the time was the processor's."""
        looked_ns = self.looked_ns + (clock() - self._began_ns if self.looks else 0)
        kinds: dict[str, dict[str, float]] = defaultdict(dict)
        for (kind, name), ns in sorted(self.spent_ns.items()):
            kinds[kind][name] = ns / 1e3
        return {
            "wall_us": (clock() - self._since_ns) / 1e3,
            "cpu_us": (time.process_time_ns() - self._cpu_ns) / 1e3,
            "looked_us": looked_ns / 1e3,
            "times": dict(self.times),
            "kinds": kinds,
        }


def watch(costs: Costs) -> None:
    """Put clocks around the daemon's parts, before one is made."""
    kinds: dict[int, str] = {}
    submit = movers.Movers.submit

    def noted(self: movers.Movers, copy: Any) -> None:
        kinds[copy.op] = "backup" if copy.kind == "backup" else "restore"
        if costs.looks:
            costs.times[f"{costs.kind} begins a {kinds[copy.op]}"] += 1
        submit(self, copy)

    movers.Movers.submit = noted  # type: ignore[method-assign]
    for owner, name, label in (
        (Directory, "handle", "core"),
        (kept_tier.KeptTier, "apply", "journal"),
        (kept_tier.KeptTier, "has_room", "journal room"),
        (movers.Movers, "submit", "to mover"),
        (movers.Movers, "on_time", "on time"),
        (Capture, "__call__", "events note"),
        (kv_feed.KvFeed, "on_time", "events"),
        (recording.Recording, "ended", "log note"),
        (recording.Recording, "_go_on", "log"),
        (AccessLog, "_flush_some", "log written"),
        (background.Background, "turn", "on time"),
        (background.Background, "due_us", "on time"),
        (server.Server, "answer", "answer"),
        (FrameLane, "receive", "receive"),
        (FrameLane, "_send_data", "send"),
        (Loop, "_call", "questions"),
        (endpoint, "decode_envelope", "decode"),
    ):
        costs.put(owner, name, label)
    costs.put(recording.Recording, "tap", "log note", stays=True)
    costs.put(movers.Movers, "_serve", "from mover", stays=True)
    costs.put(lanes.Lanes, "_serve", "lane", stays=True)
    costs.put(Daemon, "_ask", "stream", lambda *a: type(a[3]).__name__, stays=True)
    Loop.turn = costs.of_turns(Loop.turn)  # type: ignore[method-assign]

    def told(daemon: Daemon, event: object) -> str:
        del daemon
        return f"CopyDone {ended[-1]}" if isinstance(event, CopyDone) else costs.kind

    ended: list[str] = []
    tell = Daemon.tell
    timed = costs.part("stream", told)(tell)

    def telling(daemon: Daemon, event: object) -> None:
        if isinstance(event, CopyDone):
            ended[:] = [kinds.pop(event.op, "?")]
            timed(daemon, event)
        else:
            tell(daemon, event)  # type: ignore[arg-type]

    Daemon.tell = telling  # type: ignore[assignment, method-assign]


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
