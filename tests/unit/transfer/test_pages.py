"""Cutting whole pages: what is taken first, and what is left in one piece."""

from hypothesis import given
from hypothesis import strategies as st

from transfer.pages import PageBatch, Pattern, left_of, page_slices
from transfer.plan import Chunk

CHUNK = 64


def pattern(chunks: int) -> Pattern:
    """A page of so many chunks."""
    return Pattern([Chunk(n, 0, CHUNK, n, 0, CHUNK, CHUNK) for n in range(chunks)])


@st.composite
def batches(draw: st.DrawFn) -> list[PageBatch]:
    """Some batches between two pools, of pages of different sizes."""
    made: list[PageBatch] = []
    for chunks, pages in draw(
        st.lists(st.tuples(st.integers(1, 4), st.integers(1, 9)), min_size=1)
    ):
        numbers = [len(made) * 100 + n for n in range(pages)]
        made.append(PageBatch(1, 2, 0, pattern(chunks), numbers, numbers[::-1]))
    return made


def moved(pieces: list[PageBatch]) -> list[tuple[Chunk, int, int]]:
    """Every chunk of every page, in order."""
    return [
        (chunk, start, stop)
        for piece in pieces
        for start, stop in zip(piece.source_pages, piece.target_pages, strict=True)
        for chunk in piece.pattern.chunks
    ]


@given(batches(), st.integers(1, 20 * CHUNK))
def test_what_is_taken_first_and_what_is_left_are_all_pages_once_and_in_order(
    whole: list[PageBatch], nbytes: int
) -> None:
    pieces = page_slices(whole, nbytes)
    first = next(pieces)
    rest = left_of(whole, first)
    if rest:
        assert moved(first) + moved(rest) == moved(whole)
        assert all(piece.source_pages for piece in rest)
    else:
        # Nothing is left, or a page was cut, of which only the pieces themselves know the rest.
        assert moved(first) + [m for piece in pieces for m in moved(piece)] == moved(whole)
