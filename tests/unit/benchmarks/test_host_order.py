"""The model that compares orders of the host tier."""

from benchmarks.bench_host_order import Tier, hits


def test_copies_first_keeps_what_nobody_wants_and_least_recently_used_what_comes_back() -> None:
    old = [[1_000 + n] for n in range(8)]
    turns = [[10 * (n % 4), 10 * (n % 4) + 1] for n in range(40)]
    paths = [*old, *turns]
    first, _ = hits(paths, 1, 4, 8, 0.0)
    spared, beyond = hits(paths, 1, 4, 8, 0.25)
    plain, _ = hits(paths, 1, 4, 8, 1.0)
    asked = sum(len(path) for path in paths)
    assert first == 0, "two of the four fit into the pool, and the tier is full of others"
    assert spared > 0.5
    assert spared == beyond, "the pool alone never has it"
    assert plain == (asked - 8 - 8) / asked, "each was computed once"


def test_an_only_copy_goes_when_it_is_so_many_times_as_old() -> None:
    pools_of = {2: 1}
    tier = Tier(2, 0.25, pools_of)
    tier.back_up([1], 0)
    tier.back_up([2], 90)
    tier.back_up([3], 100)  # ages 100 and 10: the only copy is more than four times as old
    assert sorted(tier.blocks) == [2, 3]
    tier = Tier(2, 0.25, pools_of)
    tier.back_up([1], 0)
    tier.back_up([2], 75)
    tier.back_up([3], 100)  # 100 and 25
    assert sorted(tier.blocks) == [1, 3]


def test_a_block_with_others_below_it_stays_and_its_path_is_not_taken_for_it() -> None:
    tier = Tier(3, 1.0, {})
    tier.back_up([1, 2, 3], 1)
    tier.back_up([1, 2, 3, 4], 2)
    assert sorted(tier.blocks) == [1, 2, 3], "nothing of the path itself makes room"
    tier.back_up([9], 3)
    assert sorted(tier.blocks) == [1, 2, 9]
