"""How much an engine has under way at once, and how long it waits: one row of figures a device.

Owns the figures and their meaning, and the choice of them for a device of each kind. No behaviour.
"""

from collections.abc import Sequence
from typing import NamedTuple

from directory.core.limits import DEVICE_DEADLINE_MS, FENCE_DEADLINE_MS, KIB, MIB
from transfer.lanes import Pace
from transfer.slicing import SliceSizes

BESIDE_RANGES = 96
"""Lists from so many ranges on are worth a thread: the driver takes some 50 us for them. One page
of a token or 16, and a slice of 8 MiB of 128 KiB chunks, have 64 and go at once."""


class EngineLimits(NamedTuple):
    """Bounds of the engine's queues and steps."""

    slice_bytes: int = 2 * MIB
    slice_ranges: int = 4 * KIB
    near_slice_bytes: int = 2 * MIB
    """Of a copy between GPU memories, which goes many times as fast as over the host's bus."""
    calm_slice_bytes: int = 2 * MIB
    """Of a copy within a GPU on which nothing else computes."""
    calm_submissions_max: int = 2
    """Of such slices, and of those over a link that are alone: what begins to compute meanwhile
    waits for them."""
    link_slice_bytes: int = 2 * MIB
    """Of a copy to another GPU where something computes, or may."""
    submissions_max: int = 4
    """Slices in flight at once: a restore waits for at most so many slices of backups."""
    lane_submissions_max: int = 4
    """Of one lane. Less than half of all where the device does both directions at once: then no
    restore waits for a backup."""
    lane_bytes_per_s: int = 0
    """Cap of each lane (0: none)."""
    local_percent: int = 100
    """Of the time of a copy within a GPU that computes meanwhile (see lanes.Pace)."""
    alone_bytes_per_us: int = 0
    """So fast is a slice within a GPU at least that shares it with nobody (0: nobody knows). What
    that shows is believed at once, unlike what the driver's library says of the past."""
    link_bytes_per_us: int = 0
    """The same of one over a link to another GPU (0: nobody knows, or it is a bus)."""
    idle_spin_us: int = 0
    """So long a mover that has nothing to do looks for the next copy before it goes to sleep."""
    landing_bytes: int = MIB
    """Of a load that lands layer by layer, so much at least is told at once: small layers go
    together, since a submission costs as much as some hundred kilobytes."""
    stage_bytes: int = MIB
    """Of a slice that goes through a staging slab; half as much where a slab has but few such."""
    stage_row_bytes: int = 0
    """Of a page in a step of layers that goes through a slab: what lies in one piece in the host
    tier. The bus is the slower for smaller ones."""
    stage_chunks_min: int = 1
    """A copy of fewer small chunks goes as it lies: the way through a slab costs two messages."""
    later_slice_bytes: int = 0
    """Of a load that lands layer by layer, behind its first layers; at least `slice_bytes`."""
    submit_beside: int = 0
    """A thread makes the driver's calls of lists of so many ranges and more of what goes through a
    slab, while the loop prepares the next one (0: the loop does). What goes as it lies is the
    loop's, whose time is hidden behind the bus: by the thread such loads took 2.6 to 5 times as
    long while the loop asked for events."""
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
        return SliceSizes(
            self.slice_bytes,
            self.slice_ranges,
            self.landing_bytes,
            self.near_slice_bytes,
            self.calm_slice_bytes,
            self.link_slice_bytes,
            self.later_slice_bytes,
            self.stage_row_bytes,
        )

    @property
    def bounds(self) -> tuple[int, int, int, Pace]:
        """Of lanes: slices in flight of all, of one, of one within a calm GPU, and their pace."""
        share = self.local_percent / 100
        alone = self.alone_bytes_per_us, self.link_bytes_per_us
        pace = Pace(self.lane_bytes_per_s, share, *alone)
        return self.submissions_max, self.lane_submissions_max, self.calm_submissions_max, pace


CUDA_LIMITS = EngineLimits(
    slice_bytes=8 * MIB,
    near_slice_bytes=128 * MIB,
    calm_slice_bytes=512 * MIB,
    link_slice_bytes=16 * MIB,
    submissions_max=18,
    lane_submissions_max=6,
    idle_spin_us=500,
    landing_bytes=2 * MIB,
    later_slice_bytes=16 * MIB,
    stage_bytes=32 * MIB,
    stage_row_bytes=128 * KIB,
    stage_chunks_min=128,
    local_percent=80,
)
"""A GPU copies in both directions at once, and on several streams. A slice of 8 MiB is 160 us of
PCIe 5 (smaller ones are bound by the mover's own time); a restore that comes behind another one
waits for six: of small pages, which go through a slab, for six of 32 MiB, since what one
costs the mover, however small it is, would be a fifth of its time in slices of half that size.
Within a GPU 128 MiB are some 75 us of all of it, and what computes there waits for a change of
contexts besides: much less would only multiply those. Where nothing computes two slices of 512 MiB
are some 600 us: the mover's own time is hidden behind them, and a step that begins just then waits
less than its own length. Over NVLink a kernel moves 128 MiB in 380 us and 16 MiB in 50; copy
engines take 170 us for those, all of it the mover's time in the driver (ADR 17)."""
