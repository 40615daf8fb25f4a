"""The commands report, simulate and explain: what they print, write and refuse."""

import json
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from directory.cli.main import app
from tests.analytics.forty import frames
from tests.analytics.support import write_log

REQUESTS = [[0, 1, 2], [0, 1, 3], [0, 1, 2], [7], [0, 1, 2]]


@pytest.fixture(name="trace")
def written_trace(tmp_path: Path) -> Path:
    path = tmp_path / "trace.jsonl"
    lines = (
        {
            "timestamp": 1000 * number,
            "input_length": 512 * len(ids) + 1,
            "output_length": 1,
            "hash_ids": [*ids, 1000 + number],
        }
        for number, ids in enumerate(REQUESTS)
    )
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def run(*words: object) -> Result:
    return CliRunner().invoke(app, [str(word) for word in words])


def test_report_of_a_trace_assumes_a_cache_that_never_evicts(trace: Path) -> None:
    report = json.loads(run("report", trace, "--json").stdout)
    # Hits of 0, 2, 3, 0 and 3 blocks; each request lists one more, partial block.
    assert report["block_hit_ratio"] == round(8 / 18, 6)
    assert report["hit_tokens"]["simulated"] == 8 * 512
    assert (report["basis"], report["simulated_pages"]) == ("simulated", None)


def test_report_of_a_trace_with_a_capacity_says_what_was_evicted(trace: Path) -> None:
    report = json.loads(run("report", trace, "--json", "--capacity", 3).stdout)
    # Before request 3 the cache holds 0, 1, 3; before request 5 it holds 7, 0, 1.
    assert report["block_hit_ratio"] == round(6 / 18, 6)
    by_cause = {line["cause"]: line["tokens"] for line in report["causes"]}
    assert by_cause["evicted"] == 2 * 512
    assert report["present"][0]["pages"] == 3
    assert report["more"][-1]["block_hit_ratio"] == round(8 / 18, 6)


def test_a_capacity_may_be_a_size(trace: Path) -> None:
    words = ("report", trace, "--json", "--capacity", "3MiB", "--bytes-per-token", 2048)
    report = json.loads(run(*words).stdout)
    assert report["simulated_pages"] == 3
    assert report["present"][0]["bytes"] == 3 << 20


def test_report_writes_the_page_and_exports(trace: Path, tmp_path: Path) -> None:
    page, table = tmp_path / "r.html", tmp_path / "r.csv"
    found = run("report", trace, "--html", page, "--export", table)
    assert found.exit_code == 0
    assert page.read_text().startswith("<!doctype html>")
    assert len(table.read_text().splitlines()) == 1 + len(REQUESTS)
    assert "Block hit ratio 44.4" in found.stdout
    assert f"wrote {page}" in found.stderr


def test_simulate_compares_shared_with_private_caches(trace: Path) -> None:
    words = ("simulate", trace, "--json", "--schedulers", 2, "--capacity", 3, "--capacity", 100)
    found = json.loads(run(*words).stdout)
    assert found["unlimited_shared"] == round(8 / 18, 6)
    # Round-robin: scheduler 0 sees requests 1, 3, 5 (0 + 3 + 3 hits), scheduler 1 the others.
    assert found["unlimited_private"] == round(6 / 18, 6)
    assert [line["shared"] for line in found["capacities"]] == [
        round(6 / 18, 6),
        round(8 / 18, 6),
    ]


def test_simulate_takes_the_schedulers_of_a_log_as_recorded(tmp_path: Path) -> None:
    log = write_log(tmp_path / "log", frames())
    found = json.loads(run("simulate", log, "--json", "--route", "recorded").stdout)
    assert found["schedulers"] == 2
    assert found["unlimited_private"] < found["unlimited_shared"]


@pytest.mark.parametrize("route", ["round-robin", "hash", "random"])
def test_one_scheduler_is_the_shared_cache_on_every_route(trace: Path, route: str) -> None:
    words = ("simulate", trace, "--json", "--schedulers", 1, "--route", route)
    for line in json.loads(run(*words).stdout)["capacities"]:
        assert line["shared"] == line["private"]


def test_explain_names_a_request_of_a_trace_by_its_number(trace: Path) -> None:
    found = run("explain", trace, "#2")
    assert found.exit_code == 0
    assert "hit 1,024 of 1,537 tokens" in found.stdout
    assert "diverging page" in found.stdout


@pytest.mark.parametrize("command", ["report", "simulate", "explain"])
@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("missing",), "does not exist"),
        (("trace.jsonl", "--capacity", "5GiB"), "needs --bytes-per-token"),
        (("trace.jsonl", "--capacity", "much"), "neither a number of pages nor a size"),
        (("trace.jsonl", "--capacity", "0"), "neither a number of pages nor a size"),
        (("trace.jsonl", "--format", "access log"), "is not an access log"),
    ],
)
def test_what_is_no_good_ends_with_2_and_one_sentence(
    trace: Path, command: str, words: tuple[str, ...], said: str
) -> None:
    found = run(command, trace.parent / words[0], *words[1:])
    assert found.exit_code == 2
    assert said in found.stderr
    assert "Traceback" not in found.output


def test_a_page_that_cannot_be_written_is_one_sentence(trace: Path, tmp_path: Path) -> None:
    found = run("report", trace, "--html", tmp_path / "no" / "r.html")
    assert found.exit_code == 2
    assert "No such file" in found.stderr


@pytest.mark.parametrize("command", ["report", "simulate", "explain"])
def test_each_command_explains_itself(command: str) -> None:
    found = run(command, "--help")
    assert found.exit_code == 0
    assert "Exits with 0" in found.stdout
