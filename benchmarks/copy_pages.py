"""Which pages the copy benchmark moves: scattered, or as an allocator under churn hands them out.

Pure: page numbers and packed lists from a seeded generator.
"""

from __future__ import annotations

import random
from array import array
from collections.abc import Iterable, Sequence

REQUEST_PAGES = (2, 96)
"""Least and most pages of a request of the churn, for pools of 512 pages and more."""
CHURN_REQUESTS = 400


def packed(pages: Iterable[int]) -> bytes:
    """A packed page list."""
    return array("I", pages).tobytes()


def scattered(total: int, count: int, rng: random.Random) -> list[int]:
    """`count` different pages in any order: no two are neighbours but by chance."""
    return rng.sample(range(total), count)


def allocated(total: int, count: int, rng: random.Random) -> list[int]:
    """`count` pages as a free list gives them after many requests came and went.

    As SGLang's paged allocator works: freed pages go behind the free ones, which are sorted anew
    only when they do not suffice.
    """
    free, freed = list(range(total)), [0][:0]
    held: list[list[int]] = []
    lowest, most = (max(1, pages * total // 4096) for pages in REQUEST_PAGES)
    for _ in range(CHURN_REQUESTS):
        need = rng.randint(lowest, most)
        while held and (len(free) + len(freed) < need or rng.random() < 0.4):
            freed += held.pop(rng.randrange(len(held)))
        if need > len(free):
            free, freed = sorted(free + freed), []
        held.append(free[:need])
        del free[:need]
    rng.shuffle(held)
    pages = [page for request in held for page in request] + sorted(free + freed)
    return pages[:count]


def slots_of(numbers: Sequence[int], per_segment: int) -> list[int]:
    """Host slots of page numbers counted over all segments."""
    return [(n // per_segment) << 16 | n % per_segment for n in numbers]


def parts_of(pages: Sequence[int], count: int) -> list[list[int]]:
    """A list in `count` nearly equal parts, in order."""
    each = -(-len(pages) // count)
    return [list(pages[at : at + each]) for at in range(0, len(pages), each)]
