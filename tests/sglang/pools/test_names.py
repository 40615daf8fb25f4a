"""Names: fresh, exact in both tables, free exactly once."""

from __future__ import annotations

import random
from array import array

import pytest

pytest.importorskip("torch", reason="torch is not installed in this environment")

import torch

from directory.core.errors import InternalError
from scheduler_shim.sglang.names import KEPT_MAX, KEPT_TOKENS_MAX, PageNames

pytestmark = pytest.mark.sglang


def slots(pages: list[int], page_size: int) -> torch.Tensor:
    """The slots of whole pages."""
    first = torch.tensor(pages, dtype=torch.int64)[:, None] * page_size
    return (first + torch.arange(page_size)).reshape(-1)


def names_and_table(page_count: int, page_size: int) -> tuple[PageNames, torch.Tensor]:
    table = torch.full((page_count,), -1, dtype=torch.int32)
    return PageNames(page_count, page_size, "cpu", table), table


@pytest.mark.parametrize("page_size", [1, 16, 64])
def test_a_name_stands_for_its_page_in_both_tables(page_size: int) -> None:
    names, table = names_and_table(9, page_size)
    given = names.name(slots([8, 3, 5], page_size))
    assert len(set(given)) == 3
    assert names.slots(given).tolist() == slots([8, 3, 5], page_size).tolist()
    assert names.slots(given.tobytes()).dtype == torch.int64
    assert names.pages(given).tolist() == [8, 3, 5]
    assert [int(table[name]) for name in given] == [8, 3, 5]
    assert names.slots(given[::-1]).tolist() == slots([5, 3, 8], page_size).tolist()


def test_a_name_that_is_free_again_gets_another_page() -> None:
    names, table = names_and_table(4, 2)
    (first,) = names.name(slots([2], 2))
    names.forget(array("I", [first]))
    (second,) = names.name(slots([3], 2))
    assert second == first, "the last one freed is the first used"
    assert int(table[second]) == 3
    assert names.slots(array("I", [second])).tolist() == [6, 7]


def test_nothing_is_named_twice_and_nothing_given_up_twice() -> None:
    names, _ = names_and_table(8, 2)
    given = names.name(slots([1, 2, 3], 2))
    names.forget(given[:1])
    for wrong in (given[:1], array("I", [given[1], given[1]]), array("I", [given[1], given[0]])):
        with pytest.raises(InternalError, match="given up twice"):
            names.forget(wrong)
    with pytest.raises(InternalError, match="none of 8"):
        names.forget(array("I", [8]))
    assert list(names.used()) == sorted(given[1:]), "a refusal changes nothing"
    names.forget(given[1:])
    assert (names.free_count, names.used_count, list(names.used())) == (8, 0, [])


@pytest.mark.parametrize(
    ("wrong", "why"),
    [
        ([2, 3, 4], "no whole pages"),
        ([1, 2], "not whole pages in token order"),
        ([3, 2], "not whole pages in token order"),
        ([2, 3, 4, 4], "not whole pages in token order"),
    ],
)
def test_a_part_of_a_page_is_never_named(wrong: list[int], why: str) -> None:
    names, _ = names_and_table(8, 2)
    with pytest.raises(InternalError, match=why):
        names.name(torch.tensor(wrong, dtype=torch.int64))
    assert names.used_count == 0


def test_more_pages_than_names_are_refused_whole() -> None:
    names, _ = names_and_table(2, 1)
    with pytest.raises(InternalError, match="3 pages want names and 2 are free"):
        names.name(slots([0, 1, 2], 1))
    assert names.used_count == 0


def test_what_is_expected_is_ready_until_a_name_is_given_up() -> None:
    names, _ = names_and_table(8, 2)
    given = names.name(slots([1, 2, 3], 2))
    names.expect(given.tobytes())
    ready = names.slots(given.tobytes())
    assert ready.tolist() == [2, 3, 4, 5, 6, 7]
    assert names.slots(given.tobytes()) is ready
    assert names.slots(given[:2].tobytes()).tolist() == [2, 3, 4, 5], "just these, or none"
    names.forget(given[:1])
    assert names.name(slots([7], 2)) == given[:1], "another page has the name now"
    assert names.slots(given.tobytes()).tolist() == [14, 15, 4, 5, 6, 7]


