"""Room for a mapping that begins where large pages can: a wish, like large pages themselves.

Owns a hole in this process's addresses while somebody maps memory into it. Nothing is mapped here,
and a mapping that the kernel puts elsewhere is as good, only slower to copy from.
"""

import ctypes
import mmap
import os
from collections.abc import Iterator
from contextlib import contextmanager

from directory.core.limits import MIB

LARGE_BYTES = 2 * MIB
"""A large page, and what a mapping of such begins at a multiple of."""
ROOMS_ABOVE_MAX = 1_024
"""Smaller rooms above the one that is chosen, which are kept from being taken instead."""
FAILED = ctypes.c_void_p(-1).value
PROT_NONE = 0


@contextmanager
def aligned_room(nbytes: int) -> Iterator[None]:
    """Within, the next mapping of so many bytes begins at a multiple of a large page.

    The kernel takes the highest room that is large enough. So some more than that is taken, of
    which just the wanted part is let go, and what would fit above it is taken, too: memory that is
    shared is aligned by the kernel itself only where its setting grants large pages, and Python's
    mmap names no address. What is taken is a mapping of the same kind, of a file without a page,
    because the kernel looks for room for anonymous memory in another way.
    """
    size = -(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE
    if size < LARGE_BYTES:
        yield
        return
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = (
        *(ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int),
        ctypes.c_long,
    )
    libc.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
    span = size + LARGE_BYTES
    try:
        file = os.memfd_create("treecored-room")
    except OSError:  # no descriptor is left, and the mapping will say so
        yield
        return
    taken: list[tuple[int, int]] = []
    try:
        os.ftruncate(file, span)
        base = libc.mmap(None, span, PROT_NONE, mmap.MAP_SHARED, file, 0)
        if base != FAILED:
            begin = -(-base // LARGE_BYTES) * LARGE_BYTES
            end = begin + size
            taken += [(base, begin), (end, base + span)]
            for _ in range(ROOMS_ABOVE_MAX):
                room = libc.mmap(None, size, PROT_NONE, mmap.MAP_SHARED, file, 0)
                if room == FAILED:
                    break
                taken.append((room, room + size))
                if room < base:
                    break
            libc.munmap(begin, size)
    finally:
        os.close(file)
    try:
        yield
    finally:
        for first, last in taken:
            if last > first:
                libc.munmap(first, last - first)
