"""The scrubber: it reads the host tier slowly, all of it in turn, and compares it with its sums.

Owns the place that it has come to and when it goes on. It runs in the mover that writes the tier,
between that mover's steps, so that a unit with a checksum is never one that is being written. It
must never hold the mover longer than a step of a copy does.
"""

from __future__ import annotations

from typing import Final

from directory.core.limits import MIB
from transfer.checksum import DAMAGED, NONE, UNITS_PER_SEGMENT_MAX, Units
from transfer.checksum_copies import Checksums

STEP_BYTES: Final = MIB
LOOK_UNITS: Final = 512
"""Entries that are looked at in one step while none of them is a checksum."""
REST_US: Final = 1_000_000
"""After a round that found nothing to read."""


class Scrubber:
    """Goes round one tier at `bytes_a_second`; its rounds and units are counted."""

    def __init__(self, checksums: Checksums, bytes_a_second: int, now_us: int) -> None:
        self._sums = checksums
        self._rate = bytes_a_second
        self._segment = 0
        self._unit = 0
        self._read_this_round = 0
        self.due_us = now_us
        self.rounds = 0
        self.units = 0

    def step(self, now_us: int) -> list[int]:
        """Read a little if it is time to; returns slots that are damaged."""
        if now_us < self.due_us:
            return []
        nbytes, damaged = self._some()
        self._read_this_round += nbytes
        # Time that was lost is not made up for: a mover that was busy has better things to do.
        self.due_us = now_us + nbytes * 1_000_000 // self._rate
        if self._segment >= len(self._sums.tier.segments):
            if not self._read_this_round:
                self.due_us = now_us + REST_US
            self._segment = self._unit = self._read_this_round = 0
            self.rounds += 1
        return damaged

    def _some(self) -> tuple[int, list[int]]:
        """Read the next units that have a checksum; at most a step's bytes or one unit."""
        form = self._sums.table.form(self._segment)
        units = 0
        if form is not None and self._segment < len(self._sums.tier.segments):
            nbytes = self._sums.tier.shape.bytes_of(self._segment)
            units = min(nbytes // form.unit_bytes, UNITS_PER_SEGMENT_MAX)
        count = min(LOOK_UNITS, units - self._unit)
        if form is None or count <= 0:
            self._segment, self._unit = self._segment + 1, 0
            return 0, []
        entries = self._sums.table.read(Units(self._segment, self._unit, count))
        first = next((at for at, entry in enumerate(entries) if entry > DAMAGED), count)
        self._unit += first
        most = max(1, STEP_BYTES // form.unit_bytes)
        length = 0
        while first + length < min(count, first + most) and entries[first + length] > DAMAGED:
            length += 1
        if not length:
            return 0, []
        run = Units(self._segment, self._unit, length)
        self._unit += length
        self.units += length
        return length * form.unit_bytes, self._sums.judge(run, form).damaged

    def __repr__(self) -> str:
        return f"<Scrubber at {self._segment}:{self._unit}, {self.rounds} rounds>"


assert NONE < DAMAGED, "an entry above both is a checksum"
