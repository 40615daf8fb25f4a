"""What the host tier gives up first, and how far it has a path that pools have, too."""

from tests.unit.directory.core.world import Scheduler, World


def test_what_nobody_asks_for_any_more_goes_before_what_is_evicted_next() -> None:
    """An own prompt that was evicted is found, though it was a mirror until then."""
    world = World(host_pages=8, segment_pages=8)
    a = Scheduler(world, "a", pages=4)
    for number in range(8):  # prompts of long ago, in no pool
        a.publish([100 + number])
        world.finish_all()
        a.flush()
    for _ in range(100):
        a.match([1], acquire=False)
    for number in range(12):  # four prompts that come round, two of them fit into the pool
        tokens = [10 * (number % 4), 10 * (number % 4) + 1]
        found = a.match(tokens, acquire=False)
        if number >= 4:
            assert (found.own_pages, found.host_pages) == (0, 2), f"prompt {number}"
        a.publish(tokens)
        world.finish_all()


def test_a_match_says_how_far_the_host_tier_has_what_pools_have_too() -> None:
    for mode in ("thin", "mirrored"):
        world = World()
        a = Scheduler(world, "a")
        a.publish([1, 2, 3, 4])
        world.finish_all()
        b = Scheduler(world, "b", mode)
        assert (b.match([1, 2, 3, 4]).peer_pages, b.match([1, 2, 3, 4]).host_reach) == (4, 4)
        assert b.match([1, 2, 3, 9]).host_reach == 3
        a.publish([1, 2, 3, 4, 5, 6])  # the backup is under way
        got = b.match([1, 2, 3, 4, 5, 6])
        assert (got.peer_pages, got.host_reach) == (6, 4)
        a.flush()  # the receipt keeps it at the host
        world.finish_all()
        for number in range(40):
            a.publish([20 + number, 20 + number])
            world.finish_all()
        assert b.match([1, 2, 3, 4], acquire=False).host_reach == 4
        b.unlock(got.receipt)
        b.publish([1, 2, 3, 4])
        assert b.match([1, 2, 3, 4], own=0 if mode == "thin" else 4).host_reach == 0
