"""What is told to whom, record by record."""

from directory.kvevents.blocks import Stored
from directory.kvevents.records import Begin, Closed, Opened, Whole
from directory.kvevents.teller import Teller, batches
from directory.kvevents.union import UNION
from directory.kvevents.wire import Event
from tests.unit.directory.kvevents.told import HOST, PAGE, START, A, B, changed, hashes, space

FOUR = range(4)


def stored(
    tokens: range, medium: str, parent: int | None = None, blocks: list[int] | None = None
) -> Stored:
    """An event of whole pages."""
    return Stored(blocks or hashes(tokens), parent, list(tokens), PAGE, medium, None, None)


def started(*, union: bool = False) -> Teller:
    """A teller that has told its two schedulers that there is nothing."""
    teller = Teller(union=union)
    told = teller.take((*START, space()))
    assert told["a"] == told["b"] == [[None]]
    return teller


def test_what_a_pool_gets_is_told_to_its_scheduler_alone() -> None:
    assert started().take([changed(FOUR, A)]) == {"a": [[stored(FOUR, "GPU")]]}


def test_what_the_host_tier_gets_is_told_to_all_that_can_load_it() -> None:
    event = stored(FOUR, "CPU_PINNED")
    assert started().take([changed(FOUR, HOST)]) == {"a": [[event]], "b": [[event]]}


def test_the_host_pages_of_another_fingerprint_are_told_to_nobody() -> None:
    teller = started()
    assert teller.take([space(2, family=2), changed(FOUR, HOST, space=2)]) == {}


def test_what_a_pool_loses_is_told_again_for_the_tier_that_is_left() -> None:
    teller = started()
    teller.take([changed(FOUR, A), changed(FOUR, HOST)])
    told = teller.take([changed(FOUR, A, here=False)])
    assert told == {"a": [[("GPU", hashes(FOUR)), stored(FOUR, "CPU_PINNED")]]}
    told = teller.take([changed(FOUR, HOST, here=False)])
    removed: list[list[Event]] = [[("CPU_PINNED", hashes(FOUR))]]
    assert told == {"a": removed, "b": removed}


def test_what_the_host_tier_loses_is_told_again_where_a_pool_has_it() -> None:
    teller = started()
    teller.take([changed(FOUR, A), changed(FOUR, HOST)])
    told = teller.take([changed(FOUR, HOST, here=False)])
    gone = ("CPU_PINNED", hashes(FOUR))
    assert told == {"a": [[gone, stored(FOUR, "GPU")]], "b": [[gone]]}


def test_what_comes_and_goes_within_a_message_is_not_told() -> None:
    teller = started()
    assert teller.take([changed(FOUR, A), changed(FOUR, A, here=False)]) == {}


def test_a_record_that_is_told_twice_changes_nothing() -> None:
    teller = started()
    teller.take([changed(FOUR, A)])
    assert teller.take([changed(FOUR, A)]) == {}


def test_equal_hashes_of_two_namespaces_are_one_block_until_both_are_gone() -> None:
    teller = started()
    teller.take([space(2), changed(FOUR, A)])
    assert teller.take([changed(FOUR, A, node=2, space=2)]) == {}
    assert teller.take([changed(FOUR, A, here=False)]) == {}
    told = teller.take([changed(FOUR, A, here=False, node=2, space=2)])
    assert told == {"a": [[("GPU", hashes(FOUR))]]}


def test_a_salt_is_told_and_hashes_of_its_own() -> None:
    teller = started()
    ((event,),) = teller.take([space(2, cache_salt="s"), changed(FOUR, A, space=2)])["a"]
    assert isinstance(event, Stored)
    assert (event.cache_salt, event.blocks) == ("s", hashes(FOUR, "s"))


def test_a_child_begins_at_its_parents_last_block_and_parents_come_first() -> None:
    teller = started()
    below, beside = range(4, 6), range(6, 8)
    told = teller.take(
        [
            changed(below, A, node=3, base=0, above=((1, changed(FOUR, A).edge),)),
            changed(FOUR, A, node=1),
            changed(beside, A, node=4, base=1),
        ]
    )
    first, second = hashes(range(6)), hashes(FOUR)
    chain, branch = told["a"][0]
    assert chain == stored(range(6), "GPU", None, first)
    assert isinstance(branch, Stored)
    assert (branch.parent, branch.tokens) == (second[-1], list(beside))


def test_who_is_opened_is_told_a_clear_and_what_it_can_load() -> None:
    teller = started()
    teller.take([changed(FOUR, HOST)])
    told = teller.take([Opened(3, "c", 1, PAGE)])
    assert told == {"c": [[None, stored(FOUR, "CPU_PINNED")]]}


def test_who_is_closed_has_nothing_more_and_its_next_pool_is_not_closed_by_its_last() -> None:
    teller = started()
    teller.take([changed(FOUR, A)])
    assert teller.take([Closed(A), changed(FOUR, A, here=False)]) == {"a": [[None]]}
    assert teller.take([Opened(3, "a", 1, PAGE)]) == {"a": [[None]]}
    assert teller.take([Opened(4, "a", 1, PAGE), changed(FOUR, 4)]) == {
        "a": [[None, stored(FOUR, "GPU")]]
    }
    assert teller.take([Closed(3)]) == {}


def test_nothing_is_told_while_everything_is_being_told_anew() -> None:
    teller = started()
    teller.take([changed(FOUR, A)])
    assert teller.take([Begin(), Opened(A, "a", 1, PAGE), space()]) == {}
    assert teller.everything("a") == [None]
    assert teller.take([changed(range(2), A)]) == {}
    told = teller.take([Whole()])
    assert told == {"a": [[None, stored(range(2), "GPU")]], "b": [[None]]}


def test_the_union_names_all_holders_and_removes_with_the_last() -> None:
    teller = started(union=True)
    told = teller.take([changed(FOUR, A), changed(range(2), B, node=2), changed(FOUR, HOST)])
    ((first, second),) = told[UNION]
    assert isinstance(first, Stored)
    assert isinstance(second, Stored)
    assert (first.medium, first.blocks) == ("a:GPU b:GPU host:CPU_PINNED", hashes(range(2)))
    assert (second.medium, second.parent) == ("a:GPU host:CPU_PINNED", hashes(range(2))[0])
    told = teller.take([changed(FOUR, HOST, here=False), changed(FOUR, A, here=False)])
    ((gone, left),) = told[UNION]
    assert gone == (None, hashes(FOUR)[1:])
    assert isinstance(left, Stored)
    assert (left.medium, left.blocks) == ("b:GPU", hashes(range(2)))


def test_batches_are_of_bounded_size() -> None:
    events: list[Event] = [None, *[("GPU", list(range(1_000)))] * 10]
    cut = batches(events)
    assert [len(batch) for batch in cut] == [5, 4, 2]
    assert [event for batch in cut for event in batch] == events
    assert batches([]) == []
