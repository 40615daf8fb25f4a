"""Files of token ids: what is one, and what is named for being none."""

from array import array
from pathlib import Path

import pytest

from directory.cli.explain_now import TOKEN_MAX, BadTokens, read_tokens


def tokens(tmp_path: Path, text: str) -> list[int]:
    file = tmp_path / "tokens"
    file.write_text(text, encoding="utf-8")
    return array("I", read_tokens(file)).tolist()


@pytest.mark.parametrize("text", ["[1, 20, 300]", "1 20 300", "1\n20\n300\n", " [1,20,\n300 ] "])
def test_a_json_list_and_numbers_with_blanks_between_are_tokens(tmp_path: Path, text: str) -> None:
    assert tokens(tmp_path, text) == [1, 20, 300]


def test_the_largest_token_is_one(tmp_path: Path) -> None:
    assert tokens(tmp_path, str(TOKEN_MAX)) == [TOKEN_MAX]


@pytest.mark.parametrize(
    ("text", "item"),
    [
        ("-1 2", "-1"),
        ("1 2 x", "'x'"),
        ("Write 3 words about 20 birds.", "'Write'"),
        ("[1, 2.5]", "2.5"),
        ("[1, true]", "True"),
        ("[1, [2]]", r"\[2\]"),
        ("[1, -2]", "-2"),
        ("1, 2", "'1,'"),
        ("4294967296", "4294967296"),
        ("9" * 5000, "'9{50,60}"),
        ("[1, 2", r"'\[1,'"),
        ("\u0663", "'\u0663'"),
        ('{"tokens": [1]}', "'{\"tokens\":'"),
    ],
)
def test_anything_else_is_named(tmp_path: Path, text: str, item: str) -> None:
    with pytest.raises(BadTokens, match=f"tokens: {item}.*is no token id") as raised:
        tokens(tmp_path, text)
    assert len(str(raised.value)) < 300


@pytest.mark.parametrize("text", ["", "  ", "[]"])
def test_nothing_is_no_prompt(tmp_path: Path, text: str) -> None:
    with pytest.raises(BadTokens, match="has no token ids"):
        tokens(tmp_path, text)
