"""The readers of public traces: what each format says, and each way in which a line is wrong."""

import gzip
import json
from collections.abc import Sequence
from pathlib import Path

import pytest

from directory.analytics.conversations import LoopOptions, play, read_conversations
from directory.analytics.record import Access
from directory.analytics.source import Source, guess
from directory.analytics.traces import (
    AS_LISTED,
    BlockOptions,
    SourceError,
    read_bailian,
    read_mooncake,
)

MOONCAKE = [
    {"timestamp": 0, "input_length": 1100, "output_length": 5, "hash_ids": [0, 1, 2]},
    {"timestamp": 1500, "input_length": 1025, "output_length": 5, "hash_ids": [0, 1, 9]},
]
BAILIAN = [
    {
        "chat_id": 7, "parent_chat_id": -1, "timestamp": 61.114, "input_length": 40,
        "output_length": 2, "type": "text", "turn": 1, "hash_ids": [5, 6, 7],
    }
]  # fmt: skip
COMPACT = [
    {"conv": "a", "block_size": 64, "tool_tokens": 1, "system_tokens": 1, "n": 2},
    [0.0, "", 200, 3, 0, [[1, 3]]],
    [500.0, "agent_001", 330, 3, 2, [[10, 3]]],
    {"conv": "b", "block_size": 64, "tool_tokens": 1, "system_tokens": 1, "n": 1},
    [0.0, "", 200, 3, 0, [[1, 3]]],
]
ORIGINAL = {
    "id": "a",
    "block_size": 64,
    "requests": [
        {"t": 0.0, "type": "s", "in": 200, "out": 3, "hash_ids": [1, 2, 3]},
        {
            "t": 500.0, "type": "subagent", "agent_id": "agent_001",
            "requests": [
                {"t": 500.0, "type": "n", "in": 330, "out": 3, "hash_ids": [1, 2, 10, 11, 12]}
            ],
        },
    ],
}  # fmt: skip


def lines(path: Path, rows: Sequence[object]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def read(path: Path, options: BlockOptions = AS_LISTED) -> list[Access]:
    frames = list(Source(path, options=options).frames())
    assert all(isinstance(frame, Access) for frame in frames)
    return frames  # type: ignore[return-value]


def test_a_mooncake_line_becomes_whole_pages_in_milliseconds(tmp_path: Path) -> None:
    first, second = read(lines(tmp_path / "t", [*MOONCAKE]))
    assert (first.at_us, second.at_us) == (0, 1_500_000)
    assert (first.tokens, first.page_tokens, first.blocks) == (1100, 512, 3)
    assert len(first.path) == 2
    assert first.path == second.path
    assert first.hit.total == 0


def test_a_partial_block_is_a_page_only_when_every_block_is_asked_for(tmp_path: Path) -> None:
    first, second = read(lines(tmp_path / "t", [*MOONCAKE]), BlockOptions(every_block=True))
    assert len(first.path) == 3
    assert first.path[:2] == second.path[:2]
    assert first.path[2] != second.path[2]


def test_a_bailian_line_is_in_seconds_and_has_its_type_as_tenant(tmp_path: Path) -> None:
    (record,) = read(lines(tmp_path / "t", [*BAILIAN]))
    assert (record.at_us, record.tenant, record.page_tokens) == (61_114_000, "text", 16)
    assert len(record.path) == 2


def test_a_bailian_file_says_its_block_size_in_its_name(tmp_path: Path) -> None:
    rows = [{**BAILIAN[0], "hash_ids": [5, 6]}]
    path = lines(tmp_path / "qwen_traceA_blksz_32.jsonl", [*rows])
    (record,) = read_bailian(path)
    assert record.page_tokens == 32


def test_gzip_is_unpacked_whatever_the_name(tmp_path: Path) -> None:
    path = tmp_path / "t"
    path.write_bytes(gzip.compress(b"".join(json.dumps(row).encode() + b"\n" for row in MOONCAKE)))
    assert len(read(path)) == 2


def test_compact_and_original_conversations_are_the_same_requests(tmp_path: Path) -> None:
    compact = read(lines(tmp_path / "compact.jsonl", COMPACT[:3]))
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "trace_1.json").write_text(json.dumps(ORIGINAL, indent=1))
    lines(tmp_path / "one_a_line.jsonl", [ORIGINAL])
    for other in ("folder", "folder/trace_1.json", "one_a_line.jsonl"):
        assert read(tmp_path / other) == compact
    assert compact[0].path[:2] == compact[1].path[:2]
    assert [record.request for record in compact] == ["a", "a/agent_001"]


def test_ids_are_local_to_a_conversation_unless_the_file_says_global(tmp_path: Path) -> None:
    both = read(lines(tmp_path / "t", COMPACT))
    firsts = [record for record in both if len(record.path) == 3]
    assert len(firsts) == 2
    assert firsts[0].path[0] != firsts[1].path[0]
    shared = [{**ORIGINAL, "id": name, "hash_id_scope": "global"} for name in "ab"]
    paths = {tuple(record.path) for record in read(lines(tmp_path / "g", [*shared]))}
    assert len(paths) == 2
    local = [
        {key: value for key, value in each.items() if key != "hash_id_scope"} for each in shared
    ]
    paths = {tuple(record.path) for record in read(lines(tmp_path / "l", [*local]))}
    assert len(paths) == 4