def test_a_paths_slots_are_kept_until_one_of_its_names_is_another_pages() -> None:
    names, _ = names_and_table(8, 2)
    path, other = names.name(slots([5, 2, 7], 2)), names.name(slots([1], 2))
    kept = names.path_slots(path.tobytes())
    names.forget(other)
    names.name(slots([3, 6], 2))
    assert names.path_slots(path.tobytes()) is kept
    names.forget(path[1:2])
    assert names.name(slots([4], 2)) == path[1:2]
    assert names.path_slots(path.tobytes()).tolist() == slots([5, 4, 7], 2).tolist()


def test_a_refused_giving_up_leaves_every_name_as_old_as_it_was() -> None:
    names, _ = names_and_table(8, 2)
    path = names.name(slots([5, 2, 7], 2))
    for page in (1, 3, 6):
        names.name(slots([page], 2))
    names.path_slots(path.tobytes())
    names.forget(path[:1])
    assert names.name(slots([4], 2)) == path[:1]
    with pytest.raises(InternalError, match="given up twice"):
        names.forget(array("I", [path[0], path[0]]))
    assert names.path_slots(path.tobytes()).tolist() == slots([4, 2, 7], 2).tolist()


def test_no_more_paths_are_kept_than_may_be() -> None:
    names, _ = names_and_table(64, 2)
    paths = [names.name(slots([page], 2)).tobytes() for page in range(1, KEPT_MAX + 2)]
    first = names.path_slots(paths[0])
    for path in paths[1:]:
        names.path_slots(path)
    assert names.path_slots(paths[0]) is not first
    last = names.path_slots(paths[-1])
    assert names.path_slots(paths[-1]) is last


def test_neither_long_paths_nor_pages_of_one_token_are_kept() -> None:
    for page_count, page_size, length in ((8, 1, 3), (KEPT_TOKENS_MAX // 8_192 + 2, 8_192, 9)):
        names, _ = names_and_table(page_count, page_size)
        path = names.name(slots(list(range(length)), page_size)).tobytes()
        first = names.path_slots(path)
        assert names.path_slots(path) is not first
        assert names.path_slots(path).tolist() == first.tolist()
        assert names.path_slots(path[:-4]).numel() == (length - 1) * page_size


def test_nothing_has_no_names_and_no_slots() -> None:
    names, _ = names_and_table(2, 4)
    assert list(names.name(slots([], 4))) == []
    assert names.slots(b"").numel() == 0
    names.forget(b"")


@pytest.mark.parametrize("count", [0, 1 << 31])
def test_a_pool_that_cannot_be_counted_is_refused(count: int) -> None:
    with pytest.raises(InternalError, match="cannot be named"):
        PageNames(count, 1, "cpu")


def test_a_table_of_another_length_is_refused() -> None:
    with pytest.raises(InternalError, match=r"\(3,\) table entries for 4 names"):
        PageNames(4, 1, "cpu", torch.zeros(3, dtype=torch.int32))


@pytest.mark.parametrize("seed", range(4))
def test_names_follow_a_dictionary_through_random_use(seed: int) -> None:
    chance = random.Random(seed)
    page_size, page_count = chance.choice([1, 4]), 40
    names, table = names_and_table(page_count, page_size)
    model: dict[int, int] = {}
    for _ in range(400):
        free = [page for page in range(page_count) if page not in model.values()]
        if free and chance.random() < 0.5:
            pages = chance.sample(free, chance.randint(1, min(9, len(free))))
            given = names.name(slots(pages, page_size))
            assert not model.keys() & set(given)
            model.update(zip(given, pages, strict=True))
        elif model:
            back = chance.sample(sorted(model), chance.randint(1, min(9, len(model))))
            names.forget(array("I", back).tobytes())
            for name in back:
                del model[name]
        used = array("I", sorted(model))
        assert names.used() == used
        assert names.pages(used).tolist() == [model[name] for name in used]
        assert [int(table[name]) for name in used] == [model[name] for name in used]
        assert names.check() == []


def test_a_check_finds_a_page_with_two_names_and_a_table_that_differs() -> None:
    names, table = names_and_table(4, 2)
    names.name(slots([1], 2))
    names.name(slots([1], 2))
    assert names.check() == ["names: a page has two names"]
    names, table = names_and_table(4, 2)
    (name,) = names.name(slots([1], 2))
    table[name] = 2
    assert names.check() == ["names: the mover's table is not the device's"]
