"""The room's allocator over SGLang's own: what SGLang allocates gets names, names free it again.

Owns nothing: the free pages are SGLang's, the names are names.py's. It must never free slots whose
names are not in use, and never a name without its slots.
"""

from __future__ import annotations

from array import array
from typing import Any, Protocol

import torch

from directory.core.errors import InternalError
from scheduler_shim.sglang.names import PageNames


class SlotAllocator(Protocol):
    """What is used of SGLang's `token_to_kv_pool_allocator`, of both dialects."""

    page_size: int
    free_pages: torch.Tensor

    def available_size(self) -> int:
        """Free slots."""
        ...

    def alloc(self, need_size: int) -> torch.Tensor | None:
        """Take slots, int64 on the device, whole pages in token order; all or none."""
        ...

    def free(self, free_index: torch.Tensor) -> None:
        """Give slots back."""
        ...


def give_back(allocator: Any, pages: torch.Tensor) -> None:
    """Free whole pages of SGLang's, each named once: int64 page numbers on the device.

    SGLang's `free` takes slots and searches them for their pages, which waits for the device. From
    0.5.18 on it takes pages, too; before, what it would find is put where it would put it.
    """
    by_pages = getattr(allocator, "free_page_ids", None)
    if by_pages is not None:
        by_pages(pages)
    elif allocator.page_size == 1:
        allocator.free(pages)
    elif not allocator.is_not_in_free_group or getattr(allocator, "debug_mode", False):
        offsets = torch.arange(allocator.page_size, dtype=torch.int64, device=pages.device)
        allocator.free((pages[:, None] * allocator.page_size + offsets).reshape(-1))
    elif allocator.need_sort:
        allocator.release_pages = torch.cat((pages, allocator.release_pages))
    else:
        allocator.free_pages = torch.cat((pages, allocator.free_pages))


class NamedAllocator:
    """Pages of SGLang's pool by their names; the interface of `PageAllocator`."""

    def __init__(self, names: PageNames, allocator: SlotAllocator) -> None:
        if allocator.page_size != names.page_size:
            raise InternalError(
                f"SGLang allocates pages of {allocator.page_size} tokens, named are pages of "
                f"{names.page_size}"
            )
        self.names = names
        self._allocator = allocator

    @property
    def page_count(self) -> int:
        """Pages of the layout, SGLang's page for dummy writes included: so many names."""
        return self.names.page_count

    @property
    def free_count(self) -> int:
        """Pages that can be allocated."""
        return self._allocator.available_size() // self.names.page_size

    @property
    def unnamed_count(self) -> int:
        """Pages that SGLang has for itself: of running rows, of its own needs, and page 0."""
        return self.page_count - self.free_count - self.names.used_count

    def allocate(self, count: int) -> array[int] | None:
        """Take `count` pages, or none at all (None) when there are not enough."""
        if count > self.free_count:
            return None
        if not count:
            return array("I")
        slots = self._allocator.alloc(count * self.names.page_size)
        return None if slots is None else self.names.name(slots)

    def free(self, names: bytes | array[int]) -> None:
        """Give pages back by name; raises `InternalError`, freeing nothing, for a free name."""
        if not names:
            return
        # Given up first, because a name that is not in use must never free a page; what it stood
        # for stays in the table until it is given to another page.
        self.names.forget(names)
        give_back(self._allocator, self.names.pages(names))

    def used(self) -> array[int]:
        """Names in use, in order. Pages without a name are SGLang's own and never here."""
        return self.names.used()

    def expect(self, pages: bytes) -> None:
        """Have the slots of named pages ready for whoever asks for just these."""
        self.names.expect(pages)

    def start_over(self, keep: bytes | array[int] = b"") -> None:
        """SGLang has cleared its allocator: every page is free but those of the names in `keep`.

        They are taken out of SGLang's free pages again, because somebody may still write into
        them; all other names are forgotten. Waits for the device, as SGLang's clearing does.
        """
        kept = array("I")
        kept.frombytes(bytes(keep))
        held = set(kept)
        self.names.forget(array("I", (name for name in self.names.used() if name not in held)))
        if not kept:
            return
        pages = self.names.pages(kept)
        free = self._allocator.free_pages
        self._allocator.free_pages = free[~torch.isin(free, pages)]

    def check(self) -> list[str]:
        """What does not hold; waits for the device, so only for idle moments and tests."""
        found = self.names.check()
        every = getattr(self._allocator, "get_all_free_pages", None)
        if every is not None:
            free = every()
        else:
            free = torch.cat((self._allocator.free_pages, self._release_pages()))
        named = self.names.pages(self.used())
        if bool(torch.isin(named, free).any()):
            found.append("names: a page is free and has a name")
        return found

    def _release_pages(self) -> torch.Tensor:
        """Pages that the older dialect keeps apart until they are sorted in."""
        released: torch.Tensor | None = getattr(self._allocator, "release_pages", None)
        return self._allocator.free_pages[:0] if released is None else released

    def __repr__(self) -> str:
        return f"<NamedAllocator {self.free_count} free, {self.names!r}>"
