"""The workload is the same for the same seed, and has the shape that the demo needs."""

import os
import subprocess
import sys
from hashlib import sha256

import pytest

from directory.cli.workload import Turn, Workload, longest_pages, unique_pages

PRINT_DIGEST = (
    "from tests.unit.directory.cli.test_workload import turns, digest; print(digest(turns(5)))"
)


def turns(seed: int, *, requests: int = 120, page_size: int = 16) -> list[Turn]:
    return Workload(seed=seed, schedulers=3, page_size=page_size, requests=requests).turns()


def digest(found: list[Turn]) -> str:
    return sha256(repr(found).encode()).hexdigest()


@pytest.mark.parametrize("hash_seed", ["1", "2"])
def test_the_same_seed_gives_the_same_turns_in_every_process(hash_seed: str) -> None:
    command = [sys.executable, "-c", PRINT_DIGEST]
    environment = {
        **os.environ,
        "PYTHONHASHSEED": hash_seed,
        "PYTHONPATH": os.pathsep.join(sys.path),
    }
    output = subprocess.run(command, env=environment, capture_output=True, check=True, text=True)
    assert output.stdout.strip() == digest(turns(5))


def test_another_seed_gives_other_turns() -> None:
    assert turns(1) != turns(2)


def test_there_are_as_many_turns_as_asked_for_and_all_schedulers_serve() -> None:
    found = turns(3, requests=97)
    assert len(found) == 97
    assert {turn.scheduler for turn in found} == {0, 1, 2}


def test_each_turn_of_a_chat_continues_what_was_said_before() -> None:
    said: dict[int, bytes] = {}
    for turn in turns(4):
        before = said.get(turn.chat)
        if before is not None:
            assert turn.prompt.startswith(before)
            assert len(turn.prompt) > len(before)
        said[turn.chat] = turn.prompt + turn.answer
    assert len(said) < 120


def test_chats_share_system_prompts_and_documents() -> None:
    first: dict[int, bytes] = {}
    for turn in turns(6):
        first.setdefault(turn.chat, turn.prompt)
    assert len({prompt[: 4 * 16] for prompt in first.values()}) == 2
    openings = {prompt[: 4 * 16 * 12] for prompt in first.values()}
    assert 2 < len(openings) < len(first)


def test_a_chat_does_not_speak_twice_in_a_row() -> None:
    found = turns(7)
    for index, turn in enumerate(found[4:], 4):
        assert turn.chat not in {before.chat for before in found[index - 4 : index]}


def test_lengths_scale_with_the_page_size() -> None:
    for page_size in (1, 16, 64):
        found = turns(8, page_size=page_size)
        assert 15 <= longest_pages(found, page_size) <= 60


def test_pages_are_counted_by_their_whole_path() -> None:
    def turn(prompt: str, answer: str = "") -> Turn:
        return Turn(0, 0, prompt.encode("utf-32-le"), answer.encode("utf-32-le"))

    assert unique_pages([turn("aabb")], 2) == 2
    assert unique_pages([turn("aabb"), turn("aabbc"), turn("bb")], 2) == 3
    assert unique_pages([turn("aab", "b"), turn("bbaa")], 2) == 4
    assert longest_pages([turn("aabb"), turn("aabb", "c")], 2) == 3
