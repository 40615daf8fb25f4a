"""Forty requests worked out by hand: the log, the report and explain agree with them and each
other, to the token."""

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from directory.analytics.attribution import Cause, Verdict
from directory.analytics.explanation import explain_request, explain_worst, sentences
from directory.analytics.figures import Figures, figures
from directory.analytics.reader import LogReader
from directory.analytics.record import Access
from directory.analytics.source import Source
from directory.analytics.study import Study
from directory.cli.main import app
from tests.analytics.forty import (
    BLOCKS,
    CAUSE_PAGES,
    HIT_PAGES,
    LETTERS,
    LINES,
    LOOKUPS,
    N1,
    N2,
    PROMPT_TOKENS,
    REQUESTS,
    TAIL_TOKENS,
    frames,
)
from tests.analytics.support import PAGE, write_log


@pytest.fixture(name="log")
def written_log(tmp_path: Path) -> Path:
    return write_log(tmp_path / "log", frames())


def spelled(verdict: Verdict) -> str:
    """A verdict as forty.py writes it."""
    letters = {cause: letter for letter, cause in LETTERS.items()}
    return " ".join(
        f"{letters[part.cause]}"
        f"{part.tokens if part.cause is Cause.PARTIAL_TAIL else part.tokens // PAGE}"
        for part in verdict.parts
    )


def studied() -> tuple[Study, dict[str, Verdict]]:
    verdicts: dict[str, Verdict] = {}

    def keep(access: Access, verdict: Verdict) -> None:
        verdicts[access.request] = verdict

    study = Study(observed=True, on_request=keep)
    for frame in frames():
        study.add(frame)
    study.end()
    return study, verdicts


def reported(log: Path) -> Figures:
    source = Source(log)
    study = Study.of(source)
    return figures(study, file="log", format=source.kind, health=source.health)


def test_there_are_forty_and_each_cause_and_source_occurs() -> None:
    assert len(LINES) == 40
    said = " ".join(line.verdict or "" for line in LINES)
    assert all(letter in said for letter in LETTERS)
    hits = [line.access.hit for line in LINES]
    assert all(any(getattr(hit, source) for hit in hits) for source in HIT_PAGES)


def test_every_verdict_is_the_one_worked_out_by_hand() -> None:
    _, verdicts = studied()
    found = {
        f"r{number}": spelled(verdicts[f"r{number}"]) if f"r{number}" in verdicts else None
        for number in range(1, 41)
    }
    assert found == {f"r{number}": line.verdict for number, line in enumerate(LINES, start=1)}


def test_a_prompt_is_its_hits_and_its_parts_and_nothing_else() -> None:
    _, verdicts = studied()
    for line in LINES:
        if line.verdict is not None:
            verdict = verdicts[line.access.request]
            assert verdict.hit_tokens == line.access.hit.total
            at = verdict.hit_tokens
            for part in verdict.parts:
                assert part.first_token == at
                at += part.tokens
            assert at == line.access.tokens


