"""Rates over time come from counters and stay between 0 and 1, whatever happens in between."""

from hypothesis import given
from hypothesis import strategies as st

from directory.analytics.record import Kind
from directory.analytics.reuse import ReuseDistances
from directory.analytics.study import EVERYONE, Study
from directory.analytics.totals import Timeline, Totals
from directory.analytics.workingset import WINDOWS_S, WorkingSets
from tests.analytics.support import PAGE, access, path_of


def test_probes_and_a_restart_give_no_rate_below_0_or_above_1_f117() -> None:
    study = Study(observed=True)
    for number in range(200):
        # Every tenth second nothing but probes; time jumps back once, as after a restart.
        at_us = 1_000_000 * (number if number < 100 else number - 50)
        kind: Kind = "probe" if number % 10 == 0 else "request"
        study.add(access("ABC", at_us=at_us, hit="ooo", inserted=0, kind=kind))
    study.end()
    shown = [totals for _, totals in study.timeline]
    assert all(0 <= totals.block_hit_ratio <= 1 for totals in shown)
    assert all(0 <= totals.token_hit_ratio <= 1 for totals in shown)
    assert all(totals.token_hit_ratio == 12 / 13 for totals in shown if totals.requests)
    assert study.totals.requests == sum(totals.requests for totals in shown) == 180
    assert study.beside.probes == 20


@given(
    st.lists(st.tuples(st.integers(0, 10**9), st.integers(0, 3)), min_size=1, max_size=60),
    st.integers(2, 10),
)
def test_stretches_of_any_width_hold_every_request_once(
    requests: list[tuple[int, int]], buckets_max: int
) -> None:
    timeline = Timeline(buckets_max, width_us=1000)
    whole = Totals()
    for at_us, hits in requests:
        record = access("ABC", at_us=at_us, hit="o" * hits)
        timeline.add(record, hits)
        whole.add(record, hits)
    stretches = list(timeline)
    assert len(stretches) <= buckets_max
    merged = Totals()
    for _, totals in stretches:
        merged.merge(totals)
    assert merged == whole
    starts = [start for start, _ in stretches]
    assert starts == list(range(starts[0], starts[-1] + 1, timeline.width_us))


def test_nothing_at_all_is_a_ratio_of_0() -> None:
    totals = Totals()
    assert (totals.block_hit_ratio, totals.token_hit_ratio, totals.missed_tokens) == (0, 0, 0)
    assert list(Timeline()) == []


def test_working_sets_are_sampled_within_their_limit_and_count_windows() -> None:
    reuse, working = ReuseDistances(), WorkingSets(samples_max=8)
    for second in range(0, 4000, 10):
        working.before(second * 1_000_000, reuse)
        reuse.add(path_of(f"{'AB'[second % 20 // 10]}{'CDEF'[second // 1000]}"))
    working.end(reuse)
    assert 4 <= len(working.samples) <= 8
    last = working.samples[-1]
    assert last.ever == 2 + 8
    # A, B and two leaves within a minute; after an hour the first second's are gone.
    assert dict(zip(WINDOWS_S, last.pages, strict=True)) == {60: 4, 600: 4, 3600: 10}


def test_requests_with_another_page_size_are_summed_and_said_to_be_left_out() -> None:
    study = Study(observed=True)
    study.add(access("ABC"))
    other = access("ABC", hit="o")
    study.add(type(other)(**{f: getattr(other, f) for f in other.__struct_fields__} | {
        "page_tokens": 2 * PAGE
    }))  # fmt: skip
    assert study.totals.requests == 2
    assert study.other_page_sizes == 1
    assert study.reuse.ticks == 1
    assert study.tenants[EVERYONE].totals.requests == 2
