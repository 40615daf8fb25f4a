"""The timed groups: ratios and their bounds, cores, the timeline, costs and factors."""

from __future__ import annotations

import os
import random
import re
import select
import subprocess
from pathlib import Path
from typing import Any

import pytest

from benchmarks.sglang_gpu import cache_cost, loaded, plot, rows, timeline, turns
from benchmarks.sglang_gpu.cores import Cores, physical
from benchmarks.sglang_gpu.ratios import ratio_of
from benchmarks.sglang_gpu.show import show
from tests.sglang import wire
from transfer.ipc.marks import Marks


def test_a_ratio_of_paired_columns_has_a_bound_that_their_common_noise_does_not_widen() -> None:
    draw = random.Random(3)
    common = [draw.uniform(40, 80) for _ in range(40)]
    ours = [1.05 * c for c in common]
    tight = ratio_of(ours, common)
    assert tight.value == pytest.approx(1.05)
    assert tight.upper == pytest.approx(1.05)
    assert tight.within(1.051)
    assert not tight.within(1.04)
    shuffled = draw.sample(common, len(common))
    loose = ratio_of(ours, shuffled)
    assert loose.upper > tight.upper
    assert loose == ratio_of(ours, shuffled), "the same samples have the same bound"


def test_columns_that_are_no_pairs_have_no_ratio() -> None:
    with pytest.raises(ValueError, match="no pairs"):
        ratio_of([1.0], [1.0, 2.0])
    with pytest.raises(ValueError, match="no pairs"):
        ratio_of([], [])


def test_only_columns_that_were_measured_are_judged_by_the_goal_of_their_length() -> None:
    column = {"own": [40.0] * 30, "peer": [45.0] * 30}
    short, long = rows.judged(column, long=False), rows.judged(column, long=True)
    assert list(short) == ["peer / own"]
    assert (short["peer / own"]["ok"], long["peer / own"]["ok"]) == (False, True)
    assert short["peer / own"]["pairs"] == 30


def test_halves_of_a_core_go_together_and_neighbours_do_where_halves_are_hidden(
    tmp_path: Path,
) -> None:
    for cpu, siblings in enumerate(("0,4", "1,5", "2,6", "3,7", "0,4", "1,5", "2,6", "3,7")):
        (tmp_path / f"cpu{cpu}/topology").mkdir(parents=True)
        (tmp_path / f"cpu{cpu}/topology/thread_siblings_list").write_text(siblings)
    assert physical(range(8), tmp_path) == [(0, 1, 4), (2, 3, 6), (5,), (7,)]
    assert physical(range(5), tmp_path / "absent") == [(0, 1), (2, 3), (4,)]


def test_every_engine_is_moved_to_cores_of_its_own_and_the_rest_is_everybody_elses() -> None:
    each = sorted(os.sched_getaffinity(0))
    if len(each) < 2:
        pytest.skip("one core cannot be divided")
    cores = Cores(1, [(cpu,) for cpu in each])
    crowded = Cores(len(each) + 1, [(cpu,) for cpu in each])
    with subprocess.Popen(["sleep", "60"]) as one, subprocess.Popen(["sleep", "60"]) as rest:
        try:
            crowded.move(0, [one.pid])
            assert os.sched_getaffinity(one.pid) == set(each), "fewer cores than shares"
            cores.move(0, [one.pid])
            cores.move(None, [rest.pid])
            seen = os.sched_getaffinity(one.pid), os.sched_getaffinity(rest.pid)
        finally:
            one.kill()
            rest.kill()
    assert not seen[0] & seen[1]
    assert seen[0] | seen[1] == set(each)


def test_the_timeline_lays_the_marks_of_all_processes_beside_one_another(tmp_path: Path) -> None:
    def marks(*lines: str, pid: int) -> None:
        (tmp_path / f"{pid}.marks").write_text("".join(f"{line}\n" for line in lines))

    marks("1000000 ask peer 64", "9000000 told x", "20000000 ask host 64", "26000000 told y", pid=1)
    marks("2000000 seen x", "3000000 asked x 5", "21000000 seen y", pid=2)
    marks(
        "100 taken 3 backup", "4000000 taken 7 peer_copy", "4500000 slice 7 10",
        "4600000 slice 3 10", "5000000 slice 7 10", "22000000 landed 8 1", "23000000 landed 8 2",
        pid=3,
    )  # fmt: skip
    told = timeline.told(tmp_path)
    assert told["peer 64"] == {
        "seen": 1.0, "asked": 2.0, "taken": 3.0, "first slice": 3.5, "last slice": 4.0, "told": 8.0,
    }  # fmt: skip
    assert told["host 64"] == {"seen": 1.0, "first layer": 2.0, "last layer": 3.0, "told": 6.0}
    assert timeline.as_text(told).startswith("peer 64: seen 1.00, asked 2.00")


def test_real_marks_can_be_read(tmp_path: Path) -> None:
    marks = Marks()
    marks.begin_in(str(tmp_path))
    marks("ask", "own", 64)
    marks("seen", "r")
    marks("told", "r")
    assert list(timeline.told(tmp_path)["own 64"]) == ["seen", "told"]


