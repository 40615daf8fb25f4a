"""How much an engine has under way at once, and how long it waits: one row of figures a device.

Owns the figures and their meaning, and the choice of them for a device of each kind. No behaviour.
"""

from collections.abc import Sequence
from typing import NamedTuple

from directory.core.limits import DEVICE_DEADLINE_MS, FENCE_DEADLINE_MS, KIB, MIB
from transfer.lanes import Pace
from transfer.slicing import SliceSizes


class EngineLimits(NamedTuple):
    """Bounds of the engine's queues and steps."""

    slice_bytes: int = 2 * MIB
    slice_ranges: int = 4 * KIB
    near_slice_bytes: int = 2 * MIB
    """Of a copy between GPU memories, which goes many times as fast as over the host's bus."""
    submissions_max: int = 4
    """Slices in flight at once: a restore waits for at most so many slices of backups."""
    lane_submissions_max: int = 4
    """Of one lane. Less than half of all where the device does both directions at once: then no
    restore waits for a backup."""
    lane_bytes_per_s: int = 0
    """Cap of each lane (0: none)."""
    local_percent: int = 100
    """Of the time of a copy within a GPU that computes meanwhile (see lanes.Pace)."""
    landing_bytes: int = MIB
    """Of a load that lands layer by layer, so much at least is told at once: small layers go
    together, since a submission costs as much as some hundred kilobytes."""
    copies_max: int = 64 * KIB
    fence_deadline_us: int = FENCE_DEADLINE_MS * 1000
    device_deadline_us: int = DEVICE_DEADLINE_MS * 1000

    def changed(self, changes: Sequence[str]) -> "EngineLimits":
        """With some of them set, each as "name=number". Raises `SystemExit` for one that is not."""
        numbers = {}
        for change in changes:
            name, _, number = change.partition("=")
            if name not in self._fields or not number.isdecimal():
                raise SystemExit(f"{change!r} is not NAME=NUMBER with one of {self._fields}")
            numbers[name] = int(number)
        return self._replace(**numbers)

    @property
    def sizes(self) -> SliceSizes:
        """Of slices."""
        near = self.near_slice_bytes
        return SliceSizes(self.slice_bytes, self.slice_ranges, self.landing_bytes, near)

    @property
    def bounds(self) -> tuple[int, int, Pace]:
        """Of lanes: slices in flight of all, of one, and their pace."""
        pace = Pace(self.lane_bytes_per_s, self.local_percent / 100)
        return self.submissions_max, self.lane_submissions_max, pace


CUDA_LIMITS = EngineLimits(
    slice_bytes=8 * MIB,
    near_slice_bytes=128 * MIB,
    submissions_max=18,
    lane_submissions_max=6,
    landing_bytes=2 * MIB,
    local_percent=80,
)
"""A GPU copies in both directions at once, and on several streams. A slice of 8 MiB is 160 us of
PCIe 5 (smaller ones are bound by the mover's own time); a restore that comes behind another one
waits for six. Within a GPU 128 MiB are some 75 us of all of it, and what computes there waits for a
change of contexts besides: much less would only multiply those."""
