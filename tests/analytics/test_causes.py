"""Causes as they are counted live: the sums of a report of the same records, in bounded memory."""

from hypothesis import given, settings
from hypothesis import strategies as st

from directory.analytics import causes
from directory.analytics.attribution import Cause
from directory.analytics.causes import Causes
from directory.analytics.record import Access, pack
from directory.analytics.study import Study
from tests.analytics.forty import CAUSE_PAGES, LETTERS, TAIL_TOKENS, frames
from tests.analytics.support import PAGE, access

N1, N2 = b"1" * 8, b"2" * 8


def by_cause(found: Causes) -> dict[Cause, tuple[int, int]]:
    """Requests and tokens of each cause, over all instances."""
    sums: dict[Cause, tuple[int, int]] = {}
    for (_, cause), each in found.sums.items():
        requests, tokens = sums.get(cause, (0, 0))
        sums[cause] = requests + each.requests, tokens + each.tokens
    return sums


def reported(records: list[Access]) -> dict[Cause, tuple[int, int]]:
    """The same as a report has it."""
    study = Study(observed=True)
    for record in records:
        study.add(record)
    return {
        cause: (sums.requests, sums.tokens)
        for cause, sums in study.causes.items()
        if sums.requests or sums.tokens
    }


def test_the_forty_requests_have_the_causes_worked_out_by_hand() -> None:
    found = Causes()
    for frame in frames():
        if isinstance(frame, Access):
            found.add(frame)
    wanted = {LETTERS[letter]: PAGE * pages for letter, pages in CAUSE_PAGES.items()}
    wanted[Cause.PARTIAL_TAIL] = TAIL_TOKENS
    assert {cause: tokens for cause, (_, tokens) in by_cause(found).items()} == wanted


@st.composite
def records(draw: st.DrawFn) -> Access:
    letters = draw(st.text("AB", max_size=7))
    pages = len(letters)
    tail = draw(st.integers(0, PAGE - 1))
    hittable = max(0, PAGE * pages + tail - 1) // PAGE
    hit = draw(st.integers(0, hittable))
    return access(
        letters,
        tail,
        hit="o" * hit,
        found=draw(st.integers(hit, pages)),
        inserted=draw(st.integers(0, pages - hit)),
        kind=draw(st.sampled_from(["request", "request", "request", "retry", "recompute"])),
        namespace=draw(st.sampled_from([N1, N1, N2])),
        instance=draw(st.sampled_from(["s0", "s1"])),
    )


@given(st.lists(records(), max_size=30))
@settings(max_examples=300, deadline=None)
def test_the_sums_are_those_of_a_report_of_the_same_records(given_records: list[Access]) -> None:
    found = Causes()
    for record in given_records:
        found.add(record)
    assert by_cause(found) == reported(given_records)


@given(st.lists(records(), max_size=60))
@settings(max_examples=200, deadline=None)
def test_what_is_forgotten_is_new_and_every_computed_token_still_has_a_cause(
    given_records: list[Access],
) -> None:
    found = Causes(pages_max=5, nodes_max=1_000)
    for record in given_records:
        found.add(record)
        assert found.pages <= 2 * (5 + 2 * 7)
    missed = sum(
        record.tokens - record.hit.total for record in given_records if record.kind == "request"
    )
    assert sum(tokens for _, tokens in by_cause(found).values()) == missed


def test_a_path_is_known_as_long_as_it_is_used_and_new_when_it_is_not() -> None:
    found = Causes(pages_max=10)

    def cause_of(letters: str) -> Cause:
        before = by_cause(found)
        found.add(access(letters, hit="", inserted=len(letters)))
        after = by_cause(found)
        (changed,) = (cause for cause in after if after[cause][0] > before.get(cause, (0, 0))[0])
        return changed

    assert cause_of("ABC") is Cause.NEVER_SEEN
    for letter in "DEFGHIJKLMNOP":
        cause_of(3 * letter)
        assert cause_of("ABC") is Cause.EVICTED
    for letter in "QRSTUVWXYZ":
        cause_of(3 * letter)
    assert cause_of("ABC") is Cause.NEVER_SEEN


def test_what_the_generation_before_knows_counts_as_what_this_one_knows() -> None:
    found = Causes(pages_max=10)

    def publish(letters: str, namespace: bytes = N1) -> None:
        found.add(access(letters, 1, inserted=len(letters), namespace=namespace))

    def computed(letters: str, namespace: bytes = N1) -> dict[Cause, int]:
        before = by_cause(found)
        publish(letters, namespace)
        tokens = {
            cause: after - before.get(cause, (0, 0))[1]
            for cause, (_, after) in by_cause(found).items()
        }
        return {cause: each // PAGE for cause, each in tokens.items() if each >= PAGE}

    for letters in ("ABC", "ABD", "EFGHIJKLM"):
        publish(letters)
    assert found._young.pages == 0
    assert computed("AB") == {Cause.EVICTED: 2}
    assert computed("ABX") == {Cause.EVICTED: 2, Cause.DIVERGED: 1}
    assert computed("ABC", N2) == {Cause.OTHER_NAMESPACE: 3}


def one_node(number: int) -> Access:
    """A request of two pages that nobody had before."""
    digests = pack([2 * number + 1, 2 * number + 2])
    return Access(
        at_us=number, tokens=2 * PAGE, page_tokens=PAGE, inserted=2 * PAGE, digests=digests
    )


def test_nodes_are_bounded_and_a_generation_goes_a_few_nodes_at_a_time() -> None:
    found, before = Causes(nodes_max=600), 0
    whole = 601
    gone: list[int] = []
    for number in range(3_000):
        found.add(one_node(number))
        assert found._young.nodes + found._old.nodes <= 2 * whole
        dropped = found._dropped
        left = len(dropped.first) + len(dropped.others)
        if left > before:
            assert left == whole
        else:
            gone.append(before - left)
        before = left
    assert sum(gone) >= 2 * whole
    assert max(gone) == causes.DROPPED_A_TIME


def test_instances_are_bounded() -> None:
    found = Causes()
    for number in range(causes.INSTANCES_MAX + 5):
        found.add(access("A", instance=f"i{number}"))
    assert len({instance for instance, _ in found.sums}) == causes.INSTANCES_MAX + 1
    others = [sums for (name, _), sums in found.sums.items() if name == causes.OTHERS]
    assert sum(sums.tokens for sums in others) == 5 * (PAGE + 1)
