"""Names of pages: how the CPU speaks of pages whose numbers only the device knows.

Owns which names are in use and the two tables from name to place: one on the device, for gathers,
and one in shared memory, for the mover. Both are written by the current stream, so they are right
under the same fences as the pages themselves. It must never read a tensor of the device: whatever
it answers at once, it answers from the names alone. (`check` is the exception, for idle moments.)

A name is a number in 0..page_count-1. As long as it is in use it stands for one page; afterwards
it stands for nothing, and the next page that gets it may be any other. Whoever still copies by a
name that was given up is voided by its span's word, which moved on before.
"""

from __future__ import annotations

from array import array

import torch

from directory.core.errors import InternalError

NAME_BITS = 31
"""Names travel as u32, and torch counts in i32: fewer than 2**31 pages keep both the same."""


class PageNames:
    """Names of one pool's pages; mutated by the scheduler's thread alone."""

    def __init__(
        self,
        page_count: int,
        page_size: int,
        device: str | torch.device,
        shared_table: torch.Tensor | None = None,
    ) -> None:
        """`shared_table`: `page_count` 32-bit integers that the mover reads, addressable from the
        device (on a GPU: a view of registered host memory). None: nobody reads it."""
        if not 0 < page_count < 1 << NAME_BITS or page_size < 1:
            raise InternalError(f"{page_count} pages of {page_size} tokens cannot be named")
        self.page_count = page_count
        self.page_size = page_size
        self.device = torch.device(device)
        # Names that are free; the last one is the next. Low names come first.
        self._free = array("I", range(page_count - 1, -1, -1))
        self._uses = torch.zeros(page_count, dtype=torch.int8)  # 1: in use; on the CPU
        self._first_slots = torch.zeros(page_count, dtype=torch.int64, device=self.device)
        self._offsets = torch.arange(page_size, dtype=torch.int64, device=self.device)
        self._shared: torch.Tensor | None = None
        if shared_table is not None:
            table = shared_table.view(torch.int32)
            if table.shape != (page_count,):
                raise InternalError(f"{tuple(table.shape)} table entries for {page_count} names")
            self._shared = table

    @property
    def free_count(self) -> int:
        """Names that are free."""
        return len(self._free)

    @property
    def used_count(self) -> int:
        """Names that are in use."""
        return self.page_count - len(self._free)

    def name(self, slots: torch.Tensor) -> array[int]:
        """Name pages: `slots` is int64 [n * page_size] on the device, whole pages in token order.

        Raises `InternalError` for a part of a page and when there are not so many names.
        """
        count, rest = divmod(slots.numel(), self.page_size)
        if rest:
            raise InternalError(f"{slots.numel()} slots are no whole pages of {self.page_size}")
        if count > len(self._free):
            raise InternalError(f"{count} pages want names and {len(self._free)} are free")
        if not count:
            return array("I")
        if self.device.type == "cpu":
            self._check_whole(slots)
        cut = len(self._free) - count
        names = self._free[cut:]
        names.reverse()
        del self._free[cut:]
        where = _index(names)
        self._uses[where] = 1
        where = self._to_device(where)
        first_slots = slots[:: self.page_size]
        self._first_slots[where] = first_slots
        if self._shared is not None:
            self._shared[where] = (first_slots // self.page_size).to(torch.int32)
        return names

    def slots(self, names: bytes | array[int]) -> torch.Tensor:
        """Where the named pages lie: int64 [n * page_size] on the device, in token order."""
        first = self.first_slots(names)
        if self.page_size == 1:
            return first
        return (first[:, None] + self._offsets).reshape(-1)

    def pages(self, names: bytes | array[int]) -> torch.Tensor:
        """Numbers of the named pages: int64 [n] on the device."""
        return self.first_slots(names) // self.page_size

    def first_slots(self, names: bytes | array[int]) -> torch.Tensor:
        """First slot of each named page: int64 [n] on the device."""
        return self._first_slots[self._to_device(_index(names))]

    def forget(self, names: bytes | array[int]) -> None:
        """The names are free again; raises `InternalError` for one that is free, changing nothing.

        Ask for their slots before the next `name`: from then on they are another page's.
        """
        where = _index(names)
        if not where.numel():
            return
        if int(where.max()) >= self.page_count:
            raise InternalError(f"name {int(where.max())} is none of {self.page_count}")
        once = torch.ones(where.numel(), dtype=torch.int8)
        self._uses.index_add_(0, where, once, alpha=-1)
        if bool(self._uses[where].any()):
            self._uses.index_add_(0, where, once)
            raise InternalError("a name is given up twice, or is not in use")
        back = array("I")
        back.frombytes(bytes(names))
        back.reverse()  # the first of them is the next to be used, as with pages
        self._free.extend(back)

    def used(self) -> array[int]:
        """Names in use, in order."""
        return _pack(self._uses.nonzero().flatten())

    def check(self) -> list[str]:
        """What does not hold; waits for the device, so only for idle moments and tests."""
        found = []
        where = self._uses.nonzero().flatten()
        if where.numel() + len(self._free) != self.page_count:
            found.append(f"names: {where.numel()} used and {len(self._free)} free ones")
        first = self._first_slots.to("cpu")[where]
        if torch.unique(first).numel() != where.numel():
            found.append("names: a page has two names")
        if bool((first % self.page_size).any()) or bool((first < 0).any()):
            found.append("names: a name stands for no whole page")
        if self._shared is not None:
            shared = self._shared.to("cpu")[where]
            if not torch.equal(shared.to(torch.int64) * self.page_size, first):
                found.append("names: the mover's table is not the device's")
        return found

    def _check_whole(self, slots: torch.Tensor) -> None:
        """Only where looking costs nothing: a row that is no whole pages would name wrong bytes."""
        rows = slots.view(-1, self.page_size)
        first = rows[:, :1]
        if bool((first % self.page_size).any()) or not torch.equal(rows, first + self._offsets):
            raise InternalError("the slots to be named are not whole pages in token order")

    def _to_device(self, where: torch.Tensor) -> torch.Tensor:
        if self.device.type == "cpu":
            return where
        # Pinned, so that the copy is queued and nobody waits; torch keeps the pinned block until
        # the stream has read it.
        return where.pin_memory().to(self.device, non_blocking=True)

    def __repr__(self) -> str:
        return f"<PageNames {self.used_count} of {self.page_count} in use on {self.device}>"


def _index(names: bytes | array[int]) -> torch.Tensor:
    """Names as int64 on the CPU, to index with."""
    if not names:
        return torch.empty(0, dtype=torch.int64)
    # torch insists on memory that may be written.
    held = bytearray(names) if isinstance(names, bytes) else names
    return torch.frombuffer(held, dtype=torch.int32).to(torch.int64)


def _pack(names: torch.Tensor) -> array[int]:
    packed = array("I")
    packed.frombytes(names.to(torch.int32).numpy().tobytes())
    return packed
