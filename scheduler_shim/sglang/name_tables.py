"""Where named pages lie: the tables from name to place, on the device and for the mover.

Owns the two tables and how they are written and read: of a pool in host memory by numpy, whose
calls are short; of a device by torch, queued on the current stream, so that the tables are right
under the same fences as the pages themselves. It must never read a tensor of a device.
"""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np
import torch

from directory.core.errors import InternalError


class NameTables(Protocol):
    """Both tables of one pool. `where`: names as an array of numbers."""

    def write(self, where: Any, slots: torch.Tensor) -> None:
        """The names stand for the pages of these slots: int64, whole pages in token order.

        Raises `InternalError`, before anything is written, for what is seen not to be that.
        """
        ...

    def first_slots(self, where: Any) -> torch.Tensor:
        """First slot of each named page: int64 [n] on the device."""
        ...

    def slots(self, where: Any) -> torch.Tensor:
        """All slots of the named pages: int64 [n * page_size] on the device, in token order."""
        ...

    def pages(self, where: Any) -> torch.Tensor:
        """Numbers of the named pages: int64 [n] on the device."""
        ...

    def check(self, where: Any) -> list[str]:
        """What does not hold of names in use; waits for the device."""
        ...


def make_tables(
    page_count: int, page_size: int, device: torch.device, shared: torch.Tensor | None
) -> NameTables:
    """Tables of a pool on a device. `shared`: the mover's, int32, if somebody reads it."""
    if device.type == "cpu":
        return _HostTables(page_count, page_size, shared)
    return _DeviceTables(page_count, page_size, device, shared)


class _HostTables:
    """Tables of a pool in host memory."""

    def __init__(self, page_count: int, page_size: int, shared: torch.Tensor | None) -> None:
        self._page_size = page_size
        self._first = np.zeros(page_count, dtype=np.int64)
        self._offsets = np.arange(page_size, dtype=np.int64)
        self._shared = None if shared is None else shared.numpy()

    def write(self, where: Any, slots: torch.Tensor) -> None:
        given = slots.numpy()
        first = given[:: self._page_size]
        pages = first // self._page_size
        whole = (pages * self._page_size)[:, None] + self._offsets
        # Looking costs little here: a row that is no whole pages would name wrong bytes.
        if not (whole.reshape(-1) == given).all():
            raise InternalError("the slots to be named are not whole pages in token order")
        self._first[where] = first
        if self._shared is not None:
            self._shared[where] = pages

    def first_slots(self, where: Any) -> torch.Tensor:
        return torch.from_numpy(self._first[where])

    def slots(self, where: Any) -> torch.Tensor:
        first = self._first[where]
        if self._page_size > 1:
            first = (first[:, None] + self._offsets).reshape(-1)
        return torch.from_numpy(first)

    def pages(self, where: Any) -> torch.Tensor:
        return torch.from_numpy(self._first[where] // self._page_size)

    def check(self, where: Any) -> list[str]:
        shared = None if self._shared is None else self._shared[where]
        return _violations(self._first[where], shared, self._page_size)


class _DeviceTables:
    """Tables of a pool on a device. The mover's lies in registered host memory."""

    def __init__(
        self, page_count: int, page_size: int, device: torch.device, shared: torch.Tensor | None
    ) -> None:
        self._page_size = page_size
        self._device = device
        self._first = torch.zeros(page_count, dtype=torch.int64, device=device)
        self._offsets = torch.arange(page_size, dtype=torch.int64, device=device)
        self._shared = shared

    def write(self, where: Any, slots: torch.Tensor) -> None:
        at = self._to_device(where)
        first = slots[:: self._page_size]
        self._first.index_copy_(0, at, first)
        if self._shared is not None:
            self._shared.index_copy_(0, at, (first // self._page_size).to(torch.int32))

    def first_slots(self, where: Any) -> torch.Tensor:
        return self._first.index_select(0, self._to_device(where))

    def slots(self, where: Any) -> torch.Tensor:
        first = self.first_slots(where)
        if self._page_size == 1:
            return first
        return (first[:, None] + self._offsets).reshape(-1)

    def pages(self, where: Any) -> torch.Tensor:
        return self.first_slots(where) // self._page_size

    def check(self, where: Any) -> list[str]:
        shared = None if self._shared is None else self._shared.to("cpu").numpy()[where]
        return _violations(self._first.to("cpu").numpy()[where], shared, self._page_size)

    def _to_device(self, where: Any) -> torch.Tensor:
        # Pinned, so that the copy is queued and nobody waits; torch keeps the pinned block until
        # the stream has read it.
        at = torch.from_numpy(where.astype(np.int64))
        return at.pin_memory().to(self._device, non_blocking=True)


def _violations(first: Any, shared: Any, page_size: int) -> list[str]:
    """What does not hold of the first slots of names in use and of the mover's pages for them."""
    found = []
    if len(np.unique(first)) != len(first):
        found.append("names: a page has two names")
    if (first % page_size).any() or (first < 0).any():
        found.append("names: a name stands for no whole page")
    if shared is not None and not np.array_equal(shared.astype(np.int64) * page_size, first):
        found.append("names: the mover's table is not the device's")
    return found
