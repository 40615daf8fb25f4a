"""A trace is read as a whole before anything starts, and every flaw is named with its line."""

import json
from pathlib import Path

import pytest

from directory.analytics import traces
from directory.cli.trace import PageCount, TraceError, TraceRequest, read_trace

GOOD = {"timestamp": 0, "input_length": 1000, "output_length": 5, "hash_ids": [7, 9]}


def write(path: Path, *lines: object) -> Path:
    path.write_text("".join(f"{x if isinstance(x, str) else json.dumps(x)}\n" for x in lines))
    return path


def request(*blocks: int, length: int) -> TraceRequest:
    return TraceRequest(b"".join(b.to_bytes(4, "little") for b in blocks), length)


def test_block_ids_are_renumbered_in_order_of_appearance(tmp_path: Path) -> None:
    more = {**GOOD, "input_length": 1536, "hash_ids": [7, 1 << 63, 9], "extra": None}
    found = read_trace(write(tmp_path / "t", GOOD, "", more, "  "))
    assert found == [request(0, 1, length=1000), request(0, 2, 1, length=1536)]
    assert list(found[1].block_ids) == [0, 2, 1]


def test_a_limit_leaves_the_rest_of_the_file_unread(tmp_path: Path) -> None:
    assert len(read_trace(write(tmp_path / "t", GOOD, GOOD, "junk"), limit=2)) == 2


def test_other_block_sizes_divide_the_prompt_otherwise(tmp_path: Path) -> None:
    path = write(tmp_path / "t", {**GOOD, "input_length": 65})
    assert len(read_trace(path, block_tokens=64)) == 1
    with pytest.raises(TraceError, match="makes 1 blocks of 512 tokens, but hash_ids has 2"):
        read_trace(path)


@pytest.mark.parametrize(
    ("line", "what"),
    [
        ("{", "not a JSON object: "),
        ("GET / HTTP/1.1", "not a JSON object: "),
        (json.dumps(GOOD) + " 1", "not a JSON object: "),
        ("[]", "Expected `object`, got `array`"),
        ({"timestamp": 0}, "missing required field `input_length`"),
        ({**GOOD, "timestamp": None}, "timestamp: Expected `float`, got `null`"),
        ({**GOOD, "timestamp": -1}, "timestamp: "),
        ({**GOOD, "input_length": "5"}, "input_length: Expected `int`, got `str`"),
        ({**GOOD, "input_length": 1.5}, "input_length: Expected `int`, got `float`"),
        ({**GOOD, "input_length": 0, "hash_ids": []}, "input_length: Expected `int` >= 1"),
        ({**GOOD, "input_length": 1 << 40}, "input_length: "),
        ({**GOOD, "output_length": -1}, "output_length: Expected `int` >= 0"),
        ({**GOOD, "hash_ids": 5}, "hash_ids: Expected `array`, got `int`"),
        ({**GOOD, "hash_ids": [7, -9]}, "hash_ids[1]: Expected `int` >= 0"),
        ({**GOOD, "hash_ids": [7]}, "input_length 1000 makes 2 blocks of 512 tokens, but hash_ids"),
        ('{"a": ' * 5000, "nested too deeply"),
    ],
)
def test_a_malformed_line_is_named_with_file_number_and_flaw(
    tmp_path: Path, line: object, what: str
) -> None:
    path = write(tmp_path / "trace.jsonl", GOOD, "", GOOD, line, GOOD)
    with pytest.raises(TraceError) as caught:
        read_trace(path)
    message = str(caught.value)
    assert message.startswith(f"{path}:4: ")
    assert what in message
    assert "\n" not in message


def test_bytes_that_are_no_text_are_a_malformed_line(tmp_path: Path) -> None:
    path = tmp_path / "t"
    path.write_bytes(b'{"timestamp": 0, "\xff": 1}\n')
    with pytest.raises(TraceError, match=r":1: "):
        read_trace(path)


def test_a_line_without_end_is_not_read_into_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(traces, "LINE_BYTES_MAX", 100)
    with pytest.raises(TraceError, match=r":2: the line is longer than 100 bytes"):
        read_trace(write(tmp_path / "t", GOOD, "x" * 101))


@pytest.mark.parametrize("text", ["", "\n\n  \n"])
def test_a_trace_without_requests_is_refused_in_one_sentence(tmp_path: Path, text: str) -> None:
    (tmp_path / "t").write_text(text)
    with pytest.raises(TraceError, match="is empty"):
        read_trace(tmp_path / "t")


def test_a_missing_file_and_a_directory_are_refused_in_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match="nowhere does not exist"):
        read_trace(tmp_path / "nowhere")
    with pytest.raises(TraceError, match="is a directory: give the trace file itself"):
        read_trace(tmp_path)
    with pytest.raises(TraceError, match="cannot be read: Not a directory"):
        read_trace(write(tmp_path / "t", GOOD) / "below")


@pytest.mark.parametrize(
    ("page_size", "pages"),
    # Blocks of 10 tokens. Paths: 0 1 2(5 tokens), then 0 1 2(all) 3(2 tokens), then 0 4(all).
    [(10, 4), (5, 8), (7, 5), (25, 1), (100, 0)],
)
def test_unique_pages_are_counted_by_path_at_any_page_size(page_size: int, pages: int) -> None:
    count = PageCount(page_size, 10)
    requests = [
        request(0, 1, 2, length=25),
        request(0, 1, 2, 3, length=32),
        request(0, 4, length=20),
    ]
    for one in requests:
        count.add(one)
    # Counted once more the plain way: pages as tuples of all tokens up to their end.
    paths = set()
    for one in requests:
        tokens = [b * 10 + i for b in one.block_ids for i in range(10)][: one.length]
        ends = range(page_size, len(tokens) + 1, page_size)
        paths |= {tuple(tokens[:end]) for end in ends}
    assert count.unique_pages == len(paths) == pages
    assert count.longest_pages == -(-32 // page_size)


def test_an_equal_block_after_another_path_is_another_page() -> None:
    count = PageCount(10, 10)
    count.add(request(0, 1, length=20))
    count.add(request(2, 1, length=20))
    assert count.unique_pages == 4
