"""Sets of page numbers, one byte each."""

from hypothesis import given
from hypothesis import strategies as st

from directory.core.page_set import PageSet
from directory.core.tokens import pack_pages, unpack_pages

PAGES = st.lists(st.integers(0, 40), max_size=12)


@given(st.lists(st.tuples(st.sampled_from(("update", "difference_update", "isdisjoint")), PAGES)))
def test_it_is_a_set_whatever_is_done_to_it(steps: list[tuple[str, list[int]]]) -> None:
    pages, model = PageSet(), set[int]()
    for what, numbers in steps:
        packed = unpack_pages(pack_pages(numbers))
        assert getattr(pages, what)(packed) == getattr(model, what)(packed)
        assert set(pages) == model
        assert len(pages) == len(model)
        assert all((page in pages) == (page in model) for page in range(45))


def test_single_pages_come_and_go() -> None:
    pages = PageSet([3])
    pages.add(5)
    pages.discard(3)
    pages.discard(9_999)
    assert list(pages) == [5]
    assert -1 not in pages
    assert pages.isdisjoint(iter([4, 9_999]))
    assert repr(pages) == "<PageSet of 1 pages>"
