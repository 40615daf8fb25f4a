"""The rhythm in which a thread waits for a layer."""

from scheduler_shim.sglang.looks import SPINS, Looks


def test_it_sleeps_mostly_and_takes_in_what_has_come_every_so_often() -> None:
    looks = Looks()
    slept = [looks.slept() for _ in range(3 * SPINS)]
    assert slept.count(False) == 3
    assert not slept[SPINS - 1]
    assert all(slept[: SPINS - 1])
