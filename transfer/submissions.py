"""Submissions: which slices are with the device, whose they are and since when.

Owns the tickets that the device has not completed. A slice takes milliseconds; where one never
ends its pages stay in use until the hardware is done with them, and that only the end of this
process makes certain. So it says that the device is lost, and decides nothing else.
"""

from __future__ import annotations

from transfer.copies import Copy
from transfer.device.protocol import DeviceLost, Ticket


class Submissions:
    """Slices in flight, the oldest first. `deadline_us`: what one may take."""

    def __init__(self, deadline_us: int) -> None:
        self._deadline_us = deadline_us
        self._open: dict[Ticket, tuple[Copy, int]] = {}

    def add(self, ticket: Ticket, copy: Copy, now_us: int) -> None:
        """A slice of a copy was handed to the device."""
        self._open[ticket] = (copy, now_us)
        copy.in_flight.add(ticket)

    def end(self, ticket: Ticket) -> Copy:
        """The device is done with a slice; returns the copy."""
        copy, _ = self._open.pop(ticket)
        copy.in_flight.remove(ticket)
        return copy

    def watch(self, now_us: int) -> None:
        """Raise `DeviceLost` once the oldest slice has been with the device for too long."""
        for copy, since_us in self._open.values():
            if now_us - since_us >= self._deadline_us:
                raise DeviceLost(
                    f"the device has not finished a slice of {copy!r} for "
                    f"{(now_us - since_us) // 1000} ms"
                )
            return

    def __repr__(self) -> str:
        return f"<Submissions {len(self._open)} in flight>"
