"""Room for a mapping that begins where large pages can: a wish, like large pages themselves.

Owns a hole in this process's addresses while somebody maps memory into it. Nothing is mapped here,
and a mapping that the kernel puts elsewhere is as good, only slower to copy from.
"""

import ctypes
import mmap
from collections.abc import Iterator
from contextlib import contextmanager

from directory.core.limits import MIB

LARGE_BYTES = 2 * MIB
"""A large page, and what a mapping of such begins at a multiple of."""
PROT_NONE = 0
MAP_PRIVATE, MAP_ANONYMOUS, MAP_NORESERVE = 0x02, 0x20, 0x4000


@contextmanager
def aligned_room(nbytes: int) -> Iterator[None]:
    """Within, the next mapping of so many bytes begins at a multiple of a large page.

    The kernel takes the highest room that is large enough. So some more than that is taken, of
    which just the wanted part is let go: memory that is shared is aligned by the kernel itself only
    where its setting grants large pages, and Python's mmap names no address.
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
    base = libc.mmap(None, span, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0)
    if base == ctypes.c_void_p(-1).value:
        yield
        return
    begin = -(-base // LARGE_BYTES) * LARGE_BYTES
    end = begin + size
    libc.munmap(begin, size)
    try:
        yield
    finally:
        for first, last in ((base, begin), (end, base + span)):
            if last > first:
                libc.munmap(first, last - first)
