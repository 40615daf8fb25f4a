"""A contestant that cannot do what it is told says why, and nothing is left of it."""

import sys

import pytest

from benchmarks.contestants import Contestant, ContestantEnded

ANSWERS = "import sys\nfor line in sys.stdin: print('[1.5]', flush=True)"
PANICS = (
    "import sys\nsys.stdin.readline()\nsys.stderr.write('what came before\\n')\nraise OSError(7)"
)


def program(text: str) -> Contestant:
    return Contestant([sys.executable, "-c", text])


def test_each_line_is_answered_by_one() -> None:
    with program(ANSWERS) as contestant:
        assert contestant.tell("build", 1) == [1.5]
        assert contestant.tell("run", "match", 3) == [1.5]


def test_one_that_ends_says_last_why() -> None:
    with program(PANICS) as contestant, pytest.raises(ContestantEnded, match=r"^OSError: 7$"):
        contestant.tell("build", 1)


def test_one_that_ends_without_a_word_is_named_by_its_status() -> None:
    with program("raise SystemExit(3)") as contestant:
        with pytest.raises(ContestantEnded, match="exit status 3"):
            contestant.tell("build", 1)
        with pytest.raises(ContestantEnded):
            contestant.tell("build", 1)
