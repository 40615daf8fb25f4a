"""Samples: few of many, and evenly chosen."""

from scheduler_shim.samples import Samples


def test_a_sample_is_bounded_and_even() -> None:
    samples = Samples(most=100)
    for value in range(10_000):
        samples.add(value)
    assert (len(samples.values), samples.seen) == (100, 10_000)
    assert 3_000 < sum(samples.values) / 100 < 7_000
