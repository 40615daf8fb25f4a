"""Ratios and verdicts follow from what was reported, and from nothing else."""

import pytest

from directory.cli.tally import BytesMoved, HitTokens, Outcome, Percentiles, Tally, percentiles
from scheduler_shim.worker_messages import Finished, Summary


def finished(
    number: int, tokens: int, own: int, host: int, peer: int, *, wrong: int = 0, error: str = ""
) -> Finished:
    verified = own + host + peer - wrong
    return Finished(number, tokens, own, host, peer, verified, wrong, 0.001, error)


def summary(*violations: str, rtt: tuple[float, ...] = ()) -> Summary:
    counters = {"bytes_restored_host": 5, "bytes_restored_peer": 7}
    return Summary("s", "thin", rtt, counters, {"bytes_backed_up": 3}, violations)


def outcome(*requests: Finished, violations: tuple[str, ...] = ()) -> Outcome:
    tally = Tally(4)
    for request in requests:
        tally.add(request)
    return Outcome([tally], [summary(*violations)], 1.0)


def test_ratios_of_a_hand_computed_run_are_exact() -> None:
    # Blocks of 8 tokens, pages of 4. Prompts of 20, 24 and 17 tokens list 3 + 3 + 3 blocks.
    tally = Tally(4, 8)
    tally.add(finished(0, 20, 0, 0, 0))
    tally.add(finished(1, 24, 2, 1, 0))  # 12 tokens hit: one whole block of 8
    tally.add(finished(2, 17, 1, 1, 2))  # 16 tokens hit: two whole blocks
    assert tally.blocks == 9
    assert tally.hit_blocks == 3
    assert tally.block_hit_ratio == pytest.approx(1 / 3)
    assert tally.token_hit_ratio == pytest.approx(28 / 61)
    assert tally.hit_tokens == HitTokens(own=12, host=8, peer=8)
    assert tally.missed_tokens == 61 - 28
    assert tally.verified == tally.hit_pages == 7


def test_a_page_as_large_as_a_block_makes_hit_pages_hit_blocks() -> None:
    tally = Tally(8, 8)
    tally.add(finished(0, 20, 1, 0, 1))
    assert (tally.blocks, tally.hit_blocks) == (3, 2)


def test_pages_of_several_blocks_count_all_of_them() -> None:
    tally = Tally(16, 8)
    tally.add(finished(0, 33, 1, 1, 0))
    assert (tally.blocks, tally.hit_blocks) == (5, 4)


def test_an_empty_tally_has_ratios_of_zero() -> None:
    assert Tally(4).block_hit_ratio == Tally(4).token_hit_ratio == 0.0


def test_an_outcome_sums_its_schedulers() -> None:
    one, two = Tally(4), Tally(4)
    one.add(finished(0, 20, 1, 0, 0))
    two.add(finished(1, 10, 0, 1, 1, error="too long"))
    whole = Outcome([one, two], [summary(rtt=(3.0, 1.0)), summary(rtt=(2.0,))], 1.0)
    assert whole.total.requests == 2
    assert whole.total.prompt_tokens == 30
    assert whole.total.hit_tokens == HitTokens(4, 4, 4)
    assert whole.total.errors == ["request 1: too long"]
    assert whole.rtt_us == Percentiles(2.0, 3.0)
    assert whole.bytes_moved_by(1) == BytesMoved(5, 7)
    assert whole.bytes_moved == BytesMoved(10, 14, 3)
    assert whole.daemon == {"bytes_backed_up": 3}


def test_a_sound_run_has_no_problems() -> None:
    assert outcome(finished(0, 20, 1, 1, 1)).problems(1) == []


@pytest.mark.parametrize(
    ("run", "problem"),
    [
        (
            outcome(finished(0, 20, 1, 0, 1, wrong=1), finished(1, 5, 0, 0, 0)),
            "1 of 2 pages held wrong bytes",
        ),
        (outcome(finished(0, 20, 0, 0, 0)), "1 of 2 requests finished"),
        (
            outcome(finished(0, 20, 0, 0, 0), finished(1, 9, 0, 0, 0, error="too long")),
            "1 requests failed (request 1: too long)",
        ),
        (
            outcome(Finished(0, 20, 1, 1, 1, 2, 0, 0.1), finished(1, 5, 0, 0, 0)),
            "1 of 3 pages hit were not read back and compared",
        ),
        (
            outcome(*(finished(n, 5, 0, 0, 0) for n in range(2)), violations=("pages lost",)),
            "1 invariants do not hold: pages lost",
        ),
    ],
)
def test_whatever_is_wrong_is_said(run: Outcome, problem: str) -> None:
    assert run.problems(2) == [problem]


def test_a_violation_that_every_scheduler_saw_is_told_once() -> None:
    tallies = [Tally(4), Tally(4)]
    run = Outcome(tallies, [summary("a", "b"), summary("a")], 1.0)
    assert run.violations == ["a", "b"]


def test_percentiles_are_samples_of_nearest_rank() -> None:
    assert percentiles(float(n) for n in range(1, 101)) == Percentiles(50.0, 99.0)
    assert percentiles([7.0]) == Percentiles(7.0, 7.0)
    assert percentiles([]) == Percentiles(None, None)