def test_the_report_has_the_sums_worked_out_by_hand(log: Path) -> None:
    report = reported(log)
    assert report.requests == REQUESTS
    assert report.beside.lookups == LOOKUPS
    assert (report.beside.retries, report.beside.recomputations, report.beside.probes) == (1, 2, 1)
    assert report.prompt_tokens == PROMPT_TOKENS
    assert report.blocks == BLOCKS
    tokens = report.hit_tokens
    assert {source: getattr(tokens, source) // PAGE for source in HIT_PAGES} == HIT_PAGES
    assert tokens.simulated == 0
    assert report.hit_blocks == sum(HIT_PAGES.values())
    assert report.block_hit_ratio == round(sum(HIT_PAGES.values()) / BLOCKS, 6)
    assert report.token_hit_ratio == round(PAGE * sum(HIT_PAGES.values()) / PROMPT_TOKENS, 6)
    by_cause = {line.cause: line.tokens for line in report.causes}
    assert by_cause.pop(Cause.PARTIAL_TAIL) == TAIL_TOKENS
    assert by_cause == {LETTERS[letter]: PAGE * pages for letter, pages in CAUSE_PAGES.items()}
    assert sum(line.tokens for line in report.causes) == report.missed_tokens
    assert sum(line.requests for line in report.causes) == REQUESTS


def test_the_report_splits_evicted_tokens_by_the_tier_that_lost_them_last(log: Path) -> None:
    # 11 and 32 say "host", 25's pool ended, 28 and 37 have no record of an eviction.
    assert reported(log).evicted_from == {"device": 12, "host": 12, "unknown": 20}


def test_windows_tenants_and_schedulers_add_up_to_the_whole(log: Path) -> None:
    report = reported(log)
    for parts in (report.over_time, report.tenants, report.instances):
        assert sum(part.requests for part in parts) == REQUESTS
        assert sum(part.prompt_tokens for part in parts) == PROMPT_TOKENS
        assert sum(part.hit_tokens.total for part in parts) == report.hit_tokens.total
    assert {line.tenant for line in report.tenants} == {N1.hex(), N2.hex(), "third"}
    assert sum(line.evicted_tokens for line in report.tenants) == 44


def test_the_log_gives_back_exactly_what_was_written(log: Path) -> None:
    assert list(LogReader(log))[1:] == frames()


def test_the_present_capacity_is_what_the_log_says(log: Path) -> None:
    marks = {mark.label: (mark.pages, mark.bytes) for mark in reported(log).present}
    assert marks == {"host tier": (12, 12 * 1024), "pools and host tier": (20, 20 * 1024)}


def test_explain_says_for_each_request_what_the_report_added_up(log: Path) -> None:
    source, tokens, hits = Source(log), 0, 0
    causes = dict.fromkeys(LETTERS.values(), 0)
    for number, line in enumerate(LINES, start=1):
        found = explain_request(source, f"r{number}").found
        assert len(found) == (line.verdict is not None)
        for each in found:
            tokens += each.tokens
            hits += each.hit_tokens
            for part in each.parts:
                causes[part.cause] += part.tokens
    report = reported(log)
    assert (tokens, hits) == (report.prompt_tokens, report.hit_tokens.total)
    assert causes == {Cause(line.cause): line.tokens for line in report.causes}


@pytest.mark.parametrize(
    ("request_id", "words"),
    [
        ("r10", "tokens 12 to 15: promised by the match, not restored"),
        (
            "r11",
            (
                "tokens 4 to 11: evicted from the host tier at 9.700 s (capacity, lru); last used "
                "at 8.000 s by s1"
            ),
        ),
        (
            "r13",
            (
                f"tokens 0 to 11: known in another namespace only ({N1.hex()}); adapter: 'x@1' "
                "here, absent there"
            ),
        ),
        (
            "r25",
            (
                "tokens 0 to 11: evicted from the device tier of s1 at 23.500 s (pool gone); last "
                "used at 23.000 s by s1"
            ),
        ),
        (
            "r28",
            "tokens 8 to 15: evicted; last used at 26.000 s by s0, when it went is not recorded",
        ),
        ("r31", "tokens 16 to 19: diverging page: an earlier prompt goes on differently here"),
        ("r33", "hit 24 of 25 tokens (own pool 8, host tier 8, other pool 4, store 4)"),
    ],
)
def test_explain_names_place_time_and_reason(log: Path, request_id: str, words: str) -> None:
    explained = explain_request(Source(log), request_id)
    lines = sentences(explained.found[0], explained.first_us)
    assert any(line.startswith(words) for line in lines), lines


def test_the_worst_requests_are_those_that_computed_most_again(log: Path) -> None:
    worst = explain_worst(Source(log), 3).found
    assert [(each.request, each.avoidable_tokens) for each in worst] == [
        ("r37", 16),
        ("r13", 12),
        ("r25", 12),
    ]


def test_a_request_matched_ten_times_is_one_query_f114(log: Path) -> None:
    study, _ = studied()
    again = reported(log)
    assert study.totals.requests == again.requests == REQUESTS
    # 9 of the look-ups are of the request that waited, 4 of what is no request.
    assert again.beside.lookups - again.requests == 9 + 4


def test_the_commands_say_the_same_as_the_library(log: Path) -> None:
    run = CliRunner().invoke
    report = json.loads(run(app, ["report", str(log), "--json"]).stdout)
    assert report["prompt_tokens"] == PROMPT_TOKENS
    assert report["hit_tokens"]["host"] == PAGE * HIT_PAGES["host"]
    explained = json.loads(run(app, ["explain", str(log), "r11", "--json"]).stdout)
    assert explained["found"][0]["gone"]["tier"] == "host"
    text = run(app, ["explain", str(log), "r18"]).stdout
    assert "looked up 10 times before it was admitted: one request" in text
    assert run(app, ["explain", str(log), "r16"]).exit_code == 1
    assert "r37" in run(app, ["explain", str(log)]).stdout
