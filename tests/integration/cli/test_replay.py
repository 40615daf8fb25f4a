"""A replay through real processes hits exactly what a dictionary of paths would hit."""

import json
from pathlib import Path

import pytest

from tests.integration.cli.support import ROOT, Line, chats, simulate, treecored, write_trace

BLOCK = 32
REAL_TRACE = ROOT.parent / "shared" / "traces" / "mooncake_conversation_trace.jsonl"


def replay(tmp_path: Path, trace: Path, *arguments: object) -> dict[str, object]:
    result = treecored(tmp_path / "tmp", "replay", trace, "--json", *arguments)
    assert result.status == 0, result.stderr
    return result.report


def assert_hits(
    report: dict[str, object],
    lines: list[Line],
    *,
    caches: int,
    page_size: int = BLOCK,
    block_tokens: int = BLOCK,
) -> None:
    """Compare with the dictionary, to the token."""
    expected = simulate(lines, caches=caches, page_size=page_size, block_tokens=block_tokens)
    assert report["requests"] == len(lines)
    assert report["blocks"] == expected.blocks
    assert report["prompt_tokens"] == expected.tokens
    hits = report["hit_tokens"]
    assert isinstance(hits, dict)
    hit_tokens = sum(hits.values())
    assert hit_tokens == expected.hit_tokens
    ratio, token_ratio = report["block_hit_ratio"], report["token_hit_ratio"]
    assert isinstance(ratio, float)
    block_ratio = expected.hit_blocks / expected.blocks
    assert ratio == pytest.approx(block_ratio, abs=1e-6)
    assert token_ratio == pytest.approx(hit_tokens / expected.tokens, abs=1e-6)
    assert report["pages_verified"] == hit_tokens // page_size
    assert report["pages_wrong"] == 0
    assert report["violations"] == report["problems"] == []


@pytest.mark.parametrize(
    ("flags", "caches", "page_size"),
    [
        ((), 1, BLOCK),
        (("--thin",), 1, BLOCK),
        (("--private",), 3, BLOCK),
        (("--private", "--thin"), 3, BLOCK),
        (("--page-size", 8), 1, 8),
        (("--page-size", 48, "--private"), 3, 48),
    ],
    ids=lambda value: " ".join(map(str, value)) if isinstance(value, tuple) else None,
)
def test_a_strict_replay_hits_what_a_dictionary_hits(
    tmp_path: Path, flags: tuple[object, ...], caches: int, page_size: int
) -> None:
    lines = chats(200, seed=1, block_tokens=BLOCK)
    trace = write_trace(tmp_path / "trace.jsonl", lines)
    chosen = ("--schedulers", 3, "--block-tokens", BLOCK, "--page-size", BLOCK, *flags)
    report = replay(tmp_path, trace, *chosen)
    assert_hits(report, lines, caches=caches, page_size=page_size)


def test_concurrent_requests_verify_and_hit_no_more_than_everything(tmp_path: Path) -> None:
    lines = chats(200, seed=2, block_tokens=BLOCK)
    trace = write_trace(tmp_path / "trace.jsonl", lines)
    report = replay(
        tmp_path, trace, "--schedulers", 2, "--block-tokens", BLOCK, "--page-size", BLOCK,
        "--concurrency", 6, "--route", "random",
    )  # fmt: skip
    assert report["requests"] == 200
    assert report["pages_wrong"] == 0
    strict = simulate(lines, caches=1, page_size=BLOCK, block_tokens=BLOCK)
    ratio = report["block_hit_ratio"]
    assert isinstance(ratio, float)
    assert 0 < ratio <= strict.hit_blocks / strict.blocks


def test_small_pools_evict_and_the_host_tier_gives_back(tmp_path: Path) -> None:
    lines = chats(200, seed=3, block_tokens=BLOCK)
    trace = write_trace(tmp_path / "trace.jsonl", lines)
    report = replay(
        tmp_path, trace, "--schedulers", 2, "--block-tokens", BLOCK, "--page-size", BLOCK,
        "--pool-pages", 40,
    )  # fmt: skip
    hits = report["hit_tokens"]
    assert isinstance(hits, dict)
    assert hits["own"] > 0
    assert hits["host"] > 0
    assert hits["peer"] > 0
    assert report["pages_wrong"] == 0


def test_a_malformed_line_starts_nothing_and_is_named(tmp_path: Path) -> None:
    trace = write_trace(tmp_path / "trace.jsonl", chats(3, seed=1, block_tokens=512))
    with trace.open("a") as file:
        file.write('{"timestamp": 30, "input_length": 5}\n')
    result = treecored(tmp_path / "tmp", "replay", trace, "--json")
    assert (result.status, result.stdout) == (2, "")
    assert result.stderr == (
        f"treecored: {trace}:4: Object missing required field `output_length`\n"
    )


@pytest.mark.slow
@pytest.mark.skipif(not REAL_TRACE.exists(), reason=f"{REAL_TRACE.name} is not beside the project")
@pytest.mark.parametrize(("flags", "caches"), [((), 1), (("--thin",), 1), (("--private",), 4)])
def test_the_beginning_of_a_real_trace_hits_what_a_dictionary_hits(
    tmp_path: Path, flags: tuple[str, ...], caches: int
) -> None:
    with REAL_TRACE.open() as file:
        raw = [json.loads(line) for line, _ in zip(file, range(300), strict=False)]
    lines = [Line(line["input_length"], line["hash_ids"]) for line in raw]
    report = replay(tmp_path, REAL_TRACE, "--schedulers", 4, "--limit", 300, *flags)
    assert_hits(report, lines, caches=caches, page_size=512, block_tokens=512)