def test_users_wait_as_the_recording_did_but_no_longer_than_the_cap(tmp_path: Path) -> None:
    conversations = read_conversations(lines(tmp_path / "t", COMPACT))
    one_user = [record.at_us for record in play(conversations, LoopOptions(users=1))]
    two_users = [record.at_us for record in play(conversations, LoopOptions(users=2))]
    assert sorted(one_user) == [0, 60_000_000, 60_000_000] or one_user == [0, 0, 60_000_000]
    assert two_users == [0, 0, 60_000_000]
    uncapped = play(conversations, LoopOptions(users=2, gap_s_max=1000))
    assert [record.at_us for record in uncapped] == [0, 0, 500_000_000]


def test_a_seed_always_gives_the_same_order(tmp_path: Path) -> None:
    heads = [{**COMPACT[3], "conv": f"c{number}"} for number in range(20)]  # type: ignore[dict-item]
    rows: list[object] = [row for head in heads for row in (head, COMPACT[4])]
    conversations = read_conversations(lines(tmp_path / "t", rows))

    def order(seed: int) -> list[str]:
        loop = LoopOptions(users=3, seed=seed)
        return [record.request for record in play(conversations, loop)]

    assert order(1) == order(1)
    assert order(1) != order(2)
    assert sorted(order(1)) == sorted(order(2))


@pytest.mark.parametrize(
    ("rows", "kind"),
    [
        (MOONCAKE, "mooncake"),
        (BAILIAN, "bailian"),
        (COMPACT, "kv-cache-tester"),
        ([ORIGINAL], "kv-cache-tester"),
    ],
)
def test_a_format_is_told_by_its_content(tmp_path: Path, rows: Sequence[object], kind: str) -> None:
    assert guess(lines(tmp_path / "anything", rows)) == kind


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("{", "not a JSON object"),
        ("[1]", "neither an access log nor a trace"),
        ('{"timestamp": 0, "input_length": 1, "output_length": 0}', "hash_ids"),
        (json.dumps({**MOONCAKE[0], "hash_ids": [0]}), "makes 3 blocks of 512 tokens"),
        (json.dumps({**MOONCAKE[0], "timestamp": -1}), "timestamp: "),
        (json.dumps({**MOONCAKE[0], "input_length": 0}), "input_length: "),
        ("[" * 100_000, "nested too deeply|neither"),
        ("\xff", "neither|not a JSON object"),
    ],
)
def test_a_wrong_line_is_named_with_file_and_number(tmp_path: Path, line: str, words: str) -> None:
    path = tmp_path / "t"
    path.write_bytes(line.encode("latin-1") + b"\n")
    with pytest.raises(SourceError, match=f"^{path}.*({words})"):
        list(Source(path).frames())


def test_the_number_of_a_wrong_line_counts_blank_ones(tmp_path: Path) -> None:
    path = tmp_path / "t"
    path.write_text(f"{json.dumps(MOONCAKE[0])}\n\n{{}}\n")
    with pytest.raises(SourceError, match=f"^{path}:3: "):
        list(read_mooncake(path))


@pytest.mark.parametrize(
    ("rows", "words"),
    [
        ([COMPACT[1]], "neither"),
        ([COMPACT[0], [0.0, "", 1, 1, 5, []]], r"request 1: shares 5 blocks with a request of 0"),
        ([COMPACT[0], [0.0, "", 1, 1, 0, [[0, 1 << 40]]]], "more than"),
        ([COMPACT[0], [0.0]], "Array|array"),
        ([{"conv": "a", "block_size": 0}], "block_size"),
    ],
)
def test_a_wrong_conversation_is_named(tmp_path: Path, rows: Sequence[object], words: str) -> None:
    with pytest.raises(SourceError, match=words):
        read(lines(tmp_path / "t", rows))


@pytest.mark.parametrize(
    ("name", "words"),
    [("missing", "does not exist"), ("empty", "is empty"), ("folder", "has neither")],
)
def test_what_is_no_file_is_one_clear_sentence(tmp_path: Path, name: str, words: str) -> None:
    (tmp_path / "empty").touch()
    (tmp_path / "folder").mkdir()
    with pytest.raises(SourceError, match=words):
        guess(tmp_path / name)


def test_gzip_that_is_cut_off_is_named(tmp_path: Path) -> None:
    path = tmp_path / "t.gz"
    packed = gzip.compress("".join(json.dumps(row) + "\n" for row in MOONCAKE * 500).encode())
    path.write_bytes(packed[:-20])
    with pytest.raises(SourceError, match="cannot be read"):
        list(Source(path).frames())


def test_a_limit_ends_the_reading_before_a_wrong_line(tmp_path: Path) -> None:
    path = tmp_path / "t"
    path.write_text(f"{json.dumps(MOONCAKE[0])}\n{{}}\n")
    assert len(read(path, BlockOptions(limit=1))) == 1
