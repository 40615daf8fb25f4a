"""A replay is sized, routed and refused before anything starts."""

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from directory.cli import runs
from directory.cli.replay import Options, Sizes, replay, route, size_up
from directory.cli.runs import segment_bytes
from directory.cli.trace import TraceRequest
from directory.core.limits import SLOTS_PER_SEGMENT_MAX

HERE = Path("trace.jsonl")


def request(*blocks: int) -> TraceRequest:
    return TraceRequest(b"".join(b.to_bytes(4, "little") for b in blocks), 10 * len(blocks))


CHATS = [request(0, n, m) for n in range(1, 9) for m in (20, 21)]


def options(**chosen: Any) -> Options:
    return Options(HERE, page_size=10, block_tokens=10)._replace(**chosen)


def test_round_robin_serves_in_turn() -> None:
    assert route(options(schedulers=3), CHATS)[:5] == [0, 1, 2, 0, 1]


def test_hash_sends_equal_beginnings_to_one_scheduler_and_uses_all() -> None:
    found = route(options(schedulers=3, route="hash"), CHATS)
    assert found[0::2] == found[1::2]
    assert set(found) == {0, 1, 2}


def test_random_depends_on_the_seed_alone() -> None:
    chosen = options(schedulers=3, route="random", seed=4)
    assert route(chosen, CHATS) == route(chosen, CHATS)
    assert route(chosen, CHATS) != route(chosen._replace(seed=5), CHATS)
    assert set(route(chosen, CHATS)) == {0, 1, 2}


@pytest.mark.parametrize(
    ("chosen", "sizes"),
    [
        # Scheduler 0 sees the paths 0 1 2 and 0 1 3 (4 pages), scheduler 1 sees 0 1 2 and 4 (4);
        # 5 pages differ in all, and each pool has room for one request and a page besides.
        ({}, Sizes((8, 8), 5)),
        ({"private": True}, Sizes((8, 8), 8)),
        ({"concurrency": 2}, Sizes((12, 12), 5)),
        ({"pool_pages": 3, "host_pages": 2}, Sizes((3, 3), 2)),
        # What could never be touched is not made.
        ({"pool_pages": 1000, "host_pages": 1000}, Sizes((8, 8), 5)),
    ],
)
def test_there_is_room_for_everything_unless_told_otherwise(
    chosen: dict[str, Any], sizes: Sizes
) -> None:
    requests = [request(0, 1, 2), request(0, 1, 2), request(0, 1, 3), request(4)]
    assert size_up(options(**chosen), requests, [0, 1, 0, 1]) == sizes


def write_trace(path: Path, tokens: int = 1000) -> Path:
    blocks = list(range(-(-tokens // 512)))
    line = {"timestamp": 0, "input_length": tokens, "output_length": 1, "hash_ids": blocks}
    path.write_text(json.dumps(line) + "\n")
    return path


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["nowhere"], "nowhere does not exist"),
        (["."], "is a directory"),
        (["trace", "--pool-pages", "1"], "raise --pool-pages to 2"),
        (["trace", "--page-size", "0"], "--page-size"),
        (["trace", "--schedulers", "0"], "--schedulers"),
        (["trace", "--route", "best"], "--route"),
        (["trace", "--bytes-per-token", str(1 << 40)], "lower --bytes-per-token"),
    ],
)
def test_what_cannot_be_replayed_is_refused_with_status_2(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: list[str], sentence: str
) -> None:
    write_trace(tmp_path / "trace")
    monkeypatch.chdir(tmp_path)
    result = CliRunner().invoke(replay, [*arguments, "--json"])
    assert (result.exit_code, result.stdout) == (2, "")
    assert sentence in result.stderr
    assert "Traceback" not in result.stderr


def test_a_machine_without_the_memory_is_told_what_would_be_touched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trace = write_trace(tmp_path / "trace", 512 * 1000)
    monkeypatch.setattr(runs, "available_bytes", lambda: 100 << 20)
    result = CliRunner().invoke(replay, [str(trace)])
    assert result.exit_code == 2
    assert "of pools" in result.stderr
    assert "of host tier), and 100.0 MiB are available: lower --bytes-per-token" in result.stderr


def test_the_records_of_small_pages_count_as_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trace = write_trace(tmp_path / "trace", 512 * 1000)
    monkeypatch.setattr(runs, "available_bytes", lambda: 300 << 20)
    result = CliRunner().invoke(replay, [str(trace), "--page-size", "1", "--bytes-per-token", "1"])
    assert result.exit_code == 2  # pages and tokens alone are 8 MiB


def test_help_defines_the_ratios() -> None:
    result = CliRunner().invoke(replay, ["--help"])
    assert "block_hit_ratio  whole trace blocks in reused prefixes / blocks listed" in result.output
    assert "token_hit_ratio  reused prompt tokens / prompt tokens" in result.output


@pytest.mark.parametrize("host_pages", [1, 5, 70_000, 50_000_000])
@pytest.mark.parametrize("page_bytes", [1, 64, 1000, 32 << 10, 200 << 20])
def test_segments_are_whole_pages_and_within_the_limits(host_pages: int, page_bytes: int) -> None:
    found = segment_bytes(host_pages, page_bytes)
    assert found % page_bytes == 0
    assert 1 <= found // page_bytes <= SLOTS_PER_SEGMENT_MAX
    assert -(-host_pages * page_bytes // found) <= max(256, host_pages >> 15)
