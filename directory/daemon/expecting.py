"""Restores that are expected: who is to look for them instead of sleeping, and for how long.

Being woken takes a sleeping process 100 to 250 us, as long as all that it then does for a restore.
A scheduler that is told in answer to a match that something lies beyond its pool asks for it within
a millisecond, so the mover of its GPU and this process look for that; and for the end of a copy
between pools, which takes a few. Owns how long, and when to give it up, for each device by itself:
where restores do not follow, nothing is expected until one has come. It decides nothing of any
copy; whatever it says is only about who sleeps.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from time import monotonic_ns
from typing import Final

from directory.core.actions import AnyReply, Matched, SubmitCopy
from directory.core.ids import PoolId, is_pool
from directory.daemon.loop import Loop

RESTORE_NS: Final = 1_500_000
"""So long after the answer a restore is looked for."""
END_NS: Final = 4_000_000
"""So long after it has gone to the mover the end of a copy between pools is looked for."""
AGAIN_NS: Final = 500_000
"""What was expected so lately is not said again."""
UNMET_MAX: Final = 8
"""So many in a row may be followed by no restore."""
DEVICES_MAX: Final = 64
"""More are not told apart."""


class _Device:
    """What was expected of one device. `unmet`: in a row, no restore followed."""

    __slots__ = ("said_ns", "unmet")

    def __init__(self) -> None:
        self.unmet = 0
        self.said_ns = -AGAIN_NS


class Expecting:
    """`tell`: lets the mover know, of a pool. `device_of`: what a pool lies on, for each device has
    a mover of its own. `heeds`: whether movers may look instead of sleeping; without, nothing is
    ever expected, and this process sleeps as always."""

    def __init__(
        self,
        loop: Loop,
        tell: Callable[[PoolId], None],
        device_of: Callable[[PoolId], Hashable],
        *,
        heeds: bool,
    ) -> None:
        self._loop = loop
        self._tell = tell
        self._device_of = device_of
        self._heeds = heeds
        self._devices: dict[Hashable, _Device] = {}

    def answered(self, pool: PoolId, body: AnyReply) -> None:
        """A pool was answered."""
        if not self._heeds or type(body) is not Matched or not body.restorable_pages:
            return
        now, device = monotonic_ns(), self._device(pool)
        if device.unmet >= UNMET_MAX or now - device.said_ns < AGAIN_NS:
            return
        device.unmet += 1
        device.said_ns = now
        self._loop.look_out(now + RESTORE_NS)
        # The scheduler's answer has not gone yet, and goes first.
        self._loop.after_turn(lambda: self._tell(pool))

    def submitted(self, copy: SubmitCopy) -> None:
        """A copy goes to the mover."""
        if not self._heeds or copy.kind == "backup":
            return
        # All parts of a copy go to one pool.
        for part in copy.parts[:1]:
            if is_pool(part.target):
                self._device(part.target).unmet = 0
        if copy.kind == "peer_copy":
            self._loop.look_out(monotonic_ns() + END_NS)

    def _device(self, pool: PoolId) -> _Device:
        key = self._device_of(pool)
        if key not in self._devices and len(self._devices) >= DEVICES_MAX:
            key = next(iter(self._devices))
        return self._devices.setdefault(key, _Device())

    def __repr__(self) -> str:
        unmet = [device.unmet for device in self._devices.values()]
        return f"<Expecting {'' if self._heeds else 'nothing, '}{unmet} unmet>"
