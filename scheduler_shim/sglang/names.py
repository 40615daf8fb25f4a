"""Names of pages: how the CPU speaks of pages whose numbers only the device knows.

Owns which names are in use; the two tables from name to place (one on the device, for gathers, and
one in shared memory, for the mover) are name_tables.py's. It must never read a tensor of the
device: whatever it answers at once, it answers from the names alone. (`check` is the exception, for
idle moments.)

A name is a number in 0..page_count-1. As long as it is in use it stands for one page; afterwards
it stands for nothing, and the next page that gets it may be any other. Whoever still copies by a
name that was given up is voided by its span's word, which moved on before.
"""

from __future__ import annotations

from array import array
from typing import Any, Final

import numpy as np
import torch

from directory.core.errors import InternalError
from scheduler_shim.sglang.name_tables import make_tables

KEPT_MAX: Final = 16
"""So many paths' slots are kept."""
KEPT_TOKENS_MAX: Final = 65_536
"""Of paths of no more tokens than this: 8 bytes a token on the device."""
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
        # 0: free; else the naming, counted from 1, that a name in use is from.
        self._uses = np.zeros(page_count, dtype=np.int64)
        self._namings = 0
        self._kept: dict[bytes, tuple[int, torch.Tensor]] = {}  # and the last naming before
        shared: torch.Tensor | None = None
        if shared_table is not None:
            shared = shared_table.view(torch.int32)
            if shared.shape != (page_count,):
                raise InternalError(f"{tuple(shared.shape)} table entries for {page_count} names")
        self._tables = make_tables(page_count, page_size, self.device, shared)
        self._expected: tuple[bytes, torch.Tensor | None] = (b"", None)

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
        cut = len(self._free) - count
        names = self._free[cut:]
        names.reverse()
        where = _index(names)
        self._tables.write(where, slots)
        del self._free[cut:]
        self._namings += 1
        self._uses[where] = self._namings
        return names

    def slots(self, names: bytes | array[int]) -> torch.Tensor:
        """Where the named pages lie: int64 [n * page_size] on the device, in token order; not to be
        written into."""
        expected, slots = self._expected
        if slots is not None and names == expected:
            return slots
        return self._tables.slots(_index(names))

    def path_slots(self, names: bytes) -> torch.Tensor:
        """As `slots`, for a path that is asked for again and again: on a device each answer is a
        copy and two kernels. It is right for as long as none of the names was given anew. Pages of
        one token are as many names, and to look at all of them takes longer than to ask."""
        if self.page_size == 1 or len(names) // 4 * self.page_size > KEPT_TOKENS_MAX:
            return self.slots(names)
        kept = self._kept.pop(names, None)
        if kept is None or int(self._uses[_index(names)].max(initial=0)) > kept[0]:
            kept = self._namings, self.slots(names)
            if len(self._kept) >= KEPT_MAX:
                del self._kept[next(iter(self._kept))]
        self._kept[names] = kept
        return kept[1]

    def expect(self, names: bytes) -> None:
        """Have the slots of these names ready, for as long as no name is given up: a name that is
        in use stands for the same page all the while."""
        self._expected = (names, self._tables.slots(_index(names)))

    def pages(self, names: bytes | array[int]) -> torch.Tensor:
        """Numbers of the named pages: int64 [n] on the device."""
        return self._tables.pages(_index(names))

    def first_slots(self, names: bytes | array[int]) -> torch.Tensor:
        """First slot of each named page: int64 [n] on the device."""
        return self._tables.first_slots(_index(names))

    def forget(self, names: bytes | array[int]) -> None:
        """The names are free again; raises `InternalError` for one that is free, changing nothing.

        Ask for their slots before the next `name`: from then on they are another page's.
        """
        where = _index(names)
        count = len(where)
        if not count:
            return
        if int(where.max()) >= self.page_count:
            raise InternalError(f"name {int(where.max())} is none of {self.page_count}")
        if not self._uses[where].all():
            raise InternalError("a name is given up twice, or is not in use")
        if count > 1:
            # Each is written its place in the list: of a name that stands there twice the last one.
            order = np.arange(1, count + 1)
            before = self._uses[where]
            self._uses[where] = order
            if not np.array_equal(self._uses[where], order):
                self._uses[where] = before
                raise InternalError("a name is given up twice")
        self._uses[where] = 0
        self._expected = (b"", None)
        back = array("I")
        back.frombytes(bytes(names))
        back.reverse()  # the first of them is the next to be used, as with pages
        self._free.extend(back)

    def used(self) -> array[int]:
        """Names in use, in order."""
        packed = array("I")
        packed.frombytes(np.flatnonzero(self._uses).astype(np.uint32).tobytes())
        return packed

    def check(self) -> list[str]:
        """What does not hold; waits for the device, so only for idle moments and tests."""
        found = []
        where = np.flatnonzero(self._uses)
        if len(where) + len(self._free) != self.page_count:
            found.append(f"names: {len(where)} used and {len(self._free)} free ones")
        return found + self._tables.check(where)

    def __repr__(self) -> str:
        return f"<PageNames {self.used_count} of {self.page_count} in use on {self.device}>"


def _index(names: bytes | array[int]) -> Any:
    """Names as numbers to index with; the memory is the names' own."""
    return np.frombuffer(names, dtype=np.uint32)
