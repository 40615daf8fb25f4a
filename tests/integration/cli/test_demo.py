"""The demo shows reuse from all three places, in figures for people and for programs."""

from pathlib import Path

import pytest

from tests.integration.cli.support import treecored

SMALL = ("--requests", 120)


@pytest.mark.parametrize("schedulers", [2, 3])
@pytest.mark.parametrize("page_size", [16, 1])
def test_pages_come_from_all_three_places_and_all_are_verified(
    tmp_path: Path, schedulers: int, page_size: int
) -> None:
    chosen = ("--schedulers", schedulers, "--page-size", page_size, "--json", *SMALL)
    result = treecored(tmp_path / "tmp", "demo", *chosen)
    assert result.status == 0, result.stderr
    report = result.report
    hits = report["hit_tokens"]
    assert min(hits["own"], hits["host"], hits["peer"]) > 0
    assert report["requests"] == 120
    assert report["pages_wrong"] == 0
    assert report["pages_verified"] * page_size == sum(hits.values())
    assert report["missed_tokens"] == report["prompt_tokens"] - sum(hits.values())
    assert report["violations"] == report["problems"] == []
    assert 0 < report["rtt_us"]["p50"] <= report["rtt_us"]["p99"]
    private = report["private"]
    assert private["hit_tokens"]["peer"] == 0
    assert report["missed_tokens"] < private["missed_tokens"]
    modes = [scheduler["mode"] for scheduler in report["schedulers"]]
    assert modes == ["mirrored"] * (schedulers - 1) + ["thin"]
    assert sum(scheduler["requests"] for scheduler in report["schedulers"]) == 120
    page_bytes = page_size * report["bytes_per_token"]
    assert report["bytes_moved"]["host_to_pool"] == hits["host"] // page_size * page_bytes
    assert report["bytes_moved"]["pool_to_pool"] == hits["peer"] // page_size * page_bytes
    assert report["bytes_moved"]["pool_to_host"] == report["daemon"]["pages_backed_up"] * page_bytes


def test_the_table_and_the_sentence_are_for_people(tmp_path: Path) -> None:
    result = treecored(tmp_path / "tmp", "demo", *SMALL)
    assert (result.status, result.stderr) == (0, "")
    lines = result.stdout.splitlines()
    assert all(len(line) <= 80 for line in lines)
    for word in (
        "requests",
        "hit, own pool",
        "hit, host tier",
        "hit, other pool",
        "missed",
        "host tier to pool",
        "pool to pool",
        "pages verified",
        "round trip p99",
    ):
        assert any(word in line for line in lines), word
    assert "Sharing saved computing" in result.stdout


def test_a_workload_that_shows_too_little_fails_with_the_reason(tmp_path: Path) -> None:
    result = treecored(tmp_path / "tmp", "demo", "--requests", 2, "--json")
    assert result.status == 1
    assert "no page was reused from the host tier" in result.stderr
    assert result.report["problems"]


def test_a_pool_that_is_too_small_is_refused(tmp_path: Path) -> None:
    result = treecored(tmp_path / "tmp", "demo", "--pool-pages", 3)
    assert result.status == 2
    assert "raise --pool-pages to" in result.stderr