class Scheduler:
    """As much of SGLang's as is counted."""

    def __init__(self) -> None:
        self.waiting_queue: list[str] = []
        self.chunked_req = None
        self.running_batch = self
        self.last_batch = None
        self.tree_cache = self

    def is_empty(self) -> bool:
        return True

    def match_prefix(self) -> int:
        return sum(range(20_000)) + self.inc_lock_ref()

    def inc_lock_ref(self) -> int:
        return sum(range(20_000))

    def cache_finished_req(self) -> None:
        """It has ended."""

    def check_hicache_events(self) -> int:
        return sum(range(20_000))


def test_what_a_cache_costs_is_counted_once_and_not_while_nobody_asks_for_anything(
    tmp_path: Path,
) -> None:
    cost = cache_cost.Cost(tmp_path / "cost")
    scheduler: Any = Scheduler()
    cache_cost.watch(cost, scheduler)
    scheduler.check_hicache_events()
    assert cost.ns == 0, "an idle scheduler asks as often as it can"
    scheduler.match_prefix()
    once = cost.ns
    assert once > 0, "this is for a request, which may not be in the queue any more"
    scheduler.waiting_queue.append("r")
    scheduler.check_hicache_events()
    assert cost.ns > once
    scheduler.cache_finished_req()
    cost._save()
    found = cache_cost.read(tmp_path / "cost")
    assert found["requests"] == 1
    assert found["us_a_request"] >= round(once / 1e3, 1)
    assert found["us_a_request_by"].keys() == {
        "match_prefix", "check_hicache_events", "cache_finished_req",
    }, "the lock within the match is the match's"  # fmt: skip
    assert cache_cost.read(tmp_path / "absent") == {}


class Talker:
    """A replica that answers at once, over a pipe that `select` can see."""

    def __init__(self) -> None:
        self._out, self._in = os.pipe()
        self.asked: list[list[int]] = []
        self._open: dict[str, wire.Report] = {}

    def fileno(self) -> int:
        return self._out

    def submit(self, tokens: list[int], new: int, *, stream: bool) -> str:
        assert stream
        self.asked.append(list(tokens))
        name = f"{id(self)}-{len(self.asked)}"
        self._open[name] = wire.Output(name, [7] * new, 16, {}, "length", (0.25, 0.5))
        os.write(self._in, b"x")
        return name

    def take_ended(self, names: Any) -> dict[str, wire.Report]:
        if select.select([self._out], [], [], 0)[0]:
            os.read(self._out, 64)
        return {name: self._open.pop(name) for name in list(names) if name in self._open}


def test_conversations_grow_by_the_answer_and_go_to_the_same_replicas_for_every_system() -> None:
    talk = turns.Talk(users=3, turns=4, first=20, more=5, new=2)
    systems = [[Talker(), Talker()] for _ in range(2)]
    drove = [turns.drive(replicas, talk, 5) for replicas in systems]  # type: ignore[arg-type]
    first, second = ([sorted(map(len, one.asked)) for one in replicas] for replicas in systems)
    assert first == second
    assert sorted(n for one in first for n in one) == sorted([20, 27, 34, 41] * 3)
    found = drove[0].as_json(talk)
    assert found["ttft_ms_mean"] == 250.0
    assert (len(drove[0].first_ms), len(drove[0].ttft_ms)) == (3, 9)
    assert found["failed"] == []


def test_factors_are_better_above_one() -> None:
    def one(rate: float, ttft: float) -> dict[str, Any]:
        return {"requests_per_s": rate, "ttft_ms_mean": ttft}

    rounds = {"treecored": [one(10, 50), one(12, 40)], "none": [one(5, 100), one(6, 120)]}
    assert loaded.factors(rounds) == {"none": {"throughput": 2.0, "ttft": 2.5}}


def test_the_headline_is_drawn_from_the_rows_that_are_there() -> None:
    def row(**ms: float) -> dict[str, Any]:
        return {name.replace("_", " "): {"median_ms": value} for name, value in ms.items()}

    picture = plot.svg({"rows": {
        "32768": row(cold=2683.0, own=101.0), "8192": row(cold=267.0, HiCache_L2=55.0, host=50.0),
    }})  # fmt: skip
    assert picture.index("8,192 tokens") < picture.index("32,768 tokens")
    assert picture.count("<rect") == 5
    assert "2,683 ms" in picture
    assert "peer" not in picture
    widths = [float(width) for width in re.findall(r'width="([\d.]+)" height', picture)]
    assert max(widths) == widths[3], "the longest bar is the slowest"
    assert min(widths) > 0


def test_the_rows_are_shown_with_their_ratios(tmp_path: Path) -> None:
    (tmp_path / "rows.json").write_text(
        '{"ok": true, "misses": [], "rows": {"8192": {"own": {"median_ms": 40.1, "ms": [40.1]}}},'
        ' "ratios": {"8192": {"peer / own": {"ratio": 1.05, "upper": 1.08, "goal": 1.1,'
        ' "pairs": 30, "ok": true}}}}'
    )
    text = show(tmp_path)
    assert "40.1" in text
    assert "1.08" in text
