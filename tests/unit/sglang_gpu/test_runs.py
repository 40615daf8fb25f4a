"""The runs with a real pair: what is asked, how answers are judged, what is packed and shown."""

from __future__ import annotations

import json
from pathlib import Path
from typing import cast

import pytest

from benchmarks.sglang_gpu import pack, workload
from benchmarks.sglang_gpu.groups import GROUPS
from benchmarks.sglang_gpu.ids import above, judge
from benchmarks.sglang_gpu.scales import SCALES
from benchmarks.sglang_gpu.show import show
from tests.sglang import wire
from tests.sglang.engines import Engine
from tests.sglang.environments import VERSIONS


class Scripted:
    """An engine that answers at once with what it was asked for, or fails."""

    def __init__(self, name: str, fail: bool = False) -> None:
        self.name = name
        self.asked: list[tuple[int, ...]] = []
        self._fail = fail
        self._open: dict[str, int] = {}

    def submit(self, tokens: list[int], new: int) -> str:
        self.asked.append(tuple(tokens))
        name = f"{self.name}-{len(self.asked)}"
        self._open[name] = new
        return name

    def collect_any(self, names: list[str], deadline_s: float) -> wire.Report:
        name = names[0]
        new = self._open.pop(name)
        if self._fail:
            return wire.Failed(name, "503")
        return wire.Output(name, [1] * new, 16, {"device": 16, "host": 8}, "length")


def test_prompts_reach_from_the_shortest_to_the_longest_and_some_share_a_beginning() -> None:
    asked = workload.questions(60, 100, 20_000, seed=1)
    lengths = [len(question.prompt) for question in asked]
    assert (min(lengths), max(lengths)) == (100, 20_000)
    beginnings = [question.prompt[:75] for question in asked]
    assert len(set(beginnings)) < len(beginnings)
    assert asked == workload.questions(60, 100, 20_000, seed=1)
    assert all(max(question.prompt) <= workload.LAST_TOKEN for question in asked)


def test_the_longest_prompt_fits_into_a_packet() -> None:
    tokens = [workload.LAST_TOKEN] * max(SCALES["full"].ttft_lengths)
    wire.packed(wire.Generate("ttft-a-1", tokens, 1))


def test_each_question_is_visited_as_often_as_wanted() -> None:
    asked = workload.questions(20, 10, 100, seed=2)
    order = [question.number for question in workload.visits(asked, 3, seed=2)]
    assert sorted(order) == sorted(list(range(20)) * 3)
    assert order != sorted(order)


def test_a_drive_asks_engines_that_have_not_seen_a_prompt_first() -> None:
    engines = [Scripted("a"), Scripted("b")]
    asked = workload.visits(workload.questions(10, 10, 50, seed=3), 2, seed=3)
    drive = workload.Drive(cast(list[Engine], engines), asked, 3, under_way=4)
    answers = drive.run()
    assert (answers.answered, answers.failed) == (20, [])
    assert all(names == {"a", "b"} for names in drive.visited.values())
    assert set(engines[0].asked) == set(engines[1].asked)


def test_what_a_lost_engine_had_under_way_is_asked_of_the_other() -> None:
    engines = [Scripted("a"), Scripted("b")]
    asked = workload.questions(10, 10, 50, seed=4)
    drive = workload.Drive(cast(list[Engine], engines), asked, 4, under_way=6)
    drive.run(lambda: len(drive.open) >= 5, drain=False)
    lost = drive.lose(cast(Engine, engines[0]))
    assert lost > 0
    assert drive.run().answered == 10


def test_a_request_that_fails_is_told_and_not_counted() -> None:
    engines = [Scripted("a", fail=True)]
    asked = workload.questions(3, 10, 50, seed=5)
    answers = workload.Drive(cast(list[Engine], engines), asked, 5, under_way=2).run()
    assert (answers.answered, len(answers.failed)) == (0, 3)


def test_only_prompts_for_which_stock_agrees_with_itself_are_an_oracle() -> None:
    answers = workload.Answers()
    answers.ids = {
        1: [([1, 2], 0, 0), ([1, 2], 16, 16), ([9, 9], 16, 0)],
        2: [([5, 5], 16, 16)],
    }
    found = judge(answers, {1: [1, 2], 2: [4, 4]}, agree={1})
    assert found["visits"] == {"cold": 1, "restored": 1, "own pool": 1}
    assert found["differing"] == {"own pool": 1}
    assert found["differing_share"] == 0.5


@pytest.mark.parametrize(
    ("ours", "stock", "more"),
    [(150, 146, False), (160, 146, False), (180, 146, True), (9, 99, False)],
)
def test_more_differing_answers_than_chance_gives_are_too_many(
    ours: int, stock: int, more: bool
) -> None:
    def share(count: int) -> dict[str, float]:
        return {"all_visits": 600, "all_differing": count, "differing_share": count / 600}

    assert above(share(ours), share(stock)) is more


@pytest.mark.parametrize("name", ["sglang/multimodal_gen/a.py", "sgl_kernel/sm100/ops.so"])
def test_what_a_llama_never_touches_is_not_packed(name: str) -> None:
    assert pack._dropped(name)
    assert not pack._dropped("sglang/srt/server_args.py")


def test_the_release_that_is_packed_is_one_that_is_tested() -> None:
    (sglang,) = [line for line in pack._wanted() if line.startswith("sglang==")]
    assert sglang.removeprefix("sglang==") in VERSIONS


def test_every_result_is_shown_a_failed_one_with_its_reason(tmp_path: Path) -> None:
    comparison = {"compared": 12, "wrong": 1, "unknown": 0, "by": {"peer, whole": 12}}
    exact = {
        "ok": False, "digests": comparison, "daemon": {"pool_pages_evicted": 7}, "requests": 3,
        "failed_count": 0, "cached_tokens": 5, "prompt_tokens": 9, "seconds": 1.0,
    }  # fmt: skip
    (tmp_path / "exact-held-16-overlap.json").write_text(json.dumps(exact))
    (tmp_path / "ttft.json").write_text(json.dumps({"ok": False, "error": "it burns"}))
    text = show(tmp_path)
    assert "exact-held-16-overlap" in text
    assert "NOT OK" in text
    assert "ttft: it burns" in text


def test_groups_cover_every_page_size_load_and_schedule() -> None:
    for loads in ("held", "layerwise"):
        for page in (1, 16, 64):
            for schedule in ("overlap", "serial"):
                assert f"exact-{loads}-{page}-{schedule}" in GROUPS
